# SPDX-License-Identifier: Apache-2.0
"""The save interval and the goodput of a plan, from the failure rate of a node (--mtbf).

>>> saving = Saving(stall=10.0, restart=120.0, between=3600.0)
>>> round(saving.interval), f"{saving.goodput:.1%}"
(262, '89.7%')
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.checkpoint.interval import best_interval, goodput
from megatron.planner.cluster import Cluster
from megatron.planner.plans import Plan
from megatron.planner.startup import groups_of, start_up
from megatron.planner.step_communication import DISK, HOST_MEMORY
from megatron.settings.schema import Config
from megatron.telemetry.figures import seconds

NOTICED = 60.0  # seconds until a failure is noticed and processes start again: assumed
LONGEST = 86400.0  # seconds between two saves on disk beside snapshots in memory


@dataclass(frozen=True)
class Saving:
    """Seconds that a save stalls training, seconds of a restart, and mean seconds between interruptions of the job."""

    stall: float
    restart: float
    between: float

    @property
    def interval(self) -> float:
        """Seconds of training between saves."""
        return best_interval(self.stall, self.between)

    @property
    def goodput(self) -> float:
        return goodput(self.interval, self.stall, self.between, self.restart)


def saving_of(config: Config, plan: Plan, cluster: Cluster, hours: float) -> Saving:
    """The cost of saves and failures of a plan. hours: mean time between failures of a node. The speed of drives is
    assumed; all nodes write together.
    """
    job, layout = plan.job, plan.layout
    nodes, size = cluster.nodes, _state_bytes(plan)
    filed = size / nodes / DISK
    stall = size / cluster.world_size / cluster.device.host if config.checkpoint.async_save else filed
    groups = groups_of(layout, job.facts.num_layers, cluster.device.kind == "cuda")
    restart = NOTICED + start_up(groups, cluster.device.kind).total + filed
    return Saving(stall, restart, 3600 * hours / nodes)


@dataclass(frozen=True)
class SavingInMemory:
    """Snapshots in the memory of nodes, each part also on other nodes (`--replication`), beside saves on the disk.

    A failure of one node goes back to the last snapshot. If the nodes that hold a part's copies fail, too, before the job
    goes on, it goes back to the last save on the disk.

    snapshots: stall, restart and failures with them
    disk:      the same with saves on the disk alone
    lost:      mean seconds between failures that lose a part with its copies
    held:      bytes in the memory of a node, for a moment: two snapshots, with copies
    """

    snapshots: Saving
    disk: Saving
    lost: float
    held: float

    @property
    def disk_interval(self) -> float:
        """Seconds of training between saves on the disk."""
        return min(LONGEST, best_interval(self.disk.stall, self.lost))

    def goodput(self, interval: float) -> float:
        """The share of time for snapshots after each `interval` seconds of training."""
        one = self.snapshots
        saves = self.disk.stall / self.disk_interval
        set_back = (self.disk_interval / 2 + self.disk.restart) / self.lost
        return goodput(interval, one.stall + saves * interval, one.between, one.restart) * max(0.0, 1 - set_back)


def saving_in_memory(config: Config, plan: Plan, cluster: Cluster, hours: float) -> SavingInMemory:
    """The cost of snapshots of a plan, with copies in `--replication-factor` memories, at assumed speeds of memory.

    Training waits while a rank copies its part to its host, its node writes the parts of all its ranks and the copies that
    it holds, and copies travel. A restart reads a node's parts.
    """
    disk, nodes = saving_of(config, plan, cluster, hours), cluster.nodes
    factor = min(config.checkpoint.replication_factor, nodes)
    of_node = _state_bytes(plan) / nodes
    of_rank = of_node / min(cluster.local_size, cluster.world_size)
    stall = (
        of_rank / cluster.device.host + factor * of_node / HOST_MEMORY + (factor - 1) * of_rank / cluster.device.outer
    )
    restart = disk.restart - of_node / DISK + of_node / HOST_MEMORY
    fails = 3600 * hours
    lost = disk.between * (fails / restart) ** (factor - 1)  # the others fail before the job goes on
    return SavingInMemory(Saving(stall, restart, disk.between), disk, lost, 2 * factor * of_node)


def _state_bytes(plan: Plan) -> float:
    """Bytes of weights and optimizer state."""
    trained, frozen = plan.job.selection.sizes(plan.job.facts.weights)
    return 12 * trained + frozen * plan.job.element


def describe(config: Config, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Sentences on saves and failures; none without --mtbf."""
    hours = config.planner.mtbf
    if not hours:
        return
    in_memory, step = saving_in_memory(config, plan, cluster, hours), plan.step.seconds
    saving = in_memory.disk
    steps = max(1, round(saving.interval / step))
    interval = steps * step
    share = goodput(interval, saving.stall, saving.between, saving.restart)
    nodes = cluster.nodes
    each = f"{nodes} node{'s' * (nodes > 1)}, of which each fails every {hours:g} h: a failure every"
    yield f"{each} {seconds(saving.between)} (--mtbf)"
    yield (
        f"best: --save-interval {steps}, every {seconds(interval)}; a save stalls {seconds(saving.stall)}, a restart takes "
        f"{seconds(saving.restart)} (assumed)"
    )
    yield f"expected goodput: {share:.1%} of the time, {share / step * 86400:,.0f} steps a day (assumed)"
    yield f"--save-interval auto measures the stalls itself: --mean-time-to-interruption {saving.between / 3600:.3g}"
    if nodes > 1:
        yield _in_memory(in_memory, step, share)


def _in_memory(saving: SavingInMemory, step: float, without: float) -> str:
    """A sentence on snapshots. step: seconds; without: the goodput without them"""
    steps = max(1, round(saving.snapshots.interval / step))
    share, disk = saving.goodput(steps * step), max(1, round(saving.disk_interval / step))
    return (
        f"with snapshots in the memory of nodes: {share:.1%} ({100 * (share - without):+.1f} points), "
        f"--non-persistent-save-interval {steps} --replication, every {seconds(steps * step)}, and "
        f"--save-interval {disk}; a snapshot stalls {seconds(saving.snapshots.stall)}, a restart takes "
        f"{seconds(saving.snapshots.restart)}, a node holds {saving.held / 1e9:,.0f} GB (assumed)"
    )
