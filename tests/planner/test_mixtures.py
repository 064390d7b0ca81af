# SPDX-License-Identifier: Apache-2.0
"""The planner's figures of GPTs with experts against runs: activations, state, messages, parameters, FLOPs."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import pretrain_gpt
from megatron.model.command_line import parse_any
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.experts import dispatch
from megatron.model.kinds.experts.hops import HopDispatcher
from megatron.model.kinds.experts.kind import expert_ops
from megatron.model.kinds.experts.layer import MoELayer
from megatron.model.kinds.experts.weights import experts
from megatron.model.layer_ops import Collective, Kernel, Product, RankSetup, Residual
from megatron.model.recipe import facts_of
from megatron.mpu import collectives
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.planner.activations import stage_saved_bytes
from megatron.planner.cluster import Cluster
from megatron.planner.device import find
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import memory_report, state
from megatron.planner.speed import step
from megatron.planner.traffic import totals, transfers
from megatron.settings.schema import Model, Recompute
from megatron.training.rules import resolve
from tests.models.plain_state import LINE
from tests.models.test_expert_layouts import FAMILIES, LAYOUTS
from tests.planner.test_activations import GPT_SHAPE, LLAMA, VOCABULARY, measured
from tests.planner.test_truth import counted_step

pytestmark = pytest.mark.sampled(10)

MOVED = dict(num_experts=8, moe_ffn_hidden_size=16, disable_bias_linear=True)
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
        (dict(moe_latent_size=24), "fp32"),
        (dict(moe_latent_size=24), "bf16"),
        (dict(moe_latent_size=24, moe_shared_expert_intermediate_size=64), "fp32"),
        (dict(moe_latent_size=24, moe_shared_expert_intermediate_size=64), "bf16"),
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


SAME_BITS = """--batch-invariant-mode --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --seq-length 128
    --hidden-size 64 --disable-bias-linear --normalization RMSNorm --make-vocab-size-divisible-by 128"""
ORDERED = {
    "tp2 sp dp2, ep4, one order": (
        4,
        "aux loss",
        f"{SAME_BITS} --sequence-parallel --expert-model-parallel-size 4 --sharding-stage 2 --bf16",
    ),
    "tp2 pp2, ep2, shared, one order": (
        4,
        "aux loss",
        f"{SAME_BITS} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2"
        " --moe-shared-expert-intermediate-size 16",
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "name",
    [*ORDERED, "ep2", "etp2, capacity, padded", "tp2", "tp2 dp2, ep4", "cp2, ep over its ranks", "ep2, zero2"]
    + ["pp2 ep2, zb-h1"]
    + ["cp2 tp2, ep4, recomputed", "latent, tp2", "latent, tp2 dp2, ep2 etp2", "latent, ep2, zero2"],
)
def test_state_and_messages_are_those_of_a_run(name):
    """Exchanges between ranks of ep are as uneven as the experts' loads: of these, those of all ranks together. The sums of
    loads, once a step, are not in the planner's list.
    """
    world, family, words = (LAYOUTS | ORDERED)[name]
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("latent", [None, 24])
def test_elements_that_are_moved_are_those_of_a_layer(latent, monkeypatch):
    """To the rows of experts and back: each is read and written, in the width in which experts compute."""
    model, moved = Model(1, 64, 4, 16, **MOVED, moe_latent_size=latent), []

    def counted(real):
        def run(x, *rest, **more):
            y = real(x, *rest, **more)
            rows = max(x, y, key=len)  # a token's are read together, and are rows on the other side
            moved.append(2 * rows.numel() if rows.shape[1] > 1 else 0)  # not the weights of rows
            return y

        return run

    monkeypatch.setattr(dispatch, "permuted", counted(dispatch.permuted))
    monkeypatch.setattr(dispatch, "summed", counted(dispatch.summed))
    layer = MoELayer(experts(model, False), LayerSetup(GPTFacts(model, 40), 0, Mesh(), seed=1))
    for one in (*layer.parameters(), *layer.buffers()):
        one.data.zero_()
    layer(torch.zeros(16, 2, 64), ForwardContext(samples=torch.arange(2)))
    own = [op.moved for op in expert_ops(Residual(model, RankSetup(micro_batch_size=2), 32)) if type(op) is Kernel]
    assert [own[1], own[-1]] == [one for one in moved if one]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ep, inner", [(4, 0), (4, 2), (8, 2), (8, 4), (4, 1)])
def test_counts_are_those_that_a_rank_sends(ep, inner, monkeypatch):
    """Of rows for each expert; in hops also of tokens for each rank of its node, and for its node."""
    sent = []
    monkeypatch.setattr(collectives, "start_all_to_all", lambda arrived, x, axis, *rows: sent.append(x.nbytes))
    mesh = Mesh(1, replicate=ep, ep=ep, create_groups=False, **(dict(ep_levels=(inner, ep // inner)) if inner else {}))
    kind = partial(HopDispatcher, levels=(mesh.ep_outer, mesh.ep_inner)) if inner else dispatch.Dispatcher
    kind(torch.arange(64).view(32, 2) % 8, 8, mesh.ep, False, over=mesh.ep_counts)
    stream = Residual(Model(1, 64, 4, 16, **MOVED), RankSetup(ep=ep, ep_inner=inner), 32)
    assert [op.size for op in expert_ops(stream) if getattr(op, "axis", "") == "ep_counts"] == sent


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


@pytest.mark.parametrize("more", [{}, dict(moe_shared_expert_intermediate_size=64), dict(moe_router_topk=3)])
def test_a_rank_with_all_rows_of_two_has_those_of_one_process(more):
    """Twice the mean of two ranks are all rows, as one process with both micro-batches has them: bytes, FLOPs and times."""
    facts = GPTFacts(Model(**SHAPE | more), VOCABULARY)
    job = Job(facts, 2, "bf16")
    rows = lambda job, **layout: [
        op for op in facts.layer_ops(Layout(**layout).rank_setup(job), facts.layer_kind(0)) if op.name == "experts"
    ]
    uneven = replace(job, busiest=2.0)
    two, even, one = rows(uneven, ep=2, dp=2), rows(job, ep=2, dp=2), rows(job, micro_batch_size=2)
    kept = lambda ops: sum(op.kept for op in ops if isinstance(op, (Product, Kernel)) and op.name == "experts")
    work = lambda ops: sum(op.flops for op in ops if isinstance(op, Product))
    sent = lambda ops: sum(op.size for op in ops if isinstance(op, Collective) and op.axis == "ep")
    alone = work(rows(job, micro_batch_size=1))
    assert (kept(two), work(two)) == (kept(one), pytest.approx(work(one)))
    assert kept(even) < kept(two) and work(even) == pytest.approx(alone)
    assert sent(two) == 2 * sent(even) > 0
    assert rows(uneven, micro_batch_size=2) == one  # without ep nothing is uneven


def test_the_busiest_rank_of_experts_is_planned_for():
    """--moe-load-imbalance counts in times and memory, --moe-memory-imbalance in memory alone."""
    line = f"{LINE} --num-experts 8 --moe-ffn-hidden-size 96 --expert-model-parallel-size 2 --micro-batch-size 2 "
    cluster = Cluster(find("H100"), 2, 2)

    def planned(flags: str) -> tuple[float, int]:
        config = resolve(parse_any(f"{line} {flags}".split(), recipe=pretrain_gpt.recipe()), 2)
        layout = Layout.of(config, 2)
        job = Job.of(config, facts_of(config, 101), dp=layout.dp, device="cuda")
        return step(job, layout, cluster).seconds, memory_report(job, layout, cluster.device).total

    plain, uneven, fuller = planned(""), planned("--moe-load-imbalance 1.5"), planned("--moe-memory-imbalance 1.5")
    assert planned("--moe-load-imbalance 1") == plain
    assert plain[0] < uneven[0] < 1.5 * plain[0] and plain[1] < uneven[1]
    assert fuller == (plain[0], uneven[1])
