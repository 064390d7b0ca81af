# SPDX-License-Identifier: Apache-2.0
"""Look before you launch: which layout of a training fits a cluster, how fast it is, and the command line for it.

    python -m megatron.tools.plan --world-size 64 --local-world-size 8 --device-name A100-80GB --global-batch-size 1536 \\
        --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --bf16
    python -m megatron.tools.plan --params 100e9 --device-memory-gb 31
    python -m megatron.tools.plan --calibrate this_machine.json
    python -m megatron.tools.plan --mode inference --world-size 8 --device-name H100 --model-name-or-path llama-3-70b --bf16

Takes the flags of a training. Parallel sizes, micro-batch, ZeRO stage and schedule that are given narrow the search.
"""

import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import SettingsError, StorageError, UsageError, run_main
from megatron.model import quantization
from megatron.model.command_line import parse_with_options
from megatron.model.quantization import QuantizeOptions
from megatron.settings import rank_env, schema
from megatron.settings.declare import Count, Natural, Needs, Positive, declared, idle_flags
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.parse import parse, said
from megatron.settings.schema import setting


@dataclass(frozen=True)
class PlanOptions:
    """Options of the output."""

    mode: Literal["training", "inference"] = setting(
        "inference: layouts for generation from a trained model", "training"
    )
    top: Count = setting("plans in the table", 10)
    rejected: Natural = setting("layouts that do not fit in the table, the closest first", 5)
    tokens: Optional[Positive] = setting("tokens to train on: how many days that takes", None, "--token-budget")
    emit: Optional[str] = setting("write the best plan: as a script, or (PLAN.json) for --parallel-plan", None)
    picture: Optional[str] = setting("draw the plans of the table: .svg, .png or .pdf", None)
    json: bool = setting("everything as JSON", False)
    published: bool = setting("compare predictions with published runs of other suites, as tables in Markdown", False)
    params: Optional[Positive] = setting("only arithmetic: what so many parameters need", None)
    min_world_size: bool = setting("with --params: the fewest devices that hold it, and nothing else", False)
    calibrate: Optional[str] = setting("measure this machine into a file for --calibration", None)
    prompt_length: Optional[Count] = setting(
        "inference: tokens of a prompt (default: 512, or less for a model of a short context)", None
    )
    output_length: Optional[Count] = setting(
        "inference: tokens of a continuation (default: 128, or less for a model of a short context)", None
    )
    max_batch_size: Optional[Count] = setting(
        "inference: texts at a time, of all replicas (default: as many as fit, at most 256 a replica)", None
    )
    prefer: Literal["throughput", "latency"] = setting("inference: tokens per second, or time per token", "throughput")
    quantize: Optional[Literal["int8", "int8-dynamic", "int4"]] = setting(
        "inference: format of the linear layers' weights, in memory; times are those of plain weights", None
    )
    quantize_group_size: int = setting("inference: --quantize int4: inputs that share a scale", 128)
    quantize_skip: Optional[str] = setting("inference: --quantize: patterns of layers that keep their format", None)
    task_type: Optional[str] = setting("accepted for other advisors' command lines; GPT is what there is", None)


SERVING = ("prompt_length", "output_length", "max_batch_size", "prefer", "quantize")
IDLE = {name: Needs("--mode inference", lambda s: s.mode == "inference") for name in SERVING}
IDLE |= {
    name: declared("needs", quantization.QuantizeOptions)[name] for name in ("quantize_group_size", "quantize_skip")
}
IDLE |= {
    name: Needs("--mode training", lambda s: s.mode == "training") for name in ("rejected", "tokens", "emit", "picture")
}
BATCH = {
    name: Needs("--mode training; --max-batch-size has the texts at a time", lambda s: s.mode == "training")
    for name in ("micro_batch_size", "global_batch_size")
}
# Groups of settings that say nothing about a model and its ranks, and settings of other groups that count.
TRAINING = ("data", "batch", "optimizer", "recompute", "checkpoint", "guard", "logging", "profiling", "distillation")
COUNTING = {"load", "ckpt_step", "use_checkpoint_args", "debug", *BATCH}
LAYOUT = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
COMMON = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "global_batch_size",
    "max_global_batch_size",
    "precision",
    "world_size",
    "local_world_size",
    "device_name",
    "device_memory_gb",
    "memory_margin",
    "mtbf",
    "calibration",
    "wide",
    *PlanOptions.__dataclass_fields__,
)
PROG = "python -m megatron.tools.plan"


def main(argv: list[str]) -> None:
    """Arithmetic, a measurement, or a search."""
    words = {word.partition("=")[0].replace("_", "-") for word in argv}
    if "--published" in words:
        from megatron.planner.published import report

        parse(argv, dict(planner=schema.Planner, plan=PlanOptions), prog=PROG, description=_what(), common=COMMON)
        print(report())
        return
    if words & {"--params", "--calibrate"} and not words & {"--num-layers", "--model-name-or-path", "--preset"}:
        groups = parse(
            argv, dict(planner=schema.Planner, plan=PlanOptions), prog=PROG, description=_what(), common=COMMON
        )
        _check(groups["planner"], groups["plan"])
        return _without_model(groups["planner"], groups["plan"])
    if words & {"-h", "--help"}:
        parse(argv, schema.GROUPS | dict(plan=PlanOptions), prog=PROG, description=_what(), common=COMMON)
    config, asked = parse_with_options(_with_shape(argv), PlanOptions, _what())
    if asked.task_type and asked.task_type.rpartition(".")[2].upper() != "GPT":
        raise UsageError(f"--task-type {asked.task_type}: only GPT is planned")
    with failing_in_users_words(config.statements):
        _check(asked)
        if asked.calibrate:
            _calibrate(asked.calibrate)
            config = config.derive("--calibrate", calibration=asked.calibrate)
        own = idle_flags(asked, config.statements, IDLE)
        rank_env.print_notes(own + idle_flags(config.batch, config.statements, BATCH, mode=asked.mode))
        if asked.mode == "inference" and (idle := _of_training(config)):
            print(f"note: of training, and without effect on --mode inference: {', '.join(idle)}", file=sys.stderr)
        if asked.mode == "inference":
            return _serve(config, asked)
        _search(_with_batch(config), asked)


def _with_shape(argv: list[str]) -> list[str]:
    """The command line, with type and shape of the checkpoint that is to generate, unless it says whose shape counts."""
    given = said(argv, schema.GROUPS | dict(plan=PlanOptions))
    inference = "mode" in given and given["mode"].value == "inference"
    if not inference or "load" not in given or {"num_layers", "model_name_or_path"} & set(given):
        return argv
    from megatron.settings.from_checkpoint import Damaged, saved_record

    argv = [*argv, "--use-checkpoint-args"]
    with contextlib.suppress(Damaged, OSError):  # the reader of the settings says what is wrong
        _, record = saved_record(str(given["load"].value), given["ckpt_step"].value if "ckpt_step" in given else None)
        argv += [] if "model_type" in given else ["--model-type", record["config"]["model"].get("model_type", "GPT")]
    return argv


TOKENS = 1 << 22  # of a step, if no batch is given: 4 M, as for the Llamas


def _with_batch(config: schema.Config) -> schema.Config:
    """The settings with a batch of TOKENS, a multiple of the ranks, if nothing says how large it is."""
    said = ("global_batch_size", "max_global_batch_size", "local_batch_size", "gradient_accumulation_steps")
    if {"rampup_batch_size", *said} & set(config.given_words):
        return config
    ranks, length = config.planner.world_size or 1, config.model.seq_length
    samples = -(-max(1, TOKENS // length) // ranks) * ranks
    about = "no batch is given: 4 M tokens a step are assumed, as for the Llamas"
    print(f"note: {about} (--global-batch-size {samples})", file=sys.stderr)
    return config.derive("4 M tokens a step", global_batch_size=samples)


def _of_training(config: schema.Config) -> list[str]:
    """The settings that the user gave, and that a plan of a generation does not look at."""
    names = {name for group in TRAINING for name in schema.GROUPS[group].__dataclass_fields__} - COUNTING
    names |= set(schema.Parallel.__dataclass_fields__) - LAYOUT
    return [one.words for name, one in config.statements.items() if name in names and one.is_request]


def _what() -> str:
    return __doc__.splitlines()[0]


def _check(*groups) -> None:
    from megatron.planner.problems import refusal
    from megatron.settings.rules import out_of_range

    if wrong := [words for group in groups for words in out_of_range(group).values()]:
        raise refusal(wrong)


def _without_model(planner: schema.Planner, asked: PlanOptions) -> None:
    from megatron.planner import arithmetic
    from megatron.planner.device import choose
    from megatron.planner.target import device_memory
    from megatron.telemetry import figures

    if asked.calibrate:
        _calibrate(asked.calibrate)
    if asked.params:
        device = choose(planner.device_name, device_memory(planner), planner.calibration)
        if asked.min_world_size:
            print(arithmetic.fewest(asked.params, device.memory_bytes))
            return
        print(arithmetic.states(asked.params, device.memory_bytes))
        if planner.world_size:
            print(arithmetic.on_ranks(asked.params, device.memory_bytes, planner.world_size))
        if asked.tokens:
            ranks = planner.world_size or 1
            took = arithmetic.days(asked.params, asked.tokens, device.peak("bf16"), 0.4, ranks)
            what = f"{figures.count(asked.tokens)} tokens on {ranks} x {device.name}"
            print(f"{what}: {took:,.1f} days (speeds are assumed)")
            print("  assumed is 40 % of the peak of its data sheet")


def _calibrate(path: str) -> None:
    from megatron.planner.calibrate import measure

    try:
        Path(path).open("a").close()  # before half a minute of measuring
        device = measure(print)
        Path(path).write_text(json.dumps(dict(device=asdict(device)), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write --calibrate {path}", error.strerror) from error
    print(f"written: {path}")


def _search(config: schema.Config, asked: PlanOptions) -> None:  # noqa: C901
    from megatron.planner.choose import nothing_fits, plan_problems, search_layouts, tolerance
    from megatron.planner.command import command_line, script
    from megatron.planner.plan_json import record

    outcome = search_layouts(config)
    found, cluster = outcome.searched, outcome.cluster
    best = found.plans[0] if found.plans else None
    for problem in plan_problems(config, best, cluster) if best else ():
        raise SettingsError(problem)
    if not asked.json:
        _show(outcome, asked, config.planner.wide)
    if best is None:
        raise nothing_fits(outcome)

    def everything() -> str:
        return json.dumps(
            record(config, outcome, asked.top, asked.rejected, command_line(config, best, cluster)), indent=1
        )

    if asked.json:
        print(everything())
    else:
        print(f"\n{command_line(config, best, cluster)}")
    if asked.picture:
        from megatron.planner.picture import draw
        from megatron.planner.text import choice

        draw(found.plans[: asked.top], cluster, asked.picture, choice(found, tolerance(cluster)))
        if not asked.json:
            print(f"\nwritten: {asked.picture}")
    if asked.emit:
        data = asked.emit.endswith(".json")
        try:
            content = everything() + "\n" if data else script(config, best, cluster)
            Path(asked.emit).write_text(content, encoding="utf-8")
            Path(asked.emit).chmod(0o644 if data else 0o755)
        except OSError as error:
            raise StorageError(f"cannot write --emit {asked.emit}", error.strerror) from error
        if not asked.json:
            print(f"\nwritten: {asked.emit}")


def _serve(config: schema.Config, asked: PlanOptions) -> None:
    """Layouts for generation."""
    from megatron.planner import serving, serving_text, target
    from megatron.planner.choose import with_margin
    from megatron.planner.text import described, devices
    from megatron.telemetry.figures import WIDE, WIDTH, sentence

    cluster, source = target.cluster_of(config, ask=True)
    cluster = with_margin(config, cluster)
    job, remark = target.job_of(config, cluster)
    requests = serving.requests_for(job.facts.settings, asked.prompt_length, asked.output_length, asked.max_batch_size)
    how = QuantizeOptions(
        asked.quantize, quantize_group_size=asked.quantize_group_size, quantize_skip=asked.quantize_skip
    )
    found = serving.plans(job, cluster, requests, latency=asked.prefer == "latency", quantize=how)
    axes = dict(tensor_model_parallel_size="tp", pipeline_model_parallel_size="pp")
    given = {axis: getattr(config.parallel, name) for name, axis in axes.items() if name in config.statements}
    found = [plan for plan in found if all(getattr(plan, axis) == size for axis, size in given.items())]
    fit, width = [plan for plan in found if plan.fits], WIDE if config.planner.wide else WIDTH
    if asked.json:
        print(json.dumps(serving_text.record(found, cluster, requests), indent=1))
    elif fit:
        print(serving_text.answer(fit[0], cluster, requests) + "\n")
        for line in (described(job), devices(cluster, source), *[f"note: {remark}"] * bool(remark)):
            print(sentence(line, width))
        print(f"\n{serving_text.plans(fit[: asked.top], width)}")
        if others := serving_text.rejected(found[len(fit) :], cluster, width):
            print(f"\nout of the question, the closest first:\n{others}")
        print(f"\n{serving_text.parts(fit[0], cluster, width)}\n\n{serving_text.command(fit[0])}{_quantized(asked)}")
    if not fit:
        least = found[0] if found else None
        raise SettingsError(
            f"no layout of {cluster.world_size} x {cluster.device.memory_gb:g} GB holds the model and its texts",
            serving_text.rejected(found[:1], cluster) if least else "no size divides the model and the ranks",
            "more ranks, fewer or shorter texts (--max-batch-size, --prompt-length), or a smaller model",
        )


def _quantized(asked: PlanOptions) -> str:
    """The flags of --quantize, for a command."""
    words = f" --quantize {asked.quantize}" if asked.quantize else ""
    words += f" --quantize-group-size {asked.quantize_group_size}" if asked.quantize == "int4" else ""
    return words + (f" --quantize-skip {asked.quantize_skip}" if asked.quantize and asked.quantize_skip else "")


def _show(outcome, asked: PlanOptions, wide: bool) -> None:
    """The verdict, what was searched, the table, and all of the best plan."""
    from megatron.planner import text
    from megatron.telemetry.figures import WIDE, WIDTH, seconds, sentence

    found, cluster, width = outcome.searched, outcome.cluster, WIDE if wide else WIDTH
    best = found.plans[0] if found.plans else None
    if best:
        print(f"the best of {found.num_layouts:,} layouts: {text.rate(best, cluster)}")
        print(f"  layout: {best.layout.short()}, micro-batch {best.layout.micro_batch_size}")
        print(text.verdict(best, cluster))
    else:
        none = "none within memory" if found.num_layouts else "none is possible"
        print(f"nothing fits: {found.num_layouts:,} layouts of {cluster.world_size:,} ranks, {none}")
    print()
    for line in (text.described(outcome.job), text.devices(cluster, outcome.source)):
        print(sentence(line, width))
    for remark in outcome.remarks:
        print(sentence(f"note: {remark}", width))
    searched = f"{found.num_layouts:,} layouts searched in {seconds(outcome.seconds)}"
    slower = "; the others are slower by their work alone" if found.evaluated < found.num_layouts else ""
    print(
        sentence(f"{searched}: of {found.evaluated:,} evaluated {found.too_large:,} do not fit{slower}", width) + "\n"
    )
    if best:
        print(text.plans(found, cluster, asked.top, width))
    if found.rejected or found.impossible:
        print(f"\nout of the question, the closest first:\n{text.rejected(found, asked.rejected, width)}")
    if best:
        print(f"\n{_of_the_best(outcome.config, best, cluster, asked, width)}")


def _of_the_best(config, best, cluster, asked: PlanOptions, width: int) -> str:
    """Its time, its memory, its messages."""
    from megatron.planner import text
    from megatron.planner.goodput import describe
    from megatron.planner.memory import memory_report
    from megatron.planner.startup import describe_groups, groups_of
    from megatron.planner.traffic import transfers
    from megatron.telemetry.figures import sentence

    ranks = sorted({0, best.rank, best.layout.pp - 1})
    needed = [memory_report(best.job, best.layout, cluster.device, rank) for rank in ranks]
    parts = [
        "\n".join([f"the best, {best.layout.short()}:", text.parts(best.step, cluster, width)]),
        "\n".join(text.pace(best, cluster, asked.tokens)),
        *["\n".join(sentence(line, width) for line in describe(config, best, cluster))] * bool(config.planner.mtbf),
        text.memory_tables(needed, cluster.device.memory_bytes, width),
    ]
    if cluster.world_size > 1:
        parts.append(text.traffic(transfers(best.job, best.layout, 0), width))
        groups = groups_of(best.layout, best.job.facts.num_layers, cluster.device.kind == "cuda")
        buffers = max(one.device.get("communication buffers", 0) for one in needed)
        parts.append("\n".join(sentence(line, width) for line in describe_groups(groups, cluster.device, buffers)))
    return "\n\n".join(parts)


if __name__ == "__main__":
    run_main(main)
