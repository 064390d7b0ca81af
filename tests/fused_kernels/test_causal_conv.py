# SPDX-License-Identifier: Apache-2.0
"""The causal convolution equals torch's `conv1d` in fp64, values and gradients: whole, each document by itself, in pieces.

Legend: s tokens, b samples, c channels, W taps.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from megatron.fused_kernels.causal_conv import causal_conv
from megatron.fused_kernels.documents import Documents, starts_of

S, B, C = 23, 2, 6
BEGINS = [0, 1, 2, 9, 22], [0, 5, 7, 8]  # of the documents of two samples: of 1 token, of fewer than the taps, of more
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}  # of the norm of a tensor; on GPUs the same: no products


def formula(x, weight, bias):
    """By `conv1d` over rows with W - 1 zeros before them."""
    padded = F.pad(x.permute(1, 2, 0), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))).permute(2, 0, 1)


def by_document(x, weight, bias):
    of_samples = zip(x.split(1, 1), BEGINS, strict=True)
    alone = [
        torch.cat([formula(sample[start:stop], weight, bias) for start, stop in pairwise([*begins, S])])
        for sample, begins in of_samples
    ]
    return torch.cat(alone, 1)


def documents(device="cpu") -> Documents:
    ids = torch.stack([torch.tensor([sum(begin <= n for begin in begins) for n in range(S)]) for begins in BEGINS], 1)
    return Documents.of(starts_of(ids), device)


def inputs(taps: int, dtype=torch.float32, s: int = S) -> list[torch.Tensor]:
    torch.manual_seed(taps)
    x = torch.randn(s, B, 3 * C).to(dtype)[..., C : 2 * C]  # a part of a projection
    return [x, torch.randn(C, taps).to(dtype), torch.randn(C).to(dtype)]


def assert_same(got, want, bound: float):
    for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        error = ((mine.double() - theirs).norm() / theirs.norm()).item()
        assert error < bound, f"result {place}: {error:.1e}"


def results(function, given, factor) -> list[torch.Tensor]:
    """Values and gradients."""
    given = [x.detach().requires_grad_() for x in given]
    y = function(*given)
    return [y.detach(), *torch.autograd.grad((y * factor.to(y)).sum(), given)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
def test_equals_conv1d(device, dtype, taps, packed):
    given, factor = inputs(taps, dtype), torch.randn(S, B, C).bfloat16()
    ids = documents(device) if packed else None
    found = results(lambda *x: causal_conv(*x, documents=ids)[0], [x.to(device) for x in given], factor)
    assert all(x.dtype == dtype for x in found)
    found = [x.cpu() for x in found]
    wanted = results(by_document if packed else formula, [x.double() for x in given], factor)
    assert_same(found, wanted, TOLERANCE[dtype])


def test_without_a_bias_and_shorter_than_the_taps():
    """Taps that reach no row have a gradient of 0."""
    x, weight, _ = inputs(9, s=2)
    weight, factor = weight[:, :4], torch.randn(2, B, C).bfloat16()
    _, last = causal_conv(x, weight)
    torch.empty(1000, 4).fill_(float("inf"))  # what memory may hold that is taken next
    found = results(lambda *given: causal_conv(*given)[0], [x, weight], factor)
    assert_same(found, results(lambda *given: formula(*given, None), [x.double(), weight.double()], factor), 1e-6)
    assert found[2][:, :2].equal(torch.zeros(C, 2))
    assert last.equal(torch.cat((torch.zeros(1, B, C), x)))


@pytest.mark.parametrize(
    "cuts", [(10,), (1, 2, 3, 12), tuple(range(1, S))], ids=["two", "short ones", "token by token"]
)
def test_pieces_that_continue_equal_the_whole(cuts):
    """Each is given the rows that the one before returned; their gradients flow back, too."""

    def in_pieces(x, weight, bias):
        parts, before = [], torch.zeros(3, B, C)
        for piece in x.tensor_split(cuts):
            part, before = causal_conv(piece, weight, bias, before=before)
            parts.append(part)
        return torch.cat(parts)

    given, factor = inputs(4), torch.randn(S, B, C)
    wanted = results(formula, [x.double() for x in given], factor)
    assert_same(results(in_pieces, given, factor), wanted, 1e-6)


@pytest.mark.parametrize("cut", [1, 2, 8, 9, 10])
def test_documents_of_a_piece_that_continues(cut):
    """Its first document is that of the piece before; the later ones see none of the rows before it."""
    x, weight, bias = inputs(4)
    whole, ids = by_document(x.double(), weight.double(), bias.double()), documents()
    first = Documents.of(ids.on_host[:, :cut], "cpu")
    then = Documents.of(ids.on_host, "cpu", rows=(cut, S), first=cut)
    y, before = causal_conv(x[:cut], weight, bias, documents=first)
    begins = torch.tensor([cut in sample for sample in BEGINS]).view(1, B, 1)
    later, _ = causal_conv(x[cut:], weight, bias, documents=then, before=before.masked_fill(begins, 0.0))
    assert_same([torch.cat((y, later))], [whole], 1e-6)


def test_channels_in_groups():
    """Channels may be several dims; the result has them, too."""
    x, weight, bias = inputs(4)
    grouped = causal_conv(x.unflatten(2, (2, 3)), weight.unflatten(0, (2, 3)), bias.view(2, 3), documents=documents())
    flat = causal_conv(x, weight, bias, documents=documents())
    assert all(one.flatten(2).equal(other) for one, other in zip(grouped, flat, strict=True))


def test_last_rows_of_documents():
    """Zeros where the last document has fewer rows: whoever continues it must not see another one."""
    x, weight, bias = inputs(4)
    _, last = causal_conv(x, weight, bias, documents=documents())
    assert last[:, 0].equal(torch.cat((torch.zeros(2, C), x[-1:, 0]))) and last[:, 1].equal(x[-3:, 1])
