# SPDX-License-Identifier: Apache-2.0
"""Look at checkpoints, check, compare, rewrite and thin them out, and exchange them with other libraries. On CPU.

    python -m megatron.tools.checkpoint inspect PATH           tensors, layout, iteration, settings; reads no tensor
    python -m megatron.tools.checkpoint verify PATH            compares every byte with its checksum (exit 5: damaged)
    python -m megatron.tools.checkpoint repair PATH            rebuilds lost and damaged files (--save-parity)
    python -m megatron.tools.checkpoint diff A B               tensor by tensor, across layouts (exit 1: they differ)
    python -m megatron.tools.checkpoint reshard PATH OUT       other files: --writers N, or one for each rank
    python -m megatron.tools.checkpoint prune PATH             --keep-last N, --save-retain-interval N
    python -m megatron.tools.checkpoint to-hf PATH OUT         a decoder, T5 or BERT for Hugging Face transformers
    python -m megatron.tools.checkpoint from-hf PATH OUT       a decoder (Llama, Qwen ...), T5 or BERT from there
    python -m megatron.tools.checkpoint to-megatron PATH OUT   Megatron-LM's mp_rank_XX[_YYY]/model_optim_rng.pt
    python -m megatron.tools.checkpoint from-megatron PATH OUT the same, and Megatron-LM's distributed ones (torch_dist)
    python -m megatron.tools.checkpoint to-dcp PATH OUT        torch.distributed.checkpoint for torchtitan, NeMo Automodel
    python -m megatron.tools.checkpoint from-dcp PATH OUT      the same from there, with Adam's state: --hf-config FOLDER
    python -m megatron.tools.checkpoint upcycle PATH OUT       experts (--num-experts N) from the MLPs of a dense GPT
    python -m megatron.tools.checkpoint quantize PATH OUT      weights of 8 or 4 bits: --quantize int8, int8-dynamic, int4
    python -m megatron.tools.checkpoint merge-lora PATH OUT    LoRA adapters, merged into the weights of their base
    python -m megatron.tools.checkpoint apply-masks PATH OUT   masks of --sparsity: an ordinary model with zeros
    python -m megatron.tools.checkpoint to-peft PATH OUT       LoRA adapters for PEFT, Hugging Face's library
    python -m megatron.tools.checkpoint from-peft PATH OUT     LoRA adapters from PEFT, on --base CHECKPOINT

PATH is a folder of checkpoints (the one that `--load` would choose is taken, or --ckpt-step), or one checkpoint; or the
URL of one (s3://bucket/run). from-hf and from-peft download hf://ORG/NAME from the Hugging Face hub.
`COMMAND --help` lists the flags of a command.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.checkpoint.missing import no_checkpoint
from megatron.errors import CheckpointError, SettingsError, UsageError, did_you_mean, run_main
from megatron.model.quantization import QuantizeOptions
from megatron.settings.declare import dashed
from megatron.settings.parse import parse_with_record
from megatron.settings.positional import divide
from megatron.settings.schema import TokenizerSettings, setting
from megatron.settings.statements import given_values
from megatron.storage import hub
from megatron.storage.urls import UrlPath, location
from megatron.training.conversion_commands import (
    ExpertOptions,
    FromDCPOptions,
    FromHFOptions,
    FromMegatronOptions,
    FromPeftOptions,
    MergeOptions,
    ToDCPOptions,
    ToHFOptions,
    ToMegatronOptions,
    ToPeftOptions,
    UpcycleOptions,
    apply_masks,
    check_writers,
    from_dcp,
    from_hf,
    from_megatron,
    from_peft,
    merge_lora,
    quantize,
    to_dcp,
    to_hf,
    to_megatron,
    to_peft,
    upcycle,
)


@dataclass(frozen=True)
class WhichCheckpoint:
    """The checkpoint of the folder."""

    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)


@dataclass(frozen=True)
class InspectOptions:
    """Options of `inspect`."""

    json: bool = setting("one JSON object instead of text", False)
    all_settings: bool = setting("settings that have their default value, too", False)


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `verify`."""

    all: bool = setting("every checkpoint of the folder; off: the one that --load would choose", True)


@dataclass(frozen=True)
class RepairOptions:
    """Options of `repair`."""


@dataclass(frozen=True)
class DiffOptions:
    """Options of `diff`."""

    weights_only: bool = setting("leave optimizer state out", False)
    tolerance: float = setting("elements this near to each other count as equal; 0: equal to the bit", 0.0)
    largest: int = setting("differences to show, largest first", 20)


@dataclass(frozen=True)
class ReshardOptions:
    """Options of `reshard`."""

    writers: Optional[int] = setting("files of equal size", None)
    tensor_model_parallel_size: Optional[int] = setting("a file for each tensor-parallel rank", None, "--tp")
    pipeline_model_parallel_size: Optional[int] = setting("a file for each stage, too", None, "--pp")
    weights_only: bool = setting("leave optimizer state out (for inference)", False)
    dtype: Optional[Literal["fp32", "bf16", "fp16"]] = setting("convert weights (default: as stored)", None)
    base: Optional[str] = setting("of adapters: where their base is now", None)


@dataclass(frozen=True)
class PruneOptions:
    """The checkpoints to keep."""

    keep_last: Optional[int] = setting("keep this many newest checkpoints", None)
    save_retain_interval: Optional[int] = setting("keep those at a multiple of this iteration", None)
    dry_run: bool = setting("say what would go, delete nothing", False)


def main(argv: list[str]) -> None:
    """Run one command. The first word is the command; its paths are before or after flags."""
    name = argv[0] if argv and not argv[0].startswith("-") else ""
    if not name and set(argv) & {"-h", "--help", "--help-all"}:
        print(__doc__.strip())
        return
    if name not in COMMANDS:
        what = f"'{name}' is not a command" if name else "no command is given"
        near = f"; did you mean {SAID_FOR[name]}?" if name in SAID_FOR else did_you_mean(name, COMMANDS)
        raise UsageError(
            f"{what}; there are: {', '.join(COMMANDS)}{near}", do="python -m megatron.tools.checkpoint --help"
        )
    group, operands, run, *more = COMMANDS[name]
    groups = dict(which=WhichCheckpoint, command=group, **{kind.__name__: kind for kind in more})
    words, flags = divide(argv[1:], *groups.values())
    prog = f"python -m megatron.tools.checkpoint {name} {' '.join(operands)}"
    settings, said = parse_with_record(
        flags,
        groups,
        prog=prog,
        description=run.__doc__.splitlines()[0],
        common=tuple(f for g in (WhichCheckpoint, group) for f in g.__dataclass_fields__),
    )
    if len(words) != len(operands):
        raise UsageError(
            f"{name} takes {' and '.join(operands)}; got {' '.join(words) or 'nothing'}", do=f"{prog} --flags ..."
        )
    places = [_place(name, word) for word in words]
    for operand, place in zip(operands, places):
        if isinstance(place, UrlPath) and (name.startswith("from-") or (name.startswith("to-") and operand == "OUT")):
            raise UsageError(f"{name}: {operand} must be a folder, and {place} is a URL", do="reshard copies to a URL")
    run(*places, settings["which"], settings["command"], *(given_values(kind, said) for kind in more))


def _place(name: str, word: str):
    """The place of an operand of a command; what Hugging Face's hub has is downloaded."""
    if not hub.is_hub(word):
        return location(word)
    if name not in ("from-hf", "from-peft"):
        raise UsageError(f"{name} takes no {hub.SCHEME} name: {word}", do=f"from-hf {word} OUT, then {name} OUT")
    return hub.fetched(word, hub.MODEL_FILES)


def inspect(path: Path, which: WhichCheckpoint, how: InspectOptions) -> None:
    """Show tensors, layout, iteration and settings of a checkpoint; no tensor is read."""
    from megatron.checkpoint import survey

    with open_reader(path, which) as reader:
        if how.json:
            print(json.dumps(survey.summary(reader), indent=1))
            return
        if path != reader.folder:
            print("\n".join(survey.overview(path)) + "\n")
        print(survey.describe(reader, None if how.all_settings else changed_settings(reader.state.get("config", {}))))


def verify(path: Path, which: WhichCheckpoint, how: VerifyOptions) -> None:
    """Compare every byte of a checkpoint, or of all of a folder, with its checksum. Exit code 5: something is wrong."""
    from megatron.checkpoint import survey
    from megatron.checkpoint.choose import checkpoints, newest_good

    if (path / "index.json").exists() or which.ckpt_step is not None or not how.all:
        folders = [newest_good(path, which.ckpt_step)]
    else:
        folders = list(checkpoints(path).values())
    if not folders:
        raise no_checkpoint(path)
    count = 0
    for folder in folders:
        started = time.perf_counter()
        size, problems = survey.verify(folder)
        seconds = time.perf_counter() - started
        print(
            f"{folder}: {size:,} bytes in {seconds:.2f} s ({size / 1e6 / seconds:,.0f} MB/s): "
            + (f"{len(problems)} PROBLEM{'S' * (len(problems) > 1)}" if problems else "good")
        )
        for problem in problems:
            print(f"  {problem}", flush=True)
        count += len(problems)
    if count:
        raise CheckpointError(
            f"{count} problem{'s' * (count > 1)} in {len(folders)} checkpoint{'s' * (len(folders) > 1)} of {path}",
            do="a run that loads takes the newest one without damage",
        )


def diff(a: Path, b: Path, which: WhichCheckpoint, how: DiffOptions) -> None:
    """Compare two checkpoints tensor by tensor, whatever layouts wrote them. Exit code 1: they differ."""
    from megatron.checkpoint.compare import differences
    from megatron.checkpoint.reshard import OPTIMIZER

    with open_reader(a, which) as one, open_reader(b, which) as two:
        names = sorted(set(one.tensors) | set(two.tensors))
        if how.weights_only:
            names = [name for name in names if not name.startswith(OPTIMIZER)]
        found = list(differences(one, two, names, tolerance=how.tolerance))
        for key in ("iteration", "mesh", "vocab_size"):
            if one.state.get(key) != two.state.get(key):
                print(f"note: {key}: {one.state.get(key)} and {two.state.get(key)}")
        if not found:
            near = f"within {how.tolerance:g}" if how.tolerance else "to the bit"
            print(f"{one.folder} and {two.folder}: {len(names)} tensors are equal {near}")
            return
        print(f"{one.folder} and {two.folder}: {len(found)} of {len(names)} tensors differ")
    found.sort(
        key=lambda difference: -difference.largest if difference.largest == difference.largest else -float("inf")
    )
    for difference in found[: how.largest]:
        print(f"  {difference}")
    if len(found) > how.largest:
        print(f"  ... and {len(found) - how.largest} more (--largest)")
    sys.exit(1)


def reshard(path: Path, out: Path, which: WhichCheckpoint, how: ReshardOptions) -> None:
    """Rewrite a checkpoint into other files, in bounded memory. (Loading needs no such step.)"""
    tp, pp = how.tensor_model_parallel_size, how.pipeline_model_parallel_size
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    by_rank = " ".join(f"{dashed(name)} {size}" for name, size in sizes.items() if size is not None)
    if how.writers is not None and by_rank:
        raise UsageError(f"--writers {how.writers} and {by_rank} contradict each other", do="drop one of them")
    if how.writers is None and not by_rank:
        raise UsageError(
            "say what the new files are",
            do="--writers N, or --tensor-model-parallel-size N --pipeline-model-parallel-size N",
        )
    tp, pp = 1 if tp is None else tp, 1 if pp is None else pp
    count = tp * pp if how.writers is None else how.writers
    check_writers(count if min(tp, pp) > 0 else min(tp, pp))

    import torch

    from megatron.checkpoint import reshard as files
    from megatron.checkpoint.choose import checkpoints

    dtype = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[how.dtype]
    if dtype is not None and not how.weights_only:
        raise UsageError("--dtype converts weights; optimizer state must stay as it is", do="add --weights-only")
    with open_reader(path, which, copies=True) as reader:
        if out.resolve() in (reader.folder.resolve(), reader.folder.resolve().parent):
            raise SettingsError(f"{out} is where the checkpoint is", do="give another folder")
        if (out / "index.json").exists() or checkpoints(out):
            raise SettingsError(f"{out} is there already", "it holds checkpoints", "give a new folder")
        wanted = (lambda name: not name.startswith(files.OPTIMIZER)) if how.weights_only else (lambda name: True)
        pieces = files.whole_pieces(reader, wanted, dtype)
        state = dict(reader.state)
        if how.weights_only:
            state["optimizer_steps"] = None
        state |= base_for(reader, out, how.base)
        if how.writers:
            shards = files.evenly(pieces, count)
        else:
            shards = files.by_rank(pieces, boxes_of_ranks(reader.state, tp, pp))
            state["mesh"] = dict(pp=pp, replicate=1, shard=1, cp=1, tp=tp)
        written = files.reshard(reader, out, shards, state)
    print(f"{written}: {len(pieces)} tensors in {count} files, to be loaded with --load {out}")


def repair(path: Path, which: WhichCheckpoint, how: RepairOptions) -> None:
    """Rebuild lost and damaged files of a checkpoint, or of all of a folder, from its parity files (--save-parity).

    Exit code 5: something could not be rebuilt.
    """
    from megatron.checkpoint.choose import checkpoints
    from megatron.checkpoint.parity import repair as rebuild

    if isinstance(path, UrlPath):
        raise UsageError(f"{path} is in an object store, where checkpoints have no parity files")
    if (path / "index.json").exists() or (path / "copy_of_index.json").exists():
        folders = [path]
    else:
        folders = [one for step, one in checkpoints(path).items() if which.ckpt_step in (None, step)]
    if not folders:
        raise no_checkpoint(path)
    problems = []
    for folder in folders:
        try:
            print(f"{folder}: {', '.join(rebuild(folder)) or 'nothing'} rebuilt", flush=True)
        except CheckpointError as problem:
            print(f"{folder}: {problem}", flush=True)
            problems.append(str(problem))
    if problems:
        raise CheckpointError(f"{len(problems)} of {len(folders)} checkpoints of {path} were not repaired", problems[0])


def prune(path: Path, which: WhichCheckpoint, how: PruneOptions) -> None:
    """Delete checkpoints that need not be kept, after the newest was verified. Exit code 10: a job writes there."""
    from megatron.checkpoint import folder, survey
    from megatron.checkpoint.backends import backend_of
    from megatron.checkpoint.choose import checkpoints, read_tracker
    from megatron.storage.durable import storage_errors

    if not (how.keep_last or how.save_retain_interval) or min(how.keep_last or 1, how.save_retain_interval or 1) < 1:
        raise UsageError("say what to keep", do="--keep-last N and/or --save-retain-interval N, at least 1")
    if which.ckpt_step is not None:
        raise UsageError(
            f"--ckpt-step {which.ckpt_step}: prune deletes what --keep-last and --save-retain-interval do not "
            "keep, and not one checkpoint by its number"
        )
    found = checkpoints(path)
    if not found:
        raise no_checkpoint(path)
    newest = read_tracker(path)
    if newest not in found:
        raise CheckpointError(
            f"{path / folder.TRACKER} names no checkpoint that is there: nothing is deleted",
            do="a training run that saves there writes it anew",
        )
    with storage_errors(path):
        lock = backend_of(path).lock(path, print)
    try:
        _, problems = survey.verify(found[newest])
        if problems:
            raise CheckpointError(f"{found[newest]} is damaged: nothing is deleted", "\n  ".join(problems[:8]))
        gone = folder.surplus(path, how.keep_last, how.save_retain_interval)
        if not how.dry_run:
            folder.remove(gone)
    finally:
        lock.release()
    word = "would go" if how.dry_run else "gone"
    print(
        f"{path}: {', '.join(old.name for old in gone) or 'nothing'} {word}, {len(found) - len(gone)} of {len(found)} kept"
    )


# ---- what commands share ---------------------------------------------------------------------------------------------


def open_reader(path: Path, which: WhichCheckpoint, copies: bool = False):
    """The checkpoint that `path` and --ckpt-step mean, open; notices go to stderr. copies: the command writes one."""
    from megatron.checkpoint.choose import newest, newest_good
    from megatron.checkpoint.reader import Reader

    return Reader((newest if copies else newest_good)(path, which.ckpt_step))


def base_for(reader, out: Path, given: Optional[str]) -> dict:
    """The entry about the base of adapters in a copy at `out`; empty for other checkpoints. given: --base."""
    from megatron.checkpoint.base_checkpoint import BASE, base_record, find_base, open_checkpoint
    from megatron.checkpoint.choose import newest

    if not reader.state.get(BASE):
        if given is not None:
            raise UsageError(f"--base {given}: {reader.folder} is no checkpoint of adapters", do="leave it out")
        return {}
    if given is None:
        return {BASE: base_record(open_checkpoint(reader.folder).base.folder, str(out))}
    return {BASE: base_record(find_base(reader, newest(location(given))).folder, str(out))}


def changed_settings(saved: dict) -> dict:
    """The saved settings that differ from their defaults, by group."""
    from dataclasses import MISSING, fields

    from megatron.settings.schema import GROUPS

    changed = {}
    for name, values in saved.items():
        defaults = {f.name: f.default for f in fields(GROUPS[name])} if name in GROUPS else {}
        if isinstance(values, dict):
            changed[name] = {key: value for key, value in values.items() if value != defaults.get(key, MISSING)}
    return changed


def boxes_of_ranks(state: dict, tp: int, pp: int) -> list[dict]:
    """For each rank, tp varying fastest: parameter name -> its Box, of the model that `state` describes.

    Stages have equally many layers; the first one has the embedding. Raises CheckpointError when the state does not say
    what model it is, SettingsError when so many ranks cannot share it.
    """
    from megatron.checkpoint.boxes import Box
    from megatron.model.recipe import config_of, facts_of

    if "config" not in state or "vocab_size" not in state:
        raise CheckpointError("the checkpoint does not say what model it is", do="use --writers N")
    facts = facts_of(config_of(state["config"]), state["vocab_size"])
    for what, value in facts.divisible_by_tp().items():
        if value % tp:
            raise SettingsError(f"{value} ({what}) cannot be divided by --tensor-model-parallel-size {tp}")
    if facts.num_layers % pp:
        raise SettingsError(f"{facts.num_layers} layers cannot be divided by --pipeline-model-parallel-size {pp}")

    def stage(unit) -> int:
        if unit.layer is not None:
            return unit.layer * pp // facts.num_layers
        return 0 if "first" in unit.ends else pp - 1

    ranks = [(at, rank) for at in range(pp) for rank in range(tp)]
    boxes = {place: {} for place in ranks}
    for unit in facts.whole:
        for name, placed in unit.weights.items():
            local = placed.local_shape({"tp": tp, "etp": tp})
            for rank in range(tp):  # which divide experts as they divide other weights
                place = dict(tp=rank, ep=0, etp=rank, ep_etp=rank)
                boxes[stage(unit), rank][f"{unit.name}.{name}"] = Box(*placed.box(local, place))
    return [boxes[place] for place in ranks]


COMMANDS = dict(
    inspect=(InspectOptions, ("PATH",), inspect),
    verify=(VerifyOptions, ("PATH",), verify),
    repair=(RepairOptions, ("PATH",), repair),
    diff=(DiffOptions, ("A", "B"), diff),
    reshard=(ReshardOptions, ("PATH", "OUT"), reshard),
    prune=(PruneOptions, ("PATH",), prune),
    **{
        "to-hf": (ToHFOptions, ("PATH", "OUT"), to_hf, TokenizerSettings),
        "from-hf": (FromHFOptions, ("PATH", "OUT"), from_hf),
        "to-megatron": (ToMegatronOptions, ("PATH", "OUT"), to_megatron),
        "from-megatron": (FromMegatronOptions, ("PATH", "OUT"), from_megatron),
        "to-dcp": (ToDCPOptions, ("PATH", "OUT"), to_dcp, TokenizerSettings),
        "from-dcp": (FromDCPOptions, ("PATH", "OUT"), from_dcp),
        "quantize": (QuantizeOptions, ("PATH", "OUT"), quantize),
        "upcycle": (UpcycleOptions, ("PATH", "OUT"), upcycle, ExpertOptions),
        "merge-lora": (MergeOptions, ("PATH", "OUT"), merge_lora),
        "apply-masks": (MergeOptions, ("PATH", "OUT"), apply_masks),
        "to-peft": (ToPeftOptions, ("PATH", "OUT"), to_peft, TokenizerSettings),
        "from-peft": (FromPeftOptions, ("PATH", "OUT"), from_peft),
    },
)

SAID_FOR = dict(  # words that are no commands -> the command that is meant
    **dict.fromkeys(("compare", "cmp"), "diff"),
    **{f"to-{form}": f"python -m megatron.tools.export --format {form}" for form in ("gguf", "onnx")},
    **dict.fromkeys(("show", "info", "list", "ls", "print"), "inspect"),
    **dict.fromkeys(("check", "validate"), "verify"),
    **dict.fromkeys(("rebuild", "recover", "fix"), "repair"),
    **dict.fromkeys(("convert", "import", "export", "hf"), "from-hf or to-hf"),
    **dict.fromkeys(("merge", "lora"), "merge-lora"),
    **dict.fromkeys(("delete", "remove", "rm", "clean"), "prune"),
    **dict.fromkeys(("copy", "cp", "split"), "reshard"),
)

if __name__ == "__main__":
    run_main(main)
