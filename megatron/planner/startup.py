# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks of a job, counted without making any, and how long it takes until they are there.

The counts are exact: what `Mesh` and `open_channels` make (tests/mpu/test_groups.py counts them in a run). Seconds are
a model. Of it, what a CPU has was measured (`benchmarks/startup.py`, docs/launching.md says on what); what NCCL does was
not: its figures are what users of it reported.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.mpu.mesh import Mesh
from megatron.pipeline.channels import channels
from megatron.pipeline.schedule import StageMap
from megatron.planner.device import Device
from megatron.planner.layout import Layout
from megatron.settings.schema import Config
from megatron.telemetry.figures import several, size


@dataclass(frozen=True)
class Groups:
    """Groups of ranks that a job makes beside that of all ranks.

    axes:      what a group is for -> (groups of the job, ranks of each)
    channels:  of a pipeline rank -> channels that it sends or receives on; empty where messages need no group (gloo)
    pipelines: of the job
    silent:    of `axes`, those without a communicator
    """

    world_size: int
    axes: dict[str, tuple[int, int]]
    channels: tuple[int, ...] = ()
    pipelines: int = 1
    silent: tuple[str, ...] = ()

    @property
    def pp(self) -> int:
        """Ranks of a pipeline."""
        return self.world_size // self.pipelines

    def of_rank(self, stage: int) -> int:
        """Groups that a pipeline rank makes, the number of calls of `new_group`."""
        return sum(self._has(name, stage) for name in self.axes) + self._channels(stage)

    def communicators(self, stage: int) -> list[int]:
        """Ranks of each communicator that a pipeline rank has with NCCL, that of all ranks first; channels have two."""
        if self.world_size == 1:
            return []
        talk = [size for name, (_, size) in self.axes.items() if name not in self.silent and self._has(name, stage)]
        return [self.world_size, *talk, *[2] * self._channels(stage)]

    @property
    def most(self) -> int:
        """Groups of the rank that makes the most."""
        return max(map(self.of_rank, range(self.pp)))

    @property
    def in_job(self) -> int:
        """Different groups of the whole job."""
        return sum(number for number, _ in self.axes.values()) + self.pipelines * sum(self.channels) // 2

    def _has(self, name: str, stage: int) -> bool:
        return name != "tied" or stage in (0, self.pp - 1)

    def _channels(self, stage: int) -> int:
        return self.channels[stage] if self.channels else 0


def count(mesh: Mesh, stages: StageMap = (), nccl: bool = True) -> Groups:
    """The groups of a job, seen from its first rank, which is in one group of every axis. stages: of its pipeline."""
    world, pp = mesh.world_size, mesh.pp.size
    axes = {}
    for ranks, names in mesh.own_groups():
        number = world // pp if names[0] == "tied" else world // len(ranks)
        axes[names[0]] = number, len(ranks)
    ends = Counter(rank for _, source, target in channels(stages) for rank in (source, target)) if nccl else {}
    silent = tuple(names[0] for _, names in mesh.own_groups() if not mesh.carries(names))
    return Groups(world, axes, tuple(ends[rank] for rank in range(pp)) if ends else (), world // pp, silent)


def groups_of(layout: Layout, num_layers: int, nccl: bool) -> Groups:
    """The groups of a layout."""
    shard = layout.shard // layout.cp if layout.zero else 1
    mesh = Mesh(
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        replicate=layout.dp // shard,
        shard=shard,
        shard_over_cp=layout.zero > 0,
        create_groups=False,
    )
    return count(mesh, layout.pipeline(num_layers).stages, nccl)


# Measured on two cores, torch 2.13 (benchmarks/startup.py): operations a second that one TCP store answers; seconds of a
# connection to it, and how much longer the slowest takes, since torch tries again after five; of a message of gloo's to
# each other member of a group when it is made, sixteen ranks a core.
STORE_RATE, CONNECTION, LATE, GLOO_MEMBER = 30_000, 0.5e-3, 5.0, 0.016
JOINING = 4  # operations of a rank that joins
# Until a rank has imported what it needs: on this CPU measured; with a CUDA context and libraries on a file system that
# many nodes share, assumed.
PROCESS = dict(cpu=5.0, cuda=20.0)
# Of a communicator of NCCL's, assumed: 2.5 s (nccl#1646, eight ranks, kernels loaded before) to 6 s (nccl#534), and a
# ring of all members, in which 2.5 minutes pass at "thousands" of GPUs (nccl#1156), most of it in other things.
COMMUNICATOR, RING_MEMBER, PAIR = 3.0, 1e-3, 0.5


@dataclass(frozen=True)
class StartUp:
    """Seconds from the start of the processes until all groups can be used; data and checkpoint come on top."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def waited(self) -> float:
        """The longest that a rank may wait for another meanwhile, which --distributed-timeout-minutes bounds: one rank
        starts twice as slowly as the others, and the store is asked by all at once."""
        return self.parts["processes"] + self.parts["rendezvous"] + self.parts["groups"]


def start_up(groups: Groups, kind: str) -> StartUp:
    """The model. kind: of device, "cuda" or "cpu"."""
    world = groups.world_size
    parts = dict(processes=PROCESS[kind], rendezvous=0.0, groups=0.0, channels=0.0)
    if world == 1:
        return StartUp(parts)
    parts["rendezvous"] = LATE + world * (CONNECTION + JOINING / STORE_RATE)
    if kind == "cpu":
        members = world + sum(size for _, size in groups.axes.values())
        parts["groups"] = members * GLOO_MEMBER
        return StartUp(parts)
    fullest = max((groups.communicators(stage) for stage in range(groups.pp)), key=len)
    collective = [size for size in fullest if size > 2 or size == world]
    pairs = len(fullest) - len(collective)
    keys = world * len(fullest) / STORE_RATE  # each member reads its communicator's id, all of one server
    parts["groups"] = keys + sum(COMMUNICATOR + size * RING_MEMBER for size in collective)
    parts["channels"] = pairs * PAIR
    return StartUp(parts)


def told(groups: Groups, device: Device, buffers: int = 0) -> Iterator[str]:
    """Groups and start-up in sentences. buffers: bytes that the memory ledger has for communication on the fullest rank."""
    if groups.world_size == 1:
        return
    found, nccl, most = start_up(groups, device.kind), device.kind == "cuda", max(groups.channels, default=0)
    each = f"groups: {groups.most} a rank beside that of all ranks, {groups.in_job:,} in the job"
    each += f", {several(most, 'channel')} of a rank between stages among them" if most else ""
    if nccl:
        communicators = max(len(groups.communicators(stage)) for stage in range(groups.pp))
        each += f"; {communicators} NCCL communicators a rank, for which {size(buffers)} are assumed"
    yield each
    basis = "assumed" if nccl or device.assumed else "measured elsewhere"
    yield f"start-up: groups can be used after about {found.total:,.0f} s (a model, {basis})"
    parts = ", ".join(f"{name} {value:,.0f} s" for name, value in found.parts.items() if value >= 0.5)
    yield f"  {parts} ({basis})"
    yield "  data and checkpoint come on top"


def slow_start(config: Config, layout: Layout, kind: str) -> str:
    """What to say of --distributed-timeout-minutes if ranks may well wait longer for each other at the start; "" if not."""
    groups, minutes = (
        groups_of(layout, config.model.num_layers, kind == "cuda"),
        config.parallel.distributed_timeout_minutes,
    )
    waited = start_up(groups, kind).waited
    if groups.world_size == 1 or 60 * minutes >= waited:
        return ""
    flag, enough = f"--distributed-timeout-minutes {minutes:g}", math.ceil(waited / 30) / 2
    wait = f"at the start ranks may wait {waited:,.0f} s for each other (assumed)"
    return f"{wait}, longer than {flag}: raise it to {enough:g}"
