# SPDX-License-Identifier: Apache-2.0
"""What a large job asks of its store, its folder and its first rank, as formulas. `test_many_ranks.py` holds counts of real
jobs against them, and keeps their values for 1,024 and 16,384 ranks.

Formulas are for CPUs (gloo).
"""

from dataclasses import dataclass

from megatron.checkpoint.store import FAN
from megatron.guard.beat_files import LOOK
from megatron.planner.layout import Layout
from megatron.planner.startup import Groups, groups_of

NODE = 8  # ranks
GATHERS_OF_START, GATHERS_OF_LOAD = 15, 3  # rounds in which all ranks answer each other, besides those of saves
MESSAGE = 1200  # bytes of a rank in the heartbeats of its node, at most


@dataclass(frozen=True)
class Job:
    """A job, and its groups, without that of all ranks."""

    groups: Groups

    @staticmethod
    def of(layout: Layout, num_layers: int) -> "Job":
        return Job(groups_of(layout, num_layers, nccl=False))

    @property
    def ranks(self) -> int:
        return self.groups.world_size

    def opened_groups(self, stage: int) -> int:
        """Groups that a rank of a stage opens, the one of all ranks among them. NCCL's channels are apart."""
        return 1 + self.groups.of_rank(stage)

    @property
    def store_keys(self) -> int:
        """Each rank writes its address into each of its groups; one key counts the ranks that came."""
        each = self.ranks // self.groups.pp
        return 1 + each * sum(map(self.opened_groups, range(self.groups.pp)))

    # ---- a save: a file and a part of the index of each rank; leaders of FAN ranks merge these, the first one the rest

    @property
    def leaders(self) -> int:
        return -(-self.ranks // FAN) if self.ranks > FAN else 0

    @property
    def gathers_of_save(self) -> int:
        """Rounds in which all ranks answer each other: begin, written, merged by leaders, published."""
        return 3 + bool(self.leaders)

    @property
    def parts_read_by_first_rank(self) -> int:
        return min(FAN, self.ranks) + self.leaders if self.leaders else self.ranks

    def files_of_save(self, index_parts: int) -> int:
        """Files of a checkpoint: index.json, state.json, one of each rank, those of an index in parts."""
        return 2 + self.ranks + index_parts

    # ---- a run, with synthetic data

    def gathers(self, saves: int, resumed: bool = False) -> int:
        """Rounds of a run of so many saves, from its start to its end."""
        return GATHERS_OF_START + GATHERS_OF_LOAD * resumed + saves * self.gathers_of_save

    def opened(self, rank: int, saves: int, resumed: bool = False) -> int:
        """Files of its folder that a rank opens in a run, at most: those of saves, of a load, and its logs.

        A rank writes its file and its part of the index. Leaders read the parts of their ranks and write one; the first
        rank reads those of its own and of all leaders, and writes the rest: index, state, folder, tracker.
        """
        load = (2 + self.ranks // self.groups.pp) * resumed  # index, state, and files of the ranks of its stage
        if rank == 0:
            parts = self.parts_read_by_first_rank + 1 + bool(self.leaders)
            return 16 + 2 * load + saves * (parts + 7)
        members = min(FAN, self.ranks - rank) + 1 if self.leaders and rank % FAN == 0 else 0
        return 1 + load + saves * (2 + members)

    # ---- heartbeats: a node writes one file, every LOOK seconds, and each of its ranks at its end

    @property
    def nodes(self) -> int:
        return -(-self.ranks // NODE)

    def messages(self, seconds: float) -> float:
        """Times that a node's heartbeats are written in so many seconds, at most."""
        return seconds / LOOK + NODE
