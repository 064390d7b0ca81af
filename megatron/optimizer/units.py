# SPDX-License-Identifier: Apache-2.0
"""Parameters laid end to end: the memory that ZeRO cuts, reduces and gathers.

A *unit* is a layer (`blocks.17`) or another top-level part of the model (`embedding`, `final_norm`). The parameters
of a unit lie end to end in one flat range, those with weight decay first, each aligned, the whole padded to the number of
ranks that shard it. All units of a rank lie end to end in turn, so that one buffer holds all weights, another all
gradients, and a unit or a shard is a slice.

    unit      | qkv.weight | up.weight | ...   | norm.weight | qkv.bias | pad |
              |<------------ decay ----------->|<------- no decay ------------>|
    shard 0/2 |<--------------------->|
"""

from dataclasses import dataclass

import torch

from megatron.checkpoint.store import Piece, flat_pieces
from megatron.mpu.placement import Placement, placements
from megatron.mpu.random import init_parameter

ALIGN = 64  # elements: 128 bytes in bf16, what vector units and tensor cores like


@dataclass
class Slot:
    """One parameter's range [start, stop) inside its unit."""

    name: str
    parameter: torch.nn.Parameter
    placement: Placement
    start: int
    stop: int


@dataclass
class Unit:
    """A layer's parameters as the range [start, start + size) of the rank's buffers; `decay` of them are decayed."""

    name: str
    slots: list[Slot]
    start: int
    size: int
    decay: int

    def shard(self, rank: int, pieces: int) -> tuple[int, int]:
        """[low, high) inside the unit that belongs to `rank` of `pieces`."""
        return self.size // pieces * rank, self.size // pieces * (rank + 1)


def lay_out(model: torch.nn.Module, pieces: int) -> list[Unit]:
    """Units of a model in registration order, each padded to a multiple of `pieces`. Allocates nothing."""
    members: dict[str, list] = {}
    for name, (parameter, placement) in placements(model).items():
        parts = name.split(".")
        unit = ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
        members.setdefault(unit, []).append((name, parameter, placement))
    units, start = [], 0
    for unit, found in members.items():
        found.sort(key=lambda entry: not entry[2].decay)  # stable: decayed first
        slots, at, decay = [], 0, 0
        for name, parameter, placement in found:
            slots.append(Slot(name, parameter, placement, at, at + parameter.numel()))
            at += -(-parameter.numel() // ALIGN) * ALIGN
            decay = at if placement.decay else decay
        size = -(-at // (ALIGN * pieces)) * ALIGN * pieces
        units.append(Unit(unit, slots, start, size, decay))
        start += size
    return units


@torch.no_grad()
def materialise(model: torch.nn.Module, units: list[Unit], weights: torch.Tensor) -> None:
    """Make every parameter of a model (on the meta device, say) a view into the flat buffer `weights`."""
    owners = dict(model.named_modules())
    for unit in units:
        for slot in unit.slots:
            view = weights[unit.start + slot.start : unit.start + slot.stop].view(slot.parameter.shape)
            slot.parameter = torch.nn.Parameter(view)
            owner, _, name = slot.name.rpartition(".")
            setattr(owners[owner], name, slot.parameter)


@torch.no_grad()
def initialise(units: list[Unit], weights: torch.Tensor, place: dict[str, int], seed: int) -> None:
    """Initial values of every parameter, from (seed, name) alone, into a flat buffer of all units."""
    for unit in units:
        for slot in unit.slots:
            view = weights[unit.start + slot.start : unit.start + slot.stop].view(slot.parameter.shape)
            init_parameter(slot.name, view, slot.placement, place, seed)


def pieces_of(
    unit: Unit, low: int, high: int, flat: torch.Tensor, place: dict[str, int], prefix: str = ""
) -> list[Piece]:
    """What the range [low, high) of a unit, held in `flat`, is of its logical tensors; names get `prefix`."""
    pieces = []
    for slot in unit.slots:
        start, stop = max(low, slot.start), min(high, slot.stop)
        if start < stop:
            local = tuple(slot.parameter.shape)
            box, own = slot.placement.box(local, place), flat[start - low : stop - low]
            pieces += flat_pieces(prefix + slot.name, slot.placement.shape, box, local, own, start - slot.start)
    return pieces
