# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer on flat fp32 memory: main weights and moments of some units' shards, on one device.

Moments are whatever tensors the update rule keeps (`update.py`). State that is offloaded lives in the memory of the host
and is stepped by the CPU: gradients go there, weights come back. State in a file is `disk.py`'s. Frozen units have weights
alone, in the format that the model computes with: `FrozenState`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Optional

import torch

from megatron.optimizer.units import FlatUnit, OwnedRange
from megatron.optimizer.update import Group, Rates, UpdateRule

Ranges = dict[Group, list[slice]]  # what stretches of flat state have in common -> these
Targets = Iterable[tuple[slice, torch.Tensor]]  # where in the state -> what of the model's weights has its values


class OwnedState:
    """State of consecutive owned ranges, wherever it is stored: on the device, on the host (`MemoryState`), in a file.

    main, moments:  flat fp32 tensors of `size` elements, and name -> such a tensor; to be used between two steps
    nbytes:         what it holds in memory
    offload:        the main weights lie apart from the model's parameters
    direct:         a step brings new main weights into the model's weights itself (`targets`), so that these are up to date
    """

    main: torch.Tensor
    moments: dict[str, torch.Tensor]
    nbytes: int
    offload: bool
    direct = False

    def __init__(self, owned: Sequence[OwnedRange], rule: UpdateRule):
        self.owned, self.rule = owned, rule
        self.span = slice(owned[0].shard_slice.start, owned[-1].shard_slice.stop)  # of the rank's whole shard
        self.size = self.span.stop - self.span.start
        self.ranges = self._ranges()

    def where(self, name: str, stretch: slice) -> Optional[slice]:
        """Where in a moment a stretch of the state lies; None if its weights have no such moment."""
        return stretch

    def part(self, flat: torch.Tensor, name: Optional[str], stretch: slice) -> Optional[torch.Tensor]:
        """What a moment has of a stretch of the rank's shard, None if it has nothing of it; of `main` without a name."""
        own = slice(stretch.start - self.span.start, stretch.stop - self.span.start)
        found = self.where(name, own) if name else own
        return None if found is None else flat[found]

    def slice_of(self, own: OwnedRange) -> slice:
        """Where an owned range lies in `main` and the moments."""
        return slice(own.shard_slice.start - self.span.start, own.shard_slice.stop - self.span.start)

    def step(self, reduced: torch.Tensor, step_count: int, rates: Rates, targets: Targets = ()) -> None:
        """One update from the shard's gradients; `step_count`: updates so far; `targets` matter where it is `direct`."""
        raise NotImplementedError

    def keep(self) -> None:
        """What `is_stable` keeps its present content until this is called again, steps or no steps."""

    def is_stable(self, flat: torch.Tensor) -> bool:
        """Whether `keep` is about `flat`, which is the main weights or one of the moments."""
        return False

    def _ranges(self) -> Ranges:
        """The stretches of the state by what they have in common, each with the padding behind its parameters."""
        found: Ranges = {}
        for own in self.owned:
            first = self.slice_of(own).start - own.low
            for group, start, stop in _stretches(own.unit):
                start, stop = max(start, own.low), min(stop, own.high)
                if start < stop:
                    found.setdefault(group, []).append(slice(first + start, first + stop))
        return found


def _stretches(unit: FlatUnit) -> Iterator[tuple[Group, int, int]]:
    """(group, start, stop) of neighbouring parameters of a unit of one group; the last one ends with the unit."""
    groups = [(group, list(slots)) for group, slots in groupby(unit.slots, lambda slot: Group.of(slot.placement))]
    starts = [slots[0].start for _, slots in groups]
    for (group, _), start, stop in zip(groups, starts, [*starts[1:], unit.size]):
        yield group, start, stop


class MemoryState(OwnedState):
    """Main weights, moments and the step of consecutive owned ranges.

    reduced:   fp32 gradients of the rank's whole shard
    offload:   keep everything on the host and bring gradients there for the step
    memory:    what to use for the main weights instead of memory of their own
    """

    def __init__(
        self,
        owned: Sequence[OwnedRange],
        rule: UpdateRule,
        reduced: torch.Tensor,
        *,
        offload: bool,
        memory: Optional[torch.Tensor] = None,
    ):
        super().__init__(owned, rule)
        self.offload = offload
        own = reduced[self.span]
        host = dict(device="cpu", pin_memory=own.device.type == "cuda") if offload else dict(device=own.device)
        self.main = torch.zeros(own.numel(), dtype=torch.float32, **host) if memory is None else memory
        self.parts = {name: self._parts(name) for name in rule.state}
        self.moments = {
            name: torch.zeros(sum(part.stop - part.start for part in parts), dtype=torch.float32, **host)
            for name, parts in self.parts.items()
        }
        self.arriving = torch.zeros_like(self.main, **host) if offload else None

    @property
    def nbytes(self) -> int:
        return self.main.nbytes + sum(moment.nbytes for moment in self.moments.values())

    @torch.no_grad()
    def step(self, reduced: torch.Tensor, step_count: int, rates: Rates, targets: Targets = ()) -> None:
        gradients = reduced[self.span]
        if self.offload:
            gradients = self.arriving.copy_(gradients)
        update(self.rule, (self.main, gradients), self.moments, self.ranges, step_count, rates, self.where)

    def _parts(self, name: str) -> list[slice]:
        """The stretches of the state that have a moment, end to end in it; neighbours are one."""
        found: list[slice] = []
        stretches = [
            where for group, those in self.ranges.items() if name in self.rule.state_of(group) for where in those
        ]
        for where in sorted(stretches, key=lambda where: where.start):
            if found and found[-1].stop == where.start:
                where = slice(found.pop().start, where.stop)
            found.append(where)
        return found

    def where(self, name: str, stretch: slice) -> Optional[slice]:
        at = 0
        for part in self.parts[name]:
            if part.start <= stretch.start < part.stop:
                return slice(at + stretch.start - part.start, at + stretch.stop - part.start)
            at += part.stop - part.start
        return None


class FrozenState(OwnedState):
    """A rank's shard of a frozen unit: weights in the format of the model, in memory that is there anyway."""

    offload, direct = False, True
    nbytes = 0  # of its own; whoever takes memory for a shard counts that

    def __init__(self, own: OwnedRange, rule: UpdateRule, memory: torch.Tensor):
        super().__init__([own], rule)
        self.main, self.moments = memory, {}

    def step(self, reduced: torch.Tensor, step_count: int, rates: Rates, targets: Targets = ()) -> None:
        """Nothing changes."""


def update(
    rule: UpdateRule,
    flats: tuple[torch.Tensor, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
    ranges: Ranges,
    step_count: int,
    rates: Rates,
    where_of: Callable[[str, slice], Optional[slice]] = lambda name, where: where,
) -> None:
    """A rule's step on stretches of flat main weights and gradients (`flats`), which lie on one device, as moments do.

    where_of: name of a moment, stretch -> where it lies in that
    """
    for group, stretches in ranges.items():
        weights, gradients = ([flat[where] for where in stretches] for flat in flats)
        names = rule.state_of(group)
        states = [[moments[name][where_of(name, where)] for where in stretches] for name in names]
        step = rule.update_matrices if group.matrix else rule.update
        step(weights, gradients, states, step_count, *rates.of(group))


def divide(owned: Sequence[OwnedRange], *shares: float) -> list[list[OwnedRange]]:
    """Units cut into consecutive groups: one for each share, together about that part of all elements, and the rest."""
    total = sum(own.high - own.low for own in owned)
    sizes = [sum(o.high - o.low for o in owned[:n]) for n in range(len(owned) + 1)]
    wanted = [min(total, sum(shares[: n + 1]) * total) for n in range(len(shares))]
    borders = [0, *(next(n for n, size in enumerate(sizes) if size >= least) for least in wanted), len(owned)]
    return [list(owned[start:stop]) for start, stop in zip(borders, borders[1:])]
