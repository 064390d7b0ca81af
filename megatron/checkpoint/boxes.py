# SPDX-License-Identifier: Apache-2.0
"""Boxes: a shard is a box of a logical tensor, and resharding is box intersection.

Boxes describe a rank's part of a tensor in any layout, in the coordinates of the whole tensor. A tensor-parallel piece is
one box, a ZeRO range of a flattened buffer is a few (`flat_to_boxes`). `Box.intersection` is all that is needed to load a
saved layout into another one.

    >>> saved, wanted = Box((0, 4), (6, 4)), Box((3, 0), (3, 8))
    >>> saved.intersection(wanted)
    Box(offset=(3, 4), extent=(3, 4))

Pure arithmetic on tuples of ints: no torch, no numpy.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple, Optional


class Box(NamedTuple):
    """The elements `offset[d] <= index[d] < offset[d] + extent[d]` of a tensor. A scalar's box has no dims."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.extent)

    def intersection(self, other: "Box") -> Optional["Box"]:
        """The elements in both boxes, or None if there are none."""
        offset, extent = [], []
        for a, n, b, m in zip(self.offset, self.extent, other.offset, other.extent):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            offset.append(low)
            extent.append(high - low)
        return Box(tuple(offset), tuple(extent))

    def relative_to(self, outer: "Box") -> "Box":
        """The same elements, counted from the first element of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset)), self.extent)

    def shifted(self, by: Sequence[int]) -> "Box":
        """The box moved by one offset per dim."""
        return Box(tuple(a + b for a, b in zip(self.offset, by)), self.extent)

    def slices(self) -> tuple[slice, ...]:
        """An index expression: `tensor[box.slices()]` is a view of the box."""
        return tuple(slice(at, at + n) for at, n in zip(self.offset, self.extent))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape and has as many dims."""
        return len(self.offset) == len(self.extent) == len(shape) and all(
            at >= 0 and n >= 0 and at + n <= full for at, n, full in zip(self.offset, self.extent, shape)
        )


def flat_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes of elements [start, stop) of a row-major tensor, in order; at most 2 * dims - 1 of them.

    Each box is a contiguous run of the flattened tensor.

    >>> flat_to_boxes((3, 5), 3, 11)
    [Box(offset=(0, 3), extent=(1, 2)), Box(offset=(1, 0), extent=(1, 5)), Box(offset=(2, 0), extent=(1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = tuple(shape[1:])
    row = prod(inner)
    first, head = divmod(start, row)  # start is element `head` of row `first`
    last, tail = divmod(stop, row)
    if first == last:
        return _in_row(first, flat_to_boxes(inner, head, tail))
    boxes = []
    if head:
        boxes += _in_row(first, flat_to_boxes(inner, head, row))
        first += 1
    if first < last:
        boxes.append(Box((first, *[0] * len(inner)), (last - first, *inner)))
    return boxes + _in_row(last, flat_to_boxes(inner, 0, tail))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.extent)) for box in boxes]


def cut_evenly(sizes: Sequence[int], part: int, parts: int) -> list[tuple[int, int]]:
    """The range of each item in `part` when items, laid end to end, are divided into equal parts.

    >>> cut_evenly([6, 2, 4], 0, 2), cut_evenly([6, 2, 4], 1, 2)
    ([(0, 6), (0, 0), (0, 0)], [(6, 6), (0, 2), (0, 4)])
    """
    total = sum(sizes)
    low, high = total * part // parts, total * (part + 1) // parts
    ranges, at = [], 0
    for size in sizes:
        ranges.append((min(max(low - at, 0), size), min(max(high - at, 0), size)))
        at += size
    return ranges


def find_flaw(shape: Sequence[int], boxes: Iterable[Box]) -> Optional[str]:
    """The reason why boxes do not tile a tensor of this shape exactly once, in words; None if they do.

    Disjoint boxes inside the shape whose sizes add up to its size leave no hole. A sweep along the first dim finds
    overlaps, so only boxes that share rows are compared.
    """
    boxes = list(boxes)
    for box in boxes:
        if not box.fits(shape):
            return f"box {describe(box)} lies outside shape {tuple(shape)}"
    active: list[Box] = []
    for box in sorted(box for box in boxes if box.size):
        active = [other for other in active if not shape or other.offset[0] + other.extent[0] > box.offset[0]]
        for other in active:
            if box.intersection(other):
                return f"boxes {describe(other)} and {describe(box)} overlap"
        active.append(box)
    missing = prod(shape) - sum(box.size for box in boxes)
    return f"{missing} of {prod(shape)} elements are in no box" if missing else None


def describe(box: Box) -> str:
    """The box as an index expression: `[0:8, 4:6]`."""
    return "[" + ", ".join(f"{at}:{at + n}" for at, n in zip(box.offset, box.extent)) + "]"
