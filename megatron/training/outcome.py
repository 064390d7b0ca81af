# SPDX-License-Identifier: Apache-2.0
"""What the passes of a step have come to: a few numbers, made on the device, by which its update is made or not.

The host reads a copy of them. It does so before the update where that costs nothing (on a CPU), or where something needs
them at once; else in the middle of the next step, when the device has long gone on. The update then follows the device's
own numbers: the factor of the gradients, and a flag that says whether anything is to change.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import Optional

import torch

from megatron.data.loader import MicroBatch
from megatron.mpu.transfer import Arriving


class Figures:
    """The numbers of a step on its device, fp64: `norm` and `means` of the losses as they are logged, and `scale`, what
    gradients are multiplied with to be averaged, without loss scale and clipped.

    totals:    [gradient norm, sums of all ranks ..., tokens, what guards have sent ...], as reduced: with the loss scale
    num_sums:  how many sums there are, tokens among them
    unscale:   tokens, at least 1 -> what gradients are multiplied with to be those of the mean
    limit:     of the norm, above which gradients are clipped; 0: none
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
        """[loss, norm], by which guards go."""
        return torch.stack([self.means[0], self.norm])


def clip_coefficient(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients are multiplied by so that their norm is at most `limit` (0: no limit), as in Megatron-LM."""
    if limit <= 0:
        return torch.ones_like(norm)
    return (torch.full_like(norm, limit) / (norm + 1e-6)).clamp(max=1.0)


@dataclass
class Outcome:
    """A step whose passes are done, and whose numbers are on their way to the host.

    skip: a flag on the device that the update goes by; None where the host reads first, and decides
    """

    iteration: int
    consumed: int  # samples, those of this step included
    size: int  # samples of this step
    batches: Sequence[MicroBatch]
    loss_func: Callable
    rate: float
    decoupled: Optional[float]
    figures: InitVar[Figures]
    skip: Optional[torch.Tensor] = None
    num_zeros: Optional[int] = None  # elements of the gradient, at steps where the log tells them
    repeated: bool = False  # the passes were made once more, to find a cause: gradients of a later step are lost

    def __post_init__(self, figures: Figures):
        self._norm, self._scale = figures.norm, figures.scale
        numbers = [figures.norm.view(1), figures.scale.view(1), figures.means, figures.sent]
        made = [] if self.skip is None else [(~self.skip).to(figures.norm.dtype).view(1)]
        self._arriving = Arriving(torch.cat([*numbers, *made]))

    @property
    def overflow(self) -> torch.Tensor:
        """A flag on the device, by which the loss scale changes."""
        return ~torch.isfinite(self._norm)

    @property
    def factor(self) -> float | torch.Tensor:
        """Of the gradients: a number once it is read, else an fp32 scalar on the device."""
        return self._scale.float() if isinstance(self._scale, torch.Tensor) else self._scale

    def read(self, names: Iterable[str], count: Callable[[list[float]], list[float]]) -> None:
        """Have on the host: `norm`, `factor`, `means` of the losses `names`, and whether the device `made` the update.

        count: takes note of what guards have sent, and gives the rest back (`Watch.count`)
        """
        self.norm, self._scale, *rest = self._arriving.read()
        self.made = self.skip is not None and rest.pop() > 0.5
        self.means = dict(zip(names, count(rest), strict=True))
