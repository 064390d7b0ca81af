# SPDX-License-Identifier: Apache-2.0
"""Plans of passes that take turns (--overlap-moe-expert-parallel-comm), against schedules played layer by layer."""

import pytest

import pretrain_gpt
from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of
from megatron.pipeline.schedule import BESIDE, make_schedule
from megatron.planner import held_passes
from megatron.planner.cluster import Cluster
from megatron.planner.device import find
from megatron.planner.held_passes import most_held, starts
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import step_memory
from megatron.planner.speed import step
from megatron.training.rules import resolve


@pytest.mark.parametrize("again", ["", "--recompute-granularity selective --recompute-modules moe"])
def test_exchanges_beside_other_passes_are_free(again):
    """All, but for those of one micro-batch. The activations of one micro-batch are alive, and a layer of another. With
    recomputed experts half of the exchanges of the backward pass find no forward pass beside them, and two are alive.
    """
    line = (
        "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --mock-data --vocab-size 50304 "
        "--swiglu --disable-bias-linear --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024 --bf16 "
        "--micro-batch-size 1 --global-batch-size 128 --train-iters 2 --lr 1e-4 --use-distributed-optimizer --ep 8"
    )
    cluster, found = Cluster(find("H100"), 16), []
    for flag in ("", "--overlap-moe-expert-parallel-comm"):
        config = resolve(parse_any(f"{line} {flag} {again}".split(), recipe=pretrain_gpt.recipe()), 16)
        layout = Layout.of(config, 16)
        job = Job.of(config, facts_of(config, 1024), dp=layout.dp, device="cuda")  # small logits beside a layer
        memory = step_memory(job, layout, cluster.device, 0)[0]
        found.append((step(job, layout, cluster), memory["activations"], memory["workspace"]))
    (apart, held, workspace), (turns, beside, more) = found
    # Of 2,048 numbers in bf16; on the way to the experts, and back from there, a weight in fp32 goes along
    rows = 4096 * 8
    exchange = sum(cluster.seconds("all_to_all", rows * (2048 * 2 + weight), 1, 8, 1) for weight in (0, 0, 4, 4))
    assert apart.seconds - turns.seconds == pytest.approx((8 - 1) * 8 * exchange)
    assert apart.parts["expert parallel"] - turns.parts["expert parallel"] == pytest.approx(7 * 8 * exchange)
    assert turns.parts["compute"] == apart.parts["compute"] and beside == (2 if again else 1) * held
    assert more - workspace == pytest.approx(held / 8, rel=0.03)


SCHEDULES = [("1f1b &", 1), ("interleaved &", 2), ("interleaved &", 3), ("zb-h1 &", 1), ("zb-v &", 2), ("v-half &", 2)]


def played(schedule, pp, num_microbatches, chunks, rank, layers, slower):
    """The most layers of micro-batches that are alive, if two passes that take turns go on layer by layer. slower: the
    backward pass frees one layer while the forward pass adds two.
    """
    ops, alive, most = list(make_schedule(schedule, rank, pp, num_microbatches, chunks)), 0, 0
    place = 0
    while place < len(ops):
        pair = ops[place + 1 : place + 2] == [BESIDE]
        both = [ops[place], ops[place + 2]] if pair else [ops[place]]
        place += 3 if pair else 1
        left = {("add" if op.kind == "F" else "free"): layers for op in both if op.kind != "W"}
        while any(left.values()):
            for _ in range(2 if slower and pair else 1):
                if left.get("add"):
                    left["add"], alive = left["add"] - 1, alive + 1
            most = max(most, alive)
            if left.get("free"):
                left["free"], alive = left["free"] - 1, alive - 1
    return most


@pytest.mark.parametrize("schedule, chunks", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_activations_that_passes_in_turns_hold(schedule, chunks, pp):
    """As counted layer by layer: a layer more than whole micro-batches. With a slower backward pass, half of a pass more;
    the planner then counts all of it.
    """
    if pp == 1 and schedule != "1f1b &":
        return
    for rank in range(pp):
        held = max(sum(alive) for alive, _ in most_held(schedule, pp, 13, chunks, rank))
        assert 6 * held <= played(schedule, pp, 13, chunks, rank, 6, False) <= 6 * held + 1
        whole = max(sum(alive) for alive, _ in most_held(schedule, pp, 13, chunks, rank, True))
        assert 6 * held <= played(schedule, pp, 13, chunks, rank, 6, True) <= 6 * whole


@pytest.mark.parametrize("schedule, chunks", SCHEDULES + [(name.removesuffix(" &"), n) for name, n in SCHEDULES])
def test_passes_that_find_nothing_held(schedule, chunks):
    """ZeRO 3 gathers a chunk's units before these."""
    for pp in (2, 4):
        for rank in range(pp):
            alive = count = 0
            for op in make_schedule(schedule, rank, pp, 9, chunks):
                if op.kind in "FBI" and op.chunk == 0:
                    count += op.kind == "F" and alive == 0
                    alive += 1 if op.kind == "F" else -1
            assert starts(schedule, pp, 9, chunks, rank, (0,)) == count, (pp, rank)


LONG = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2)]


@pytest.mark.parametrize("schedule, chunks", LONG)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_long_steps_are_those_of_their_whole_schedules(schedule, chunks, pp):
    """They are extrapolated from a few rounds: what a rank holds at most, and passes that find nothing held."""
    for number in (4 * pp, 8 * pp, *(() if schedule == "interleaved" else (5 * pp + 1, 7 * pp - 1))):
        for rank in range(pp):
            assert set(most_held(schedule, pp, number, chunks, rank)) == set(
                held_passes._most_held(schedule, pp, number, chunks, rank, False)
            )
            for among in {(0,), (chunks - 1,), tuple(range(chunks))}:
                alive = count = 0
                for op in make_schedule(schedule, rank, pp, number, chunks):
                    if op.kind in "FBI" and op.chunk in among:
                        count += op.kind == "F" and alive == 0
                        alive += 1 if op.kind == "F" else -1
                assert starts(schedule, pp, number, chunks, rank, among) == count, (number, rank, among)
