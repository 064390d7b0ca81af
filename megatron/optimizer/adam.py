# SPDX-License-Identifier: Apache-2.0
"""AdamW (arXiv:1711.05101) on flat fp32 memory: main weights and moments of some units' shards, on one device.

State that is offloaded lives in the memory of the host and is stepped by the CPU: gradients go there, weights come back.
"""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from megatron import config
from megatron.optimizer.units import Owned


class AdamState:
    """Main weights, moments and the step of consecutive owned ranges.

    reduced:   fp32 gradients of the rank's whole shard
    offload:   keep everything on the host and bring gradients there for the step
    memory:    what to use for the main weights instead of memory of their own
    """

    def __init__(self, owned: Sequence[Owned], reduced: torch.Tensor, *, offload: bool, memory: torch.Tensor = None):
        self.owned, self.offload = owned, offload
        self.span = slice(owned[0].place.start, owned[-1].place.stop)
        own = reduced[self.span]
        host = dict(device="cpu", pin_memory=own.device.type == "cuda") if offload else dict(device=own.device)
        self.main = torch.zeros(own.numel(), dtype=torch.float32, **host) if memory is None else memory
        self.moments = {name: torch.zeros_like(self.main, **host) for name in ("exp_avg", "exp_avg_sq")}
        self.arriving = torch.zeros_like(self.main, **host) if offload else None
        self.ranges = {decay: self._ranges(decay) for decay in (True, False)}

    @property
    def nbytes(self) -> int:
        """Bytes of main weights and moments."""
        return self.main.nbytes + sum(moment.nbytes for moment in self.moments.values())

    def place(self, own: Owned) -> slice:
        """Where an owned range lies in `main` and the moments."""
        return slice(own.place.start - self.span.start, own.place.stop - self.span.start)

    def _ranges(self, decay: bool) -> list[slice]:
        """The stretches of the state with (or without) weight decay."""
        found = []
        for own in self.owned:
            border = min(max(own.unit.decay, own.low), own.high)
            start, stop = (own.low, border) if decay else (border, own.high)
            if start < stop:
                first = self.place(own).start - own.low
                found.append(slice(first + start, first + stop))
        return found

    @torch.no_grad()
    def step(self, reduced: torch.Tensor, step_count: int, lr: float, weight_decay: float, settings: config.Optimizer):
        """One update from the shard's gradients; `step_count`: updates so far."""
        gradients = reduced[self.span]
        if self.offload:
            gradients = self.arriving.copy_(gradients)
        for decay, ranges in self.ranges.items():
            adamw(
                *[[flat[where] for where in ranges] for flat in (self.main, gradients, *self.moments.values())],
                [],
                [torch.tensor(float(step_count), device=self.main.device) for _ in ranges],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=lr,
                weight_decay=weight_decay if decay else 0.0,
                beta1=settings.adam_beta1,
                beta2=settings.adam_beta2,
                eps=settings.adam_eps,
            )


def divide(owned: Sequence[Owned], fraction: float) -> tuple[list[Owned], list[Owned]]:
    """(the first units, which together are about `fraction` of all, the others)."""
    total = sum(own.high - own.low for own in owned)
    number = next(n for n in range(len(owned) + 1) if sum(o.high - o.low for o in owned[:n]) >= fraction * total)
    return list(owned[:number]), list(owned[number:])
