# SPDX-License-Identifier: Apache-2.0
"""Channels between the ranks of a pipeline, and the order in which they are opened. Pure, for any map of stages.

A *channel* is (kind, from, to): activations one way (F), their gradients the other (B), between two ranks of a pipeline.
"""

from megatron.pipeline.schedule import StageMap

Channel = tuple[str, int, int]


def channels(stages: StageMap) -> list[Channel]:
    """Every (kind, from, to) between different ranks for these stages, in the same order on all ranks.

    >>> channels(((0, 0), (1, 0)))
    [('B', 1, 0), ('F', 0, 1)]
    """
    hops = {(a, b) for (a, _), (b, _) in zip(stages, stages[1:]) if a != b}
    return sorted({("F", a, b) for a, b in hops} | {("B", b, a) for a, b in hops})


def opening_rounds(stages: StageMap) -> list[list[Channel]]:
    """All channels, in rounds in which no rank has two. Those of a round open at the same time.

    Every rank opens its own channels in this order, so there is no deadlock, and a channel waits for at most one channel of
    each round before it, not for a whole pipeline.

    >>> opening_rounds(((0, 0), (1, 0), (2, 0)))
    [[('B', 1, 0)], [('B', 2, 1)], [('F', 0, 1)], [('F', 1, 2)]]
    """
    rounds: list[list[Channel]] = []
    busy: list[set[int]] = []
    for kind, source, target in channels(stages):
        at = next((n for n, ranks in enumerate(busy) if not ranks & {source, target}), len(busy))
        if at == len(busy):
            busy.append(set())
            rounds.append([])
        busy[at] |= {source, target}
        rounds[at].append((kind, source, target))
    return rounds
