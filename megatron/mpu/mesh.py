# SPDX-License-Identifier: Apache-2.0
"""The grid of ranks with named axes, and its process groups.

`ranks_along` is a pure function: every process group of a 16,384-rank job is an index expression on a rank array, so all of
them can be tested in milliseconds. `Mesh` creates only the groups that this rank belongs to. An axis of size 1 has no
group, and every collective over it is a no-op: there is no separate code path for "parallelism off".

Sixteen ranks with tp 2, pp 4 (Megatron-LM's documented example):

    >>> sizes = dict(pp=4, dp=2, cp=1, tp=2)
    >>> ranks_along(sizes, ["tp"])[:2], ranks_along(sizes, ["dp"])[:2], ranks_along(sizes, ["pp"])[:1]
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 4, 8, 12]])

Experts have their own grid over the same ranks (Megatron-Core's parallel folding): the ranks of a pipeline stage are
dp x cp x tp for dense weights, and expert_dp x ep x etp for experts. Four ranks with tp 2, ep 2, etp 1:

    >>> experts = expert_sizes(dict(pp=1, replicate=2, shard=1, cp=1, tp=2), ep=2, etp=1)
    >>> ranks_along(experts, ["ep"]), ranks_along(experts, ["expert_replicate"])
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Optional

import numpy as np

from megatron.mpu.axis_sizes import ep_levels, ep_library, expert_sizes, sizes_of

AXES = ("pp", "replicate", "shard", "cp", "tp")  # slowest to fastest; replicate x shard = dp
JOINED = {"dp": ("replicate", "shard"), "dp_cp": ("replicate", "shard", "cp"), "world": AXES}
EXPERT_AXES = ("pp", "expert_replicate", "expert_shard", "ep", "etp")  # the same ranks, for experts
EXPERT_DP = EXPERT_AXES[1:3]
CP_LEVELS = ("cp_inner", "cp_outer")  # cp as a grid, inner fastest
EP_LEVELS = ("ep_inner", "ep_outer")  # the same of ep: ranks of a node, and nodes
NAMES = (*AXES, *JOINED, "tied", *EXPERT_AXES[1:], "expert_dp", "ep_counts", *CP_LEVELS, *EP_LEVELS)
# Axes of one purpose share a group if their ranks are the same. The optimizer's axes carry gradients and weights, which
# one thread sends in the same order on all ranks. tp and etp carry the activations of products, one after the other.
# Every other axis has its own group, even if another has the same ranks (cp is dp_cp if dp is 1, tied is pp if pp is 2, ep
# may be tp or cp): a pass blocks on its messages, which would queue after a reduction or another exchange in flight, or
# cross a message between stages that was posted ahead.
SHARING = dict.fromkeys(("replicate", "shard", "dp", "dp_cp", *EXPERT_DP, "expert_dp"), "data parallel")
SHARING |= dict.fromkeys(("tp", "etp"), "tensor parallel")
HALVES = dict(replicate="shard", shard="replicate") | dict(zip(EXPERT_DP, reversed(EXPERT_DP)))


def ranks_along(sizes: dict[str, int], axes) -> list[list[int]]:
    """All lists of ranks that differ only along `axes`. `sizes` is ordered; its last axis varies fastest."""
    names = list(sizes)
    grid = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    keep = [i for i, name in enumerate(names) if name not in axes]
    move = [i for i, name in enumerate(names) if name in axes]
    return grid.transpose(keep + move).reshape(-1, math.prod(grid.shape[i] for i in move)).tolist()


def ranks_of(sizes: dict[str, int], axes, rank: int) -> tuple[int, tuple[int, ...]]:
    """(index in `ranks_along`, ranks) of the list that contains a rank, without creating the others.

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
    """One named axis of the grid for this rank: the ranks along it, this rank's index among them, and their group.

    label: name of the group in messages: "dp group 1" is the second list of ranks that `ranks_along` returns for dp
    ordered: sums over the ranks are those of `ordered_sums.tree_sum`
    """

    name: str
    ranks: tuple[int, ...]
    rank: int = 0
    group: Any = None
    label: str = ""
    ordered: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def alone(self) -> "Axis":
        """An axis of this name with this rank only."""
        return replace(self, ranks=(self.ranks[self.rank],), rank=0, group=None)


class Mesh:
    """The grid of a job and the axes of one rank.

    `mesh.tp`, `mesh.dp`, ... are `Axis` records; constructors receive the one they need and `forward` looks nothing up.
    Context parallel ranks have the same weights and different tokens, as data parallel ranks do. So one of `mesh.shard`
    (shards of weights, gradients or optimizer state) and `mesh.replicate` (copies of the shards) includes cp: `shard` with
    `shard_over_cp`, as in ZeRO, else `replicate`.
    ep, etp: number of ranks of a pipeline stage that have different experts, and parts of each expert, independent of the
    axes of dense weights. `mesh.etp` varies fastest, then `mesh.ep`. Ranks along `mesh.expert_dp` have the same parts of
    the same experts; it is split into `mesh.expert_replicate` and `mesh.expert_shard` as dp and cp are into `replicate`
    and `shard` (`expert_sizes`). With ep 1 and etp = tp these are the same ranks. `mesh.alone` has only this rank.
    If `torch.distributed` is not initialized, the mesh describes a rank without creating groups (planning, tests).
    cp_levels: sizes of `mesh.cp_inner` (consecutive ranks of cp) and `mesh.cp_outer`, for a2a+p2p; None: they have only
    this rank. ep_levels: the same of ep, for tokens that are sent once to a node. `mesh.ep_counts` are the ranks of ep
    again: the numbers of rows need not wait for rows under way.
    ep_library: the library that sends tokens over ep in place of the levels' groups, and its multiprocessors (None: its
    default); `mesh.ep_buffers` has what it keeps for this rank.
    ordered: sums over ranks have one order (--batch-invariant-mode)
    timeout: of collectives of a group (default: torch's, which is not that of the group of all ranks)
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
        etp: Optional[int] = None,
        shard_over_cp: bool = False,
        cp_levels: Optional[Sequence[int]] = None,
        ep_levels: Optional[Sequence[int]] = None,
        ep_library: Optional[tuple[str, Optional[int]]] = None,
        create_groups: Optional[bool] = None,
        timeout: Optional[timedelta] = None,
        ordered: bool = False,
    ):
        self.timeout, self.ordered = timeout, ordered
        self.ep_library, self.ep_buffers = ep_library, {}
        self.sizes = dict(pp=pp, replicate=replicate, shard=shard, cp=cp, tp=tp)
        self.rank, self.world_size = rank, math.prod(self.sizes.values())
        assert shard == 1 or cp == 1 or shard_over_cp, "with cp, ranks that shard over dp alone are not consecutive"
        self.expert_sizes = expert_sizes(self.sizes, ep, etp, shard_over_cp=shard_over_cp)
        with_cp = "shard" if shard_over_cp else "replicate"
        for name in AXES:
            self._set(name, *ranks_of(self.sizes, (name, "cp") if name == with_cp else (name,), rank))
        for name, axes in JOINED.items():
            self._set(name, *ranks_of(self.sizes, axes, rank))
        # First and last stage of each pipeline, which share a tied embedding; other stages are alone.
        number, pipeline = ranks_of(self.sizes, ["pp"], rank)
        ends = (pipeline[0], pipeline[-1])
        self._set("tied", number, ends if pp > 1 and rank in ends else (rank,))
        for name in EXPERT_AXES[1:]:
            self._set(name, *ranks_of(self.expert_sizes, (name,), rank))
        self._set("expert_dp", *ranks_of(self.expert_sizes, EXPERT_DP, rank))
        self.alone = Axis("alone", (rank,))
        self._set("ep_counts", *ranks_of(self.expert_sizes, ("ep",), rank))
        self._set_levels("cp", self.sizes, *(cp_levels or (1, 1)))
        self._set_levels("ep", self.expert_sizes, *(ep_levels or (1, 1)))
        self._stage: Optional[Axis] = None
        self.creates_groups = self.world_size > 1 if create_groups is None else create_groups
        if self.creates_groups:
            self._create_groups()

    def _set(self, name: str, number: int, ranks: tuple[int, ...]) -> None:
        setattr(self, name, Axis(name, ranks, ranks.index(self.rank), None, self._label(name, number), self.ordered))

    def _set_levels(self, axis: str, sizes: dict[str, int], inner: int, outer: int) -> None:
        """The groups of the two levels of an axis, for example (0, 1), (2, 3) and (0, 2), (1, 3) of four ranks."""
        number, ranks = ranks_of(sizes, (axis,), self.rank)
        if inner * outer == 1:
            ranks = (self.rank,)
        own = ranks.index(self.rank)
        at, place = divmod(own, inner)
        self._set(f"{axis}_inner", number * outer + at, ranks[at * inner : at * inner + inner])
        self._set(f"{axis}_outer", number * inner + place, ranks[place::inner])

    def own_groups(self) -> list[tuple[tuple[int, ...], list[str]]]:
        """(ranks, axes that use it) of each group that this rank creates, in order; that of all ranks exists already.

        The existing group is used by the first purpose that has all ranks. A second one (cp or ep of a job that is all data
        parallel) gets its own group of all ranks.
        The order is that of axes, the same on all ranks, and no rank has two groups of one axis. So there is no deadlock:
        of the groups that do not exist yet, one of the first axis always has all its members waiting.
        """
        world = self._names_on_world()
        return [(ranks, names) for ranks, names in self._groups() if not world.issuperset(names)]

    def _groups(self) -> list[tuple[tuple[int, ...], list[str]]]:
        groups: dict[tuple, list[str]] = {}
        for name in NAMES:
            ranks, use = getattr(self, name).ranks, SHARING.get(name, name)
            if name == "ep_counts" and self.in_hops:
                use = "ep"  # over which no rows are sent then
            if len(ranks) > 1 and name != "world":
                groups.setdefault((ranks, use), []).append(name)
        return [(ranks, names) for (ranks, _), names in groups.items()]

    def _names_on_world(self) -> set[str]:
        """The axes that use the group of all ranks: those of one purpose, and those that send nothing in a step."""
        whole = [names for ranks, names in self._groups() if len(ranks) == self.world_size]
        busy = [names for names in whole if self.carries(names)]
        return {"world"}.union(*busy[:1], *(names for names in whole if names not in busy))

    def carries(self, names: list[str]) -> bool:
        """Whether a group of these axes carries messages of a step. Stages of pp use separate channels if one group is not
        enough (NCCL), and the optimizer uses replicate and shard, of dense weights and of experts."""
        by_library = EP_LEVELS if self.ep_library else ()
        return not {"pp", "dp", "dp_cp", "expert_dp", *by_library}.issuperset(names)

    def _create_groups(self) -> None:
        import torch.distributed as dist

        from megatron.mpu.groups import new_group

        for name in self._names_on_world() if self.world_size > 1 else ():
            setattr(self, name, replace(getattr(self, name), group=dist.group.WORLD))
        for ranks, names in self.own_groups():
            label = getattr(self, names[0]).label
            # A communicator takes memory: do not connect if nothing is sent, or only for a tied embedding.
            connect = self.carries(names) and names != ["tied"]
            group = new_group(ranks, label, self.timeout, connect=connect)
            for name in names:
                setattr(self, name, replace(getattr(self, name), group=group))

    def _label(self, name: str, number: int) -> str:
        if name == "world":
            return "all ranks"
        sizes = self.sizes | self.expert_sizes
        whole = "expert_dp" if name in EXPERT_DP else "dp-cp" if name in HALVES and sizes["cp"] > 1 else "dp"
        return f"{whole if sizes.get(HALVES.get(name)) == 1 else name} group {number}"

    def of_whole_model(self) -> "Mesh":
        """The mesh of a second model that this rank shares only with its ranks of tp and cp: they have all of its layers,
        experts and weights. It has no groups of its own."""
        own = copy(self)
        own.ep_library, own.ep_buffers = None, {}
        for name in {*NAMES} - {"tp", "cp", *CP_LEVELS, "world"}:
            setattr(own, name, replace(self.alone, name=name))
        own.etp = replace(self.tp, name="etp")
        own.sizes = dict(pp=1, replicate=1, shard=1, cp=self.cp.size, tp=self.tp.size)
        own.expert_sizes = expert_sizes(own.sizes, 1, None)
        return own

    def release(self) -> None:
        """Release all process groups, which ends their threads.

        A gloo thread that is still finishing its last message when Python exits would abort the process.
        """
        self.ep_buffers.clear()  # which use the groups
        for axis in (*(getattr(self, name) for name in NAMES), *filter(None, [self._stage])):
            object.__setattr__(axis, "group", None)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis, including joined axes; `ep_etp` is that of ep and etp together."""
        coordinates = {name: getattr(self, name).rank for name in NAMES}
        return coordinates | {"ep_etp": self.ep.rank * self.etp.size + self.etp.rank}

    @property
    def in_hops(self) -> bool:
        """Whether tokens go to experts in hops, over the levels of ep."""
        return self.ep_inner.size * self.ep_outer.size > 1

    @property
    def folded(self) -> bool:
        """Whether experts are split differently from dense weights."""
        return self.ep.size > 1 or self.etp.size != self.tp.size

    @property
    def logged_sizes(self) -> dict[str, int]:
        """Axis -> its size, for logs and checkpoints; includes `ep` and `etp` if the mesh is `folded`."""
        return self.sizes | (dict(ep=self.ep.size, etp=self.etp.size) if self.folded else {})

    def stage(self) -> Axis:
        """All ranks of this pipeline stage, with a group of their own, which they create together at the first call: passes
        send over it while gradients are reduced over those of data parallelism.
        """
        if self._stage is None:
            number, ranks = ranks_of(self.sizes, AXES[1:], self.rank)
            self._stage = Axis("stage", ranks, ranks.index(self.rank), None, f"stage group {number}")
            if self.creates_groups and len(ranks) > 1:
                from megatron.mpu.groups import new_group

                group = new_group(ranks, self._stage.label, self.timeout)
                self._stage = replace(self._stage, group=group)
        return self._stage

    def topology(self) -> str:
        """The groups of every axis, one line each."""
        lines = [f"world size {self.world_size} = {_product(self.sizes)}"]
        halves = ("shard", "replicate") if self.sizes["shard"] > 1 < self.sizes["replicate"] else ()
        joined = ("dp_cp",) if self.sizes["cp"] > 1 else ()  # ranks with the same weights
        for name in ("tp", "cp", "dp", *halves, *joined, "pp"):
            lines.append(_groups_line(name, self.sizes, JOINED.get(name, (name,))))
            if name == "cp" and self.cp_inner.size > 1:
                lines += _level_lines(self.sizes, "cp", self.cp_inner.size)
        if self.sizes["pp"] > 1:
            pairs = (f"[{ranks[0]},{ranks[-1]}]" for ranks in ranks_along(self.sizes, ["pp"]))
            lines.append("first and last stages (a tied embedding): " + " ".join(pairs))
        if self.folded:
            sizes = self.expert_sizes
            halves = reversed(EXPERT_DP) if min(sizes[name] for name in EXPERT_DP) > 1 else ()
            lines.append(f"experts: {_product(sizes)}")
            for name in ("etp", "ep", "expert_dp", *halves):
                lines.append(_groups_line(name, sizes, EXPERT_DP if name == "expert_dp" else (name,)))
                if name == "ep" and self.in_hops:
                    lines += _level_lines(sizes, "ep", self.ep_inner.size)
        return "\n".join(lines)


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _groups_line(name: str, sizes: dict[str, int], axes: Sequence[str]) -> str:
    groups = ("[" + ",".join(map(str, ranks)) + "]" for ranks in ranks_along(sizes, axes))
    return f"{name:>3}: {' '.join(groups)}"


def _level_lines(sizes: dict[str, int], axis: str, inner: int) -> list[str]:
    """The lines of the two levels of an axis."""
    divided = {}
    for name, size in sizes.items():
        divided |= {f"{axis}_outer": size // inner, f"{axis}_inner": inner} if name == axis else {name: size}
    return [_groups_line(level, divided, (level,)) for level in (f"{axis}_inner", f"{axis}_outer")]


def mesh_of(parallel, rank: int, world_size: int, local_size: int = 8, **keywords) -> Mesh:
    """The mesh of a rank in a job with these settings (`schema.Parallel`). local_size: ranks of a node; keywords: other
    arguments of `Mesh`.
    """
    experts = dict(ep=parallel.expert_model_parallel_size, etp=parallel.expert_tensor_parallel_size)
    sharded, levels = parallel.sharding_stage > 0, dict(cp_levels=parallel.cp_levels)
    levels["ep_levels"] = ep_levels(parallel, local_size)
    levels["ep_library"] = ep_library(parallel)
    sizes = sizes_of(parallel, world_size)
    keywords = dict(ordered=parallel.batch_invariant_mode, **keywords)
    return Mesh(rank, shard_over_cp=sharded, **levels, **sizes, **experts, **keywords)
