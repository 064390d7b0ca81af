# SPDX-License-Identifier: Apache-2.0
"""Attention with keys that are padding, and with something learned added to scores: every implementation that may be chosen
equals a formula in fp64, values and gradients, that of what is added included; above and below every size of blocks.

Legend as in test_attention.py.
"""

import pytest
import torch

from megatron.fused_kernels import TABLE, Case, choose_kernel, explicit_attention
from megatron.fused_kernels.dropout import DropoutMask
from tests.fused_kernels.test_attention import FACTOR, SCALE, THRESHOLD, B, assert_near, operands

ORDERS = {
    "causal": (True, lambda n: (n, n)),
    "bidirectional": (False, lambda n: (n, n)),
    "cross": (False, lambda n: (n // 2 + 1, n)),
    "one cached": (True, lambda n: (1, n)),
}


def formula(query, key, value, bias, pairs, kept):
    """[s, b, g q d] from bias [g q, s, t] or None, pairs [b, s, t], kept [b, g q, s, t] or None."""
    s, b, g, q, d = query.shape
    heads = query.permute(1, 2, 3, 0, 4).reshape(b, g * q, s, d)
    keys, values = (x.permute(1, 2, 0, 3).repeat_interleave(q, 1) for x in (key, value))
    scores = SCALE * heads @ keys.transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    weights = scores.masked_fill(~pairs.unsqueeze(1), -torch.inf).softmax(-1)
    weights = weights if kept is None else weights * kept * FACTOR
    return (weights @ values).permute(2, 0, 1, 3).reshape(s, b, g * q * d)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
def test_padding_and_bias(order, dropped):
    for length, g, q in ((37, 3, 1), (129, 1, 4), (300, 2, 1), (600, 1, 2)):
        causal, sizes = ORDERS[order]
        s, t = sizes(length)
        generator = torch.Generator().manual_seed(2)
        padding = torch.arange(t) < torch.tensor([[t], [max(1, t - t // 3)]])
        pairs = padding.unsqueeze(1).expand(B, s, t)
        if causal:
            pairs = pairs & (torch.arange(t) <= torch.arange(t - s, t).unsqueeze(1))
        words = torch.randint(-32768, 32768, (B, g * q, s, t), generator=generator).short()
        for biased, padded in ((True, True), (True, False), (False, True)):
            bias = torch.randn(g * q, s, t, generator=generator).requires_grad_() if biased else None
            inputs = [*operands(s, t, g, q, 16, torch.float32, "cpu"), *([bias] if biased else [])]
            exact = [x.detach().double().requires_grad_() for x in inputs]
            seen = pairs if padded else pairs | ~padding.unsqueeze(1)
            if causal and not padded:
                seen = seen & (torch.arange(t) <= torch.arange(t - s, t).unsqueeze(1))
            kept = (words >= THRESHOLD) if dropped else None
            wanted = formula(*exact[:3], exact[3] if biased else None, seen, kept)
            upstream = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
            wanted = [wanted, *torch.autograd.grad(wanted, exact, upstream)]
            case = Case(
                "cpu", torch.float32, s, t, causal, dropout=dropped, grouped=q > 1, biased=biased, padded=padded
            )
            names = set()
            for entry in (entry for entry in TABLE["attention"] if entry.fits(case)):
                drop = DropoutMask(words, THRESHOLD, FACTOR) if dropped else None
                more = dict(bias=bias, padding=padding if padded else None, dropout=drop)
                value = entry.run(*inputs[:3], scale=SCALE, causal=causal, **more)
                got = [value, *torch.autograd.grad(value, inputs, upstream.float())]
                for mine, theirs in zip(got, wanted, strict=True):
                    assert_near(mine.detach().double(), theirs, torch.float32, "cpu", f"{entry.name}, {case}")
                names.add(entry.name)
            assert {"reference"} <= names and (s == 1 or len(names) >= 2), (names, case)


def test_many_samples_of_bf16_add_to_a_bias():
    """Its gradient is not lost among the samples before."""
    b, s, g, d = 300, 16, 2, 16
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(s, b, g, *q, d, generator=generator).bfloat16() for q in ((1,), (), ())]
    bias, upstream = torch.randn(g, s, s, generator=generator).bfloat16(), torch.randn(s, b, g * d, generator=generator)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        given, own = [x.to(dtype) for x in inputs], bias.to(dtype).requires_grad_()
        if dtype == torch.bfloat16:
            value = explicit_attention.in_blocks(*given, scale=SCALE, causal=False, bias=own)
        else:
            value = formula(*given, own, torch.ones(b, s, s, dtype=torch.bool), None)
        found += torch.autograd.grad(value, own, upstream.bfloat16().to(dtype))
    assert (found[0] - found[1]).norm() < 6e-3 * found[1].norm()


def test_which_kernel_looks_both_ways():
    case = dict(device="cpu", dtype=torch.bfloat16, queries=512, keys=512)
    assert choose_kernel("attention", Case(**case)).name == "block-full"
    assert choose_kernel("attention", Case(**case, causal=True)).name == "block-causal"
    assert choose_kernel("attention", Case(**case | dict(keys=10000))).name == "sdpa (CPU)"
