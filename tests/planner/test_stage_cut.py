# SPDX-License-Identifier: Apache-2.0
"""The cut of an encoder-decoder's layers into stages, against all cuts there are; and what ranks wait with it."""

from dataclasses import replace
from itertools import combinations

import pytest

from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of
from megatron.model.t5 import stages as t5_stages
from megatron.model.t5.facts import T5Facts
from megatron.pipeline.simulate import bubble_of
from megatron.pipeline.stages import Pipeline
from megatron.planner.cluster import Cluster
from megatron.planner.device import cpu, find
from megatron.planner.layout import Job, Layout
from megatron.planner.schedule_time import ShardingTimes, unequal_span
from megatron.planner.search import NOT_OFFLOADED, Space, search
from megatron.planner.speed import step
from megatron.planner.stage_cut import _moved, fastest
from tests.planner.test_unequal_stages import COMMON, looked_at, simulated

A100 = find("A100-80GB")


# ---- the cut ---------------------------------------------------------------------------------------------------------

T5 = f"""--model-type T5 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --decoder-seq-length 114 {COMMON}
    --vocab-size 32000"""
TWELVE = f"{T5} --encoder-num-layers 12 --decoder-num-layers 12 --pipeline-model-parallel-size 4 --world-size 4"


def cuts(layers, stages):
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *inner), (*inner, layers), strict=True))


@pytest.mark.parametrize(
    "pp, schedule, chunks", [(3, "1f1b", 1), (3, "zb-h1", 1), (2, "interleaved", 2), (2, "zb-v", 2)]
)
@pytest.mark.parametrize("device, micro", [(A100, 1), (A100, 4), (A100, 32), (cpu(), 1)])
def test_no_cut_is_faster(pp, schedule, chunks, device, micro):
    """Than the one that the planner finds, of all that there are, by the time that it prints."""
    config = parse_any(f"{T5} --encoder-num-layers 5 --decoder-num-layers 4".split())
    job = Job(facts_of(config, 32001), 8 * micro, "bf16", device.kind)
    layout, cluster = Layout(pp=pp, chunks=chunks, schedule=schedule, micro_batch_size=micro), Cluster(device, pp)
    time_of = lambda cut: step(job, replace(layout, stage_layers=",".join(map(str, cut))), cluster).seconds
    found = tuple(map(int, fastest(job, layout, cluster).split(",")))
    assert time_of(found) == min(map(time_of, cuts(9, pp * chunks)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", ["", "--pipeline-schedule zb-h1", "--num-virtual-stages-per-pipeline-rank 2"])
@pytest.mark.parametrize("micro", [1, 16])
def test_a_training_is_cut_by_time(micro, more):
    flags = f"{TWELVE} --micro-batch-size {micro} --global-batch-size {16 * micro} {more}"
    even = ",".join(["3"] * 8 if "virtual" in more else ["6"] * 4)
    own, other = (step(*looked_at(f"{flags} {words}")) for words in ("", f"--pipeline-stage-layers {even}"))
    assert own.seconds <= other.seconds and (micro == 1 or own.seconds < 0.95 * other.seconds)
    assert (own.bubble < other.bubble) == (own.seconds < other.seconds)


def test_what_a_search_finds_is_as_fast_as_the_training():
    job, layout, cluster = looked_at(f"{TWELVE} --micro-batch-size 4 --global-batch-size 64")
    space = Space(global_batch=64, tp=1, pp=4, schedule="1f1b", micro_batch_size=4, zero=0, offload=NOT_OFFLOADED)
    [plan] = search(job, cluster, space).plans
    assert plan.step.seconds == pytest.approx(step(job, layout, cluster).seconds)
    assert plan.step.bubble == pytest.approx(step(job, layout, cluster).bubble)


@pytest.mark.parametrize("stages, far", [(2, 32), (5, 12), (32, 2), (40, 1), (64, 1), (100, 1)])
def test_a_layer_moves_to_any_near_stage_in_either_direction(stages, far):
    """To the next ones at least; a stage keeps a layer."""
    cut = tuple(1 + n % 2 for n in range(stages))
    wanted = {
        tuple(n - (at == giver) + (at == taker) for at, n in enumerate(cut))
        for giver in range(1, stages, 2)
        for taker in range(stages)
        if 0 < abs(giver - taker) <= far
    }
    moves = list(_moved(cut))
    assert set(moves) == wanted and len(moves) == len(wanted)


def test_what_cannot_be_timed_is_cut_by_work():
    for wrong in ("--hidden-size 0", "--micro-batch-size auto --global-batch-size 32", "--global-batch-size 7"):
        flags = f"{TWELVE} --micro-batch-size 2 {wrong}".split()
        own = parse_any(flags).parallel.pipeline_stage_layers
        assert own in (None, "4,4,6,10"), wrong
    assert parse_any(f"{TWELVE} --pipeline-stage-layers 1,1,1,21".split()).parallel.pipeline_stage_layers == "1,1,1,21"


# ---- time in which ranks wait, products alone ------------------------------------------------------------------------


def waste(schedule, vocabulary, cut=None, chunks=1):
    """Share of all ranks' time in 16 micro-batches at pp 4, where passes take as long as their layers' products, and a
    backward pass twice that. vocabulary: 0 leaves out the output layer.
    """
    flags = TWELVE.replace("--pipeline-model-parallel-size 4", "").replace("32000", f"{vocabulary or 1}")
    config = parse_any(flags.split())
    words = cut and ",".join(map(str, cut))
    parallel = replace(
        config.parallel,
        pipeline_model_parallel_size=4,
        pipeline_schedule=schedule,
        pipeline_stage_layers=words,
        num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
    )
    config = t5_stages.normalize_config(replace(config, parallel=parallel))
    facts = T5Facts.of(config, vocabulary)
    pipeline = Pipeline.of(config.parallel, 24)
    costs = [sum(facts.layer_flops(n, seen=True) for n in layers) for layers in pipeline.layers]
    costs[-1] += 2.0 * facts.target * 1024 * vocabulary
    return bubble_of(simulated(schedule, 4, 16, chunks, [(one, 2 * one) for one in costs]), 4)


def bounded(found, shown):
    """Whether a figure is what the page says, in per cent, and not above it before it is rounded to a tenth."""
    return shown - 0.1 < 100 * found <= shown


def test_time_in_which_ranks_wait_is_what_the_page_says():
    """docs/proof/planner.md, "Stages of encoder-decoders"."""
    even, chunks = (6, 6, 6, 6), dict(chunks=2)
    assert bounded(waste("1f1b", 0, even), 34.2) and bounded(waste("1f1b", 32000, even), 32.5)
    assert bounded(waste("1f1b", 0), 20.3) and bounded(waste("1f1b", 32000), 22.1)
    assert bounded(waste("zb-h1", 0), 11.7) and bounded(waste("zb-h1", 32000), 14.1)
    assert waste("zb-h1", 0) <= 0.12 and 0.20 < waste("1f1b", 0) < 0.2027, "not 20 %, and no cut is better"
    assert bounded(waste("interleaved", 0, **chunks), 11.3) and bounded(waste("interleaved", 32000, **chunks), 13.1)


@pytest.mark.full
@pytest.mark.parametrize("schedule, vocabulary", [("1f1b", 0), ("1f1b", 32000), ("zb-h1", 0), ("zb-h1", 32000)])
def test_no_cut_waits_less(schedule, vocabulary):
    config = parse_any(TWELVE.replace("32000", f"{vocabulary or 1}").split())
    facts = T5Facts.of(config, vocabulary)
    layers = [facts.layer_flops(n, seen=True) for n in range(24)]
    output = 2.0 * facts.target * 1024 * vocabulary

    def waiting(cut):
        costs = [sum(layers[sum(cut[:n]) : sum(cut[: n + 1])]) for n in range(4)]
        costs[-1] += output
        return 1 - 3 * 16 * sum(costs) / 4 / unequal_span(
            schedule, 4, 16, 1, [(c, 2 * c) for c in costs], ShardingTimes(0)
        )

    assert waste(schedule, vocabulary) == pytest.approx(min(map(waiting, cuts(24, 4))))
