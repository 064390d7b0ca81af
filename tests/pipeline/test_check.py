# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from megatron.pipeline.check import BrokenSchedule, diagram, main, make_plan, report, simulate, verify
from megatron.pipeline.schedule import SCHEDULES, Op, one_f_one_b, problems

SHAPES = [
    (name, pp, micros, chunks)
    for name in SCHEDULES
    for pp in (1, 2, 3, 4, 6, 8)
    for micros in (1, 2, 3, 4, 6, 7, 8, 16)
    for chunks in (1, 2, 3)
    if not problems(name, pp, micros, chunks)
]


def test_every_schedule_of_many_shapes_is_right():
    assert len(SHAPES) > 250
    for name, pp, micros, chunks in SHAPES:
        verify(make_plan(name, pp, micros, chunks), micros)


@pytest.mark.parametrize("pp, micros, chunks", [(2, 4, 1), (4, 8, 1), (4, 8, 2), (8, 16, 3), (4, 4, 2), (1, 5, 1)])
def test_bubble_of_1f1b_is_the_formulas(pp, micros, chunks):
    found = report(make_plan("1f1b", pp, micros, chunks))
    assert found.bubble == pytest.approx((pp - 1) / (chunks * micros + pp - 1))
    assert found.span == pytest.approx(3 * (chunks * micros + pp - 1))


def test_live_activations():
    assert report(make_plan("gpipe", 4, 8)).live == (8, 8, 8, 8)
    assert report(make_plan("1f1b", 4, 8)).live == (4, 3, 2, 1)
    assert report(make_plan("1f1b", 4, 2)).live == (2, 2, 2, 1)
    assert report(make_plan("zb-h1", 4, 8)).live == (4, 4, 4, 4)
    assert report(make_plan("forward-only", 4, 8)).live == (0, 0, 0, 0)


def test_zb_h1_wastes_less_than_1f1b():
    assert report(make_plan("zb-h1", 4, 16)).bubble < 0.5 * report(make_plan("1f1b", 4, 16)).bubble


def test_costs_and_wire_enter_the_clock():
    plan = make_plan("1f1b", 2, 1)
    assert report(plan).span == 6
    assert report(plan, cost=dict(F=1, B=3)).span == 8
    assert report(plan, wire=0.5).span == 7
    times = simulate(plan, wire=0.5)
    assert times[1, Op("F", 0)] == (1.5, 2.5)


def test_messages_that_wait_are_counted():
    assert report(make_plan("1f1b", 1, 4)).waiting == 0
    assert report(make_plan("1f1b", 2, 4)).waiting == 1
    slow_last = [make_plan("gpipe", 2, 6)[0], list(make_plan("1f1b", 2, 6)[1])]
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
        (["F0 F1 F1 B0 B1", "F0 B0 F1 B1"], "rank 0 does twice F1"),
        (["F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1"], "rank 0 must not do B2 F2"),
        (["F0 F1 B1 B0", "F1 B1 F0 B0"], "channel F from rank 0 to 1: message 0 is sent as F0, read as F1"),
        (["F0 F1 B1 B0", "F0 B0 F1 B1"], "channel B from rank 1 to 0: message 0 is sent as B0, read as B1"),
        (["F0 B0 F1 I1 W1", "F0 B0 F1 B1"], "kinds"),
    ],
)
def test_broken_plans_are_named(plan, words):
    with pytest.raises(BrokenSchedule, match=words):
        verify([ops(rank) for rank in plan], micros=2)


def test_a_map_of_stages_is_a_parameter():
    v_shape = ((0, 0), (1, 0), (1, 1), (0, 1))
    plan = [
        [Op("F", 0), Op("F", 0, 1), Op("B", 0, 1), Op("B", 0)],
        [Op("F", 0), Op("F", 0, 1), Op("B", 0, 1), Op("B", 0)],
    ]
    verify(plan, 1, v_shape)
    assert simulate(plan, v_shape)[0, Op("B", 0, 1)] == (4, 6)  # the last stage is rank 0's
    assert simulate(plan)[0, Op("B", 0, 1)] == (6, 8)  # looped: it is rank 1's


def test_diagram_shows_every_op_of_each_rank_in_its_place():
    lines = diagram([one_f_one_b(rank, 2, 2) for rank in range(2)], width=100).splitlines()
    assert [line.split("|")[0] for line in lines] == ["rank  0 ", "rank  1 "]
    assert [line.index("B0") for line in lines] == sorted([line.index("B0") for line in lines], reverse=True)
    assert all(line.count("F") == line.count("B") == 2 for line in lines)


def test_diagram_is_cut_at_the_width():
    lines = diagram(make_plan("1f1b", 4, 64), width=80).splitlines()
    assert all(len(line) <= 80 and line.endswith("...") for line in lines)


def test_command_compares_schedules(capsys):
    main("--pp 4 --micro 8".split())
    out = capsys.readouterr().out
    assert "27.3%" in out and "zb-h1" in out and "rank  3 |" in out


def test_command_refuses_what_cannot_run():
    code = subprocess.run(
        [sys.executable, "-m", "megatron.pipeline.check", *"--pp 4 --micro 6 --chunks 2 --schedule 1f1b".split()],
        capture_output=True, text=True,
    )  # fmt: skip
    assert code.returncode == 3 and "4 or 8 would work" in code.stderr and "Traceback" not in code.stderr
