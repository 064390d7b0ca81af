# SPDX-License-Identifier: Apache-2.0
"""Every fast twin that runs here equals the reference that defines it, values and gradients; and the table picks well."""

import pytest
import torch

from megatron.fused_kernels import TABLE, Case, attention, choose, matmul, norms, reference
from megatron.fused_kernels.dropout import Keep


def operands(s, b, g, q, d, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(s, b, g, q, d), (s, b, g, d), (s, b, g, d)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def words(*shape) -> Keep:
    """Dropout of a fifth."""
    drawn = torch.randint(-32768, 32768, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(3))
    return Keep(drawn, -32768 + 65536 // 5, 1.25)


# Odd lengths leave a short last block; 513 crosses to the larger block size.
SHAPES = [(2, 1, 1, 1, 4), (37, 2, 3, 1, 8), (300, 2, 2, 1, 16), (300, 1, 2, 3, 8), (513, 1, 1, 2, 8)]


@pytest.mark.parametrize("twin", [attention.block_causal, attention.sdpa])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(twin, shape):
    inputs = operands(*shape)
    want = reference.attention(*inputs, scale=0.3)
    got = twin(*inputs, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked, dropped", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_causal_with_documents_and_dropout(shape, masked, dropped):
    s, b, g, q, _ = shape
    inputs, generator = operands(*shape), torch.Generator().manual_seed(2)
    documents = torch.rand(b, s, generator=generator).cumsum(1).div(9).int()  # of about 18 tokens
    allowed = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril() if masked else None
    more = dict(scale=0.3, allowed=allowed, dropout=words(b, g * q, s, s) if dropped else None)
    want, got = reference.attention(*inputs, **more), attention.block_causal(*inputs, **more)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_attention_in_bf16_is_as_exact_as_the_reference():
    inputs = operands(300, 2, 2, 2, 16, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = reference.attention(*exact, scale=0.3)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).double()
    wanted = torch.autograd.grad(want, exact, upstream)

    def errors(function):
        got = function(*inputs, scale=0.3)
        found = [got, *torch.autograd.grad(got, inputs, upstream.bfloat16())]
        return [((x - y).norm() / y.norm()).item() for x, y in zip(found, [want, *wanted])]

    for mine, plain in zip(errors(attention.block_causal), errors(reference.attention)):
        assert mine < 1.3 * plain + 1e-3


def test_gradients_numerically():
    inputs = [x.detach().double().requires_grad_() for x in operands(5, 1, 2, 2, 3)]
    assert torch.autograd.gradcheck(lambda *x: attention.block_causal(*x, scale=0.5), inputs)
    more = dict(scale=0.5, dropout=words(1, 4, 5, 5))
    assert torch.autograd.gradcheck(lambda *x: attention.block_causal(*x, **more), inputs)


def test_sdpa_with_documents_and_cached_keys():
    query, key, value = operands(9, 2, 2, 2, 4)
    allowed = torch.rand(2, 9, 9) > 0.5
    allowed |= torch.eye(9, dtype=torch.bool)
    for how in (dict(allowed=allowed), {}):
        args = (query, key, value) if how else (query[-3:], key, value)
        want = reference.attention(*args, scale=0.5, **how)
        torch.testing.assert_close(attention.sdpa(*args, scale=0.5, **how), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "twin, plain, biased",
    [(norms.rms_norm, reference.rms_norm, False), (norms.exact_layer_norm, reference.layer_norm, True)],
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
def test_norms(twin, plain, biased, dtype, tolerance):
    """Against fp64, over enough tokens that sums of gradients in bf16 would lose digits; and over cut-out heads."""
    for shape in ((2048, 2, 32), (5, 2, 3, 4, 8)):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(*shape[:-1], 3 * shape[-1], generator=generator).to(dtype)[..., : shape[-1]].requires_grad_()
        parameters = [
            (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype).requires_grad_() for _ in range(1 + biased)
        ]
        exact = [y.detach().double().requires_grad_() for y in (x, *parameters)]
        upstream = torch.randn(shape, generator=generator)
        want, got = plain(*exact, 1e-5), twin(x, *parameters, 1e-5)
        assert got.dtype == dtype
        found = [got, *torch.autograd.grad(got, (x, *parameters), upstream.to(dtype))]
        wanted = [want, *torch.autograd.grad(want, exact, upstream.to(dtype).double())]
        for mine, theirs in zip(found, wanted):
            assert mine.dtype == dtype
            assert (mine - theirs).norm() < tolerance * theirs.norm()


def test_norms_numerically():
    x, weight, bias = (torch.randn(n, dtype=torch.double, requires_grad=True) for n in ((3, 5), (5,), (5,)))
    assert torch.autograd.gradcheck(lambda *y: norms.exact_layer_norm(*y, 1e-3), (x, weight, bias))


@pytest.mark.skipif(bool(TABLE["matmul"][0].lacking), reason=TABLE["matmul"][0].lacking)
def test_onednn_product_of_any_strides():
    x, weight, bias = torch.randn(64, 24), torch.randn(40, 24), torch.randn(40)
    torch.testing.assert_close(matmul.onednn(x, weight, bias), reference.matmul(x, weight, bias), rtol=1e-4, atol=1e-4)
    for left, right in ((x.t().contiguous().t(), weight), (x, weight.t().contiguous().t()), (x[::2], weight[::2])):
        torch.testing.assert_close(matmul.onednn(left, right), reference.matmul(left, right), rtol=1e-4, atol=1e-4)
    tall = torch.randn(512, 8).t()  # larger than the other operand and the result: the transposed product
    torch.testing.assert_close(matmul.onednn(tall, torch.randn(4, 512)).shape, torch.Size([8, 4]))
    other = torch.randn(4, 512)
    torch.testing.assert_close(matmul.onednn(tall, other), reference.matmul(tall, other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case, backend, name",
    [
        (Case("cpu", torch.bfloat16, 256, 256), "auto", "block-causal"),
        (Case("cpu", torch.bfloat16, 256, 256), "sdpa", "sdpa (CPU)"),
        (Case("cpu", torch.float32, 9000, 9000), "auto", "sdpa (CPU)"),
        (Case("cpu", torch.float32, 256, 256, dropout=True), "auto", "block-causal"),
        (Case("cpu", torch.float32, 9000, 9000, dropout=True, masked=True), "sdpa", "block-causal"),
        (Case("cpu", torch.float32, 256, 256, masked=True), "auto", "block-causal"),
        (Case("cpu", torch.float32, 256, 256, masked=True), "sdpa", "sdpa (CPU)"),
        (Case("cpu", torch.float16, 256, 256, scaled_softmax=True), "flash", "reference"),
        (Case("cpu", torch.float16, 256, 256, scaled_softmax=True, dropout=True), "auto", "reference"),
        (Case("cpu", torch.float32, 128, 256), "auto", "reference"),
        (Case("cpu", torch.float32, 1, 256), "auto", "reference"),
    ],
)
def test_choice(case, backend, name):
    assert choose("attention", case, backend).name == name


def test_every_op_ends_with_a_reference_that_covers_all():
    for op, entries in TABLE.items():
        assert entries[-1].run is getattr(reference, op)
        assert not entries[-1].lacking and entries[-1].covers(Case("anything", torch.float64))


def test_memory_is_kept_where_the_c_library_can():
    import ctypes
    import sys

    from megatron.fused_kernels.cpu import keep_memory

    assert keep_memory() == (sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "mallopt"))
