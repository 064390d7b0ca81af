# SPDX-License-Identifier: Apache-2.0
"""Formats that a CPU has no instructions for: each op is asked about before it runs, and products are computed in fp32.

Tests marked `plain_cpu` run twice: as the others, and with a oneDNN that may use no more than AVX2.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.fused_kernels import Case, choose_kernel, cpu_ops
from megatron.fused_kernels.explicit_attention import Explicit, Rectangle, Scores
from megatron.fused_kernels.partial_attention import FlashOnCPU
from megatron.inference.quantize import multiply_int8
from megatron.model.kinds.experts import grouped
from megatron.mpu.initialize import DTYPES
from megatron.mpu.layers import pack_weights
from tests.inference.conftest import make_small_gpt

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def fp32_alone(monkeypatch):
    """A CPU that multiplies fp32 alone, as oneDNN on CPUs without AVX-512."""
    monkeypatch.setattr(cpu_ops, "FORMATS", frozenset({torch.float32}))
    grouped.lacking_grouped.cache_clear()
    yield
    grouped.lacking_grouped.cache_clear()


# ---- which formats a CPU has -----------------------------------------------------------------------------------------


def works(product, *operands) -> bool:
    try:
        product(*operands)
    except (AttributeError, RuntimeError):  # no such op; no such instructions
        return False
    return True


@pytest.mark.plain_cpu
def test_the_formats_are_those_whose_ops_work():
    for dtype in DTYPES.values():
        x, has = torch.ones(8, 8, dtype=dtype), dtype in cpu_ops.FORMATS
        assert cpu_ops.packs(x) == works(cpu_ops.packed, x) == works(cpu_ops.onednn, x, x) == has, dtype
        assert works(cpu_ops.onednn_gelu, x, x, None, "tanh") == has, dtype
        assert cpu_ops.widens("cpu", dtype) == (not has and dtype in HALVES) and not cpu_ops.widens("cuda", dtype)


@pytest.mark.plain_cpu
@pytest.mark.parametrize("k", [2, 64, 1000])
def test_sums_of_int8_do_not_overflow(k):
    """oneDNN without VNNI adds pairs of products in 16 bits: https://github.com/pytorch/pytorch/issues/136746."""
    values = torch.tensor([-127, 127, 100, 1], dtype=torch.int8)
    x = values.repeat_interleave(5).unsqueeze(1).expand(-1, k).contiguous()
    assert torch.equal(multiply_int8(x, x).double(), x.double() @ x.double().t())


def test_int8_in_fp32(fp32_alone):
    test_sums_of_int8_do_not_overflow(1000)


@pytest.mark.sampled(10)
def test_the_marked_tests_pass_with_avx2(root):
    """A CPU of an ordinary laptop: oneDNN may use AVX2, and neither AVX-512 nor bf16 nor VNNI."""
    mark = "@pytest.mark.plain_" + "cpu\n"
    files = [str(path) for path in sorted((root / "tests").rglob("test_*.py")) if mark in path.read_text()]
    inherited = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    words = [sys.executable, "-m", "pytest", "-m", "plain_cpu", "-p", "no:cacheprovider", *files]
    limits = dict(ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2")
    done = subprocess.run(words, cwd=root, env=inherited | limits, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- products in fp32 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_rounded_once(dtype, fp32_alone, monkeypatch):
    """Of whole and transposed operands, of a weight in one part and in several, of no rows and of no inputs."""
    monkeypatch.setattr(cpu_ops, "WIDENED", 24 * 7)
    assert choose_kernel("matmul", Case("cpu", dtype)).run is cpu_ops.widened
    draw = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(shape, generator=draw).to(dtype) for shape in ((64, 24), (40, 24), (40,)))
    for left in (x, x.t().contiguous().t(), x[::2], x[:0]):
        for right in (weight, weight.t().contiguous().t()):
            for added in (None, bias):
                exact = left.double() @ right.double().t() + (0 if added is None else added.double())
                torch.testing.assert_close(
                    cpu_ops.widened(left, right, added), exact.to(dtype), atol=1e-5, rtol=torch.finfo(dtype).eps
                )
    nothing = torch.empty(5, 0, dtype=dtype)
    assert torch.equal(cpu_ops.widened(nothing, nothing), torch.zeros(5, 5, dtype=dtype))


class HalfProducts(TorchDispatchMode):
    """Collects the products of half formats, but those with few rows and the sums of norms' gradients."""

    OPS = "mm addmm bmm baddbmm _grouped_mm _scaled_dot_product_flash_attention_for_cpu_backward".split()

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in self.OPS:
            left = args[1 if name in ("addmm", "baddbmm") else 0]
            if left.dtype in HALVES and left.shape[-2] > cpu_ops.FEW:
                self.found.add((name, tuple(left.shape)))
        return func(*args, **(kwargs or {}))


SIZES = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 --train-iters 1 --eval-iters 0
    --mock-data --vocab-size 128 --tokenizer-type NullTokenizer --lr 1e-3 --device cpu"""
EXPERTS = "--num-experts 4 --moe-router-topk 2"
RUNS = {
    "gpt": (pretrain_gpt, "--bf16 --attention-dropout 0.1"),
    "fp16": (pretrain_gpt, "--fp16 --initial-loss-scale 64"),
    "O1": (pretrain_gpt, "--bf16 --amp-level O1"),
    "grouped queries": (pretrain_gpt, "--bf16 --group-query-attention --num-query-groups 2 --swiglu"),
    "muon": (pretrain_gpt, "--bf16 --optimizer muon"),
    "experts": (pretrain_gpt, f"--bf16 {EXPERTS}"),
    "even experts": (
        pretrain_gpt,
        f"--bf16 {EXPERTS} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
    ),
    "t5": (pretrain_t5, "--bf16 --decoder-seq-length 16 --vocab-extra-ids 20 --position-embedding-type relative"),
    "bert": (pretrain_bert, "--bf16"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", RUNS)
def test_no_product_of_training_is_in_a_format_without_instructions(name, fp32_alone):
    recipe, words = RUNS[name]
    with HalfProducts() as products:
        recipe.main(f"{SIZES} --seq-length 32 {words}".split())
    assert not products.found


@pytest.mark.skipif(torch.bfloat16 not in cpu_ops.FORMATS, reason="no bf16 instructions")
def test_products_of_training_are_in_bf16_where_there_are_instructions():
    recipe, words = RUNS["gpt"]
    with HalfProducts() as products:
        recipe.main(f"{SIZES} --seq-length 32 {words}".split())
    assert {name for name, _ in products.found} >= {"mm", "bmm"}


@pytest.mark.parametrize("kernel", [Explicit, FlashOnCPU])
def test_no_product_of_a_ring(kernel, fp32_alone):
    """Of a rank's queries over another one's keys in a window, against a softmax in fp64."""
    n, b, h, d, window = 24, 2, 3, 16, 9
    draw = torch.Generator().manual_seed(2)
    query, key, value, above = (torch.randn(n, b, h, d, generator=draw).bfloat16() for _ in range(4))
    whole, scores = Rectangle(slice(0, n), slice(0, n), True, window, None), Scores(0.25)
    with HalfProducts() as products:
        out, lse = kernel.forward(query, key, value, whole, scores)
        gradients = kernel.backward(above, query, key, value, out, lse, whole, scores)
    assert not products.found
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    pairs = 0.25 * torch.einsum("nbhd,mbhd->bhnm", *exact[:2])
    hidden = ~torch.ones(n, n, dtype=torch.bool).tril().triu(-window)
    wanted = torch.einsum("bhnm,mbhd->nbhd", pairs.masked_fill(hidden, float("-inf")).softmax(-1), exact[2])
    for mine, theirs in zip(
        (out, *gradients), (wanted, *torch.autograd.grad(wanted, exact, above.double())), strict=True
    ):
        assert (mine.double() - theirs).norm() < 1e-2 * theirs.norm()


def test_logits_are_as_near_to_those_of_fp64(monkeypatch):
    """In a bf16 model: values are rounded after each op, whatever computes it."""
    tokens = torch.randint(512, (32, 4), generator=torch.Generator().manual_seed(1))
    model, errors = make_small_gpt(), []
    exact = model.double().logits(tokens)
    model.bfloat16()
    model.dtype = torch.bfloat16
    for formats in ({torch.float32, torch.bfloat16}, {torch.float32}):
        monkeypatch.setattr(cpu_ops, "FORMATS", frozenset(formats))
        errors.append((model.logits(tokens).double() - exact).norm() / exact.norm())
    assert errors[1] < 1.1 * errors[0] < 0.1, errors


def test_packed_weights(fp32_alone):
    model = make_small_gpt()
    assert len(pack_weights(model)) == 8
    for layer in model.modules():
        layer.packed = None
    assert not pack_weights(model.bfloat16())
