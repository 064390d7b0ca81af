# SPDX-License-Identifier: Apache-2.0
"""The pictures of ranks on a report: what is red, which ranks are drawn, and runs that change their ranks."""

import random
import re
from statistics import median

import numpy as np
import pytest

from megatron.telemetry import heat_map
from megatron.telemetry.drawing import BLUE, RED, THEME
from megatron.telemetry.rank_times import OWN, PARTS
from megatron.telemetry.run_record import JsonLines, read_history
from megatron.training import report_facts


def record(iteration, *own, waiting=0.1, steps=5):
    """Times of ranks: `own` in the forward pass."""
    seconds = {part: [0.0] * len(own) for part in PARTS}
    seconds |= dict(forward=list(own), waiting=[waiting] * len(own))
    return dict(kind="ranks", iteration=iteration, steps=steps, seconds=seconds)


def cells(svg, colour):
    """The number of cells of a colour of the theme."""
    return len(re.findall(rf'style="fill: var\(--c{list(THEME).index(colour)}\); (?:fill-)?opacity', svg))


def test_cells_are_red_where_a_rank_is_slow():
    records = [record(5 * n + 10, 0.1, 0.1, 0.3 if 3 <= n < 7 else 0.1) for n in range(10)]
    svg = heat_map.heat_map(records, [0, 0, 0])
    assert cells(svg, RED) == 4 and cells(svg, BLUE) == 4 * 2  # to the others the slow one is half of their peers
    assert all(f">rank {rank}<" in svg for rank in range(3)) and ">iteration<" in svg
    assert cells(heat_map.heat_map(records, [0, 0, 1]), RED) == 4  # alone on a stage, against its own median
    assert cells(heat_map.heat_map(records[:3], [0, 0, 0]), RED) == 0


def test_long_runs_are_thinned():
    records = [record(5 * n + 10, 0.1, 0.3) for n in range(1000)]
    assert cells(heat_map.heat_map(records, [0, 0]), RED) == len(range(0, 1000, -(-1000 // heat_map.COLUMNS)))


@pytest.mark.parametrize("stages", [[0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
def test_excess_against_plain_loops(stages):
    draw = random.Random(len(stages))
    records = [record(n, *(draw.uniform(0.1, 0.4) for _ in stages)) for n in range(6)]
    found = heat_map.excess(records, stages)
    own = [[sum(one["seconds"][part][rank] for part in OWN) for one in records] for rank in range(len(stages))]
    for rank, stage in enumerate(stages):
        peers = [other for other, of in enumerate(stages) if of == stage and other != rank]
        for n in range(6):
            usual = median(own[peer][n] for peer in peers) if peers else median(own[rank])
            assert found[rank, n] == pytest.approx(own[rank][n] / usual - 1)


def test_of_many_ranks_those_that_differ_are_drawn():
    own = [0.1] * 100
    own[77] = own[3] = 0.3
    shown = heat_map.shown_ranks(heat_map.excess([record(10, *own)], [0] * 100))
    assert len(shown) == heat_map.ROWS and {3, 77} <= set(shown) and shown == sorted(shown)


def test_bars_are_means_over_the_steps():
    records = [record(5, 0.1, 0.2, steps=5), record(20, 0.4, 0.2, steps=15)]
    weights = np.array([5, 15]) / 20
    assert list(heat_map.times_of(records, "forward") @ weights) == pytest.approx([0.325, 0.2])
    svg = heat_map.step_bars(records, [0, 1])
    assert ">forward<" in svg and ">waiting<" in svg and ">backward<" not in svg


def test_a_run_that_goes_back_and_changes_its_ranks(tmp_path):
    """Records after the step from which a launch resumed do not count, nor those of another number of ranks."""
    lines = JsonLines(tmp_path / "metrics.jsonl")
    run = dict(kind="run", iteration=0, mesh=dict(pp=2))
    first = [run, record(5, 0.1), record(10, 0.1), record(15, 0.9), dict(run, iteration=12)]
    for one in [*first, record(20, 0.1, 0.2), record(25, 0.1, 0.2)]:
        lines.write(one)
    lines.write(dict(kind="ranks", iteration=30, steps=5, seconds={"data": [1.0, 2.0]}))  # of another version
    lines.close()
    history = read_history(tmp_path / "metrics.jsonl")
    assert [one["iteration"] for one in history.ranks] == [5, 10, 20, 25, 30]
    assert [one["iteration"] for one in heat_map.usable(history.ranks)] == [20, 25]
    pictures, rows = report_facts.ranks(history)
    assert [caption.split(" (")[0] for caption, _ in pictures] == [
        "Own time of each rank against the other ranks of its stage",
        "Where the time of a step goes",
    ]
    assert rows == [("slowest rank", "rank 0: 100.00 ms of own time a step, +0% against its peers")]
    history.ranks = history.ranks[:2]
    assert report_facts.ranks(history) == ([], [])  # one rank has nobody to be compared with
