# SPDX-License-Identifier: Apache-2.0
"""Ranks are a grid of named axes.

`ranks_along` is pure: every process group of a 16,384-rank job is an index expression on a rank array, so all of them
can be tested in milliseconds. `Mesh` creates the groups that this rank belongs to, and no others. An axis of size 1 has no
group, and every collective over it is a no-op: there is no other path for "parallelism off".

Sixteen ranks with tp 2, pp 4 (Megatron-LM's documented example):

    >>> sizes = dict(pp=4, dp=2, cp=1, tp=2)
    >>> ranks_along(sizes, ["tp"])[:2], ranks_along(sizes, ["dp"])[:2], ranks_along(sizes, ["pp"])[:1]
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 4, 8, 12]])

Experts have a grid of their own over the same ranks (Megatron-Core's parallel folding): the ranks of a pipeline stage are
dp x cp x tp to dense weights, and expert_dp x ep x etp to experts. Four ranks with tp 2, ep 2, etp 1:

    >>> experts = expert_sizes(dict(pp=1, replicate=2, shard=1, cp=1, tp=2), ep=2, etp=1)
    >>> ranks_along(experts, ["ep"]), ranks_along(experts, ["expert_replicate"])
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Optional

import numpy as np

from megatron.mpu.axis_sizes import expert_sizes, sizes_of

AXES = ("pp", "replicate", "shard", "cp", "tp")  # slowest to fastest; replicate x shard = dp
JOINED = {"dp": ("replicate", "shard"), "dp_cp": ("replicate", "shard", "cp"), "world": AXES}
EXPERT_AXES = ("pp", "expert_replicate", "expert_shard", "ep", "etp")  # the same ranks as experts see them
EXPERT_DP = EXPERT_AXES[1:3]
NAMES = (*AXES, *JOINED, "tied", *EXPERT_AXES[1:], "expert_dp")
# Axes of one purpose share a group where their ranks are the same. What the optimizer's axes carry is gradients and
# weights, which one thread sends in one order on all ranks. tp and etp carry the activations of products, one after the
# other. Any other axis has a group of its own even if its ranks are another's (cp is dp_cp where dp is 1, tied is pp where
# pp is 2, ep may be tp or cp): its messages are waited for in the middle of a pass, and would stand in line behind a
# reduction or another exchange under way, or cross a message between stages that was posted ahead.
SHARING = dict.fromkeys(("replicate", "shard", "dp", "dp_cp", *EXPERT_DP, "expert_dp"), "data parallel")
SHARING |= dict.fromkeys(("tp", "etp"), "tensor parallel")
HALVES = dict(replicate="shard", shard="replicate") | dict(zip(EXPERT_DP, reversed(EXPERT_DP)))


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
    ep, etp: ranks that hold different experts, and parts of each expert, of this pipeline stage's ranks whatever these are
    to dense weights. `mesh.etp` varies fastest, then `mesh.ep`. Along `mesh.expert_dp` ranks hold the same of the same
    experts; `mesh.expert_replicate` and `mesh.expert_shard` divide it as `replicate` and `shard` divide dp and cp
    (`expert_sizes`). With ep 1 and etp = tp these are the same ranks. `mesh.alone` is this rank by itself.
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
        etp: Optional[int] = None,
        shard_over_cp: bool = False,
        create_groups: Optional[bool] = None,
        timeout: Optional[timedelta] = None,
    ):
        self.timeout = timeout
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
        if self.world_size > 1 if create_groups is None else create_groups:
            self._create_groups()

    def _set(self, name: str, number: int, ranks: tuple[int, ...]) -> None:
        setattr(self, name, Axis(name, ranks, ranks.index(self.rank), None, self._label(name, number)))

    def own_groups(self) -> list[tuple[tuple[int, ...], list[str]]]:
        """(ranks, axes that use it) of each group that this rank makes, in order; that of all ranks exists already.

        It serves the first purpose that has all ranks. A second one (cp or ep of a job that is all data parallel) gets a
        group of its own of all ranks.
        The order is that of axes, the same on all ranks, and no rank has two groups of one axis. So nobody waits in a
        circle: of all groups that are not made yet, one of the first axis among them has all its members there.
        """
        world = self._names_on_world()
        return [(ranks, names) for ranks, names in self._groups() if not world.issuperset(names)]

    def _groups(self) -> list[tuple[tuple[int, ...], list[str]]]:
        found: dict[tuple, list[str]] = {}
        for name in NAMES:
            ranks, use = getattr(self, name).ranks, SHARING.get(name, name)
            if len(ranks) > 1 and name != "world":
                found.setdefault((ranks, use), []).append(name)
        return [(ranks, names) for (ranks, _), names in found.items()]

    def _names_on_world(self) -> set[str]:
        """The axes that use the group of all ranks: those of one purpose, and those that send nothing in a step."""
        whole = [names for ranks, names in self._groups() if len(ranks) == self.world_size]
        busy = [names for names in whole if self.carries(names)]
        return {"world"}.union(*busy[:1], *(names for names in whole if names not in busy))

    def carries(self, names: list[str]) -> bool:
        """Whether messages of a step go over a group of these axes. Stages of pp talk over channels where one group of
        them all would not do (NCCL), and the optimizer along replicate and shard, of dense weights and of experts."""
        return not {"pp", "dp", "dp_cp", "expert_dp"}.issuperset(names)

    def _create_groups(self) -> None:
        import torch.distributed as dist

        from megatron.mpu.groups import new_group

        for name in self._names_on_world() if self.world_size > 1 else ():
            setattr(self, name, replace(getattr(self, name), group=dist.group.WORLD))
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
        sizes = self.sizes | self.expert_sizes
        whole = "expert_dp" if name in EXPERT_DP else "dp-cp" if name in HALVES and sizes["cp"] > 1 else "dp"
        return f"{whole if sizes.get(HALVES.get(name)) == 1 else name} group {number}"

    def release(self) -> None:
        """Let go of all process groups, which ends their threads.

        A thread of gloo that is still putting away its last message when Python ends would abort the process.
        """
        for name in NAMES:
            object.__setattr__(getattr(self, name), "group", None)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis, joined axes included; `ep_etp` is that of ep and etp together."""
        found = {name: getattr(self, name).rank for name in NAMES}
        return found | {"ep_etp": self.ep.rank * self.etp.size + self.etp.rank}

    @property
    def folded(self) -> bool:
        """Whether experts are divided in another way than dense weights."""
        return self.ep.size > 1 or self.etp.size != self.tp.size

    @property
    def logged_sizes(self) -> dict[str, int]:
        """Axis -> its size, for logs and checkpoints; `ep` and `etp` where experts are divided in another way."""
        return self.sizes | (dict(ep=self.ep.size, etp=self.etp.size) if self.folded else {})

    def topology(self) -> str:
        """The groups of every axis, one line each."""
        lines = [f"world size {self.world_size} = {_product(self.sizes)}"]
        halves = ("shard", "replicate") if self.sizes["shard"] > 1 < self.sizes["replicate"] else ()
        joined = ("dp_cp",) if self.sizes["cp"] > 1 else ()  # ranks that hold the same weights
        for name in ("tp", "cp", "dp", *halves, *joined, "pp"):
            lines.append(_groups_line(name, self.sizes, JOINED.get(name, (name,))))
        if self.sizes["pp"] > 1:
            pairs = (f"[{ranks[0]},{ranks[-1]}]" for ranks in ranks_along(self.sizes, ["pp"]))
            lines.append("first and last stages (a tied embedding): " + " ".join(pairs))
        if self.folded:
            sizes = self.expert_sizes
            halves = reversed(EXPERT_DP) if min(sizes[name] for name in EXPERT_DP) > 1 else ()
            lines.append(f"experts: {_product(sizes)}")
            for name in ("etp", "ep", "expert_dp", *halves):
                lines.append(_groups_line(name, sizes, EXPERT_DP if name == "expert_dp" else (name,)))
        return "\n".join(lines)


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _groups_line(name: str, sizes: dict[str, int], axes: Sequence[str]) -> str:
    groups = ("[" + ",".join(map(str, ranks)) + "]" for ranks in ranks_along(sizes, axes))
    return f"{name:>3}: {' '.join(groups)}"


def mesh_of(parallel, rank: int, world_size: int, **keywords) -> Mesh:
    """The mesh of a job with these settings (`schema.Parallel`), seen from a rank. keywords: further ones of `Mesh`."""
    experts = dict(ep=parallel.expert_model_parallel_size, etp=parallel.expert_tensor_parallel_size)
    sharded = parallel.sharding_stage > 0
    return Mesh(rank, shard_over_cp=sharded, **sizes_of(parallel, world_size), **experts, **keywords)
