# SPDX-License-Identifier: Apache-2.0
"""Communication of data parallelism in the simulation of a pipeline: gathers of parameters, reductions of gradients.

A rank has two lanes. The compute lane runs the passes of its schedule, the communication lane these ops, both in order:

| op      | what                                            | ZeRO | when                                          |
|---------|-------------------------------------------------|------|-----------------------------------------------|
| G0.1    | all-gather of chunk 1's parameters              | 1, 2 | before the first forward pass of the chunk    |
| G3.1    | the same                                        | 3    | before the forward pass F3.1                  |
| GB3.1   | the same                                        | 3    | before the backward pass B3.1 (or I3.1)       |
| R7.1    | reduction of chunk 1's gradients                | 0, 1 | after the last backward pass (or W), B7.1     |
| R3.1    | the same                                        | 2, 3 | after each backward pass (or W)               |
| U0      | the update                                      | all  | after the last reduction of all ranks, which  |
|         |                                                 |      | agree on the norm of the gradients            |

Without overlap a pass starts after its gather; with ZeRO 2 and 3 it ends after the reduction of its gradients, and ZeRO 0
and 1 reduce after the rank's last pass. With overlap, layers are gathered and reduced while others compute: a share of a
message runs during its pass, the rest before (G) or after it (R). A pass that is shorter than its overlapped communication
takes as long as that: compute cannot hide more communication than its own duration.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.schedule import Op

COMMUNICATION = ("G", "GB", "R")  # kinds of the communication lane


@dataclass(frozen=True)
class Sharding:
    """The ZeRO stage and the times of one chunk's communication, in the unit of the passes; equal on all ranks.

    gather, reduce:                time of one G and of one R
    gather_overlap, reduce_overlap:  share of it that overlaps its pass; 0: without --overlap-param-gather and
                                   --overlap-grad-reduce
    """

    zero: int
    gather: float = 0.0
    reduce: float = 0.0
    gather_overlap: float = 0.0
    reduce_overlap: float = 0.0
    update: float = 0.0

    def gathers(self, kind: str) -> bool:
        """Whether every pass of this kind has a gather of its own."""
        return self.zero == 3 and kind != "W"

    def reduces(self, kind: str) -> bool:
        """Whether every pass of this kind has a reduction of its own."""
        return self.zero >= 2 and kind in "BW"

    def stretched(self, kind: str, time: float) -> float:
        """Duration of a pass including the communication before, during and after it.

        >>> Sharding(3, gather=1.0, reduce=2.0, gather_overlap=0.5).stretched("B", 4.0)
        6.5
        """
        gather, reduce = self.gather * self.gathers(kind), self.reduce * self.reduces(kind)
        overlapped = gather * self.gather_overlap + reduce * self.reduce_overlap
        return gather + reduce - overlapped + max(time, overlapped)


class RankStreams:
    """The two lanes of one rank in the simulation. Adds (rank, op) -> (start, end) of every op to `times`."""

    def __init__(self, rank: int, ops: Sequence[Op], sharding: Sharding, times: dict):
        self.rank, self.sharding, self.times = rank, sharding, times
        self.free = 0.0  # time at which the communication lane is idle again
        self.first = {op.chunk: op for op in reversed(ops) if op.kind == "F"}
        self.last = {op.chunk: op for op in ops if op.kind in "BW"}
        self.end = ops[-1] if ops else None
        if sharding.zero in (1, 2):
            for op in (op for op in ops if self.first.get(op.chunk) == op):
                self._send(Op("G", 0, op.chunk), 0.0, sharding.gather)
        self.gathered = self.free

    def run(self, op: Op, ready: float, time: float) -> float:
        """Simulate a pass that could start at `ready` and computes for `time`. Returns when its dependents may start."""
        plan, chunk = self.sharding, (self.rank, Op("G", 0, op.chunk))
        begin, least = ready, 0.0  # start of computing, and its earliest end
        if plan.gathers(op.kind):
            kind = "G" if op.kind == "F" else "GB"
            start, least = self._send(Op(kind, op.micro, op.chunk), ready, plan.gather)
            begin = start + (1 - plan.gather_overlap) * plan.gather
        elif plan.zero in (1, 2) and plan.gather_overlap == 0.0:
            begin = max(ready, self.gathered)
        elif plan.zero in (1, 2) and self.first.get(op.chunk) == op:
            start, least = self.times[chunk]
            begin = max(ready, start + (1 - plan.gather_overlap) * plan.gather)
        end = max(begin + time, least)
        done = end
        if plan.reduces(op.kind):
            end = max(end, max(self.free, begin) + plan.reduce_overlap * plan.reduce)
            done = self._reduce(op, end, plan.reduce)
        elif plan.zero < 2 and plan.reduce_overlap and self.last.get(op.chunk) == op:
            self._reduce(op, max(end, max(self.free, begin) + plan.reduce_overlap * plan.reduce), plan.reduce)
        elif plan.zero < 2 and op == self.end:
            for last in self.last.values():
                self._send(Op("R", last.micro, last.chunk), end, plan.reduce)
        self.times[self.rank, op] = (begin, end)
        return done

    def _send(self, op: Op, ready: float, time: float) -> tuple[float, float]:
        """Send a message as soon as it is ready and the lane is free."""
        start = max(ready, self.free)
        self.free = start + time
        self.times[self.rank, op] = (start, self.free)
        return start, self.free

    def _reduce(self, op: Op, end: float, time: float) -> float:
        """Send a reduction of which the share `reduce_overlap` is done when the pass ends."""
        self.free = end + (1 - self.sharding.reduce_overlap) * time
        self.times[self.rank, Op("R", op.micro, op.chunk)] = (self.free - time, self.free)
        return self.free
