# SPDX-License-Identifier: Apache-2.0
"""The planner on sequences that ranks share: what it searches, sends, holds and says, against closed forms."""

import pytest

from megatron.model.gpt.facts import GPTFacts
from megatron.planner.device import find
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import memory_report
from megatron.planner.search import Space, search
from megatron.planner.speed import Cluster, step
from megatron.planner.traffic import transfers
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Model
from megatron.training.rules import resolve

SHAPE = dict(
    num_layers=8,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
NODE = Cluster(find("H100-80GB"), 8)


def job_of(seq_length, samples=1):
    return Job(GPTFacts(Model(seq_length=seq_length, **SHAPE), 32000), samples)


def test_a_long_sequence_on_many_ranks_is_shared():
    """One sample at a time, for eight ranks: tensor and pipeline parallelism alone would have to hold it whole."""
    found = search(job_of(131072), NODE, Space(global_batch=1))
    assert found.plans[0].layout.cp > 1 and {plan.layout.cp for plan in found.plans} >= {1, 2, 4, 8}
    assert {plan.layout.cp_heads > 1 for plan in found.plans} == {False, True}
    assert not any(plan.layout.gathers for plan in found.plans)
    assert all(plan.layout.dp == 1 and plan.layout.world_size == 8 for plan in found.plans)


def test_short_sequences_are_not_shared_unless_it_is_asked_for():
    assert {plan.layout.cp for plan in search(job_of(4096, 8), NODE, Space(global_batch=8)).plans} == {1}
    asked = search(job_of(4096, 8), NODE, Space(global_batch=8, cp=4, cp_comm="a2a")).plans
    assert {(plan.layout.cp, plan.layout.cp_heads) for plan in asked} == {(4, 4)}


@pytest.mark.parametrize(
    "flags", ["--cp 4", "--cp 4 --cp-comm-type allgather", "--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", "--cp 2 --cp-comm-type a2a --tp 2 --sequence-parallel", "--cp 2 --zero-stage 1"]
)
def test_flags_of_a_layout_describe_it(flags):
    base = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --mock-data --vocab-size 99 --lr 1"
    base += " --train-iters 1 --global-batch-size 4"
    layout = Layout.of(resolve(parse_pretrain(f"{base} {flags}".split()), 8), 8)
    again = Layout.of(resolve(parse_pretrain(f"{base} {' '.join(layout.flags())}".split()), 8), 8)
    assert again == layout and hash(again) == hash(layout) and again.world_size == 8
    assert layout.short().split("-")[-1] == ("zero1" if "zero" in flags else f"dp{layout.dp}" if layout.dp > 1 else "")


def test_messages_and_their_time():
    """In bf16: gathered are keys and values of the sequence, exchanged is what a rank has. Rings of four move 3/4 of it."""
    s, b, e, g, q, d, layers = 32768, 1, 2, 8, 4, 128, 8
    job = job_of(s, 2)
    rows, heads = (Layout(cp=4, by_heads=by_heads, micro_batch_size=b) for by_heads in (False, True))
    sent = {(one.op, one.axis): (one.bytes, one.calls) for one in transfers(job, rows) if one.axis == "cp"}
    whole = 2 * s * b * g * d * e * layers * 2  # keys and values, all layers, two micro-batches
    # The flash kernel's are gathered again for the backward pass.
    assert sent == {("all_gather", "cp"): (2 * whole, 4 * layers), ("reduce_scatter", "cp"): (whole, 2 * layers)}
    sent = {(one.op, one.axis): (one.bytes, one.calls) for one in transfers(job, heads) if one.axis == "cp"}
    there_and_back = 2 * (s // 4) * b * g * ((q + 2) + q) * d * e * layers * 2
    assert sent == {("all_to_all", "cp"): (there_and_back, 8 * layers)}
    took, device = step(job, rows, Cluster(find("H100-80GB"), 4)).parts["context parallel"], NODE.device
    assert took == pytest.approx(3 * whole * 3 / 4 / device.inner + 6 * layers * 2 * device.latency, rel=0.001)


def test_activations_are_divided():
    """Of the keys and values that are gathered a rank keeps its own."""
    s, b = 65536, 1
    whole, shared, heads = (
        memory_report(job_of(s), Layout(cp=cp, by_heads=by_heads, micro_batch_size=b), NODE.device).device[
            "activations"
        ]
        for cp, by_heads in ((1, False), (8, False), (8, True))
    )
    assert all(whole / 8 <= own < 1.1 * whole / 8 for own in (shared, heads))
