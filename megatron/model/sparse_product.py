# SPDX-License-Identifier: Apache-2.0
"""The products of a linear layer with a mask (`model/sparsity.py`).

Masks are computed from the weights in the first pass of a step: there they are gathered, in the format of the passes, and
equal on all data parallel ranks. All passes of the step use the new mask; `update_buffers` keeps it if the step counts.

The threshold of a share of zeros is that of the whole weight, as in torch's `l1_unstructured`. Tensor parallel ranks find
it together: a bisection over the bits of |w| counts the weights above a candidate, so the result is exact and does not
depend on the ranks. Weights that are equal to the threshold stay; in bf16 these are some tenths of a percent. Patterns
such as 2:4 need no message: a group of inputs lies on one rank.

Legend: i inputs of this rank, m inputs of a group, n of them that stay.
"""

import math
from typing import Optional

import torch

from megatron.model.sparsity import MASK, STEP, GroupPattern, is_due, pattern_of, share
from megatron.mpu import collectives
from megatron.mpu.linear_product import LinearProduct, divided_over

LARGEST = 0x7F800000  # the bits of infinity in fp32: those of finite |w| are smaller, in the order of |w|


class SparseProduct(LinearProduct):
    """The weight, with zeros where the mask is 0: there it has no gradient."""

    together = True

    def __init__(self, layer, name, settings):
        super().__init__(layer, name, settings)
        self.pattern = pattern_of(settings)
        self._new: Optional[torch.Tensor] = None  # the mask of this step, if it is a new one
        # The step of the layer, at least; None: unknown. Steps that were skipped do not count, and the device alone knows
        # them, so its number is read when this one is due, and after a new mask.
        self._step: Optional[int] = None

    def transform(self, weight: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        weight = super().transform(weight, *own)
        if weight.is_meta:
            return weight * torch.empty_like(weight)
        if self._new is None and self.layer.training and self._is_due():
            with torch.no_grad():
                self._new = self.mask_at(weight, self._step)
            self.after_transform_changed()
        return weight * (getattr(self.layer, MASK) if self._new is None else self._new)

    def mask_at(self, weight: torch.Tensor, step: int) -> torch.Tensor:
        """The mask of this rank's piece of a weight at a step, [rows..., i] bool."""
        zeros, total = self.pattern or share(self.settings, step), math.prod(self.whole_shape[self.stacked :])
        return mask_of(weight, zeros, total, divided_over(self.layer), self.stacked)

    def _is_due(self) -> bool:
        if self._step is None or is_due(self.settings, self._step):
            self._step = int(getattr(self.layer, STEP))
        return is_due(self.settings, self._step)

    def update_buffers(self) -> None:
        super().update_buffers()
        getattr(self.layer, STEP).add_(1)
        if self._new is not None:
            getattr(self.layer, MASK).copy_(self._new)
            self._new = self._step = None
        elif self._step is not None:
            self._step += 1

    def after_update(self) -> None:
        super().after_update()
        self._new = None

    def after_load(self) -> None:
        super().after_load()
        self._step = None


def mask_of(weight: torch.Tensor, zeros: GroupPattern | float, total: int, tp, stacked: int = 0) -> torch.Tensor:
    """Which weights of this rank's piece stay. zeros: a pattern, or a share of the `total` weights of all ranks of `tp`.
    stacked: as in `Placement`: then each of the matrices has this share.
    """
    if isinstance(zeros, GroupPattern):
        return largest_of_groups(weight, *zeros)
    if stacked:
        return torch.stack([largest_of_all(one, total - round(total * zeros), tp) for one in weight])
    return largest_of_all(weight, total - round(total * zeros), tp)


def largest_of_groups(weight: torch.Tensor, kept: int, group: int) -> torch.Tensor:
    """Which weights are among the `kept` largest of their group of inputs; of equal ones, the first."""
    groups = weight.detach().abs().unflatten(-1, (-1, group))  # [..., i/m, m]
    order = groups.sort(dim=-1, descending=True, stable=True).indices[..., :kept]  # [..., i/m, n]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order, True).flatten(-2)


def largest_of_all(weight: torch.Tensor, kept: int, tp) -> torch.Tensor:
    """Which weights are at least as large as the `kept`-th largest of all ranks of `tp`."""
    bits = weight.detach().abs().float().view(torch.int32)
    low = torch.zeros((), dtype=torch.int64, device=weight.device)  # at least `kept` weights are as large
    high = low + LARGEST  # fewer are
    for _ in range(31):
        middle = (low + high) // 2
        count = (bits >= middle).sum()
        collectives.all_reduce(count, tp)
        enough = count >= kept
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return bits >= low
