# SPDX-License-Identifier: Apache-2.0
"""Parameters laid end to end: the memory that ZeRO cuts, reduces and gathers.

A *unit* is a layer or another part of the model, as the model says in its `units` (`model.weights.Unit`). Its parameters
lie end to end in one flat range, those with weight decay first, each aligned, the whole padded to the number of ranks that
shard it. All units of a rank lie end to end in turn, so that one buffer holds all weights, another all gradients, and a
unit or a shard is a slice.

    unit      | qkv.weight | up.weight | ...   | norm.weight | qkv.bias | pad |
              |<------------ decay ----------->|<------- no decay ------------>|
    shard 0/2 |<--------------------->|
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional, Union

import torch

from megatron.checkpoint.store import Piece, flat_pieces
from megatron.mpu.mesh import Axis
from megatron.mpu.placement import Own, Placement, placed_buffers, placements
from megatron.mpu.random import init_parameter
from megatron.optimizer.flat import aligned, unit_size

DATA_PARALLEL = ("replicate", "shard")  # axes of a unit that says nothing else
LAYERS = "blocks"  # where a module that does not list its units has its layers

AxisOf = Callable[[str], Axis]
Chunks = Union[torch.nn.Module, Sequence[torch.nn.Module]]  # the model chunks of a rank; one may stand for itself


@dataclass
class Slot:
    """One parameter's range [start, stop) inside its unit, and the modules that hold it under which attribute."""

    name: str
    parameter: torch.nn.Parameter
    placement: Placement
    start: int = 0
    stop: int = 0
    owners: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)  # the model chunks that use it: each gives it a gradient
    values: Optional[torch.Tensor] = (
        None  # of a parameter that keeps its own initial values: these, until they are read
    )


@dataclass
class FlatUnit:
    """A layer's parameters as the range [start, start + size) of the rank's buffers; `decay` of them are decayed.

    part: the module's name that its parameters' begin with; a part with frozen parameters and others is two units
    """

    name: str
    part: str
    slots: list[Slot]
    start: int
    size: int
    decay: int
    layer: bool  # used in one place; other units are used all over their chunk
    axes: tuple[str, str] = DATA_PARALLEL  # of the mesh: along the first are copies, the second divides it
    frozen: bool = False  # it has weights, and neither gradients nor state

    @property
    def buffer_slice(self) -> slice:
        """Where the unit lies in a buffer of all units."""
        return slice(self.start, self.start + self.size)

    @property
    def chunks(self) -> set[int]:
        """The model chunks that use it."""
        return {chunk for slot in self.slots for chunk in slot.chunks}

    @property
    def replicate(self) -> str:
        """The axis of the mesh along which ranks hold the same shards of it."""
        return self.axes[0]

    @property
    def sharded(self) -> str:
        """The axis of the mesh that divides it."""
        return self.axes[1]

    def shard(self, rank: int, pieces: int) -> tuple[int, int]:
        """[low, high) inside the unit that belongs to `rank` of `pieces`."""
        return self.size // pieces * rank, self.size // pieces * (rank + 1)


class OwnedRange(NamedTuple):
    """The range [low, high) of a unit that this rank owns; it lies at `at` in the rank's shard."""

    unit: FlatUnit
    low: int
    high: int
    at: int

    @property
    def whole(self) -> bool:
        """Whether this rank owns all of the unit."""
        return self.high - self.low == self.unit.size

    @property
    def shard_slice(self) -> slice:
        """Where the range lies in the rank's shard of all units."""
        return slice(self.at, self.at + self.high - self.low)

    def slots(self) -> Iterable[tuple[Slot, slice]]:
        """The parameters of which something is owned, and where in the rank's shard that lies."""
        for slot in self.unit.slots:
            start, stop = max(self.low, slot.start), min(self.high, slot.stop)
            if start < stop:
                yield slot, slice(self.at + start - self.low, self.at + stop - self.low)


def owned_ranges(units: Sequence[FlatUnit], axis_of: AxisOf) -> list[OwnedRange]:
    """What this rank owns of each unit, laid end to end. axis_of: name of an axis -> its place and size on this rank."""
    owned, at = [], 0
    for unit in units:
        axis = axis_of(unit.sharded)
        low, high = unit.shard(axis.rank, axis.size)
        owned.append(OwnedRange(unit, low, high, at))
        at += high - low
    return owned


def as_chunks(model: Chunks) -> list[torch.nn.Module]:
    """The model chunks of a rank as a list."""
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def flat_units_of(model: Chunks, axis_of: AxisOf) -> list[FlatUnit]:
    """Units of a rank's model chunks in registration order (those of other axes behind, frozen ones last), each padded to
    a multiple of the ranks that divide it. Allocates nothing. A parameter that several chunks share is one slot.
    """
    members: dict[tuple[str, bool], list[Slot]] = {}
    unit_of = {name: unit for chunk in as_chunks(model) for name, unit in units_of(chunk).items()}
    for slot in _slots(as_chunks(model)):
        members.setdefault((unit_of[slot.name].name, slot.placement.frozen), []).append(slot)
    told = {unit.name: unit for unit in unit_of.values()}
    units, start = [], 0
    for part, frozen in sorted(members, key=lambda key: (key[1], told[key[0]].axes != DATA_PARALLEL)):
        slots, axes = members[part, frozen], told[part].axes
        slots.sort(key=lambda slot: not slot.placement.decay)  # stable: decayed first
        at, decay = 0, 0
        for slot in slots:
            slot.start, slot.stop = at, at + slot.parameter.numel()
            at += aligned(slot.parameter.numel())
            decay = at if slot.placement.decay else decay
        size = unit_size((slot.parameter.numel() for slot in slots), axis_of(axes[1]).size)
        name = f"{part} (frozen)" if frozen else part
        units.append(FlatUnit(name, part, slots, start, size, decay, told[part].layer, axes, frozen))
        start += size
    return units


class UnitName(NamedTuple):
    """A unit's name, whether it is a layer, and its axes."""

    name: str
    layer: bool
    axes: tuple[str, str] = DATA_PARALLEL


def units_of(chunk: torch.nn.Module) -> dict[str, UnitName]:
    """Parameter or buffer -> unit. As the chunk's own `units` say; otherwise each child of its `blocks` is a layer, and so
    is no other part.
    """
    names = [name for name, _ in chunk.named_parameters(remove_duplicate=False)]
    names += placed_buffers(chunk)
    if hasattr(chunk, "units"):
        told = sorted(chunk.units, key=lambda unit: -len(unit.name))  # embedding.word before embedding
        return {
            name: next(
                UnitName(unit.name, unit.layer is not None, unit.axes)
                for unit in told
                if name.startswith(f"{unit.name}.")
            )
            for name in names
        }
    parts = {name: name.split(".") for name in names}
    return {
        name: UnitName(".".join(part[:2]), True) if part[0] == LAYERS else UnitName(part[0], False)
        for name, part in parts.items()
    }


def _slots(chunks: list[torch.nn.Module]) -> Iterable[Slot]:
    found: dict[int, Slot] = {}
    for number, chunk in enumerate(chunks):
        modules = dict(chunk.named_modules())
        for name, (parameter, placement) in placements(chunk).items():
            slot = found.setdefault(id(parameter), Slot(name, parameter, placement))
            slot.values = parameter.detach() if isinstance(slot.placement.init, Own) else None
            owner, _, attribute = name.rpartition(".")
            slot.owners.append((modules[owner], attribute))
            slot.chunks.append(number)
    assert len({slot.name for slot in found.values()}) == len(found), "two parameters of one name"
    return found.values()


@torch.no_grad()
def materialise(unit: FlatUnit, flat: torch.Tensor) -> None:
    """Make every parameter of a unit (on the meta device, say) a view into the unit's memory `flat`.

    Writing to `flat` later is not a change that autograd sees: the graph may hold a parameter whose memory is given
    away and filled again before it is read.
    """
    hidden = flat.data
    for slot in unit.slots:
        view = hidden[slot.start : slot.stop].view(slot.parameter.shape)
        slot.parameter = torch.nn.Parameter(view, requires_grad=not unit.frozen)
        for module, attribute in slot.owners:
            setattr(module, attribute, slot.parameter)


@torch.no_grad()
def initialise(unit: FlatUnit, flat: torch.Tensor, place: dict[str, int], seed: int) -> None:
    """Initial values of every parameter of a unit, its own or from (seed, name) alone, into the unit's memory `flat`."""
    for slot in unit.slots:
        view = flat[slot.start : slot.stop].view(slot.parameter.shape)
        if isinstance(slot.placement.init, Own):
            view.copy_(slot.values)
            slot.values = None
            continue
        init_parameter(slot.name, view, slot.placement, place, seed)


def pieces_of(
    own: OwnedRange,
    part_of: Callable[[slice], Optional[torch.Tensor]],
    place: dict[str, int],
    prefix: str = "",
    unique: bool = False,
) -> list[Piece]:
    """What an owned range is of its logical tensors; names get `prefix`.

    part_of: stretch of the rank's shard -> its values; None: there are none
    unique: leave out what another rank of those that hold the same counts as its own (`Placement.owned`).
    """
    pieces = []
    for slot, where in own.slots():
        if unique and not slot.placement.owned(place):
            continue
        part = part_of(where)
        if part is None:
            continue
        local, start = tuple(slot.parameter.shape), where.start - own.at
        box = slot.placement.box(local, place)
        pieces += flat_pieces(prefix + slot.name, slot.placement.shape, box, local, part, own.low + start - slot.start)
    return pieces
