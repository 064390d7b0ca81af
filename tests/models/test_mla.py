# SPDX-License-Identifier: Apache-2.0
"""GPTs with multi-latent attention in all kinds of layouts against the same networks in plain torch, in one process, in
fp64 (`plain_latent.py`): losses, gradient norms, weights. Packed documents; what is saved; what cannot be combined.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

import pretrain_gpt
from megatron.data.loader import MicroBatch
from megatron.model.command_line import parse_any
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.module import GPT
from megatron.model.kinds.mla.kind import latent_attention
from megatron.model.layer_ops import RankSetup
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import elements
from megatron.planner.layout import Layout
from megatron.settings.schema import Kernels, Model, Recompute
from megatron.training.rules import check, idle
from tests.models.in_layouts import check_layout
from tests.models.plain_latent import FAMILIES
from tests.models.plain_state import LINE, compare
from tests.planner.test_activations import measured, predicted, saved_by_layer
from tests.ranks import trains

TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2"
AGAIN = "--recompute-granularity selective --recompute-modules"
LAYOUTS = {
    "one process": (1, "both", ""),
    "one process, one product for queries": (1, "keys and values", ""),
    "flash attention": (1, "both", "--attention-backend sdpa"),
    "plain attention": (1, "keys and values", "--attention-backend explicit --no-masked-softmax-fusion"),
    "up products again": (1, "both", f"{AGAIN} mla_up_proj"),
    "up products again, flash attention": (1, "keys and values", f"{AGAIN} mla_up_proj --attention-backend sdpa"),
    "up products and core again": (1, "both", f"{AGAIN} mla_up_proj core_attn layernorm"),
    "attention again": (1, "keys and values", "--recompute-granularity full_attn"),
    "tp2": (2, "both", TP),
    "tp2, one product for queries": (2, "keys and values", TP),
    "tp2 with sequence parallelism": (2, "both", SP),
    "tp2 with sequence parallelism, one product for queries": (2, "keys and values", f"{SP} {AGAIN} mla_up_proj"),
    "tp2 with sequence parallelism, layers again": (2, "both", f"{SP} --recompute-granularity full"),
    "pp2": (2, "both", PP),
    "pp2, zb-h1": (2, "both", f"{PP} --pipeline-schedule zb-h1 --micro-batch-size 1"),
    "pp2, zb-h1, up products again": (
        2,
        "both",
        f"{PP} --pipeline-schedule zb-h1 --micro-batch-size 1 {AGAIN} mla_up_proj",
    ),
    "dp2": (2, "both", ""),
    "zero1": (2, "both", "--sharding-stage 1 --overlap-grad-reduce"),
    "zero3": (2, "keys and values", "--sharding-stage 3 --overlap-param-gather"),
    "cp2 in a ring": (2, "both", CP),
    "cp2, gathered": (2, "both", f"{CP} --cp-comm-type allgather"),
    "cp2, gathered, flash attention": (2, "both", f"{CP} --cp-comm-type allgather --attention-backend sdpa"),
    "cp2, gathered, up products again": (2, "both", f"{CP} --cp-comm-type allgather {AGAIN} mla_up_proj"),
    "cp2, gathered, core again": (2, "keys and values", f"{CP} --cp-comm-type allgather {AGAIN} core_attn"),
    "tp2 cp2, gathered, both again": (4, "both", f"{TP} {CP} --cp-comm-type allgather {AGAIN} mla_up_proj core_attn"),
    "tp2 cp3, gathered, sequence parallelism": (
        6,
        "both",
        f"{SP} --context-parallel-size 3 --cp-comm-type allgather {AGAIN} mla_up_proj",
    ),
    "pp2 cp2, gathered, zb-h1": (
        4,
        "keys and values",
        f"{PP} {CP} --cp-comm-type allgather --pipeline-schedule zb-h1 --micro-batch-size 1",
    ),
    "cp2, heads for rows": (2, "keys and values", f"{CP} --cp-comm-type a2a"),
    "tp2 cp2, heads for rows": (4, "both", f"{SP} {CP} --cp-comm-type a2a"),
    "tp2 pp2, zb-h1": (4, "both", f"{SP} {PP} --pipeline-schedule zb-h1 --micro-batch-size 1"),
}
LATENT_FLAGS = FAMILIES["both"].flags
LONG = {"tp2 cp2, heads for rows", "tp2 pp2, zb-h1", "tp2 cp2, gathered, both again", "pp2 cp2, gathered, zb-h1"}


pretrain = trains(pretrain_gpt, LINE)


@cache
def trained(family: str):
    return FAMILIES[family].train()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in LAYOUTS])
def test_a_network_is_the_plain_loop(layout, tmp_path):
    """--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim"""
    world, family, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{FAMILIES[family].flags} {words} --save {tmp_path} --check-replicas-interval 2")
    steps, wanted = trained(family)
    tensors = compare(tmp_path, steps, wanted)
    assert max((tensors[name].double() - values).abs().max().item() for name, values in wanted.items()) < 2e-6


PACKED = "--reset-attention-mask --reset-position-ids"
DROPS = "--attention-dropout 0.1 --hidden-dropout 0.1"


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "layout, more",
    [
        ("tp2sp", "--lora-rank 2"),
        ("pp2zbh1", "--lora-rank 2"),
        ("tp2sp", "--quantization --weight-bits 4 --activation-bits 8"),
        ("tp2", "--sparsity 0.5"),
        ("tp2sp", PACKED),
        ("cp2", PACKED),
        ("cp2a2a", PACKED),
        ("cp2gather", PACKED),
        ("cp2gather", "--lora-rank 2"),
        ("cp2gather", "--lora-rank 2 --lora-dropout 0.3"),
        ("tp2sp", DROPS),
        ("cp2", DROPS),
        ("cp2a2a", DROPS),
    ],
)
def test_layouts_are_one_process(layout, more):
    """Products of other kinds, packed documents, dropout."""
    check_layout(layout, f"{LINE} {LATENT_FLAGS} --precision fp32 {more}")


# ---- documents -------------------------------------------------------------------------------------------------------

SHAPE = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=48, hidden_dropout=0.0)
LATENT = dict(
    attention_dropout=0.0,
    normalization="RMSNorm",
    disable_bias_linear=True,
    swiglu=True,
    qk_layernorm=True,
    position_embedding_type="rope",
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_documents_do_not_see_each_other(backend):
    model = GPT(Model(**SHAPE, **LATENT), Mesh(), 50, kernels=Kernels(attention_backend=backend), device="cpu")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=draw)
    lengths = (5, 1, 30, 12)
    tokens = torch.randint(0, 50, (48, 1), generator=draw)
    ids = torch.cat([torch.full((size, 1), n, dtype=torch.int32) for n, size in enumerate(lengths)])
    places = torch.cat([torch.arange(size) for size in lengths]).unsqueeze(1)
    batch = MicroBatch(tokens=tokens, labels=tokens, samples=torch.arange(1), document_ids=ids, position_ids=places)
    together, alone = model.token_losses(None, batch), []
    for own in tokens.split(lengths):
        one = MicroBatch(tokens=own, labels=own, samples=torch.arange(1))
        alone.append(model.token_losses(None, one))
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=2e-5)


# ---- the planner -----------------------------------------------------------------------------------------------------


def recomputing(words: str) -> Recompute:
    if words in ("full_attn", "full"):
        return Recompute(words)
    return Recompute("core_attn" if words else None, recompute_modules=words.split() or None)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("again", ["", "core_attn", "mla_up_proj", "mla_up_proj core_attn", "full_attn", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "own, backend",
    [
        (dict(), "auto"),
        (dict(), "sdpa"),
        (dict(v_head_dim=12), "sdpa"),
        (dict(v_head_dim=12, q_lora_rank=None), "auto"),
        (dict(q_lora_rank=None, qk_layernorm=False), "sdpa"),
        (dict(qk_layernorm=False, attention_dropout=0.1), "auto"),
    ],
)
def test_what_autograd_saves_is_predicted(own, backend, dtype, again):
    model, layout = Model(**{**SHAPE, **LATENT, **own}), Layout(micro_batch_size=2, recompute=recomputing(again))
    found = measured(model, layout, Mesh(), backend=backend, dtype=dtype)
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    assert predicted(model, layout, backend=backend, precision=precision) == pytest.approx(found, rel=0.01)


WAYS = {
    "tp2": dict(tp=2),
    "tp2 sp": dict(tp=2, sp=True),
    "cp2 ring": dict(cp=2),
    "cp2 gathers": dict(cp=2, gathers=True),
    "cp2 heads": dict(cp=2, cp_heads=2),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("way", WAYS)
def test_what_ranks_save_is_predicted(way, backend):
    model, words = Model(**{**SHAPE, **LATENT}), ("", "core_attn", "mla_up_proj", "full_attn")
    layouts = [Layout(**WAYS[way], micro_batch_size=2, recompute=recomputing(again)) for again in words]
    sizes = {name: value for name, value in WAYS[way].items() if name in ("tp", "cp")}
    body = lambda rank: [measured(model, layout, Mesh(rank, **sizes), backend=backend) for layout in layouts]
    for layout, found in zip(layouts, run_ranks(2, body)[1], strict=True):
        assert predicted(model, layout, backend=backend) == pytest.approx(found, rel=0.02), layout.recompute


@pytest.mark.parametrize("norms", [True, False])
def test_of_gathered_latents_ranks_save_their_own(norms):
    """To the byte; not keys and values of all heads."""
    facts, words = GPTFacts(Model(**SHAPE, **{**LATENT, "qk_layernorm": norms}), 50), ("", "core_attn", "mla_up_proj")
    cases = [tuple(names.split()) for names in (*words, "mla_up_proj core_attn", "full_attn")]
    share = RankSetup(device="cpu", precision="fp32", element=4, micro_batch_size=2, cp=2, gathers=True)
    wanted = [facts.layer_saved_bytes(share, facts.layer_kind(0), case).total() for case in cases]
    body = lambda rank: [saved_by_layer(facts, share, case, mesh=Mesh(rank, cp=2)) for case in cases]
    assert run_ranks(2, body) == [wanted] * 2


# ---- what cannot be combined -------------------------------------------------------------------------------------------

WRONG = {
    "--group-query-attention --num-query-groups 2": "--multi-latent-attention has no --group-query-attention: keys and "
    "values of all heads come from one latent; leave it out",
    "--num-query-groups 2": "--multi-latent-attention has no --num-query-groups: keys and values of all heads",
    "--qk-layernorm-across-heads": "has no --qk-layernorm-across-heads: --qk-layernorm normalizes the latents",
    "--add-qkv-bias": "has no --add-qkv-bias: its products have no bias",
    "--query-pre-attn-scalar 7": "has no --query-pre-attn-scalar: scores are divided by the root of the channels",
    "--softmax-type learnable": "has no --softmax-type: its heads have no sinks",
    "--rope-local-base-freq 100 --window-size 4,0": "has no --rope-local-base-freq: its rotary key is one",
    "--position-embedding-type learned_absolute": "rotary positions, in channels of their own; --position-embedding-type "
    "is learned_absolute: say rope",
    "--qk-pos-emb-head-dim 3": "--qk-pos-emb-head-dim 3 is odd; nearest: 2 or 4",
    "--rotary-percent 0.5": "--rotary-percent 0.5: --multi-latent-attention rotates all of its --qk-pos-emb-head-dim 2",
    "--v-head-dim 9": "--v-head-dim 9: values of --multi-latent-attention are at most as wide as keys",
    "--tensor-model-parallel-size 3": "--num-attention-heads 4 is not a multiple of --tensor-model-parallel-size 3",
    "--context-parallel-size 3 --cp-comm-type a2a": "divides the 4 key-value heads",
}


@pytest.mark.parametrize("words", WRONG)
def test_one_message_for_what_cannot_be(words):
    said = [one for one in check(parse_any(f"{LINE} {LATENT_FLAGS} {words}".split()), 3) if WRONG[words] in one]
    assert len(said) == 1


def test_its_words_need_it():
    assert [
        "--recompute-modules mla_up_proj is a part of --multi-latent-attention, which these layers do not have"
    ] == [one for one in check(parse_any(f"{LINE} {AGAIN} mla_up_proj --recompute-granularity selective".split()), 1)]
    config = parse_any(f"{LINE} --kv-lora-rank 8".split())
    assert "--kv-lora-rank 8 has no effect without --multi-latent-attention" in idle(config, 1).values()


@pytest.mark.parametrize("kind", ["pretrain_bert", "pretrain_t5"])
def test_other_models_have_none(kind):
    line = LINE.replace("--seq-length 12", "--seq-length 12 --encoder-seq-length 12 --decoder-seq-length 12")
    recipe = __import__(kind).recipe()
    said = check(parse_any(f"--model-type {recipe.model_type} {LINE} --multi-latent-attention".split()), 1)
    assert [one for one in said if one.startswith("--multi-latent-attention: ")], (line, said)


def test_flops_and_parameters_of_deepseek_v3s_attention():
    """arXiv:2412.19437, table of sizes: 187,107,328 weights in the attention of a layer."""
    model = Model(
        **{**SHAPE, **LATENT, "hidden_size": 7168, "num_attention_heads": 128, "seq_length": 4096, "q_lora_rank": 1536}
    )
    wide = dict(kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    table = latent_attention(replace(model, **wide), False)
    h, g, q, kv, no, ro, v = 7168, 128, 1536, 512, 128, 64, 128
    matrices = h * q + q * g * (no + ro) + h * (kv + ro) + kv * g * (no + v) + g * v * h
    assert elements(table) == matrices + q + kv == 187107328
    facts = GPTFacts(replace(model, **wide), 1)
    core = 2.0 * 4096 * g * (no + ro + v)
    ops = [op for op in facts.layer_ops(RankSetup(), facts.layer_kind(0)) if op.name.startswith("attention")]
    assert sum(op.flops for op in ops) == 4096 * (2.0 * matrices + core)
    assert facts.cached_numbers(range(2), 8) == 2 * 576
