# SPDX-License-Identifier: Apache-2.0
"""Find what quantization or pruning harms: the loss when one layer alone is quantized, masked, pruned or left out.

    python -m megatron.tools.sensitivity --load checkpoints --data-path held_out_text_document --quantize int4 \\
        --output sensitivity.json --picture sensitivity.svg
    python -m megatron.tools.evaluate --load checkpoints --data-path held_out_text_document --quantize int4 \\
        --quantize-skip sensitivity.json

The table and the picture show how much the loss grows, for each layer and for each kind of layer. The file has the same
numbers, and the layers to leave out, `skip`: as few as possible, so that the sum over the others stays within
--max-increase. --quantization-skip of a training reads it, too. So it is with --sparsity (and --sparsity-skip), one linear
layer at a time; with --prune-ratio (and --prune-skip of tools.prune), the heads or the MLP channels of one layer; and with
--drop-layers, one layer: the others of its list are those for --prune-layers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import SettingsError, StorageError, UsageError, run_main
from megatron.guard.job import on_ranks
from megatron.model import quantization, sparsity
from megatron.model.pruning import Criterion, ModelSizes
from megatron.model.quantization import QuantizeOptions
from megatron.settings import rank_env
from megatron.settings.declare import Needs, declared, idle_flags
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import Model, Parallel, setting
from megatron.storage.durable import check_output
from megatron.telemetry.drawing import INK, new_figure, plain, svg_of
from megatron.tools import evaluate

COLOURS = ("#1e40af", "#15803d", "#b91c1c", "#f97316", "#6d28d9", "#0891b2")  # one for each kind of layer
SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class SensitivityOptions:
    """The model, the data, and what is written."""

    load: str = setting("folder of checkpoints, or one checkpoint")
    data_path: list[str] = setting("prefixes of token files, or folders: the text whose loss is compared")
    max_tokens: Optional[int] = setting("look at no more than this many tokens of each --data-path", None)
    seq_length: Optional[int] = setting("tokens of a window (default: what the model can look at)", None)
    micro_batch_size: int = setting("windows side by side", 8, "--batch-size")
    max_increase: float = setting("loss that all quantized layers together may add", 0.01)
    output: Optional[str] = setting("file for the results, JSON", None)
    picture: Optional[str] = setting("file for a picture: .svg, .png or .pdf", None)
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp")
    pipeline_model_parallel_size: int = setting("ranks that share the layers", 1, "--pp")
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting(
        "default: as trained", None, "--bf16=bf16", "--fp16=fp16"
    )


@dataclass(frozen=True)
class HarmOptions:
    """What is done to a layer, other than quantizing it."""

    sparsity: Optional[str] = setting("masks, one linear layer at a time: 2:4, or a share of zeros", None)
    prune_ratio: Optional[float] = setting(
        "fraction of heads, or of MLP channels, that goes from one layer at a time", None
    )
    prune_criterion: Criterion = setting(
        "--prune-ratio: what is least important, as in tools.prune; taylor reads --calibration-data, else --data-path",
        "l1_norm",
    )
    drop_layers: bool = setting("leave out one layer at a time", False)

    def words(self, quantize: QuantizeOptions) -> list[str]:
        """What is done, for each way that is given."""
        ways = {
            quantize.quantize or "": quantize.quantize,
            f"--sparsity {self.sparsity}": self.sparsity,
            f"--prune-ratio {self.prune_ratio}": self.prune_ratio,
            "--drop-layers": self.drop_layers,
        }
        return [words for words, given in ways.items() if given]


RATIO = Needs("--prune-ratio", lambda s: s.prune_ratio)
TAYLOR = Needs("--prune-criterion taylor", lambda s: s.prune_ratio and s.prune_criterion == "taylor")
IDLE = declared("needs", quantization.QuantizeOptions) | dict(
    prune_criterion=RATIO, calibration_data=TAYLOR, calibration_samples=TAYLOR
)


@dataclass(frozen=True)
class Sensitivity:
    """The loss of a model, and how much it grows when one layer is harmed. layers: name -> growth."""

    format: str
    loss: float
    layers: Mapping[str, float] = field(default_factory=dict)

    def kinds(self) -> dict[str, float]:
        """Kind of layer, such as mlp.up -> the sum over its layers."""
        sums: dict[str, float] = {}
        for name, growth in self.layers.items():
            sums[kind_of(name)] = sums.get(kind_of(name), 0.0) + growth
        return sums

    def kinds_to_skip(self, budget: float) -> list[str]:
        """As `skip`, kinds of layers."""
        return replace(self, layers=self.kinds()).skip(budget)

    def skip(self, budget: float) -> list[str]:
        """The most sensitive layers, as few as possible so that the sum of the others is within the budget.

        >>> Sensitivity("int4", 3.0, {"a": 0.1, "b": 0.004, "c": -0.2, "d": 0.005}).skip(0.005)
        ['a', 'd']
        """
        order = sorted(self.layers, key=lambda name: self.layers[name], reverse=True)
        left = lambda count: sum(max(0.0, self.layers[name]) for name in order[count:])
        return order[: next(count for count in range(len(order) + 1) if left(count) <= budget)]


def kind_of(name: str) -> str:
    """The name of a layer inside its block.

    >>> kind_of("blocks.3.mlp.up")
    'mlp.up'
    """
    return name.split(".", 2)[2]


def main(argv: list[str]) -> None:
    rank_env.adopt_launcher()
    groups, given = parse_with_record(
        argv,
        dict(sensitivity=SensitivityOptions, harm=HarmOptions, quantize=QuantizeOptions),
        prog="python -m megatron.tools.sensitivity",
        description="Find what quantization or pruning harms.",
        common=(*SensitivityOptions.__dataclass_fields__, *HarmOptions.__dataclass_fields__),
    )
    options, harm, quantize = groups["sensitivity"], groups["harm"], groups["quantize"]
    with failing_in_users_words(given):
        check(options, harm, quantize)
        idle = [*idle_flags(quantize, given, IDLE, **vars(harm)), *idle_flags(harm, given, IDLE)]
        rank_env.print_notes(idle)
        tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
        parallel = Parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        on_ranks(parallel, options.device, lambda context: report(options, harm, quantize, context), options.load)


def check(options: SensitivityOptions, harm: HarmOptions, quantize: QuantizeOptions) -> None:
    """Raise UsageError, SettingsError or StorageError for options that cannot work, before torch is loaded."""
    check_harm(options, harm, quantize)
    if quantize.quantize_method == "gptq":
        raise UsageError("--quantize-method gptq: layers are rounded one at a time here", do="leave it out")
    if options.max_increase < 0:
        raise SettingsError(f"--max-increase {options.max_increase} has to be at least 0")
    if options.picture:
        if not options.picture.endswith(SUFFIXES):
            raise SettingsError(f"--picture {options.picture}: the name has to end in {', '.join(SUFFIXES)}")
        new_figure(1, 1, "--picture")
    for flag, path in (("--output", options.output), ("--picture", options.picture)):
        if path and not Path(path).parent.is_dir():
            raise StorageError(
                f"{flag} {path}: there is no folder {Path(path).parent}", do="make it, or give another path"
            )
        if path:
            check_output(flag, path)


def check_harm(options: SensitivityOptions, harm: HarmOptions, quantize: QuantizeOptions) -> None:
    """Raise UsageError or SettingsError unless one way to harm a layer is given, which can work."""
    ways = harm.words(quantize)
    if not ways:
        raise UsageError("missing: --quantize, --sparsity, --prune-ratio or --drop-layers", do="give one of them")
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)}: one of them is measured", do="leave the others out")
    if harm.prune_ratio is not None and not 0 < harm.prune_ratio < 1:
        raise SettingsError(f"--prune-ratio {harm.prune_ratio:g} has to be above 0 and below 1")
    if harm.sparsity and (found := sparsity.problems(of_sparsity(harm), [], 1)):
        raise SettingsError(found[0])
    ranks = options.tensor_model_parallel_size * options.pipeline_model_parallel_size
    if harm.prune_criterion == "taylor" and ranks > 1:
        raise SettingsError("--prune-criterion taylor works on one rank", do="choose l1_norm or l2_norm")


def of_sparsity(harm: HarmOptions) -> Model:
    """The settings of a model with --sparsity."""
    return Model(num_layers=1, hidden_size=1, num_attention_heads=1, sparsity=harm.sparsity)


def report(options: SensitivityOptions, harm: HarmOptions, quantize: QuantizeOptions, context) -> None:
    """Measure on the ranks of a job; the first of them prints and writes."""
    say: Callable[[str], None] = print if context.is_rank_zero else lambda text: None
    found = measure(options, harm, quantize, context, say)
    budget = options.max_increase  # every layer loses equally many heads: only all of them can be left alone
    skip = found.kinds_to_skip(budget) if harm.prune_ratio else found.skip(budget)
    for line in lines_of(found, skip, options.max_increase):
        say(line)
    if not context.is_rank_zero:
        return
    try:
        if options.output:
            record = dict(
                load=options.load, data=options.data_path, max_increase=options.max_increase, format=found.format
            )
            record |= dict(loss=found.loss, increase=dict(found.layers), kinds=found.kinds(), skip=skip)
            Path(options.output).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if options.picture:
            draw(found, skip, options.picture)
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot be written", error.strerror or str(error)) from error


def measure(
    options: SensitivityOptions, harm: HarmOptions, quantize: QuantizeOptions, context, say=lambda text: None
) -> Sensitivity:
    """The loss of the model, then that with each of its layers harmed alone. All ranks call it."""
    from megatron.inference.load import load_model
    from megatron.tasks import zeroshot

    loaded = load_model(
        options.load, device=context.device, precision=options.precision, step=options.ckpt_step, mesh=context.mesh
    )
    of_evaluation = evaluate.EvaluateOptions(
        load=options.load,
        data_path=options.data_path,
        max_tokens=options.max_tokens,
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
    )
    work, notices = zeroshot.prepare(of_evaluation, loaded, {}, context.mesh.dp, lambda unit: lambda done, total: None)
    for notice in [*loaded.notices, *notices]:
        say(f"note: {notice}")

    def loss() -> float:
        results = zeroshot.evaluate(work)
        return sum(one["loss"] * one["tokens"] for one in results) / sum(one["tokens"] for one in results)

    base, growth = loss(), {}
    for name, harmed in probes_of(options, harm, quantize, loaded, context):
        with harmed:
            growth[name] = loss() - base
        say(f" {name:32} {growth[name]:+.5f}")
    [words] = harm.words(quantize)
    return Sensitivity(words, base, growth)


def probes_of(options: SensitivityOptions, harm: HarmOptions, quantize: QuantizeOptions, loaded, context):
    """(name, context in which the model is harmed there): see `inference.probes`."""
    from megatron.checkpoint.base_checkpoint import open_checkpoint
    from megatron.inference import probes, prune
    from megatron.inference.calibration import calibration_windows
    from megatron.inference.load import refuse_other_tokens

    if quantize.quantize:
        return probes.quantized(loaded, quantize)
    if harm.sparsity:
        return probes.masked(loaded, of_sparsity(harm))
    if harm.drop_layers:
        return probes.without_layers(loaded)
    network = prune.Network(loaded.config, loaded.vocab_size)
    network.check(ModelSizes.of(network.model))
    if harm.prune_criterion == "taylor":
        length = options.seq_length or loaded.longest
        own, count = quantize.calibration_data, quantize.calibration_samples
        text, flag = own or options.data_path, "--calibration-data" if own else "--data-path"
        refuse_other_tokens(loaded, text, flag)
        windows = calibration_windows(text, length, count, loaded.vocab_size, labels=1, flag=flag)
        importance = prune.taylor(network, loaded, windows)
    else:
        with open_checkpoint(loaded.path) as reader:
            importance = prune.norms(network, reader.read, harm.prune_criterion)
    return probes.pruned(loaded, network, importance, harm.prune_ratio, context.mesh.coordinates)


def lines_of(found: Sensitivity, skip: Sequence[str], budget: float) -> list[str]:
    """The results for a terminal."""
    total = sum(found.layers.values())
    kinds = sorted(found.kinds().items(), key=lambda pair: pair[1], reverse=True)
    return [
        f"loss {found.loss:.5f}; with {found.format} in one place it grows as above; sum {total:+.5f}",
        *(f"  all {kind:28} {growth:+.5f}" for kind, growth in kinds),
        f"to skip for at most {budget:+g}: {' '.join(skip) or 'none'}",
    ]


def draw(found: Sensitivity, skip: Sequence[str], path: str) -> None:
    """A bar for each layer, in the order of blocks, coloured by kind; layers to skip are marked."""
    kinds = list(found.kinds())
    figure = new_figure(7.0, 1.2 + 0.22 * len(found.layers), "--picture")
    axes = figure.subplots()
    names = list(found.layers)
    for number, kind in enumerate(kinds):
        rows = [row for row, name in enumerate(names) if kind_of(name) == kind]
        growth = [found.layers[names[row]] for row in rows]
        axes.barh(rows, growth, 0.7, color=COLOURS[number % len(COLOURS)], label=kind)
    axes.set_yticks(range(len(names)), [f"{name} *" if {name, kind_of(name)} & {*skip} else name for name in names])
    axes.invert_yaxis()
    axes.set_xlabel(
        f"increase of the loss ({found.loss:.4f}) with {found.format} in this place alone; * to skip", color=INK
    )
    axes.legend(frameon=False, labelcolor=INK)
    plain(axes)
    if path.endswith(".svg"):
        Path(path).write_text(svg_of(figure), encoding="utf-8")
    else:
        figure.savefig(path, dpi=150)


if __name__ == "__main__":
    run_main(main)
