# SPDX-License-Identifier: Apache-2.0
"""Times of data parallelism's messages in the closed form of a step (`live.sharded_span`). No torch.

The planner counts a chunk's messages as one each: with ZeRO 1 and 2 a gather before the first pass of the chunk, with
ZeRO 3 one for each pass; a reduction after the last pass, with ZeRO 2 and 3 after each. Without overlap a pass starts after
its gather and ends after its reduction. With overlap a share of a message runs during its pass, the rest before (gathers)
or after it (reductions). A pass that is shorter than its overlapped messages takes as long as these.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardingTimes:
    """The ZeRO stage and the times of one chunk's messages, in the unit of the passes; equal on all ranks.

    gather, reduce:                time of one message
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

        >>> ShardingTimes(3, gather=1.0, reduce=2.0, gather_overlap=0.5).stretched("B", 4.0)
        6.5
        """
        gather, reduce = self.gather * self.gathers(kind), self.reduce * self.reduces(kind)
        overlapped = gather * self.gather_overlap + reduce * self.reduce_overlap
        return gather + reduce - overlapped + max(time, overlapped)
