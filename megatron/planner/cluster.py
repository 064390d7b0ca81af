# SPDX-License-Identifier: Apache-2.0
"""The devices of a job, how they share nodes, and how long a collective takes on their links."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

from megatron.planner.device import Device
from megatron.settings.hashed_once import hashed_once


@hashed_once
@dataclass(frozen=True)
class Cluster:
    """Devices, and how many of them share a node: neighbouring ranks use the links inside a node.

    once: experts of a token, if an exchange of experts' tokens sends a token once to each node (or each rank of its own)
          that has some of them, as DeepEP and HybridEP do; None: once to each expert, as this suite does
    """

    device: Device
    world_size: int
    local_size: int = 8
    once: Optional[int] = None

    @property
    def nodes(self) -> int:
        """Number of nodes; 1 if the devices do not fill one."""
        return max(1, self.world_size // self.local_size)

    def seconds(self, op: str, size: int, calls: int, ranks: int, stride: int) -> float:
        """Seconds of collectives with `size` bytes in `calls` calls over `ranks` ranks with distance `stride`, in the group
        of the job that takes longest.

        Links inside a node and adapters work at the same time, so the slower ones count. Each rank has its own adapter.
        """
        if ranks == 1 or size == 0:
            return 0.0
        held = placements(ranks, stride, self.local_size, self.world_size)
        return max(self._seconds(op, size, calls, ranks, one) for one in held)

    def _seconds(self, op: str, size: int, calls: int, ranks: int, held: "Placement") -> float:
        d, nodes = self.device, sum(count for _, count in held)
        if op in ("send", "shift"):  # as slow as the message that leaves the node
            return size / (d.outer if nodes > 1 else d.inner) + calls * d.latency
        steps = (ranks - 1).bit_length()
        if op != "all_reduce":  # all-reduce has trees; the rings of the others, and exchanges, pass every node in turn
            steps += nodes - 1
        if op == "all_to_all":
            inside, outside = zip(*(self._exchanged(size, own, ranks, held) for own, _ in held))
            return max(max(inside) / d.inner, max(outside) / d.outer) + calls * steps * d.latency
        link = d.inner
        if nodes > 1:  # rings leave a node through the adapters of all its ranks in this group
            link = min(link, d.outer * min(own for own, _ in held))
        # A ring moves (ranks - 1) / ranks of the tensor, twice for an all-reduce.
        share = (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
        return share * size / link + calls * steps * d.latency

    def _exchanged(self, size: int, own: int, ranks: int, held: "Placement") -> tuple[float, float]:
        """Bytes that a rank sends in an exchange: (to ranks of its node, to other nodes). It has `size` bytes for all ranks
        together; its node has `own` of these.
        """
        if self.once is None:
            return size * (own - 1) / ranks, size * (ranks - own) / ranks
        # The chance that at least one of k experts is on one of these ranks, for each rank of the node, or other node.
        reached = lambda part: 1 - (1 - part / ranks) ** self.once
        token = size / self.once
        outside = sum(count * reached(number) for number, count in held) - reached(own)
        return token * (own - 1) * reached(1), token * outside


Placement = tuple[tuple[int, int], ...]  # of a group on nodes: (its ranks on a node, nodes with as many), ...


@lru_cache(maxsize=4096)
def placements(ranks: int, stride: int, local_size: int, world_size: int) -> frozenset[Placement]:
    """How groups of `ranks` ranks with distance `stride` lie on nodes. Each block of ranks x stride ranks of the job has
    `stride` groups.

    >>> sorted(placements(16, 1, 8, 64)), sorted(placements(4, 4, 8, 64)), sorted(placements(3, 1, 8, 9))
    ([((8, 2),)], [((2, 2),)], [((1, 1), (2, 1)), ((3, 1),)])
    """
    block, found = ranks * stride, set()
    last = min(math.lcm(block, local_size), world_size) - block
    for first in range(0, max(0, last) + 1, block):
        for own in range(first, first + min(stride, local_size)):
            on_nodes = Counter((own + n * stride) // local_size for n in range(ranks))
            found.add(tuple(sorted(Counter(on_nodes.values()).items())))
    return frozenset(found)
