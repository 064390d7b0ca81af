# SPDX-License-Identifier: Apache-2.0
"""The values of heat maps: ranks against their peers, experts against their mean, and what is shown of many."""

import random
from statistics import median

import numpy as np
import pytest

from megatron.telemetry import heat_map, report_facts
from megatron.telemetry.heat_map import LAYERS, ROWS, against_peers, shown_layers, shown_ranks
from megatron.telemetry.history import read_history
from megatron.telemetry.rank_times import PARTS
from megatron.telemetry.run_record import JsonLines


def record(iteration, *own, waiting=0.1):
    """Times of ranks: `own` in the forward pass."""
    seconds = {part: [0.0] * len(own) for part in PARTS}
    seconds |= dict(forward=list(own), waiting=[waiting] * len(own))
    return dict(kind="ranks", iteration=iteration, steps=5, seconds=seconds)


def history_of(tmp_path, *records):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for one in records:
        lines.write(one)
    lines.close()
    return read_history(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("stages", [[0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
def test_excess_against_plain_loops(stages):
    draw = random.Random(len(stages))
    own = [[draw.uniform(0.1, 0.4) for _ in range(6)] for _ in stages]
    found = against_peers(np.array(own), stages)
    for rank, stage in enumerate(stages):
        peers = [other for other, of in enumerate(stages) if of == stage and other != rank]
        for n in range(6):
            usual = median(own[peer][n] for peer in peers) if peers else median(own[rank])
            assert found[rank, n] == pytest.approx(own[rank][n] / usual - 1)


def test_of_many_ranks_those_that_differ_are_shown(tmp_path):
    own = [0.1] * 100
    own[77] = own[3] = 0.3
    shown = shown_ranks(against_peers(np.array([own]).T, [0] * 100))
    assert len(shown) == ROWS and {3, 77} <= set(shown) and shown == sorted(shown)
    rows, [grid] = report_facts.ranks(history_of(tmp_path, record(10, *own)))
    assert grid.caption.endswith("32 of 100 ranks: those that differ most from their peers") and len(grid.rows) == ROWS


def test_parts_of_a_step_are_means_over_the_records(tmp_path):
    history = history_of(tmp_path, record(5, 0.1, 0.2), record(20, 0.4, 0.2))
    _, [grid] = report_facts.ranks(history)
    assert grid.head == ["", "forward", "waiting"]  # the other parts take no time
    assert grid.rows == [["rank 0", "250.0 ms", "100.0 ms"], ["rank 1", "200.0 ms", "100.0 ms"]]


def test_a_run_that_goes_back_and_changes_its_ranks(tmp_path):
    """Records after the step from which a launch resumed do not count, nor those of another number of ranks."""
    run = dict(kind="run", iteration=0, mesh=dict(pp=2))
    first = [run, record(5, 0.1), record(10, 0.1, 0.3), record(15, 0.9, 0.9), dict(run, iteration=12)]
    history = history_of(tmp_path, *first, record(20, 0.1, 0.2), record(25, 0.1, 0.2))
    assert {part: table.iterations.tolist() for part, table in history.ranks.items() if part == "forward"} == dict(
        forward=[10, 20, 25]
    )
    rows, _ = report_facts.ranks(history)
    assert rows == [("slowest rank", "rank 1: 233.33 ms of own time a step, +17% against its peers")]
    assert report_facts.ranks(history_of(tmp_path / "one", run, record(5, 0.1))) == ([], [])  # nobody to compare with


def test_loads_of_experts(tmp_path):
    """Records after the step that a launch resumed from do not count."""
    even, worst = [10, 10, 10, 10], [40, 0, 0, 0]
    layers = {f"blocks.{n}": worst if n in (3, 8) else even for n in range(9)}
    experts = lambda iteration, **loads: dict(kind="experts", iteration=iteration, loads=loads)
    run = dict(kind="run", iteration=0)
    records = [run, experts(10, **layers), experts(15, **{"blocks.0": worst}), dict(run, iteration=12)]
    history = history_of(tmp_path, *records, experts(15, **layers), experts(20, **layers))
    assert history.experts["blocks.0"].iterations.tolist() == [10, 15, 20]
    shown = shown_layers({layer: table.values.T for layer, table in history.experts.items()})
    assert len(shown) == LAYERS and {"blocks.3", "blocks.8"} <= set(shown) and shown == sorted(shown)
    assert report_facts.experts(history) == [
        ("largest load at the end", "4.00 times the mean, in blocks.3"),
        ("smallest load at the end", "0.00 times the mean"),
        ("without tokens in blocks.3", "experts 1, 2, 3"),
        ("without tokens in blocks.8", "experts 1, 2, 3"),
        ("layers", "6 of 9 are shown: those with the largest loads"),
    ]
    history.experts.clear()
    assert report_facts.experts(history) == []


def test_loads_are_in_means_over_the_experts():
    loads = np.array([[40, 10, 0], [8, 30, 0], [16, 0, 0], [0, 0, 0]])  # means 16, 10 and 0
    expected = [[2.5, 1, 1], [0.5, 3, 1], [1, 0, 1], [0, 0, 1]]
    np.testing.assert_allclose(heat_map.relative(loads), expected)
