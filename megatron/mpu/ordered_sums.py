# SPDX-License-Identifier: Apache-2.0
"""Sums that have the same bits in every layout (--batch-invariant-mode).

A layout decides where a sum is cut: into micro-batches, and over ranks. Floating-point numbers then are added in another
order, and rounded otherwise. Here the order is part of the definition:

    a sum over samples   a binary tree over the samples of the global batch, in their order       `Tree`, `SumOverRanks`
    a sum of scalars     of parts rounded to a common unit, so that no addition rounds            `exact_parts`

A step's samples 0..7 on two data parallel ranks: rank r has samples 2j + r, one a pass. Ranks are the lowest level.

    0 1  2 3  4 5  6 7     pass j of both ranks: `SumOverRanks`
    +++  +++  +++  +++
      +++++    +++++       passes of a rank, as they come: `Tree`
        +++++++++

One rank alone has the same tree, all of it in `Tree`. So the number of data parallel ranks is a power of two.
"""

import torch

from megatron.mpu import collectives
from megatron.mpu.mesh import Axis

LARGEST_CUT = 8  # parts of a dim of a weight that no layout cuts further


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


def tree_sum(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dim, by the tree of `Tree`; overwrites `parts`."""
    while len(parts) > 1:
        odd = parts[len(parts) & ~1 :]
        pairs = parts[: len(parts) & ~1]
        parts = pairs[0::2].add_(pairs[1::2])
        parts = torch.cat([parts, odd]) if len(odd) else parts
    return parts[0]


class SumOverRanks:
    """A running sum of flat x [n] over the ranks of two axes, by the tree over ranks, `inner` the lower levels.

    `wait()` returns this rank's piece along `inner`, [n / inner.size]. x must not change before.
    """

    def __init__(self, x: torch.Tensor, inner: Axis, outer: Axis):
        self.inner, self.outer, self.exchange = inner, outer, _Exchange(x, inner if inner.size > 1 else outer)

    def wait(self) -> torch.Tensor:
        piece = self.exchange.wait()
        if self.inner.size == 1:
            return self.exchange.whole(piece)
        exchange = _Exchange(piece, self.outer)
        return exchange.whole(exchange.wait())


class _Exchange:
    """Ranks exchange parts of x [n], and each sums its own; over an axis of size 1 nothing happens."""

    def __init__(self, x: torch.Tensor, axis: Axis):
        self.axis, self.size = axis, len(x)
        if axis.size == 1:
            self.sent = self.arrived = x
            self.work = collectives.Done()
            return
        each = -(-len(x) // axis.size)
        self.sent = torch.cat([x, x.new_zeros(each * axis.size - len(x))]) if len(x) % axis.size else x
        self.arrived = torch.empty_like(self.sent)
        self.work = collectives.start_all_to_all(self.arrived, self.sent, axis)

    def wait(self) -> torch.Tensor:
        """This rank's part of the sum."""
        self.work.wait()
        self.sent = None
        return tree_sum(self.arrived.view(self.axis.size, -1)) if self.axis.size > 1 else self.arrived

    def whole(self, piece: torch.Tensor) -> torch.Tensor:
        """The whole sum, from each rank's part."""
        return collectives.all_gather(piece, self.axis)[: self.size]


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
