# SPDX-License-Identifier: Apache-2.0
"""What tests of scans have in common: packed documents, results with gradients, and how far they may be from a recurrence.

Legend: s tokens, b samples.
"""

import torch

from megatron.fused_kernels.documents import Documents, starts_of

S, B = 75, 2
BEGINS = [0, 1, 15, 16, 17, 32, 60], [0, 33, 74]  # around the edges of chunks of 16, of one token, over several chunks
CUTS = {"two": (40,), "short ones": (1, 2, 33), "token by token": range(1, S)}  # of texts that go on


def ids_of_documents(s: int = S) -> torch.Tensor:
    """[s, b]."""
    return torch.stack([torch.tensor([sum(begin <= n for begin in begins) for n in range(s)]) for begins in BEGINS], 1)


def packed_documents(s: int = S, device="cpu", **rows) -> Documents:
    return Documents.of(starts_of(ids_of_documents(s)), device, **rows)


def results(function, given) -> list[torch.Tensor]:
    """Values, states and the gradients of all inputs, of a sum that reads both."""
    given = [t.detach().requires_grad_() for t in given]
    y, state = function(*given)
    factors = [torch.randn(t.shape, generator=torch.Generator().manual_seed(2)).bfloat16() for t in (y, state)]
    total = (y * factors[0].to(y)).sum() + (state * factors[1].to(state)).sum()
    return [y.detach(), state.detach(), *torch.autograd.grad(total, given)]


def doubles(given) -> list[torch.Tensor]:
    return [t.double() for t in given]


def assert_same(got, want, bound: float) -> None:
    """bound: of the norm of each tensor"""
    for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        error = ((mine.double() - theirs).norm() / theirs.norm()).item()
        assert error < bound, f"{['values', 'state'][place] if place < 2 else f'gradient {place - 2}'}: {error:.1e}"


def check_that_inputs_are_kept(function, given) -> None:
    """Neither states nor decays of a pass are."""
    given, kept = [t.requires_grad_() for t in given], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(*given)
    assert sum(t.numel() for t in kept) == sum(t.numel() for t in given)
