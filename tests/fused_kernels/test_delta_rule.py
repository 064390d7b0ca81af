# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule equals its recurrence in fp64, token by token, and transformers' own: values, states, gradients.

Legend: s tokens, b samples, G key heads of R value heads each; K and V channels of keys and values.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron.fused_kernels.delta_rule import delta_rule
from tests.fused_kernels.scans import (
    BEGINS,
    CUTS,
    B,
    S,
    assert_same,
    check_that_inputs_are_kept,
    doubles,
    ids_of_documents,
    packed_documents,
    results,
)

G, R, K, V = 2, 3, 6, 5
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3}  # of the norm of a tensor


def recurrence(q, k, v, g, beta, ids=None, state=None):
    """S <- e^g S, u = beta (v - S^T k), S <- S + k u^T, o = S^T q K^-1/2; a new document begins with zeros."""
    length = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k = (length(x).unsqueeze(3) for x in (q, k))  # the value heads of a key head share them
    own, found = v.new_zeros(*v.shape[1:4], k.shape[-1], v.shape[-1]) if state is None else state, []
    for t in range(len(v)):
        if ids is not None and t:
            own = own * (ids[t] == ids[t - 1]).view(-1, 1, 1, 1, 1)
        own = own * g[t].exp()[..., None, None]
        change = beta[t].unsqueeze(-1) * (
            v[t] - torch.einsum("bgrkv,bgrk->bgrv", own, k[t].expand(-1, -1, v.shape[3], -1))
        )
        own = own + k[t].unsqueeze(-1) * change.unsqueeze(-2)
        found.append((q[t].unsqueeze(-1) * own).sum(-2) / k.shape[-1] ** 0.5)
    return torch.stack(found), own


def inputs(dtype=torch.float32, s: int = S, speed: float = 1.0) -> list[torch.Tensor]:
    """As of a new network with speed 1: rates in 1..16, steps softplus of about 1; slower: states reach over the text."""
    torch.manual_seed(1)
    q, k = (torch.randn(s, B, G, K).to(dtype) for _ in range(2))
    v, rates = torch.randn(s, B, G, R, V).to(dtype), torch.empty(G, R).uniform_(1, 16) * speed
    return [q, k, v, -rates * F.softplus(torch.randn(s, B, G, R) + 1), torch.randn(s, B, G, R).sigmoid()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("chunk", [1, 16, 64, 128])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("speed", [1.0, 0.01], ids=["fast", "slow"])
def test_equals_the_recurrence(dtype, chunk, packed, speed):
    """75 tokens: of the last chunk some are missing."""
    given, ids = inputs(dtype, speed=speed), ids_of_documents() if packed else None
    documents = packed_documents() if packed else None
    found = results(lambda *t: delta_rule(*t, documents=documents, chunk=chunk), given)
    assert [t.dtype for t in found[2:]] == [t.dtype for t in given] and found[1].dtype == torch.float32
    wanted = results(lambda *t: recurrence(*t, ids=ids), doubles(given))
    assert_same(found, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_pieces_that_continue_equal_the_whole(cuts):
    """Each begins with the state that the one before returned; the first with that of an earlier text."""

    def in_pieces(*given):
        found, state = [], given[-1]
        for part in zip(*(t.tensor_split(tuple(cuts)) for t in given[:-1]), strict=True):
            o, state = delta_rule(*part, state=state, chunk=16)
            found.append(o)
        return torch.cat(found), state

    given = [*inputs(speed=0.02), torch.randn(B, G, R, K, V)]
    wanted = results(lambda *t: recurrence(*t[:5], state=t[5]), doubles(given))
    assert_same(results(in_pieces, given), wanted, TOLERANCE[torch.float32])


def test_documents_of_a_piece_that_continues():
    """Only the first document of a piece goes on from the given state."""
    given, ids, cut = inputs(speed=0.02), ids_of_documents(), 20
    whole, last = recurrence(*doubles(given), ids=ids)
    part = lambda rows: [t[rows] for t in given]
    o, state = delta_rule(*part(slice(0, cut)), documents=packed_documents(cut), chunk=16)
    rest = packed_documents(rows=(cut, S), first=cut)
    later, state = delta_rule(*part(slice(cut, S)), documents=rest, state=state, chunk=16)
    assert_same([torch.cat((o, later)), state], [whole, last], TOLERANCE[torch.float32])


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "each document alone"])
def test_equals_the_rule_of_transformers(packed):
    """Over more than two chunks; key heads cut in two give the same bits, as on two ranks of tensor parallelism."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    given, s = inputs(s=150, speed=0.02), 150

    def alone(*given):
        first = lambda t: t.transpose(0, 1).flatten(2, 3)
        heads = lambda t: t.transpose(0, 1).repeat_interleave(R, 2)
        q, k, v, g, beta = given
        o, state = torch_chunk_gated_delta_rule(
            heads(q), heads(k), first(v), first(g), first(beta), output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return o.transpose(0, 1).unflatten(2, (G, R)), state.unflatten(1, (G, R))

    def theirs(*given):
        if not packed:
            return alone(*given)
        samples = []
        for sample, begins in enumerate(BEGINS):
            parts = map(slice, begins, [*begins[1:], s])
            samples.append([alone(*(t[rows, sample : sample + 1] for t in given)) for rows in parts])
        return (
            torch.cat([torch.cat([o for o, _ in parts]) for parts in samples], 1),
            torch.cat([parts[-1][1] for parts in samples]),
        )

    documents = packed_documents(s) if packed else None
    found = results(lambda *t: delta_rule(*t, documents=documents), given)
    assert_same(found, doubles(results(theirs, given)), 1e-5)
    halves = zip(*(t.tensor_split(2, 2) for t in given), strict=True)
    assert torch.equal(torch.cat([delta_rule(*half, documents=documents)[0] for half in halves], 2), found[0])


def test_strong_decays_and_long_sums_leave_no_error():
    """Sums of 1e5 in a chunk, of which only differences count: finite, and as exact as small ones."""
    given = inputs(s=192)
    given[3][:64] *= 1000
    given[3][64:] *= 0.001
    assert_same(results(delta_rule, given), results(recurrence, doubles(given)), 1e-5)


def test_only_inputs_are_kept():
    check_that_inputs_are_kept(lambda *given: delta_rule(*given, chunk=16), inputs())
