# SPDX-License-Identifier: Apache-2.0
"""The planner's figures of GPTs with experts against runs: activations, state, messages, parameters, FLOPs."""

from collections import Counter

import pytest
import torch

import pretrain_gpt
from megatron.model.arguments import parse_any
from megatron.model.gpt.facts import GPTFacts
from megatron.model.recipe import facts_of
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.pipeline.schedule import BESIDE, make_schedule
from megatron.planner.activations import stage_saved_bytes
from megatron.planner.device import find
from megatron.planner.layout import Job, Layout
from megatron.planner.live import most_held, starts
from megatron.planner.memory import state, step_memory
from megatron.planner.speed import Cluster, step
from megatron.planner.traffic import totals, transfers
from megatron.settings.schema import Model, Recompute
from megatron.training.rules import resolve
from tests.models.plain_state import LINE
from tests.models.test_expert_layouts import FAMILIES, LAYOUTS
from tests.planner.test_activations import GPT_SHAPE, LLAMA, VOCABULARY, measured
from tests.planner.test_truth import counted_step

pytestmark = pytest.mark.sampled(5)

SHAPE = dict(GPT_SHAPE, **LLAMA) | dict(num_experts=8, moe_ffn_hidden_size=96)


@pytest.mark.parametrize("modules", [(), ("mlp_act",), ("mlp",)])
@pytest.mark.parametrize(
    "more, precision",
    [
        ({}, "fp32"),
        ({}, "bf16"),
        (dict(moe_shared_expert_intermediate_size=64), "fp32"),
        (dict(moe_shared_expert_intermediate_size=64, moe_router_topk=3), "bf16"),
        (dict(swiglu=False, disable_bias_linear=False, moe_layer_freq="2"), "fp32"),
        (dict(moe_expert_capacity_factor=1.25, moe_pad_expert_input_to_capacity=True), "fp32"),
    ],
)
def test_activations_are_predicted_within_3_percent(more, precision, modules):
    model = Model(**SHAPE | more)
    recompute = Recompute("core_attn", recompute_modules=list(modules)) if modules else Recompute()
    layout = Layout(recompute=recompute, micro_batch_size=2)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    found = measured(model, layout, Mesh(), dtype=dtype)
    job = Job(GPTFacts(model, VOCABULARY), 2, precision, "cpu")
    kept = stage_saved_bytes(job, layout, range(3), first=True, last=True)
    kept.pop("output layer and loss")
    assert sum(kept.values()) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(
    "name",
    ["ep2", "etp2, capacity, padded", "tp2", "tp2 dp2, ep4", "cp2, ep over its ranks", "ep2, zero2", "pp2 ep2, zb-h1"]
    + ["cp2 tp2, ep4, recomputed"],
)
def test_state_and_messages_are_those_of_a_run(name):
    """Exchanges between ranks of ep are as uneven as the experts' loads: of these, those of all ranks together. The sums of
    loads, once a step, are not in the planner's list.
    """
    world, family, words = LAYOUTS[name]
    line = f"{LINE} --num-experts 8 {FAMILIES[family].flags} {words}"
    config = resolve(parse_any(line.split(), recipe=pretrain_gpt.recipe()), world)
    layout = Layout.of(config, world)
    job = Job.of(config, facts_of(config, 101), dp=layout.dp, device="cpu")
    exchanged, planned = Counter(), Counter()
    for place, memory, _, sent in run_ranks(world, lambda rank: counted_step()(config), timeout=300):
        held, _ = state(job, layout, place["pp"], place)
        assert held["weights"] == memory["parameters"] + memory["shards"], place
        assert held["gradients"] == memory["gradients"], place
        messages = totals(transfers(job, layout, place["pp"], place))
        loads = {
            axis: sent.get(("all_reduce", axis), 0) - messages.get(("all_reduce", axis), 0) for axis in ("dp_cp", "tp")
        }
        layers = len(config.model.expert_layers)
        assert all(0 <= size <= 8 * 8 * layers for size in loads.values()), loads
        messages |= {("all_reduce", axis): sent[("all_reduce", axis)] for axis, size in loads.items() if size}
        exchanged["ep"] += sent.pop(("all_to_all", "ep"), 0)
        planned["ep"] += messages.pop(("all_to_all", "ep"), 0)
        assert messages == sent, place
    assert exchanged == planned


def test_parameters_and_flops_of_published_models():
    """Mixtral 8x7B has 46.7 B parameters and uses 12.9 B for a token (arXiv:2401.04088); Qwen3-30B-A3B 30.5 B and 3.3 B."""
    common = dict(swiglu=True, normalization="RMSNorm", disable_bias_linear=True, position_embedding_type="rope")
    common |= dict(num_attention_heads=32, seq_length=4096, untie_embeddings_and_output_weights=True)
    mixtral = Model(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_query_groups=8,
        num_experts=8,
        moe_router_topk=2,
        **common,
    )
    qwen = Model(
        num_layers=48,
        hidden_size=2048,
        num_query_groups=4,
        kv_channels=128,
        qk_layernorm=True,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        **common,
    )
    for model, vocabulary, whole, active in ((mixtral, 32000, 46.7, 12.9), (qwen, 151936, 30.5, 3.3)):
        facts = GPTFacts(model, vocabulary)
        assert facts.parameters / 1e9 == pytest.approx(whole, abs=0.05)
        assert facts.active_parameters / 1e9 == pytest.approx(active, abs=0.06)
        # 6 FLOPs for each active weight that multiplies a token, and attention.
        tables = vocabulary * model.hidden_size
        attention = 12 * model.num_layers * model.seq_length * model.num_attention_heads * model.head_dim
        assert facts.flops() == pytest.approx(6 * (facts.active_parameters - tables) + attention, rel=1e-3)


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
    exchange = cluster.seconds("all_to_all", 4096 * 8 * 2048 * 2, 1, 8, 1)
    assert apart.seconds - turns.seconds == pytest.approx((8 - 1) * 8 * 4 * exchange)
    assert apart.parts["expert parallel"] - turns.parts["expert parallel"] == pytest.approx(7 * 8 * 4 * exchange)
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
