# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about a run: curves, settings, totals, samples.

    python -m megatron.tools.report runs/quickstart --output runs/quickstart/report.html

Read from the run's folder: metrics.jsonl (needed); evaluation.json, and samples.txt or generations.jsonl (shown when
there). The page needs no network: the pictures are inside it.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megatron.errors import DataError, run_main
from megatron.settings.schema import setting
from megatron.telemetry.metrics import duration
from megatron.telemetry.run_record import History, read_history
from megatron.tools.report_page import Section, page
from megatron.tools.report_plots import plots

LOSS = "lm loss"


@dataclass(frozen=True)
class ReportOptions:
    """What to report on."""

    run: Optional[str] = setting("folder of the run, or its metrics.jsonl (also the first word)", None)
    output: Optional[str] = setting("HTML file to write (default: report.html in the folder)", None)
    title: Optional[str] = setting("heading (default: name of the folder)", None)


def build(folder: Path, metrics_file: Optional[Path] = None, title: Optional[str] = None) -> str:
    """The page as text. Raises DataError when there is nothing to report on."""
    path = metrics_file or folder / "metrics.jsonl"
    if not path.is_file():
        raise DataError(
            f"{path}: no such file", why="a run writes it beside its checkpoints (--save) or to --metrics-file"
        )
    history = read_history(path)
    if not history.steps:
        raise DataError(f"{path}: holds no training step yet", do="let the run reach its first iteration")
    samples = read_samples(folder)
    evaluation = read_evaluation(folder)
    sections = [
        Section("Training", pictures=plots(history.steps, history.evals, history.starts)),
        Section("What the model writes", quotes=samples),
        Section("Evaluation", tables=[("", evaluation)]),
        Section("Totals", tables=[("", totals(history))]),
        Section("The run", tables=[("", provenance(history))]),
        Section("Settings", tables=list(settings(history).items()), folded=True),
    ]
    return page(title or folder.resolve().name, subtitle(history), tiles(history), sections)


# -- figures -------------------------------------------------------------------------------------------------------------


def tiles(history: History) -> list[tuple[str, str, str]]:
    """The handful of numbers at the top: (value, what it is, a remark)."""
    steps, last, launches = history.steps, history.steps[-1], max(1, len(history.starts))
    found = []
    losses = [step[LOSS] for step in steps[-20:] if step.get(LOSS) is not None]
    if losses:
        first = next((step[LOSS] for step in steps if step.get(LOSS) is not None), losses[-1])
        found.append((f"{statistics.fmean(losses):.3f}", "training loss", f"from {first:.3f} at the start"))
    valid = [e for e in history.evals if e.get("split") == "validation" and e.get(LOSS) is not None]
    if valid:
        before = f"from {math.exp(min(20, valid[0][LOSS])):,.1f}" if len(valid) > 1 else f"loss {valid[-1][LOSS]:.3f}"
        found.append((f"{math.exp(min(20, valid[-1][LOSS])):,.1f}", "validation perplexity", before))
    found.append((f"{last['iteration']:,}", "iterations", f"in {launches} launch{'es' * (launches > 1)}"))
    tokens = trained_tokens(history)
    if tokens:
        found.append((short(tokens), "tokens trained on", f"{last['consumed_samples']:,} samples"))
    speed = [step["tokens_per_second"] for step in steps if step.get("tokens_per_second")]
    if speed:
        mfu = [step["mfu"] for step in steps if step.get("mfu")]
        remark = f"MFU {statistics.median(mfu):.1%}" if mfu else "median over the run"
        found.append((f"{statistics.median(speed):,.0f}", "tokens per second", remark))
    return found


def totals(history: History) -> dict[str, str]:
    steps = history.steps
    seconds = sum(step.get("seconds") or 0.0 for step in steps)
    rows = {
        "iterations": f"{steps[-1]['iteration']:,}",
        "samples": f"{steps[-1]['consumed_samples']:,}",
        "tokens": f"{trained_tokens(history):,}" if trained_tokens(history) else "",
        "time in training steps": duration(seconds),
        "time in evaluation": duration(sum(e.get("seconds") or 0.0 for e in history.evals)),
        "median time of a step": f"{1000 * statistics.median(step.get('seconds') or 0.0 for step in steps):,.1f} ms",
        "skipped steps (fp16 overflow)": str(sum(bool(step.get("skipped")) for step in steps)),
        "steps without a finite loss": str(sum(LOSS in step and step[LOSS] is None for step in steps)),
    }
    for evaluation in {e.get("split"): e for e in history.evals if e.get(LOSS) is not None}.values():
        value = evaluation[LOSS]
        rows[f"last {evaluation['split']} loss, perplexity"] = f"{value:.4f}, {math.exp(min(20.0, value)):,.2f}"
    return {name: value for name, value in rows.items() if value}


def trained_tokens(history: History) -> int:
    model = (history.run.get("config") or {}).get("model") or {}
    return history.steps[-1]["consumed_samples"] * int(model.get("seq_length") or 0)


def subtitle(history: History) -> str:
    run = history.run
    model = (run.get("config") or {}).get("model") or {}
    words = []
    if run.get("parameters"):
        words.append(f"{short(run['parameters'])} parameters")
    if model.get("num_layers"):
        words.append(
            f"{model['num_layers']} layers of width {model.get('hidden_size')}, {model.get('seq_length')} tokens"
        )
    mesh = dict(run.get("mesh") or {})
    if mesh:
        mesh["dp"] = mesh.pop("replicate", 1) * mesh.pop("shard", 1) * mesh.get("dp", 1)
        words.append(" x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one process")
    return " \u00b7 ".join(word for word in [*words, str(run.get("time") or "")[:16].replace("T", " ")] if word)


def provenance(history: History) -> dict[str, str]:
    """Where the run happened and with what."""
    run = history.run
    rows = {name: run.get(name) for name in ("time", "host", "machine", "device", "commit", "parameters")}
    rows["command"] = " ".join(map(str, run.get("command") or []))
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items())
    rows["ranks"] = ", ".join(f"{axis} {size}" for axis, size in (run.get("mesh") or {}).items())
    rows["started from iterations"] = ", ".join(map(str, history.starts))
    if history.damaged_lines:
        rows["unreadable lines in metrics.jsonl"] = history.damaged_lines
    return {name: str(value) for name, value in rows.items() if value not in (None, "")}


def settings(history: History) -> dict[str, dict[str, str]]:
    """Group -> flag -> value, settings without a value left out."""
    groups = history.run.get("config") or {}
    shown = {}
    for group, fields in groups.items():
        if isinstance(fields, dict):
            rows = {f"--{name.replace('_', '-')}": _words(value) for name, value in fields.items() if value is not None}
            shown.update({group: rows} if rows else {})
    return shown


def _words(value) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def short(count: float) -> str:
    """
    >>> short(950), short(5_123_456), short(2.5e9)
    ('950', '5.12 M', '2.50 B')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return (
                f"{count / (1e3 if letter == 'k' else size):.3g} {letter}"
                if letter == "k"
                else f"{count / size:.2f} {letter}"
            )
    return f"{count:,.0f}"


# -- other files of the run ----------------------------------------------------------------------------------------------


def read_samples(folder: Path) -> list[tuple[str, str]]:
    """(prompt, continuation) of generations.jsonl, or the whole of samples.txt as one continuation."""
    lines = folder / "generations.jsonl"
    if lines.is_file():
        found = []
        for line in lines.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                prompt = str(record.get("prompt", ""))
            except (ValueError, AttributeError):
                continue
            text = str(record.get("completion", record.get("text", "")))
            found.append((prompt, text.removeprefix(prompt)))
        return found
    plain = folder / "samples.txt"
    return [("", plain.read_text(encoding="utf-8", errors="replace").strip())] if plain.is_file() else []


def read_evaluation(folder: Path) -> dict[str, str]:
    """evaluation.json as rows, nested names joined with a slash."""
    path = folder / "evaluation.json"
    if not path.is_file():
        return {}
    try:
        return _rows(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise DataError(
            f"{path}: not valid JSON", why=str(error), do="run the evaluation again, or remove the file"
        ) from None


def _rows(value, name: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        parts = enumerate(value, 1)
    else:
        return {name or "result": f"{value:.6g}" if isinstance(value, float) else _words(value)}
    return {
        key: row
        for part, inner in parts
        for key, row in _rows(inner, f"{name} / {part}" if name else str(part)).items()
    }


# -- command -------------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    from megatron.settings.parse import parse

    if argv and not argv[0].startswith("-"):
        argv = ["--run", *argv]
    asked = parse(
        argv,
        {"report": ReportOptions},
        prog="python -m megatron.tools.report",
        description="Write an HTML page about a run.",
        common=("run", "output", "title"),
    )["report"]
    given = Path(asked.run or ".")
    folder, metrics_file = (given, None) if given.is_dir() else (given.parent, given)
    text = build(folder, metrics_file, asked.title)
    output = Path(asked.output) if asked.output else folder / "report.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"report: {output}")


if __name__ == "__main__":
    run_main(main)
