# SPDX-License-Identifier: Apache-2.0
"""How a kernel is laid out over a device: rows of a program, threads, programs."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

ELEMENTS = 4096  # of a program's piece where rows are short
EACH = 16  # elements of a piece that a thread has


class Piece(NamedTuple):
    """What a program works on at a time: `tile` rows, `block` columns (powers of 2), by `warps` of 32 threads."""

    tile: int
    block: int
    warps: int

    @classmethod
    def of(cls, width: int, widest: int, elements: int = ELEMENTS) -> "Piece":
        """Of rows of `width`, at most `widest` columns at a time.

        >>> Piece.of(768, 8192), Piece.of(12288, 8192), Piece.of(64, 8192)
        (Piece(tile=4, block=1024, warps=8), Piece(tile=1, block=4096, warps=8), Piece(tile=64, block=64, warps=8))
        """
        block = triton.next_power_of_2(width)
        if block > widest:
            block = widest // 2  # sizes such as 12288 are multiples of it
        tile = max(1, min(64, elements // block))
        return cls(tile, block, max(1, min(16, tile * block // (32 * EACH))))


@lru_cache
def programs(device: torch.device) -> int:
    """Programs that a device has work for, of kernels whose programs go through many rows."""
    if device.type != "cuda":
        return 4  # in Triton's interpreter: few, so that each has several rows
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
