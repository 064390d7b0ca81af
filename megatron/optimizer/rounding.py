# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in bf16: widened to fp32 for an update, part by part, and rounded afterwards.

bf16 has 8 significant bits. A mean that moves by less than 1/512 of itself in a step stays where it is if it is rounded to
the nearest number: the second moment with beta2 = .999 never falls again. Stochastic rounding moves it up with the
probability of the part that is cut off, so the mean over many steps is right (arXiv:2010.06192).

    fp32 bits   s eeeeeeee mmmmmmm xxxxxxxxxxxxxxxx
    + word                         rrrrrrrrrrrrrrrr     uniform: carries into m with probability x / 65536
    bf16 bits   s eeeeeeee mmmmmmm

The word of an element is a function of seed, step, parameter and its position in the *logical* tensor. So every layout,
place of the state and device rounds alike, and a resumed run continues exactly.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.store import flat_pieces
from megatron.mpu.random import seed_of
from megatron.optimizer.flat import WIDENED
from megatron.optimizer.units import Slot

WORD = 0xFFFF  # the bits that bf16 does not have
MASK = 0xFFFFFFFF


def parts_of(stretches: Sequence[slice], kind: str) -> Iterator[slice]:
    """Cut ranges into those that are widened at a time, on a device of this kind."""
    for stretch in stretches:
        for start in range(stretch.start, stretch.stop, WIDENED[kind]):
            yield slice(start, min(start + WIDENED[kind], stretch.stop))


class Noise:
    """The random words of a step.

    The 32-bit word of element [..., r, c] of a parameter is rows[r] + columns[c] + key, modulo 2^32: three independent
    uniform numbers, each drawn once a step, r counting the rows of all leading dims. Any two elements of a model have
    independent words. So the variance of every sum of rounding errors is that of independent ones, at the cost of an
    addition per element.

    place: this rank's index on each axis of the mesh
    """

    def __init__(self, seed: int, step: int, place: dict[str, int]):
        self.position, self.place = (seed, step), place
        self.tables: dict[tuple[str, torch.device], torch.Tensor] = {}

    def fill(self, words: torch.Tensor, slot: Slot, first: int) -> None:
        """Fill flat `words` with those of the elements of a parameter's local tensor from `first` on, except padding."""
        local = tuple(slot.parameter.shape)
        box = slot.placement.box(local, self.place)
        for piece in flat_pieces(slot.name, slot.placement.shape, box, local, words, first):
            piece.tensor.copy_(self.words(piece.name, piece.shape, piece.box, words.device))

    def words(self, name: str, shape: Sequence[int], box: Box, device: torch.device) -> torch.Tensor:
        """The words of a box of a logical tensor, int32 [*box.extent]."""
        key = seed_of(*self.position, name) & MASK
        columns = self._table("columns", shape[-1], device)[box.offset[-1] : box.offset[-1] + box.extent[-1]]
        number = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (size, first, count) in enumerate(zip(shape[:-1], box.offset, box.extent)):
            place = torch.arange(first, first + count, device=device)
            number = number * size + place.view(-1, *[1] * (len(shape) - 2 - dim))
        rows = self._table("rows", math.prod(shape[:-1]), device)[number]  # [*box.extent[:-1]]
        return (rows + (key - (key > MASK >> 1) * (MASK + 1))).unsqueeze(-1) + columns

    def _table(self, what: str, size: int, device: torch.device) -> torch.Tensor:
        """Uniform int32 numbers, at least `size` of them. The first ones do not depend on how many there are."""
        table = self.tables.get((what, device))
        if table is None or len(table) < size:
            table = mixed(torch.arange(1 << (size - 1).bit_length(), device=device), seed_of(*self.position, what) & MASK)
            self.tables[what, device] = table
        return table


def mixed(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """A hash of int64 numbers below 2^32 to int32, the same on every device (lowbias32, by C. Wellons)."""
    x = (numbers + key) & MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ x >> shift) * factor) & MASK
    x = x ^ x >> 16
    return (x - (x > MASK >> 1) * (MASK + 1)).to(torch.int32)


def store(
    states: Sequence[torch.Tensor], values: Sequence[torch.Tensor], words_of: Callable[[], Optional[torch.Tensor]]
) -> None:
    """Round the values of up to two states, which are overwritten, into those that are bf16.

    words_of: returns an int32 word for each element, 16 bits of it for each state; or None: round to the nearest number
    """
    narrow = [state.dtype != torch.float32 for state in states]
    words = words_of() if any(narrow) else None
    for place in (place for place, own in enumerate(narrow) if own):
        if words is not None:
            own = (words >> 16 * (place % 2)).bitwise_and_(WORD)
            values[place].view(torch.int32).add_(own).bitwise_and_(~WORD)  # bf16 holds what is left
        states[place].copy_(values[place])
