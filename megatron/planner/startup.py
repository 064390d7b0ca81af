# SPDX-License-Identifier: Apache-2.0
"""The process groups of a job, counted without creating any, and an estimate of the time until they are ready.

The counts are exact: the groups that `Mesh` and `open_channels` create (tests/mpu/test_groups.py counts them in a run).
Seconds come from a model. Its CPU figures were measured (`benchmarks/startup.py`, machine in docs/launching.md). Its NCCL
figures were not measured: they come from reports of users.
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
    """The process groups of a job, without the group of all ranks.

    axes:      purpose of a group -> (groups in the job, ranks of each)
    channels:  per pipeline rank: channels that it sends or receives on; empty if messages need no group (gloo)
    pipelines: in the job
    silent:    groups of `axes` without a communicator
    """

    world_size: int
    axes: dict[str, tuple[int, int]]
    channels: tuple[int, ...] = ()
    pipelines: int = 1
    silent: tuple[str, ...] = ()

    @property
    def pp(self) -> int:
        """Ranks per pipeline."""
        return self.world_size // self.pipelines

    def of_rank(self, stage: int) -> int:
        """Groups that a pipeline rank creates: its calls of `new_group`."""
        return sum(self._has(name, stage) for name in self.axes) + self._channels(stage)

    def communicators(self, stage: int) -> list[int]:
        """Ranks of each NCCL communicator of a pipeline rank, first the communicator of all ranks; a channel has two."""
        if self.world_size == 1:
            return []
        talk = [size for name, (_, size) in self.axes.items() if name not in self.silent and self._has(name, stage)]
        return [self.world_size, *talk, *[2] * self._channels(stage)]

    @property
    def most(self) -> int:
        """Groups of the rank that creates the most."""
        return max(map(self.of_rank, range(self.pp)))

    @property
    def in_job(self) -> int:
        """Number of different groups in the whole job."""
        return sum(number for number, _ in self.axes.values()) + self.pipelines * sum(self.channels) // 2

    def _has(self, name: str, stage: int) -> bool:
        return name != "tied" or stage in (0, self.pp - 1)

    def _channels(self, stage: int) -> int:
        return self.channels[stage] if self.channels else 0


def count(mesh: Mesh, stages: StageMap = (), nccl: bool = True) -> Groups:
    """The groups of a job, from its first rank, which is in one group of every axis. stages: of its pipeline."""
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
    experts = dict(ep=layout.ep, etp=layout.etp)
    more = dict(
        shard_over_cp=layout.zero > 0, cp_levels=layout.cp_levels, ep_levels=layout.ep_levels, create_groups=False
    )
    mesh = Mesh(**layout.dense_sizes, **experts, **more)
    return count(mesh, layout.pipeline(num_layers).stages, nccl)


# Measured on two cores, torch 2.13 (benchmarks/startup.py): operations per second of one TCP store; seconds of a
# connection to it, and the additional time of the slowest, because torch retries after five; seconds of a gloo message to
# each other member of a group when it is created, with sixteen ranks per core.
STORE_RATE, CONNECTION, LATE, GLOO_MEMBER = 30_000, 0.5e-3, 5.0, 0.016
JOINING = 4  # store operations of a rank that joins
# Until a rank has imported its modules: on this CPU measured; with a CUDA context and libraries on a file system shared by
# many nodes, assumed.
PROCESS = dict(cpu=5.0, cuda=20.0)
# NCCL communicators, assumed: 2.5 s (nccl#1646, eight ranks, kernels already loaded) to 6 s (nccl#534), and a
# ring of all members, which takes 2.5 minutes at "thousands" of GPUs (nccl#1156), most of it for other work.
COMMUNICATOR, RING_MEMBER, PAIR = 3.0, 1e-3, 0.5


@dataclass(frozen=True)
class StartUp:
    """Seconds from the start of the processes until all groups are ready, without data and checkpoint."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def waited(self) -> float:
        """The longest time that a rank may wait for another one. --distributed-timeout-minutes must exceed it. Assumes that
        one rank starts twice as slowly as the others, and that all ranks query the store together.
        """
        return self.parts["processes"] + self.parts["rendezvous"] + self.parts["groups"]


def start_up(groups: Groups, kind: str) -> StartUp:
    """Estimate the start-up time. kind: of device, "cuda" or "cpu"."""
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
    keys = world * len(fullest) / STORE_RATE  # each member reads its communicator's id from the same server
    parts["groups"] = keys + sum(COMMUNICATOR + size * RING_MEMBER for size in collective)
    parts["channels"] = pairs * PAIR
    return StartUp(parts)


def describe_groups(groups: Groups, device: Device, buffers: int = 0) -> Iterator[str]:
    """Groups and start-up in sentences. buffers: predicted communication buffers of the fullest rank, bytes."""
    if groups.world_size == 1:
        return
    estimate, nccl, most = start_up(groups, device.kind), device.kind == "cuda", max(groups.channels, default=0)
    each = f"groups: {groups.most} per rank in addition to that of all ranks, {groups.in_job:,} in the job"
    each += f", including {several(most, 'channel')} per rank between stages" if most else ""
    if nccl:
        communicators = max(len(groups.communicators(stage)) for stage in range(groups.pp))
        each += f"; {communicators} NCCL communicators per rank, for which {size(buffers)} are assumed"
    yield each
    basis = "assumed" if nccl or device.assumed else "measured elsewhere"
    yield f"start-up: groups are ready after about {estimate.total:,.0f} s (a model, {basis})"
    parts = ", ".join(f"{name} {value:,.0f} s" for name, value in estimate.parts.items() if value >= 0.5)
    yield f"  {parts} ({basis})"
    yield "  without data and checkpoint"


def slow_start(config: Config, layout: Layout, kind: str) -> str:
    """A note if ranks may wait longer for each other at the start than --distributed-timeout-minutes; else ""."""
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
