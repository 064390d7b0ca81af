# SPDX-License-Identifier: Apache-2.0
"""Fused or not, loss and gradients are the same to rounding; and each flag does what it says."""

import pytest
import torch

from megatron.fused_kernels import FUSED, TABLE, Implementation, reference
from megatron.model.facts import RankSetup
from megatron.model.kinds.attention import module as attention
from megatron.mpu import layers
from tests.settings.test_arithmetic_settings import Seen, step

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--hidden-dropout 0.1"
)


def assert_close(found, want):
    for one, other in zip([found[0], *found[1]], [want[0], *want[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture
def calls(monkeypatch):
    """{op: how often a fused kernel computed it}: kernels as a GPU has them, which here are the reference's."""
    counts = {}

    def counting(op):
        def run(*args, **kwargs):
            counts[op] = counts.get(op, 0) + 1
            args = args[:-1] if op.startswith("add_") else args  # a fused one needs no other norm
            return getattr(reference, op)(*args, **kwargs)

        return run

    for op, entries in TABLE.items():
        if entries[0].name == "Triton":
            monkeypatch.setitem(TABLE, op, [Implementation("fused", counting(op), "", covers=FUSED), *entries[1:]])
    return counts


GPT = {"add_layer_norm": 2, "layer_norm": 3, "bias_gelu": 2, "cross_entropy": 1}  # of 2 layers, and what is at the end
OF_LLAMA = {"rms_norm": 5, "swiglu": 2, "rotate": 4, "dropout_add": 4, "cross_entropy": 1}


@pytest.mark.parametrize(
    "model, every, flags",
    [
        (
            "",
            GPT,
            {"--no-persist-layer-norm": {"add_layer_norm", "layer_norm"}, "--no-bias-gelu-fusion": {"bias_gelu"}},
        ),
        (
            LLAMA,
            OF_LLAMA,
            {
                "--no-persist-layer-norm": {"rms_norm"},
                "--no-bias-swiglu-fusion": {"swiglu"},
                "--no-rope-fusion": {"rotate"},
                "--no-bias-dropout-fusion": {"dropout_add"},
                "--no-cross-entropy-loss-fusion": {"cross_entropy"},
            },
        ),
    ],
    ids=["GPT", "Llama"],
)
def test_a_fused_kernel_is_used_unless_its_flag_says_no(calls, build, model, every, flags):
    """--no-bias-gelu-fusion is another formula besides, as in Megatron-LM."""
    want = step(build(model))
    assert calls == every
    for flag, gone in flags.items():
        calls.clear()
        found = step(build(f"{model} {flag}"))
        assert calls == {op: count for op, count in every.items() if op not in gone}
        if flag != "--no-bias-gelu-fusion":
            assert_close(found, want)


def test_amp_sees_torchs_ops(calls, build):
    """Under --amp-level O1 the table of formats decides about each op, so that only norms and the loss are fused."""
    step(build(f"{LLAMA} --bf16 --amp-level O1"))
    assert {"rms_norm", "cross_entropy"} <= set(calls)


@pytest.mark.parametrize("backend", ["auto", "explicit"])
def test_plain_softmax_makes_all_scores_at_once(build, backend, monkeypatch):
    """--no-masked-softmax-fusion: blocks are not taken."""
    more = f"--attention-backend {backend}"
    want, run = step(build(more)), build(f"{more} --no-masked-softmax-fusion")
    taken, choose = [], attention.choose_kernel
    monkeypatch.setattr(attention, "choose_kernel", lambda *args: taken.append(choose(*args)) or taken[-1])
    assert_close(step(run), want)
    assert {kernel.name for kernel in taken} == {"reference" if backend == "explicit" else "sdpa (CPU)"}
    setup = RankSetup(device="cpu", precision="fp32", element=4, backend=backend, plain_softmax=True)
    assert run.stages[0].facts.attention_kernel(setup) == ("reference" if backend == "explicit" else "flash")


def test_products_without_biases(build, monkeypatch):
    """--no-fused-linear: additions behind the products."""
    biased, linear = [], layers.linear
    note = lambda x, weight, bias=None, *more: biased.append(bias is not None) or linear(x, weight, bias, *more)
    monkeypatch.setattr(layers, "linear", note)
    want = step(build())
    assert biased == [True] * 8
    biased.clear()
    assert_close(step(build("--no-fused-linear")), want)
    assert biased == [False] * 8


@pytest.mark.parametrize("model", ["", f"{LLAMA} --disable-bias-linear --qk-layernorm"])
def test_three_products_for_queries_keys_and_values(build, model):
    """--no-fuse-attn-qkv: of the same weight."""
    run = build(model)
    with Seen() as seen:
        want = step(run)
    run = build(f"{model} --no-fuse-attn-qkv")
    with Seen() as more:
        found = step(run)
    products = lambda found: sum("linear" in op or op in ("mm", "addmm") for op, _ in found.ops)
    assert products(more) > products(seen)
    assert_close(found, want)
    for one, other in zip(run.stages[0].parameters(), build(model).stages[0].parameters(), strict=True):
        assert one.shape == other.shape
