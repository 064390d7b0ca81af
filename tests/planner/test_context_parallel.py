# SPDX-License-Identifier: Apache-2.0
"""The planner on sequences that ranks share: what it searches, sends, holds and says, against closed forms."""

import pytest

from megatron.model.gpt.facts import GPTFacts
from megatron.planner.cluster import Cluster
from megatron.planner.device import find
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import memory_report
from megatron.planner.search import Space, search
from megatron.planner.speed import step
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


@pytest.mark.sampled(2)
def test_short_sequences_are_not_shared_unless_it_is_asked_for():
    assert {plan.layout.cp for plan in search(job_of(4096, 8), NODE, Space(global_batch=8)).plans} == {1}
    asked = search(job_of(4096, 8), NODE, Space(global_batch=8, cp=4, cp_comm="a2a")).plans
    assert {(plan.layout.cp, plan.layout.cp_heads) for plan in asked} == {(4, 4)}


@pytest.mark.parametrize(
    "flags",
    [
        "--cp 4",
        "--cp 4 --cp-comm-type allgather",
        "--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        "--cp 2 --cp-comm-type a2a --tp 2 --sequence-parallel",
        "--cp 2 --zero-stage 1",
    ],
)
def test_flags_of_a_layout_describe_it(flags):
    base = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --mock-data --vocab-size 99 --lr 1"
    base += " --train-iters 1 --global-batch-size 4"
    layout = Layout.of(resolve(parse_pretrain(f"{base} {flags}".split()), 8), 8)
    again = Layout.of(resolve(parse_pretrain(f"{base} {' '.join(layout.flags())}".split()), 8), 8)
    assert again == layout and hash(again) == hash(layout) and again.world_size == 8
    assert layout.short().split("-")[-1] == ("zero1" if "zero" in flags else f"dp{layout.dp}" if layout.dp > 1 else "")


def test_messages_and_their_time():
    """In bf16: gathered are keys and values of the sequence, exchanged is what a rank has, and round a ring go those of a
    rank, and their gradients in fp32. Rings of four move 3/4 of what is gathered.
    """
    s, b, e, g, q, d, layers = 32768, 1, 2, 8, 4, 128, 8
    job, device, cluster = job_of(s, 2), NODE.device, Cluster(find("H100-80GB"), 4)
    ways = dict(gather=dict(gathers=True), heads=dict(cp_heads=4), ring=dict(), levels=dict(cp_heads=2))
    layouts = {name: Layout(cp=4, micro_batch_size=b, **way) for name, way in ways.items()}

    def sent(name):
        found = [one for one in transfers(job, layouts[name]) if one.axis.startswith("cp")]
        return {(one.op, one.axis, one.beside): (one.bytes, one.calls) for one in found}

    whole = 2 * s * b * g * d * e * layers * 2  # keys and values, all layers, two micro-batches
    # The flash kernel's are gathered again for the backward pass.
    gathered = {("all_gather", "cp", False): (2 * whole, 4 * layers)}
    assert sent("gather") == gathered | {("reduce_scatter", "cp", False): (whole, 2 * layers)}
    there_and_back = 2 * (s // 4) * b * g * ((q + 2) + q) * d * e * layers * 2
    assert sent("heads") == {("all_to_all", "cp", False): (there_and_back, 8 * layers)}
    # Three messages of a quarter forward and back; four of their gradients, of twice the bytes.
    shifts = (3 + 3 + 4) * 2 * layers
    assert sent("ring") == {("shift", "cp", True): (whole // 4 * (3 + 3 + 4 * 2), shifts)}
    # Pairs exchange rows for heads, and have half of the heads of half of the sequence: one message, and two of gradients.
    levels = {("all_to_all", "cp_inner", False): (there_and_back, 8 * layers)}
    assert sent("levels") == levels | {("shift", "cp_outer", True): (whole // 4 * (1 + 1 + 2 * 2), 4 * 2 * layers)}

    took = {name: step(job, layout, cluster).parts["context parallel"] for name, layout in layouts.items()}
    assert took["gather"] == pytest.approx(
        3 * whole * 3 / 4 / device.inner + 6 * layers * 2 * device.latency, rel=0.001
    )
    in_ring = whole / 4 * 14 / device.inner + shifts * device.latency
    # The attention of so many tokens hides it
    assert took["ring"] == pytest.approx(device.exposed * in_ring, rel=0.001)


def test_states_and_their_time():
    """Of eight groups on sixteen ranks: the last three rows of chunks, and their gradients; states of chunks and a decay of
    each head in fp32, and their gradients with the decays again.
    """
    layers, cp, heads, width, state, groups = 8, 16, 64, 64, 128, 8
    sizes = dict(mamba_num_heads=heads, mamba_head_dim=width, mamba_state_dim=state, mamba_num_groups=groups)
    model = Model(seq_length=131072, hybrid_layer_pattern="M" * layers, **sizes, **SHAPE)
    job, layout, cluster = Job(GPTFacts(model, 32000), 2), Layout(cp=cp), Cluster(find("H100-80GB"), cp, local_size=cp)
    found = {one.op: (one.bytes, one.calls) for one in transfers(job, layout, 0) if one.axis == "cp"}
    times, rows = 2 * layers, 2 * cp * 3 * (heads * width + 2 * groups * state) * 2
    states = 2 * cp * heads * (width * state + 1) * 4
    assert found == {"all_gather": (times * (rows + 2 * states), 3 * times), "reduce_scatter": (times * rows, times)}
    moved = times * (2 * rows + 2 * states) * (cp - 1) / cp / cluster.device.inner
    took = step(job, layout, cluster).parts["context parallel"]
    assert took == pytest.approx(moved + 4 * times * 4 * cluster.device.latency, rel=0.001)
    plans = search(job, Cluster(find("H100-80GB"), cp, local_size=cp), Space(global_batch=2, cp=cp, tp=1)).plans
    assert {(plan.layout.cp_heads, plan.layout.gathers) for plan in plans} == {(1, False)}


def test_a_short_step_does_not_hide_a_message():
    """Of 512 tokens a rank between nodes: what the attention of a step does not hide."""
    job, cluster = job_of(4096, 8), Cluster(find("H100-80GB"), 8, local_size=1)
    took = [step(job, Layout(cp=8, **way), cluster).parts["context parallel"] for way in (dict(), dict(gathers=True))]
    own = 2 * 512 * 8 * 128 * 2 * 8 * 8  # keys and values, layers, micro-batches
    sends = own * (7 + 7 + 8 * 2) / cluster.device.outer
    assert cluster.device.exposed * sends < took[0] < 1.5 * sends


def test_activations_are_divided():
    """Of keys and values a rank keeps its own. To work, a gather needs those of the whole sequence, a ring of few ranks."""
    s, b = 65536, 1
    ways = ((1, {}), (8, dict(gathers=True)), (8, dict(cp_heads=8)), (8, {}), (8, dict(cp_heads=2)))
    layouts = [Layout(cp=cp, micro_batch_size=b, **way) for cp, way in ways]
    whole, *others = (memory_report(job_of(s), layout, NODE.device).device for layout in layouts)
    assert all(whole["activations"] / 8 <= own["activations"] < 1.1 * whole["activations"] / 8 for own in others)
    job, keys_and_values = job_of(s), 2 * s * b * 8 * 128 * 2
    gather, _, ring, _ = (
        job.facts.layer_workspace(layout.rank_setup(job), job.facts.layer_kind(0)) for layout in layouts[1:]
    )
    assert gather >= 4 * keys_and_values and ring < 0.6 * gather


def test_exchanges_among_as_many_ranks_as_the_heads_allow():
    """Of eight groups of heads: sixteen ranks exchange in groups of eight, with a ring of two."""
    found = search(job_of(262144), Cluster(find("H100-80GB"), 16), Space(global_batch=1, cp=16, tp=1))
    assert {(plan.layout.cp_heads, plan.layout.gathers) for plan in found.plans} == {(1, False), (8, False)}
    asked = Space(global_batch=1, cp=16, tp=1, cp_comm="a2a+p2p", cp_levels=(4, 4))
    [layout] = {plan.layout for plan in search(job_of(262144), Cluster(find("H100-80GB"), 16), asked).plans[:1]}
    assert layout.cp_heads == 4 and "cp16a2a4" in layout.short()
    assert "--hierarchical-context-parallel-sizes 4 4" in " ".join(layout.flags())
    asked = Space(global_batch=1, cp=16, tp=1, cp_comm="allgather")
    assert all(plan.layout.gathers for plan in search(job_of(262144), Cluster(find("H100-80GB"), 16), asked).plans)
