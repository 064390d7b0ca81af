# SPDX-License-Identifier: Apache-2.0
"""Partition layers with unequal cost into consecutive pipeline stages. Pure."""

from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """The number of layers of each stage, at least one: minimizes the largest cost of a stage, then the sum of squares.
    first, last: additional cost of the first and last stage.

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
            options = []
            for before in range(stage - 1, layers):
                if (stage - 1, before) in best:
                    most, squares, counts = best[stage - 1, before]
                    own = total[layers] - total[before] + ends
                    options.append((max(most, own), squares + own * own, (*counts, layers - before)))
            best[stage, layers] = min(options)
    return list(best[stages, count][2])
