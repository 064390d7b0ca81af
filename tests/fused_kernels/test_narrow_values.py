# SPDX-License-Identifier: Apache-2.0
"""Attention whose values have fewer channels than its keys, as latent attention has: every kernel of the table against
softmax(q k) v in fp64, and its gradients.
"""

import numpy as np
import pytest
import torch

from megatron.fused_kernels import TABLE
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.explicit_attention import Rectangle, Scores

S, B, G, D, V, SCALE = 11, 2, 3, 8, 5, 0.3
STARTS = np.array([[0] * 4 + [4] * 7, [0] * 11], np.int32)
CPU = {entry.name: entry for entry in TABLE["attention"] if entry.name in ("block-causal", "sdpa (CPU)", "reference")}


def drawn(*shape: int, seed: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(q: int, t: int = S) -> list[torch.Tensor]:
    shapes = (S, B, G, q, D), (t, B, G, D), (t, B, G, V)
    return [drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def plain(query, key, value, hidden: torch.Tensor) -> torch.Tensor:
    """[s, b, g q v] in fp64. hidden: [b, s, t] pairs that do not see each other"""
    query, key, value = (x.double() for x in (query, key, value))
    scores = torch.einsum("sbgqd,tbgd->bgqst", query, key) * SCALE
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bgqst,tbgv->sbgqv", weights, value).flatten(2)


def hidden_pairs(t: int, documents: bool) -> torch.Tensor:
    places, own = torch.arange(t), torch.arange(t - S, t)
    later = (places > own[:, None]).expand(B, -1, -1)
    return later | (places < torch.from_numpy(STARTS)[..., None]) if documents else later


def compared(found: torch.Tensor, wanted: torch.Tensor, tensors) -> None:
    upstream = drawn(*found.shape, seed=9)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=1e-5)
    ours = torch.autograd.grad(found, tensors, upstream)
    theirs = torch.autograd.grad(wanted, tensors, upstream.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("q", [1, 2])
@pytest.mark.parametrize("name", CPU)
def test_kernels(name, q, documents):
    tensors = operands(q)
    more = dict(documents=Documents.of(STARTS, "cpu")) if documents else {}
    found = CPU[name].run(*tensors, scale=SCALE, causal=True, **more)
    compared(found, plain(*tensors, hidden_pairs(S, documents)), tensors)


@pytest.mark.parametrize("name", CPU)
def test_the_last_queries_of_more_keys(name):
    tensors = operands(1, S + 6)
    found = CPU[name].run(*tensors, scale=SCALE, causal=True)
    compared(found, plain(*tensors, hidden_pairs(S + 6, False)), tensors)


def test_one_query():
    query, key, value = operands(2)
    [entry] = [entry for entry in TABLE["attention"] if entry.name == "one query"]
    with torch.no_grad():
        found = entry.run(query[-1:], key, value, scale=SCALE)
        torch.testing.assert_close(
            found.double(), plain(query, key, value, hidden_pairs(S, False))[-1:], atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("name", ["flash (CPU)", "explicit"])
def test_kernels_of_a_ring(name):
    """A part with all keys: its result, and its gradients, are those of all keys."""
    [entry] = [entry for entry in TABLE["partial_attention"] if entry.name == name]
    query, key, value = (x.detach() for x in operands(1))
    whole = Rectangle(slice(0, S), slice(0, S), True)
    flat = query.flatten(2, 3)
    out, lse = entry.run.forward(flat, key, value, whole, Scores(SCALE))
    assert out.shape == (S, B, G, V)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    wanted, upstream = plain(*leaves, hidden_pairs(S, False)), drawn(S, B, G, V, seed=9)
    torch.testing.assert_close(out.flatten(2).double(), wanted, atol=2e-6, rtol=1e-5)
    found = entry.run.backward(upstream, flat, key, value, out, lse, whole, Scores(SCALE))
    theirs = torch.autograd.grad(wanted, leaves, upstream.flatten(2).double())
    for one, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(one.float(), other.view(one.shape), atol=5e-6, rtol=1e-5)
