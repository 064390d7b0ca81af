# SPDX-License-Identifier: Apache-2.0
"""The planner's figures of a model with experts (`tests/models/own_experts.py`) against runs, layout by layout."""

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

import pretrain_gpt
from megatron.errors import SettingsError
from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of
from megatron.mpu import collectives, mappings
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.planner.choose import search_layouts
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import state
from megatron.planner.parity import parse_layout
from megatron.planner.preflight.ranks import Design, check_ranks
from megatron.planner.search import Space, _expert_sizes
from megatron.planner.shrink import asked_ranks, shrunk_job_of
from megatron.planner.traffic import totals, transfers
from megatron.tools import plan, verify_layout
from megatron.training.rules import resolve
from tests.models import own_experts
from tests.models.plain_state import LINE, VOCABULARY
from tests.models.test_own_experts import EP2, ETP1, ETP2, PP2, TP2, piece_of_gradient, reduced_as_dense, same_names
from tests.planner.test_truth import counted_step

FOUR = f"{TP2} {EP2} {ETP1}"
CASES = [
    (1, ""),
    (2, EP2),
    (2, f"{EP2} --sharding-stage 1"),
    (2, f"{TP2} {ETP1} --sharding-stage 1 --bf16"),
    (2, f"{ETP2} --sharding-stage 2"),
    (4, f"{EP2} --sharding-stage 1 --bf16"),
    (4, f"{EP2} --sharding-stage 2 --sharding-degree 2 --micro-batch-size 1"),
    (4, f"{EP2} --sharding-stage 3 --recompute-granularity full"),
    (4, f"{TP2} {EP2} {ETP2}"),
    (4, f"{FOUR} --sharding-stage 3 --freeze blocks.1.experts.* *router*"),
    (4, f"{PP2} {EP2} --sharding-stage 2"),
    (4, f"{PP2} {ETP2} --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1"),
    (4, f"{EP2} --sharding-stage 1 --optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
    (4, f"{FOUR} --optimizer muon --sharding-stage 1"),
    (4, f"{EP2} --micro-batch-size 1 --freeze blocks.*.up.*"),
]


def settings_of(case):
    world, words = case
    return resolve(parse_any(f"{LINE} {words}".split(), recipe=own_experts.recipe()), world)


@pytest.fixture(scope="module")
def found_on(request):
    """`found_on(world)`: {case: what each rank found}, of the cases of as many ranks that run, in one set of processes."""
    run = [item for item in request.session.items if item.originalname == "test_figures_are_those_of_a_run"]
    wanted = [item.callspec.params["case"] for item in run if not item.get_closest_marker("skip")]

    def found(world):
        cases = [case for case in wanted if case[0] == world]
        settings = list(map(settings_of, cases))
        answers = run_ranks(world, lambda rank: list(map(counted_step(), settings)), timeout=300)
        return {case: list(ranks) for case, *ranks in zip(cases, *answers, strict=True)}

    return cache(found)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}".strip())
def test_figures_are_those_of_a_run(case, found_on):
    """Memory of each rank by kind, and its messages. Exchanges between ranks of ep are as uneven as the experts' loads: of
    these, those of all ranks together.
    """
    config, world = settings_of(case), case[0]
    layout = Layout.of(config, world)
    job = Job.of(config, facts_of(config, VOCABULARY), dp=layout.dp, device="cpu")
    exchanged, planned = Counter(), Counter()
    for place, memory, _, sent in found_on(world)[case]:
        held, _ = state(job, layout, place["pp"], place)
        away = held.get("offloaded optimizer state", 0) // (2 + len(job.moments))  # gradients that arrive are no state
        states = held["main weights"] + held["optimizer moments"] + away * (1 + len(job.moments))
        shared = 0 if held["main weights"] or away else memory["gradients"]  # parameters that are main weights too
        assert held["weights"] == memory["parameters"] + memory["shards"], place
        assert (held["gradients"], states) == (memory["gradients"], memory["state"] - shared), place
        messages = totals(transfers(job, layout, place["pp"], place))
        exchanged["ep"] += sent.pop(("all_to_all", "ep"), 0)
        planned["ep"] += messages.pop(("all_to_all", "ep"), 0)
        assert messages == sent, place
    assert exchanged == planned


# ---- --preflight -----------------------------------------------------------------------------------------------------


def checks(case):
    config, world = settings_of(case), case[0]
    return {
        check.name: check
        for check in check_ranks(Design(config, world, facts_of(config, VOCABULARY), own_experts.build_model))
    }


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "case, ranks, divided",
    [
        ((1, ""), "1, 1 x 1", "1 tensor parallel x"),
        ((2, f"{TP2} --bf16"), "2, 1 x 2", "2 tensor parallel x"),
        ((2, f"{TP2} {ETP1} {EP2}"), "2, 1 x 2", "2 tensor parallel, of experts 2 x 1, x"),
        ((8, f"{TP2} --ep 4 {ETP1} --sharding-stage 3 --micro-batch-size 1"), "4, 1 x 4", "of experts 4 x 1, x"),
        ((8, f"{PP2} {EP2} {ETP2} --sharding-stage 1 --recompute-granularity full"), "8, 2 x 4", "of experts 2 x 2, x"),
        ((8, f"--context-parallel-size 2 --ep 4 {TP2} --etp 2"), "8, 1 x 8", "of experts 4 x 2, x"),
        ((2, f"{TP2} {ETP1} --sharding-stage 1"), "2, 1 x 2", "of experts 1 x 1, x"),
    ],
)
def test_right_ranks_pass(case, ranks, divided):
    found = checks(case)
    assert {name: check.fault for name, check in found.items() if check.fault} == {}
    number, product = ranks.split(", ")
    assert f"{number} distinct rank(s), {product}, built" in found["layers"].line
    assert divided in found["shards"].line


def experts_of_all_ranks(patch):
    patch.setattr(Layout, "cuts", Layout().cuts)


def without_scatter(patch):
    patch.setattr(mappings, "reduce_scatter_to_sequence_parallel_region", lambda x, axis: x)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "bug, found",
    [
        (experts_of_all_ranks, {"parameters": "but the planner counts"}),
        (same_names, {"shards": "overlap"}),
        (without_scatter, {"shapes": "rank 0: "}),
        (piece_of_gradient, {}),  # of the right shape: the shrunk job finds it
    ],
)
def test_a_planted_bug_is_found(bug, found, monkeypatch):
    case = (4, f"{EP2} {ETP2} --micro-batch-size 1")
    bug(monkeypatch)
    failed = {name: check.fault for name, check in checks(case).items() if check.fault}
    assert failed.keys() == found.keys() and all(words in failed[name] for name, words in found.items()), failed


def test_counts_without_values():
    """On the meta device each kind is as frequent, on all ranks alike; otherwise it is a count."""
    numbers = torch.tensor([3, 0, 3, 1, 3])
    assert [counts.tolist() for counts in collectives.count_rows(numbers, 4, Mesh().ep)] == [[[1, 1, 0, 3]]] * 2
    for rank, received in ((0, [[1, 1], [1, 1]]), (1, [[1, 2], [1, 2]])):
        ep = Mesh(rank, replicate=2, ep=2, create_groups=False).ep
        found = collectives.count_rows(numbers.to("meta"), 4, ep)
        assert [counts.tolist() for counts in found] == [[[1, 1], [1, 2]], received]


# ---- other layouts ---------------------------------------------------------------------------------------------------


def shrunk(world, words):
    job = shrunk_job_of(parse_any(f"{LINE} {words}".split(), recipe=own_experts.recipe()), world)
    p = job.config.parallel
    return job.world_size, p.expert_model_parallel_size, p.expert_tensor_parallel_size, len(job.lost)


def test_a_shrunk_job_keeps_ranks_for_experts():
    assert shrunk(4, f"{TP2} {EP2} {ETP1}") == (4, 2, 1, 0)
    assert shrunk(16, "--ep 4 --etp 4 --micro-batch-size 1 --global-batch-size 16") == (4, 2, 2, 0)  # not 2 ranks of dp
    assert shrunk(16, f"{TP2} --ep 8 --micro-batch-size 1") == (4, 2, None, 0)
    words = f"{PP2} --ep 4 {ETP2} --context-parallel-size 2 {TP2} --micro-batch-size 1"
    assert shrunk(16, words) == (8, 2, 2, 1)  # what is lost is data parallelism


def test_ranks_of_a_layout_with_experts():
    sizes = {
        text: parse_layout(text).world_size for text in ("ep2", "ep2etp2", "tp2sp-ep2etp1", "tp2sp-ep2", "ep4dp2pp2")
    }
    assert sizes == {"ep2": 2, "ep2etp2": 4, "tp2sp-ep2etp1": 2, "tp2sp-ep2": 4, "ep4dp2pp2": 4}
    asked = lambda words: asked_ranks(parse_any(f"{LINE} {words}".split(), recipe=own_experts.recipe()))
    assert [asked(words) for words in (EP2, f"{PP2} --ep 4 {ETP2}", f"{TP2} {EP2} {ETP1}", TP2)] == [2, 16, 2, 2]


def verify(words):
    verify_layout.main(f"--model-type tests.models.own_experts {LINE} {words} --steps 2".split())


@pytest.mark.sampled(10)
def test_layouts_with_experts_are_verified(capsys, monkeypatch):
    verify("--layouts ep2,tp2sp-ep2etp1,pp2ep2-zero3")
    assert len(re.findall("PASS", capsys.readouterr().out)) == 3
    reduced_as_dense(monkeypatch)
    with pytest.raises(SystemExit):
        verify("--shrink --ep 2")
    assert re.search(r"^dp2-ep2 +2 .* FAIL \(blocks\.\d\.experts", capsys.readouterr().out, re.M)


# ---- a search --------------------------------------------------------------------------------------------------------

OPEN = LINE.replace("--micro-batch-size 2", "--sequence-parallel")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", ["--ep 4", "--ep 2 --etp 2 --sharding-stage 1", "--ep 8 --etp 1"])
def test_a_search_keeps_ranks_for_experts(words):
    """Each layout that it finds can be trained, and all divisions of eight ranks that hold the experts are among them."""
    line = f"--model-type tests.models.own_experts {OPEN} --world-size 8"
    found = search_layouts(parse_any(f"{line} {words}".split(), recipe=own_experts.recipe()))
    layouts = [one.layout for one in found.searched.plans]
    for layout in layouts:
        again = parse_any(f"{LINE} {words} {' '.join(layout.flags())}".split(), recipe=own_experts.recipe())
        assert Layout.of(resolve(again, 8), 8).expert_sizes == layout.expert_sizes
    ep, etp = int(words[5]), re.search(r"--etp (\d)", words)
    sizes = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if tp * pp <= 8 and 12 % tp == 0]
    possible = {(tp, pp) for tp, pp in sizes if 8 // pp % (ep * (int(etp[1]) if etp else 1)) == 0}
    assert {(layout.tp, layout.pp) for layout in layouts} == possible


def test_a_search_tries_all_ranks_for_experts():
    """With neither flag: every ep that divides the ranks of a stage and the 8 experts, and whole experts beside tp."""
    experts = facts_of(settings_of((1, "")), VOCABULARY).experts
    tried = lambda tp, dp, **given: {
        (one.cuts.ep, one.cuts.etp)
        for base in [Layout(tp=tp, dp=dp)]
        for grid in _expert_sizes(experts, base, Space(**given))
        for one in [replace(base, **grid)]
    }
    assert tried(1, 4) == {(1, 1), (2, 1), (4, 1)} and tried(2, 2) == {(1, 2), (1, 1), (2, 1), (4, 1)}
    assert tried(1, 12) == {(1, 1), (2, 1), (4, 1)} and tried(2, 2, etp=2) == {(1, 2), (2, 2)}
    assert tried(1, 4, ep=2) == {(2, 1)} and not tried(1, 4, ep=3)


def test_a_search_of_a_plain_model_refuses_them():
    with pytest.raises(SettingsError, match="--ep 4: --model-type GPT has no experts here"):
        pretrain_gpt.main(f"{OPEN} --world-size 8 --ep 4 --auto-parallel --dry-run".split())


def test_the_command_of_a_plan_has_them(capsys):
    plan.main(f"--model-type tests.models.own_experts {OPEN} --world-size 8 --ep 4 --json".split())
    found = json.loads(capsys.readouterr().out)
    assert "--expert-model-parallel-size 4" in found["command"]
    assert {one["settings"]["expert_model_parallel_size"] for one in found["plans"]} == {4}
    assert found["plans"][0]["parts"]["expert parallel"] > 0
