# SPDX-License-Identifier: Apache-2.0
"""Curves of a run for a page: running means, and as many points as a screen shows. Pictures as data URLs."""

import base64
from typing import NamedTuple, Optional

import numpy as np


class Curve(NamedTuple):
    """Points to draw. y: the values, smooth: their running mean at the same places, None without smoothing."""

    x: np.ndarray
    y: np.ndarray
    smooth: Optional[np.ndarray] = None


def known_places(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The places of the finite points, in the order of the axis: two runs may have written to one file."""
    places = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    return places[np.argsort(x[places], kind="stable")] if (np.diff(x[places]) < 0).any() else places


def smoothed(values: np.ndarray, window: int) -> Optional[np.ndarray]:
    """The running mean over `window` steps; None without a window, or for too few values."""
    count = len(values)
    return running_mean(values, min(window // 2, (count - 1) // 2)) if window > 1 and count > 2 else None


def running_mean(values: np.ndarray, half: int) -> np.ndarray:
    """The running mean over a centred window of 2 x `half` + 1 values, so that a falling curve is not delayed.

    At the end, where half of the window is missing, it continues as the straight line through the last full window: a mean
    of fewer and fewer points would follow the noise of the last one. At the start, where a curve falls by more than its
    noise, the window shrinks.

    >>> running_mean(np.array([2.0, 4.0, 9.0]), 1).tolist()
    [2.0, 5.0, 8.5]
    """
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


def thinned(curve: Curve, width: int) -> Curve:
    """The curve with the points that `extremes` keeps. The running mean is read at the same places."""
    x, y, smooth = curve
    places, values = extremes(x, y, width)
    if len(places) == len(x):
        return curve
    return Curve(x[places], values, None if smooth is None else smooth[places])


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
