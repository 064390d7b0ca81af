# SPDX-License-Identifier: Apache-2.0
"""Spikes of loss or gradient norm: values far above the median of the last steps, in units of their usual spread.

    >>> recent = Recent()
    >>> for step in range(40):
    ...     recent = recent.after(3.0 + 0.01 * (step % 5), 1.0 + 0.1 * (step % 3), window=64)
    >>> recent.spike(3.03, 1.2, threshold=8) is None
    True
    >>> print(recent.spike(5.0, 1.2, threshold=8))
    loss 5 is 65.6 deviations above the median 3.02 of the last 40 steps

A few outliers move mean and variance, but hardly the median and the median absolute deviation. Pure: the window
is part of a run's state and of its checkpoints, so a resumed run finds the same spikes as an uninterrupted one.
"""

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, Optional

ENOUGH = 32  # steps before the first one is judged
FLOOR = 0.01  # smallest deviation, as a share of the median: an almost constant curve may start to move


class Spike(NamedTuple):
    """A loss or gradient norm far above its median."""

    what: str
    value: float
    median: float
    score: float  # deviations above the median
    seen: int

    def __str__(self) -> str:
        return (
            f"{self.what} {self.value:.4g} is {self.score:.1f} deviations above the median {self.median:.4g} "
            f"of the last {self.seen} steps"
        )


@dataclass(frozen=True)
class Recent:
    """Losses and gradient norms of the last steps."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    def spike(self, loss: float, norm: float, threshold: float) -> Optional[Spike]:
        """The value of the next step that exceeds the median by more than `threshold` deviations; the loss comes first."""
        for what, value, values in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            if len(values) < ENOUGH:
                continue
            middle, score = robust_score(value, values)
            if score > threshold:
                return Spike(what, value, middle, score, len(values))
        return None

    def measures(self) -> list[tuple[float, float]]:
        """The (median, deviation) of losses and of norms, for scores. With too few steps, the deviation is infinite."""
        return [usual(values) if len(values) >= ENOUGH else (0.0, math.inf) for values in (self.losses, self.norms)]

    def after(self, loss: float, norm: float, window: int) -> "Recent":
        """The window with one more step; values that are not finite are left out."""
        return replace(self, losses=_appended(self.losses, loss, window), norms=_appended(self.norms, norm, window))

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Recent":
        """Restored from a checkpoint's record."""
        return cls(tuple(record["losses"]), tuple(record["norms"]))


def robust_score(value: float, values: tuple[float, ...]) -> tuple[float, float]:
    """The median, and the number of deviations by which `value` lies above it."""
    middle, deviation = usual(values)
    return middle, (value - middle) / deviation


def usual(values: tuple[float, ...]) -> tuple[float, float]:
    """The (median, deviation) of values. The deviation is 1.4826 x MAD, the standard deviation of a normal distribution."""
    middle = median(values)
    spread = 1.4826 * median(abs(other - middle) for other in values)
    return middle, max(spread, FLOOR * abs(middle), 1e-12)


def _appended(values: tuple[float, ...], value: float, window: int) -> tuple[float, ...]:
    return (*values, value)[-window:] if math.isfinite(value) else values
