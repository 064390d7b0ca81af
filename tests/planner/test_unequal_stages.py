# SPDX-License-Identifier: Apache-2.0
"""Stages that differ: what the planner says of their time and of waiting, against the simulator and formulas."""

import random
from dataclasses import replace

import pytest

from megatron.model.command_line import parse_any
from megatron.pipeline.schedule import stage_map
from megatron.pipeline.simulate import hidden_by_turns, make_rank_schedules, simulate
from megatron.planner.problems import inspect
from megatron.planner.schedule_time import ShardingTimes, _sample, is_split, unequal_span
from megatron.planner.speed import end_costs, layer_costs, step
from megatron.planner.target import cluster_of
from tests.pipeline.coarse_messages import coarse

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2)]


# ---- spans -----------------------------------------------------------------------------------------------------------


def simulated(schedule, pp, num_microbatches, chunks, passes, sharding=None):
    """What the simulator has: (rank, op) -> (start, end). passes: forward and backward of each stage."""
    plan, stages = make_rank_schedules(schedule, pp, num_microbatches, chunks), stage_map(schedule, pp, chunks)

    def took(rank, op):
        forward, backward = passes[stages.index((rank, op.chunk))]
        return {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}[op.kind]

    lists, took = (plan, took) if sharding is None else coarse(plan, sharding, took)
    return simulate(lists, stages, took)


def ends(times):
    return max(end for _, end in times.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule, chunks", SCHEDULES)
@pytest.mark.parametrize("pp, num_microbatches", [(2, 3), (4, 16), (3, 32), (6, 50)])
def test_spans_of_unequal_stages_are_the_simulators(schedule, chunks, pp, num_microbatches):
    draw = random.Random(pp)
    for spread in (0.05, 1.0):
        passes = [(1 + spread * draw.random(), 2 + spread * draw.random()) for _ in range(pp * chunks)]
        exact = ends(simulated(schedule, pp, num_microbatches, chunks, passes))
        found = unequal_span(schedule, pp, num_microbatches, chunks, passes, ShardingTimes(0))
        assert found == pytest.approx(exact, rel=1e-9 if num_microbatches <= 5 * pp else 0.01)


@pytest.mark.parametrize("stages", [17, 20, 31, 32, 64])
def test_a_sample_of_stages_is_even(stages):
    """The first, the last, and those nearest to equal distances."""
    found = _sample(tuple(range(stages)), 16)
    assert (found[0], found[-1]) == (0, stages - 1)
    assert all(abs(one - n * (stages - 1) / 15) <= 0.5 for n, one in enumerate(found))


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("v-half", 2)])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_long_steps_of_any_number_of_micro_batches_are_the_simulators(schedule, chunks, pp):
    """Whether or not the ranks divide it."""
    draw = random.Random(pp)
    for num_microbatches in range(5 * pp + 1, 6 * pp + 2):
        passes = [(1 + draw.random(), 2 + draw.random()) for _ in range(pp * chunks)]
        exact = ends(simulated(schedule, pp, num_microbatches, chunks, passes))
        found = unequal_span(schedule, pp, num_microbatches, chunks, passes, ShardingTimes(0))
        assert found == pytest.approx(exact, rel=0.005)


@pytest.mark.parametrize("schedule, chunks", [("1f1b &", 1), ("interleaved &", 2), ("zb-h1 &", 1), ("zb-v &", 2)])
@pytest.mark.parametrize("pp, num_microbatches", [(1, 40), (2, 3), (4, 16), (3, 32)])
def test_spans_of_passes_in_turns_are_the_simulators(schedule, chunks, pp, num_microbatches):
    if pp == 1 and schedule == "interleaved &":
        return
    draw = random.Random(pp)
    passes = [(1 + draw.random(), 2 + draw.random()) for _ in range(pp * chunks)]
    exchanges = [(0.6 * draw.random(), 0.9 * draw.random()) for _ in passes]
    plan, stages = make_rank_schedules(schedule, pp, num_microbatches, chunks), stage_map(schedule, pp, chunks)
    halves = 2 if is_split(schedule) else 1
    of = lambda rank, op: stages.index((rank, op.chunk))
    cost = lambda rank, op: passes[of(rank, op)][0] if op.kind == "F" else passes[of(rank, op)][1] / halves
    hidden = lambda rank, one, other: hidden_by_turns(
        (cost(rank, one), exchanges[of(rank, one)][0]), (cost(rank, other), exchanges[of(rank, other)][1])
    )
    exact = max(end for _, end in simulate(plan, stages, cost, hidden=hidden).values())
    found = unequal_span(schedule, pp, num_microbatches, chunks, passes, ShardingTimes(0), exchanges)
    assert found == pytest.approx(exact, rel=1e-9 if num_microbatches <= 5 * pp else 0.01)
    assert found < unequal_span(schedule, pp, num_microbatches, chunks, passes, ShardingTimes(0))


def test_turns_hide_no_more_exchanges_of_recomputed_experts():
    """A backward pass then has four exchanges of a layer to the two of a forward pass, after whose last turn half of them
    run alone.
    """
    flags = (
        "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 --vocab-size 1000 --num-experts 8 "
    )
    flags += "--moe-router-topk 2 --ep 2 --micro-batch-size 2 --global-batch-size 16 --num-gpus 2 --device-name h100 "
    saved = []
    for more in ("", "--recompute-granularity full"):
        apart, together = (
            step(*looked_at(f"{flags} {more} {turns}")) for turns in ("", "--overlap-moe-expert-parallel-comm")
        )
        saved.append(apart.seconds - together.seconds)
    assert saved[0] == pytest.approx(saved[1], rel=1e-6) and saved[0] > 0.4 * apart.parts["expert parallel"]


@pytest.mark.parametrize("zero", [1, 3])
def test_spans_with_sharding_are_the_simulators(zero):
    passes, sharding = [(1.0, 2.0), (1.5, 3.0), (0.5, 1.0), (1.0, 2.5)], ShardingTimes(zero, gather=3.0, reduce=0.4)
    exact = ends(simulated("1f1b", 4, 12, 1, passes, sharding))
    assert unequal_span("1f1b", 4, 12, 1, passes, sharding) == pytest.approx(exact, rel=0.03)


def test_many_ranks_are_read_off_few():
    passes = [(1.1, 2.0), *[(1.0, 2.0)] * 22, (1.5, 3.0)]
    for schedule in ("1f1b", "zb-h1"):
        exact = ends(simulated(schedule, 24, 48, 1, passes))
        assert unequal_span(schedule, 24, 48, 1, passes, ShardingTimes(0)) == pytest.approx(exact, rel=0.02)


# ---- the bubble ------------------------------------------------------------------------------------------------------


def looked_at(flags):
    config = parse_any(flags.split())
    cluster = cluster_of(config, {})[0]
    found = inspect(config, cluster)
    return found.job, found.layout, cluster


COMMON = "--mock-data --train-iters 1 --lr 1 --bf16 --device-name A100-80GB"
SMALL = f"{COMMON} --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50304"


@pytest.mark.parametrize("cut", ["2,6", "3,5"])
def test_the_bubble_is_the_share_of_all_ranks_time_in_which_they_wait(cut):
    """Of two ranks the slower one works all the time but for a pass of the other there and back."""
    flags = f"{SMALL} --world-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 12"
    job, layout, cluster = looked_at(f"{flags} --pipeline-stage-layers {cut}")
    first, last = end_costs(job, layout, cluster)
    layers, at = layer_costs(job, layout, cluster), int(cut[0])
    message = cluster.seconds("send", job.facts.message_bytes(layout.rank_setup(job)), 1, 2, 1)
    a, b = first + sum(layers[:at]) + 2 * message, last + sum(layers[at:]) + 2 * message
    found, span = step(job, layout, cluster), 12 * b + a
    assert b > a
    assert found.bubble == pytest.approx(1 - 12 * (a + b) / (2 * span))
    assert found.parts["bubble"] == pytest.approx(found.bubble * span)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_the_bubble_of_equal_stages_is_the_formulas():
    flags = f"{SMALL} --world-size 4 --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8"
    job, layout, cluster = looked_at(flags)
    found = step(job, layout, cluster).bubble
    assert 3 / 11 < found < 0.5, "the output layer makes the last stage longer"
    job = replace(job, facts=replace(job.facts, vocab_size=8))
    assert step(job, layout, cluster).bubble == pytest.approx(3 / 11, abs=0.01)
