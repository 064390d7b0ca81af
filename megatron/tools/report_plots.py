# SPDX-License-Identifier: Apache-2.0
"""The curves of a run as SVG pictures."""

import base64
import io
import itertools
import math
from collections.abc import Callable
from typing import Optional

from megatron.errors import SettingsError

MOST_POINTS = 1500  # a curve of more points is thinned: the page stays small, the eye sees no difference
BLUE, ORANGE, GREEN, GREY, INK = "#2563eb", "#ea580c", "#059669", "#9ca3af", "#374151"

Points = list[tuple[int, float]]


def plots(steps: list[dict], evals: list[dict], starts: list[int]) -> list[tuple[str, str]]:
    """(caption, SVG as a data URL) for loss, learning rate, throughput and gradient norm; curves without data are left out.

    starts: iterations that launches began at; resumes are marked with a dotted line.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError("the report needs the package matplotlib", str(error), "pip install matplotlib") from None
    resumes = [start for start in starts if start > 0]
    wanted: list[tuple[str, Optional[Callable]]] = [
        ("Training and validation loss", _loss(steps, evals)),
        ("Learning rate", _simple(steps, "learning_rate", ORANGE)),
        ("Throughput, tokens per second", _throughput(steps)),
        ("Gradient norm before clipping", _gradient_norm(steps)),
    ]
    note = " (dotted: resumed)" if resumes else ""
    return [(caption + note, _picture(Figure, draw, resumes)) for caption, draw in wanted if draw]


def _loss(steps: list[dict], evals: list[dict]) -> Optional[Callable]:
    points = _points(steps, "lm loss")
    valid = _points([e for e in evals if e.get("split") == "validation"], "lm loss")

    def draw(axes):
        axes.plot(*_thin(points), color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(*_thin(smooth(points)), color=BLUE, linewidth=1.6, label="training")
        if valid:
            axes.plot(*zip(*valid), color=ORANGE, linewidth=1.4, marker="o", markersize=4, label="validation")
        axes.legend(frameon=False, fontsize=9)

    return draw if points else None


def _simple(steps: list[dict], name: str, colour: str) -> Optional[Callable]:
    points = _points(steps, name)
    return (lambda axes: axes.plot(*_thin(points), color=colour, linewidth=1.6)) if points else None


def _throughput(steps: list[dict]) -> Optional[Callable]:
    points = _points(steps, "tokens_per_second")

    def draw(axes):
        axes.plot(*_thin(points), color=GREEN, alpha=0.25, linewidth=0.8)
        axes.plot(*_thin(smooth(points)), color=GREEN, linewidth=1.6)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylim(0, 1.15 * sorted(value for _, value in points)[int(0.98 * (len(points) - 1))])

    return draw if points else None


def _gradient_norm(steps: list[dict]) -> Optional[Callable]:
    points = [(at, value) for at, value in _points(steps, "grad_norm") if value > 0]

    def draw(axes):
        axes.plot(*_thin(points), color=INK, alpha=0.3, linewidth=0.8)
        axes.plot(*_thin(smooth(points)), color=INK, linewidth=1.6)
        if max(value for _, value in points) > 10 * min(value for _, value in points):
            axes.set_yscale("log")

    return draw if points else None


def _points(records: list[dict], name: str) -> Points:
    return [(record["iteration"], record[name]) for record in records if _is_number(record.get(name))]


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def smooth(points: Points, share: float = 0.03) -> Points:
    """Mean over a window of about `share` of the curve, centred so that a falling curve is not delayed.

    >>> smooth([(1, 2.0), (2, 4.0), (3, 9.0)], share=1.0)
    [(1, 2.0), (2, 5.0), (3, 9.0)]
    """
    sums = [0.0, *itertools.accumulate(value for _, value in points)]
    half = max(2, round(share * len(points))) // 2
    result = []
    for place, (at, _) in enumerate(points):
        reach = min(half, place, len(points) - 1 - place)
        low, high = place - reach, place + reach + 1
        result.append((at, (sums[high] - sums[low]) / (high - low)))
    return result


def _thin(points: Points) -> tuple[list[int], list[float]]:
    every = -(-len(points) // MOST_POINTS)
    kept = points[::every] + ([points[-1]] if (len(points) - 1) % every else [])
    return [at for at, _ in kept], [value for _, value in kept]


def _picture(figure_class, draw: Callable, resumes: list[int]) -> str:
    figure = figure_class(figsize=(6.2, 3.1), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    for at in resumes:
        axes.axvline(at, color=GREY, linestyle=":", linewidth=1)
    axes.set_xlabel("iteration", color=INK, fontsize=9)
    axes.grid(color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.ticklabel_format(axis="x", style="plain")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#d1d5db")
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode("ascii")
