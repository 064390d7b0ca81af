# SPDX-License-Identifier: Apache-2.0
"""The save interval and the goodput of a plan, from the failure rate of a node (--mtbf).

>>> saving = Saving(stall=10.0, restart=120.0, between=3600.0)
>>> round(saving.interval), f"{saving.goodput:.1%}"
(262, '89.7%')
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.checkpoint.interval import best_interval, goodput
from megatron.planner.search import Plan
from megatron.planner.speed import DISK, Cluster
from megatron.planner.startup import groups_of, start_up
from megatron.settings.schema import Config
from megatron.telemetry.figures import seconds

NOTICED = 60.0  # seconds until a failure is noticed and processes start again: assumed


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
    trained, frozen = job.selection.sizes(job.facts.weights)
    nodes = max(1, cluster.world_size // cluster.local_size)
    size = 12 * trained + frozen * job.element  # with optimizer state
    filed = size / nodes / DISK
    stall = size / cluster.world_size / cluster.device.host if config.checkpoint.async_save else filed
    groups = groups_of(layout, job.facts.num_layers, cluster.device.kind == "cuda")
    restart = NOTICED + start_up(groups, cluster.device.kind).total + filed
    return Saving(stall, restart, 3600 * hours / nodes)


def describe(config: Config, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Sentences on saves and failures; none without --mtbf."""
    hours = config.planner.mtbf
    if not hours:
        return
    saving, step = saving_of(config, plan, cluster, hours), plan.step.seconds
    steps = max(1, round(saving.interval / step))
    interval = steps * step
    share = goodput(interval, saving.stall, saving.between, saving.restart)
    nodes = max(1, cluster.world_size // cluster.local_size)
    each = f"{nodes} node{'s' * (nodes > 1)}, of which each fails every {hours:g} h: a failure every"
    yield f"{each} {seconds(saving.between)} (--mtbf)"
    yield (
        f"best: --save-interval {steps}, every {seconds(interval)}; a save stalls {seconds(saving.stall)}, a restart takes "
        f"{seconds(saving.restart)} (assumed)"
    )
    yield f"expected goodput: {share:.1%} of the time, {share / step * 86400:,.0f} steps a day (assumed)"
    yield f"--save-interval auto measures the stalls itself: --mean-time-to-interruption {saving.between / 3600:.3g}"
