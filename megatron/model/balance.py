# SPDX-License-Identifier: Apache-2.0
"""Layers of unequal work, cut into consecutive stages. Pure."""

from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Layers of each stage, at least one, so that the stage with most work has as little as can be, and the squares of
    all add up to as little as can be then. first, last: what the ends do besides.

    >>> balanced([1.0, 1.0, 1.0, 0.5, 0.5, 0.5], 3)
    [1, 2, 3]
    >>> balanced([1.0] * 4 + [0.41] * 4, 2, last=1.0)
    [3, 5]
    """
    total = [0.0, *accumulate(costs)]
    count, best = len(costs), {(0, 0): (0.0, 0.0, ())}  # (stages, layers) so far -> (most, squares, counts)
    for stage in range(1, stages + 1):
        ends = (first if stage == 1 else 0.0) + (last if stage == stages else 0.0)
        for layers in range(stage, count - (stages - stage) + 1):
            found = []
            for before in range(stage - 1, layers):
                if (stage - 1, before) in best:
                    most, squares, counts = best[stage - 1, before]
                    own = total[layers] - total[before] + ends
                    found.append((max(most, own), squares + own * own, (*counts, layers - before)))
            best[stage, layers] = min(found)
    return list(best[stages, count][2])
