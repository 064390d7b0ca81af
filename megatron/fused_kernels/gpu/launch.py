# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of kernels: the tile of a program, threads, number of programs."""

from functools import lru_cache
from typing import NamedTuple

import torch

ELEMENTS = 4096  # of a tile with short rows
EACH = 16  # elements of a tile per thread
IN_FLIGHT = 112 << 10  # bytes of shared memory for a program's loads: two programs fit on an H100


class Tile(NamedTuple):
    """The elements that a program processes at a time: `rows` x `columns`, powers of 2, by `warps` of 32 threads."""

    rows: int
    columns: int
    warps: int

    @classmethod
    def of(cls, width: int, widest: int) -> "Tile":
        """The tile for rows of `width`: whole rows up to a width of `widest`, else blocks of them.

        >>> Tile.of(768, 8192), Tile.of(64, 8192), Tile.of(12288, 8192)
        (Tile(rows=4, columns=1024, warps=8), Tile(rows=64, columns=64, warps=8), Tile(rows=1, columns=4096, warps=8))
        """
        columns = 1 << (width - 1).bit_length()
        if columns > widest:
            columns = widest // 2  # widths such as 12288 are multiples of it
        rows = max(1, min(64, ELEMENTS // columns))
        return cls(rows, columns, max(1, min(16, rows * columns // (32 * EACH))))


@lru_cache
def programs(device: torch.device) -> int:
    """The number of programs for kernels in which each program processes many rows."""
    if device.type != "cuda":
        return 4  # in Triton's interpreter: few, so that each has several rows
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def stages(loaded: int) -> int:
    """Iterations of a loop whose loads are in flight at a time, if each loads that many bytes into shared memory.

    >>> stages(3 * 4096 * 2), stages(3 * 8192 * 2), stages(3 * 8192 * 4)
    (3, 2, 1)
    """
    return max(1, min(3, IN_FLIGHT // loaded))
