# SPDX-License-Identifier: Apache-2.0
"""Limits for the kernels that torch keeps on a CPU. Needs no torch."""

import os

KERNELS = 128  # enough for 16 sizes of a batch with one new token each


def bound_kernel_caches() -> None:
    """Let torch keep fewer kernels on a CPU. Call it before torch is loaded.

    oneDNN makes a kernel of each product for each number of tokens in a pass: quickly, but each takes half a megabyte. By
    default torch and oneDNN keep 1024 each, which come to a gigabyte with prompts of all lengths.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # of oneDNN, and of torch for it
        os.environ.setdefault(name, str(KERNELS))
