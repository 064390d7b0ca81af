# SPDX-License-Identifier: Apache-2.0
"""Predicted speeds and memory beside published runs of other suites, and what docs/proof/planner.md says of them."""

import importlib
import re
from dataclasses import replace
from itertools import pairwise
from statistics import median
from types import SimpleNamespace

import pytest

from megatron.planner.choose import tolerance
from megatron.planner.cluster import Cluster
from megatron.planner.device import GIB, find
from megatron.planner.layout import Layout
from megatron.planner.memory import memory_report
from megatron.planner.published import SOURCES, accuracy_of, judges, report, runs
from megatron.planner.reached_speed import (
    ACCURACY,
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_TOKENS,
    EXPOSED,
    LINEAR,
    UNFUSED,
    accuracies,
    accuracy,
)
from megatron.planner.speed import step
from megatron.planner.text import error_of, trust
from megatron.tools import plan

RUNS = runs()
COMPARED = [run for run in RUNS if run.is_compared]


def test_the_page_shows_the_first_of_the_commands_tables(root, capsys):
    page = (root / "docs" / "proof" / "planner.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- published -->\n(.*?)\n<!-- end -->", page, re.S)[1]
    plan.main(["--published"])
    told = capsys.readouterr().out.rstrip("\n")
    assert told == report() and told.split("\n\n")[0] == shown  # python benchmarks/published.py --write
    assert told.count("\n") > shown.count("\n") + len(RUNS), "the sources, and each run"


def test_a_third_of_one_table_was_fitted():
    fitted = [run for run in RUNS if run.is_fitted]
    assert {run.source for run in fitted} == {"llm-foundry"} and len(fitted) == 44
    assert sum(run.source == "llm-foundry" for run in RUNS) == 140
    assert not set(map(id, fitted)) & {id(run) for key in ACCURACY for run in judges(key[1], key[0], RUNS)}


@pytest.mark.parametrize("gpu, features", ACCURACY)
def test_errors_beside_times_are_those_of_the_runs(gpu, features):
    assert ACCURACY[gpu, features] == accuracy_of(judges(features, gpu, RUNS))


def test_every_kind_of_published_layout_is_in_the_table():
    """But for layouts with only data parallelism that no eager suite published."""
    found = {(run.gpu.partition("-")[0], run.features) for run in COMPARED if run.kind != "llm.c" and not run.is_fitted}
    assert found == set(ACCURACY)


@pytest.mark.parametrize(
    "layout, mixture, features",
    [
        (Layout(), False, "one node"),
        (Layout(dp=8), False, "one node"),
        (Layout(dp=9), False, "dp over nodes"),
        (Layout(tp=2, dp=4), False, "tp"),
        (Layout(tp=2, dp=5), False, "tp, dp over nodes"),
        (Layout(tp=8, pp=4), False, "tp, pp"),  # ranks of pp are on other nodes, copies are not
        (Layout(cp=16), False, "cp"),
        (Layout(cp=2, dp=8), False, "cp, dp over nodes"),
        (Layout(dp=8, ep=8), True, "experts, ep"),
        (Layout(dp=8), True, "experts"),
        (Layout(tp=2, pp=2, cp=2, dp=4, ep=8), True, "experts, tp, pp, cp, ep, dp over nodes"),
    ],
)
def test_features_of_layouts(layout, mixture, features):
    assert layout.features(8, mixture) == features


def test_errors_are_those_of_runs_with_the_same_features():
    """Neither of the two published runs with tp on H100 had cp, so their error is not told of a layout with cp."""
    h100 = Cluster(find("H100"), 64)
    near, far = Layout(tp=8, dp=8, zero=3, shard=8), Layout(tp=4, cp=2, dp=8, zero=3, shard=16)
    assert error_of(h100, near) == "error 1% in 2 runs" and error_of(h100, far) == "error unknown"
    plan = lambda layout: SimpleNamespace(layout=layout)
    assert "2 published runs on this GPU with the same features (tp, dp over nodes)" in trust(plan(near), h100)
    assert "no published run on this GPU has the same features (tp, cp, dp over nodes)" in trust(plan(far), h100)
    assert "no published run of this GPU was found" in trust(plan(near), Cluster(find("L4"), 64))
    experts = Cluster(find("H100"), 64)
    experts = replace(experts, device=replace(experts.device, mixture=True))
    unknown = Layout(dp=64)  # of a mixture without ep there is no run
    every = accuracy_of(run for run in COMPARED if run.experts and not run.is_fitted)
    assert error_of(experts, unknown) == f"error unknown; of other mixtures up to {every.worst:.0%}"
    other = f"{every.runs} runs of other mixtures had a median error of {every.median:.0%}, worst {every.worst:.0%}"
    assert other in trust(plan(unknown), experts) and "other mixtures" not in trust(plan(far), h100)
    assert error_of(experts, Layout(tp=2, dp=32, ep=8, etp=1)) == "error 55% in 1 run"
    assert tolerance(experts) == 0.1 and tolerance(h100) == 0.02


@pytest.mark.full
def test_constants_are_those_of_the_fit(root, monkeypatch):
    """From other starting values, and from the fitted runs alone."""
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(root / "benchmarks")
    benchmark = importlib.import_module("published")
    found = benchmark.fit([run for run in RUNS if run.is_fitted])
    own = [*LINEAR.values(), *ATTENTION.values(), ATTENTION_TOKENS, ATTENTION_BACKWARD, UNFUSED, EXPOSED]
    assert [*found.values()] == pytest.approx(own, rel=0.01)


def test_errors_that_the_page_claims():
    held = sorted(abs(run.error) for run in COMPARED if run.kind == "eager" and not run.is_fitted)
    assert len(held) == 106 and median(held) < 0.024 and held[-3] < 0.21 and held[-1] < 0.285
    megatron = [abs(run.error) for run in COMPARED if run.kind == "megatron"]
    assert len(megatron) == 24 and max(megatron) < 0.15 and median(megatron) < 0.045
    compiled = [run.error for run in COMPARED if run.source == "torchtitan-h100" and run.kind == "compiled"]
    assert all(-0.07 < error < 0 for error in compiled) and len(compiled) == 2
    assert all(0.17 < 1 / (1 + run.error) - 1 < 0.35 for run in COMPARED if run.kind == "llm.c")


def test_one_published_pair_contradicts_its_table():
    """With equal tokens a micro-batch, shorter sequences only save attention: they are faster, except in one pair."""
    groups = {}
    for run in [run for run in RUNS if run.source == "llm-foundry"]:
        same = run.gpu, run.gpus, run.hidden, run.zero, run.recompute, run.micro * run.seq
        groups.setdefault(same, []).append((run.seq, run.tokens_per_second))
    groups = {same: sorted(rows) for same, rows in groups.items() if len(rows) > 1}
    slower = [same for same, rows in groups.items() if any(one[1] < two[1] for one, two in pairwise(rows))]
    assert len(groups) == 20 and slower == [("A100-80GB", 8, 1536, 3, "none", 96 * 512)]
    # 760M with 512 tokens
    assert max((run for run in COMPARED if run.experts is None), key=lambda run: abs(run.error)).parameters == 758111232


def test_models_have_their_published_sizes():
    """To the parameter in llm-foundry's table; Llama's as their cards round them."""
    assert all(run.job.facts.parameters == run.parameters for run in RUNS if run.parameters)
    llama = {round(run.job.facts.parameters / 1e9, 1) for run in RUNS if run.arch == "llama"}
    assert llama == {8.0, 13.0, 69.0, 70.6, 405.9}


def test_published_runs_fit():
    """As FSDP keeps state."""
    own = [run for run in RUNS if run.source == "llm-foundry"]
    assert max(run.memory() / run.device.memory_bytes for run in own) < 0.97


def test_published_peaks_of_memory():
    known = [run for run in COMPARED if run.memory_gib]
    assert len(known) == 7 and sum(run.experts is not None for run in known) == 3
    for run in known:
        assert run.memory() / GIB == pytest.approx(run.memory_gib, rel=0.09)


def test_every_run_has_a_source_and_fp8_is_not_compared():
    assert {run.source for run in RUNS} == set(SOURCES)
    assert {run.precision for run in RUNS} == {"bf16", "fp8"} and len(COMPARED) == 209


def test_devices_without_published_runs_have_no_error():
    nodes = "dp over nodes"
    assert accuracy("H200-141GB", nodes) is accuracy("NVIDIA H100 PCIe", "tp") is accuracy("B200-180GB", nodes) is None
    assert accuracy("NVIDIA H100 80GB HBM3", nodes) == ACCURACY["H100", nodes]
    assert find("a100").accuracies["tp, pp"] == ACCURACY["A100", "tp, pp"]
    assert replace(find("a100"), assumed=False).accuracies == {}


# ---- mixtures --------------------------------------------------------------------------------------------------------

MIXTURES = [run for run in RUNS if run.experts is not None]


def test_mixtures_have_their_published_sizes():
    """As their cards round them: (layers, parameters, those that a token uses, in 1e9)."""
    sizes = lambda facts: (facts.num_layers, round(facts.parameters / 1e9, 1), round(facts.active_parameters / 1e9, 1))
    found = {sizes(run.job.facts) for run in MIXTURES}
    # gpt-oss counts one of its two tables among active parameters (5.1 and 3.6).
    assert found == {(24, 20.9, 4.2), (36, 116.8, 5.7), (48, 30.5, 3.4), (94, 235.1, 22.2)}


def test_errors_of_mixtures_that_the_page_claims():
    assert len(MIXTURES) == 27 and all(run.is_compared and not run.is_fitted for run in MIXTURES)
    kept, seen = ([run.error for run in MIXTURES if run.is_kept_back is one] for one in (True, False))
    assert (len(kept), len(seen)) == (13, 14)
    assert median(map(abs, kept)) == pytest.approx(0.25, abs=0.01) and -0.56 < min(kept) < max(kept) < 0.3
    assert median(map(abs, seen)) == pytest.approx(0.18, abs=0.01) and -0.45 < min(seen) < max(seen) < 0.4


def test_exchanges_over_the_network_make_up_the_time_that_was_published():
    """Two runs that spend most of their time in exchanges between nodes: within 10 %. If all
    adapters of a node carried each rank's exchange, the first would come out more than twice as fast.
    """
    over = [run for run in MIXTURES if run.dispatch == "each" and run.ep > 8]
    assert [(run.gpu, run.ep) for run in over] == [("B200-180GB", 64), ("H100-80GB", 16)]
    for run in over:
        found = step(run.job, run.layout, run.cluster)
        assert abs(run.error) < 0.1 and found.parts["expert parallel"] > 0.45 * found.seconds


def test_pairs_that_differ_in_one_thing_are_predicted_in_their_order():
    """Of Qwen3 30B on the same 16 GPUs: overlap, and a dispatcher that sends a token once to each node."""
    plain, once, turns, _ = sorted(
        (run for run in MIXTURES if run.source == "megatron-bridge-qwen3"), key=lambda run: -run.measured
    )
    assert plain.dispatch == "each" and once.dispatch == "once" and not once.turns and turns.turns
    assert plain.predicted < once.predicted < turns.predicted
    assert once.predicted / plain.predicted == pytest.approx(plain.measured / once.measured, rel=0.2)
    assert turns.predicted / once.predicted == pytest.approx(once.measured / turns.measured, rel=0.1)


@pytest.mark.parametrize(
    "layers, pp, chunks, each", [(126, 8, 1, "15,16,16,16,16,16,16,15"), (94, 4, 2, "11,12,12,12,12,12,12,11")]
)
def test_embedding_and_loss_are_layers_where_layers_alone_do_not_fill_the_stages(layers, pp, chunks, each):
    """As of Llama 3 405B. Of layers that do, each stage has as many."""
    run = replace(RUNS[0], layers=layers, pp=pp, chunks=chunks, gpus=pp)
    assert run.layout.stage_layers == each
    assert replace(run, layers=layers + 2).layout.stage_layers is None


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_fsdps_memory_is_without_what_it_does_not_keep(zero):
    """With ZeRO 3 no copy of the weights in bf16, and gradients that arrive in half the bytes."""
    run = replace(next(run for run in RUNS if run.kind == "eager" and run.gpus == 8 and not run.experts), zero=zero)
    held = memory_report(run.job, run.layout, run.device, 0).device
    less = held["weights"] + held["gradient buffers"] / 2 if zero == 3 else 0
    assert run.memory() == sum(held.values()) - less and (zero < 3 or less > 0)


@pytest.mark.parametrize("name", ["H100 PCIe", "NVIDIA H100 NVL", "GH200-96GB", "T4-16GB"])
def test_variants_of_a_gpu_have_no_errors_of_its_runs(name):
    assert accuracies(name) == {} and accuracies("NVIDIA H100 80GB HBM3")
