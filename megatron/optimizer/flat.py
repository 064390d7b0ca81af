# SPDX-License-Identifier: Apache-2.0
"""The layout of parameters in flat memory, shared by the optimizer and the planner. Needs no torch."""

from collections.abc import Iterable

# Elements of bf16 state and gradients that an update widens to fp32 at a time: parts that stay in a cache, by device
WIDENED = dict(cpu=1 << 19, cuda=1 << 22)
ALIGN = 64  # elements: 128 bytes in bf16, which suits vector units and tensor cores


def aligned(size: int) -> int:
    """Elements that a parameter of this size takes, with its padding.

    >>> aligned(65)
    128
    """
    return -(-size // ALIGN) * ALIGN


def unit_size(sizes: Iterable[int], shards: int) -> int:
    """Elements of a unit with parameters of these sizes, padded so that each of `shards` ranks has the same share."""
    return -(-sum(map(aligned, sizes)) // (ALIGN * shards)) * ALIGN * shards
