# SPDX-License-Identifier: Apache-2.0
"""Write one HTML page about a run (curves, settings, totals, samples), or one that compares several runs.

    python -m megatron.tools.report runs/quickstart --output runs/quickstart/report.html
    python -m megatron.tools.report runs/a runs/b runs/c --output runs/compare.html     (telemetry/report_compare.py)

It reads the run's folder: metrics.jsonl (required), events.jsonl, evaluation.jsonl or evaluation.json (of `tools.evaluate
--output`), and samples.txt or generations.jsonl. The page is that of tools.dashboard with its data inside: it needs no
network. It shows the perplexity of the held-out evaluation, if there is one, else of the last validation.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megatron.data.blend import parse_blend
from megatron.errors import DataError, Failure, UsageError, no_such_file, run_main
from megatron.pipeline.recorded import pictures_of, pipeline_of
from megatron.settings.positional import divide, parse_one
from megatron.settings.schema import setting
from megatron.tasks.settings import confusion_pictures
from megatron.telemetry import report_compare
from megatron.telemetry import report_facts as facts
from megatron.telemetry.curves import data_url
from megatron.telemetry.dashboard.page_files import page_with_data
from megatron.telemetry.dashboard.runs import Runs, WatchedRun, whole_run
from megatron.telemetry.figures import count
from megatron.telemetry.history import History
from megatron.telemetry.report_page import Section
from megatron.telemetry.run_folder import METRICS, NAMED, find_metrics, unique_names

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


def main(argv: list[str]) -> None:
    """Write a page about one run, or one that compares several with the first; --json: only the figures."""
    names, flags = divide(argv, ReportOptions, letters={"-o": "--output"})
    about = "Write an HTML page about a run, or one that compares several."
    asked = parse_one(flags, ReportOptions, f"{PROG} RUN ...", about)
    places = [Path(name) for name in [*([asked.run] if asked.run else []), *names] or ["."]]
    if len(places) == 1 and not asked.json:
        folder = places[0] if places[0].is_dir() else places[0].parent
        return write(build(places[0], asked.title), asked.output or folder / "report.html")
    runs = {name: read(place) for name, place in zip(run_names(places), places, strict=True)}
    histories = {name: run.history for name, run in runs.items()}
    if asked.json:
        text = json.dumps(report_compare.figures(histories), indent=1)
        return write(text + "\n", asked.output) if asked.output else print(text)
    common = Path(os.path.commonpath([place.resolve().parent for place in places]))
    subtitle, tiles, sections = report_compare.facts(histories)
    page = page_with_data(asked.title or " and ".join(runs), subtitle, tiles, sections, Runs.of(runs, pictures_of))
    write(page, asked.output or common / "compare.html")


def build(place: Path, title: Optional[str] = None) -> str:
    """The page of a run's folder, or of its metrics file, as text. Raises DataError if there is nothing to report on."""
    folder = place if place.is_dir() else place.parent
    title, run = title or folder.resolve().name, read(place)
    history, events, pipeline = run.history, run.events, pipeline_of(run.history)
    evaluation, (ranks, parts) = facts.read_evaluation(folder), facts.ranks(history)
    sections = [
        Section("The task", confusions(history, folder), [("", facts.task(history))]),
        Section("What the model writes", quotes=facts.read_samples(folder)),
        Section("Evaluation on held-out text", tables=[("", facts.rows_of(evaluation) if evaluation else {})]),
        Section("Schedule", tables=[("", facts.schedule(history) + [("pipeline", str(pipeline))] * bool(pipeline))]),
        Section("Data", tables=[("", data(history))]),
        Section("Memory", tables=[("", facts.memory(history))]),
        Section("Times of ranks", tables=[("", ranks)], grids=parts),
        Section("Loads of experts", tables=[("", facts.experts(history))]),
        Section("Supervised", tables=[("", facts.supervision(events))]),
        Section("Totals", tables=[("", facts.totals(history, run.all_events()))]),
        Section("The run", tables=[("", facts.provenance(history))]),
        Section("Settings", tables=list(facts.settings(history).items()), folded=True),
    ]
    tiles = facts.tiles(history, evaluation, run.restarts)
    return page_with_data(title, facts.subtitle(history), tiles, sections, Runs.of({title: run}, pictures_of))


def read(place: Path) -> WatchedRun:
    """Read the run of a folder or metrics file. Raises DataError if there is nothing to report on."""
    path = find_metrics(place) or (place / METRICS if place.is_dir() else place)
    if not path.is_file():
        there = place.exists() or place.is_dir()
        what = f"{place}: {f'no {METRICS} in it' if there else no_such_file(place, 'file or folder')}"
        raise DataError(what, f"a run writes {METRICS} next to its checkpoints (--save), or to --metrics-file", NAMED)
    run = whole_run(place if place.is_dir() else place.parent, path)
    if not run.history.steps.rows:
        raise DataError(f"{path}: holds no training step yet", do="let the run reach its first iteration")
    return run


def confusions(history: History, folder: Path) -> list[tuple[str, str]]:
    """(caption, picture) of each confusion matrix of a fine-tuning."""
    paths = confusion_pictures(history.run, folder)
    return [
        (f"Confusion matrix, {path.stem.removeprefix('confusion-')}", data_url(path.read_bytes())) for path in paths
    ]


def data(history: History) -> facts.Rows:
    """The blend: for each dataset, its share of the samples trained on, according to its weight."""
    group, samples = history.group("data"), history.steps[-1]["consumed_samples"]
    words, tokens = group.get("train_data_path") or group.get("data_path") or [], samples * history.sample_tokens
    if not words:
        return [("synthetic", "samples that are made up, no files")] if group.get("mock_data") else []
    try:
        blend = parse_blend(words, "--data-path")
    except Failure:
        return [("files", " ".join(map(str, words)))]
    rows = []
    for place, prefix in enumerate(blend.prefixes):
        share = 1.0 if len(blend.prefixes) == 1 else blend.weights and blend.weights[place]
        had = f"{share:.1%} of the samples: about {count(share * samples)}, {count(share * tokens)} tokens"
        rows.append((prefix, had if share else "as large a part as it has of all tokens"))
    cut = group.get("split") and not group.get("train_data_path")  # otherwise each part has files of its own
    return rows + ([("split", str(group["split"]))] if cut else [])


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
