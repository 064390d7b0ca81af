# SPDX-License-Identifier: Apache-2.0
"""Simulate, verify and measure a pipeline schedule before a run. No torch, no processes.

A *plan* is the list of op lists of all ranks, the same lists that `execute.py` runs.

    >>> plan = make_rank_schedules("1f1b", pp=4, num_microbatches=8)
    >>> verify(plan, num_microbatches=8)
    >>> result = report(plan)
    >>> round(result.bubble, 4) == round(3 / (8 + 3), 4), result.live
    (True, (4, 3, 2, 1))
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Optional, Union

from megatron.pipeline.schedule import Op, StageMap, dependencies, looped, make_schedule
from megatron.pipeline.sharding import COMMUNICATION, RankStreams, Sharding

COST = dict(F=1.0, B=2.0, I=1.0, W=1.0)  # a backward pass takes twice as long as a forward pass
KINDS = ({"F"}, {"F", "B"}, {"F", "I", "W"})

Cost = Union[Mapping[str, float], Callable[[int, Op], float]]  # time by kind of op, or of any (rank, op)

RankSchedules = list[list[Op]]
Times = dict[tuple[int, Op], tuple[float, float]]


class BrokenSchedule(ValueError):
    """A schedule that would hang, repeat or omit ops, or mix up its messages. `rank`: of the first error, if known"""

    def __init__(self, text: str, rank: Optional[int] = None):
        super().__init__(text)
        self.rank = rank


def make_rank_schedules(name: str, pp: int, num_microbatches: int, chunks: Optional[int] = None) -> RankSchedules:
    """The schedule of every rank."""
    return [make_schedule(name, rank, pp, num_microbatches, chunks) for rank in range(pp)]


# -- simulate --------------------------------------------------------------------------------------------------------


def simulate(
    plan: RankSchedules,
    stages: Optional[StageMap] = None,
    cost: Optional[Cost] = None,
    message_time: float = 0.0,
    sharding: Optional[Sharding] = None,
) -> Times:
    """Simulate a plan: (rank, op) -> (start, end).

    stages: map of stages (default `looped`). cost: time of an op. message_time: time of a message. sharding: also simulate
    gathers and reductions of ZeRO and the update, as ops of kinds G, GB, R and U (`pipeline/sharding.py`). Sending never
    waits. Raises BrokenSchedule in a deadlock, with the op of each rank and the ops it waits for.
    """
    stages, cost = stages or _looped_for(plan), cost or COST
    time_of = cost if callable(cost) else lambda rank, op: cost[op.kind]
    waits = [[dependencies(op, rank, stages) for op in ops] for rank, ops in enumerate(plan)]
    times: Times = {}
    done = times if sharding is None else {}  # pass -> (start, when its dependents may start)
    lanes = [RankStreams(rank, ops, sharding, times) for rank, ops in enumerate(plan)] if sharding else None
    clock, at = [0.0] * len(plan), [0] * len(plan)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(plan):
            while at[rank] < len(ops) and all(need in done for need in waits[rank][at[rank]]):
                arrivals = [done[need][1] + message_time * (need[0] != rank) for need in waits[rank][at[rank]]]
                start = max([clock[rank], *arrivals])
                op = ops[at[rank]]
                took = time_of(rank, op)
                clock[rank] = lanes[rank].run(op, start, took) if lanes else start + took
                done[rank, op] = (start, clock[rank])
                at[rank] += 1
                moved = True
    stuck = [rank for rank, ops in enumerate(plan) if at[rank] < len(ops)]
    if stuck:
        where = "; ".join(_stuck_on(rank, plan, at, waits, done) for rank in stuck)
        raise BrokenSchedule(f"deadlock: {where}", stuck[0])
    if sharding and sharding.update:
        last = max((end for _, end in times.values()), default=0.0)
        times |= {(rank, Op("U", 0)): (last, last + sharding.update) for rank in range(len(plan))}
    return times


def _stuck_on(rank: int, plan: RankSchedules, at: list[int], waits: list, times: Times) -> str:
    missing = [f"{op} of rank {source}" for source, op in waits[rank][at[rank]] if (source, op) not in times]
    return f"rank {rank} is stuck on {plan[rank][at[rank]]}, waiting for {' and '.join(missing)}"


def _looped_for(plan: RankSchedules) -> StageMap:
    return looped(len(plan), 1 + max((op.chunk for ops in plan for op in ops), default=0))


# -- verify ----------------------------------------------------------------------------------------------------------


def verify(plan: RankSchedules, num_microbatches: int, stages: Optional[StageMap] = None) -> None:
    """Prove that a plan is correct, or raise BrokenSchedule with the error.

    Each kind of pass does every (micro, chunk) exactly once; no rank waits forever; every directed channel between two
    ranks delivers in the order in which it is read, so that messages need no tags.
    """
    stages = stages or _looped_for(plan)
    _verify_complete(plan, num_microbatches, stages)
    simulate(plan, stages)
    _verify_channels(plan, stages)


def _verify_complete(plan: RankSchedules, num_microbatches: int, stages: StageMap) -> None:
    kinds = {op.kind for ops in plan for op in ops}
    if kinds not in KINDS:
        raise BrokenSchedule(f"passes of kinds {sorted(kinds)}: expected F, F and B, or F, I and W")
    for rank, ops in enumerate(plan):
        chunks = [chunk for where, chunk in stages if where == rank]
        want = {Op(kind, micro, chunk) for kind in kinds for micro in range(num_microbatches) for chunk in chunks}
        wrong = {
            "never does": want - set(ops),
            "must not do": set(ops) - want,
            "repeats": {op for op in set(ops) if ops.count(op) > 1} if len(ops) != len(set(ops)) else set(),
        }
        for what, which in wrong.items():
            if which:
                raise BrokenSchedule(f"rank {rank} {what} {' '.join(map(str, sorted(which)[:8]))}", rank)


def _verify_channels(plan: RankSchedules, stages: StageMap) -> None:
    read = _messages(plan, stages)
    for (source, target, kind), wanted in read.items():
        wanted_set = set(wanted)
        sent = [op for op in plan[source] if op in wanted_set]
        for position, (out, into) in enumerate(zip(sent, wanted)):
            if out != into:
                raise BrokenSchedule(
                    f"channel {kind} from rank {source} to {target}: message {position} is sent as {out}, read as {into}",
                    source,
                )


def _messages(plan: RankSchedules, stages: StageMap) -> dict[tuple[int, int, str], list[Op]]:
    """(from, to, kind) -> the sender's ops, in the order in which the receiver needs their results."""
    read = defaultdict(list)
    for rank, ops in enumerate(plan):
        for op in ops:
            for source, need in dependencies(op, rank, stages):
                if source != rank:
                    read[source, rank, need.kind].append(need)
    return read


# -- measure ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleReport:
    """Time and memory of a plan. Times in units of one chunk's forward pass."""

    span: float  # from the first op to the last
    bubble: float  # share of the span in which ranks wait, over all ranks
    live: tuple[int, ...]  # largest number of (micro, chunk) activations that each rank holds
    waiting: int  # largest number of unread messages in one channel: buffers of the wire


def report(
    plan: RankSchedules,
    stages: Optional[StageMap] = None,
    cost: Optional[Cost] = None,
    message_time: float = 0.0,
    sharding: Optional[Sharding] = None,
) -> ScheduleReport:
    """Simulate and measure a plan."""
    stages = stages or _looped_for(plan)
    times = simulate(plan, stages, cost, message_time, sharding)
    span = max((end for _, end in times.values()), default=0.0)
    live = tuple(map(live_activations, plan))
    return ScheduleReport(span, bubble_of(times, len(plan)), live, _most_waiting(plan, stages, times))


def bubble_of(times: Times, ranks: int) -> float:
    """Share of the time from the first op to the last in which ranks compute nothing, over all ranks."""
    span = max((end for _, end in times.values()), default=0.0)
    busy = sum(end - start for (_, op), (start, end) in times.items() if op.kind not in COMMUNICATION)
    return 1 - busy / (span * ranks) if span else 0.0


def live_activations(ops: list[Op]) -> int:
    """Peak number of (micro, chunk) activations of a rank: held from F to B, or to W; evaluation keeps none."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    if {op.kind for op in ops} <= {"F"}:
        return 0
    held = most = 0
    for op in ops:
        held += change[op.kind]
        most = max(most, held)
    return most


def _most_waiting(plan: RankSchedules, stages: StageMap, times: Times) -> int:
    events = defaultdict(list)  # channel -> (time, +1 sent or -1 read)
    for rank, ops in enumerate(plan):
        for op in ops:
            for source, need in dependencies(op, rank, stages):
                if source != rank:
                    events[source, rank, need.kind] += [(times[source, need][1], 1), (times[rank, op][0], -1)]
    most = 0
    for channel in events.values():
        waiting = 0
        for _, change in sorted(channel):  # at the same instant reading (-1) comes first: the message is not stored
            waiting += change
            most = max(most, waiting)
    return most
