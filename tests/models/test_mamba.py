# SPDX-License-Identifier: Apache-2.0
"""A Mamba-2 layer: transformers' own mixer, exact weights, figures for plans, generation, each wrong use."""

from dataclasses import replace

import pytest
import torch

import pretrain_hybrid
from megatron.fused_kernels.documents import Documents, starts_of
from megatron.inference.generation import generate
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling
from megatron.model.command_line import parse_any
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.mamba.kind import mamba
from megatron.model.kinds.mamba.module import Mamba
from megatron.model.layer import Layer
from megatron.model.layer_ops import Product, RankSetup, Scan
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import elements
from megatron.planner.layout import Layout
from megatron.settings.schema import Model, Recompute
from megatron.training.rules import check
from tests.models.test_scan_layouts import LINE
from tests.planner.test_activations import measured, predicted, saved_by_layer

S, B, H, GROUPS, HEADS, WIDTH, STATE = 300, 2, 24, 2, 6, 8, 5
SIZES = dict(mamba_num_heads=HEADS, mamba_head_dim=WIDTH, mamba_state_dim=STATE, mamba_num_groups=GROUPS)
PLAIN = dict(hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm")
MODEL = Model(3, H, 4, S, hybrid_layer_pattern="M*-", **SIZES, **PLAIN)
BESIDE = dict(hybrid_layer_pattern="P-P", position_embedding_type="rope", mamba_rms_norm=False)
WITHOUT_NORM = dict(hybrid_layer_pattern="M-P", mamba_rms_norm=False)
INNER = HEADS * WIDTH


def mixer(dtype=torch.float32) -> Mamba:
    return Mamba(mamba(MODEL, False), LayerSetup(GPTFacts(MODEL, 40), 0, Mesh(), dtype=dtype))


def by_group(theirs: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Rows [whole parts after each other] -> [groups, the group's rows of each part]."""
    return torch.cat([part.unflatten(0, (GROUPS, -1)) for part in theirs.split(sizes)], 1)


@pytest.fixture(scope="module")
def pair():
    """(ours, transformers' mixer) with the same weights."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    sizes = dict(num_heads=HEADS, head_dim=WIDTH, state_size=STATE, n_groups=GROUPS, hidden_size=H, expand=2)
    torch.manual_seed(1)
    theirs, ours = Mamba2Mixer(transformers.Mamba2Config(**sizes), 0).eval(), mixer()
    of_state = [GROUPS * STATE] * 2
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        ours.in_proj.weight.copy_(by_group(theirs.in_proj.weight, [INNER, INNER, *of_state, HEADS]))
        ours.conv_weight.copy_(by_group(theirs.conv1d.weight.squeeze(1), [INNER, *of_state]))
        ours.conv_bias.copy_(by_group(theirs.conv1d.bias, [INNER, *of_state]))
        for name in ("dt_bias", "A_log", "D"):
            getattr(ours, name).copy_(getattr(theirs, name).view(GROUPS, -1))
        ours.norm_weight.copy_(theirs.norm.weight.view(GROUPS, -1))
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
    return ours, theirs


def test_it_is_transformers_mixer(pair):
    ours, theirs = pair
    x = torch.randn(S, B, H)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    y, want = ours(inputs[0], ForwardContext()), theirs(inputs[1].transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(y, want, rtol=2e-5, atol=2e-5 * want.abs().max().item())
    factor = torch.randn_like(y)
    [found], [wanted] = (torch.autograd.grad((one * factor).sum(), x) for one, x in zip((y, want), inputs, strict=True))
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("as_mask", [False, True], ids=["documents", "a mask of pairs, as in inference"])
def test_each_document_alone_is_transformers(pair, as_mask):
    """Around the edges of chunks and of one token; whoever crosses one sees another's state, or rows under its taps."""
    ours, theirs = pair
    begins, x = [0, 1, 3, 127, 128, 130, 256, 299], torch.randn(S, B, H)
    ids = torch.bucketize(torch.arange(S), torch.tensor(begins), right=True).unsqueeze(1).expand(S, B)
    context = ForwardContext(documents=Documents.of(starts_of(ids), "cpu"))
    if as_mask:
        context = ForwardContext(allowed=(ids.t().unsqueeze(2) == ids.t().unsqueeze(1)).tril())
    with torch.no_grad():
        parts = x.tensor_split(begins[1:])
        want = torch.cat([theirs(part.transpose(0, 1)).transpose(0, 1) for part in parts])
        torch.testing.assert_close(ours(x, context), want, rtol=2e-5, atol=2e-5 * want.abs().max().item())


def test_numbers_of_the_scan_stay_in_fp32(pair):
    """A model in bf16 has A_log, dt_bias and D in fp32: in bf16 the rates of 16 heads would be 5 numbers."""
    ours, _ = pair
    half = mixer(torch.bfloat16)
    exact = {name for name, placed in mamba(MODEL, False).items() if placed.exact}
    assert exact == {"A_log", "dt_bias", "D"} == {n for n, p in half.named_parameters() if p.dtype == torch.float32}
    half.load_state_dict(ours.state_dict())
    x = torch.randn(S, B, H)
    want = ours(x, ForwardContext())
    error = (half(x.bfloat16(), ForwardContext()).float() - want).norm() / want.norm()
    assert error < 0.02


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("words", [(), ("core_attn",), ("full_attn",)], ids=lambda words: " ".join(words) or "all kept")
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("of", [{}, WITHOUT_NORM, BESIDE], ids=["alone", "without a norm", "beside attention"])
def test_kept_bytes_are_those_of_autograd(precision, words, packed, of):
    """Attention keeps most where a document is a sample."""
    facts, element = GPTFacts(replace(MODEL, **of), 40), dict(fp32=4, bf16=2)[precision]
    share = RankSetup(device="cpu", micro_batch_size=B, documents=packed, precision=precision, element=element)
    found = saved_by_layer(facts, share, words, (S if of is BESIDE else 100) if packed else None)
    assert found == facts.layer_saved_bytes(share, facts.layer_kind(0), words).total()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("groups, heads, width, state", [(2, 16, 16, 16), (1, 4, 64, 128), (8, 8, 64, 128)])
@pytest.mark.parametrize("normed", [True, False], ids=["a norm", "none"])
def test_most_memory_of_a_pass(dtype, groups, heads, width, state, normed, most_allocated):
    """A forward and a backward pass: what is kept, and what the backward pass needs besides, within a sixth."""
    sizes = dict(mamba_num_heads=heads, mamba_head_dim=width, mamba_state_dim=state, mamba_num_groups=groups)
    facts = GPTFacts(Model(1, 128, 4, 1024, hybrid_layer_pattern="M", mamba_rms_norm=normed, **sizes, **PLAIN), 40)
    share = RankSetup(device="cpu", precision="fp32" if dtype == torch.float32 else "bf16", element=dtype.itemsize)
    kind = facts.layer_kind(0)
    layer = Layer(facts.layer_weights(kind, False), LayerSetup(facts, 0, Mesh(), dtype=dtype))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)

    def run():
        x = torch.randn(1024, 1, 128).to(dtype).requires_grad_()
        y = layer(x, ForwardContext())
        y.backward(torch.ones_like(y))
        layer.zero_grad()

    run()
    [scan] = [op for op in facts.layer_ops(share, kind) if isinstance(op, Scan)]
    wanted = facts.layer_saved_bytes(share, kind, ()).total() + scan.workspace
    assert 5 / 6 < most_allocated(run) / wanted < 7 / 6


def test_parameters_flops_and_shapes():
    """Multiply-adds count 2; those of the scan are a state's update and its reading."""
    facts = GPTFacts(MODEL, 40)
    mixed, rows = INNER + 2 * GROUPS * STATE, 2 * INNER + 2 * GROUPS * STATE + HEADS
    weights = H * rows + 5 * mixed + 3 * HEADS + INNER + INNER * H
    assert elements(mamba(MODEL, False)) == weights
    each = 2 * (H * rows + INNER * H + 4 * mixed) + 4 * INNER * STATE
    assert facts.layer_flops(0) == S * each
    ops = facts.layer_ops(RankSetup(tp=2, cp=2, cp_heads=1), facts.layer_kind(0))
    [scan], products = [op for op in ops if isinstance(op, Scan)], [op for op in ops if isinstance(op, Product)]
    assert scan.flops == S / 4 * 4 * INNER * STATE  # of a rank: a quarter
    assert [(op.inputs, op.outputs) for op in products] == [(H, rows // 2), (INNER // 2, H)]


@pytest.mark.parametrize("words", [None, "core_attn", "full", "full_attn"])
@pytest.mark.parametrize("of", [dict(hybrid_layer_pattern="M-M"), BESIDE], ids=["alone", "beside attention"])
def test_it_is_planned(words, of):
    """Bytes of a step of training as the planner predicts them."""
    model = Model(3, 64, 4, 256, **of, mamba_num_groups=2, **PLAIN)
    layout = Layout(micro_batch_size=2, recompute=Recompute(words))
    assert predicted(model, layout) == pytest.approx(measured(model, layout, Mesh()), rel=0.05)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("words", [None, "core_attn"])
@pytest.mark.parametrize("layout", [dict(tp=2), dict(tp=2, sp=True), dict(cp=2)], ids=str)
def test_it_is_planned_over_ranks(words, layout, run_ranks):
    """Where attention is beside it, ranks of context parallelism exchange rows for its heads, too."""
    model = Model(3, 64, 4, 256, **BESIDE, mamba_num_groups=2, **PLAIN)
    layout = Layout(**layout, micro_batch_size=2, recompute=Recompute(words))
    found = run_ranks(2, lambda rank: measured(model, layout, Mesh(rank, tp=layout.tp, cp=layout.cp)))[0]
    assert predicted(model, layout) == pytest.approx(found, rel=0.02)


# ---- generation, and wrong uses --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mamba")
    pretrain_hybrid.main([*f"{LINE} --hybrid-layer-pattern M*-M --save {folder} --train-iters 2".split()])
    return load_model(str(folder)).model


def test_texts_with_a_cache_and_without_one(trained):
    start, text = [5, 7], [5, 7]
    for _ in range(6):
        text.append(trained.logits(torch.tensor(text)[:, None])[-1, 0].argmax().item())
    greedy = Sampling(tokens_to_generate=6, greedy=True)
    for use_cache in (True, False):
        assert generate(trained, [start], greedy, longest=12, use_cache=use_cache)[0] == text[2:]


ROPE = "--position-embedding-type rope --mamba-num-groups 2"
WRONG = {
    "--mamba-num-groups 4": "6 heads of a Mamba-2 layer cannot be divided by --mamba-num-groups 4; nearest: 2 or 3 groups",
    "--mamba-head-dim 7 --mamba-num-groups 1": "--mamba-head-dim 7 does not divide 48, twice --hidden-size",
    "--tp 3 --mamba-num-groups 2": "--mamba-num-groups 2 cannot be divided by --tp 3; nearest: 3",
    f"--multi-latent-attention {ROPE} --hybrid-layer-pattern P-": "lists no layer of mla (+)",
    f"{ROPE} --hybrid-layer-pattern P+": "lists attention and multi-latent attention (+)",
    "--mamba-num-groups 0": "--mamba-num-groups 0 must be",
    "--mamba-num-heads 0 --mamba-num-groups 2": "--mamba-num-heads 0 must be at least 1",
    "--mamba-head-dim 7 --mamba-num-groups 4": "--mamba-head-dim 7 does not divide 48, twice --hidden-size",
    "--mamba-state-dim -1 --mamba-num-groups 2": "--mamba-state-dim -1 must be",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_use_has_one_clear_message(words):
    shape = "--hidden-size 24 --num-attention-heads 3 --seq-length 12 --mock-data --vocab-size 100 --micro-batch-size 1"
    line = f"{shape} --global-batch-size 6 --train-iters 2 --lr 1e-2 --device cpu --hybrid-layer-pattern M*"
    head = "" if "head-dim" in words else "--mamba-head-dim 8"
    config = parse_any(f"{line} {head} {words}".split())
    found = check(config, config.parallel.tensor_model_parallel_size)
    assert found and all(WRONG[words] in said for said in found), found
