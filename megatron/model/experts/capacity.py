# SPDX-License-Identifier: Apache-2.0
"""The capacity of experts, for the router and for predictions of memory and speed. Needs no torch."""

import math


def capacity(n: int, k: int, experts: int, factor: float) -> int:
    """The most tokens that an expert takes from a rank with n tokens: its equal share, times a factor.

    >>> capacity(64, 2, 8, 1.25), capacity(4, 2, 2, 9.0)
    (20, 4)
    """
    return min(math.ceil(n * k / experts * factor), n)
