# SPDX-License-Identifier: Apache-2.0
"""Curves of a run as SVG pictures, for light and dark pages."""

import base64
import math
from collections.abc import Callable
from typing import Optional

import numpy as np

from megatron.telemetry.drawing import BLUE, GREEN, INK, LINE, ORANGE, RED, SOFT, VIOLET, new_figure, plain, svg_of
from megatron.telemetry.run_record import LOSS, History, own_sums

MOST_POINTS = 1500  # longer curves are thinned: the page stays small without a visible difference

Points = list[tuple[int, float]]


def plots(history: History) -> list[tuple[str, str]]:
    """Plot a task's metrics, loss, learning rate, throughput, gradient norm, and other sums: (caption, SVG as a data URL).

    Curves without data are left out. Dotted lines mark resumed launches; red ones mark spikes.
    """
    steps = history.steps
    wanted: list[tuple[str, Optional[Callable]]] = [
        *((f"{name}, in validation", _figure(history.evals, name)) for name in history.figures),
        ("Loss in training and validation", _loss(steps, history.evals, history.loss)),
        ("Learning rate", _simple(points_of(steps, "learning_rate"), ORANGE, "learning rate")),
        ("Throughput of all ranks", _throughput(steps)),
        ("Gradient norm before clipping", _gradient_norm(steps)),
        *((name, _own(steps, history.evals, name)) for name in own_sums(steps) if name != history.loss),
    ]
    return [(caption, _picture(draw, history)) for caption, draw in wanted if draw]


def memory_plot(history: History) -> list[tuple[str, str]]:
    """Plot the memory of the first rank, if it was measured more than once: (caption, SVG as a data URL)."""
    points = [
        (record["iteration"], record["bytes"] / 1e9) for record in history.memory if is_number(record.get("bytes"))
    ]

    def draw(axes):
        axes.plot(*thin(points), color=VIOLET, linewidth=1.6)
        axes.set_ylim(0, 1.15 * max(value for _, value in points))
        axes.set_ylabel("GB (10^9 bytes)")

    if len(points) < 2:
        return []
    return [("Memory of rank 0, its peak so far", _picture(draw, history))]


def _figure(evals: list[dict], name: str) -> Optional[Callable]:
    points = validation_points(evals, name)

    def draw(axes):
        axes.plot(*zip(*points), color=ORANGE, linewidth=1.4, marker="o", markersize=4)
        axes.set_ylabel(name)

    return draw if points else None


def _loss(steps: list[dict], evals: list[dict], name: str) -> Optional[Callable]:
    return _with_validation(steps, evals, name, BLUE, "loss (nats a token)" if name == LOSS else name)


def _own(steps: list[dict], evals: list[dict], name: str) -> Optional[Callable]:
    return _with_validation(steps, evals, name, VIOLET, "mean over the tokens that count")


def _with_validation(steps: list[dict], evals: list[dict], name: str, color: str, label: str) -> Optional[Callable]:
    points = points_of(steps, name)
    valid = validation_points(evals, name)

    def draw(axes):
        _both(axes, points, color, "training, ")
        if valid:
            axes.plot(*zip(*valid), color=ORANGE, linewidth=1.4, marker="o", markersize=4, label="validation")
        axes.set_ylabel(label)

    return draw if points else None


def validation_points(evals: list[dict], name: str) -> Points:
    """The (iteration, value) of the first validation of each iteration: the final one is over other samples."""
    first = {}
    for record in evals:
        if record.get("split") == "validation":
            first.setdefault(record["iteration"], record)
    return points_of(list(first.values()), name)


def _simple(points: Points, colour: str, label: str) -> Optional[Callable]:
    def draw(axes):
        axes.plot(*thin(points), color=colour, linewidth=1.6)
        axes.set_ylabel(label)

    return draw if points else None


def _throughput(steps: list[dict]) -> Optional[Callable]:
    points = points_of(steps, "tokens_per_second")

    def draw(axes):
        _both(axes, points, GREEN)
        axes.set_ylabel("tokens per second")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylim(0, 1.15 * sorted(value for _, value in points)[int(0.98 * (len(points) - 1))])

    return draw if points else None


def _gradient_norm(steps: list[dict]) -> Optional[Callable]:
    points = [(at, value) for at, value in points_of(steps, "grad_norm") if value > 0]

    def draw(axes):
        _both(axes, points, INK)
        axes.set_ylabel("L2 norm of all gradients")
        if max(value for _, value in points) > 10 * min(value for _, value in points):
            axes.set_yscale("log")

    return draw if points else None


def _both(axes, points: Points, colour: str, what: str = "") -> None:
    """Plot a pale line of all steps, and a strong one of their running mean."""
    axes.plot(*thin(points), color=colour, alpha=0.3, linewidth=0.8, label=f"{what}each step (pale)")
    smoothed = f"{what}mean of {2 * half_window(len(points), SHARE) + 1} steps"
    axes.plot(*thin(smooth(points)), color=colour, linewidth=1.7, label=smoothed)


def points_of(records: list[dict], name: str) -> Points:
    return [(record["iteration"], record[name]) for record in records if is_number(record.get(name))]


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


SHARE = 0.03  # of a curve: the window of its running mean


def half_window(count: int, share: float) -> int:
    return max(2, round(share * count)) // 2


def smooth(points: Points, share: float = SHARE) -> Points:
    """The running mean of a curve, over a centred window of about `share` of it, so that a falling curve is not delayed.

    At the end, where half of the window is missing, it continues as the straight line through the last full window: a mean
    of fewer and fewer points would follow the noise of the last one. At the start, where a curve falls by more than its
    noise, the window shrinks.

    >>> smooth([(1, 2.0), (2, 4.0), (3, 9.0)], share=1.0)
    [(1, 2.0), (2, 5.0), (3, 8.5)]
    """
    values = running_mean(np.array([value for _, value in points], dtype=float), half_window(len(points), share))
    return [(at, value) for (at, _), value in zip(points, values.tolist(), strict=True)]


def running_mean(values: np.ndarray, half: int) -> np.ndarray:
    """Smooth values as `smooth` does, with a window of 2 x `half` + 1 values."""
    count, place = len(values), np.arange(len(values))
    window = min(count, 2 * half + 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    reach = np.minimum(half, place)
    low, high = place - reach, np.minimum(place + reach + 1, count)
    means = (sums[high] - sums[low]) / (high - low)
    if half and count:
        slope, middle, mean = _line(values[count - window :])
        means[count - half :] = mean + slope * (place[count - half :] - (count - window) - middle)
    return means


def _line(values: np.ndarray) -> tuple[float, float, float]:
    """(slope, middle, mean) of the straight line through values at 0, 1, 2 ... by least squares."""
    middle, mean = (len(values) - 1) / 2, float(values.mean())
    away = np.arange(len(values)) - middle
    return float(away @ values) / (float(away @ away) or 1.0), middle, mean


def thin(points: Points) -> tuple[list[int], list[float]]:
    every = -(-len(points) // MOST_POINTS)
    kept = points[::every] + ([points[-1]] if (len(points) - 1) % every else [])
    return [at for at, _ in kept], [value for _, value in kept]


def _picture(draw: Callable, history: History) -> str:
    figure = new_figure(5.4, 3.1, "the report")
    axes = figure.add_subplot()
    draw(axes)
    resumes = [start for start in history.starts if start > 0]
    spikes = [event["iteration"] for event in history.events if event["kind"] == "spike"]
    for places, colour, label in ((resumes, SOFT, "resumed"), (spikes, RED, "spike")):
        for number, at in enumerate(places):
            axes.axvline(at, color=colour, linestyle=":", linewidth=1.2, label=label if number == 0 else None)
    axes.set_xlabel("iteration")
    axes.grid(color=LINE, alpha=0.5, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.ticklabel_format(axis="x", style="plain")
    if len(axes.get_legend_handles_labels()[0]) > 1 or resumes or spikes:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    plain(axes)
    return data_url(svg_of(figure))


def data_url(picture: str | bytes) -> str:
    """A picture, SVG or PNG, as a data URL, so that the page needs no other file."""
    kind, data = ("svg+xml", picture.encode()) if isinstance(picture, str) else ("png", picture)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
