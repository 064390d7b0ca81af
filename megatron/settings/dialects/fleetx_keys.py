# SPDX-License-Identifier: Apache-2.0
"""Translate entries of PaddleFleetX's files to flags, for the command that reads them.

    translate_entries(entries, "train") -> Translated(flags=[("--hidden-size", ["1024"], TheirSetting(...)), ...], ...)

A key becomes one flag, or several keys become flags together, or it is noted or refused with its name and place. Any other
key is unknown, and an error.
"""

import os
import re

from megatron.errors import did_you_mean
from megatron.settings.dialects.fleetx import (
    BELONGS,
    BESIDES,
    GLUE,
    IDLE,
    KNOWN,
    MODULES,
    NAME,
    PARTS,
    RECOMPUTED,
    REFUSED,
    SHAPE,
    TABLES,
    TEST_FILES,
    USUAL,
    WRITTEN,
    owners_of,
)
from megatron.settings.dialects.fleetx_compression import compression
from megatron.settings.dialects.fleetx_files import COMMAND, Entries
from megatron.settings.dialects.fleetx_translated import Translated
from megatron.settings.dialects.table import VARIABLE, TheirSetting, sentence
from megatron.settings.spelling import NO, YES


def problem_text(one: TheirSetting, why: str) -> str:
    return f"{one.where}{'' if why.startswith('is ') else ':'} {why}"


def translate_entries(entries: Entries, purpose: str = "train", compared: bool = False) -> Translated:
    """Translate entries for the command that reads them: train, task (fine-tuning), generate, evaluate, export, or another.

    compared: the command compares SHAPE with a checkpoint
    """
    out = Translated({key: one for key, one in entries.items() if one.words is not None}, purpose, compared)
    out.emptied = {key: one for key, one in entries.items() if one.words is None}
    if purpose in TABLES:
        _module(out)
    another = out.problems[:] if purpose_of(entries) != purpose else None
    for joint in (compression, *JOINTS.get(purpose, ())):
        joint(out)
    for key in [key for key in out.given if key not in out.taken]:
        _single(out, key)
    for key, one in out.emptied.items():
        if one.where and not owners_of(key) and re.sub(r"^Data\.(Eval|Test)\b", "Data.Train", key) not in PARTS:
            out.problems.append((one, f"is no known key{did_you_mean(key, KNOWN, 0.8)}"))
            out.unknown.add(key)
    moved = [one for key, one in out.given.items() if _is_of_the_other_tree(key) and not one.where.startswith(COMMAND)]
    if len(moved) > 1:
        another, out.unknown = [(moved[0], OTHER_TREE)], {moved[0].key}
    if another:  # report nothing else about a file for another command
        out.notes, out.problems = [], another
    return out


OTHER_TREE = (
    "is a key of examples/transformer, PaddleFleetX's other tree, whose Global has what Engine has in the files that are "
    "read here: give that of ppfleetx/configs/nlp/gpt, or write max_steps, mix_precision, save_load and so on below Engine"
)


def _is_of_the_other_tree(key: str) -> bool:
    return key.startswith("Global.") and key not in KNOWN and f"Engine.{key.removeprefix('Global.')}" in KNOWN


def purpose_of(entries: Entries) -> str:
    """The command that a file is for, by its module or its data."""
    module, name = (entries[key].text.lower() if key in entries else "" for key in ("Model.module", NAME))
    return "task" if name in GLUE else next((of for begin, of in MODULES.items() if module.startswith(begin)), "train")


def _single(out: Translated, key: str) -> None:
    """Translate a key on its own, or note that this command does not use it."""
    table, one, owners = TABLES.get(out.purpose), out.given[key], owners_of(key)
    if not owners:
        out.unknown.add(key)
        return out.refuse(key, f"is no known key{did_you_mean(key, KNOWN, 0.8)}")
    if out.compared and key in SHAPE:
        table = TABLES["train"]
    elif table is None or out.purpose not in owners and not table.knows(key):
        return out.note(BELONGS[owners[0]], key)
    words, values = one.words, table.values(key)
    if {"true", "false"} & set(values):
        if (switch := out.is_on(key)) is None:
            return
        words = [str(switch).lower()]
    flags = table.flags(one._replace(words=words), out.given)
    if flags is not None:
        for flag, said in flags:
            out.say(flag, said, key)
    elif idle := sentence(IDLE, key):
        out.note(idle, key, usual=idle in USUAL)
    else:
        values = [WRITTEN.get(value, value) for value in values]
        refused = sentence(REFUSED, key) or f"there is: {', '.join(values)}{sentence(BESIDES, key) or ''}"
        near = did_you_mean(one.value, values if len(values) > 1 else (), 0.75)
        out.refuse(key, f"'{one.value}' is not supported; {refused}{near}")


# Keys that are translated together ------------------------------------------------------------------------------------


MODULE_NAMES = "GPTModule GPTModuleAuto GPTFinetuneModule GPTEvalModule GPTGenerationModule".split()


def _module(out: Translated) -> None:
    """Check that the file is for this command."""
    value, name = out.word("Model.module", "gptmodule"), out.word(NAME)
    meant = next((of for begin, of in MODULES.items() if value.startswith(begin)), None)
    if out.purpose == "train" and "task" in (meant, purpose_of(out.given)):
        flags = {flag: " ".join(words) for flag, words, _ in translate_entries(out.given, "task").flags}
        words = [f"{flag} {flags[flag]}" for flag in ("--data-path", "--pretrained-checkpoint") if flag in flags]
        command = " ".join(["python finetune.py --task", flags.get("--task", "NAME"), *words])
        out.refuse(NAME if name in GLUE else "Model.module", f"fine-tuning is {command}, with the same -c and -o")
    elif out.purpose == "export" and meant in ("generate", "evaluate"):
        out.say("--kind", ["generation" if meant == "generate" else "lm"], "Model.module")
    elif meant not in (None, out.purpose):
        out.refuse("Model.module", f"'{out.given['Model.module'].value}' is not supported; {BELONGS[meant]}")
    elif meant is None and value not in ("gptmodule", "gptmoduleauto"):
        near = did_you_mean(value, MODULE_NAMES, 0.8)
        own = out.given["Model.module"].value
        out.refuse("Model.module", f"'{own}' is not supported; there is: {', '.join(MODULE_NAMES[:2])}{near}")
    if out.word("Model.name") == "gpt-cn":
        out.note("a GPT is trained, with the vocabulary of --tokenizer-model", "Model.name")
    out.take("Model.module")


def _lengths(out: Translated) -> None:
    """Length of training in steps or epochs. GPTModuleAuto: an epoch has Engine.max_steps, eval_freq counts epochs."""
    steps, epochs, often, batches = (
        f"Engine.{name}" for name in "max_steps num_train_epochs eval_freq eval_iters".split()
    )
    save, save_epoch, mode = "Engine.save_load.save_steps", "Engine.save_load.save_epoch", "Engine.run_mode"
    auto, by_epochs = out.word("Model.module").endswith("auto"), out.word(mode) == "epoch"
    unlimited = [key for key in (save, save_epoch) if out.word(key, "-1").startswith("-")]
    if out.word(steps, "-1") == "-1":
        unlimited.append(steps)
    elif out.word(steps).startswith("-") and not by_epochs:
        out.refuse(steps, f"'{out.given[steps].value}' is no number of steps; -1 stands for those of {epochs}")
        auto = False
    counted = by_epochs or steps in unlimited and epochs in out.given
    if out.word(mode, "step") not in ("step", "epoch"):
        out.refuse(mode, f"'{out.given[mode].value}' is neither step nor epoch")
    if often in out.given and (out.word(often) == "0" or out.word(often).startswith("-")):
        out.say("--eval-iters", ["0"], often)
        out.note(f"{often} asks for no validation", batches)
    elif often in out.given and (by_epochs or auto and counted):
        out.say("--eval-epoch", None, often, mode)
        out.say("--eval-interval", ["0"], often, mode)
    elif often in out.given and auto:
        out.say("--eval-interval", [_times(out.word(often), out.word(steps))], often, steps)
    _tests(out, by_epochs)
    if by_epochs:
        out.say("--full-validation", ["true"], mode)
        out.note("a validation goes over the whole set", batches)
        out.note(f"training is counted in epochs ({mode})", *(key for key in (steps, save) if key not in unlimited))
    if counted:
        out.say("--train-epochs", None if epochs in out.given else ["1"], epochs, mode, steps)
    elif auto and epochs in out.given:
        out.say("--train-iters", [_times(out.word(epochs), out.word(steps))], steps, epochs)
    elif out.word(epochs) != "1":
        out.note(f"training is as long as {steps} says", epochs)
    if not counted:
        epochs_alone = [save_epoch] * (save_epoch not in unlimited)
        out.note("training is counted in steps, not in epochs", *epochs_alone, usual=True)
        out.note(f"{epochs} says how long training is, where it is given", *[steps] * (steps in unlimited))
    out.take(mode, epochs, *unlimited)


def _tests(out: Translated, by_epochs: bool) -> None:
    """Batches of the test: a negative number of an epoch's is the whole set, and of steps none. Where nothing is said,
    their engine takes ten times those of a validation.
    """
    validated, tests = "Engine.eval_iters", "Engine.test_iters"
    if out.word(tests).startswith("-"):
        if by_epochs:
            return out.note("a test goes over the whole set", tests)
        return out.say("--test-iters", ["0"], tests)
    if tests in out.given or validated in out.taken or out.purpose != "train" or not out.word(validated).isdecimal():
        return
    if _has_own_files(out) and not _has_test_files(out):
        return  # there is nothing to test
    emptied = out.emptied.get(tests)
    if out.given[validated].where.startswith(COMMAND) or not (emptied and emptied.where):
        emptied = out.given[validated]
    out.flags.append(("--test-iters", [_times(out.word(validated), "10")], emptied))


def _times(one: str, other: str) -> str:
    """The product of two numbers as digits; the first word if one is no number, so that the flag refuses it."""
    return str(int(one) * int(other)) if one.isdecimal() and other.isdecimal() else one


def _precision(out: Translated) -> None:
    """Mixed precision: on by `enable`, by the earlier `use_pure_fp16`, or by a level without either."""
    at, formats = "Engine.mix_precision.", dict(float16="fp16", bfloat16="bf16")
    names = "dtype level scale_loss custom_black_list custom_white_list"
    half, level, scale, *lists = (at + name for name in names.split())
    on, switches = _switch(out, at + "enable", at + "use_pure_fp16")
    if not on and (switches or level not in out.given):
        if switches:
            out.say("--precision", ["fp32"], *switches)
        off = (switches or [at + "enable"])[0]
        return out.note(f"mixed precision is off: {off} is not true", half, level, scale, *lists, usual=True)
    known, word = out.word(half, "float16"), out.word(level, "o2")
    if known not in formats:
        out.take(level, scale, *lists)
        return out.refuse(half, f"'{out.given[half].value}' is not supported; there is: float16, bfloat16")
    out.say("--precision", [formats[known]], half, *(switches or [level]))
    if word in ("o1", "o2"):
        out.say("--amp-level", [word.upper()], level, *switches)
    else:
        why = "; at o3 the optimizer has weights and moments of fp16 alone, which loses small updates: say o2"
        out.refuse(level, f"'{out.given[level].value}' is not supported; there is: o1, o2{why if word == 'o3' else ''}")
    if scale in out.given and known == "float16":
        out.say("--initial-loss-scale", None, scale, half, *switches)
    out.note("bf16 needs no loss scale", scale, usual=True)
    if word != "o1":
        out.note("at level O2 formats are not chosen op by op; the lists belong to O1", *lists, usual=True)


def _switch(out: Translated, *names: str) -> tuple[bool, list[str]]:
    """Resolve a switch with several names: (whether it is on, the names that set it). Names that differ are noted.

    -o overrides files; within one source, a name that is on wins.
    """
    states = {key: out.is_on(key) for key in names if key in out.given}
    own = {key: on for key, on in states.items() if out.given[key].where.startswith(COMMAND)} or states
    if set(own.values()) == {None}:  # refused
        return False, []
    switches = [key for key, on in own.items() if on] or list(own)
    on = any(own.values())
    out.note(
        " and ".join(f"{key} is {str(on).lower()}" for key in switches), *(k for k in states if states[k] is (not on))
    )
    out.take(*states)
    return on, switches


def _recompute(out: Translated) -> None:
    what, kept, *names = RECOMPUTED
    on, switches = _switch(out, *names)
    if on:
        return out.say("--recompute-granularity", None if what in out.given else ["full"], what, *switches)
    if switches:
        out.say("--use-recompute", ["false"], *switches)
    out.note("Model.use_recompute is not true", what, kept, usual=True)


def _sharding(out: Translated) -> None:
    """Sharding. A degree of 1 shards nothing at any stage. Their dp_degree excludes sharding, except for GPTModuleAuto."""
    at, dp = "Distributed.sharding.sharding_", "Distributed.dp_degree"
    degree, stage = at + "degree", at + "stage"
    if out.word(degree, "1") != "1":
        out.say("--sharding-stage", None if stage in out.given else ["2"], stage, degree)
    else:
        if degree in out.given:
            out.say("--sharding-stage", ["0"], degree)
        out.note(f"a {degree} of 1 shards nothing", stage, usual=True)
    if dp in out.given and out.word("Model.module").endswith("auto"):
        out.say("--data-parallel-size", None, dp)


def _profiler(out: Translated) -> None:
    steps = "Profiler.scheduler"
    if not out.is_on("Profiler.enable"):
        unused = [key for key in out.left("Profiler.") if key != "Profiler.enable"]
        return out.note("Profiler.enable is not true", *unused, usual=True)
    numbers = out.word(steps).replace(",", " ").split()
    if len(numbers) == 2:
        out.say("--profile-step-start", numbers[:1], steps)
        out.say("--profile-step-end", numbers[1:], steps)
    elif numbers:
        why = "it is the first step and the one to end before: [1, 5]"
        out.refuse(steps, f"'{out.given[steps].value}' is not supported; {why}")


def _rates(out: Translated) -> None:
    """Learning rate and warm-up have two names each; -o wins. A warm-up below 1 is a share of the decay, else steps."""
    for names in (("max_lr", "learning_rate"), ("warmup_rate", "warmup")):
        given = [key for name in names if (key := f"Optimizer.lr.{name}") in out.given]
        own = [key for key in given if out.given[key].where.startswith(COMMAND)]
        if own:
            out.note(f"-o {own[-1]} says it", *(key for key in given if key not in own))
    key = "Optimizer.lr.warmup"
    if key in out.taken:
        return
    try:
        if float(out.word(key, "0")) >= 1:
            out.say("--lr-warmup-iters", None, key)
    except ValueError:
        pass  # the flag for a share reports it


def _data(out: Translated) -> None:
    """Data: validation takes its part of the training files, unless it has its own files."""
    train, own, split = (
        f"Data.{name}" for name in "Train.dataset.input_dir Eval.dataset.input_dir Train.dataset.split".split()
    )
    if not _has_own_files(out):
        out.take(own)
    elif out.purpose == "train":
        _own_files(out, train, own)
        out.note("training and validation have files of their own, and all of them", split, "Data.Eval.dataset.split")
    if out.purpose == "task":
        _same_task(out)
        if out.word(NAME) == "gptdataset":
            out.note("what is learned is --task", NAME)
        elif NAME in out.given:
            out.say("--task", None, NAME)
        out.note("the folder of the task is Data.Train.dataset.root", train)
        own_split = out.word("Data.Eval.dataset.split")
        if own_split.startswith("dev_"):
            out.say("--valid-data", [f"{own_split}.tsv"], "Data.Eval.dataset.split")
        elif (own_split, out.word(NAME)) == ("test", "mrpc"):  # what it publishes with labels, besides its training set
            out.take("Data.Eval.dataset.split")
        if out.word(split) == "train":
            out.take(split)
        out.note("the task says its files; --train-data names another one", split)
    for key in ("Data.Train.loader.collate_fn", "Data.Train.collate_fn"):
        if out.word(key) == "gpt_collate_fn":
            out.take(key)
        elif key in out.given and ":" not in out.word(key):
            why = "say MODULE:FUNCTION for one of your own (docs/extending.md#a-collate-function)"
            out.refuse(key, f"'{out.given[key].value}' is not supported; {why}")
    _validation(out)


MNLI_SETS = ["dev_matched", "dev_mismatched"]
CLASSES = dict.fromkeys(GLUE, "2") | dict(mnli="3", stsb="1")


def _same_task(out: Translated) -> None:
    """Refuse another data set for validation than for training, and other classes and another loss than the task has."""
    name, classes = out.word(NAME), "Model.num_classes"
    for part in ("name", "root") if name in GLUE else ():
        own, train = f"Data.Eval.dataset.{part}", f"Data.Train.dataset.{part}"
        if own in out.given and out.word(own).rstrip("/") != out.word(train, out.word(own)).rstrip("/"):
            other = f"'{out.given[own].value}' is not that of {train} ('{out.given[train].value}')"
            out.refuse(own, f"{other}: a task is trained and validated on one data set; give both the same")
    if name in GLUE and out.word(classes, CLASSES[name]) != CLASSES[name]:
        kind = "it is a regression" if name == "stsb" else f"it has {CLASSES[name]} classes"
        out.refuse(
            classes, f"'{out.given[classes].value}' does not fit {out.given[NAME].value}: {kind}; say {CLASSES[name]}"
        )
    if name not in GLUE:
        return
    loss = "MSELoss" if name == "stsb" else "CrossEntropyLoss"
    for key in ("Model.loss.train.name", "Model.loss.eval.name"):
        if out.word(key, loss.lower()) != loss.lower() and not VARIABLE.search(out.given[key].value):
            out.refuse(key, f"'{out.given[key].value}' does not fit {out.given[NAME].value}: say {loss}")
    own, known = "Data.Eval.dataset.split", ["dev", *{"mrpc": ["test"], "mnli": MNLI_SETS}.get(name, [])]
    if out.word(own, "dev") not in known and not VARIABLE.search(out.given[own].value):
        there = f"there is: {', '.join(known)}; --valid-data FILE names another file"
        out.refuse(own, f"'{out.given[own].value}' is not supported for {out.given[NAME].value}; {there}")


def _differ(out: Translated, key: str, train: str) -> bool:
    """Whether a key names other folders than that of training. Spellings of one folder (./data, data/) are the same."""
    folders = [[os.path.realpath(word) for word in out.given[one].words] for one in (key, train) if one in out.given]
    return bool(out.word(key)) and (train not in out.given or folders[0] != folders[1])


def _has_own_files(out: Translated) -> bool:
    """Whether validation has other files than training."""
    return _differ(out, "Data.Eval.dataset.input_dir", "Data.Train.dataset.input_dir")


def _has_test_files(out: Translated) -> bool:
    """Whether the test has other files than training, where validation has files of its own, too."""
    return _has_own_files(out) and _differ(out, TEST_FILES, "Data.Train.dataset.input_dir")


def _own_files(out: Translated, train: str, own: str) -> None:
    """Flags of files that validation has for itself. Warn where -o, or a file over a base file, changed the folder of
    training alone.
    """
    out.say("--valid-data-path", None, own)
    if _has_test_files(out):
        out.say("--test-data-path", None, TEST_FILES)
    if train not in out.given:
        return
    out.say("--train-data-path", None, train)
    keys, source = list(out.given), lambda key: out.given[key].where.removesuffix(key).rstrip("0123456789: ")
    if source(train) != source(own) and keys.index(train) > keys.index(own):
        folder, other = out.given[train], out.given[own]
        out.remarks.append(
            f"WARNING: {folder.where} is {folder.value}, and {other.where} is still {other.value}: training reads all "
            f"documents of the one and validation all of the other, without the split; to split {folder.value}, add "
            f"-o {own}={','.join(folder.words)}"
        )


def _validation(out: Translated) -> None:
    """Note keys of Data.Eval and Data.Test that differ from Data.Train and from what validation and test do."""
    task, own = out.purpose == "task", _has_own_files(out)
    done = {"sampler.shuffle": NO, "sampler.drop_last": NO if task else YES}
    done |= {"dataset.split": ("dev",)} if task else {}
    for key in out.left("Data.Eval."):
        name, same = key.removeprefix("Data.Eval."), out.word(key) == out.word(key.replace(".Eval.", ".Train."))
        if out.word(key) in done[name] if name in done else same:
            out.take(key)
    files = "its own files, all of them" if own else "Data.Train's files by its split"
    files = "the task's files, whole" if task else f"{files}, in order, in full batches"
    out.note(f"validation is of {files}, of the same samples", *out.left("Data.Eval."))
    part = "is of Data.Train's files by its split: files of its own need those of Data.Eval, too"
    if own:
        part = "is of its own files, all of them" if _has_test_files(out) else "needs Data.Test.dataset.input_dir"
    out.note(f"a test {'is of the task' if task else part}, in full batches, in order", *out.left("Data.Test."))


def _weights(out: Translated) -> None:
    """The model for generation or evaluation, and its ranks."""
    saved, exported = "Engine.save_load.ckpt_dir", "Inference.model_dir"
    if {saved, exported} & set(out.given):
        out.say("--load", None, *([exported] if exported in out.given else [saved]))
    out.note(f"{exported} says what is loaded", saved)
    if "Inference.mp_degree" in out.given:
        out.say("--tensor-model-parallel-size", None, "Inference.mp_degree")
        out.note("Inference.mp_degree says it", "Distributed.mp_degree")
    each = "are commands of their own, each with a part of the texts"
    for key in ("Inference.dp_degree", "Distributed.dp_degree"):
        if out.word(key) != "1":
            out.note(f"replicas {each if out.purpose == 'generate' else 'are the ranks that there are'}", key)
        out.take(key)


def _exported(out: Translated) -> None:
    """What is exported: a program, as theirs is, for so many ranks."""
    if "Model.module" in out.given:
        out.say("--format", ["torch-export"], "Model.module")
    if "Inference.mp_degree" in out.given:
        out.say("--tensor-model-parallel-size", None, "Inference.mp_degree")
        out.note("Inference.mp_degree says it", "Distributed.mp_degree")
    out.note("a program for generation has a cache", "Generation.use_cache")
    out.note("the exported model is used from there: tools.generate -c FILE", "Inference.model_dir")
    for key in ("Inference.dp_degree", "Distributed.dp_degree", "Distributed.pp_degree"):
        if out.word(key) != "1":
            out.note("a checkpoint of any layout is exported", key)
        out.take(key)


def _strategy(out: Translated) -> None:
    """Sampling, greedy or beam search."""
    at, strategy = "Generation.", "Generation.decode_strategy"
    beams, penalty = at + "num_beams", at + "length_penalty"
    groups = [at + "num_beam_groups", at + "diversity_rate"]
    drawn, how = [at + name for name in ("top_k", "top_p", "temperature")], out.word(strategy, "sampling")
    if how not in ("sampling", "greedy_search", "beam_search"):
        return out.refuse(
            strategy, f"'{out.given[strategy].value}' is not supported; there is: sampling, greedy_search, beam_search"
        )
    out.take(strategy)
    if how != "beam_search":
        if how == "greedy_search":
            out.say("--greedy", ["true"], strategy)
        elif out.purpose == "export" and strategy in out.given:  # who reads the export may take another default
            out.say("--greedy", ["false"], strategy)
        neutral = {beams: ("1",), groups[0]: ("1",), groups[1]: ("0", "0.0")}
        out.take(*[key for key, words in neutral.items() if out.word(key) in words])
        return out.note(f"{strategy} is {how}", beams, penalty, *groups)
    if out.word(beams, "1") == "1":
        out.say("--greedy", ["true"], beams, strategy)
        out.note("one beam is greedy search", penalty, *groups)
    else:
        out.say("--num-beams", None, beams, strategy)
        out.say("--length-penalty", None if penalty in out.given else ["0"], penalty, strategy)
        if out.word(penalty, "0").strip("0.") and penalty in out.given:
            why = "divides a text's score by its length n to this power; PaddleFleetX by (n + 5) / 6 to this power"
            out.remarks.append(f"{out.given[penalty].where} {why}")
    out.note("beam search draws nothing", *drawn)


def _offline(out: Translated) -> None:
    """Evaluation: perplexity of WikiText, or the last words of LAMBADA."""
    cloze, path = "Offline_Eval.cloze_eval", "Offline_Eval.eval_path"
    on = out.is_on(cloze)
    if cloze in out.given and on is not None or path in out.given:
        out.say("--task", ["LAMBADA" if on else "WIKITEXT103"], cloze, path)


def _clipping(out: Translated) -> None:
    """Clipping: their optimizers do not clip without `grad_clip`; --clip-grad does by default."""
    if "Optimizer.name" in out.given and "Optimizer.grad_clip.clip_norm" not in out.given:
        emptied = [one for key, one in out.emptied.items() if key.startswith("Optimizer.grad_clip") and one.where]
        out.flags.append(("--clip-grad", ["0"], (emptied or [out.given["Optimizer.name"]])[-1]))


TRAINED = (_clipping, _lengths, _precision, _recompute, _sharding, _profiler, _rates, _data)
JOINTS = dict(
    train=TRAINED,
    task=TRAINED,
    generate=(_weights, _strategy),
    evaluate=(_weights, _offline),
    export=(_exported, _strategy),
)
