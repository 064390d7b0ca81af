# SPDX-License-Identifier: Apache-2.0
"""Memory use of a rank, now and at its peak."""

import resource
import sys
from collections.abc import Sequence
from typing import NamedTuple, Optional

from megatron.telemetry.host_memory import most_resident_memory, resident_memory


class MemoryUse(NamedTuple):
    """Bytes of tensors on a GPU and of torch's reserve for them, or of the whole process on a CPU."""

    now: int
    most: int
    reserved: Optional[int] = None
    most_reserved: Optional[int] = None


class MemoryInUse(NamedTuple):
    """Bytes in use when a rank ran out of memory. state: between two steps; outside: of the device, not by torch"""

    rank: int
    pipeline_rank: int
    state: int
    most: int
    most_reserved: Optional[int] = None
    outside: int = 0


def memory_in_use(device: str, rank: int, pipeline_rank: int, state: int) -> MemoryInUse:
    """The memory of this rank now. state: bytes between two steps"""
    use, outside = memory_use(device), 0
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        outside = max(0, total - free - use.reserved)
    return MemoryInUse(rank, pipeline_rank, state, use.most, use.most_reserved, outside)


def memory_use(device: str) -> MemoryUse:
    """The present memory use of this rank, and its peak so far."""
    if device == "cuda":
        import torch

        sizes = torch.cuda.memory_stats()
        kinds = ("allocated_bytes.all.current", "allocated_bytes.all.peak")
        kinds += ("reserved_bytes.all.current", "reserved_bytes.all.peak")
        return MemoryUse(*(sizes.get(kind, 0) for kind in kinds))
    most = most_resident_memory() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return MemoryUse(resident_memory() or most, most)


def peak_bytes(device: str) -> int:
    """Peak bytes of tensors on the GPU, or of the whole process on a CPU."""
    return memory_use(device).most


def memory_line(uses: Sequence[MemoryUse], planned: Sequence[int], iteration: int) -> str:
    """Megatron-LM's line of memory, of the rank with the highest peak, with the planner's estimate for it.

    uses, planned: of each rank; planned may be empty

    >>> memory_line([MemoryUse(1 << 20, 2 << 20), MemoryUse(1 << 20, 3 << 20)], [3 << 20, 4 << 20], 5)
    '[Rank 1] (after 5 iterations) memory (MB) | resident: 1.0 | max resident: 3.0 | planned: 4.0 | fullest of 2 ranks'
    """
    rank = max(range(len(uses)), key=lambda rank: uses[rank].most)
    use, name = uses[rank], "resident" if uses[rank].reserved is None else "allocated"
    sizes = {name: use.now, f"max {name}": use.most}
    if use.reserved is not None:
        sizes |= {"reserved": use.reserved, "max reserved": use.most_reserved}
    if planned:
        sizes["planned"] = planned[rank]
    parts = [f"{what}: {size / 2**20:.1f}" for what, size in sizes.items()]
    parts += [f"fullest of {len(uses)} ranks"] * (len(uses) > 1)
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {' | '.join(parts)}"
