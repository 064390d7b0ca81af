# SPDX-License-Identifier: Apache-2.0
"""Memory settings of the C library that speed up CPU training."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def keep_memory() -> bool:
    """Ask glibc to keep freed memory instead of returning it to the kernel; returns whether that worked.

    Otherwise large tensors are mapped again for every op, and the kernel zeroes each page on first touch: writing new
    memory is about 7 x as slow as writing reused memory. Call before the first large allocation.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # musl
        return False
    return bool(library.mallopt(_M_MMAP_MAX, 0)) and bool(library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
