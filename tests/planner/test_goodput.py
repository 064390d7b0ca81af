# SPDX-License-Identifier: Apache-2.0
"""Save intervals and goodput: against a simulation of failures, and in the output of plan and --dry-run."""

import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.checkpoint.interval import best_interval, goodput
from megatron.planner import goodput as planner
from megatron.planner.cluster import Cluster
from megatron.planner.device import find
from megatron.planner.goodput import Saving
from megatron.tools import plan

JOB = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --mock-data --lr 1e-3
    --train-iters 9 --bf16 --device-name A100-80GB --world-size 16 --global-batch-size 16 --attention-dropout 0""".split()


def simulated(interval: float, stall: float, mean: float, restart: float, failures: int) -> float:
    """The share of time that trains steps which a save keeps, until this number of failures. A failure may strike at any
    time; what was not saved is lost, and a restart begins anew if it fails.
    """
    draw, clock, kept = random.Random(1), 0.0, 0.0
    for _ in range(failures):
        left = draw.expovariate(1 / mean)
        clock += left
        left -= restart
        while left >= interval + stall:
            left -= interval + stall
            kept += interval
    return kept / clock


@pytest.mark.parametrize(
    "interval, stall, mean, restart", [(600, 20, 3600, 120), (60, 10, 400, 300), (3000, 5, 9000, 0)]
)
def test_goodput_is_that_of_a_simulation(interval, stall, mean, restart):
    found = simulated(interval, stall, mean, restart, 40_000)
    assert goodput(interval, stall, mean, restart) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("stall, mean, restart", [(1.0, 3600.0, 0.0), (30.0, 7200.0, 300.0), (300.0, 7200.0, 60.0)])
def test_no_interval_is_better_by_more_than_a_thousandth(stall, mean, restart):
    best = goodput(best_interval(stall, mean), stall, mean, restart)
    tried = max(goodput(best_interval(stall, mean) * 1.05**n, stall, mean, restart) for n in range(-60, 60))
    assert best > tried - 1e-3


@pytest.mark.parametrize("stall, mean", [(1.0, 3600.0), (30.0, 7200.0), (300.0, 7200.0), (120.0, 86400.0)])
def test_the_best_interval_is_where_goodput_is_largest(stall, mean):
    """To the second for short saves; Daly's series ends at its third term."""
    found = max((n / 10 for n in range(1, 200_000)), key=lambda interval: goodput(interval, stall, mean, 77.0))
    assert best_interval(stall, mean) == pytest.approx(found, rel=1e-3, abs=2)
    assert goodput(1.3 * found, stall, mean) < goodput(found, stall, mean) > goodput(found / 1.3, stall, mean)


def test_costs_of_saves_and_restarts(monkeypatch):
    """4 nodes of 8: 1e9 trained parameters are 12 GB with their state, 2e9 frozen ones 4 GB; 3 GB/s of a node's drive."""
    monkeypatch.setattr(planner, "groups_of", lambda layout, layers, cuda: (layout, layers, cuda))
    monkeypatch.setattr(planner, "start_up", lambda groups, kind: SimpleNamespace(total=7.0 if groups == GROUPS else 0))
    GROUPS = ("layout", 5, True)
    facts = SimpleNamespace(weights="weights", num_layers=5)
    selection = SimpleNamespace(sizes=lambda weights: (1e9, 2e9))
    plan = SimpleNamespace(job=SimpleNamespace(selection=selection, facts=facts, element=2), layout="layout")
    cluster = Cluster(replace(find("A100"), host=10e9), 32, 8)
    config = lambda own: SimpleNamespace(checkpoint=SimpleNamespace(async_save=own))
    written = 16e9 / 4 / 3e9
    waits = planner.saving_of(config(False), plan, cluster, hours=100.0)
    assert waits == Saving(pytest.approx(written), pytest.approx(60 + 7 + written), 3600 * 25.0)
    beside = planner.saving_of(config(True), plan, cluster, hours=100.0)
    assert beside == Saving(pytest.approx(16e9 / 32 / 10e9), pytest.approx(60 + 7 + written), 3600 * 25.0)
    alone = planner.saving_of(config(False), plan, Cluster(find("A100"), 4, 8), hours=100.0)
    assert (alone.stall, alone.between) == (pytest.approx(16e9 / 3e9), 360_000.0)


def test_costs_of_snapshots(monkeypatch):
    """4 nodes of 8 hold 16 GB of state: a node 4 GB, a rank half a GB, each in two memories."""
    facts, selection = SimpleNamespace(weights="w", num_layers=5), SimpleNamespace(sizes=lambda weights: (1e9, 2e9))
    plan = SimpleNamespace(job=SimpleNamespace(selection=selection, facts=facts, element=2), layout="layout")
    monkeypatch.setattr(planner, "groups_of", lambda *words: None)
    monkeypatch.setattr(planner, "start_up", lambda *words: SimpleNamespace(total=7.0))
    cluster = Cluster(replace(find("A100"), host=10e9, outer=25e9), 32, 8)
    config = lambda copies: SimpleNamespace(checkpoint=SimpleNamespace(async_save=False, replication_factor=copies))
    two = planner.saving_in_memory(config(2), plan, cluster, hours=100.0)
    assert two.snapshots.stall == pytest.approx(0.5 / 10 + 2 * 4 / 20 + 0.5 / 25)
    assert two.snapshots.restart == pytest.approx(60 + 7 + 4 / 20) and two.snapshots.between == 3600 * 25.0
    assert two.disk == planner.saving_of(config(2), plan, cluster, hours=100.0) and two.held == 2 * 2 * 4e9
    assert two.lost == pytest.approx(3600 * 25.0 * 3600 * 100.0 / 67.2)
    one, nine = (planner.saving_in_memory(config(copies), plan, cluster, hours=100.0) for copies in (1, 9))
    assert one.lost == 3600 * 25.0 and one.snapshots.stall == pytest.approx(0.5 / 10 + 4 / 20)
    assert nine.held == 2 * 4 * 4e9  # no more copies than nodes


def with_snapshots(saving, interval: float, failures: int) -> float:
    """As `simulated`, of a job that goes back to the last save on the disk when a failure takes copies, too."""
    draw, clock, kept, on_disk, since = random.Random(2), 0.0, 0.0, 0.0, 0.0
    one, stays = saving.snapshots, 1 - saving.snapshots.between / saving.lost
    for _ in range(failures):
        left = draw.expovariate(1 / one.between)
        clock += left
        left -= one.restart
        while left >= interval + one.stall:
            left, kept, since = left - interval - one.stall, kept + interval, since + interval
            if since >= saving.disk_interval:
                left, on_disk, since = left - saving.disk.stall, kept, 0.0
        if draw.random() > stays:
            kept, since, clock = on_disk, 0.0, clock + saving.disk.restart
    return kept / clock


@pytest.mark.parametrize("lost, best", [(6e5, 40.0), (1e9, 40.0), (9e4, 100.0)])
def test_goodput_with_snapshots_is_that_of_a_simulation(lost, best):
    """Copies are lost at each 60th failure, almost never, and at each ninth."""
    saving = planner.SavingInMemory(Saving(2.0, 70.0, 10_000.0), Saving(60.0, 150.0, 10_000.0), lost, 0.0)
    assert saving.disk_interval == min(86400.0, best_interval(60.0, lost))
    assert saving.goodput(best) == pytest.approx(with_snapshots(saving, best, 20_000), rel=0.01)


def test_a_hopeless_job_has_no_goodput():
    assert goodput(1e6, 1e6, 1.0) == 0.0 and Saving(10.0, 1e9, 1.0).goodput == 0.0


@pytest.mark.sampled(2)
def test_mtbf_is_that_of_a_node(capsys):
    """Two nodes: the job fails twice as often."""
    plan.main([*JOB, "--mtbf", "100", "--tp", "1", "--pp", "1"])
    told = " ".join(capsys.readouterr().out.split())
    assert "2 nodes, of which each fails every 100 h: a failure every 50.0 h" in told
    assert "--mean-time-to-interruption 50" in told and "expected goodput: 9" in told
    assert re.search(r"snapshots in the memory of nodes: 9[\d.]+% \(\+[\d.]+ points\), --non-persistent-save-int", told)
    plan.main([*JOB, "--tp", "1", "--pp", "1"])
    assert "goodput" not in capsys.readouterr().out
    pretrain_gpt.main([*JOB, "--mtbf", "100", "--micro-batch-size", "1", "--dry-run"])
    assert "best: --save-interval" in capsys.readouterr().out
