# SPDX-License-Identifier: Apache-2.0
"""Write a self-contained HTML page about a run (curves, settings, totals, samples), or one that compares several runs.

    python -m megatron.tools.report runs/quickstart --output runs/quickstart/report.html
    python -m megatron.tools.report runs/a runs/b runs/c --output runs/compare.html     (telemetry/report_compare.py)

It reads the run's folder: metrics.jsonl (required), events.jsonl, evaluation.jsonl or evaluation.json (of `tools.evaluate
--output`), and samples.txt or generations.jsonl. The page needs no network: pictures are embedded. It shows the
perplexity of the held-out evaluation, if there is one, else of the last validation.
"""

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megatron.errors import DataError, UsageError, no_such_file, run_main
from megatron.settings.declare import dashed
from megatron.settings.positional import divide, parse_one
from megatron.settings.schema import setting
from megatron.tasks.settings import confusion_pictures
from megatron.telemetry.curves import data_url, memory_plot, plots
from megatron.telemetry.events import count_restarts, read_events
from megatron.telemetry.figures import count, duration, seconds, several
from megatron.telemetry.report_compare import figures, page_of
from megatron.telemetry.report_page import Section, page
from megatron.telemetry.run_folder import METRICS, find_metrics, unique_names
from megatron.telemetry.run_record import EXPERT_AXES, LOSS, History, read_history
from megatron.training import report_facts

PROG = "python -m megatron.tools.report"


@dataclass(frozen=True)
class ReportOptions:
    """The runs to report on, and the output."""

    run: Optional[str] = setting("folder of the run, or its metrics.jsonl (also a word without a flag)", None)
    output: Optional[str] = setting(
        "HTML file to write (default: report.html in the folder; of several runs, compare.html in the folder around them)",
        None,
    )
    title: Optional[str] = setting("heading (default: names of the folders)", None)
    json: bool = setting("print figures as JSON and write no page", False)


def build(folder: Path, metrics_file: Optional[Path] = None, title: Optional[str] = None) -> str:
    """Build the page as text. Raises DataError if there is nothing to report on."""
    metrics = metrics_file or metrics_of(folder)
    history, events = read(metrics), read_events(metrics)
    samples = read_samples(folder)
    evaluation = read_evaluation(folder)
    sections = [
        Section("The task", confusions(history, folder), [("", report_facts.task(history))]),
        Section("Training", pictures=plots(history)),
        Section("What the model writes", quotes=samples),
        Section("Evaluation on held-out text", tables=[("", _rows(evaluation) if evaluation else {})]),
        Section("Schedule", report_facts.schedule_plot(history), [("", report_facts.schedule(history))], wide=True),
        Section("Data", tables=[("", report_facts.data(history))]),
        Section("Memory", memory_plot(history), [("", report_facts.memory(history))]),
        ranks_section(history),
        experts_section(history),
        Section("Events", tables=[("", report_facts.events(history, events))]),
        Section("Supervised", tables=[("", report_facts.supervision(events))]),
        Section("Totals", tables=[("", totals(history))]),
        Section("The run", tables=[("", provenance(history))]),
        Section("Settings", tables=list(settings(history).items()), folded=True),
    ]
    return page(title or folder.resolve().name, subtitle(history), tiles(history, evaluation, events), sections)


def ranks_section(history: History) -> Section:
    """The section about slow ranks."""
    pictures, rows = report_facts.ranks(history)
    return Section("Ranks", pictures, [("", rows)])


def experts_section(history: History) -> Section:
    """The section about the loads of experts."""
    pictures, rows = report_facts.experts(history)
    return Section("Experts", pictures, [("", rows)])


def metrics_of(place: Path) -> Path:
    """The metrics file of a run's folder, or the file itself."""
    return place if place.suffix == ".jsonl" else find_metrics(place) or place / METRICS


def read(path: Path) -> History:
    """Read a metrics file. Raises DataError if there is nothing to report on."""
    if not path.is_file():
        raise DataError(
            f"{path}: {no_such_file(path)}", why="a run writes it next to its checkpoints (--save) or to --metrics-file"
        )
    history = read_history(path)
    if not history.steps:
        raise DataError(f"{path}: holds no training step yet", do="let the run reach its first iteration")
    return history


# -- figures -------------------------------------------------------------------------------------------------------------


def confusions(history: History, folder: Path) -> list[tuple[str, str]]:
    """(caption, picture) of each confusion matrix of a fine-tuning."""
    paths = confusion_pictures(history.run, folder)
    return [
        (f"Confusion matrix, {path.stem.removeprefix('confusion-')}", data_url(path.read_bytes())) for path in paths
    ]


def tiles(history: History, evaluation=None, events: Sequence[dict] = ()) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: (value, name, remark)."""
    steps, last = history.steps, history.steps[-1]
    restarts = count_restarts(events) if events else max(0, len(history.starts) - 1)
    rows, loss = [report_facts.judged(history)] if history.figures else [], history.loss
    losses = [step[loss] for step in steps[-20:] if step.get(loss) is not None]
    if losses:
        first = next((step[loss] for step in steps if step.get(loss) is not None), losses[-1])
        mean = f"mean of the last {len(losses)} steps" if len(losses) > 1 else "of the last step"
        rows.append((f"{statistics.fmean(losses):.3f}", "training loss", f"{mean}; the first was {first:.3f}"))
    if held := perplexity(history, evaluation):
        rows.append((f"{held[0]:,.1f}", "perplexity", held[1]))
    rows.append(
        (f"{last['iteration']:,}", "iterations", several(restarts, "restart") if restarts else "without a restart")
    )
    tokens = trained_tokens(history)
    if tokens:
        rows.append((count(tokens), "tokens trained on", f"{last['consumed_samples']:,} samples"))
    speed = [step["tokens_per_second"] for step in steps if step.get("tokens_per_second")]
    if speed:
        rows.append((f"{statistics.median(speed):,.0f}", "tokens per second", "of all ranks, median of the steps"))
    mfu = [step["mfu"] for step in steps if step.get("mfu")]
    if mfu:
        rows.append((f"{statistics.median(mfu):.1%}", "MFU", mfu_of(history)))
    if seen := [step["mfu_causal"] for step in steps if step.get("mfu_causal")]:
        what = "the same with half of causal attention, as Megatron-LM counts today"
        rows.append((f"{statistics.median(seen):.1%}", "MFU, causal attention", what))
    return rows


def perplexity(history: History, evaluation=None) -> Optional[tuple[float, str]]:
    """The perplexity of the page, and the data that it was measured on."""
    held_out = _find_perplexity(evaluation, "")
    if held_out:
        return held_out
    valid = [e for e in history.evals if e.get("split") == "validation" and e.get(LOSS) is not None]
    if not valid:
        return None
    return math.exp(min(20, valid[-1][LOSS])), f"of validation during training, at iteration {valid[-1]['iteration']:,}"


def _find_perplexity(record, name: str) -> Optional[tuple[float, str]]:
    if isinstance(record, list):
        return next(filter(None, (_find_perplexity(item, name) for item in record)), None)
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("perplexity"), (int, float)):
        what = record.get("data") or name or "held-out text"
        tokens = f", {count(record['tokens'])} tokens" if record.get("tokens") else ""
        at = f", iteration {record['iteration']:,}" if isinstance(record.get("iteration"), int) else ""
        return float(record["perplexity"]), f"held out: {what}{tokens}{at}"
    return next(filter(None, (_find_perplexity(inner, part) for part, inner in record.items())), None)


def mfu_of(history: History) -> str:
    """Describe the peak that MFU is relative to, as the run has recorded it."""
    peak = history.run.get("peak") or {}
    if not peak.get("flops"):
        return "model FLOPs, as a share of the peak that the run compared with"
    return f"model FLOPs, as a share of {peak['flops'] / 1e12:,.3g} TFLOP/s a rank: {peak.get('of')}"


def totals(history: History) -> dict[str, str]:
    steps, loss = history.steps, history.loss
    took = sum(step.get("seconds") or 0.0 for step in steps)
    rows = {
        "iterations": f"{steps[-1]['iteration']:,}",
        "samples": f"{steps[-1]['consumed_samples']:,}",
        "tokens": f"{trained_tokens(history):,}" if trained_tokens(history) else "",
        "time in training steps": duration(took),
        "time in evaluation": duration(sum(e.get("seconds") or 0.0 for e in history.evals)),
        "median time of a step": seconds(statistics.median(step.get("seconds") or 0.0 for step in steps)),
        "skipped steps (fp16 overflow)": str(sum(bool(step.get("skipped")) for step in steps)),
        "steps without a finite loss": str(sum(loss in step and step[loss] is None for step in steps)),
    }
    for evaluation in {e.get("split"): e for e in history.evals if e.get(loss) is not None}.values():
        rows[f"last {evaluation['split']} loss"] = f"{evaluation[loss]:.4f}"
    return {name: value for name, value in rows.items() if value}


def trained_tokens(history: History) -> int:
    model = (history.run.get("config") or {}).get("model") or {}
    return history.steps[-1]["consumed_samples"] * int(model.get("seq_length") or 0)


def subtitle(history: History) -> str:
    run = history.run
    model = (run.get("config") or {}).get("model") or {}
    words = []
    if run.get("parameters"):
        words.append(f"{count(run['parameters'])} parameters")
    if model.get("num_layers"):
        words.append(
            f"{model['num_layers']} layers of width {model.get('hidden_size')}, {model.get('seq_length')} tokens"
        )
    mesh = dict(run.get("mesh") or {})
    if mesh:
        mesh["dp"] = mesh.pop("replicate", 1) * mesh.pop("shard", 1) * mesh.get("dp", 1)
        sizes = {axis: f"{axis} {size}" for axis, size in mesh.items() if size > 1}
        words.append(" x ".join(sizes[axis] for axis in sizes if axis not in EXPERT_AXES) or "one process")
        words += [sizes[axis] for axis in EXPERT_AXES if axis in sizes]  # they divide the same ranks once more
    if history.interleaved:
        words.append("records of several runs, interleaved")
    return " \u00b7 ".join(word for word in [*words, str(run.get("time") or "")[:16].replace("T", " ")] if word)


def provenance(history: History) -> dict[str, str]:
    """Host, device, command and versions of the run."""
    run = history.run
    rows = {name: run.get(name) for name in ("time", "host", "machine", "device", "commit", "parameters")}
    rows["parameters"] = f"{run['parameters']:,}" if run.get("parameters") else ""
    rows["command"] = " ".join(map(str, run.get("command") or []))
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items())
    rows["ranks"] = ", ".join(f"{axis} {size}" for axis, size in (run.get("mesh") or {}).items())
    rows["started from iterations"] = ", ".join(map(str, history.starts))
    if history.damaged_lines:
        rows["unreadable lines in metrics.jsonl"] = history.damaged_lines
    return {name: str(value) for name, value in rows.items() if value not in (None, "")}


def settings(history: History) -> dict[str, dict[str, str]]:
    """Map group -> flag -> value, without settings that have no value."""
    groups = dict(history.run.get("config") or {})
    groups = {**(groups.pop("extra", None) or {}), **groups}  # a recipe's own settings first
    groups.pop("given", None)
    shown = {}
    for group, fields in groups.items():
        if isinstance(fields, dict):
            rows = {dashed(name): _words(value) for name, value in fields.items() if value is not None}
            shown.update({group: rows} if rows else {})
    return shown


def _words(value) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- other files of the run ----------------------------------------------------------------------------------------------


def read_samples(folder: Path) -> list[tuple[str, str]]:
    """(prompt, continuation) of generations.jsonl, or the whole of samples.txt as one continuation."""
    lines = folder / "generations.jsonl"
    if lines.is_file():
        samples = []
        for line in lines.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                prompt = str(record.get("prompt", ""))
            except (ValueError, AttributeError):
                continue
            text = str(record.get("completion", record.get("text", "")))
            samples.append((prompt, text.removeprefix(prompt)))
        return samples
    plain = folder / "samples.txt"
    return [("", plain.read_text(encoding="utf-8", errors="replace").strip())] if plain.is_file() else []


def read_evaluation(folder: Path):
    """Read evaluation.jsonl or evaluation.json, of any shape; None without them. Raises DataError."""
    lines, whole = folder / "evaluation.jsonl", folder / "evaluation.json"
    path = lines if lines.is_file() else whole
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        if path == whole:
            return json.loads(text)
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
        return records[0] if len(records) == 1 else records
    except ValueError as error:
        raise DataError(
            f"{path}: not valid JSON", why=str(error), do="run the evaluation again, or remove the file"
        ) from None


def _number(value: float, name: str) -> str:
    if isinstance(value, int):
        return str(value) if isinstance(value, bool) else f"{value:,}"
    return f"{value:,.1f}" if name.endswith("perplexity") else f"{value:.6g}"


def _rows(value, name: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        parts = enumerate(value, 1)
    else:
        return {name or "result": _number(value, name) if isinstance(value, (int, float)) else _words(value)}
    return {
        key: row
        for part, inner in parts
        for key, row in _rows(inner, f"{name} / {part}" if name else str(part)).items()
    }


# -- command -------------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Write a page about one run, or one that compares several with the first; --json: only the figures."""
    names, flags = divide(argv, ReportOptions, {"-o": "--output"})
    about = "Write an HTML page about a run, or one that compares several."
    asked = parse_one(flags, ReportOptions, f"{PROG} RUN ...", about)
    places = [Path(name) for name in [*([asked.run] if asked.run else []), *names] or ["."]]
    if len(places) == 1 and not asked.json:
        folder, metrics_file = (places[0], None) if places[0].is_dir() else (places[0].parent, places[0])
        return write(build(folder, metrics_file, asked.title), asked.output or folder / "report.html")
    runs = {name: read(metrics_of(place)) for name, place in zip(run_names(places), places, strict=True)}
    if asked.json:
        text = json.dumps(figures(runs), indent=1)
        return write(text + "\n", asked.output) if asked.output else print(text)
    common = Path(os.path.commonpath([place.resolve().parent for place in places]))
    write(page_of(runs, asked.title or " and ".join(runs)), asked.output or common / "compare.html")


def run_names(places: list[Path]) -> list[str]:
    """Names of runs: the last parts of their paths, as many as make them unique.

    >>> run_names([Path("runs/a"), Path("runs/b/metrics.jsonl")]), run_names([Path("x/run"), Path("y/run")])
    (['a', 'b'], ['x/run', 'y/run'])
    """
    paths = [str((place.parent if place.name == METRICS else place.with_suffix("")).resolve()) for place in places]
    if len(set(paths)) < len(paths):
        raise UsageError("a run is named twice", do="name each run once")
    return unique_names(paths)


def write(text: str, output: str | Path) -> None:
    """Write a page and print its path."""
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"report: {output}")


if __name__ == "__main__":
    run_main(main)
