# SPDX-License-Identifier: Apache-2.0
"""Ranks are a grid of named axes.

`ranks_along` is pure: every process group of a 16,384-rank job is an index expression on a rank array, so all of them
can be tested in milliseconds. `Mesh` creates the groups that this rank belongs to, and no others. An axis of size 1 has no
group, and every collective over it is a no-op: there is no other path for "parallelism off".

Sixteen ranks with tp 2, pp 4 (Megatron-LM's documented example):

    >>> sizes = dict(pp=4, dp=2, cp=1, tp=2)
    >>> ranks_along(sizes, ["tp"])[:2], ranks_along(sizes, ["dp"])[:2], ranks_along(sizes, ["pp"])[:1]
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 4, 8, 12]])
"""

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Optional

import numpy as np

AXES = ("pp", "replicate", "shard", "cp", "tp")  # slowest to fastest; replicate x shard = dp
JOINED = {"dp": ("replicate", "shard"), "dp_cp": ("replicate", "shard", "cp"), "world": AXES}
NAMES = (*AXES, *JOINED, "tied", "ep", "expert_dp")
# Axes that share one group where their ranks are the same: what they carry is gradients and weights of the optimizer's, and
# one thread sends it in one order on all ranks. Any other axis has a group of its own even if its ranks are another's
# (cp is dp_cp where dp is 1, tied is pp where pp is 2): its messages are waited for in the middle of a pass, and would
# stand in line behind a reduction under way, or cross a message between stages that was posted ahead.
SHARING = ("replicate", "shard", "dp", "dp_cp", "expert_dp")


def ranks_along(sizes: dict[str, int], axes) -> list[list[int]]:
    """All rank lists that vary over `axes` and agree elsewhere. `sizes` is ordered, its last axis the fastest."""
    names = list(sizes)
    grid = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    keep = [i for i, name in enumerate(names) if name not in axes]
    move = [i for i, name in enumerate(names) if name in axes]
    return grid.transpose(keep + move).reshape(-1, math.prod(grid.shape[i] for i in move)).tolist()


def ranks_of(sizes: dict[str, int], axes, rank: int) -> tuple[int, tuple[int, ...]]:
    """(number in `ranks_along`, ranks) of the list that a rank is in, without making the others.

    >>> ranks_of(dict(pp=4, dp=2, cp=1, tp=2), ["dp"], 6)
    (2, (4, 6))
    """
    shape, kept = list(sizes.values()), [name not in axes for name in sizes]
    place = np.unravel_index(rank, shape)
    grid = np.arange(math.prod(shape)).reshape(shape)
    number = 0
    for size, at, keep in zip(shape, place, kept):
        number = number * size + int(at) if keep else number
    return number, tuple(grid[tuple(at if keep else slice(None) for at, keep in zip(place, kept))].ravel().tolist())


@dataclass(frozen=True)
class Axis:
    """One named axis of the grid as this rank sees it: its ranks, this rank's place among them, their group.

    label: what people call the group: "dp group 1" is the second of the lists of ranks that `ranks_along` gives for dp
    """

    name: str
    ranks: tuple[int, ...]
    rank: int = 0
    group: Any = None
    label: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mesh:
    """The grid of a job and the axes of one rank.

    `mesh.tp`, `mesh.dp`, ... are `Axis` records; constructors receive the one they need and `forward` looks nothing up.
    Ranks of context parallelism hold the same weights and see other tokens, as data parallel ones do. So `mesh.shard`,
    whose ranks divide weights, gradients or optimizer state, and `mesh.replicate`, along which are copies of the shards,
    have cp in one of them: in `shard` with `shard_over_cp`, as ZeRO has it, else in `replicate`.
    ep: ranks of data parallelism that hold different experts; `mesh.ep` varies fastest within dp, and along
    `mesh.expert_dp` ranks hold the same experts. `mesh.alone` is this rank by itself.
    Without `torch.distributed` initialised the mesh describes a rank without creating groups (planning, tests).
    timeout: after which a group gives up a silent rank (default: torch's, which is not that of the whole job's group)
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        tp=1,
        cp=1,
        pp=1,
        replicate=1,
        shard=1,
        ep=1,
        shard_over_cp: bool = False,
        create_groups: Optional[bool] = None,
        timeout: Optional[timedelta] = None,
    ):
        self.timeout = timeout
        self.sizes = dict(pp=pp, replicate=replicate, shard=shard, cp=cp, tp=tp)
        self.rank, self.world_size = rank, math.prod(self.sizes.values())
        with_cp = "shard" if shard_over_cp else "replicate"
        for name in AXES:
            self._set(name, *ranks_of(self.sizes, (name, "cp") if name == with_cp else (name,), rank))
        for name, axes in JOINED.items():
            self._set(name, *ranks_of(self.sizes, axes, rank))
        # First and last stage of each pipeline, which share a tied embedding; other stages are alone.
        number, pipeline = ranks_of(self.sizes, ["pp"], rank)
        ends = (pipeline[0], pipeline[-1])
        self._set("tied", number, ends if pp > 1 and rank in ends else (rank,))
        view = dict(pp=pp, expert_dp=replicate * shard // ep, ep=ep, cp=cp, tp=tp)  # of the same grid of ranks
        assert math.prod(view.values()) == self.world_size, f"ep {ep} does not divide dp {replicate * shard}"
        for name in ("expert_dp", "ep") if ep > 1 else ():
            self._set(name, *ranks_of(view, (name, "cp") if name == "expert_dp" else (name,), rank))
        self.alone = Axis("alone", (rank,))
        if ep == 1:  # every rank holds all experts
            self.ep, self.expert_dp = replace(self.alone, name="ep"), replace(self.dp_cp, name="expert_dp")
        if self.world_size > 1 if create_groups is None else create_groups:
            self._create_groups()

    def _set(self, name: str, number: int, ranks: tuple[int, ...]) -> None:
        setattr(self, name, Axis(name, ranks, ranks.index(self.rank), None, self._label(name, number)))

    def own_groups(self) -> list[tuple[tuple[int, ...], list[str]]]:
        """(ranks, axes that use it) of each group that this rank makes, in order; that of all ranks is there already.

        The order is that of axes, the same on all ranks, and no rank has two groups of one axis. So nobody waits in a
        circle: of all groups that are not made yet, one of the first axis among them has all its members there.
        """
        found: dict[tuple, list[str]] = {}
        for name in NAMES:
            ranks, use = getattr(self, name).ranks, "data parallel" if name in SHARING else name
            if 1 < len(ranks) < self.world_size:
                found.setdefault((ranks, use), []).append(name)
        return [(ranks, names) for (ranks, _), names in found.items()]

    def carries(self, names: list[str]) -> bool:
        """Whether messages of a step go over a group of these axes. Stages of pp talk over channels where one group of
        them all would not do (NCCL), and the optimizer along replicate and shard."""
        return not {"pp", "dp", "dp_cp", *["expert_dp"] * (self.ep.size == 1)}.issuperset(names)

    def _create_groups(self) -> None:
        import torch.distributed as dist

        from megatron.mpu.groups import new_group

        for name in NAMES:
            axis = getattr(self, name)
            if axis.size == self.world_size > 1:
                setattr(self, name, replace(axis, group=dist.group.WORLD))
        for ranks, names in self.own_groups():
            label = getattr(self, names[0]).label
            # A communicator takes memory: none where nothing is sent, or only if an embedding is tied.
            connect = self.carries(names) and names != ["tied"]
            group = new_group(ranks, label, self.timeout, connect=connect)
            for name in names:
                setattr(self, name, replace(getattr(self, name), group=group))

    def _label(self, name: str, number: int) -> str:
        if name == "world":
            return "all ranks"
        halves = dict(replicate="shard", shard="replicate")  # of data parallel: one alone is all of it
        cp = "-cp" if name in halves and self.sizes["cp"] > 1 else ""
        return f"{'dp' + cp if self.sizes.get(halves.get(name)) == 1 else name} group {number}"

    def release(self) -> None:
        """Let go of all process groups, which ends their threads.

        A thread of gloo that is still putting away its last message when Python ends would abort the process.
        """
        for name in NAMES:
            object.__setattr__(getattr(self, name), "group", None)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis, joined axes included."""
        return {name: getattr(self, name).rank for name in NAMES}

    def topology(self) -> str:
        """The groups of every axis, one line each."""
        lines = [f"world size {self.world_size} = " + " x ".join(f"{n} {s}" for n, s in self.sizes.items())]
        halves = ("shard", "replicate") if self.sizes["shard"] > 1 < self.sizes["replicate"] else ()
        joined = ("dp_cp",) if self.sizes["cp"] > 1 else ()  # ranks that hold the same weights
        for name in ("tp", "cp", "dp", *halves, *joined, "pp"):
            groups = ranks_along(self.sizes, JOINED.get(name, (name,)))
            lines.append(f"{name:>3}: " + " ".join("[" + ",".join(map(str, ranks)) + "]" for ranks in groups))
        if self.sizes["pp"] > 1:
            pairs = (f"[{ranks[0]},{ranks[-1]}]" for ranks in ranks_along(self.sizes, ["pp"]))
            lines.append("first and last stages (a tied embedding): " + " ".join(pairs))
        return "\n".join(lines)


def sizes_of(parallel, world_size: int) -> dict[str, int]:
    """Sizes of the axes of a job with these settings (`schema.Parallel`) on `world_size` ranks."""
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    dp = world_size // (tp * pp * cp)
    shard = 1 if parallel.sharding_stage == 0 else parallel.sharding_degree or dp
    return dict(tp=tp, pp=pp, cp=cp, replicate=dp // shard, shard=shard)


def mesh_of(parallel, rank: int, world_size: int, **keywords) -> Mesh:
    """The mesh of a job with these settings (`schema.Parallel`), seen from a rank. keywords: further ones of `Mesh`."""
    return Mesh(rank, shard_over_cp=parallel.sharding_stage > 0, **sizes_of(parallel, world_size), **keywords)
