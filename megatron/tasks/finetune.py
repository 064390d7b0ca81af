# SPDX-License-Identifier: Apache-2.0
"""The recipe of fine-tuning: a trunk with a head or a pattern, the examples of a task, and its evaluation."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

from megatron.errors import CheckpointError, DataError, SettingsError, StorageError, UsageError, did_you_mean
from megatron.model.kinds.table import sums_of_kinds
from megatron.model.recipe import SCRIPTS, Recipe
from megatron.model.t5.settings import refused
from megatron.settings.declare import Needs, dashed
from megatron.settings.from_checkpoint import foreign_format, found_record, shape_of
from megatron.settings.groups.kernels import CUDA
from megatron.settings.rules import Rule, of_the_checkpoint
from megatron.settings.schema import GROUPS
from megatron.settings.spelling import BadValue, settings_of
from megatron.settings.statements import Statement
from megatron.storage.urls import location
from megatron.tasks.backbones import (
    BACKBONES,
    DEFAULT,
    HEAD,
    both,
    chooser_facts,
    classifier_facts,
    find_backbone,
    half_of,
    normalize_trunk_config,
    pattern_facts,
    saved_shape,
    shape_groups,
    trunk_idle,
    trunk_rules,
)
from megatron.tasks.description import FLEETX, find_task
from megatron.tasks.settings import (
    GROUP,
    LM_LOSS,
    LOSS,
    TaskSettings,
    examples_of,
    learned_labels,
    open_task,
    said_in_full,
    task_settings,
)

MODEL_TYPE = "finetune"
DEFAULTS = dict(dataloader_type="cyclic", full_validation=True, eval_interval=0, num_workers=1)
# default -> settings that specify the same in another way
SAID_OTHERWISE = dict(
    global_batch_size=("local_batch_size", "gradient_accumulation_steps"),
    lr_warmup_fraction=("lr_warmup_iters", "lr_warmup_samples"),
)
FILES = ("data_path", "task_data", "train_data", "valid_data", "test_data", "soft_labels")
LENGTHS = ("train_epochs", "train_iters", "train_samples")  # settings of the length of training; one of them is used


def recipe() -> Recipe:
    """The recipe of fine-tuning."""
    return Recipe(
        MODEL_TYPE,
        facts,
        build_model,
        build_datasets,
        about="Fine-tune a model on a task.",
        own_data=True,
        groups=groups(),
        defaults=defaults,
        rules=(*trunk_rules(backbone_of), *TASK_RULES),
        idle={**trunk_idle(backbone_of, pooling_of), **TASK_IDLE},
        sums=sums,
        perplexities=(LM_LOSS,),
        arrays=arrays,
        epoch_samples=epoch_samples,
        measures=measures,
        reinitialize=lambda name, stored: (
            name == f"{HEAD}.weight"
        ),  # a BERT has others in the unit of its head for words
        starts_from=(*BACKBONES, *SCRIPTS),
        part=part_of_trunk,
        normalize_config=normalize_task_config,
        predicts=lambda config: (
            "all" if task_settings(config).backbone == DEFAULT else "state"
        ),  # encoders leave padding out
    )


def no_token_files(words: str) -> tuple[Rule, ...]:
    """The rules that --train-data-path and its like, of pretraining, are not given. words: of what --train-data has"""
    return tuple(
        Rule(
            lambda s, name=name: name in s.paths,
            lambda s, name=name: (
                f"--{name}-data-path is for token files, as pretraining has them; {words} --{name}-data"
            ),
        )
        for name in ("train", "valid", "test")
    )


def groups() -> dict[str, type]:
    """Settings of the task, and of the shapes of all trunks."""
    return {GROUP: TaskSettings, **shape_groups()}


TASK_RULES = (
    Rule(  # --data-path is the task's by now, so the rule of pretraining does not see it
        lambda s: s.mock_data and given_files(s),
        lambda s: (
            f"--mock-data reads no files, and files are given ({', '.join(given_files(s))}); drop one or the other"
        ),
    ),
    Rule(lambda s: not_above(s, "patience", 0), lambda s: f"--patience {own(s).patience} must be at least 1"),
    Rule(
        lambda s: not_above(s, "examples_per_class", 0),
        lambda s: f"--examples-per-class {own(s).examples_per_class} must be at least 1",
    ),
    Rule(
        lambda s: bool(own(s).pet_pattern) != bool(own(s).pet_verbalizer),
        lambda s: "--pet-pattern and --pet-verbalizer belong together; give both, or neither",
    ),
    Rule(  # which rules.tokenizer_type has for data without files
        lambda s: s.tokenizer == "NullTokenizer" and not s.tokenizer_type,
        lambda s: (
            "the task is text, and no vocabulary is given; --vocab-file vocab.json --merge-file merges.txt, or "
            f"--tokenizer-model FILE{of_the_checkpoint(s)}"
        ),
    ),
    Rule(
        lambda s: own(s).backbone not in BACKBONES,
        lambda s: f"--backbone {own(s).backbone}: fine-tuning knows {', '.join(BACKBONES)}",
    ),
    Rule(
        lambda s: own(s).pooling and own(s).pet_pattern,
        lambda s: f"--pooling {own(s).pooling} is of a head, and --pet-pattern has none; leave one of the two out",
    ),
    Rule(
        lambda s: own(s).soft_labels and (finds_words(own(s)) or own(s).examples_per_class),
        lambda s: (
            "--soft-labels are probabilities of all training examples; leave out "
            + ("--pet-loss words" if finds_words(own(s)) else "--examples-per-class")
        ),
    ),
    Rule(
        lambda s: not 0 <= own(s).word_dropout < 1,
        lambda s: f"--word-dropout {own(s).word_dropout} must be at least 0 and less than 1",
    ),
    Rule(
        lambda s: own(s).word_dropout and own(s).pet_pattern,
        lambda s: (
            f"--word-dropout {own(s).word_dropout} hides words from a head, and --pet-pattern has none; leave one of "
            "the two out"
        ),
    ),
    Rule(
        lambda s: (
            own(s).pooling
            and own(s).backbone in BACKBONES
            and own(s).pooling not in BACKBONES[own(s).backbone].poolings
        ),
        lambda s: (
            f"--pooling {own(s).pooling}: the head of a {own(s).backbone} sees one of "
            f"{', '.join(BACKBONES[own(s).backbone].poolings)}; its first token knows no other, or is the only one"
        ),
    ),
    Rule(
        lambda s: not s.full_validation,
        lambda s: "--no-full-validation: metrics are over all examples of a validation file; leave it out",
    ),
    *(
        Rule(
            lambda s, rule=rule: own(s).backbone == DEFAULT and rule.broken(s), rule.message
        )  # encoders have their own
        for rule in refused("reset_position_ids reset_attention_mask eod_mask_loss", "a sample is one text, or a pair")
    ),
    *(
        Rule(
            lambda s, name=name: getattr(s, name) and not finds_words(own(s)),
            lambda s, name=name: (
                f"{dashed(name)} {getattr(s, name)}: it is of a loss over words, in pretraining and with "
                "--pet-loss words; leave it out"
            ),
        )
        for name in ("label_smoothing", "z_loss_coeff")
    ),
    Rule(
        lambda s: s.settings.distillation.distils,
        lambda s: (
            f"{s.settings.distillation.source}: a teacher's logits are learned in pretraining; a task learns what models "
            "have predicted from --soft-labels"
        ),
    ),
    *(
        Rule(
            lambda s, name=name: getattr(own(s), name) and finds_spans(s),
            lambda s, name=name: (
                f"{dashed(name)}: the answers of {own(s).task} are pieces of its texts, and no classes; leave it out"
            ),
        )
        for name in ("pet_pattern", "soft_labels", "examples_per_class", "word_dropout")
    ),
    Rule(
        lambda s: finds_spans(s) and own(s).backbone not in FINDERS,
        lambda s: (
            f"--task {own(s).task}: its answers are pieces of a text, which {' and '.join(FINDERS)} find; a "
            f"{own(s).backbone}'s last states are those of its decoder"
        ),
    ),
    Rule(
        lambda s: finds_spans(s) and s.seq_length < 8,
        lambda s: f"--seq-length {s.seq_length} must be at least 8: a question and a part of its text",
    ),
    *no_token_files("the task's file is"),
    Rule(
        lambda s: own(s).backbone != DEFAULT and s.seq_length < 4,
        lambda s: f"--seq-length {s.seq_length} must be at least 4: special tokens take part of it",
    ),
)
FINDERS = [name for name, row in BACKBONES.items() if row.token_states]
JUDGED = Needs(
    "a validation file, and evaluations ahead of the end (--eval-epoch, --eval-interval)",
    lambda s: open_task(own(s)).files["valid"] and s.settings.validates_early(s.dp),
)
PATTERN = Needs("--pet-pattern", lambda s: own(s).pet_pattern)
WORDS_LOSS = Needs("--pet-loss words", lambda s: finds_words(own(s)))
TOKEN_FILES = Needs("token files, as pretraining has them: those of a task are read whole", lambda s: False)
ALL_EXAMPLES = Needs("batches to count: all examples of a file are evaluated", lambda s: False)
TASK_IDLE = {
    "pet_loss": PATTERN,
    "final_logit_softcapping": PATTERN,
    "untie_embeddings_and_output_weights": PATTERN._replace(
        words="--pet-pattern, or a checkpoint to compare it with", met=lambda s: own(s).pet_pattern or s.load
    ),
    "cross_entropy_chunk": WORDS_LOSS,
    "cross_entropy_loss_fusion": both(CUDA, WORDS_LOSS),
    **dict.fromkeys(("split", "dataset_type", "data_cache_path", "verify_data"), TOKEN_FILES),
    **dict.fromkeys(("object_storage_cache_path", "mmap_bin_files"), TOKEN_FILES),
    **dict.fromkeys(("eval_iters", "test_iters", "eval_same_samples"), ALL_EXAMPLES),
    "pooling": Needs("a head on one state of a text; answers have scores at each token", lambda s: not finds_spans(s)),
    "patience": JUDGED,
    "stop_at_loss": JUDGED,
}


def own(s) -> TaskSettings:
    """The task's settings from the argument of a rule."""
    return task_settings(s.settings)


def given_files(s) -> list[str]:
    """The given files of the task, as the user wrote them."""
    return [given.words for name in FILES if (given := s.settings.given(name)) and given.is_request]


def backbone_of(s) -> str:
    """The kind of trunk from the argument of a rule."""
    return own(s).backbone


def pooling_of(s) -> Optional[str]:
    """--pooling or None, from the argument of a rule."""
    return own(s).pooling


def normalize_task_config(config):
    """`Recipe.normalize_config`; the rules report an unknown trunk. --data-path is the task's."""
    settings, data = task_settings(config), config.data
    if data.data_path:
        task_data = settings.task_data or " ".join(data.data_path)
        config = config.derive("--data-path", data_path=None, task_data=task_data)
    config = from_pretrained(config, settings.pretrained_checkpoint)
    settings, name = task_settings(config), settings.backbone
    if name not in BACKBONES:
        return config
    config = said_in_full(config, BACKBONES[name].pooled)
    trained = config.optimizer.train_only or []
    if config.model.lora_rank is not None and settings.pet_pattern is None and f"{HEAD}.*" not in trained:
        config = config.derive("--lora-rank", train_only=[*trained, f"{HEAD}.*"])  # it is new
    return normalize_trunk_config(name, config, settings.pet_pattern is not None, settings.pooling)


def from_pretrained(config, start: Optional[str]):
    """The settings with --pretrained-checkpoint as --load, while there is no checkpoint to resume from."""
    load = config.checkpoint.load
    if start is not None and load is not None and _record(load, config.checkpoint.ckpt_step) is None:
        return config.derive("--pretrained-checkpoint", load=start)
    return config


def part_of_trunk(config, saved):
    """`Recipe.part`. A new head has this run's pooling, and a pattern is this run's own."""
    extra, settings = saved.get("extra", {}), task_settings(config)
    kept = {name: value for name, value in extra.get(GROUP, {}).items() if name not in ("pooling", "pet_pattern")}
    saved = {**saved, "extra": {**extra, GROUP: kept}}
    half = half_of(settings.backbone, settings.pooling)
    return half.of(saved) if half else saved


def finds_spans(s) -> bool:
    """Whether the task's answers are pieces of a text, from the argument of a rule."""
    return open_task(own(s)).task.spans


def not_above(s, name: str, least: int) -> bool:
    value = getattr(own(s), name)
    return value is not None and value <= least


def finds_words(settings: TaskSettings) -> bool:
    """Whether the words of labels are trained and scored as in pretraining."""
    return settings.pet_pattern is not None and settings.pet_loss == "words"


def facts(config, vocab_size: int):
    """The facts of the fine-tuned model."""
    settings = task_settings(config)
    if finds_words(settings):
        return pattern_facts(settings.backbone, config, vocab_size)
    task = open_task(settings).task
    if settings.pet_pattern is None:
        outputs, options = (1, task.outputs) if task.options else (task.outputs, 1)
        return classifier_facts(settings.backbone, config, vocab_size, outputs, options)
    tokens = find_backbone(settings.backbone).cloze_class().label_tokens
    return chooser_facts(settings.backbone, config, vocab_size, task.outputs, tokens)


def build_model(config, mesh, vocab_size, **stage):
    """Build this rank's part of the trunk with a head; with a pattern, of the pretrained model."""
    from megatron.tasks.classifier import classifier_of, label_chooser_of, span_finder_of

    settings = task_settings(config)
    backbone = find_backbone(settings.backbone)
    kind = backbone.module_class()
    if open_task(settings).task.spans:
        kind = span_finder_of(kind)
    elif settings.pet_pattern is None:
        kind = classifier_of(kind, settings.pooling or backbone.pooled, settings.word_dropout)
    elif not finds_words(settings):
        kind = label_chooser_of(kind, backbone.cloze_class().label_tokens)
    return kind.of(config, mesh, facts(config, vocab_size), **stage)


def sums(config) -> dict[str, float]:
    return {LM_LOSS if finds_words(task_settings(config)) else LOSS: 1.0, **sums_of_kinds(config.model)}


def epoch_samples(config) -> int:
    """Number of training examples."""
    settings = task_settings(config)
    examples = examples_of(settings, "train")
    if examples is None and config.batch.skip_train:
        return 1  # not trained
    if examples is None:
        raise DataError(
            f"--task {settings.task}: there is no training file", do="--data-path DIR, or --train-data FILE"
        )
    return len(examples.rows)


def build_datasets(config, tokenizer, vocab_size, sizes, log):
    """(train, valid, test) samples of the task."""
    from megatron.tasks.samples import TaskSamples, longest_cut

    backbone = find_backbone(task_settings(config).backbone)
    settings, length, task = task_settings(config), config.model.seq_length, open_task(task_settings(config)).task
    if config.data.mock_data:
        return mock_datasets(config, tokenizer, vocab_size, sizes, log)
    if tokenizer is None:
        raise SettingsError(
            "there is no tokenizer for the task's texts", do="--vocab-file and --merge-file, or --tokenizer-model"
        )
    examples_by_split = {split: examples_of(settings, split) for split in ("train", "valid", "test")}
    for split, examples in examples_by_split.items():
        log_examples(log, open_task(settings), split, examples)
    if settings.pet_pattern is not None:
        from megatron.tasks.pet import pet_datasets

        return pet_datasets(settings, examples_by_split, tokenizer, cloze_of(config, tokenizer, vocab_size), log)
    reader = backbone.reader_class().of(config, tokenizer, vocab_size)
    if task.spans:
        return span_datasets(examples_by_split, tokenizer, reader, log)
    hidden, soft = reader.hidden_word(tokenizer) if settings.word_dropout > 0 else None, bool(settings.soft_labels)
    made = [
        examples and TaskSamples(examples, task, tokenizer, reader, whole=split != "train", hidden=hidden, soft=soft)
        for split, examples in examples_by_split.items()
    ]
    if made[0] and (cut := longest_cut(made[0])):
        looked = min(2000, len(made[0]))
        log(f" > {cut} of {looked} training examples are longer than --seq-length {length} and lose their end")
    return tuple(made)


def span_datasets(examples_by_split, tokenizer, reader, log):
    """(train, valid, test) samples of a task whose answers are pieces of a text."""
    from megatron.tasks.spans import SpanSamples

    made = [
        examples and SpanSamples(examples, tokenizer, reader, whole=split != "train")
        for split, examples in examples_by_split.items()
    ]
    looked = 2000
    for split, samples in zip(examples_by_split, made):
        if samples and (cut := samples.questions_cut(looked)):
            count, most = min(looked, len(samples.examples.rows)), samples.longest_question
            log(f" > {split}: {cut} of {count} questions are longer than {most} tokens and lose their end")
    if made[1] and len(made[1]) > len(made[1].examples.rows):
        questions, found = len(made[1].examples.rows), len(made[1])
        log(f" > {questions:,} questions of validation have {found:,} windows of {reader.length} tokens")
    return tuple(made)


def cloze_of(config, tokenizer, vocab_size):
    """The pattern reader for a run's trunk."""
    backbone = find_backbone(task_settings(config).backbone)
    return backbone.cloze_class().of(backbone.divisible(config), tokenizer, vocab_size)


def mock_datasets(config, tokenizer, vocab_size, sizes, log):
    """Mock samples with the same arrays."""
    settings = task_settings(config)
    task, soft = open_task(settings).task, bool(settings.soft_labels)

    def made(kind: type, *own, **more) -> tuple:
        common = (*own, vocab_size, config.logging.seed)
        return tuple(kind(size, *common, split, **more) if size else None for split, size in enumerate(sizes))

    if settings.pet_pattern is not None:
        from megatron.tasks.pet import MockPatterns

        chosen = None if finds_words(settings) else task
        return made(MockPatterns, cloze_of(config, None, vocab_size), task=chosen, soft=soft)
    from megatron.tasks.samples import MockTaskSamples
    from megatron.tasks.spans import MockSpanSamples

    reader = find_backbone(settings.backbone).reader_class().of(config, None, vocab_size)
    if task.spans:
        return made(MockSpanSamples, reader)
    hidden = reader.hidden_word(None) if settings.word_dropout > 0 else None
    return made(MockTaskSamples, task, reader, hidden=hidden, soft=soft)


def arrays(config, vocab_size):
    """The arrays of a sample."""
    settings = task_settings(config)
    backbone, soft = find_backbone(settings.backbone), bool(settings.soft_labels)
    if settings.pet_pattern is not None:
        cloze, own = backbone.cloze_class(), backbone.divisible(config)
        if finds_words(settings):
            return cloze.arrays(own, vocab_size)
        return cloze.choice_arrays(own, vocab_size, open_task(settings).task, soft)
    from megatron.tasks.samples import sample_arrays

    text = backbone.reader_class().arrays(config, vocab_size)
    if open_task(settings).task.spans:
        from megatron.tasks.spans import span_arrays

        return span_arrays(text, config.model.seq_length)
    return sample_arrays(open_task(settings).task, text, settings.word_dropout > 0, soft)


def log_examples(log, opened, split: str, examples) -> None:
    """Log the number of examples, and notes on those left out."""
    if examples is None:
        return
    files = ", ".join(str(file) for _, file in opened.files[split])
    log(f" > {split}: {len(examples.rows):,} examples of {opened.task.name} ({files})")
    for note in examples.notes:
        log(f"note: {note}")


def measures(config):
    """The measures of evaluations: the task's metrics."""
    from megatron.tasks.evaluation import refuse_folder

    refuse_folder(task_settings(config).predictions)
    if finds_words(task_settings(config)):
        from megatron.tasks.pet import PetMeasures

        return PetMeasures(config)
    from megatron.tasks.evaluation import SpanMeasures, TaskMeasures

    return (SpanMeasures if open_task(task_settings(config)).task.spans else TaskMeasures)(config)


# ---- settings that follow from the task and from the checkpoint ------------------------------------------------------


def defaults(statements: Mapping[str, Statement]) -> dict[str, Any]:
    """`Recipe.defaults`: defaults from the task, and from the checkpoint that a run resumes or starts from."""
    values = {name: one.value for name, one in statements.items()}
    task = values.get("task")
    of_task = _settings_of(str(task), statements["task"].words) if task is not None else {}
    said = {**of_task, **values}.get
    chosen = {**DEFAULTS, **FLEETX, **of_task} if task is not None else dict(DEFAULTS)
    if said("predictions") and Path(str(said("predictions"))).is_file():
        raise StorageError(f"--predictions {said('predictions')} is a file, not a folder", do="give another path")
    record, more = beginning(said, _is_finetuned)
    chosen |= more
    if record is not None:
        chosen |= _from_checkpoint(record, said, chosen.get("seq_length"))
        if not (said("finetune") or chosen.get("finetune")):
            chosen |= learned_labels(record, said("task"))
    kind = chosen.get("backbone") or said("backbone")
    if kind in BACKBONES:
        chosen = {**BACKBONES[str(kind)].recipe.defaults, **chosen}
    asked = [name for name in LENGTHS if name in values] or [name for name in LENGTHS if name in of_task]
    asked = asked or ["train_epochs"]
    chosen = {name: value for name, value in chosen.items() if name not in LENGTHS or name in asked}
    drop_said_otherwise(chosen, values)
    if "train_epochs" in asked:
        chosen.setdefault("eval_epoch", 1)
    return chosen


def drop_said_otherwise(chosen: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Remove the defaults of what other settings specify. values: those that are given"""
    for name, others in SAID_OTHERWISE.items():
        if set(others) & set(values):
            chosen.pop(name, None)


def _settings_of(name: str, said: str) -> dict[str, Any]:
    """The settings in a task's description. Raises DataError for an unknown or invalid one."""
    known, checked = {one.name: one for one in settings_of({**GROUPS, **groups()})}, {}
    for setting, value in find_task(name, said).settings.items():
        if setting not in known:
            raise DataError(f"--task {name}: settings: there is no setting {setting}{did_you_mean(setting, known)}")
        if setting == "task":
            raise DataError(f"--task {name}: settings: a task cannot give another one", do="leave task out of them")
        try:
            checked[setting] = known[setting].checked(value)
        except BadValue as bad:
            raise DataError(f"--task {name}: settings: {setting} {bad}") from None
    return checked


def beginning(
    said: Callable[[str], Any], resumes: Callable[[dict[str, Any]], bool]
) -> tuple[Optional[dict[str, Any]], dict[str, Any]]:
    """(record of the checkpoint that a run resumes or starts from, the defaults for that).

    resumes: the record of --load -> whether it is of a run like this one, which goes on
    """
    load, start = said("load"), said("pretrained_checkpoint")
    record = _record(load, said("ckpt_step"))
    if record is not None and resumes(record):
        return record, {}
    if record is not None:
        if start is not None:
            raise CheckpointError(
                f"--load {load} holds a model of type {_type(record)}: there is no run of fine-tuning to resume",
                do=f"leave --load out (--pretrained-checkpoint {start} is what the run begins with)",
            )
        _refuse_same(load, said("save"))
        return record, dict(finetune=True)
    if start is not None:
        record = _record(start, None)
        if record is None:
            found = "" if location(start).is_dir() else "there is no such folder"
            do = "files of Paddle (.pdparams) are not read: give a folder that pretrain_gpt.py saved, or from-hf wrote"
            raise CheckpointError(f"--pretrained-checkpoint {start} holds no checkpoint", found or None, do)
        _refuse_same(start, said("save"))
        return record, dict(load=start, finetune=True)
    shapes = ("num_layers", "encoder_num_layers", "model_name_or_path")
    if all(said(name) is None for name in shapes):
        do = "--load CHECKPOINTS, or the shape of a model that begins with random weights"
        if load is not None:
            step = said("ckpt_step")
            raise CheckpointError(
                f"--load {load} holds no checkpoint" + (f" of iteration {step}" if step else ""), do=do
            )
        raise UsageError("there is no model to fine-tune", do=do)
    return None, {}


def _refuse_same(start: Optional[str], save: Optional[str]) -> None:
    """Raise SettingsError if a run would save into the folder of the pretrained model."""
    if save is not None and os.path.realpath(str(save)) == os.path.realpath(str(start)):
        raise SettingsError(
            f"--save {save} holds the model that the run begins with",
            "its checkpoints would stand among those of this task, and --load would find the newest",
            "give the run a folder of its own",
        )


def _record(folder: Optional[str], step: Optional[int]) -> Optional[dict[str, Any]]:
    """The record of a folder's checkpoint; None if there is no valid one, which loading reports."""
    record = found_record(folder, step)
    place = None if record or folder is None else location(str(folder))
    if place and (place / "config.json").exists() and not (place / "index.json").exists():
        raise CheckpointError(
            f"{folder} is a model of Hugging Face transformers, not a folder of checkpoints",
            do=f"python -m megatron.tools.checkpoint from-hf {folder} OUT",
        )
    if place and (problem := foreign_format(place)):
        raise CheckpointError(problem)
    return record


def _type(record: dict[str, Any]) -> str:
    kind = record["config"]["model"].get("model_type", DEFAULT)
    return DEFAULT if kind in SCRIPTS else kind


def _is_finetuned(record: dict[str, Any]) -> bool:
    return _type(record) == MODEL_TYPE


def _from_checkpoint(record: dict[str, Any], said: Callable[[str], Any], seq_length: Optional[int]) -> dict[str, Any]:
    """Defaults from a checkpoint: shape, tokenizer, kind of trunk, and a sequence length within its position table."""
    tokenizer = {name for name in record["config"].get("tokenizer", {}) if said(name) is not None}
    task = record["config"].get("extra", {}).get(GROUP, {})
    backbone = task.get("backbone", _type(record))
    find_backbone(backbone)
    if said("backbone") in BACKBONES and said("backbone") != backbone:
        raise SettingsError(
            f"--backbone {said('backbone')}: the checkpoint is of a {backbone}",
            do="leave it out, or give another --load",
        )
    shape = {**shape_of(record, saved_shape(backbone), tokenizer), "backbone": backbone}
    if _is_finetuned(record):
        pooling = None if said("pet_pattern") else said("pooling") or task.get("pooling")
        if (half := half_of(backbone, task.get("pooling"))) and not half_of(backbone, pooling):
            raise CheckpointError(
                f"{'--pet-pattern' if said('pet_pattern') else '--pooling ' + pooling} needs all of a {backbone}",
                f"the checkpoint is of a run with --pooling {task['pooling']}, and holds the {half.name} alone",
                "start from another --load, or keep that pooling",
            )
        return {**shape, "pooling": pooling} if pooling else shape
    table = shape.get("max_position_embeddings")
    if seq_length and table and shape.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        seq_length = min(seq_length, table)
    return {**shape, **({"seq_length": seq_length} if seq_length else {})}
