# SPDX-License-Identifier: Apache-2.0
"""What a large job asks of its store, its folder and its first rank, as formulas. `test_many_ranks.py` holds counts of real
jobs against them, and keeps their values for 1,024 and 16,384 ranks.

Formulas are for CPUs (gloo).
"""

from dataclasses import dataclass

from megatron.checkpoint.store import BLOCK, FAN, PART
from megatron.guard.beat_files import LOOK
from megatron.planner.layout import Layout
from megatron.planner.startup import Groups, groups_of

NODE = 8  # ranks
SUM = 32  # characters of a checksum
FILE = 25  # of the name of a rank's file, with quotes
GATHERS_OF_START, GATHERS_OF_LOAD = 16, 3  # rounds in which all ranks answer each other, besides those of saves
MESSAGE = 1200  # bytes of a rank in the heartbeats of its node, at most


@dataclass(frozen=True)
class Saved:
    """What a rank saves, in means over the ranks.

    data: bytes of its tensors. boxes: parts of tensors, each with a checksum for
    every 4 MiB. tensors: names among them; names: those of all ranks. name, key: characters of a name, and of that of a
    box, which has its position unless it is a whole tensor. numbers: those of an offset and an extent, "[0, 16][4, 16]"
    state: bytes of state.json
    """

    data: float
    boxes: float
    tensors: float
    names: int
    name: float
    key: float
    numbers: float
    state: float = 0

    @property
    def header(self) -> float:
        """Bytes before the data of a rank's file: for each box its key, format, extent, and first and last byte."""
        words = len('"": {"dtype": "F32", "shape": , "data_offsets": [, ]}, ')
        places = 2 * len(str(int(self.data / 2)))
        return 8 + 32 + self.boxes * (self.key + words + self.numbers / 2 + places)  # up to a multiple of 64

    @property
    def box(self) -> float:
        """Bytes of a box in the index: position, file, key and checksums."""
        sums = max(1.0, self.data / self.boxes / BLOCK)
        return self.numbers + FILE + self.key + len('[, , , "", []], ') + (SUM + len('"", ')) * sums

    @property
    def tensor(self) -> float:
        """Bytes of a tensor in the index, without its boxes: its name, format and shape."""
        return self.name + len('  "": {"dtype": "F32", "shape": , "boxes": []},\n') + self.numbers / 2

    def entries(self, ranks: int, tensors: float) -> float:
        """Bytes of the entries of several ranks, which have so many different tensors: with a line for each file."""
        file = FILE + SUM + len('  : {"bytes": 123456, "header": ""},\n')
        return (
            len('{"checksum": "", "block": 4194304, "files": {}, "tensors": {}}')
            + SUM
            + (ranks * (file + self.boxes * self.box) + tensors * self.tensor)
        )


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

    def saved_bytes(self, saved: Saved) -> float:
        """Bytes that a rank writes for its file and its part of the index."""
        return saved.data + saved.header + saved.entries(1, saved.tensors)

    def merged_bytes(self, saved: Saved, members: int = FAN) -> tuple[float, float]:
        """(read, written) by a leader: the parts of its ranks, and one of all of them."""
        stages = max(1.0, members / self.ranks * self.groups.pp)  # of the group, which have names of their own
        different = min(saved.names * stages / self.groups.pp, members * saved.tensors)
        return members * saved.entries(1, saved.tensors), saved.entries(members, different)

    def published_bytes(self, saved: Saved) -> tuple[float, float]:
        """(read, written) by the first rank: what leaders have merged, or parts; the whole index, and the state.

        An index in parts lists their names once more.
        """
        fan = FAN if self.leaders else 1
        groups = (min(fan, self.ranks - first) for first in range(0, self.ranks, fan))
        read = sum(self.merged_bytes(saved, members)[1] for members in groups)
        index = saved.entries(self.ranks, saved.names)
        listed = saved.names * (saved.name + len('"", ')) * (index > PART)
        return read, index + listed + saved.state

    def loaded_bytes(self, saved: Saved, tensors: float, data: float) -> float:
        """Bytes that a rank reads to load `data` bytes of tensors: the index, the state, and the headers of the files of
        its stage. tensors: names whose entries it looks up; of an index in parts it reads those that have them
        """
        index = saved.entries(self.ranks, saved.names)
        if index > PART:
            lists = self.ranks * (FILE + SUM + 40) + saved.names * (saved.name + 4)
            index = lists + index * tensors / saved.names + PART / 2
        return index + saved.state + self.ranks // self.groups.pp * saved.header + data

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

    # ---- heartbeats: a node writes one file, at once and every LOOK seconds, and each of its ranks at its end

    @property
    def nodes(self) -> int:
        return -(-self.ranks // NODE)

    def messages(self, seconds: float) -> float:
        """Times that a node's heartbeats are written in so many seconds, at most."""
        return 1 + seconds / LOOK + NODE  # the first one at once
