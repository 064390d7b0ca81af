# SPDX-License-Identifier: Apache-2.0
"""Messages of data parallelism in the simulator, against another simulation: events that wait for each other."""

import itertools
from dataclasses import replace

import pytest

from megatron.pipeline.draw import diagram, svg
from megatron.pipeline.schedule import Op, dependencies, problems, stage_map
from megatron.pipeline.simulate import make_rank_schedules
from megatron.pipeline.simulate import simulate as simulate_lists
from megatron.planner.schedule_time import ShardingTimes, sharded_span
from tests.pipeline.coarse_messages import coarse

pytestmark = pytest.mark.sampled(10)

COST = dict(F=1.0, B=2.0, I=1.0, W=1.0)
PLANS = [
    ("1f1b", 1, 3, 1),
    ("1f1b", 3, 5, 1),
    ("gpipe", 2, 3, 1),
    ("interleaved", 2, 4, 2),
    ("zb-h1", 3, 5, 1),
    ("zb-v", 2, 3, 2),
]
TIMES = (0.0, 0.25, 1.0, 6.0)
OVERLAP = (0.0, 0.7)


def simulate(plan, stages=None, cost=COST, sharding=None):
    if sharding is None:
        return simulate_lists(plan, stages, cost)
    lists, cost = coarse(plan, sharding, cost)
    return simulate_lists(lists, stages, cost, update=sharding.update)


class Events:
    """What must have happened before what, and how long before: {event: [(event, seconds)]}; an event is (rank, op, word).

    A pass is "ready", "begun" and "over", and "passed on" when others may have its result. G and R are "begun" and "over";
    an R is "filled" when it has gone as far as it can before its pass is over.
    """

    def __init__(self, plan, stages, sharding):
        self.found, self.stages, self.sharding = {}, stages, sharding
        for rank, ops in enumerate(plan):
            self.rank, self.ops = rank, ops
            self.first = {op.chunk: op for op in reversed(ops) if op.kind == "F"}
            self.last = {op.chunk: op for op in ops if op.kind in "BW"}
            self.gathered = [op for op in ops if op in self.first.values() and sharding.zero in (1, 2)]
            self.lane = [("G", op) for op in self.gathered]  # all of them stand in front of the lane
            for before, op in zip([None, *ops], ops, strict=False):
                self.add_pass(before, op)
                self.add_gathering(op)
                self.add_reduction(op)
            self.add_what_comes_last()
            self.add_lane()

    def after(self, op, word, *others):
        """An event happens after others of this rank: (op, word, seconds)."""
        known = self.found.setdefault((self.rank, op, word), [])
        known.extend(((self.rank, other, what), seconds) for other, what, seconds in others)

    def add_pass(self, before, op):
        self.after(op, "ready", *([(before, "passed on", 0.0)] if before else []))
        arrivals = [((where, need, "passed on"), 0.0) for where, need in dependencies(op, self.rank, self.stages)]
        self.found[self.rank, op, "ready"] += arrivals
        self.after(op, "begun", (op, "ready", 0.0))
        self.after(op, "over", (op, "begun", COST[op.kind]))
        self.after(op, "passed on", (op, "over", 0.0))

    def add_gathering(self, op):
        own = self.sharding.zero == 3 and op.kind != "W"
        if own:
            self.lane.append(("G", op))
            self.after(op, "G begun", (op, "ready", 0.0))
        if own or op in self.gathered:
            self.after(op, "begun", (op, "G begun", (1 - self.sharding.gather_overlap) * self.sharding.gather))
            self.after(op, "over", (op, "G begun", self.sharding.gather))
        if not self.sharding.gather_overlap:
            self.after(op, "ready", *((other, "G over", 0.0) for other in self.gathered))

    def add_reduction(self, op):
        r, beside, each = self.sharding.reduce, self.sharding.reduce_overlap, self.sharding.zero >= 2
        if op.kind not in "BW" or not each and (self.last[op.chunk] != op or not beside):
            return
        self.lane.append(("R", op))
        self.after(op, "R begun", (op, "begun", 0.0))
        self.after(op, "R filled", (op, "R begun", beside * r))
        self.after(op, "R over", (op, "R filled", (1 - beside) * r), (op, "over", (1 - beside) * r))
        if each:
            self.after(op, "over", (op, "R filled", 0.0))
            self.after(op, "passed on", (op, "R over", 0.0))

    def add_what_comes_last(self):
        if self.sharding.zero < 2 and not self.sharding.reduce_overlap:
            for op in self.last.values():
                self.lane.append(("R", op))
                self.after(op, "R begun", (self.ops[-1], "over", 0.0))
                self.after(op, "R over", (op, "R begun", self.sharding.reduce))

    def add_lane(self):
        for kind, op in self.lane:
            if kind == "G":
                self.after(op, "G begun")
                self.after(op, "G over", (op, "G begun", self.sharding.gather))
        for (kind, op), (then, other) in itertools.pairwise(self.lane):
            self.after(other, f"{then} begun", (op, f"{kind} over", 0.0))


def longest(found):
    """When each event happens: relaxed until nothing moves any more (Bellman and Ford)."""
    at = dict.fromkeys(found, 0.0)
    for _ in range(len(at) + 1):
        moved = False
        for event, others in found.items():
            time = max((at[other] + gap for other, gap in others), default=0.0)
            if time > at[event] + 1e-12:
                at[event], moved = time, True
        if not moved:
            return at
    raise AssertionError("events wait for each other in a circle")


@pytest.mark.parametrize("name, pp, num_microbatches, chunks", PLANS)
@pytest.mark.parametrize("zero", range(4))
def test_every_op_against_brute_force(name, pp, num_microbatches, chunks, zero):
    plan, stages = make_rank_schedules(name, pp, num_microbatches, chunks), stage_map(name, pp, chunks)
    for gather, reduce, beside, back in itertools.product(TIMES, TIMES, OVERLAP, OVERLAP):
        sharding = ShardingTimes(zero, gather, reduce, beside, back)
        times = simulate(plan, stages, COST, sharding=sharding)
        want = longest(Events(plan, stages, sharding).found)
        for rank, ops in enumerate(plan):
            for op in ops:
                expected = (want[rank, op, "ready"], want[rank, op, "passed on"])
                assert times[rank, op] == pytest.approx(expected), (sharding, rank, op)
                for kind, word in (("R", "R over"), ("H" if op.kind in "BI" and zero == 3 else "G", "G over")):
                    if (rank, op, word) in want:
                        sent = Op(kind, 0 if kind == "G" and zero < 3 else op.micro, op.chunk, "b")
                        assert times[rank, sent][1] == pytest.approx(want[rank, op, word]), (sharding, rank, sent)


def span(times):
    return max(end for _, end in times.values())


@pytest.mark.parametrize("name, pp, num_microbatches, chunks", PLANS)
@pytest.mark.parametrize("zero", range(4))
def test_limits(name, pp, num_microbatches, chunks, zero):
    plan, stages = make_rank_schedules(name, pp, num_microbatches, chunks), stage_map(name, pp, chunks)
    alone = simulate(plan, stages, COST)
    for beside in OVERLAP:
        free = simulate(plan, stages, COST, sharding=ShardingTimes(zero, 0.0, 0.0, beside, beside))
        assert all(free[key] == pytest.approx(alone[key]) for key in alone)
        huge = 1e6
        found = span(
            simulate(plan, stages, COST, sharding=ShardingTimes(zero, huge * (zero > 0), huge, beside, beside))
        )
        most = max(
            sum(op.kind != "W" for op in ops) * (zero == 3)
            + chunks * (zero in (1, 2))
            + (sum(op.kind in "BW" for op in ops) if zero >= 2 else chunks)
            for ops in plan
        )
        assert found >= most * huge  # a rank's messages one behind the other, and nothing less
        if pp == 1:
            assert found <= most * huge + span(alone) + 1e-3


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name, pp, num_microbatches, chunks", PLANS)
@pytest.mark.parametrize("zero", range(4))
def test_longer_messages_never_make_a_step_shorter_nor_does_overlap_make_it_longer(
    name, pp, num_microbatches, chunks, zero
):
    plan, stages = make_rank_schedules(name, pp, num_microbatches, chunks), stage_map(name, pp, chunks)
    length = lambda sharding: span(simulate(plan, stages, COST, sharding=sharding))
    for gather, reduce, beside in itertools.product(TIMES, TIMES, (0.0, 0.4, 0.7)):
        base = ShardingTimes(zero, gather, reduce, beside, beside)
        assert length(base) <= length(replace(base, gather=gather + 0.3)) + 1e-9
        assert length(base) <= length(replace(base, reduce=reduce + 0.3)) + 1e-9
        more = replace(base, gather_overlap=beside + 0.2, reduce_overlap=beside + 0.2)
        assert length(more) <= length(base) + 1e-9, (base, more)


def test_the_update_waits_for_the_reductions_of_all_ranks():
    sharding = ShardingTimes(1, 0.5, 2.0, update=3.0)
    times = simulate(make_rank_schedules("1f1b", 2, 3), sharding=sharding)
    reduced = max(times[rank, Op("R", 2, 0, "b")][1] for rank in range(2))
    assert [times[rank, Op("U", 0)] for rank in range(2)] == [(reduced, reduced + 3.0)] * 2


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "v-half"])
def test_the_planners_closed_form_is_the_simulation(name):
    """One chunk a rank: equal. More: equal while messages are shorter than passes, and never below."""
    chunks, compared = dict(interleaved=2).get(name, 2 if name[0] in "zv" and name != "zb-h1" else 1), 0
    for pp, num_microbatches, zero in itertools.product((1, 2, 4), (2, 4, 8, 11), range(4)):
        if problems(name, pp, num_microbatches, chunks) or name == "interleaved" and num_microbatches % pp:
            continue
        plan, stages = make_rank_schedules(name, pp, num_microbatches, chunks), stage_map(name, pp, chunks)
        for gather, reduce, beside in itertools.product((0.0, 0.2, 5.0), (0.0, 0.2, 5.0), OVERLAP):
            sharding = ShardingTimes(zero, gather * (zero > 0), reduce, beside, beside)
            found = span(simulate(plan, stages, COST, sharding=sharding))
            closed = sharded_span(
                name, pp, num_microbatches, chunks, forward=1.0, backward=2.0, sharding=sharding, exact=True
            )
            assert closed >= found - 1e-9, (pp, num_microbatches, sharding)
            if chunks == 1 or zero == 3 or not beside or max(gather, reduce) < 1:
                assert closed == pytest.approx(found), (pp, num_microbatches, sharding)
                compared += 1
    assert compared > 200


def test_drawings_show_the_communication_lane():
    times = simulate(make_rank_schedules("1f1b", 2, 2), sharding=ShardingTimes(3, 0.5, 0.5, update=1.0))
    lines = diagram(times, width=300).splitlines()
    assert [line.split("|")[0].split()[0] for line in lines] == ["rank", "comm", "rank", "comm"]
    assert all(word in lines[1] for word in ("G0", "G1", "H0", "R1")) and "U0" in lines[0] and "G" not in lines[0]
    picture = svg({"step": times})
    assert "<title>H1:a</title>" in picture and "reduce gradients" in picture
    assert "comm" not in diagram(simulate(make_rank_schedules("1f1b", 2, 2)))
