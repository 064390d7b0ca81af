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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

from megatron.pipeline.data_parallel_messages import MESSAGES, STARTED, apart, pairs_of, passes_of, without_messages
from megatron.pipeline.schedule import BESIDE, BrokenSchedule, Op, StageMap, dependencies, looped, make_schedule

COST = dict(F=1.0, B=2.0, I=1.0, W=1.0)  # a backward pass takes twice as long as a forward pass
KINDS = ({"F"}, {"F", "B"}, {"F", "I", "W"})

Hidden = Callable[[int, Op, Op], float]  # (rank, F, B or I) -> time that they save by turns
Cost = Union[Mapping[str, float], Callable[[int, Op], float]]  # time by kind of op, or of any (rank, op)

RankSchedules = list[list[Op]]
Times = dict[tuple[int, Op], tuple[float, float]]


def make_rank_schedules(name: str, pp: int, num_microbatches: int, chunks: Optional[int] = None) -> RankSchedules:
    """The schedule of every rank."""
    return [make_schedule(name, rank, pp, num_microbatches, chunks) for rank in range(pp)]


# -- simulate --------------------------------------------------------------------------------------------------------


def simulate(
    plan: RankSchedules,
    stages: Optional[StageMap] = None,
    cost: Optional[Cost] = None,
    message_time: float = 0.0,
    update: float = 0.0,
    hidden: Optional[Hidden] = None,
) -> Times:
    """Simulate a plan: (rank, op) -> (start, end).

    stages: map of stages (default `looped`). cost: time of an op, also of a piece and of a message of data parallelism
    (`sharding.py`), of which a rank sends one at a time. message_time: time of a message between stages. update: time of
    the optimizer's update, U. hidden: time that two passes save by turns (`hidden_by_turns`). They wait for the messages of
    both, and have the same start and end. A pass in pieces is one op, from the start of its first piece to the end of its
    last. Sending never waits. Raises BrokenSchedule in a deadlock, with the op of each rank and the ops it waits for.
    """
    order, cost = Order.of(plan, stages or _looped_for(plan)), cost or COST
    time_of = cost if callable(cost) else lambda rank, op: cost[op.kind]
    took = [0.0 if step.kind == WAIT else time_of(step.rank, op) for step, op in zip(order.steps, order.ops)]
    saved = {}
    if hidden:
        saved = {at: hidden(order.steps[at].rank, order.ops[one].whole, order.ops[at].whole) for at, one in order.pairs}
    starts, ends = order.clock(took, message_time, saved)
    times = {
        (step.rank, op.whole if step.kind == PASS else op): (starts[first], end)
        for step, op, first, end in zip(order.steps, order.ops, order.firsts, ends)
        if first is not None
    }
    if update:
        last = max((end for _, end in times.values()), default=0.0)
        times |= {(rank, Op("U", 0)): (last, last + update) for rank in range(len(plan))}
    return times


def hidden_by_turns(first: tuple[float, float], second: tuple[float, float]) -> float:
    """The time that two passes save if they take turns. Of each: its time, and how much of it is messages of experts.

    Messages of one run while the other computes, as far as that lasts.

    >>> hidden_by_turns((3.0, 1.0), (5.0, 1.5))
    2.5
    """
    (one, its), (other, others) = first, second
    return min(its, other - others) + min(others, one - its)


PASS, SEND, WAIT = range(3)  # a pass or a piece of it; a message of data parallelism starts; has to be over


class ClockStep(NamedTuple):
    """A step of the clock. Others are named by their places in the order."""

    rank: int
    kind: int
    needs: tuple[int, ...]  # passes of other ranks that it waits for; of a WAIT its message
    turns: int = -1  # of a pass that ends, the pass that took turns with it


@dataclass(frozen=True)
class Order:
    """The ops of all ranks, each after those that it waits for. It holds for any times.

    ops: of each step; firsts: the step that its pass begins with, at the last step of a pass, and at messages
    """

    ranks: int
    steps: list[ClockStep]
    ops: list[Op]
    firsts: list[Optional[int]]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(last step of the second, of the first) of all passes that take turns."""
        return [(at, step.turns) for at, step in enumerate(self.steps) if step.turns >= 0]

    @classmethod
    def of(cls, plan: RankSchedules, stages: StageMap) -> "Order":
        """Order a plan. Raises BrokenSchedule in a deadlock."""
        order = cls(len(plan), [], [], [])
        ranks, done = [_OrderedRank(rank, ops, stages) for rank, ops in enumerate(plan)], {}
        while any([rank.run(order, done) for rank in ranks]):
            pass
        stuck = [rank for rank in ranks if rank.at < len(rank.ops)]
        if stuck:
            raise BrokenSchedule(f"deadlock: {'; '.join(rank.stuck_on(done) for rank in stuck)}", stuck[0].rank)
        return order

    def clock(
        self, took: Sequence[float], message_time: float = 0.0, saved: Optional[Mapping[int, float]] = None
    ) -> tuple[list[float], list[float]]:
        """(start, end) of each step. took: its time; saved: last step of a pass -> time that it saves by turns.

        A rank has two lanes: one computes its passes, the other sends its messages of data parallelism.
        """
        free, sent = [0.0] * self.ranks, [0.0] * self.ranks
        starts, ends = [0.0] * len(self.steps), [0.0] * len(self.steps)
        for at, ((rank, kind, needs, turns), time) in enumerate(zip(self.steps, took)):
            start = free[rank]
            if kind == PASS:
                for need in needs:
                    arrival = ends[need] + message_time
                    if arrival > start:
                        start = arrival
                end = start + time
                if turns >= 0:  # both end together
                    ends[turns] = end = end - saved[at] if saved else end
                free[rank] = end
            elif kind == SEND:  # when the lane is free
                start = max(start, sent[rank])
                sent[rank] = end = start + time
            else:
                free[rank] = end = max(start, ends[needs[0]])
            starts[at], ends[at] = start, end
        return starts, ends


class _OrderedRank:
    """The ops of a rank that are in an order already, and those that follow."""

    def __init__(self, rank: int, ops: list[Op], stages: StageMap):
        self.rank, self.ops, self.at = rank, apart(ops), 0
        pairs = pairs_of(ops) if BESIDE in ops else {}
        self.one_of = {back: one for one, back in pairs.items()}
        self.begun: dict[Op, int] = {}  # pass -> its first step
        # Passes alone, in one piece
        self.plain = not pairs and all(op.kind in "FBIW" and not op.piece for op in self.ops)
        if self.plain:
            self.lasts = set()
            self.waits = [dependencies(op, rank, stages) for op in self.ops]
            return
        last = {op.whole: place for place, op in enumerate(self.ops)}
        self.lasts = {place for op, place in last.items() if op.kind not in MESSAGES}
        # What a pass waits for, and what the pass waits for that takes turns with it.
        waits = lambda op: [need for one in (op, pairs.get(op)) if one for need in dependencies(one, rank, stages)]
        self.waits = [[] if op.kind in MESSAGES else waits(op.whole) for op in self.ops]

    def run(self, order: Order, done: dict[tuple[int, Op], int]) -> bool:
        """Add as many ops as possible. Returns whether there was one. done: the last step of each pass or message"""
        before = self.at
        while self.at < len(self.ops):
            for need in self.waits[self.at]:
                if need not in done:
                    return self.at > before
            self._add(order, done)
            self.at += 1
        return self.at > before

    def _add(self, order: Order, done: dict[tuple[int, Op], int]) -> None:
        op, place, first = self.ops[self.at], len(order.steps), None
        if self.plain:
            waits = self.waits[self.at]
            step = ClockStep(self.rank, PASS, tuple([done[need] for need in waits if need[0] != self.rank]))
            done[self.rank, op] = first = place
        elif op.kind not in MESSAGES:
            whole, needs = op.whole, tuple([done[need] for need in self.waits[self.at] if need[0] != self.rank])
            one = self.one_of.get(whole)
            self.begun.setdefault(whole, place if one is None else self.begun[one])
            ends = self.at in self.lasts
            step = ClockStep(self.rank, PASS, needs, done[self.rank, one] if ends and one is not None else -1)
            if ends:
                done[self.rank, whole], first = place, self.begun[whole]
        elif op.kind in STARTED:
            step = ClockStep(self.rank, WAIT, (done[self.rank, op._replace(kind=STARTED[op.kind])],))
        elif op.kind in STARTED.values():
            step, first = ClockStep(self.rank, SEND, ()), place
            done[self.rank, op] = place
        else:  # weights are freed, which takes no time
            return
        order.steps.append(step)
        order.ops.append(op)
        order.firsts.append(first)

    def stuck_on(self, done: dict[tuple[int, Op], int]) -> str:
        op, needs = self.ops[self.at], self.waits[self.at]
        missing = [f"{need} of rank {source}" for source, need in needs if (source, need) not in done]
        return f"rank {self.rank} is stuck on {op}, waiting for {' and '.join(missing)}"


def _looped_for(plan: RankSchedules) -> StageMap:
    return looped(len(plan), 1 + max((op.chunk for ops in plan for op in ops), default=0))


# -- verify ----------------------------------------------------------------------------------------------------------


def verify(plan: RankSchedules, num_microbatches: int, stages: Optional[StageMap] = None) -> None:
    """Prove that a plan is correct, or raise BrokenSchedule with the error.

    Each kind of pass does every (micro, chunk) exactly once; no rank waits forever; every directed channel between two
    ranks delivers in the order in which it is read, so that messages need no tags. Messages of data parallelism have a
    proof of their own, which knows the model (`sharding.verify_messages`).
    """
    stages, passes = stages or _looped_for(plan), list(map(passes_of, plan))
    _verify_complete(passes, num_microbatches, stages)
    _verify_pairs(plan, stages)
    Order.of(list(map(without_messages, plan)), stages)
    _verify_channels(passes, stages)


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


def _verify_pairs(plan: RankSchedules, stages: StageMap) -> None:
    for rank, ops in enumerate(plan):
        if ops.count(BESIDE) != len(pairs_of(ops)):
            raise BrokenSchedule(f"rank {rank}: & stands between two passes, a forward and a backward one", rank)
        for one, other in pairs_of(ops).items():
            if one.kind != "F" or other.kind not in "BI":
                raise BrokenSchedule(
                    f"rank {rank}: {one} & {other}: a forward and a backward pass take turns, in this order", rank
                )
            if (rank, one) in dependencies(other, rank, stages):
                raise BrokenSchedule(f"rank {rank}: {one} & {other}: the second waits for the first", rank)


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
    update: float = 0.0,
    hidden: Optional[Hidden] = None,
) -> ScheduleReport:
    """Simulate and measure a plan."""
    stages = stages or _looped_for(plan)
    times = simulate(plan, stages, cost, message_time, update, hidden)
    passes = list(map(passes_of, plan))
    span = max((end for _, end in times.values()), default=0.0)
    live = tuple(map(live_activations, passes))
    return ScheduleReport(span, bubble_of(times, len(plan)), live, _most_waiting(passes, stages, times))


def bubble_of(times: Times, ranks: int) -> float:
    """Share of the time from the first op to the last in which ranks compute nothing, over all ranks."""
    span = max((end for _, end in times.values()), default=0.0)
    # Passes that take turns have equal times, which count once.
    spans = {(rank, start, end) for (rank, op), (start, end) in times.items() if op.kind not in MESSAGES}
    busy = sum(end - start for _, start, end in spans)
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
