# SPDX-License-Identifier: Apache-2.0
"""Curves of a run for a page: running means, and as many points as a screen shows. Pictures as data URLs."""

import base64
from typing import NamedTuple, Optional

import numpy as np

LAST_STEPS = 16  # in the mean that stands for the training loss of a run, in tables and, at first, in curves


class Curve(NamedTuple):
    """Points to draw. y: the values, smooth: their running mean at the same places, None without smoothing.

    steps: values of the whole curve, of which a mean cannot have more
    """

    x: np.ndarray
    y: np.ndarray
    smooth: Optional[np.ndarray] = None
    steps: int = 0


def known_places(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The places of the finite points, in the order of the axis: two runs may have written to one file."""
    places = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    return places[np.argsort(x[places], kind="stable")] if (np.diff(x[places]) < 0).any() else places


def smoothed(values: np.ndarray, window: int) -> Optional[np.ndarray]:
    """The means of the last `window` values; None without a window, or for a single value."""
    return running_mean(values, window) if window > 1 and len(values) > 1 else None


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """At each place the mean of the last `window` values up to there, of fewer at the start.

    It ends as the mean that tables give for the last steps, and never leaves the range of the values.

    >>> running_mean(np.array([2.0, 4.0, 9.0]), 2).tolist()
    [2.0, 3.0, 6.5]
    """
    count, window = len(values), min(window, len(values))
    blocks = np.zeros((-(-count // window), window))
    blocks.ravel()[:count] = values
    # A window is the tail of one block and the head of the next: no sum has a value from outside, such as an outlier.
    sums, tails = blocks.cumsum(1), blocks[:, ::-1].cumsum(1)[:, ::-1]
    sums[1:, :-1] += tails[:-1, 1:]
    return sums.ravel()[:count] / np.minimum(np.arange(1, count + 1), window)


def thinned(curve: Curve, width: int) -> Curve:
    """The curve with the points that `extremes` keeps. The running mean is read at the same places."""
    x, y, smooth, steps = curve
    places, values = extremes(x, y, width)
    if len(places) == len(x):
        return curve
    return Curve(x[places], values, None if smooth is None else smooth[places], steps)


def extremes(x: np.ndarray, y: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(places, values) of two points for each of `width` equal parts of the axis: the lowest and the highest value there.

    They are drawn at the first and the last place of the part, in their order.
    """
    if len(x) <= 2 * width or x[-1] <= x[0]:
        return np.arange(len(x)), y
    edges = np.searchsorted(x, np.linspace(x[0], x[-1], width + 1)[:-1])
    first = np.unique(edges)  # without empty parts
    last = np.append(first[1:], len(x)) - 1
    low, high = np.minimum.reduceat(y, first), np.maximum.reduceat(y, first)
    falls = y[first] > y[last]
    values = np.stack([np.where(falls, high, low), np.where(falls, low, high)], axis=1).ravel()
    places = np.stack([first, last], axis=1).ravel()
    once = np.append(True, places[1:] != places[:-1])  # a part with one point
    return places[once], values[once]


def data_url(picture: str | bytes) -> str:
    """A picture, SVG or PNG, as a data URL, so that the page needs no other file."""
    kind, data = ("svg+xml", picture.encode()) if isinstance(picture, str) else ("png", picture)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
