# SPDX-License-Identifier: Apache-2.0
"""The outcome of a step's passes: a few numbers, computed on the device, which decide about its update.

The host reads a copy of them. It reads them before the update if that costs nothing (on a CPU) or if they are needed
immediately. Otherwise it reads them during the next step, while the device continues. The update then uses the device's own
numbers: the factor of the gradients, and a flag that skips it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import Optional

import torch

from megatron.data.loader import MicroBatch
from megatron.mpu.transfer import Arriving


class Figures:
    """The numbers of a step on its device, fp64.

    norm, means: the gradient norm and the mean losses, as logged
    scale:       the factor that averages, un-scales and clips gradients

    totals:    [gradient norm, sums of all ranks ..., tokens, values from guards ...], reduced, including the loss scale
    num_sums:  number of sums, including tokens
    unscale:   tokens, at least 1 -> the factor that averages and un-scales gradients
    limit:     the norm above which gradients are clipped; 0: no clipping
    """

    def __init__(self, totals: torch.Tensor, num_sums: int, unscale: Callable, limit: float):
        tokens = totals[num_sums].clamp(min=1.0)
        factor = unscale(tokens)
        self.norm = totals[0] * factor
        self.means = totals[1:num_sums] / tokens
        self.scale = clip_coefficient(self.norm, limit) * factor
        self.sent = totals[1 + num_sums :]

    @property
    def judged(self) -> torch.Tensor:
        """[loss, norm], the input of the guards."""
        return torch.stack([self.means[0], self.norm])


def clip_coefficient(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """The factor that limits the norm of gradients to `limit` (0: no limit), as in Megatron-LM."""
    if limit <= 0:
        return torch.ones_like(norm)
    return (torch.full_like(norm, limit) / (norm + 1e-6)).clamp(max=1.0)


@dataclass
class Outcome:
    """A step after its passes. Its numbers are being copied to the host.

    skip: a flag on the device that skips the update; None if the host reads the numbers first and decides
    """

    iteration: int
    consumed: int  # samples, including those of this step
    size: int  # samples of this step
    batches: Sequence[MicroBatch]
    loss_func: Callable
    rate: float
    decoupled: Optional[float]
    figures: InitVar[Figures]
    skip: Optional[torch.Tensor] = None
    num_zeros: Optional[int] = None  # zeros in the gradient, if they are logged at this step
    max_logit: Optional[Arriving] = None  # the largest attention logit, if it is logged
    repeated: bool = False  # the passes were repeated to find a cause, and gradients of a later step are lost

    def __post_init__(self, figures: Figures):
        self._norm, self._scale = figures.norm, figures.scale
        numbers = [figures.norm.view(1), figures.scale.view(1), figures.means, figures.sent]
        made = [] if self.skip is None else [(~self.skip).to(figures.norm.dtype).view(1)]
        self._arriving = Arriving(torch.cat([*numbers, *made]))

    @property
    def overflow(self) -> torch.Tensor:
        """Whether the gradients overflowed, as a flag on the device."""
        return ~torch.isfinite(self._norm)

    @property
    def factor(self) -> float | torch.Tensor:
        """The factor of the gradients: a number once it is read, before that an fp32 scalar on the device."""
        return self._scale.float() if isinstance(self._scale, torch.Tensor) else self._scale

    def read(self, names: Iterable[str], count: Callable[[list[float]], list[float]]) -> None:
        """Read the numbers on the host: `norm`, `factor`, `means` by name, and whether the device `made` the update.

        count: consumes the values from guards and returns the others (`Watch.count`)
        """
        self.norm, self._scale, *rest = self._arriving.read()
        self.made = self.skip is not None and rest.pop() > 0.5
        self.means = dict(zip(names, count(rest), strict=True))
