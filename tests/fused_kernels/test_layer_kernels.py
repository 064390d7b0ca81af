# SPDX-License-Identifier: Apache-2.0
"""Norms, products, dropout, rotations and the cross-entropy: every implementation equals its formula in fp64, values and
gradients. `tests/gpu/test_gpu_kernels.py` runs the same tests on CUDA.
"""

import pytest
import torch

from megatron.fused_kernels import TABLE, Case, cpu_ops, norms, reference
from megatron.fused_kernels.dropout import DropoutMask, drop
from megatron.fused_kernels.gpu.probe import experts_order
from megatron.model.positions import Rotary, rotate
from megatron.mpu.cross_entropy import linear_cross_entropy, token_losses
from megatron.mpu.layers import linear
from megatron.mpu.mesh import Mesh
from megatron.settings import kernel_sizes
from megatron.settings.schema import Model

# Relative errors, in the norm over a tensor: of sums in fp32 on CPUs, on GPUs (which may make products in TF32), of bf16.
TOLERANCE = {
    ("cpu", torch.float32): 3e-6,
    ("cuda", torch.float32): 2e-3,
    ("cpu", torch.bfloat16): 1.5e-2,
    ("cuda", torch.bfloat16): 1.5e-2,
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def drawn(*shape, device, dtype=torch.float32, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_equal_results(function, formula, inputs, tolerance, what=""):
    """Values and the gradients of all inputs; the formula gets them in fp64 on the CPU."""
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    inputs = [x.detach().requires_grad_() for x in inputs]  # with their strides
    got, want = function(*inputs), formula(*exact)
    assert got.shape == want.shape and got.dtype == inputs[0].dtype
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).bfloat16()  # fits both formats
    found = [got, *torch.autograd.grad(got, inputs, upstream.to(got))]
    wanted = [want, *torch.autograd.grad(want, exact, upstream.double())]
    for place, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        error = (mine.detach().cpu().double() - theirs).norm() / theirs.norm()
        assert error < tolerance, f"{what}, {'value' if place == 0 else f'gradient {place}'}: {error:.1e}"


# ---- norms -----------------------------------------------------------------------------------------------------------


def layer_norm(x, weight, bias, epsilon):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight + bias


def rms_norm(x, weight, epsilon):
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


@DTYPES
@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_norm_of_a_scan(device, dtype, gate_first):
    """The gate is before the norm, which is over each group, or after it; the parts are cut out of a wider tensor."""

    def formula(y, gate, weight):
        passed = gate / (1 + (-gate).exp())
        return rms_norm(y * passed, weight, 1e-5) if gate_first else rms_norm(y, weight, 1e-5) * passed

    both = drawn(7, 2, 3, 40, device=device).to(dtype)
    weight = drawn(*((3, 20) if gate_first else (20,)), device=device, seed=2).mul(0.2).add(1.0).to(dtype)
    run = lambda *inputs: norms.gated_rms_norm(*inputs, 1e-5, gate_first)
    assert_equal_results(run, formula, [both[..., :20], both[..., 20:], weight], TOLERANCE[device, dtype])


@DTYPES
@pytest.mark.parametrize("op, formula", [("layer_norm", layer_norm), ("rms_norm", rms_norm)])
@pytest.mark.parametrize("epsilon, size", [(1e-5, 1.0), (1e-2, 0.1)], ids=["", "epsilon as large as the variance"])
def test_norms(device, dtype, op, formula, epsilon, size):
    """Rows next to each other, and heads cut out of a fused tensor; a mean that is not 0."""
    entries = [entry for entry in TABLE[op] if entry.fits(Case(device, dtype))]
    assert entries[-1].run is getattr(reference, op)
    for shape in ((30, 2, 64), (5, 2, 3, 4, 8)):
        h = shape[-1]
        x = ((drawn(*shape[:-1], 3 * h, device=device) + 0.5) * size).to(dtype)[..., h : 2 * h]
        parameters = [drawn(h, device=device, seed=n).mul(0.2).add(1.0).to(dtype) for n in (2, 3)]
        for entry in entries:
            run = lambda *y, run=entry.run: run(*y, epsilon)
            exact = lambda *y: formula(*y, epsilon)
            inputs = [x, *parameters] if op == "layer_norm" else [x, parameters[0]]
            assert_equal_results(run, exact, inputs, TOLERANCE[device, dtype], f"{entry.name}, {shape}")


@pytest.mark.parametrize(
    "kernel, formula, parameters", [(norms.rms_norm, rms_norm, 1), (norms.exact_layer_norm, layer_norm, 2)]
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
def test_sums_over_many_tokens_keep_their_digits(kernel, formula, parameters, dtype, tolerance):
    """On CPUs torch's own kernel adds up the gradients of a bf16 weight in bf16, and loses 7 % over 4096 tokens."""
    inputs = [drawn(2048, 2, 32, device="cpu", dtype=dtype)]
    inputs += [torch.rand(32, generator=torch.Generator().manual_seed(n)).add(0.5).to(dtype) for n in range(parameters)]
    assert_equal_results(lambda *y: kernel(*y, 1e-5), lambda *y: formula(*y, 1e-5), inputs, tolerance)


def test_norms_numerically():
    x, weight, bias = (
        drawn(*shape, device="cpu", dtype=torch.double).requires_grad_() for shape in ((3, 5), (5,), (5,))
    )
    assert torch.autograd.gradcheck(lambda *y: norms.exact_layer_norm(*y, 1e-3), (x, weight, bias))


# ---- rows of experts -------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(
    "n, k, rows, dropped",
    [(40, 2, 80, 0), (150, 8, 1300, 0), (40, 3, 130, 9), (40, 2, 60, 30), (9, 1, 9, 0), (3, 2, 0, 6), (0, 2, 0, 0)],
    ids=[
        "whole",
        "rows of zeros",
        "dropped pairs and rows of zeros",
        "dropped pairs",
        "one expert",
        "all dropped",
        "none",
    ],
)
def test_rows_of_experts(device, dtype, n, k, rows, dropped):
    """In more and less rows than are computed at a time."""
    (order, place), whole = experts_order(n, k, rows, dropped, device), rows == n * k and not dropped
    for op, count in (("permute", n), ("unpermute", rows)):
        inputs = [drawn(count, 24, device=device).to(dtype)]
        on_cpu = order.cpu(), place.cpu()
        formula = lambda x, op=op, on_cpu=on_cpu: getattr(reference, op)(x, *on_cpu, k, whole)
        for entry in (entry for entry in TABLE[op] if entry.fits(Case(device, dtype))):
            run = lambda x, run=entry.run: run(x, order, place, k, whole)
            if rows:
                assert_equal_results(run, formula, inputs, TOLERANCE[device, dtype] / 3, f"{op}, {entry.name}")
            else:
                mine = [x.detach().requires_grad_() for x in inputs]
                found = run(*mine)
                assert not torch.cat(
                    [x.flatten().double() for x in (found, *torch.autograd.grad(found.sum(), mine))]
                ).any()


@pytest.mark.parametrize("op", ["permute", "unpermute"])
def test_sums_of_rows_are_rounded_once(op):
    """In bf16, those of many rows, which bf16 additions would round again and again."""
    (n, k), kernel = (4, 64), next(entry.run for entry in TABLE[op] if entry.fits(Case("cpu", torch.bfloat16)))
    order, place = experts_order(n, k, n * k, 0, "cpu")
    rows = drawn(n * k, 24, device="cpu", dtype=torch.bfloat16).abs()
    exact = rows[place].double().view(n, k, -1).sum(1).bfloat16()
    if op == "unpermute":
        assert torch.equal(kernel(rows, order, place, k, True), exact)
        return
    x = torch.zeros(n, 24, dtype=torch.bfloat16, requires_grad=True)
    kernel(x, order, place, k, True).backward(rows)
    assert torch.equal(x.grad, exact)


# ---- products --------------------------------------------------------------------------------------------------------


@DTYPES
def test_products_of_any_strides(device, dtype):
    """Whole operands, transposed ones, every second row; tall ones, of which oneDNN makes the transposed product."""
    m, k, n = 64, 24, 40
    x, weight, bias = (drawn(*shape, device=device, dtype=dtype) for shape in ((m, k), (n, k), (n,)))
    pairs = [
        (x, weight),
        (x.t().contiguous().t(), weight),
        (x, weight.t().contiguous().t()),
        (x[::2], weight[::2]),
        (drawn(512, 8, device=device, dtype=dtype).t(), drawn(4, 512, device=device, dtype=dtype)),
        (drawn(512, 8, device=device, dtype=dtype).t(), drawn(512, 4, device=device, dtype=dtype).t()),
    ]
    entries = [entry for entry in TABLE["matmul"] if entry.fits(Case(device, dtype))]
    assert entries[-1].run is reference.matmul
    for entry in entries:
        for left, right in pairs:
            for added in (None, bias[: len(right)]):
                got = entry.run(left, right, added)
                want = left.cpu().double() @ right.cpu().double().t()
                want = want if added is None else want + added.cpu().double()
                assert got.shape == want.shape and got.dtype == dtype
                assert (got.cpu().double() - want).norm() < TOLERANCE[device, dtype] * want.norm(), entry.name


@pytest.mark.skipif(bool(TABLE["matmul"][0].lacking), reason=TABLE["matmul"][0].lacking)
def test_the_operand_that_would_be_copied_is_the_smaller_one(monkeypatch):
    """The first operand of `_linear` is copied where it is transposed."""
    firsts, made = [], cpu_ops._linear
    monkeypatch.setattr(cpu_ops, "_linear", lambda x, weight, bias: firsts.append(x) or made(x, weight, bias))
    tall, short = torch.randn(512, 8).t(), torch.randn(4, 512)
    cpu_ops.onednn(tall, short)
    cpu_ops.onednn(torch.randn(8, 4).t(), torch.randn(500, 8))
    assert [x.is_contiguous() for x in firsts] == [True, False]


@DTYPES
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_linear(device, dtype, biased):
    """The three products of a layer, whose weight may have several dims of rows."""
    inputs = [drawn(7, 2, 24, device=device, dtype=dtype), drawn(3, 4, 24, device=device, dtype=dtype)]
    inputs += [drawn(3, 4, device=device, dtype=dtype)] if biased else []

    def formula(x, weight, bias=None):
        y = torch.einsum("sbi,rji->sbrj", x, weight).flatten(2)
        return y if bias is None else y + bias.flatten()

    assert_equal_results(linear, formula, inputs, TOLERANCE[device, dtype])


# ---- dropout ---------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("threshold, share", [(-32768, 1.0), (-32768 + 6554, 0.9), (0, 0.5), (29491, 0.05)])
def test_dropout(device, dtype, threshold, share):
    """Every word that int16 has: those from the threshold on stay, times the factor, in the value and the gradient."""
    words = torch.arange(-32768, 32768).short().view(256, 256)
    factor = 1.0 / share
    kept = (words.double() >= threshold).double() * factor
    assert kept.mean().item() == pytest.approx(1.0, abs=1e-3)
    x, upstream = (drawn(256, 256, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    x.requires_grad_()
    got = drop(x, DropoutMask(words.to(device), threshold, factor))
    (gradient,) = torch.autograd.grad(got, x, upstream)
    for mine, source in ((got, x), (gradient, upstream)):
        want = source.detach().cpu().double() * kept
        assert ((mine.detach().cpu() == 0) == (want == 0)).all()
        assert (mine.detach().cpu().double() - want).abs().max() <= 2**-7 * want.abs().max()
        assert (mine.detach().cpu().double() - want).norm() <= TOLERANCE[device, dtype] * want.norm()


# ---- activations -----------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(device, dtype, approximate):
    """In several parts, the last of which is shorter, and of any strides; far from 0 it is 0 or its argument."""

    def formula(x):
        if approximate == "none":
            return x * (1 + torch.erf(x / 2**0.5)) / 2
        return x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2

    entries = [entry for entry in TABLE["gelu"] if entry.fits(Case(device, dtype))]
    assert entries[-1].run is reference.gelu and (device != "cpu" or len(entries) == 2)
    for entry in entries:
        x = drawn(257, 3, 1025, device=device, dtype=dtype) * 3
        for given in (x, x.transpose(0, 1)):
            run = lambda x, run=entry.run: run(x, approximate)
            assert_equal_results(run, formula, [given], TOLERANCE[device, dtype], entry.name)
        far = entry.run(torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4], device=device, dtype=dtype), approximate)
        assert far.tolist() == pytest.approx([0.0, 0.0, 0.0, 30.0, 1e4], rel=1e-2)


@DTYPES
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_geglu(device, dtype, approximate):
    def formula(x):
        gate, value = x.chunk(2, -1)
        if approximate == "none":
            return gate * (1 + torch.erf(gate / 2**0.5)) / 2 * value
        return gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2 * value

    entries = [entry for entry in TABLE["geglu"] if entry.fits(Case(device, dtype))]
    assert entries[-1].run is reference.geglu and (device != "cpu" or len(entries) == 2)
    for entry in entries:
        x = drawn(20, 3, 96, device=device, dtype=dtype)
        for given in (x, x.transpose(0, 1)):
            run = lambda x, run=entry.run: run(x, approximate)
            assert_equal_results(run, formula, [given], TOLERANCE[device, dtype], entry.name)


@DTYPES
@pytest.mark.parametrize("limit, offset", [(None, 0.0), (0.7, 1.0)])
def test_sigmoid_glu(device, dtype, limit, offset):
    """Gates are clamped from above alone, values on both sides, before the sigmoid and the offset."""

    def formula(x):
        gate, value = x.chunk(2, -1)
        if limit is not None:
            gate = torch.where(gate > limit, limit, gate)
            value = torch.where(value.abs() > limit, limit * value.sign(), value)
        return gate / (1 + torch.exp(-1.702 * gate)) * (value + offset)

    entries = [entry for entry in TABLE["sigmoid_glu"] if entry.fits(Case(device, dtype))]
    assert [entry.name for entry in entries] == ["one buffer", "torch"] and entries[-1].run is reference.sigmoid_glu
    for entry in entries:
        x = drawn(20, 3, 96, device=device, dtype=dtype)
        assert limit is None or (x > limit).any() and (x < -limit).any()
        for given in (x, x.transpose(0, 1)):
            run = lambda x, run=entry.run: run(x, 1.702, limit, offset)
            assert_equal_results(run, formula, [given], TOLERANCE[device, dtype], entry.name)


# ---- rotary positions ------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("percent", [1.0, 0.5, 0.25])
def test_rotary(device, dtype, percent):
    """Channels i and i + n/2 are a complex number that is turned by position x base^(-2i/n) (RoFormer, section 3.2)."""
    s, b, d, base = 300, 2, 16, 10000.0
    n = int(d * percent)
    ids = torch.stack((torch.arange(s), torch.arange(s).flip(0) // 2), 1)
    sizes = dict(num_layers=1, hidden_size=d, num_attention_heads=1)
    rotary = Rotary(Model(**sizes, rotary_base=base, rotary_percent=percent))
    angles = rotary.angles(ids.to(device), torch.float32)

    def formula(x):
        turns = ids.double().unsqueeze(-1) * base ** (-torch.arange(0, n, 2).double() / n)  # [s, b, n/2]
        turned = torch.complex(x[..., : n // 2], x[..., n // 2 : n]) * torch.exp(1j * turns)[:, :, None, None]
        return torch.cat((turned.real, turned.imag, x[..., n:]), -1)

    x = drawn(s, b, 3, 2, d, device=device, dtype=dtype)
    function = lambda x: rotate(x, angles).to(dtype)
    tolerance = max(TOLERANCE[device, dtype], 3e-5)  # angles of some hundreds of radians in fp32
    assert_equal_results(function, formula, [x], tolerance)


# ---- cross-entropy ---------------------------------------------------------------------------------------------------

TOKENS, HIDDEN, VOCABULARY, PADDED = 37, 16, 100, 128


def cross_entropies(hidden, weight, labels, smoothing):
    """[n]: -sum over the real rows of target x log softmax, target = (1 - e) onehot + e / vocabulary."""
    logits = hidden @ weight[:VOCABULARY].t()
    logs = logits - (logits - logits.detach().amax(1, keepdim=True)).exp().sum(1, keepdim=True).log()
    logs = logs - logits.detach().amax(1, keepdim=True)
    target = torch.full_like(logs, smoothing / VOCABULARY)
    target[torch.arange(len(labels)), labels] += 1 - smoothing
    return -(target * logs).sum(1)


@pytest.mark.sampled(2)
@DTYPES
@pytest.mark.parametrize("blocked", [False, True], ids=["", "in blocks"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("chunk", [None, 1, 12, 18, 36, 37, 38])
def test_cross_entropy(device, monkeypatch, dtype, blocked, masked, smoothing, chunk):
    """Chunks that end before, at and after the last token; blocks of one chunk."""
    if blocked:
        monkeypatch.setattr(kernel_sizes, "BLOCK_BYTES", 1)
    hidden, weight = (drawn(n, HIDDEN, device=device, dtype=dtype, seed=n).mul(0.7) for n in (TOKENS, PADDED))
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[:2] = torch.tensor([0, VOCABULARY - 1])
    mask = torch.rand(TOKENS, generator=generator).round() if masked else torch.ones(TOKENS)
    more = dict(vocab_size=VOCABULARY, tp=Mesh().tp, chunk=chunk)

    exact = [x.cpu().double().requires_grad_() for x in (hidden, weight)]
    losses = cross_entropies(*exact, labels, smoothing)
    want = (losses * mask.double()).sum()
    inputs = [x.requires_grad_() for x in (hidden, weight)]
    got, _ = linear_cross_entropy(
        *inputs, labels.to(device), mask=mask.to(device) if masked else None, label_smoothing=smoothing, **more
    )
    found = [got, *torch.autograd.grad(got * 0.25, inputs)]
    wanted = [want, *torch.autograd.grad(want * 0.25, exact)]
    for mine, theirs in zip(found, wanted, strict=True):
        error = (mine.detach().cpu().double() - theirs).norm() / theirs.norm()
        assert error < TOLERANCE[device, dtype], error
    assert (found[2][VOCABULARY:] == 0).all()  # rows that are padding
    if not smoothing:
        each = token_losses(*inputs, labels.to(device), **more)
        assert not each.requires_grad and each.shape == (TOKENS,)
        assert (each.cpu().double() - losses).norm() < TOLERANCE[device, dtype] * losses.norm()
