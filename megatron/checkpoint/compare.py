# SPDX-License-Identifier: Apache-2.0
"""Comparison of two checkpoints tensor by tensor, in bounded memory. Their layouts may differ."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron.checkpoint.reader import PART, Reader
from megatron.checkpoint.store import as_bytes


@dataclass
class TensorDifference:
    """A difference in one tensor, described by `what`. Same shapes: number of different elements, largest difference."""

    name: str
    what: str
    elements: int = 0
    largest: float = math.inf

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def differences(
    a: Reader, b: Reader, names: Iterable[str] | None = None, part: int = PART, tolerance: float = 0.0
) -> Iterator[TensorDifference]:
    """Yield the differences between two checkpoints, in the order of `names` (default: all of both).

    Elements are equal if their bits are (so -0.0 is not 0.0, and a NaN equals itself), or if they are within `tolerance`
    of each other. Takes memory for `part` bytes of each checkpoint, and as much again to compare.
    """
    for name in sorted(set(a.tensors) | set(b.tensors)) if names is None else names:
        if name not in a.tensors or name not in b.tensors:
            yield TensorDifference(name, f"only in {(a if name in a.tensors else b).folder}")
            continue
        one, two = a.tensors[name], b.tensors[name]
        if one.shape != two.shape:
            yield TensorDifference(name, f"{one.shape} and {two.shape}")
        elif one.dtype != two.dtype:
            yield TensorDifference(name, f"{one.dtype} and {two.dtype}")
        else:
            yield from _values(name, a, b, part, tolerance)


def _values(name: str, a: Reader, b: Reader, part: int, tolerance: float) -> Iterator[TensorDifference]:
    count, largest, not_numbers = 0, 0.0, 0
    for one, two in zip(a.parts(name, size=part), b.parts(name, size=part)):
        if torch.equal(as_bytes(one), as_bytes(two)):
            continue
        differ = (as_bytes(one) != as_bytes(two)).view(-1, one.element_size()).any(1)
        gaps = (one[differ].double() - two[differ].double()).abs()
        gaps = gaps[(gaps > tolerance) | gaps.isnan()] if tolerance else gaps
        numbers = gaps[~gaps.isnan()]
        count, not_numbers = count + len(gaps), not_numbers + len(gaps) - len(numbers)
        largest = max(largest, numbers.max().item() if len(numbers) else 0.0)
    if count:
        total = math.prod(a.tensors[name].shape)
        strange = f", {not_numbers} of them not numbers" if not_numbers else ""
        what = f"{count:,} of {total:,} elements differ, by at most {largest:.3g}{strange}"
        yield TensorDifference(name, what, count, math.nan if not_numbers else largest)
