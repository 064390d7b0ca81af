# SPDX-License-Identifier: Apache-2.0
"""Predicted speeds and memory beside published runs of other suites, and what docs/planning.md says of them."""

import importlib
import re
from itertools import pairwise
from statistics import median

import pytest

from megatron.planner.device import GIB, find
from megatron.planner.published import SOURCES, accuracy_of, judges, report, runs
from megatron.planner.reached import (
    ACCURACY,
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_TOKENS,
    DATA,
    EXPOSED,
    LINEAR,
    MODEL,
    UNFUSED,
    accuracy,
)
from megatron.tools import plan

RUNS = runs()
COMPARED = [run for run in RUNS if run.is_compared]


def test_the_page_shows_the_commands_tables(root, capsys):
    page = (root / "docs" / "planning.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- published -->\n(.*?)\n<!-- end -->", page, re.S)[1]
    plan.main(["--published"])
    assert capsys.readouterr().out.rstrip("\n") == shown == report()  # python benchmarks/published.py --write


def test_a_third_of_one_table_was_fitted():
    fitted = [run for run in RUNS if run.is_fitted]
    assert {run.source for run in fitted} == {"llm-foundry"} and len(fitted) == 44
    assert sum(run.source == "llm-foundry" for run in RUNS) == 140
    assert not set(map(id, fitted)) & {id(run) for key in ACCURACY for run in judges(key[1], key[0], RUNS)}


@pytest.mark.parametrize("gpu, layouts", ACCURACY)
def test_errors_beside_times_are_those_of_the_runs(gpu, layouts):
    assert ACCURACY[gpu, layouts] == accuracy_of(judges(layouts, gpu, RUNS))


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
    assert max(COMPARED, key=lambda run: abs(run.error)).parameters == 758111232  # 760M with 512 tokens


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
    assert len(known) == 4
    for run in known:
        assert run.memory() / GIB == pytest.approx(run.memory_gib, rel=0.09)


def test_every_run_has_a_source_and_fp8_is_not_compared():
    assert {run.source for run in RUNS} == set(SOURCES)
    assert {run.precision for run in RUNS} == {"bf16", "fp8"} and len(COMPARED) == 182


def test_devices_without_published_runs_have_no_error():
    assert accuracy("H200-141GB", False) is accuracy("NVIDIA H100 PCIe", True) is accuracy("B200-180GB", False) is None
    assert accuracy("NVIDIA H100 80GB HBM3", False) == ACCURACY["H100", DATA]
    assert find("a100").accuracy(True) == ACCURACY["A100", MODEL]
