# SPDX-License-Identifier: Apache-2.0
"""Every schedule of every shape is complete, cannot hang, delivers in order, and wastes what the papers say."""

import pytest

from megatron.pipeline.data_parallel_messages import pairs_of
from megatron.pipeline.draw import diagram, svg
from megatron.pipeline.schedule import SCHEDULES, Op, one_f_one_b, parse_op, problems, stage_map
from megatron.pipeline.simulate import BrokenSchedule, hidden_by_turns, make_rank_schedules, report, simulate, verify

RANKS, MICROS, CHUNKS = range(1, 9), range(1, 33), range(1, 4)
# What takes longest is told of these alone; `--full` takes all.
SOME = pytest.mark.parametrize(
    "micros",
    [pytest.param([1, 2, 3, 5, 8, 13, 16, 17, 32], id="some"), pytest.param(MICROS, id="all", marks=pytest.mark.full)],
)
UNIT = dict(F=1, I=1, W=1)


def parsed(line: str) -> list[Op]:
    return list(map(parse_op, line.split()))


@pytest.mark.sampled(10)
@SOME
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_every_shape_is_right(name, micros):
    """Complete, free of deadlock, first in first out: pp 1-8, micro-batches 1-32, chunks 1-3, nothing left out."""
    proved = 0
    for pp in RANKS:
        for chunks in CHUNKS:
            if problems(name, pp, 1, chunks):
                continue
            for num_microbatches in micros:
                verify(
                    make_rank_schedules(name, pp, num_microbatches, chunks),
                    num_microbatches,
                    stage_map(name, pp, chunks),
                )
                proved += 1
    least = 8 if SCHEDULES[name].chunks[0] == SCHEDULES[name].chunks[1] else 14
    assert proved >= least * len(micros)


def test_bubble_of_1f1b_is_the_formulas_for_every_shape():
    """(p - 1) / (v m + p - 1), where the interleaved schedule has whole groups of p micro-batches."""
    for pp in RANKS:
        for num_microbatches in MICROS:
            for chunks in CHUNKS:
                if problems("1f1b", pp, num_microbatches, chunks) or chunks > 1 and num_microbatches % pp:
                    continue
                shape = pp, num_microbatches, chunks
                for name in ["1f1b", "1f1b &"] if num_microbatches % 6 == 0 else ["1f1b"]:  # turns cost nothing
                    found = report(make_rank_schedules(name, *shape))
                    assert found.bubble == pytest.approx((pp - 1) / (chunks * num_microbatches + pp - 1)), shape
                    each = 1 if name == "1f1b" else 2
                    held = tuple(min(each * (pp - rank), num_microbatches) for rank in range(pp))
                    assert chunks > 1 or found.live == held


@pytest.mark.parametrize(
    "name, chunks, live", [("1f1b", 1, 8), ("interleaved", 2, 12), ("zb-h1", 1, 8), ("zb-v", 2, 14)]
)
def test_turns_hide_exchanges(name, chunks, live):
    """Of a pass F of 1 and B of 2, 0.3 are exchanges: most passes are pairs, and each saves 0.6 on the slowest rank."""
    pp, m = 4, 32
    plan, stages = make_rank_schedules(f"{name} &", pp, m, chunks), stage_map(name, pp, chunks)
    hidden = lambda rank, one, other: hidden_by_turns((1.0, 0.3), (2.0 if other.kind == "B" else 1.0, 0.3))
    found, plain = report(plan, stages, hidden=hidden), report(make_rank_schedules(name, pp, m, chunks), stages)
    pairs = [len(pairs_of(ops)) for ops in plan]
    assert min(pairs) >= 0.75 * m * chunks and max(found.live) == live
    assert plain.span - 0.65 * max(pairs) <= found.span <= plain.span - 0.5 * min(pairs)


def test_what_turns_hide():
    assert hidden_by_turns((3.0, 1.0), (5.0, 1.5)) == 2.5
    assert hidden_by_turns((3.0, 2.5), (5.0, 1.0)) == 2.5 + 0.5  # the other's exchange finds only 0.5 of products
    assert hidden_by_turns((3.0, 3.0), (5.0, 5.0)) == 0.0


def test_times_of_a_pair_by_hand():
    """Both wait for the messages of both, end together, and what depends on one of them waits for both."""
    plan = [parsed("F0 F1 F2 & B0 B1 B2"), parsed("F0 F1 & B0 F2 & B1 B2")]
    times = simulate(plan, hidden=lambda rank, one, other: 0.5)
    assert times[1, Op("F", 1)] == times[1, Op("B", 0)] == (2, 4.5)
    assert times[0, Op("F", 2)] == times[0, Op("B", 0)] == (4.5, 7)
    assert times[1, Op("F", 2)] == times[1, Op("B", 1)] == (7, 9.5)
    assert times[0, Op("B", 1)] == (9.5, 11.5) and times[1, Op("B", 2)] == (9.5, 11.5)
    assert report(plan, hidden=lambda *_: 0.5).bubble == pytest.approx(
        1 - (1 + 1 + 2.5 + 2 + 2 + 1 + 2.5 + 2.5 + 2) / 27
    )


@pytest.mark.parametrize(
    "lines, words",
    [
        (["F0 & B0 F1 B1"], "the second waits for the first"),
        (["F0 B0 & F1 B1"], "a forward and a backward pass take turns, in this order"),
        (["F0 F1 & B0 B1 &"], "& stands between two passes"),
        (["F0 & F1 & B0 B1"], "& stands between two passes"),
        (["F0 F1 B0 B1", "F0 F1 & B0 B1"], None),
        # F1 of rank 1 comes after F1 of rank 0, B0 the other way round
        (["F0 F1 & B0 B1", "F0 F1 & B0 B1"], "deadlock"),
    ],
)
def test_pairs_that_cannot_run(lines, words):
    plan = list(map(parsed, lines))
    if words is None:
        return verify(plan, 2)
    with pytest.raises(BrokenSchedule, match=words):
        verify(plan, 2)


def test_bubble_of_gpipe_and_zb_h1_is_the_formulas():
    for pp in RANKS:
        for num_microbatches in MICROS:
            gpipe = report(make_rank_schedules("gpipe", pp, num_microbatches))
            assert (
                gpipe.bubble == pytest.approx((pp - 1) / (num_microbatches + pp - 1))
                and gpipe.live == (num_microbatches,) * pp
            )
            zb_h1 = report(make_rank_schedules("zb-h1", pp, num_microbatches))
            if num_microbatches >= pp:  # (p - 1)(F + I - W) of the time: a third of 1F1B's
                assert zb_h1.bubble == pytest.approx((pp - 1) / (3 * num_microbatches + pp - 1)), (pp, num_microbatches)
            assert max(zb_h1.live) <= min(pp, num_microbatches)


@pytest.mark.sampled(10)
@SOME
@pytest.mark.parametrize("name, limit", [("zb-v", lambda pp: 2 * pp), ("v-half", lambda pp: pp + 2)])
def test_v_shapes_keep_to_their_memory(name, limit, micros):
    """In activations of a chunk, of which a micro-batch has two: zb-v the memory of 1F1B, v-half about half."""
    for pp in RANKS:
        for num_microbatches in micros:
            found = report(make_rank_schedules(name, pp, num_microbatches), stage_map(name, pp, 2), UNIT)
            assert max(found.live) <= limit(pp)


@SOME
def test_zb_v_wastes_next_to_nothing(micros):
    for pp in RANKS:
        for num_microbatches in (number for number in micros if number >= 2 * pp):
            stages = stage_map("zb-v", pp, 2)
            idle = report(make_rank_schedules("zb-v", pp, num_microbatches), stages, UNIT).span - 6 * num_microbatches
            # The last rank cannot begin before pp - 1; 1F1B: 6 (pp - 1)
            assert pp - 1 <= idle <= pp + 5, (pp, num_microbatches)
            v_half = report(make_rank_schedules("v-half", pp, num_microbatches), stages, UNIT)
            assert v_half.bubble <= report(make_rank_schedules("1f1b", pp, num_microbatches)).bubble + 1e-9


@pytest.mark.sampled(2)
def test_uneven_groups_of_micro_batches_cost_little():
    """Interleaved with a number of micro-batches that is no multiple of the ranks, as Megatron-LM does not have it."""
    for pp in range(2, 9):
        for num_microbatches in range(pp, 33):
            found = report(make_rank_schedules("1f1b", pp, num_microbatches, 2))
            assert found.bubble <= 1.75 * (pp - 1) / (2 * num_microbatches + pp - 1), (pp, num_microbatches)


@pytest.mark.parametrize(
    "pp, num_microbatches, chunks", [(2, 4, 1), (4, 8, 1), (4, 8, 2), (8, 16, 3), (4, 4, 2), (1, 5, 1)]
)
def test_bubble_of_1f1b_is_the_formulas(pp, num_microbatches, chunks):
    found = report(make_rank_schedules("1f1b", pp, num_microbatches, chunks))
    assert found.bubble == pytest.approx((pp - 1) / (chunks * num_microbatches + pp - 1))
    assert found.span == pytest.approx(3 * (chunks * num_microbatches + pp - 1))


def test_live_activations():
    assert report(make_rank_schedules("gpipe", 4, 8)).live == (8, 8, 8, 8)
    assert report(make_rank_schedules("1f1b", 4, 8)).live == (4, 3, 2, 1)
    assert report(make_rank_schedules("1f1b", 4, 2)).live == (2, 2, 2, 1)
    assert report(make_rank_schedules("zb-h1", 4, 8)).live == (4, 4, 4, 4)
    assert report(make_rank_schedules("forward-only", 4, 8)).live == (0, 0, 0, 0)


def test_zb_h1_wastes_less_than_1f1b():
    assert report(make_rank_schedules("zb-h1", 4, 16)).bubble < 0.5 * report(make_rank_schedules("1f1b", 4, 16)).bubble


def test_costs_and_wire_enter_the_clock():
    plan = make_rank_schedules("1f1b", 2, 1)
    assert report(plan).span == 6
    assert report(plan, cost=dict(F=1, B=3)).span == 8
    assert report(plan, message_time=0.5).span == 7
    times = simulate(plan, message_time=0.5)
    assert times[1, Op("F", 0)] == (1.5, 2.5)


def test_messages_that_wait_are_counted():
    assert report(make_rank_schedules("1f1b", 1, 4)).waiting == 0
    assert report(make_rank_schedules("1f1b", 2, 4)).waiting == 1
    slow_last = [make_rank_schedules("gpipe", 2, 6)[0], list(make_rank_schedules("1f1b", 2, 6)[1])]
    assert report(slow_last).waiting > 1


def ops(text: str) -> list[Op]:
    return [Op(word[0], int(word[1:])) for word in text.split()]


def test_a_deadlock_names_what_each_rank_is_stuck_on():
    with pytest.raises(BrokenSchedule) as caught:
        simulate([ops("F0 B0 F1 B1"), ops("F0 F1 B0 B1")])
    assert str(caught.value) == (
        "deadlock: rank 0 is stuck on B0, waiting for B0 of rank 1; rank 1 is stuck on F1, waiting for F1 of rank 0"
    )


@pytest.mark.parametrize(
    "plan, words",
    [
        (["F0 B0", "F0 B0 F1 B1"], "rank 0 never does B1 F1"),
        (["F0 F1 F1 B0 B1", "F0 B0 F1 B1"], "rank 0 repeats F1"),
        (["F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1"], "rank 0 must not do B2 F2"),
        (["F0 F1 B1 B0", "F1 B1 F0 B0"], "channel F from rank 0 to 1: message 0 is sent as F0, read as F1"),
        (["F0 F1 B1 B0", "F0 B0 F1 B1"], "channel B from rank 1 to 0: message 0 is sent as B0, read as B1"),
        (["F0 B0 F1 I1 W1", "F0 B0 F1 B1"], "kinds"),
    ],
)
def test_broken_plans_are_named(plan, words):
    with pytest.raises(BrokenSchedule, match=words):
        verify([ops(rank) for rank in plan], num_microbatches=2)


def test_broken_plans_say_on_which_rank():
    with pytest.raises(BrokenSchedule) as caught:
        verify([ops("F0 B0 F1 B1"), ops("F0 B0 F1 F1")], num_microbatches=2)
    assert caught.value.rank == 1


def test_a_map_of_stages_is_a_parameter():
    v_shape = ((0, 0), (1, 0), (1, 1), (0, 1))
    plan = [
        [Op("F", 0), Op("F", 0, 1), Op("B", 0, 1), Op("B", 0)],
        [Op("F", 0), Op("F", 0, 1), Op("B", 0, 1), Op("B", 0)],
    ]
    verify(plan, 1, v_shape)
    assert simulate(plan, v_shape)[0, Op("B", 0, 1)] == (4, 6)  # the last stage is rank 0's
    assert simulate(plan)[0, Op("B", 0, 1)] == (6, 8)  # looped: it is rank 1's


def test_costs_may_depend_on_rank_and_op():
    plan = make_rank_schedules("1f1b", 2, 2)
    slow = report(plan, cost=lambda rank, op: 2.0 if rank == 1 else 1.0)
    assert slow.span == 10 and slow.bubble == pytest.approx(1 - 12 / 20)


def test_diagram_shows_every_op_of_each_rank_in_its_place():
    lines = diagram(simulate([one_f_one_b(rank, 2, 2) for rank in range(2)]), width=100).splitlines()
    assert [line.split("|")[0] for line in lines] == ["rank  0 ", "rank  1 "]
    assert [line.index("B0") for line in lines] == sorted([line.index("B0") for line in lines], reverse=True)
    assert all(line.count("F") == line.count("B") == 2 for line in lines)


def test_diagram_is_cut_at_the_width():
    lines = diagram(simulate(make_rank_schedules("1f1b", 4, 64)), width=80).splitlines()
    assert all(len(line) <= 80 and line.endswith("...") for line in lines)


def test_diagram_fits_times_of_any_unit():
    times = simulate(make_rank_schedules("1f1b", 2, 2))
    small = {key: (start * 1e-3, end * 1e-3) for key, (start, end) in times.items()}
    assert diagram(times) == diagram(small)


def test_svg_holds_every_op_of_every_panel():
    plan = make_rank_schedules("zb-v", 3, 4)
    times = simulate(plan, stage_map("zb-v", 3, 2))
    picture = svg({"one": times, "two & more": times})
    assert picture.count("<title>") == 2 * sum(map(len, plan))
    assert "two &amp; more" in picture and picture.startswith("<svg") and "F3.1" in picture
    from xml.etree import ElementTree

    ElementTree.fromstring(picture)
