# SPDX-License-Identifier: Apache-2.0
"""Comparison of runs by their metrics, for a page or as JSON: the settings that differ, losses, totals.

    figures({"a": read_history(...), "b": read_history(...)})     # the output of --json
    facts({"a": ..., "b": ...})                                   # headline numbers and sections of the page

All other runs are compared with the first one.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Optional

import numpy as np

from megatron.settings.declare import dashed
from megatron.telemetry.curves import LAST_STEPS
from megatron.telemetry.figures import count, duration
from megatron.telemetry.history import History
from megatron.telemetry.report_page import Grid, Section, Tile

ALWAYS = ("code commit", "--seed")  # listed even if they are the same
PLACES = (  # settings of paths and names, which do not affect training
    *("--save", "--load", "--metrics-file", "--log-file", "--tensorboard-dir", "--wandb-project", "--wandb-exp-name"),
    *("--heartbeat-dir", "--profile-dir", "--save-copy", "--save-mirror", "--kill-switch-file"),
)

Runs = Mapping[str, History]  # by name


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(runs: Runs) -> dict[str, Any]:
    """The comparison as JSON: values of each run, the settings that differ, and whether the samples were the same."""
    first = next(iter(runs))
    return dict(
        runs={name: figures_of(history) for name, history in runs.items()},
        losses={name: dict(zip(runs, values, strict=True)) for name, values in final_losses(runs).items()},
        settings={name: dict(zip(runs, values, strict=True)) for name, values in differences(runs).items()},
        same_samples={name: same_samples(runs[first], history) for name, history in runs.items() if name != first},
    )


def figures_of(history: History) -> dict[str, Any]:
    """Progress of a run: iteration, samples, tokens, time, throughput."""
    steps, last = history.steps, history.steps[-1]
    speeds = [speed for speed in steps.known("tokens_per_second").tolist() if speed]
    return dict(
        iteration=last["iteration"],
        samples=last["consumed_samples"],
        tokens=last["consumed_samples"] * history.sample_tokens,
        seconds=round(float(np.nansum(steps["seconds"])), 3),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        parameters=history.run.get("parameters"),
        launches=len(history.starts),
        interleaved=history.interleaved,
    )


def final_losses(runs: Runs) -> dict[str, list[Optional[float]]]:
    """Name of a loss or of another logged sum -> its value in each run; None for a run without it.

    Training is compared at the last step that all runs reached, as the mean of the last steps up to there.
    """
    common = min(history.steps[-1]["iteration"] for history in runs.values())
    rows: dict[str, list[Optional[float]]] = {}
    for name in named(runs):
        rows[f"{name}, step 1"] = [_at_step_1(history, name) for history in runs.values()]
        means = {key: _mean_until(history, name, common) for key, history in runs.items()}
        rows[f"{name}, mean of {min(LAST_STEPS, common)} steps to {common:,}"] = list(means.values())
        rows |= _evaluations(runs, name)
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def named(runs: Runs) -> list[str]:
    """Names of the values to compare: tasks' metrics, losses, and other sums that models log."""
    sums = [name for history in runs.values() for name in (history.loss, *history.sums)]
    return list(dict.fromkeys([*_judged(runs), *sums]))


def _judged(runs: Runs) -> list[str]:
    return list(dict.fromkeys(name for history in runs.values() for name in history.figures))


def _at_step_1(history: History, name: str) -> Optional[float]:
    first = history.steps[name][history.steps["iteration"] == 1]
    return float(first[0]) if len(first) and math.isfinite(first[0]) else None


def _mean_until(history: History, name: str, end: int) -> Optional[float]:
    values = history.steps[name][history.steps["iteration"] <= end]
    values = values[np.isfinite(values)][-LAST_STEPS:].tolist()
    return statistics.fmean(values) if values else None


def _evaluations(runs: Runs, name: str) -> dict[str, list[Optional[float]]]:
    """The last evaluation of each split during training that all runs have, and the final ones."""
    rows = {}
    for split in dict.fromkeys(e.get("split") for history in runs.values() for e in history.evals):
        during = [_by_iteration(history, split, name, final=False) for history in runs.values()]
        shared = set.intersection(*map(set, during))
        if shared:
            rows[f"{name}, {split} at step {max(shared):,}"] = [one[max(shared)] for one in during]
        ends = [_by_iteration(history, split, name, final=True) for history in runs.values()]
        rows[f"{name}, final {split}"] = [one[max(one)] if one else None for one in ends]
    return rows


def _by_iteration(history: History, split: str, name: str, final: bool) -> dict[int, float]:
    return {
        e["iteration"]: e[name]
        for e in history.evals
        if e.get("split") == split and bool(e.get("final")) == final and isinstance(e.get(name), (int, float))
    }


def differences(runs: Runs) -> dict[str, list[str]]:
    """Versions, machine, layout and settings that differ -> their value in each run; always the commit and the seed."""
    described = [_described(history) for history in runs.values()]
    names = sorted(dict.fromkeys(name for one in described for name in one), key=lambda name: name in PLACES)
    rows = {name: [one.get(name, "-") for one in described] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1 or name in ALWAYS}


def _described(history: History) -> dict[str, str]:
    """The record of a run as a flat table, the most important rows first."""
    run = history.run
    config = dict(run.get("config") or {})
    own = config.pop("extra", None) or {}
    config.pop("given", None)
    groups = [group for group in [*config.values(), *own.values()] if isinstance(group, dict)]
    settings = {dashed(name): value for group in groups for name, value in group.items()}
    rows = {"code commit": run.get("commit"), "--seed": settings.pop("--seed", None)}
    code = run.get("code") or {}  # checksums of the recipe's files: files that git ignores are in no commit
    rows |= {f"checksum of {name}": checksum for name, checksum in (code.get("files") or {}).items()}
    rows |= {"uncommitted changes": code.get("diff")}
    rows |= {"parameters": run.get("parameters") and f"{run['parameters']:,}"}
    rows |= {f"{name} version": version for name, version in (run.get("versions") or {}).items()}
    rows |= {"host": run.get("host"), "device": run.get("device")}
    rows |= {f"ranks: {axis}": size for axis, size in (run.get("mesh") or {}).items()}
    return {name: _words(value) for name, value in {**rows, **settings}.items() if value is not None}


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def same_samples(one: History, other: History) -> dict[str, str]:
    """Whether two runs were trained and validated on the same samples, by their metrics: yes, no or unknown."""
    return dict(training=_same_training(one, other), validation=_same_validation(one, other))


def _same_training(one: History, other: History) -> str:
    ledgers = [{s["iteration"]: s["ledger"] for s in h.steps if s.get("ledger")} for h in (one, other)]
    common = sorted(ledgers[0].keys() & ledgers[1].keys())
    if not common:
        return "unknown: no step that both have a ledger of"
    differing = [n for n in common if ledgers[0][n] != ledgers[1][n]]
    if differing:
        return f"no: other samples in {len(differing):,} of {len(common):,} steps, first in step {differing[0]:,}"
    return f"yes: the ledgers of {len(common):,} steps are equal"


DATA = "data_path train_data_path valid_data_path split mock_data"  # settings that decide the sample at a place


def _same_validation(one: History, other: History) -> str:
    """Compared by places in the order of the split; the metrics do not contain the contents of the token files."""

    def places(history):
        return {
            (e.get("split"), e["iteration"], bool(e.get("final"))): (e.get("first_sample"), e.get("samples"))
            for e in history.evals
            if e.get("split") == "validation"
        }

    def order(history):
        config = history.run.get("config") or {}
        data = config.get("data") or {}
        kept = [data.get(name) for name in DATA.split()]
        return [*kept, history.sample_tokens, (config.get("logging") or {}).get("seed")]

    both = [places(history) for history in (one, other)]
    common = both[0].keys() & both[1].keys()
    if not common:
        return "unknown: no validation at a step that both have"
    if order(one) != order(other):
        return "no: their data, sequence length or seed differ"
    if any(None in one[key] for one in both for key in common):
        return "unknown: a run of an earlier version did not record its validation samples"
    differing = sorted(key for key in common if both[0][key] != both[1][key])
    if differing:
        return f"no: other places of the validation set, first at step {differing[0][1]:,}"
    return f"yes: the same places of the same data in {len(common):,} validations"


# -- the page ----------------------------------------------------------------------------------------------------------


def facts(runs: Runs) -> tuple[str, list[Tile], list[Section]]:
    """(subtitle, headline numbers, sections) of the page."""
    losses, head = final_losses(runs), ["", *runs]
    sections = [
        Section("Losses", grids=[Grid("", head, [[name, *_against_first(values)] for name, values in losses.items()])]),
        Section("The same samples", tables=[("", _samples_rows(runs))]),
        Section(
            "What differs", grids=[Grid("", head, [[name, *values] for name, values in differences(runs).items()])]
        ),
        Section("Totals", grids=[Grid("", head, _totals(runs))]),
    ]
    first, *others = runs
    return f"{', '.join(others)} compared with {first}", tiles(runs), sections


def tiles(runs: Runs) -> list[Tile]:
    """The headline number of each run: its last validation loss, else its training loss."""
    rows = [(name, values) for name, values in final_losses(runs).items() if name.startswith(f"{named(runs)[0]}, ")]
    best = next((row for row in reversed(rows) if "validation" in row[0] and None not in row[1]), None)
    name, values = best or next((row for row in rows if "mean of" in row[0]), ("", []))
    return [(f"{value:.4f}" if value is not None else "-", run, name) for run, value in zip(runs, values, strict=False)]


def _against_first(values: list[Optional[float]]) -> list[str]:
    """Each value, followed by its difference from the first one.

    >>> _against_first([2.5, 2.2499, None, 2.5])
    ['2.5000', '2.2499 (-0.25)', '-', '2.5000 (the same)']
    """
    cells = []
    for number, value in enumerate(values):
        differs = ""
        if number and value is not None and values[0] is not None:
            differs = " (the same)" if value == values[0] else f" ({value - values[0]:+.2g})"
        cells.append("-" if value is None else f"{value:.4f}{differs}")
    return cells


def _samples_rows(runs: Runs) -> list[tuple[str, str]]:
    first, *others = runs
    rows = []
    for name in others:
        for what, answer in same_samples(runs[first], runs[name]).items():
            rows.append((f"{first} and {name}, {what}", answer))
    return rows


def _totals(runs: Runs) -> list[list[str]]:
    totals = [figures_of(history) for history in runs.values()]
    formats: dict[str, Callable[[Any], str]] = {
        "iteration": "{:,}".format,
        "tokens": count,
        "seconds": duration,
        "tokens_per_second": "{:,.0f}".format,
        "parameters": "{:,}".format,
        "launches": str,
    } | ({"interleaved": "{:,}".format} if any(one["interleaved"] for one in totals) else {})
    names = {"iteration": "iterations", "seconds": "time in training steps", "tokens_per_second": "tokens per second"}
    names["interleaved"] = "steps of another run, interleaved"
    return [
        [names.get(name, name), *("-" if one[name] is None else formatted(one[name]) for one in totals)]
        for name, formatted in formats.items()
    ]
