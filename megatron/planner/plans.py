# SPDX-License-Identifier: Apache-2.0
"""Plans of a search: which are among the best, and the simplest of them (`search`)."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Optional

from megatron.planner.layout import Job, Layout
from megatron.planner.speed import StepTime
from megatron.telemetry.figures import size

SIMPLE = 20  # number of fastest plans to keep for each number of features


@dataclass(frozen=True)
class Plan:
    """A layout with its memory and time."""

    layout: Layout
    job: Job
    step: StepTime
    bytes: int  # of the fullest pipeline rank
    rank: int  # the fullest pipeline rank

    @property
    def per_sample(self) -> float:
        return self.step.seconds / self.job.global_batch

    @property
    def order(self) -> tuple:
        """The sort key: least time per sample first, then fewest features, then least memory."""
        lay = self.layout
        return (round(self.per_sample, 12), lay.offload, lay.zero, lay.tp * lay.cp * lay.pp, lay.chunks, self.bytes)


def features(layout: Layout) -> int:
    """The number of features of a layout that plain data parallelism does not need."""
    axes = (layout.tp > 1) + (layout.cp > 1) + (layout.pp > 1) + (layout.schedule != "1f1b")
    axes += layout.cp_levels is not None
    axes += layout.stage_layers is not None and len(set(layout.stage_layers.split(","))) > 1
    again = layout.recompute
    given = (again.recompute_granularity, again.recompute_modules, again.no_recompute_layers)
    recomputing = sum(setting is not None for setting in given)
    return axes + recomputing + state_features(layout.zero, layout.shard, layout.weight_ranks, layout.offload)


def state_features(zero: int, shard: int, weight_ranks: int, offload: float) -> int:
    return min(zero, 2) + (zero > 0 and shard != weight_ranks) + 2 * (offload > 0)


MOST_STATE_FEATURES = state_features(3, 2, 4, 1.0)


def simplest(plans: Sequence[Plan], tolerance: float) -> tuple[Plan, int]:
    """The simplest plan that is as fast as the fastest within the tolerance, at the same batch: without offload, then with
    the fewest features and the most free memory. Also returns the number of plans that are as fast.
    """
    fastest = min(plans, key=lambda plan: plan.order)
    most, batch = fastest.per_sample * (1 + tolerance), fastest.job.global_batch
    alike = [plan for plan in plans if plan.per_sample <= most and plan.job.global_batch == batch]
    best = min(alike, key=lambda plan: (plan.layout.offload > 0, features(plan.layout), plan.bytes, plan.order))
    return best, len(alike)


@dataclass(frozen=True)
class Rejected:
    """A layout that does not fit, by how many bytes, and where."""

    layout: Layout
    over: int
    rank: int
    host: bool = False

    def why(self) -> str:
        where = "in the host's memory" if self.host else f"on pipeline rank {self.rank}"
        return f"out of memory by {size(self.over)} {where}"


@dataclass
class SearchedPlans:
    """The result of a search: the chosen plan and others from fast to slow, the closest rejected layouts, and impossible
    sizes. alike: plans that are as fast as the fastest, within the tolerance. evaluated: of `num_layouts`; the others are
    slower by their work alone. too_large: of these, how many do not fit
    """

    plans: list[Plan] = field(default_factory=list)
    fastest: Optional[Plan] = None
    alike: int = 1
    rejected: list[Rejected] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    num_layouts: int = 0
    evaluated: int = 0
    too_large: int = 0


def best_first(plans: Iterable[Plan]) -> list[Plan]:
    """Sort plans from best to worst."""
    return sorted(plans, key=lambda plan: plan.order)


def different_plans(plans: list[Plan]) -> list[Plan]:
    """The best plan of each set that differs only in sharding degree or recomputation."""
    seen: dict[tuple, Plan] = {}
    for plan in plans:
        lay = plan.layout
        seen.setdefault(
            (
                lay.tp,
                lay.cp,
                lay.cp_heads,
                lay.gathers,
                lay.pp,
                lay.sp,
                lay.micro_batch_size,
                lay.chunks,
                lay.schedule,
                lay.zero,
                lay.offload,
            ),
            plan,
        )
    return list(seen.values())


class Shortlist:
    """The `size` entries with the lowest costs. Entries are the inputs of a plan, because building plans is slow."""

    def __init__(self, size: int):
        self.size, self.heap, self.limit, self.count = size, [], float("inf"), 0

    def offer(self, cost: float, *entry) -> None:
        self.count += 1
        heapq.heappush(self.heap, (-cost, self.count, entry))
        if len(self.heap) > self.size:
            heapq.heappop(self.heap)
            self.limit = -self.heap[0][0]

    def entries(self) -> list[tuple]:
        return [entry for _, _, entry in sorted(self.heap, reverse=True)]


class Fastest:
    """The fastest plans, and the fastest for each number of features: simpler plans may be as fast within the tolerance."""

    def __init__(self, size: int, tolerance: float):
        self.all, self.by_features, self.tolerance, self.best = Shortlist(size), {}, tolerance, float("inf")

    @property
    def worst(self) -> float:
        """The cost above which no plan is kept."""
        return max(self.all.limit, self.best * (1 + self.tolerance))

    def limit(self, *counts: int) -> float:
        """The cost above which a plan with one of these numbers of features is dropped."""
        most = self.best * (1 + self.tolerance)
        if self.all.limit >= most:
            return self.all.limit
        return max(self.all.limit, min(most, max(self._simple(count).limit for count in counts)))

    def offer(self, count: int, cost: float, *entry) -> None:
        self.best = min(self.best, cost)
        self.all.offer(cost, *entry)
        self._simple(count).offer(cost, *entry)

    def _simple(self, count: int) -> Shortlist:
        return self.by_features.setdefault(count, Shortlist(SIMPLE))

    def entries(self) -> list[tuple]:
        entries = self.all.entries() + [one for few in self.by_features.values() for one in few.entries()]
        return list({(entry[0], entry[1].global_batch): entry for entry in entries}.values())
