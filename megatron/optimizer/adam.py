# SPDX-License-Identifier: Apache-2.0
"""AdamW (arXiv:1711.05101) on flat fp32 memory: main weights and moments of some units' shards, on one device.

State that is offloaded lives in the memory of the host and is stepped by the CPU: gradients go there, weights come back.
State in a file is `disk.py`'s.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.optim.adamw import adamw

from megatron.optimizer.units import Owned
from megatron.settings import schema

MOMENTS = ("exp_avg", "exp_avg_sq")
Ranges = dict[bool, list[slice]]  # with weight decay or without -> stretches of flat state
Targets = Iterable[tuple[slice, torch.Tensor]]  # where in the state -> what of the model's weights has its values


class OwnedState:
    """State of consecutive owned ranges, wherever it is stored: on the device, on the host (`AdamState`), in a file.

    main, moments:  flat fp32 tensors of `size` elements, and name -> such a tensor; to be used between two steps
    nbytes:         what it holds in memory
    offload:        the main weights are no memory of the model's
    direct:         a step brings new main weights into the model's weights itself (`targets`), so that these are up to date
    """

    main: torch.Tensor
    moments: dict[str, torch.Tensor]
    nbytes: int
    offload: bool
    direct = False

    def __init__(self, owned: Sequence[Owned]):
        self.owned = owned
        self.span = slice(owned[0].place.start, owned[-1].place.stop)  # of the rank's whole shard
        self.size = self.span.stop - self.span.start
        self.ranges: Ranges = {decay: self._ranges(decay) for decay in (True, False)}

    def place(self, own: Owned) -> slice:
        """Where an owned range lies in `main` and the moments."""
        return slice(own.place.start - self.span.start, own.place.stop - self.span.start)

    def step(
        self,
        reduced: torch.Tensor,
        step_count: int,
        lr: float,
        weight_decay: float,
        settings: schema.Optimizer,
        targets: Targets = (),
    ) -> None:
        """One update from the shard's gradients; `step_count`: updates so far; `targets` matter where it is `direct`."""
        raise NotImplementedError

    def keep(self) -> None:
        """What `lasts` keeps its present content until this is called again, steps or no steps."""

    def lasts(self, flat: torch.Tensor) -> bool:
        """Whether `keep` is about `flat`, which is the main weights or one of the moments."""
        return False

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


class AdamState(OwnedState):
    """Main weights, moments and the step of consecutive owned ranges.

    reduced:   fp32 gradients of the rank's whole shard
    offload:   keep everything on the host and bring gradients there for the step
    memory:    what to use for the main weights instead of memory of their own
    """

    def __init__(self, owned: Sequence[Owned], reduced: torch.Tensor, *, offload: bool, memory: torch.Tensor = None):
        super().__init__(owned)
        self.offload = offload
        own = reduced[self.span]
        host = dict(device="cpu", pin_memory=own.device.type == "cuda") if offload else dict(device=own.device)
        self.main = torch.zeros(own.numel(), dtype=torch.float32, **host) if memory is None else memory
        self.moments = {name: torch.zeros_like(self.main, **host) for name in MOMENTS}
        self.arriving = torch.zeros_like(self.main, **host) if offload else None

    @property
    def nbytes(self) -> int:
        return self.main.nbytes + sum(moment.nbytes for moment in self.moments.values())

    @torch.no_grad()
    def step(
        self,
        reduced: torch.Tensor,
        step_count: int,
        lr: float,
        weight_decay: float,
        settings: schema.Optimizer,
        targets: Targets = (),
    ) -> None:
        gradients = reduced[self.span]
        if self.offload:
            gradients = self.arriving.copy_(gradients)
        flats = (self.main, gradients, *self.moments.values())
        update(flats, self.ranges, step_count, lr, weight_decay, settings)


def update(
    flats: Sequence[torch.Tensor],
    ranges: Ranges,
    step_count: int,
    lr: float,
    weight_decay: float,
    settings: schema.Optimizer,
) -> None:
    """AdamW on stretches of flat main weights, gradients and both moments, which all lie on one device."""
    for decay, stretches in ranges.items():
        adamw(
            *[[flat[where] for where in stretches] for flat in flats],
            [],
            [torch.full((), float(step_count), device=flats[0].device) for _ in stretches],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=lr,
            weight_decay=weight_decay if decay else 0.0,
            beta1=settings.adam_beta1,
            beta2=settings.adam_beta2,
            eps=settings.adam_eps,
        )


def divide(owned: Sequence[Owned], *shares: float) -> list[list[Owned]]:
    """Units cut into consecutive groups: one for each share, together about that part of all elements, and the rest."""
    total = sum(own.high - own.low for own in owned)
    sizes = [sum(o.high - o.low for o in owned[:n]) for n in range(len(owned) + 1)]
    wanted = [min(total, sum(shares[: n + 1]) * total) for n in range(len(shares))]
    borders = [0, *(next(n for n, size in enumerate(sizes) if size >= least) for least in wanted), len(owned)]
    return [list(owned[start:stop]) for start, stop in zip(borders, borders[1:])]
