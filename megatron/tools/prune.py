# SPDX-License-Identifier: Apache-2.0
"""Prune a trained model: a checkpoint of a smaller one, with the most important heads, MLP channels and layers.

    python -m megatron.tools.prune --load checkpoints --save pruned --prune-ratio 0.25
    python -m megatron.tools.prune --load checkpoints --save pruned --prune-ratio 0.25 --prune-criterion taylor \\
        --calibration-data train_text_document
    python -m megatron.tools.prune --load checkpoints --save pruned --target-ffn-hidden-size 768 --target-num-layers 3

The result is an ordinary checkpoint without optimizer state: every command reads it, in every layout. Its matrices are
smaller, and it computes what the larger model computes without these heads, channels and layers. Fine-tune it:
`pretrain_gpt.py --use-checkpoint-args --load pruned --finetune`. On one device, or on a CPU.

(`tools.checkpoint prune` is something else: it deletes old checkpoints of a folder.)
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, Optional

from megatron.errors import SettingsError, UsageError, run_main
from megatron.model.pruning import (
    ON_TEXT,
    ModelSizes,
    PruningOptions,
    TargetSizes,
    check_text,
    target_sizes,
    unit_words,
    untouched,
)
from megatron.settings import rank_env
from megatron.settings.declare import Needs, dashed, idle_flags
from megatron.settings.dialects.hints import as_overrides, failing_in_users_words
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import setting
from megatron.settings.statements import NONE, Statement
from megatron.storage.urls import UrlPath, location

TEXT = Needs("--prune-criterion taylor or load", lambda s: s.prune_criterion in ON_TEXT)


@dataclass(frozen=True)
class ToolOptions:
    """The model, the folder of the smaller one, and the text for --prune-criterion taylor or load."""

    load: str = setting("folder of checkpoints, or one checkpoint")
    save: str = setting("new folder for the checkpoint of the smaller model", MISSING, "--output")
    calibration_data: Optional[list[str]] = setting(
        "taylor, load: prefixes of token files, or folders", None, "--data-path", needs=TEXT
    )
    calibration_samples: int = setting(
        "taylor, load: samples of --calibration-data, evenly spaced", 64, "--calib-size", needs=TEXT
    )
    seq_length: Optional[int] = setting(
        "taylor, load: tokens of a sample (default: what the model can look at)", None, needs=TEXT
    )
    tensor_model_parallel_size: Optional[int] = setting(
        "tensor parallel size that the smaller model is checked for (default: that of its training)", None, "--tp"
    )
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting(
        "taylor, load: auto: CUDA where there is one", "auto", also=dict(gpu="cuda"), needs=TEXT
    )
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting(
        "taylor, load: format of the passes (default: as trained)", None, "--bf16=bf16", "--fp16=fp16", needs=TEXT
    )


# Settings of the smaller model that may differ from those of the larger one
SHAPE = "num_layers num_experts hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size".split()


def main(argv: list[str]) -> None:
    """Prune, and print what was kept."""
    groups, given = parse_with_record(
        argv,
        dict(tool=ToolOptions, prune=PruningOptions, targets=TargetSizes),
        prog="python -m megatron.tools.prune",
        description="Write a smaller model, with the most important parts of a trained one.",
        common=(
            *ToolOptions.__dataclass_fields__,
            *PruningOptions.__dataclass_fields__,
            *TargetSizes.__dataclass_fields__,
        ),
    )
    with failing_in_users_words(given):
        for line in pruned(groups["tool"], groups["prune"], groups["targets"], given):
            print(line)


def pruned(
    options: ToolOptions, how: PruningOptions, targets: TargetSizes, given: Mapping[str, Statement]
) -> list[str]:
    """Prune as the options say; returns lines about the result."""
    check(options, how, given)
    from megatron.checkpoint.choose import newest
    from megatron.inference import prune

    def plan(network: prune.Network, reader) -> prune.SmallerModel:
        sizes = target_sizes(network.model, how, targets)
        network.check(sizes, options.tensor_model_parallel_size)
        rank_env.print_notes(untouched(network.model, how, targets))
        if how.prune_criterion in ON_TEXT:
            found = by_text(network, source, options, how.prune_criterion, sizes)
        else:
            found = prune.norms(network, reader.read, how.prune_criterion)
        return prune.plan(network, sizes, found, targets.prune_layers)

    source = newest(location(options.load), options.ckpt_step)
    return lines_of(*prune.prune(source, location(options.save), plan), how.prune_criterion, given)


def by_text(network, source, options: ToolOptions, criterion: str, sizes: ModelSizes) -> Any:
    """The importance of the units of a `prune.Network` on --calibration-data: by the gradient of the loss, or by the loads
    of experts.
    """
    from megatron.inference.calibration import calibration_windows
    from megatron.inference.load import load_model, refuse_other_tokens
    from megatron.inference.prune import loads, taylor
    from megatron.mpu.initialize import pick_device

    device = pick_device(options.device, 0)
    if criterion == "load" and sizes != ModelSizes.of(network.model)._replace(experts=sizes.experts):
        raise SettingsError(
            "--prune-criterion load is of experts alone, and other parts are to go",
            do="give --target-num-experts alone, then prune again by another criterion",
        )
    if network.recipe.arrays is not None:
        raise SettingsError(
            f"--prune-criterion {criterion}: {options.load} is no model that predicts the next token of a text",
            do="choose l1_norm or l2_norm",
        )
    loaded = load_model(str(source), device=device, precision=options.precision)
    length = loaded.window(options.seq_length, least=2)
    text, count = options.calibration_data or [], options.calibration_samples
    refuse_other_tokens(loaded, text, "--calibration-data")
    measure = taylor if criterion == "taylor" else loads
    return measure(network, loaded, calibration_windows(text, length, count, loaded.vocab_size, labels=1))


def check(options: ToolOptions, how: PruningOptions, given: Mapping[str, Statement]) -> None:
    """Raise UsageError or SettingsError for options that cannot work, before a checkpoint is read."""
    if isinstance(location(options.save), UrlPath):
        raise UsageError(
            f"--save {options.save} is a URL", do="prune to a folder, and copy that (tools.checkpoint reshard)"
        )
    check_text(how.prune_criterion, options.calibration_data)
    if options.calibration_samples < 1:
        raise SettingsError(f"--calibration-samples {options.calibration_samples}: has to be at least 1")
    for group in (options, how):
        rank_env.print_notes(idle_flags(group, given, **(vars(how) if group is options else {})))


def lines_of(path, before, found, criterion: str, given: Mapping[str, Statement] = NONE) -> list[str]:
    """What a `prune.Network` has lost to a `prune.SmallerModel`, in words, and how to fine-tune it."""
    after = before.with_model(found.model)
    old, new = ModelSizes.of(before.model), ModelSizes.of(found.model)
    names = unit_words(before.model)
    pairs = {
        name: (getattr(old, kind), getattr(new, kind))
        for kind, name in names.items()
        if before.cuts.get(kind, True)  # no weight has MLP channels if all MLPs are experts of another width
    }
    parts = [
        f"{name} {count}" if count == left else f"{name} {count} -> {left}" for name, (count, left) in pairs.items()
    ]
    share = 1 - after.parameters / before.facts.parameters
    lines = [
        f"{path}: {before.facts.parameters:,} -> {after.parameters:,} parameters ({share:.1%} less), by {criterion}",
        "  " + ", ".join(parts),
    ]
    if old.layers != new.layers:
        gone = sorted(set(range(old.layers)) - set(found.layers.values()))
        lines.append(f"  layers that went: {' '.join(map(str, gone))}")
    sizes = {name: value for name in SHAPE if (value := getattr(found.model, name)) is not None}
    own = {name: as_overrides([(given.get(name), value)]) for name, value in sizes.items()}
    words = " ".join(own[name] or f"{dashed(name)} {value}" for name, value in sizes.items())
    how = f"--load {path.parent} --finetune --use-checkpoint-args, or --finetune and its sizes: {words}"
    if any(own.values()):  # the file of another suite has the sizes of the larger model
        how = f"the same -c, --load {path.parent} --finetune and its sizes: {words}"
    return [*lines, "optimizer state is left out: its moments belong to the larger model", f"fine-tune it with {how}"]


if __name__ == "__main__":
    run_main(main)
