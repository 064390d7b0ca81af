# SPDX-License-Identifier: Apache-2.0
"""Weights that ranks keep and gather as fp8 numbers (--fp8-param-gather), a byte each, and their scales.

They are the numbers of a cast of the whole weight in the model's format, which no rank has. Tiles that share a scale cross
the borders of shards. So after each update, every rank computes the largest values of its parts of tiles, one message has
those of all weights, and each casts its shard as it sends it:

    main weights, fp32 -> bf16 -> largest values -> all-reduce (max) -> scales on all ranks -> fp8 -> all-gather
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron.fused_kernels.fp8 import E4M3, ScaleTile, amax_of_part, cast_part, scale_of
from megatron.mpu import collectives
from megatron.mpu.mesh import Mesh
from megatron.optimizer.units import FlatUnit, OwnedRange, Slot


class Matrix(NamedTuple):
    """A weight: the width of its rows, and the scales of its tiles, `grid` of them from `start` on."""

    width: int
    tile: ScaleTile
    start: int
    grid: tuple[int, int]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its tiles' numbers, of those of all weights."""
        return flat[self.start : self.start + math.prod(self.grid)].view(self.grid)


class CastWeights:
    """The scales of a rank's cast units, and their casts.

    owned: the ranges that this rank owns, of cast units
    scales: of all their tiles, fp32. `update` changes them in place
    """

    def __init__(self, owned: Sequence[OwnedRange], mesh: Mesh, device: torch.device):
        self.owned, self.mesh = {own.unit.name: own for own in owned}, mesh
        self.matrices: dict[str, Matrix] = {}
        # Weights with one scale come first: ranks of tp have parts of them.
        slots = [slot for own in owned for slot in own.unit.slots]
        at = self.undivided = 0
        for slot in sorted(slots, key=lambda slot: bool(slot.reader.gathered_as.columns)):
            self.matrices[slot.name] = matrix = _matrix(slot, at)
            at += math.prod(matrix.grid)
            self.undivided = self.undivided if matrix.tile.columns else at
        self.scales = torch.ones(at, dtype=torch.float32, device=device)

    def hold(self, unit: FlatUnit, flat: torch.Tensor) -> None:
        """Give products the memory of their weights' numbers: `flat`, of the whole unit."""
        for slot in unit.slots:
            matrix = self.matrices[slot.name]
            slot.reader.hold(flat[slot.start : slot.stop].view(-1, matrix.width), matrix.of(self.scales))

    @torch.no_grad()
    def update(self, piece_of: Callable[[FlatUnit], torch.Tensor]) -> None:
        """Compute the scales of weights that have changed. All ranks call it.

        piece_of: unit -> this rank's shard of it in the model's format
        """
        amax = torch.zeros_like(self.scales)
        for own in self.owned.values():
            piece = piece_of(own.unit)
            for slot, part, first in _parts(own, piece):
                matrix = self.matrices[slot.name]
                amax_of_part(part, first, matrix.width, matrix.tile, matrix.of(amax))
        collectives.all_reduce_amax(amax, self.mesh.shard)
        if self.undivided:
            collectives.all_reduce_amax(amax[: self.undivided], self.mesh.tp)
        self.scales.copy_(scale_of(amax, E4M3))

    @torch.no_grad()
    def cast(self, unit: FlatUnit, piece: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a unit in fp8, from the same in the model's format."""
        found = torch.zeros_like(piece, dtype=E4M3)
        own = self.owned[unit.name]
        for slot, part, first in _parts(own, piece):
            matrix, start = self.matrices[slot.name], slot.start + first - own.low
            cast = cast_part(part, first, matrix.width, matrix.tile, matrix.of(self.scales))
            found[start : start + len(part)] = cast
        return found


def _matrix(slot: Slot, start: int) -> Matrix:
    width, tile = slot.parameter.shape[-1], slot.reader.gathered_as
    rows = slot.parameter.numel() // width
    grid = (rows // tile.rows, width // tile.columns) if tile.columns else (1, 1)
    return Matrix(width, tile, start, grid)


def _parts(own: OwnedRange, piece: torch.Tensor):
    """(weight, this rank's elements of it, the first of them in it) of each weight in a shard."""
    for slot, where in own.slots():
        start, stop = where.start - own.at, where.stop - own.at
        yield slot, piece[start:stop], own.low + start - slot.start
