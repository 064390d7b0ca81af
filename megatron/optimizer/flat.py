# SPDX-License-Identifier: Apache-2.0
"""How parameters lie end to end in flat memory: for the optimizer, and for the planner, which counts it. Needs no torch."""

from collections.abc import Iterable

ALIGN = 64  # elements: 128 bytes in bf16, what vector units and tensor cores like


def aligned(size: int) -> int:
    """Elements that a parameter takes.

    >>> aligned(65)
    128
    """
    return -(-size // ALIGN) * ALIGN


def unit_size(sizes: Iterable[int], shards: int) -> int:
    """Elements of a unit of parameters of these sizes, which `shards` ranks divide: padded so that each has as much."""
    return -(-sum(map(aligned, sizes)) // (ALIGN * shards)) * ALIGN * shards
