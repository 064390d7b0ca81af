# SPDX-License-Identifier: Apache-2.0
"""Settings of the C library that CPU training profits from."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def keep_memory() -> bool:
    """Ask glibc to keep freed memory instead of giving it back to the kernel; returns whether it understood.

    Large tensors are otherwise mapped anew for every op, and the kernel zeroes each page on first touch: writing fresh
    memory is about 7 x as slow as writing warm memory. Call before the first large allocation.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # musl has none
        return False
    return bool(library.mallopt(_M_MMAP_MAX, 0)) and bool(library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
