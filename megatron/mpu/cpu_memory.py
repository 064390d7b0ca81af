# SPDX-License-Identifier: Apache-2.0
"""Memory on a CPU: what the C library returns to the kernel, and how many kernels torch keeps. Needs no torch."""

import ctypes
import os
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


KERNELS = 128  # enough for 16 sizes of a batch with one new token each


def bound_kernel_caches() -> None:
    """Let torch keep fewer kernels on a CPU. Call it before torch is loaded.

    oneDNN makes a kernel of each product for each number of tokens in a pass: quickly, but each takes half a megabyte. By
    default torch and oneDNN keep 1024 each, which come to a gigabyte with prompts of all lengths.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # of oneDNN, and of torch for it
        os.environ.setdefault(name, str(KERNELS))
