# SPDX-License-Identifier: Apache-2.0
"""Create process groups on their members only, without the other ranks of the job.

`dist.new_group` requires all ranks of a job to create every group: a job of 16,384 ranks has thousands.
Its `use_local_synchronization` is for members only, and has two problems (torch 2.11 to 2.13):

- The name by which members find each other is a hash of the ranks and of the number of groups that a rank has created.
  If members have created different numbers (the first stage has a group for its tied embedding, the second has none),
  names differ, and all wait forever (pytorch#189073, #190431). Here the name depends on the purpose and the ranks.
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
    """Calls a listener before each collective and each new group, with the group's name, to explain a hang.

    For output only. There is one listener per process.
    """

    listener: Callable[[str], None] = staticmethod(lambda group: None)

    @classmethod
    def notify(cls, group: str) -> None:
        if not torch.compiler.is_compiling():  # compiled code cannot call it
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
    """Create a group of these ranks, in ascending order, with this one among them. Only its members call this.

    Members must create their common groups in the same order. purpose: a description, different for groups of the same
    ranks. gloo connects all members when it creates a group, NCCL at the first message. It is sent here, rather than in a
    step, when other messages may be in flight. connect: False leaves that to the first use.
    Raises PeerLost if members do not join within the timeout (default: torch's).
    """
    GroupListener.notify(purpose)
    rank, ranks = dist.get_rank(), list(ranks)
    backend, store = c10d._world.pg_map[dist.group.WORLD]
    timeout = timeout or c10d._get_default_timeout(backend)
    # `dist.new_group` calls this, but takes no name. The signature is the same in torch 2.11 and 2.13.
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
            f"rank {rank} could not open {purpose} (ranks {_abbreviated(ranks)}): not all of them joined within "
            f"{timeout.total_seconds():g} s",
            str(error).splitlines()[0],
            "read the first error of the other ranks; if ranks only start slowly, raise --distributed-timeout-minutes",
        ) from error
    return group


def free_name(ranks: Sequence[int], purpose: str, taken: Collection[str]) -> str:
    """A group name that is equal on all members: it depends only on the groups that these ranks have in common.

    taken: names of the groups that this rank has
    """
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    name, again = f"{purpose} {ranks[0]}-{ranks[-1]} {digest}", 1
    while f"{name} {again}" in taken:  # taken by another mesh of this process
        again += 1
    return f"{name} {again}"


def _abbreviated(ranks: Sequence[int]) -> str:
    """
    >>> _abbreviated([0, 2]), _abbreviated(range(0, 64, 8))
    ('0, 2', '0, 8, 16, ..., 56')
    """
    few = list(map(str, ranks)) if len(ranks) <= 5 else [*map(str, ranks[:3]), "...", str(ranks[-1])]
    return ", ".join(few)
