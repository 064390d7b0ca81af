# SPDX-License-Identifier: Apache-2.0
"""Copies of files in the memory of other ranks (--replication): which ranks hold them, and how they are sent.

replica_ranks(["n0", "n0", "n1", "n1"], factor=2)     # [[2], [3], [0], [1]]: of another node
exchange_files([(2, path, size)], [(2, other, size)], mesh.world, device)
"""

import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist

from megatron.errors import SettingsError
from megatron.mpu.groups import GroupListener
from megatron.mpu.mesh import Axis

CHUNK = 1 << 24  # bytes of a message
Sent = tuple[int, Path, int]  # the other rank, the file here, its bytes


def replica_ranks(nodes: Sequence[Hashable], factor: int, jump: Optional[int] = None) -> list[list[int]]:
    """For each rank, the other ranks that hold a copy of its part.

    nodes:  the node of each rank, whose memory its ranks share
    factor: memories with a part, the rank's own included; as many as there are, if there are fewer
    jump:   copies of rank n are with ranks n + jump, n + 2 jump, ..., after the last rank from 0 on
            (default: the ranks of the same place on the next nodes; with one node the next ranks)
    Raises SettingsError if the jump leads to the rank's own node although there is another one.

    >>> replica_ranks(["a", "a", "b", "b", "c", "c"], 2)
    [[2], [3], [4], [5], [0], [1]]
    >>> replica_ranks(["a"] * 3, 2), replica_ranks(["a"], 2)
    ([[1], [2], [0]], [[]])
    """
    world, members = len(nodes), {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    if jump is not None:
        found = [_unique(rank, [(rank + jump * turn) % world for turn in range(1, factor)]) for rank in range(world)]
        for rank, others in enumerate(found):
            near = [other for other in others if nodes[other] == nodes[rank]]
            if len(members) > 1 and (near or not others):
                raise SettingsError(
                    f"--replication-jump {jump} puts the copy of rank {rank} on its own node",
                    "both would be lost with it",
                    f"give the number of ranks of a node ({len(members[nodes[rank]])}), or leave the flag out",
                )
        return found
    if len(members) == 1:
        return [_unique(rank, [(rank + turn) % world for turn in range(1, factor)]) for rank in range(world)]
    names, found = list(members), [[] for _ in nodes]
    for place, name in enumerate(names):
        for turn in range(1, min(factor, len(names))):
            there = members[names[(place + turn) % len(names)]]
            for number, rank in enumerate(members[name]):
                found[rank].append(there[number % len(there)])
    return found


def _unique(rank: int, others: list[int]) -> list[int]:
    return [other for other in dict.fromkeys(others) if other != rank]


def exchange_files(outgoing: Sequence[Sent], incoming: Sequence[Sent], axis: Axis, device: torch.device) -> list[str]:
    """Send and receive files in chunks, all at once. All ranks of the axis whose files are in the lists call it.

    outgoing: (rank to send to, file, its bytes); incoming: (rank that sends it, file to write, its bytes). Between two
              ranks both list the same files in the same order
    Returns problems, one sentence each: messages are exchanged to their end even if a file cannot be read or written, so
    that no rank waits. The caller compares checksums: what arrived is not known to be what was sent.
    """
    GroupListener.notify(axis.label)
    sends = [_File(*one, os.O_RDONLY) for one in outgoing]
    receives = [_File(*one, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) for one in incoming]
    rounds = max((file.chunks for file in (*sends, *receives)), default=0)
    for number in range(rounds):
        sent = [(file, file.read(number).to(device)) for file in sends if number < file.chunks]
        arrived = [(file, file.room(number).to(device)) for file in receives if number < file.chunks]
        messages = [dist.P2POp(dist.isend, x, axis.ranks[file.peer], axis.group) for file, x in sent]
        messages += [dist.P2POp(dist.irecv, x, axis.ranks[file.peer], axis.group) for file, x in arrived]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        for file, x in arrived:
            file.write(number, x.cpu())
    return [problem for file in (*sends, *receives) for problem in file.close()]


class _File:
    """A file under way, and what went wrong with it."""

    def __init__(self, peer: int, path: Path, size: int, mode: int):
        self.peer, self.path, self.size, self.problem, self.handle = peer, path, size, "", None
        self.chunks = -(-size // CHUNK)
        try:
            self.handle = os.open(path, mode, 0o600)
        except OSError as error:
            self.problem = f"{path}: {error.strerror}"

    def room(self, number: int) -> torch.Tensor:
        return torch.zeros(min(CHUNK, self.size - number * CHUNK), dtype=torch.uint8)

    def read(self, number: int) -> torch.Tensor:
        chunk = self.room(number)
        self._try(lambda: os.preadv(self.handle, [memoryview(chunk.numpy())], number * CHUNK))
        return chunk

    def write(self, number: int, chunk: torch.Tensor) -> None:
        data = memoryview(chunk.numpy())
        self._try(lambda: os.pwrite(self.handle, data, number * CHUNK))

    def _try(self, action: Callable[[], object]) -> None:
        try:
            if not self.problem:
                action()
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror}"

    def close(self) -> list[str]:
        if self.handle is not None:
            os.close(self.handle)
        return [self.problem] * bool(self.problem)
