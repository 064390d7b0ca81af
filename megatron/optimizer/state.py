# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in flat memory: fp32 main weights, and moments, of some units' shards, on one device.

Moments are the state tensors of the update rule (`update.py`), in fp32 or bf16 (`rounding.py`). Offloaded state is in host
memory, and the CPU updates it: gradients are copied there, weights are copied back. `disk.py` keeps state in a file. Frozen
units have only weights, in the model's number format: `FrozenState`.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Optional

import torch

from megatron.optimizer.rounding import Widened, parts_of
from megatron.optimizer.units import FlatUnit, OwnedRange, Slot
from megatron.optimizer.update import Group, Rates, UpdateRule

Ranges = dict[Group, list[slice]]  # group -> its ranges of flat state
Targets = Iterable[tuple[slice, torch.Tensor]]  # (range of the state, model weights with the same values)


class OwnedState:
    """State of consecutive owned ranges: on the device or the host (`MemoryState`), or in a file (`DiskState`).

    main:     the main weights, a flat tensor of `size` elements; for use between two steps
    moments:  name -> flat tensor, fp32 or bf16; for use between two steps
    nbytes:   bytes held in memory
    offload:  the main weights have their own memory, separate from the model's parameters
    direct:   `step` itself copies new main weights to the model (`targets`)
    """

    main: torch.Tensor
    moments: dict[str, torch.Tensor]
    nbytes: int
    offload: bool
    direct = False

    def __init__(self, owned: Sequence[OwnedRange], rule: UpdateRule):
        self.owned, self.rule = owned, rule
        self.span = slice(owned[0].shard_slice.start, owned[-1].shard_slice.stop)  # in the rank's whole shard
        self.size = self.span.stop - self.span.start
        self.ranges = self._ranges()
        self.places = list(self._places())
        self.ends = [where.stop for _, where, _ in self.places]

    def where(self, name: str, stretch: slice) -> Optional[slice]:
        """The position in a moment of a range of the state; None if its weights have no such moment."""
        return stretch

    def part(self, flat: torch.Tensor, name: Optional[str], stretch: slice) -> Optional[torch.Tensor]:
        """A moment's values for a range of the rank's shard, or None. `name` None: `flat` is `main`."""
        own = slice(stretch.start - self.span.start, stretch.stop - self.span.start)
        where = self.where(name, own) if name else own
        return None if where is None else flat[where]

    def slice_of(self, own: OwnedRange) -> slice:
        """The position of an owned range in the state."""
        return slice(own.shard_slice.start - self.span.start, own.shard_slice.stop - self.span.start)

    def step(self, reduced: torch.Tensor, step_count: int, rates: Rates, targets: Targets = ()) -> None:
        """One update from the shard's gradients. step_count: updates so far; targets: used if the state is `direct`."""
        raise NotImplementedError

    def fill(self, stretch: slice, words: torch.Tensor) -> bool:
        """Fill the random words of a range of the state; padding gets 0. Returns False to round to the nearest."""
        if self.rule.noise is None:
            return False
        words.zero_()
        for slot, where, first in self.places[bisect(self.ends, stretch.start) :]:
            if where.start >= stretch.stop:
                break
            start, stop = max(where.start, stretch.start), min(where.stop, stretch.stop)
            own = words[start - stretch.start : stop - stretch.start]
            self.rule.noise.fill(own, slot, first + start - where.start)
        return True

    def _places(self) -> Iterator[tuple[Slot, slice, int]]:
        """Each parameter with its range in the state, and the range's first element in the parameter."""
        for own in self.owned:
            for slot, where in own.slots():
                start, stop = where.start - self.span.start, where.stop - self.span.start
                yield slot, slice(start, stop), own.low + where.start - own.at - slot.start

    def keep(self) -> None:
        """Preserve the present content of the tensors that are `is_stable` until the next call, whatever steps follow."""

    def is_stable(self, flat: torch.Tensor) -> bool:
        """Whether `keep` preserves `flat`, the main weights or one of the moments."""
        return False

    def _ranges(self) -> Ranges:
        """The ranges of the state by group, each with the padding after its parameters."""
        ranges: Ranges = {}
        for own in self.owned:
            first = self.slice_of(own).start - own.low
            for group, start, stop in _stretches(own.unit):
                start, stop = max(start, own.low), min(stop, own.high)
                if start < stop:
                    ranges.setdefault(group, []).append(slice(first + start, first + stop))
        return ranges


def _stretches(unit: FlatUnit) -> Iterator[tuple[Group, int, int]]:
    """(group, start, stop) of each run of a unit's parameters in one group. The last run includes the padding."""
    groups = [(group, list(slots)) for group, slots in groupby(unit.slots, lambda slot: Group.of(slot.placement))]
    starts = [slots[0].start for _, slots in groups]
    for (group, _), start, stop in zip(groups, starts, [*starts[1:], unit.size]):
        yield group, start, stop


class MemoryState(OwnedState):
    """State of consecutive owned ranges in the memory of the device or the host.

    reduced:   gradients of the rank's whole shard
    offload:   keep the state on the host and copy gradients there for the step
    memory:    memory to use for the main weights; allocated if not given
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
            name: torch.zeros(sum(part.stop - part.start for part in parts), dtype=rule.dtype_of(name), **host)
            for name, parts in self.parts.items()
        }
        self.arriving = torch.zeros_like(self.main, dtype=reduced.dtype, **host) if offload else None

    @property
    def nbytes(self) -> int:
        return self.main.nbytes + sum(moment.nbytes for moment in self.moments.values())

    @torch.no_grad()
    def step(self, reduced: torch.Tensor, step_count: int, rates: Rates, targets: Targets = ()) -> None:
        gradients = reduced[self.span]
        if self.offload:
            gradients = self.arriving.copy_(gradients)
        flats = self.main, gradients
        update(self.rule, flats, self.moments, self.ranges, step_count, rates, self.fill, self.where)

    def _parts(self, name: str) -> list[slice]:
        """The ranges of the state that have a moment, in the order in which it stores them. Neighbours are merged."""
        merged: list[slice] = []
        stretches = [
            where for group, those in self.ranges.items() if name in self.rule.state_of(group) for where in those
        ]
        for where in sorted(stretches, key=lambda where: where.start):
            if merged and merged[-1].stop == where.start:
                where = slice(merged.pop().start, where.stop)
            merged.append(where)
        return merged

    def where(self, name: str, stretch: slice) -> Optional[slice]:
        at = 0
        for part in self.parts[name]:
            if part.start <= stretch.start < part.stop:
                return slice(at + stretch.start - part.start, at + stretch.stop - part.start)
            at += part.stop - part.start
        return None


class FrozenState(OwnedState):
    """A rank's shard of a frozen unit: weights in the model's number format, in memory that the caller owns."""

    offload, direct = False, True
    nbytes = 0  # the owner of the memory counts it

    def __init__(self, own: OwnedRange, rule: UpdateRule, memory: torch.Tensor):
        super().__init__([own], rule)
        self.main, self.moments = memory, {}

    def step(self, reduced: torch.Tensor, step_count: int, rates: Rates, targets: Targets = ()) -> None:
        """Change nothing."""


def update(
    rule: UpdateRule,
    flats: tuple[torch.Tensor, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
    ranges: Ranges,
    step_count: int,
    rates: Rates,
    fill: Callable[[slice, torch.Tensor], bool],
    where_of: Callable[[str, slice], Optional[slice]] = lambda name, where: where,
) -> None:
    """Apply a rule to ranges of flat main weights and gradients (`flats`). All tensors are on one device.

    Rules compute in fp32: bf16 gradients and moments are widened, and moments rounded again, part by part.

    fill:     fills the random words of a range of the state, for rounding; see `OwnedState.fill`
    where_of: (name of a moment, range of the state) -> its position in the moment
    """
    main, gradients = flats
    wide = Widened(main.device)
    for group, stretches in ranges.items():
        step = rule.update_matrices if group.matrix else rule.update
        names, rest = rule.state_of(group), (step_count, *rates.of(group))
        if all(flat.dtype == torch.float32 for flat in (gradients, *(moments[name] for name in names))):
            states = [[moments[name][where_of(name, where)] for where in stretches] for name in names]
            step([main[where] for where in stretches], [gradients[where] for where in stretches], states, *rest)
            continue
        for part in parts_of(stretches, main.device.type):
            states = [moments[name][where_of(name, part)] for name in names]
            values = [wide.of(name, state) for name, state in zip(names, states)]
            gradient = wide.of("gradient", gradients[part])
            if gradients.dtype != torch.float32:
                gradient.mul_(rule.widened_scale)
            step([main[part]], [gradient], [[one] for one in values], *rest)
            wide.store(states, values, partial(fill, part))


def divide(owned: Sequence[OwnedRange], *shares: float) -> list[list[OwnedRange]]:
    """Divide units into consecutive groups: for each share a group with about that part of all elements, then the rest."""
    total = sum(own.high - own.low for own in owned)
    sizes = [sum(o.high - o.low for o in owned[:n]) for n in range(len(owned) + 1)]
    wanted = [min(total, sum(shares[: n + 1]) * total) for n in range(len(shares))]
    borders = [0, *(next(n for n, size in enumerate(sizes) if size >= least) for least in wanted), len(owned)]
    return [list(owned[start:stop]) for start, stop in zip(borders, borders[1:])]
