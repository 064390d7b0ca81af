# SPDX-License-Identifier: Apache-2.0
"""What the ops of layers with a scan have in common: how ranks of context parallelism share it. Needs no torch."""

from dataclasses import dataclass, replace

from megatron.model.layer_ops import Collective, LayerOp, RankSetup, Scan, rows_for_heads
from megatron.mpu.chunks import exchanging


@dataclass(frozen=True)
class SharedScan:
    """A scan of a rank, with its part of groups and rows.

    heads:   ranks that exchange rows for heads; rows: those that pass states on, and scan two chunks as two samples
    groups:  of heads, on this rank, while ranks exchange rows for them
    samples: that it scans, of a micro-batch; tokens: of all of them
    length:  tokens of a sample
    """

    share: RankSetup
    heads: int
    groups: int
    tokens: int

    @classmethod
    def of(cls, share: RankSetup, groups: int, tokens: int) -> "SharedScan":
        """groups: of heads, on all ranks; tokens: of a micro-batch, on this rank of cp."""
        own = groups // share.tp
        heads = exchanging(own, share.cp, share.cp_heads)
        return cls(share, heads, own // heads, tokens * heads)

    @property
    def rows(self) -> int:
        return self.share.cp // self.heads

    @property
    def passes(self) -> bool:
        return self.rows > 1

    @property
    def samples(self) -> int:
        return self.share.micro_batch_size * (1 + self.passes)

    @property
    def length(self) -> int:
        return self.tokens // self.samples

    def kept(self, taps: int, channels: int, state: int, maps: int) -> int:
        """Bytes that the layer saves besides what is of its tokens: which taps reach beyond a document; and if states are
        passed on, the rows and states before the chunks, and maps of states. channels, state, maps: elements of a group
        """
        lead = (taps - 1) * self.samples
        beside = (self.tokens + lead * (1 + self.passes)) * self.share.documents
        passed = lead * channels * self.share.element + 4 * self.samples * (state + maps)
        return beside + self.passes * self.groups * passed

    def exchanged(
        self, scan: Scan, into: int, back: int, taps: int, channels: int, state: int, maps: int
    ) -> tuple[LayerOp, ...]:
        """The scan with the messages of its ranks. into, back: bytes that are exchanged for heads, before and after it."""
        name, levels, ops = scan.name, self.passes and self.heads > 1, [scan]
        if self.passes:
            sent, axis = self.samples * self.rows * self.groups, "cp_outer" if levels else "cp"
            rows, states = sent * min(taps - 1, self.length) * channels * self.share.element, 4 * sent * (state + maps)
            gather, again = ("all_gather",), dict(again=scan.again)
            tails = Collective(name, axis, self.rows, rows, gather, ("reduce_scatter",), **again)
            passed = Collective(name, axis, self.rows, states, gather, gather, **again)
            ops = [*[tails] * (taps > 1), passed, replace(scan, workspace=scan.workspace + 2 * states)]
        return rows_for_heads(name, "cp_inner" if levels else "cp", self.heads, into, back, *ops)
