# SPDX-License-Identifier: Apache-2.0
"""Comparison of runs by their metrics, as an HTML page or as JSON: the settings that differ, losses, curves, totals.

    figures({"a": read_history(...), "b": read_history(...)})     # the output of --json
    page_of({"a": ..., "b": ...}, "a and b")                      # HTML

All other runs are compared with the first one.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Optional

from megatron.settings.declare import dashed
from megatron.telemetry.curves import data_url, is_number, smooth, thin, validation_points
from megatron.telemetry.drawing import (
    BLUE,
    GREEN,
    INK,
    LINE,
    ORANGE,
    RED,
    SOFT,
    THEME,
    VIOLET,
    new_figure,
    plain,
    svg_of,
)
from megatron.telemetry.figures import count, duration
from megatron.telemetry.report_page import Grid, Section, page
from megatron.telemetry.run_record import LOSS, History, own_sums

COLOURS = (BLUE, ORANGE, GREEN, VIOLET, RED, INK, SOFT)
DASHES = ("-", "--", ":", "-.")  # dashes if there are more runs than colours
ALWAYS = ("code commit", "--seed")  # listed even if they are the same
LAST = 20  # steps in the mean that is the final training loss of a run
PLACES = (  # settings of paths and names, which do not affect training
    *("--save", "--load", "--metrics-file", "--log-file", "--tensorboard-dir", "--wandb-project", "--wandb-exp-name"),
    *("--heartbeat-dir", "--profile-dir", "--save-copy", "--save-mirror", "--kill-switch-file"),
)

Runs = Mapping[str, History]  # by name
Point = tuple[float, float]


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
    speeds = [step["tokens_per_second"] for step in steps if step.get("tokens_per_second")]
    return dict(
        iteration=last["iteration"],
        samples=last["consumed_samples"],
        tokens=last["consumed_samples"] * tokens_of_sample(history),
        seconds=round(sum(step.get("seconds") or 0.0 for step in steps), 3),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        parameters=history.run.get("parameters"),
        launches=len(history.starts),
        interleaved=history.interleaved,
    )


def tokens_of_sample(history: History) -> int:
    """Tokens of a sample; 0 if the run's record does not contain it."""
    return int(((history.run.get("config") or {}).get("model") or {}).get("seq_length") or 0)


def final_losses(runs: Runs) -> dict[str, list[Optional[float]]]:
    """Name of a loss or of another logged sum -> its value in each run; None for a run without it.

    Training is compared at the last step that all runs reached, as the mean of the last steps up to there.
    """
    common = min(history.steps[-1]["iteration"] for history in runs.values())
    rows: dict[str, list[Optional[float]]] = {}
    for name in named(runs):
        rows[f"{name}, step 1"] = [_at_step_1(history, name) for history in runs.values()]
        means = {key: _mean_until(history, name, common) for key, history in runs.items()}
        rows[f"{name}, mean of {min(LAST, common)} steps to {common:,}"] = list(means.values())
        rows |= _evaluations(runs, name)
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def named(runs: Runs) -> list[str]:
    """Names of the values to compare: tasks' metrics, losses, and other sums that models log."""
    sums = [name for history in runs.values() for name in (history.loss, *own_sums(history.steps))]
    return list(dict.fromkeys([*_judged(runs), *sums]))


def _judged(runs: Runs) -> list[str]:
    return list(dict.fromkeys(name for history in runs.values() for name in history.figures))


def _at_step_1(history: History, name: str) -> Optional[float]:
    return next((step.get(name) for step in history.steps if step["iteration"] == 1), None)


def _mean_until(history: History, name: str, end: int) -> Optional[float]:
    values = [step[name] for step in history.steps if step["iteration"] <= end and is_number(step.get(name))]
    return statistics.fmean(values[-LAST:]) if values else None


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
        if e.get("split") == split and bool(e.get("final")) == final and is_number(e.get(name))
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
        return [*kept, tokens_of_sample(history), (config.get("logging") or {}).get("seed")]

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


def page_of(runs: Runs, title: str) -> str:
    """The comparison as an HTML page."""
    losses, head = final_losses(runs), ["", *runs]
    colours = [(colour, THEME[colour]) for colour, _ in _styles(runs)]
    sections = [
        Section(
            "Losses",
            grids=[Grid("", head, [[name, *_against_first(values)] for name, values in losses.items()], colours)],
        ),
        Section("The same samples", tables=[("", _samples_rows(runs))]),
        Section(
            "What differs",
            grids=[Grid("", head, [[name, *values] for name, values in differences(runs).items()], colours)],
        ),
        *(Section(heading, plots(runs, *axis)) for heading, axis in AXES.items()),
        Section("Totals", grids=[Grid("", head, _totals(runs), colours)]),
    ]
    first, *others = runs
    return page(title, f"{', '.join(others)} compared with {first}", tiles(runs), sections)


def tiles(runs: Runs) -> list[tuple[str, str, str]]:
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


# -- curves ------------------------------------------------------------------------------------------------------------


def _steps(history: History) -> dict[int, float]:
    return {step["iteration"]: step["iteration"] for step in history.steps}


def _tokens(history: History) -> dict[int, float]:
    length = tokens_of_sample(history) or 1
    return {step["iteration"]: step["consumed_samples"] * length for step in history.steps}


def _minutes(history: History) -> dict[int, float]:
    times = itertools.accumulate(step.get("seconds") or 0.0 for step in history.steps)
    return {step["iteration"]: time / 60 for step, time in zip(history.steps, times, strict=True)}


AXES: dict[str, tuple[str, Callable[[History], dict[int, float]]]] = {  # heading -> label, place of each iteration
    "Against steps": ("iteration", _steps),
    "Against tokens": ("tokens trained on", _tokens),
    "Against time": ("minutes in training steps", _minutes),
}


def plots(runs: Runs, across: str, places: Callable[[History], dict[int, float]]) -> list[tuple[str, str]]:
    """Plot each quantity with the curves of all runs: (caption, SVG as a data URL)."""
    judged, loss = _judged(runs), next(iter(runs.values())).loss
    own = [name for name in named(runs) if name not in (*judged, loss)]
    label = "loss (nats a token)" if loss == LOSS else loss
    wanted = [
        *((f"{name}, in validation", name, _validation(name)) for name in judged),
        ("Training loss, running mean", label, _training(loss)),
        ("Validation loss", label, _validation(loss)),
        ("Learning rate", "learning rate", _each("learning_rate")),
        ("Gradient norm before clipping, running mean", "L2 norm of all gradients", _training("grad_norm")),
        *((f"{name}, running mean", "mean over the tokens that count", _training(name)) for name in own),
    ]
    pictures = []
    for caption, label, curve in wanted:
        curves = {name: _placed(curve(history), places(history)) for name, history in runs.items()}
        if any(curves.values()):
            pictures.append((caption, _picture(curves, across, label)))
    return pictures


def _each(name: str) -> Callable[[History], list[tuple[int, float]]]:
    return lambda history: [(step["iteration"], step[name]) for step in history.steps if is_number(step.get(name))]


def _training(name: str) -> Callable[[History], list[tuple[int, float]]]:
    return lambda history: smooth(_each(name)(history))


def _validation(name: str) -> Callable[[History], list[tuple[int, float]]]:
    return lambda history: validation_points(history.evals, name)


def _placed(points: list[tuple[int, float]], places: dict[int, float]) -> list[Point]:
    return [(places[at], value) for at, value in points if at in places]


def _styles(runs) -> list[tuple[str, str]]:
    """(colour, dashes) of each run."""
    return [
        (COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]) for number in range(len(runs))
    ]


def _picture(curves: dict[str, list[Point]], across: str, up: str) -> str:
    figure = new_figure(5.4, 3.1, "the report")
    axes = figure.add_subplot()
    for (name, points), (colour, dashes) in zip(curves.items(), _styles(curves), strict=True):
        if points:
            few = dict(marker="o", markersize=4) if len(points) <= 12 else {}
            axes.plot(*thin(points), color=colour, linestyle=dashes, linewidth=1.5, label=name, **few)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.xaxis.set_major_formatter(lambda value, _: count(value) if value >= 1e4 else f"{value:g}")
    values = [value for points in curves.values() for _, value in points]
    if up.startswith("L2") and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    if not math.isclose(min(values), max(values)):
        axes.margins(x=0.01)
    axes.grid(color=LINE, alpha=0.5, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    plain(axes)
    return data_url(svg_of(figure))
