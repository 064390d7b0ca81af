# SPDX-License-Identifier: Apache-2.0
"""Process groups that their members make by themselves, while no other rank of the job waits for them.

`dist.new_group` asks all ranks of a job to make every group, others' groups as well: a job of 16,384 ranks has thousands.
Its `use_local_synchronization` is meant for members alone, and has two traps (torch 2.11 to 2.13):

- The name, under which members find each other, is a hash of the ranks and of the number of groups that a rank has made
  so far. Where members have made different numbers (the first stage has a group for its tied embedding, the second has
  none) names differ, and all wait for ever (pytorch#189073, #190431). Here a name is what the caller says and the ranks.
- With a device bound to the group of all ranks (`init_process_group(device_id=)`) torch splits NCCL's communicator, in
  which all ranks have to take part (pytorch#129965): `initialize.join_job` binds none.
"""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.errors import PeerLost


class GroupListener:
    """Calls a listener before each collective and each new group, with the group's name, which explains a hang.

    Output only: nothing is decided by it. One listener for a process, as there is one stack.
    """

    listener: Callable[[str], None] = staticmethod(lambda group: None)

    @classmethod
    def notify(cls, group: str) -> None:
        if not torch.compiler.is_compiling():  # compiled code does not call out
            cls.listener(group)

    @classmethod
    @contextlib.contextmanager
    def calling(cls, listener: Callable[[str], None]):
        """Inside the `with` block, `listener` is called with the name of each group."""
        before, cls.listener = cls.listener, staticmethod(listener)
        try:
            yield
        finally:
            cls.listener = before


def new_group(
    ranks: Sequence[int], purpose: str, timeout: Optional[timedelta] = None, *, connect: bool = True
) -> dist.ProcessGroup:
    """A group of these ranks, in ascending order, one of which this rank is. Its members call this, and nobody else.

    Members make their common groups in the same order. purpose: what it is for, in words; groups of the same ranks differ
    in it. gloo connects all members when it makes a group, NCCL at the first message, which is sent here: not in a step,
    where other messages may be under way. connect: False leaves that to whoever uses the group, if anybody does.
    Raises PeerLost when members do not come within the timeout (default: torch's).
    """
    GroupListener.notify(purpose)
    rank, ranks = dist.get_rank(), list(ranks)
    backend, store = c10d._world.pg_map[dist.group.WORLD]
    timeout = timeout or c10d._get_default_timeout(backend)
    # What `dist.new_group` calls, which takes no name. Its signature is the same in torch 2.11 and 2.13.
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            ranks,
            c10d.Backend(backend),
            store,
            free_name(ranks, purpose, set(c10d._world.pg_names.values())),
            timeout=timeout,
            group_desc=purpose,
        )
        c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
        if connect:
            dist.all_reduce(torch.zeros(1, device="cuda" if backend == "nccl" else "cpu"), group=group)
    except RuntimeError as error:
        raise PeerLost(
            f"rank {rank} could not open {purpose} (ranks {_told(ranks)}): not all of them came within "
            f"{timeout.total_seconds():g} s",
            str(error).splitlines()[0],
            "see what another rank said first; if ranks only start slowly, raise --distributed-timeout-minutes",
        ) from error
    return group


def free_name(ranks: Sequence[int], purpose: str, taken: Collection[str]) -> str:
    """A name that all members find, because it rests on nothing else than the groups which these ranks made together.

    taken: names of the groups that this rank has
    """
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    name, again = f"{purpose} {ranks[0]}-{ranks[-1]} {digest}", 1
    while f"{name} {again}" in taken:  # by another mesh of this process
        again += 1
    return f"{name} {again}"


def _told(ranks: Sequence[int]) -> str:
    """
    >>> _told([0, 2]), _told(range(0, 64, 8))
    ('0, 2', '0, 8, 16, ..., 56')
    """
    few = list(map(str, ranks)) if len(ranks) <= 5 else [*map(str, ranks[:3]), "...", str(ranks[-1])]
    return ", ".join(few)
