# SPDX-License-Identifier: Apache-2.0
"""Every implementation of attention equals the formula in fp64, values and gradients, in every case that it may be
chosen for. `tests/gpu/test_gpu_kernels.py` runs the same tests on CUDA.

Legend: s queries, t keys, b micro-batch, g key-value groups, q queries of a group, d channels of a head.
"""

import sys
import types
from functools import partial

import pytest
import torch

from megatron.fused_kernels import TABLE, Case, attention, choose_kernel, explicit_attention, reference
from megatron.fused_kernels.dropout import DropoutMask

B, SCALE = 2, 0.3
THRESHOLD, FACTOR = -32768 + 65536 // 5, 1.25  # dropout of a fifth

# name: (causal, queries and keys for a length). A causal case with fewer queries than keys is decoding with a cache, or a
# chunk of a sequence that ranks share.
ORDERS = {
    "causal": (True, lambda n: (n, n)),
    "cached": (True, lambda n: (n // 3 + 1, n)),
    "one cached": (True, lambda n: (1, n)),
    "bidirectional": (False, lambda n: (n, n)),
    "cross, more keys": (False, lambda n: (n // 2 + 1, n)),
    "cross, fewer keys": (False, lambda n: (n, n // 2 + 1)),
}
MASKS = ("none", "documents", "documents in order", "prefix", "padding", "blind")
# (length, g, q). block-causal has blocks of 128 // q positions, of 256 // q from 513 on: these are below, on, just
# above and far above its borders, with all queries sharing one key, some of them, and none.
SHAPES = [
    (2, 1, 1),
    (37, 3, 1),
    (128, 2, 1),
    (129, 2, 1),
    (129, 1, 4),
    (200, 2, 3),
    (300, 4, 1),
    (513, 1, 2),
    (600, 2, 1),
]


def mask(name: str, positions: torch.Tensor, t: int) -> torch.Tensor | None:
    """[b, s, t] bool for queries at `positions` [s], the same on every call."""
    generator, keys, s = torch.Generator().manual_seed(2), torch.arange(t), len(positions)
    if name == "none":
        return None
    if name.startswith("documents"):
        length = int(max(t, positions.max() + 1))
        documents = torch.rand(B, length, generator=generator).cumsum(1).div(9).int()  # of about 18 tokens
        same = documents[:, positions].unsqueeze(2) == documents[:, :t].unsqueeze(1)
        return same & (keys <= positions.unsqueeze(1)) if name.endswith("in order") else same
    sample = torch.arange(1, B + 1).view(B, 1, 1)
    if name == "prefix":
        return (keys <= positions.unsqueeze(1)) | (keys < sample * t // 3)
    if name == "padding":
        return (keys < t - sample * t // 4).expand(B, s, t)
    return (torch.rand(B, s, t, generator=generator) > 0.5) & (positions % 3 != 1).unsqueeze(1)


def formula(query, key, value, pairs, kept, softcap=None, sinks=None) -> torch.Tensor:
    """[s, b, g q d], one head of one sample at a time, from pairs [b, s, t] and kept [b, g q, s, t] or None."""
    s, b, g, q, d = query.shape
    heads = []
    for sample in range(b):
        for head in range(g * q):
            group = head // q
            scores = SCALE * query[:, sample, group, head % q] @ key[:, sample, group].t()
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = torch.where(pairs[sample], scores, -1e30)
            largest = scores.detach().amax(1, keepdim=True)
            powers = (scores - largest).exp() * pairs[sample]
            total = powers.sum(1, keepdim=True)
            if sinks is not None:
                total = total + (sinks[group, head % q] - largest).exp()
            weights = powers / total.clamp(min=1e-30)  # none for a query that sees no key
            if kept is not None:
                weights = weights * kept[sample, head] * FACTOR
            heads.append(weights @ value[:, sample, group])
    return torch.stack(heads).view(b, g * q, s, d).permute(2, 0, 1, 3).reshape(s, b, g * q * d)


def operands(s: int, t: int, g: int, q: int, d: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Query, key and value, with the strides of parts of one fused tensor."""
    generator = torch.Generator().manual_seed(0)
    fused = [torch.randn(n, B, g, q + 2, d, generator=generator).to(device, dtype) for n in (s, t)]
    parts = fused[0][:, :, :, :q], fused[1][:, :, :, q], fused[1][:, :, :, q + 1]
    return [part.requires_grad_() for part in parts]


def results(function, inputs) -> list[torch.Tensor]:
    """The value, and the gradients of a sum of it with fixed weights, in fp64 on the CPU."""
    value = function(*inputs)
    upstream = torch.randn(value.shape[1], value.shape[0], value.shape[2], generator=torch.Generator().manual_seed(1))
    upstream = upstream.transpose(0, 1).bfloat16().to(value)  # numbers that both formats hold
    return [x.detach().cpu().double() for x in (value, *torch.autograd.grad(value, inputs, upstream))]


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, device: str, what: str, share=1.0):
    """Each element, and over all elements what rounding may add up to; share: of these bounds."""
    of_each = {torch.float32: 1e-5, torch.bfloat16: 0.15}[dtype]
    of_all = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}[dtype]
    least = 0.0
    if device == "cuda":  # products in fp32 may be made in TF32; a sum that is 0 may be rounding
        of_each, of_all, least = {torch.float32: (1e-2, 1e-3, 1e-6), torch.bfloat16: (0.3, 1.5e-2, 1e-3)}[dtype]
    of_each, of_all = of_each * share, of_all * share
    size = want.square().mean().sqrt().item()
    message = lambda text: f"{what}\n{text}"
    torch.testing.assert_close(got, want, rtol=of_each, atol=of_each * size + least, msg=message)
    bound = of_all * want.norm() + least * want.numel() ** 0.5
    assert (got - want).norm() <= bound, f"{what}: {(got - want).norm() / want.norm():.1e}"


def fitting_equal(case: Case, how: dict, inputs, wanted) -> set[str]:
    """Compare values and gradients of all implementations that may be chosen for a case; returns their names."""
    fitting = [entry for entry in TABLE["attention"] if entry.fits(case)]
    names = ("value", "d query", "d key", "d value", "d sinks")[: len(wanted)]
    for entry in fitting:
        got = results(lambda *x, run=entry.run: run(*x[:3], **how, **with_sinks(*x[3:])), inputs)
        for name, mine, theirs in zip(names, got, wanted, strict=True):
            share = 5.0 if name == "d sinks" else 1.0  # a sum of all rows, in which most cancel
            assert_near(mine, theirs, case.dtype, case.device, f"{entry.name}, {case}: {name}", share)
    return {entry.name for entry in fitting}


def with_sinks(*sinks) -> dict:
    return dict(sinks=sinks[0]) if sinks else {}


def check(device, dtype, order, masked, dropped, shape, softcap=None, window=None, sunk=False) -> set[str]:
    """All implementations that may be chosen for a case against the formula; returns their names."""
    (length, g, q), (causal, sizes), d = shape, ORDERS[order], 16
    s, t = sizes(length)
    positions = torch.arange(t - s, t) if causal else torch.arange(s)
    allowed = mask(masked, positions, t)
    pairs = torch.ones(B, s, t, dtype=torch.bool) if allowed is None else allowed
    if causal:
        pairs = pairs & (torch.arange(t) <= positions.unsqueeze(1))
    if window is not None:
        pairs = pairs & (torch.arange(t) >= positions.unsqueeze(1) - window)
    words = torch.randint(-32768, 32768, (B, g * q, s, t), generator=torch.Generator().manual_seed(3)).short()
    inputs = operands(s, t, g, q, d, dtype, device)
    if sunk:  # of every size: one hardly matters, one takes most of the weight
        sinks = torch.linspace(-3, 4, g * q, device=device).view(g, q)
        inputs.append(sinks.to(dtype).requires_grad_())
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    kept = (words >= THRESHOLD) if dropped else None
    wanted = results(lambda *x: formula(*x[:3], pairs, kept, softcap, **with_sinks(*x[3:])), exact)
    how = dict(
        scale=SCALE,
        causal=causal,
        allowed=None if allowed is None else allowed.to(device),
        dropout=DropoutMask(words.to(device), THRESHOLD, FACTOR) if dropped else None,
        softcap=softcap,
        window=window,
    )
    more = dict(softcap=bool(softcap), window=window, sinks=sunk)
    case = Case(device, dtype, s, t, causal, masked != "none", dropped, q > 1, **more)
    return fitting_equal(case, how, inputs, wanted)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
def test_fp32(device, order, masked, dropped):
    for shape in SHAPES:
        assert "reference" in check(device, torch.float32, order, masked, dropped, shape)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
def test_bf16(device, order, masked, dropped):
    for shape in ((200, 2, 3), (300, 4, 1)):
        assert "reference" in check(device, torch.bfloat16, order, masked, dropped, shape)


# Windows inside a block of block-causal, of about one, over several, and longer than the sequence.
@pytest.mark.sampled(5)
@pytest.mark.parametrize("window", [8, 64, 150, 1000])
@pytest.mark.parametrize("masked, order", [("none", "causal"), ("documents", "causal"), ("blind", "causal")])
def test_windows(device, masked, order, window):
    for dropped, shape in ((False, (300, 2, 1)), (True, (150, 1, 4)), (False, (600, 1, 2))):
        found = check(device, torch.float32, order, masked, dropped, shape, window=window)
        assert {"reference", "block-causal"} <= found
        assert dropped or any(name.startswith("sdpa") for name in found)


@pytest.mark.parametrize("order", ["cached", "one cached"])
@pytest.mark.parametrize("masked", ["none", "documents"])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_windows_over_cached_keys(device, masked, order, softcap):
    for window in (8, 150):
        found = check(device, torch.float32, order, masked, False, (200, 2, 3), softcap, window)
        assert "reference" in found and ("block-causal" in found) == (order == "cached")


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("masked", ["none", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_scores(device, dtype, masked, window):
    """At a cap that bends most scores; kernels without caps are not chosen."""
    for dropped, shape in ((False, (300, 2, 1)), (True, (150, 1, 4))):
        found = check(device, dtype, "causal", masked, dropped, shape, 0.7, window)
        assert {"reference", "block-causal"} <= found <= {"reference", "block-causal", "flash-attn"}
    assert "reference" in check(device, dtype, "bidirectional", masked, False, (37, 3, 1), 0.7)


@pytest.mark.parametrize("order", ["causal", "cached", "one cached"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 0, 40])
def test_sinks(device, dtype, window, order):
    """Values and gradients, that of the sink, too; kernels without sinks are not chosen."""
    flash = f"flash with sinks ({'CUDA' if device == 'cuda' else 'CPU'})"
    some = {"reference"} | ({"block-causal", flash} if order != "one cached" else set())
    some -= {flash} if device == "cuda" and dtype == torch.float32 else set()
    for masked, dropped, softcap, shape in (
        ("none", False, None, (150, 2, 3)),
        ("documents", False, None, (140, 4, 1)),
        ("none", True, 0.7, (60, 1, 4)),
    ):
        found = check(device, dtype, order, masked, dropped, shape, softcap, window, sunk=True)
        assert found - {flash} == some - {flash} and (flash in found) == (flash in some and shape[0] == 150)


def test_sinks_over_long_keys_are_not_stored_scores():
    long = dict(device="cpu", dtype=torch.float32, queries=10000, keys=10000, causal=True, sinks=True)
    assert choose_kernel("attention", Case(**long)).name == "flash with sinks (CPU)"
    assert choose_kernel("attention", Case(**long, window=127)).name == "block-causal"
    half = Case(**long | dict(device="cuda", dtype=torch.bfloat16))
    assert next(e.name for e in TABLE["attention"] if e.suits(half) and half.features <= e.covers).startswith(
        "flash with"
    )


def test_long_sequences_keep_block_causal_where_a_window_keeps_it_small():
    long = dict(device="cpu", dtype=torch.float32, queries=10000, keys=10000, causal=True)
    assert choose_kernel("attention", Case(**long)).name == "sdpa (CPU)"
    assert choose_kernel("attention", Case(**long, window=1023)).name == "block-causal"
    assert choose_kernel("attention", Case(**long, window=9000)).name == "sdpa (CPU)"
    assert choose_kernel("attention", Case(**long, softcap=True)).name == "block-causal"
    assert not any("softcap" in entry.covers for entry in TABLE["attention"] if entry.backend == "sdpa")  # on no device


def test_flash_attn_is_told_of_windows_and_caps(monkeypatch):
    """A stand-in with the package's signature, computed by the formula."""

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        s, left = len(q), window_size[0] if window_size[0] >= 0 else len(q)
        assert softmax_scale == SCALE and causal and window_size[1] in (-1, 0)
        pairs = torch.ones(B, s, s, dtype=torch.bool).tril().triu(-left)
        groups = k.shape[2]
        result = formula(q.view(s, B, groups, -1, q.shape[-1]), k, v, pairs, None, softcap)
        return result.view(s, B, -1, q.shape[-1]).transpose(0, 1)

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    inputs = operands(40, 40, 2, 2, 16, torch.float32, "cpu")
    for softcap, window in ((None, None), (0.7, None), (None, 6), (0.7, 1)):
        how = dict(scale=SCALE, causal=True, softcap=softcap, window=window)
        got, want = (results(partial(run, **how), inputs) for run in (attention.flash_attn, reference.attention))
        for mine, theirs in zip(got, want, strict=True):
            assert_near(mine, theirs, torch.float32, "cpu", str(how))


def test_releases_of_flash_attn(monkeypatch):
    from megatron import fused_kernels

    for release, asks in {"2.0.4": set(), "2.3.0": {"window"}, "2.8.3": {"window", "softcap"}, "": set()}.items():
        monkeypatch.setattr(fused_kernels, "version", lambda name, release=release: release)
        assert fused_kernels._flash_attn() & {"window", "softcap"} == asks


def test_scaled_softmax_in_fp16(device):
    """Scores beyond 65504 fit fp16 once they are divided; kernels that keep scores in fp32 need no help."""
    s, size = 40, 300.0
    inputs = [
        (x.detach() * scale).requires_grad_()
        for x, scale in zip(operands(s, s, 2, 2, 16, torch.float16, device), (size, size, 1.0), strict=True)
    ]
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    order = torch.ones(B, s, s, dtype=torch.bool).tril()
    wanted = formula(*exact, order, None)
    assert (SCALE * exact[0][:, 0, 0, 0] @ exact[1][:, 0, 0].t()).abs().max() > 65504
    fitting = [e for e in TABLE["attention"] if e.fits(Case(device, torch.float16, s, s, True, scaled_softmax=True))]
    assert fitting[-1].name == "reference"
    for entry in fitting:
        got = entry.run(*inputs, scale=SCALE, causal=True, score_divisor=8.0, softmax_in_fp32=True)
        # Such scores pick one key each: where two of them are close, rounding may pick the other.
        right = ((got.detach().cpu().double() - wanted).abs() < 1e-2).double().mean()
        assert right > 0.98, (entry.name, right)


@pytest.mark.parametrize(
    "run, how",
    [
        (attention.sdpa, {}),
        (reference.attention, dict(score_divisor=8.0)),
        (reference.attention, dict(score_divisor=8.0, softmax_in_fp32=True)),
    ],
    ids=["sdpa", "divided scores", "divided scores in fp32"],
)
@pytest.mark.parametrize("masked", ["none", "documents"])
def test_cached_keys(device, run, how, masked):
    """What the table may not choose on every device: sdpa over cached keys; scores that are divided and fit anyway."""
    s, t = 40, 200
    positions, inputs = torch.arange(t - s, t), operands(s, t, 2, 3, 16, torch.float32, device)
    allowed, order = mask(masked, positions, t), torch.arange(t) <= positions.unsqueeze(1)
    pairs = order.expand(B, s, t) if allowed is None else order & allowed
    how = dict(how, scale=SCALE, causal=True, allowed=None if allowed is None else allowed.to(device))
    got = results(lambda *x: run(*x, **how), inputs)
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    for mine, theirs in zip(got, results(lambda *x: formula(*x, pairs, None), exact), strict=True):
        assert_near(mine, theirs, torch.float32, device, run.__name__)


@pytest.mark.parametrize("groups", [4, 2])
def test_one_query(groups):
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(20, 1, groups, 8, generator=generator) for _ in range(2))
    row = torch.randn(1, 1, groups, 4 // groups, 8, generator=generator)
    wanted = reference.attention(row, key, value, scale=0.3, causal=True)
    torch.testing.assert_close(attention.one_query(row, key, value, scale=0.3), wanted)
    near = attention.one_query(row, key, value, scale=0.3, window=5)
    torch.testing.assert_close(near, attention.one_query(row, key[-6:], value[-6:], scale=0.3))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("softcap, window", [(None, None), (0.4, None), (None, 0), (0.4, 2)])
@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("queries", [5, 3])
def test_gradients_of_block_causal_numerically(dropped, softcap, window, queries):
    s = 5
    inputs = [x.detach().double().requires_grad_() for x in operands(queries, s, 2, 2, 3, torch.float32, "cpu")]
    words = torch.randint(-32768, 32768, (B, 4, queries, s), generator=torch.Generator().manual_seed(3)).short()
    more = dict(scale=0.5, causal=True, dropout=DropoutMask(words, THRESHOLD, FACTOR) if dropped else None)
    more |= dict(softcap=softcap, window=window)
    assert torch.autograd.gradcheck(lambda *x: explicit_attention.in_blocks(*x, **more), inputs)


def test_block_causal_in_bf16_is_as_exact_as_the_reference():
    inputs = operands(300, 300, 2, 2, 16, torch.bfloat16, "cpu")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    order = torch.ones(B, 300, 300, dtype=torch.bool).tril()
    wanted = results(lambda *x: formula(*x, order, None), exact)

    def errors(name):
        run = next(entry.run for entry in TABLE["attention"] if entry.name == name)
        got = results(lambda *x: run(*x, scale=SCALE, causal=True), inputs)
        return [((x - y).norm() / y.norm()).item() for x, y in zip(got, wanted, strict=True)]

    for mine, plain in zip(errors("block-causal"), errors("reference"), strict=True):
        assert mine < 1.3 * plain + 1e-3


def test_causal_queries_are_the_last_of_the_keys():
    inputs = operands(8, 8, 1, 1, 4, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="the queries are the last of the keys"):
        explicit_attention.in_blocks(inputs[0], *(x[-3:] for x in inputs[1:]), scale=SCALE, causal=True)
