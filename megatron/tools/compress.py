# SPDX-License-Identifier: Apache-2.0
"""Prune a trained model, distil it from the larger one, train it for 8 bits, and compare all of them.

    python -m megatron.tools.compress --load checkpoints --save compressed --data-path held_out_text_document \\
        --prune-ratio 0.4 --prune-criterion taylor --calibration-data train_text_document --qat-iters 50 \\
        -- python pretrain_gpt.py --micro-batch-size 4 --global-batch-size 8 --train-iters 200 --lr 6e-4 \\
        --train-data-path train_text_document --eval-iters 0

After -- comes the command that trains, with any launcher. Each stage has a folder in --save: pruned, distilled, quantized.
The same command again runs the stages that are missing; an interrupted training resumes from its last checkpoint.
report.md, report.svg and report.json have parameters, size, loss, perplexity, accuracy on LAMBADA and speed of each stage.
"""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megatron.errors import Failure, SettingsError, UsageError, run_main
from megatron.model.pruning import PruningOptions, TargetSizes, check_text
from megatron.model.recipe import config_of, facts_of
from megatron.settings.declare import Count, Positive, dashed
from megatron.settings.from_checkpoint import saved_record
from megatron.settings.parse import parse_with_record
from megatron.settings.rules import out_of_range
from megatron.settings.schema import setting
from megatron.settings.statements import Statement
from megatron.storage.durable import write_synced
from megatron.telemetry.drawing import BLUE, INK, ORANGE, new_figure, plain, svg_of

PROG = "python -m megatron.tools.compress"
SET_HERE = "load save finetune use-checkpoint-args teacher-load kd-alpha kd-temperature quantization".split()
MEASURED_ON = "load data_path valid_data max_tokens prompt_length output_length".split()  # what figures depend on
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class CompressOptions:
    """The model, the texts, and the stages."""

    load: str = setting("folder of checkpoints, or one checkpoint: the model, and the teacher")
    save: str = setting("folder for the stages and the report")
    data_path: list[str] = setting("prefixes of token files that were held out, for loss and perplexity")
    valid_data: Optional[str] = setting("lambada_test.jsonl, for the accuracy on LAMBADA", None)
    calibration_data: Optional[list[str]] = setting(
        "prefixes of token files for --prune-criterion taylor or load", None, "--calib-data-path"
    )
    calibration_samples: int = setting("samples of --calibration-data, evenly spaced", 64, "--calib-size")
    kd_alpha: float = setting("share of the loss on the teacher's logits", 0.5)
    kd_temperature: float = setting("divides the logits of both models", 1.0)
    qat_iters: Optional[Count] = setting("steps of quantization aware training (default: no such stage)", None)
    qat_lr: Optional[Positive] = setting("learning rate of these steps (default: that of the training command)", None)
    prompt_length: Count = setting("tokens of the prompt whose continuation is timed", 64)
    output_length: Count = setting("new tokens that are timed", 32)
    max_tokens: Optional[int] = setting("look at no more than this many tokens of each --data-path", None)


@dataclass(frozen=True)
class CompressionStage:
    """A folder with checkpoints, and the command that writes it.

    resume:   the command if the folder has a checkpoint already
    quantize: the flag with which the stage is evaluated
    """

    name: str
    folder: str
    command: Sequence[str] = ()
    resume: Sequence[str] = ()
    quantize: Sequence[str] = ()


def main(argv: list[str]) -> None:
    """Run the stages that are missing, measure, and write the report."""
    split = argv.index("--") if "--" in argv else len(argv)
    groups, given = parse_with_record(
        argv[:split],
        dict(compress=CompressOptions, pruning=PruningOptions, targets=TargetSizes),
        prog=PROG,
        description="Prune, distil and quantize a trained model. The command that trains comes after --.",
        common=tuple(CompressOptions.__dataclass_fields__),
    )
    training = argv[split + 1 :]
    options = groups["compress"]
    check(training, groups["pruning"], options)
    Path(options.save).mkdir(parents=True, exist_ok=True)
    record = Record(Path(options.save) / "report.json")
    for stage in stages(options, training, pruning_words(given)):
        record.make(stage)
        record.measure(stage, options)
    write_report(Path(options.save), record.measured)


def check(training: Sequence[str], pruning: PruningOptions, options: CompressOptions) -> None:
    """Raise UsageError for a training command that is missing or has this tool's flags, and for flags that miss another;
    SettingsError for values out of range.
    """
    check_text(pruning.prune_criterion, options.calibration_data)
    if wrong := out_of_range(options):
        raise SettingsError("; ".join(wrong.values()))
    if options.qat_lr and not options.qat_iters:
        raise UsageError("--qat-lr: there is no quantization aware training", do="give its steps, --qat-iters N")
    if not training:
        raise UsageError("the command that trains is missing", do=f"{PROG} ... -- python pretrain_gpt.py ...")
    for word in training:
        if word.startswith("--") and word[2:].partition("=")[0].replace("_", "-") in SET_HERE:
            raise UsageError(f"{word} after --: this tool sets it itself", do="leave it out")


def pruning_words(given: Mapping[str, Statement]) -> list[str]:
    """The flags of pruning that the user has given."""
    words = []
    for name in (*PruningOptions.__dataclass_fields__, *TargetSizes.__dataclass_fields__):
        if name in given:
            value = given[name].value
            words += [dashed(name), *map(str, value if isinstance(value, list) else [value])]
    return words


def stages(options: CompressOptions, training: Sequence[str], pruning: Sequence[str]) -> list[CompressionStage]:
    """The model itself, and the stages in their order."""
    python, out = sys.executable, Path(options.save)
    pruned, distilled, quantized = (str(out / name) for name in ("pruned", "distilled", "quantized"))
    calibration = ["--calibration-samples", str(options.calibration_samples)]
    calibration = ["--calibration-data", *options.calibration_data, *calibration] if options.calibration_data else []
    prune = [python, "-m", "megatron.tools.prune", "--load", options.load, "--save", pruned, *pruning, *calibration]
    teacher = ["--teacher-load", options.load, "--kd-alpha", str(options.kd_alpha)]
    teacher += ["--kd-temperature", str(options.kd_temperature), "--use-checkpoint-args"]

    def trained(name: str, start: str, folder: str, more: Sequence[str], quantize=()) -> CompressionStage:
        command = [*training, "--then", *teacher, *more, "--save", folder, "--load"]
        return CompressionStage(name, folder, [*command, start, "--finetune"], [*command, folder], quantize)

    found = [
        CompressionStage("trained", options.load),
        CompressionStage("pruned", pruned, prune),
        trained("distilled", pruned, distilled, ()),
    ]
    if options.qat_iters:
        rate = ["--lr", f"{options.qat_lr:g}"] if options.qat_lr else []
        own = ["--quantization", "--train-iters", str(options.qat_iters), *rate]
        found.append(trained("quantized", distilled, quantized, own, ["--quantize", "int8"]))
    return found


class Record:
    """report.json: the commands of finished stages, and their figures."""

    def __init__(self, path: Path):
        self.path = path
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.done: dict[str, list[str]] = found.get("done", {})
        self.measured: dict[str, dict[str, Any]] = found.get("measured", {})

    def make(self, stage: CompressionStage) -> None:
        """Run a stage's command, unless it is done. Raises SettingsError if another command has made the folder."""
        if not stage.command:
            return
        if stage.name in self.done:
            if self.done[stage.name] != list(stage.command):
                raise SettingsError(
                    f"{stage.folder} was made by another command",
                    f"then: {shlex.join(self.done[stage.name])}\n  now:  {shlex.join(stage.command)}",
                    "give a new --save, or the same settings",
                )
            print(f"{stage.name}: {stage.folder} is there already", flush=True)
            return
        begun = (Path(stage.folder) / TRACKER).exists()
        if stage.resume or not begun:  # a model that was pruned is complete
            run(stage.name, stage.resume if begun else stage.command)
        self.done[stage.name] = list(stage.command)
        self._write()

    def measure(self, stage: CompressionStage, options: CompressOptions) -> None:
        """Evaluate and time a stage, unless that is done."""
        on = {name: getattr(options, name) for name in MEASURED_ON}
        if self.measured.get(stage.name, {}).get("on") != on:
            print(f"{stage.name}: measuring", flush=True)
            self.measured[stage.name] = figures(stage, options) | dict(on=on)
            self._write()

    def _write(self) -> None:
        content = json.dumps(dict(done=self.done, measured=self.measured), indent=1)
        write_synced(self.path, content.encode())


def run(name: str, command: Sequence[str]) -> None:
    """Run the command of a stage, with its output here. Raises Failure with its exit code if it fails."""
    print(f"{name}: {shlex.join(command)}", flush=True)
    code = subprocess.run(command).returncode
    if code:
        raise failed(
            f"the stage '{name}' ended with code {code}",
            do="after the cause is removed, this tool continues with this stage",
            code=code,
        )


def output_of(command: Sequence[str]) -> str:
    """The output of a command. Raises Failure with its exit code if it fails."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        said = f"python {shlex.join(command)} ended with code {done.returncode}"
        raise failed(said, done.stderr.strip(), code=done.returncode)
    return done.stdout


def failed(*said: str, code: int, do: str = "") -> Failure:
    """A failure with the exit code of a command."""
    failure = Failure(*said, do=do)
    failure.code = code
    return failure


def figures(stage: CompressionStage, options: CompressOptions) -> dict[str, Any]:
    """Parameters, megabytes, loss, perplexity, accuracy on LAMBADA, and tokens per second of a stage."""
    result = Path(options.save) / f"{stage.name}.jsonl"
    evaluate = ["-m", "megatron.tools.evaluate", "--load", stage.folder, *stage.quantize, "--output", str(result)]
    bound = [] if options.max_tokens is None else ["--max-tokens", str(options.max_tokens)]
    output_of([*evaluate, "--data-path", *options.data_path, *bound])
    lines = [json.loads(line) for line in result.read_text(encoding="utf-8").splitlines()]
    tokens = sum(line["tokens"] for line in lines)
    found = dict(loss=sum(line["loss"] * line["tokens"] for line in lines) / tokens, tokens=tokens)
    if options.valid_data:
        output_of([*evaluate, "--task", "LAMBADA", "--valid-data", options.valid_data, "--strict-lambada"])
        found["lambada"] = json.loads(result.read_text(encoding="utf-8").splitlines()[0])["accuracy"]
    lengths = ["--prompt-length", str(options.prompt_length), "--output-length", str(options.output_length)]
    timed = ["-m", "megatron.tools.benchmark_inference", "--load", stage.folder, *stage.quantize, *lengths]
    speed = json.loads(output_of([*timed, "--batch-size", "1", "--json"]).strip().splitlines()[-1])
    _, state = saved_record(stage.folder)
    parameters = facts_of(config_of(state["config"]), state["vocab_size"]).parameters
    return found | dict(parameters=parameters, megabytes=speed["weights"], tokens_per_second=speed["tokens_per_second"])


def table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as Markdown."""
    lambada = any("lambada" in one for one in measured.values())
    titles = ["", "parameters", "weights, MB", "loss", "perplexity", *["LAMBADA"] * lambada, "tokens/s"]
    rows = [titles, ["---"] * len(titles)]
    for name, one in measured.items():
        accuracy = [f"{one['lambada']:.4f}" if "lambada" in one else ""] * lambada
        rows.append(
            [name, f"{one['parameters']:,}", f"{one['megabytes']:.1f}", f"{one['loss']:.4f}"]
            + [f"{math.exp(min(20.0, one['loss'])):.2f}", *accuracy, f"{one['tokens_per_second']:.0f}"]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def write_report(folder: Path, measured: Mapping[str, Mapping[str, Any]]) -> None:
    """Write and print the table, and draw size and loss of each stage."""
    text = table(measured)
    (folder / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    figure = new_figure(7.0, 0.9 + 0.35 * len(measured), "report.svg")
    names = list(measured)
    for axes, (key, title, colour) in zip(
        figure.subplots(1, 2, sharey=True), (("megabytes", "weights, MB", BLUE), ("loss", "loss", ORANGE))
    ):
        values = [measured[name][key] for name in names]
        axes.barh(range(len(names)), values, 0.6, color=colour)
        for row, value in enumerate(values):
            axes.text(value, row, f" {value:.4g}", va="center", color=INK)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(0, 1.2 * max(values))
        axes.set_xlabel(title, color=INK)
        plain(axes)
    figure.axes[0].invert_yaxis()
    (folder / "report.svg").write_text(svg_of(figure), encoding="utf-8")
    print(f"{folder}: report.md, report.svg, report.json")


if __name__ == "__main__":
    run_main(main)
