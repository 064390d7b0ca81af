# SPDX-License-Identifier: Apache-2.0
"""Kinds of linear layers whose matrices are those of experts: each expert computes what a layer by itself does, and any
division of experts what one process does.

Legend: m rows, E experts, i inputs, f width.
"""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.entry import start
from megatron.inference.load import load_model
from megatron.model import fake_quantize, lora, quantization, sparsity, weights
from megatron.model.command_line import parse_any
from megatron.model.kinds.experts import grouped
from megatron.model.kinds.experts.grouped import GroupedLinear, Rows
from megatron.model.linear_products import products_of
from megatron.mpu.deferred_wgrad import WeightGradStore, run_deferred_wgrads
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Model
from megatron.tools import checkpoint as tool
from megatron.training.rules import check
from tests.models.in_layouts import check_layout
from tests.models.own_fp8 import Fp8, Fp8Settings

INPUTS, WIDTH, COUNTS = 16, 8, [5, 0, 7]
KINDS = {
    "plain": {},
    "lora": dict(lora_rank=3, lora_alpha=5.0),
    "lora of gate and values apart": dict(lora_rank=3, lora_alpha=5.0, lora_split_fused=True),
    "half": dict(sparsity="0.5"),
    "2 of 4": dict(sparsity="2:4"),
    "rounded": dict(quantization=True, activation_quantize_type="token_wise_min_max"),
    "rounded by one scale": dict(quantization=True, weight_quantize_type="abs_max", activation_quantize_type="none"),
}
OWN = dict(lora=lora, half=sparsity, rounded=quantization) | {"2": sparsity}


def made(kind: str) -> GroupedLinear:
    settings = Model(num_layers=1, hidden_size=INPUTS, num_attention_heads=2, **KINDS[kind])
    matrices = (0, (1, 1))
    table = weights.column(INPUTS, (2, WIDTH), 1.0, cut=1, matrices=matrices, experts=len(COUNTS))
    module = OWN.get(kind.split()[0])
    if module:
        table |= module.own_weights(settings, table["weight"])
    layer = GroupedLinear(table, (Mesh().ep, Mesh().etp), dtype=torch.float64, device="cpu")
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(seed))
    if module:
        layer.product = products_of(settings)[module.KIND](layer, "blocks.3.mlp.experts.up", settings)
    if module is sparsity:
        layer.sparsity_mask.fill_(True)
        layer.sparsity_step.zero_()
    return layer


def of_expert(layer, kind: str, e: int, x: torch.Tensor) -> torch.Tensor:
    """What the expert makes of its rows [m, i], in plain torch."""
    weight, bias = layer.weight[e].flatten(0, 1), layer.bias[e].flatten()
    if kind.startswith("lora"):
        a, b = layer.lora_a[e], layer.lora_b[e]
        parts = zip(a.chunk(2), b, strict=True) if kind.endswith("apart") else [(a, b.flatten(0, 1))]
        return F.linear(x, weight, bias) + 5 / 3 * torch.cat([x @ own.T @ rows.T for own, rows in parts], 1)
    if kind == "half":
        weight = weight * (weight.abs() >= weight.detach().abs().flatten().sort().values[weight.numel() // 2])
    if kind == "2 of 4":
        groups = weight.detach().abs().view(len(weight), -1, 4)
        weight = weight * torch.zeros_like(groups).scatter(-1, groups.topk(2, -1).indices, 1.0).view_as(weight)
    if kind.startswith("rounded"):
        largest = weight.detach().abs().amax(1, keepdim=True)
        step = (largest.amax() if kind.endswith("scale") else largest).float().double() / 127
        weight = weight + ((weight / step).round() * step - weight).detach()
        if kind == "rounded":
            low, high = x.detach().amin(1, keepdim=True).clamp_max(0), x.detach().amax(1, keepdim=True).clamp_min(0)
            step = (high - low).float() / 255
            zero = (-low.float() / step).round()
            x = x + ((((x.float() / step).round() + zero).clamp(0, 255) - zero) * step - x).detach()
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["autograd", "deferred"])
def test_an_expert_is_a_layer_by_itself(kind, way):
    layer = made(kind)
    frozen = kind.startswith("lora")
    layer.weight.requires_grad_(not frozen)
    trained = [layer.get_parameter(name) for name in ("lora_a", "lora_b")] if frozen else [layer.weight]
    x = torch.randn(
        sum(COUNTS), INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    ).requires_grad_()
    wanted = torch.cat([of_expert(layer, kind, e, own) for e, own in enumerate(x.split(COUNTS))])
    gradients = torch.autograd.grad(wanted.sin().sum(), [x, *trained])
    layer.weight_grad_store = store = WeightGradStore() if way == "deferred" else None
    y = layer(x, Rows(torch.tensor(COUNTS), sum(COUNTS)))
    near = dict(rtol=1e-5, atol=1e-6) if kind.startswith("rounded") else {}
    torch.testing.assert_close(y, wanted, **near)
    if store:
        with store.collect() as products:
            y.sin().sum().backward()
        assert all(one.grad is None for one in trained) and len(products) == 1
        if frozen:
            for one in trained:
                one.data.fill_(math.nan)  # gone with ZeRO 3
        run_deferred_wgrads(products)
    else:
        y.sin().sum().backward()
    for found, one in zip((x.grad, *(one.grad for one in trained)), gradients, strict=True):
        torch.testing.assert_close(found, one, **near)


def test_a_kind_from_outside_reaches_experts():
    layer, settings = made("plain"), Fp8Settings()
    layer.product = Fp8(layer, "blocks.3.mlp.experts.up", settings)
    x = torch.randn(sum(COUNTS), INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    rows = Rows(torch.tensor(COUNTS), sum(COUNTS))
    back = lambda one: Fp8.back(layer.product, layer.product.prepare_input(one))
    wanted = [F.linear(back(own), back(layer.weight[e].flatten(0, 1))) for e, own in enumerate(x.split(COUNTS))]
    found = layer(x, rows) - rows.each(layer.bias.flatten(1))
    torch.testing.assert_close(found, torch.cat(wanted))


FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --swiglu
    --global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-2 --mock-data --vocab-size 100 --device cpu
    --precision fp32 --num-experts 4 --moe-ffn-hidden-size 16"""
LAYOUTS = ["ep2", "tp2sp", "tp2-ep2", "ep2-zero3", "pp2-ep2-zbh1"]
WAYS = {
    "lora": "--lora-rank 4 --lora-split-fused",
    "rounded": "--quantization --quantization-layers *",
    "masks": "--sparsity 0.5 --sparsity-layers mlp.*",
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_any_division_of_experts_is_one_process(way, layout):
    check_layout(layout, f"{FLAGS} {WAYS[way]}")


@pytest.mark.parametrize("more", ["--lora-dropout 0.1", "--use-dora"])
def test_what_does_not_reach_experts_is_said(more):
    [said] = check(parse_any(f"{FLAGS} --lora-rank 4 {more}".split()), 1)
    assert said.startswith(f"{more} does not reach experts, such as blocks.0.mlp.experts.up")
    assert not check(parse_any(f"{FLAGS} --lora-rank 4 {more} --lora-target attention.*".split()), 1)


def test_a_rank_without_tokens_has_no_scale():
    settings = Model(1, INPUTS, 2, quantization=True)
    table = weights.column(INPUTS, (WIDTH,), 1.0, experts=2)
    table |= quantization.own_weights(settings, table["weight"])
    layer = GroupedLinear(table, (Mesh().ep, Mesh().etp), dtype=torch.float32, device="cpu")
    for one in (*layer.parameters(), *layer.buffers()):
        one.data.zero_()
    layer.product = fake_quantize.FakeQuantizeProduct(layer, "blocks.0.mlp.experts.up", settings)
    layer(torch.empty(0, INPUTS), Rows(torch.tensor([0, 0]), 0))
    assert layer.input_absmax == 0


@pytest.mark.parametrize("device, modes", [("cuda", ["error", "warn"]), ("cpu", [])])
@pytest.mark.parametrize("fails", [False, True])
def test_waits_are_refused_on_a_gpu_and_only_in_the_trial_run(device, modes, fails, monkeypatch):
    """What was set before is set again, also after an error, which a trial run expects."""
    seen = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "warn")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", seen.append)
    with contextlib.suppress(RuntimeError), grouped._refusing_waits(device):
        assert seen == modes[:1]
        if fails:
            raise RuntimeError
    assert seen == modes


@pytest.mark.parametrize("command, way", [("merge-lora", "lora"), ("apply-masks", "masks")])
def test_merged_experts_compute_the_same(command, way, tmp_path):
    start(f"{FLAGS} {WAYS[way]} --save {tmp_path / 'own'}".split(), pretrain_gpt.recipe())
    tool.main([command, str(tmp_path / "own"), str(tmp_path / "plain")])
    tokens = torch.arange(14).view(7, 2)
    before, after = (load_model(str(tmp_path / name)).model.logits(tokens) for name in ("own", "plain"))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    with (
        Reader(next((tmp_path / "plain").glob("iter_*"))) as plain,
        Reader(next((tmp_path / "own").glob("iter_*"))) as own,
    ):
        name = "blocks.0.mlp.experts.up.weight"
        assert not torch.equal(plain.read(name), own.read(name)) and not any("lora" in one for one in plain.tensors)
