# SPDX-License-Identifier: Apache-2.0
"""The planner's figures of a model with experts (`tests/models/own_experts.py`) against runs, layout by layout."""

from collections import Counter
from functools import cache

import pytest

from megatron.model.arguments import parse_any
from megatron.model.recipe import facts_of
from megatron.mpu.forked import run_ranks
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import state
from megatron.planner.traffic import totals, transfers
from megatron.training.rules import resolve
from tests.models import own_experts
from tests.models.plain_state import LINE, VOCABULARY
from tests.models.test_own_experts import EP2, ETP1, ETP2, PP2, TP2
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
def found_on():
    """`found_on(world)`: {case: what each rank found}, of the cases of as many ranks in one set of processes."""

    def found(world):
        cases = [case for case in CASES if case[0] == world]
        settings = list(map(settings_of, cases))
        answers = run_ranks(world, lambda rank: list(map(counted_step(), settings)), timeout=300)
        return {case: list(ranks) for case, *ranks in zip(cases, *answers, strict=True)}

    return cache(found)


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
        away = held.get("offloaded optimizer state", 0) // (2 + job.moments)  # gradients that arrive are no state
        states = held["main weights"] + held["optimizer moments"] + away * (1 + job.moments)
        shared = 0 if held["main weights"] or away else memory["gradients"]  # parameters that are main weights too
        assert held["weights"] == memory["parameters"] + memory["shards"], place
        assert (held["gradients"], states) == (memory["gradients"], memory["state"] - shared), place
        messages = totals(transfers(job, layout, place["pp"], place))
        exchanged["ep"] += sent.pop(("all_to_all", "ep"), 0)
        planned["ep"] += messages.pop(("all_to_all", "ep"), 0)
        assert messages == sent, place
    assert exchanged == planned
