# SPDX-License-Identifier: Apache-2.0
"""The scan of Mamba-2 equals its recurrence in fp64, token by token, and transformers' own scan: values, states, gradients.

Legend: s tokens, b samples, G groups of R heads of P channels, H = G R; N channels of the state.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron.fused_kernels.ssd import ssd
from tests.fused_kernels.scans import (
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

G, R, P, N = 2, 3, 5, 7
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}  # of the norm of a tensor


def recurrence(x, dt, decay, B, C, D, ids=None, state=None):
    """h <- exp(A dt) h + dt x B^T, y = h C + D x; a new document begins with zeros."""
    B, C = B.unsqueeze(3), C.unsqueeze(3)  # the heads of a group share them
    h, ys = x.new_zeros(*x.shape[1:], B.shape[-1]) if state is None else state, []
    for t in range(len(x)):
        if ids is not None and t:
            h = h * (ids[t] == ids[t - 1]).view(-1, 1, 1, 1, 1)
        h = h * (decay * dt[t]).exp()[..., None, None] + (dt[t].unsqueeze(-1) * x[t]).unsqueeze(-1) * B[t].unsqueeze(-2)
        ys.append((h * C[t].unsqueeze(-2)).sum(-1) + D.unsqueeze(-1) * x[t])
    return torch.stack(ys), h


def inputs(dtype=torch.float32, s: int = S) -> list[torch.Tensor]:
    """As of a new network: A in -1..-16, dt in .001.. .1 before a random part."""
    torch.manual_seed(1)
    x, B_, C = (torch.randn(s, B, *shape).to(dtype) for shape in ((G, R, P), (G, N), (G, N)))
    dt = F.softplus(torch.randn(s, B, G, R) - 3)
    return [x, dt, -torch.empty(G, R).uniform_(1, 16), B_, C, torch.rand(G, R)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("chunk", [1, 16, 64, 128])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
def test_equals_the_recurrence(device, dtype, chunk, packed):
    """75 tokens: of the last chunk some are missing."""
    given, ids = inputs(dtype), ids_of_documents() if packed else None
    documents = packed_documents(device=device) if packed else None
    found = results(lambda *t: ssd(*t, documents=documents, chunk=chunk), [t.to(device) for t in given])
    assert [t.dtype for t in found[2:]] == [t.dtype for t in given] and found[1].dtype == torch.float32
    wanted = results(lambda *t: recurrence(*t, ids=ids), doubles(given))
    bound = TOLERANCE[dtype] if device == "cpu" else 1e-2  # of products in TF32
    assert_same([t.cpu() for t in found], wanted, bound)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_pieces_that_continue_equal_the_whole(cuts):
    """Each begins with the state that the one before returned; the first with that of an earlier text."""

    def in_pieces(x, dt, A, B, C, D, state):
        ys = []
        for part in zip(*(t.tensor_split(tuple(cuts)) for t in (x, dt, B, C)), strict=True):
            y, state = ssd(part[0], part[1], A, *part[2:], D, state=state, chunk=16)
            ys.append(y)
        return torch.cat(ys), state

    given = [*inputs(), torch.randn(B, G, R, P, N)]
    wanted = results(lambda *t: recurrence(*t[:6], state=t[6]), doubles(given))
    assert_same(results(in_pieces, given), wanted, TOLERANCE[torch.float32])


def test_documents_of_a_piece_that_continues():
    """Only the first document of a piece goes on from the given state."""
    given, ids = inputs(), ids_of_documents()
    cut = 20
    whole, last = recurrence(*doubles(given), ids=ids)
    x, dt, A, B_, C, D = given
    halves = lambda rows: (x[rows], dt[rows], A, B_[rows], C[rows], D)
    y, state = ssd(*halves(slice(0, cut)), documents=packed_documents(cut), chunk=16)
    rest = packed_documents(rows=(cut, S), first=cut)
    later, state = ssd(*halves(slice(cut, S)), documents=rest, state=state, chunk=16)
    assert_same([torch.cat((y, later)), state], [whole, last], TOLERANCE[torch.float32])


def test_equals_the_scan_of_transformers():
    """Over more than two chunks; groups cut in two give the same, as on two ranks of tensor parallelism."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    given = inputs(s=150)

    def theirs(x, dt, A, B, C, D):
        first = lambda t: t.transpose(0, 1)
        heads = (first(x.flatten(2, 3)), first(dt.flatten(2)), A.flatten(), first(B), first(C), 64)
        y, state = mamba2_chunk_scan(*heads, D=D.flatten(), return_final_states=True)
        return first(y).unflatten(2, (G, R)), state.unflatten(1, (G, R))

    found = results(ssd, given)
    assert_same(found, doubles(results(theirs, given)), 1e-5)
    x, dt, A, B_, C, D = given
    cut = lambda t, dim: t.tensor_split(2, dim)
    halves = zip(cut(x, 2), cut(dt, 2), cut(A, 0), cut(B_, 2), cut(C, 2), cut(D, 0), strict=True)
    assert_same([torch.cat([ssd(*half)[0] for half in halves], 2)], [found[0].double()], 1e-6)


def test_strong_decays_and_long_sums_leave_no_error():
    """Sums of 1e4 in a chunk, of which only differences count: finite, and as exact as small ones."""
    given = inputs(s=256)
    given[1][:64] *= 1000
    given[1][64:] *= 0.01
    found = results(lambda *t: ssd(*t, chunk=128), given)
    wanted = results(recurrence, doubles(given))
    assert_same(found, wanted, 1e-5)


def test_only_inputs_are_kept():
    check_that_inputs_are_kept(lambda *given: ssd(*given, chunk=16), inputs())
