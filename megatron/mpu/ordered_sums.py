# SPDX-License-Identifier: Apache-2.0
"""Sums that have the same bits in every layout (--batch-invariant-mode).

A layout decides where a sum is cut: into micro-batches, and over ranks. Floating-point numbers then are added in another
order, and rounded otherwise. Here the order is part of the definition:

    a sum over samples   a binary tree over the samples of the global batch, in their order       `Tree`, `tree_sum`
    a sum of scalars     of parts rounded to a common unit, so that no addition rounds            `exact_parts`

A step's samples 0..7 on two data parallel ranks: rank r has samples 2j + r, one a pass. Ranks are the lowest level.

    0 1  2 3  4 5  6 7     pass j of both ranks: `collectives`, over an axis that is `ordered`
    +++  +++  +++  +++
      +++++    +++++       passes of a rank, as they come: `Tree`
        +++++++++

One rank alone has the same tree, all of it in `Tree`. So the number of data parallel ranks is a power of two.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

NARROW = 64  # rows or columns of a block


class Tree:
    """A sum over leaves, which come in any order. Leaf i is added to leaf i ^ 1, and their sum to that of the next two.

    Leaves without a partner at the end are added from the last one on: of six, 4 and 5 to the sum of 0 to 3.

    >>> tree = Tree()
    >>> for number in (1, 0, 2):
    ...     tree.add(number, torch.tensor([10.0**number]))
    >>> sorted(tree.nodes), tree.total().item()
    ([(0, 2), (1, 0)], 111.0)
    """

    def __init__(self):
        self.nodes: dict[tuple[int, int], torch.Tensor] = {}  # (level, place on it) -> sum of 2^level leaves

    def add(self, leaf: int, x: torch.Tensor) -> None:
        """Add a leaf. Its memory becomes that of the tree."""
        level, place = 0, leaf
        while (other := self.nodes.pop((level, place ^ 1), None)) is not None:
            x, level, place = other.add_(x), level + 1, place >> 1
        self.nodes[level, place] = x

    def total(self) -> torch.Tensor:
        """The sum of all leaves. The tree is empty afterwards."""
        first, *others = (self.nodes[key] for key in sorted(self.nodes, key=lambda key: -(key[1] << key[0])))
        self.nodes = {}
        for node in others:
            first = node.add_(first)
        return first

    @property
    def nbytes(self) -> int:
        """Bytes of the sums that wait for a partner."""
        return sum(node.nbytes for node in self.nodes.values())


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of several tensors, or over the first dim of one, by the tree of `Tree`. Overwrites them."""
    while len(parts) > 1:
        pairs = len(parts) // 2 * 2
        if isinstance(parts, torch.Tensor):
            added = parts[0:pairs:2].add_(parts[1:pairs:2])
            parts = torch.cat([added, parts[pairs:]]) if len(parts) > pairs else added
        else:
            parts = [*(parts[at].add_(parts[at + 1]) for at in range(0, pairs, 2)), *parts[pairs:]]
    return parts[0]


class Blocks(NamedTuple):
    """How a dim is divided that tensor parallel ranks cut: [parts, number, ...], of which a block is one index of `number`.

    number: of blocks of this rank; parts: of the dim, each of which ranks cut, as gates and values

    >>> [block.tolist() for block in Blocks(2, parts=2).of(torch.arange(8), 0)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    number: int
    parts: int = 1

    def divide(self, size: int) -> bool:
        """Whether a dim of this size consists of equal blocks."""
        return size % (self.number * self.parts) == 0

    def narrow(self, size: int) -> bool:
        """Whether blocks of a dim are so narrow that kernels may choose their order of sums by the size of the dim."""
        return self.divide(size) and size // (self.number * self.parts) < NARROW

    def of(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """The blocks of x along dim 0 or 1, contiguous, or transposed if x is."""
        if x.dim() == 2 and x.stride(0) == 1 < x.stride(1):
            return [block.t() for block in self.of(x.t(), 1 - dim)]
        pieces = x.unflatten(dim, (self.parts, self.number, -1)).unbind(dim + 1)
        return [piece.flatten(dim, dim + 1).contiguous() for piece in pieces]

    def joined(self, blocks: list[torch.Tensor], dim: int) -> torch.Tensor:
        """The tensor of which these are the blocks."""
        pieces = [block.unflatten(dim, (self.parts, -1)) for block in blocks]
        return torch.stack(pieces, dim + 1).flatten(dim, dim + 2)

    def sum(self, multiply: Callable, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a [m, k] times b [n, k]^T, as `tree_sum` of the products of blocks of k. multiply: as `LinearProduct` has it

        Where k cannot be divided, which ranks do not do either, it is one product.
        """
        if self.number == 1 or not self.divide(a.shape[1]):
            return multiply(a.contiguous(), b, None)
        return tree_sum([multiply(*pair, None) for pair in zip(self.of(a, 1), self.of(b, 1))])

    def product(self, multiply: Callable, a: torch.Tensor, b: torch.Tensor, bias=None, dim: int = 1) -> torch.Tensor:
        """a [m, k] times b [n, k]^T, of which ranks cut n (dim 1 of the result) or m: sums of each element are whole.

        Kernels compute an element alike wherever the result is cut, but for narrow ones: these are one for each block.
        """
        if not self.narrow((len(a), len(b))[dim]):
            return multiply(a.contiguous(), b, bias)
        if dim == 0:
            return self.joined([multiply(block, b, None) for block in self.of(a.contiguous(), 0)], 0)
        biases = [None] * self.number if bias is None else self.of(bias, 0)
        a = a.contiguous()
        return self.joined([multiply(a, block, own) for block, own in zip(self.of(b, 0), biases)], 1)


# ---- sums of scalars ---------------------------------------------------------------------------------------------------

# Bits of a part: fp64 adds up 2^33 of them without rounding. Three parts reach 60 bits below the largest value.
DIGITS, PARTS = 20, 3


def exact_parts(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Three numbers for fp64 values [n], whose sums over any values, in any order and on any ranks, are exact.

    The first is the sum of the values rounded to 20 bits below the largest one, the next that of what was cut off, and so
    on. largest: fp32 scalar, at least the square root of every value of all ranks; the same on all of them
    """
    exponent = torch.frexp(largest).exponent.to(values.device) * 2
    parts = []
    for part in range(1, PARTS + 1):
        # Above 1.5 x 2^52 units, fp64 has no bits below one unit: adding and subtracting that rounds to units.
        shift = torch.ldexp(torch.tensor(1.5, dtype=torch.float64, device=values.device), exponent - part * DIGITS + 52)
        rounded = values + shift - shift
        values = values - rounded
        parts.append(rounded.sum())
    return torch.stack(parts)
