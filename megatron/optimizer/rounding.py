# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in bf16: widened to fp32 for an update, part by part, and rounded afterwards.

bf16 has 8 significant bits. A mean that moves by less than 1/512 of itself in a step does not change if it is rounded to
the nearest number: the second moment with beta2 = .999 never falls again. Stochastic rounding moves it up with the
probability of the part that is cut off, so the mean over many steps is right (arXiv:2010.06192).

    fp32 bits   s eeeeeeee mmmmmmm xxxxxxxxxxxxxxxx
    + word                         rrrrrrrrrrrrrrrr     uniform: carries into m with probability x / 65536
    bf16 bits   s eeeeeeee mmmmmmm

The word of an element is a function of seed, step, parameter and its position in the *logical* tensor. So the rounding is
the same in every layout, in memory or on disk, and on every device, and a resumed run continues exactly.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.store import flat_pieces
from megatron.mpu.random import seed_of
from megatron.optimizer.flat import WIDENED
from megatron.optimizer.units import Slot

WORD = 0xFFFF  # the bits that bf16 does not have
MASK = 0xFFFFFFFF


def parts_of(stretches: Sequence[slice], kind: str) -> Iterator[slice]:
    """Cut ranges into the parts that are widened one at a time, on a device of this kind."""
    size = WIDENED["cpu" if kind == "cpu" else "cuda"]
    for stretch in stretches:
        for start in range(stretch.start, stretch.stop, size):
            yield slice(start, min(start + size, stretch.stop))


class Noise:
    """The random words of a step.

    The word of element [..., r, c] of a parameter is rows[r] + columns[c] + key, modulo 2^16: three independent uniform
    numbers, each drawn once a step, r counting the rows of all leading dims. Any two elements of a model have independent
    words. So every sum of rounding errors has the variance of independent errors, at the cost of an addition per element.
    Both moments of an element take the same word, which changes its update by some 1e-6 of itself.

    place: this rank's index on each axis of the mesh
    """

    def __init__(self, seed: int, step: int, place: dict[str, int]):
        self.position, self.place = (seed, step), place
        self.tables: dict[tuple[str, torch.device], torch.Tensor] = {}

    def fill(self, words: torch.Tensor, slot: Slot, first: int) -> None:
        """Fill flat int32 `words` for the elements of a parameter's local tensor from `first` on, except padding."""
        local, shape = tuple(slot.parameter.shape), slot.placement.shape
        box, key = slot.placement.box(local, self.place), seed_of(*self.position, slot.name) & WORD
        if not shape:  # a scalar is a vector of one element
            local, shape, box = (1,), (1,), Box.whole((1,))
        for piece in flat_pieces(slot.name, shape, box, local, words, first):
            torch.add(
                self.rows(shape, piece.box, words.device) + key,
                self.columns(shape, piece.box, words.device),
                out=piece.tensor,
            )
        words.bitwise_and_(WORD)

    def columns(self, shape: Sequence[int], box: Box, device: torch.device) -> torch.Tensor:
        """Numbers of the columns of a box in a logical tensor."""
        return self._table("columns", shape[-1], device)[box.offset[-1] : box.offset[-1] + box.extent[-1]]

    def rows(self, shape: Sequence[int], box: Box, device: torch.device) -> torch.Tensor:
        """Numbers of its rows, [*box.extent[:-1], 1]."""
        table = self._table("rows", math.prod(shape[:-1]), device)
        if len(shape) == 1:
            return table[:1]  # the host would wait for table[number]
        if len(shape) == 2:
            return table[box.offset[0] : box.offset[0] + box.extent[0]].unsqueeze(-1)
        number = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (size, first, count) in enumerate(zip(shape[:-1], box.offset, box.extent)):
            place = torch.arange(first, first + count, device=device)
            number = number * size + place.view(-1, *[1] * (len(shape) - 2 - dim))
        return table[number].unsqueeze(-1)

    def _table(self, what: str, size: int, device: torch.device) -> torch.Tensor:
        """Uniform int32 numbers below 2^16, at least `size` of them. The first numbers do not depend on `size`."""
        table = self.tables.get((what, device))
        if table is None or len(table) < size:
            numbers = torch.arange(1 << (size - 1).bit_length(), device=device)
            self.tables[what, device] = table = mixed(numbers, seed_of(*self.position, what) & MASK)
        return table


def mixed(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """A hash of int64 numbers below 2^32 to 16 bits, the same on every device (lowbias32, by C. Wellons)."""
    x = (numbers + key) & MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ x >> shift) * factor) & MASK
    return ((x ^ x >> 16) & WORD).to(torch.int32)


class Widened:
    """Memory for a part of each bf16 tensor in fp32, and for its random words. It is allocated once for all parts."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory: dict[tuple, torch.Tensor] = {}

    def _memory(self, what: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        held = self.memory.get((what, dtype))
        if held is None or len(held) < size:
            held = self.memory[what, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return held[:size]

    def of(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in fp32: itself, or a copy in the memory for `what`."""
        if tensor.dtype == torch.float32:
            return tensor
        return self._memory(what, len(tensor), torch.float32).copy_(tensor)

    def store(
        self, states: Sequence[torch.Tensor], values: Sequence[torch.Tensor], fill: Callable[[torch.Tensor], bool]
    ) -> None:
        """Round fp32 values into the states that are bf16. The values are overwritten.

        fill: fills the elements' int32 words; returns False to round to the nearest number
        """
        narrow = [pair for pair in zip(states, values, strict=True) if pair[0].dtype != torch.float32]
        words = self._memory("words", len(states[0]), torch.int32) if narrow else None
        random = bool(narrow) and fill(words)
        for state, wide in narrow:
            if random:
                wide.view(torch.int32).add_(words).bitwise_and_(~WORD)  # what remains is exact in bf16
            state.copy_(wide)


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Norms of flat tensors, or of their parts, computed in fp32."""
    if tensors[0].dtype == torch.float32 or tensors[0].device.type != "cpu":
        return torch._foreach_norm(tensors, dtype=torch.float32)
    wide = Widened(tensors[0].device)  # torch adds bf16 numbers one by one on a CPU
    parts = (tensor[part] for tensor in tensors for part in parts_of([slice(0, len(tensor))], "cpu"))
    return [wide.of("part", part).norm() for part in parts]
