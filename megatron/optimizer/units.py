# SPDX-License-Identifier: Apache-2.0
"""Parameters in flat memory, which ZeRO shards, reduces and gathers.

A *unit* is a layer or another part of the model, as listed in the model's `units` (`model.weights.Unit`); the experts of a
layer, which other ranks share, are a unit of their own. Its parameters lie end to end in one flat range. Those with weight
decay come first, each parameter is aligned, and the range is padded to a multiple of the ranks that shard it. All units of
a rank lie end to end too: one buffer holds all weights, another all gradients, and a unit or a shard is a slice.

    unit      | qkv.weight | up.weight | ...   | norm.weight | qkv.bias | pad |
              |<------------ decay ----------->|<------- no decay ------------>|
    shard 0/2 |<--------------------->|
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional, Union

import torch

from megatron.checkpoint.store import Piece, flat_pieces
from megatron.fused_kernels.fp8 import E4M3
from megatron.mpu.linear_product import LinearProduct
from megatron.mpu.mesh import Axis
from megatron.mpu.placement import DATA_PARALLEL, Own, Placement, placed_buffers, placements
from megatron.mpu.random import init_rows
from megatron.optimizer.flat import ALIGN, aligned, unit_size
from megatron.settings.groups.kernels import BLOCKS

LAYERS = "blocks"  # the attribute with the layers of a module that does not list its units

AxisOf = Callable[[str], Axis]
Chunks = Union[torch.nn.Module, Sequence[torch.nn.Module]]  # the model chunks of a rank, or its only one


@dataclass
class Slot:
    """One parameter's range [start, stop) inside its unit, and the (module, attribute) pairs that hold it."""

    name: str
    parameter: torch.nn.Parameter
    placement: Placement
    start: int = 0
    stop: int = 0
    owners: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)  # the model chunks that use it; each computes a gradient
    values: Optional[torch.Tensor] = None  # initial values of a parameter that brings its own, until they are copied

    @property
    def block(self) -> int:
        """A number of neighbouring elements, at most `ALIGN`, that no layout divides among ranks."""
        shape, cut = self.placement.shape, {dim for dim, _ in self.placement.cut_dims}
        width = shape[-1] if shape else 1
        if len(shape) - 1 in cut:
            width = width // BLOCKS if width % BLOCKS == 0 else 1
        return math.gcd(width, ALIGN)

    @property
    def reader(self) -> Optional[LinearProduct]:
        """The product that reads this weight as fp8 numbers (`LinearProduct.gathered_as`)."""
        module, attribute = self.owners[0]
        product = getattr(module, "product", None) if attribute == "weight" else None
        return product if product is not None and product.gathered_as and not self.placement.frozen else None


@dataclass
class FlatUnit:
    """A unit's range [start, start + size) in the rank's buffers. The first `decay` elements have weight decay.

    part: the prefix of its parameters' names; a part becomes a unit for each of its kinds of parameters: dense ones and
          experts, exact, cast and others, trained and frozen
    """

    name: str
    part: str
    slots: list[Slot]
    start: int
    size: int
    decay: int
    layer: bool  # used in one place; other units are used throughout their chunk
    axes: tuple[str, str] = DATA_PARALLEL  # mesh axes: the first replicates the unit, the second shards it
    frozen: bool = False  # it has weights but neither gradients nor state
    exact: bool = False  # its weights are fp32 in any run
    cast: bool = False  # its weights are kept and gathered in fp8 (`cast_weights.py`)

    def dtype(self, others: torch.dtype) -> torch.dtype:
        """The number format in which its weights are kept, in a model with this format."""
        return torch.float32 if self.exact else E4M3 if self.cast else others

    @property
    def buffer_slice(self) -> slice:
        """The unit's range in a buffer of all units."""
        return slice(self.start, self.start + self.size)

    @property
    def chunks(self) -> set[int]:
        """The model chunks that use the unit."""
        return {chunk for slot in self.slots for chunk in slot.chunks}

    @property
    def replicate(self) -> str:
        """The mesh axis along which ranks hold the same shards of the unit."""
        return self.axes[0]

    @property
    def sharded(self) -> str:
        """The mesh axis that shards the unit."""
        return self.axes[1]

    def shard(self, rank: int, pieces: int) -> tuple[int, int]:
        """The range [low, high) inside the unit that belongs to `rank` of `pieces`."""
        return self.size // pieces * rank, self.size // pieces * (rank + 1)


class OwnedRange(NamedTuple):
    """The range [low, high) of a unit that this rank owns. In the rank's shard it starts at `at`."""

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
        """The range's position in the rank's shard of all units."""
        return slice(self.at, self.at + self.high - self.low)

    def part(self, flat: torch.Tensor) -> Callable[[slice], torch.Tensor]:
        """A function from ranges of the rank's shard to their values, in memory `flat` of this range alone."""
        return lambda where: flat[where.start - self.at : where.stop - self.at]

    def slots(self) -> Iterable[tuple[Slot, slice]]:
        """The parameters that this rank owns at least in part, each with its range in the rank's shard."""
        for slot in self.unit.slots:
            start, stop = max(self.low, slot.start), min(self.high, slot.stop)
            if start < stop:
                yield slot, slice(self.at + start - self.low, self.at + stop - self.low)


def owned_ranges(units: Sequence[FlatUnit], axis_of: AxisOf) -> list[OwnedRange]:
    """The range of each unit that this rank owns, laid end to end. axis_of: axis name -> the axis on this rank."""
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
    """The units of a rank's model chunks, each padded to a multiple of the ranks that shard it. Allocates nothing.

    Units are in registration order. Units of experts follow, and frozen units are last; of each of these, exact ones are
    the last, after cast ones. A parameter that several chunks share is one slot.
    """
    members: dict[tuple[UnitName, tuple[str, str], bool, bool, bool], list[Slot]] = {}
    unit_of = {name: unit for chunk in as_chunks(model) for name, unit in units_of(chunk).items()}
    for slot in _slots(as_chunks(model)):
        placed = slot.placement
        key = unit_of[slot.name], placed.data_axes, placed.frozen, placed.exact, slot.reader is not None
        members.setdefault(key, []).append(slot)
    units, start = [], 0
    for key in sorted(members, key=lambda key: (key[2], key[1] != DATA_PARALLEL, *key[3:])):
        (part, layer), axes, frozen, exact, cast = key
        slots = members[key]
        slots.sort(key=lambda slot: not slot.placement.decay)  # stable: decayed first
        at, decay = 0, 0
        for slot in slots:
            slot.start, slot.stop = at, at + slot.parameter.numel()
            at += aligned(slot.parameter.numel())
            decay = at if slot.placement.decay else decay
        size = unit_size((slot.parameter.numel() for slot in slots), axis_of(axes[1]).size)
        kinds = ["experts"] * (axes != DATA_PARALLEL) + ["frozen"] * frozen + ["exact"] * exact + ["fp8"] * cast
        name = f"{part} ({', '.join(kinds)})" if kinds else part
        units.append(FlatUnit(name, part, slots, start, size, decay, layer, axes, frozen, exact, cast))
        start += size
    return units


class UnitName(NamedTuple):
    """A unit's name, and whether it is a layer."""

    name: str
    layer: bool


def units_of(chunk: torch.nn.Module) -> dict[str, UnitName]:
    """Parameter or buffer -> its unit, from the chunk's `units`. Without these, the children of `blocks` are the layers."""
    names = [name for name, _ in chunk.named_parameters(remove_duplicate=False)]
    names += placed_buffers(chunk)
    if hasattr(chunk, "units"):
        units = sorted(chunk.units, key=lambda unit: -len(unit.name))  # embedding.word before embedding
        return {
            name: next(
                UnitName(unit.name, unit.layer is not None) for unit in units if name.startswith(f"{unit.name}.")
            )
            for name in names
        }
    parts = {name: name.split(".") for name in names}
    return {
        name: UnitName(".".join(part[:2]), True) if part[0] == LAYERS else UnitName(part[0], False)
        for name, part in parts.items()
    }


def _slots(chunks: list[torch.nn.Module]) -> Iterable[Slot]:
    slots: dict[int, Slot] = {}
    for number, chunk in enumerate(chunks):
        modules = dict(chunk.named_modules())
        for name, (parameter, placement) in placements(chunk).items():
            slot = slots.setdefault(id(parameter), Slot(name, parameter, placement))
            slot.values = parameter.detach() if isinstance(slot.placement.init, Own) else None
            owner, _, attribute = name.rpartition(".")
            slot.owners.append((modules[owner], attribute))
            slot.chunks.append(number)
    assert len({slot.name for slot in slots.values()}) == len(slots), "two parameters of one name"
    return slots.values()


def flat_memory(
    sizes: Iterable[tuple[FlatUnit, int]], *, dtype: torch.dtype, device
) -> tuple[dict[torch.dtype, torch.Tensor], dict[str, torch.Tensor]]:
    """Memory for weights of units: (a buffer of 0 for each number format, a unit's name -> its part of one, in order).

    sizes: units, and how many elements of each; dtype: the model's number format, which exact units do not follow
    """
    formats: dict[torch.dtype, list[tuple[str, int]]] = {dtype: []}
    for unit, size in sizes:
        formats.setdefault(unit.dtype(dtype), []).append((unit.name, size))
    buffers, parts = {}, {}
    for own, held in formats.items():
        names, lengths = zip(*held) if held else ((), ())
        buffers[own] = torch.zeros(sum(lengths), dtype=own, device=device)
        parts.update(zip(names, buffers[own].split(list(lengths))))
    return buffers, parts


@torch.no_grad()
def materialise(unit: FlatUnit, flat: torch.Tensor) -> None:
    """Make every parameter of a unit (for example on the meta device) a view into the unit's memory `flat`.

    Autograd does not notice later writes to `flat`: the graph may hold a parameter whose memory is freed and filled again
    before it is read.
    """
    hidden = flat.data
    for slot in unit.slots:
        view = hidden[slot.start : slot.stop].view(slot.parameter.shape)
        slot.parameter = torch.nn.Parameter(view, requires_grad=not unit.frozen)
        for module, attribute in slot.owners:
            setattr(module, attribute, slot.parameter)


@torch.no_grad()
def initialise(
    own: OwnedRange, flat: torch.Tensor, place: dict[str, int], seed: int, axis_of: Optional[AxisOf] = None
) -> None:
    """Write the initial values of a range of a unit into `flat`: its parameters' own, or drawn from (seed, name) alone.

    axis_of: name -> mesh axis, whose ranks call this together, and divide what they would all draw (`mpu.random.init_rows`)
    """
    for slot, where in own.slots():
        start = own.low + where.start - own.at - slot.start  # in the parameter
        part = flat[where.start - own.at : where.stop - own.at]
        if isinstance(slot.placement.init, Own):
            part.copy_(slot.values.flatten()[start : start + len(part)])
            continue
        shape = tuple(slot.parameter.shape)
        width = math.prod(shape[1:])
        first, last = start // width, -(-(start + len(part)) // width)
        skipped = start - first * width
        if (last - first) * width == len(part):
            init_rows(
                slot.name, part.view(shape and (-1, *shape[1:])), first, shape, slot.placement, place, seed, axis_of
            )
        else:  # the range begins or ends inside a row
            rows = part.new_empty((last - first, *shape[1:]))
            init_rows(slot.name, rows, first, shape, slot.placement, place, seed, axis_of)
            part.copy_(rows.flatten()[skipped : skipped + len(part)])
    for slot in own.unit.slots:
        slot.values = None


def pieces_of(
    own: OwnedRange,
    part_of: Callable[[slice], Optional[torch.Tensor]],
    place: dict[str, int],
    prefix: str = "",
    unique: bool = False,
) -> list[Piece]:
    """The pieces of logical tensors in an owned range. `prefix` is put in front of their names.

    part_of: range of the rank's shard -> its values, or None if it has none
    unique:  leave out elements for which another rank is the primary one (`Placement.is_primary`)
    """
    pieces = []
    for slot, where in own.slots():
        if unique and not slot.placement.is_primary(place):
            continue
        part = part_of(where)
        if part is None:
            continue
        local, start = tuple(slot.parameter.shape), where.start - own.at
        box = slot.placement.box(local, place)
        pieces += flat_pieces(prefix + slot.name, slot.placement.shape, box, local, part, own.low + start - slot.start)
    return pieces
