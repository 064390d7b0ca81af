# SPDX-License-Identifier: Apache-2.0
"""The loss on a teacher's logits against torch's own ops and autograd, in fp64, whole and over a vocabulary that is cut."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.mpu.cross_entropy import linear_cross_entropy
from megatron.mpu.distillation_loss import TeacherLoss
from megatron.mpu.mesh import Mesh
from tests.model.test_cross_entropy import PADDED, V, problem

KINDS = ("forward_kl", "reverse_kl", "js")


def divergence(kind: str, teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, v] logits -> [n]."""
    log_p, log_q = (F.log_softmax(each / temperature, -1) for each in (teacher, student))
    kl = lambda a, b: F.kl_div(b, a, reduction="none", log_target=True).sum(-1)  # KL(a || b)
    log_m = torch.log((log_p.exp() + log_q.exp()) / 2)
    found = dict(
        forward_kl=lambda: kl(log_p, log_q),
        reverse_kl=lambda: kl(log_q, log_p),
        js=lambda: (kl(log_p, log_m) + kl(log_q, log_m)) / 2,
    )
    return found[kind]() * temperature**2


CASES = {
    "plain": dict(),
    "masked, chunks": dict(mask=True, chunk=10),
    "cap, smoothing, z-loss": dict(mask=True, chunk=16, softcap=3.0, label_smoothing=0.1, z_loss=0.05),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize(
    "kind, temperature", [("forward_kl", 1.0), ("forward_kl", 2.5), ("reverse_kl", 2.0), ("js", 2.0)]
)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(run_ranks, case, kind, temperature, alpha):
    """On one rank, and on two that each hold a part of the vocabulary, padding at the end of the second."""
    options = dict(CASES[case])
    hidden, weight, labels, mask = problem()
    options["mask"] = mask if options.get("mask") else None
    logits = 2 * torch.randn(len(labels), PADDED, generator=torch.Generator().manual_seed(5))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    z = exact[0] @ exact[1][:V].t()
    if cap := options.get("softcap"):
        z = cap * torch.tanh(z / cap)
    counted = 1.0 if options["mask"] is None else mask.double()
    lm = (
        F.cross_entropy(z, labels, reduction="none", label_smoothing=options.get("label_smoothing", 0)) * counted
    ).sum()
    kd = (divergence(kind, logits[:, :V].double(), z, temperature) * counted).sum()
    z_loss = (z.exp().sum(1).log() ** 2 * counted).sum()
    wanted = torch.autograd.grad((1 - alpha) * lm + alpha * kd + options.get("z_loss", 0) * z_loss, exact)

    def body(rank, tp):
        rows = slice(rank * PADDED // tp, (rank + 1) * PADDED // tp)
        own = weight.detach()[rows].clone().requires_grad_()
        mine, axis = hidden.detach().clone().requires_grad_(), Mesh(rank, tp=tp).tp
        teacher = TeacherLoss(
            lambda tokens: logits[tokens, rows], axis, kind=kind, temperature=temperature, alpha=alpha
        )
        found = linear_cross_entropy(mine, own, labels, vocab_size=V, tp=axis, teacher=teacher, **options)
        assert [each.requires_grad for each in found] == [False, False, True]
        (alpha * found[2] * 0.25).backward()
        return [each.item() for each in found], mine.grad.numpy() * 4, own.grad.numpy() * 4

    for results in ([body(0, 1)], run_ranks(2, body, 2)):
        for found, _, _ in results:
            assert found == pytest.approx([lm.item(), z_loss.item(), kd.item()], rel=3e-6)
        np.testing.assert_allclose(sum(r[1] for r in results), wanted[0], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(np.concatenate([r[2] for r in results]), wanted[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_formats(kind, dtype):
    """The error against fp64 is that of the format, also where teacher and student disagree about everything."""
    hidden, weight, labels, _ = problem(dtype)
    logits = 8 * torch.randn(len(labels), PADDED, generator=torch.Generator().manual_seed(6))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    kd = divergence(kind, logits[:, :V].double(), exact[0] @ exact[1][:V].t(), 4.0).sum()
    wanted = torch.autograd.grad(kd, exact)
    teacher = TeacherLoss(logits.__getitem__, Mesh().tp, kind=kind, temperature=4.0, alpha=1.0)
    *_, found = linear_cross_entropy(hidden, weight, labels, vocab_size=V, tp=Mesh().tp, teacher=teacher)
    assert found.item() == pytest.approx(kd.item(), rel=1e-2)
    for gradient, expected in zip(torch.autograd.grad(found * 0.25, (hidden, weight)), wanted, strict=True):
        assert (4 * gradient.double() - expected).norm() / expected.norm() < 0.02


def test_equal_logits_have_no_loss_and_no_gradient():
    hidden, weight, labels, _ = problem()
    for kind in KINDS:
        teacher = TeacherLoss(
            lambda rows: hidden.detach()[rows] @ weight.detach().t(), Mesh().tp, kind=kind, temperature=3.0, alpha=1.0
        )
        *_, found = linear_cross_entropy(hidden, weight, labels, vocab_size=V, tp=Mesh().tp, teacher=teacher)
        assert abs(found.item()) < 1e-3
        assert all(each.abs().max() < 1e-4 for each in torch.autograd.grad(found, (hidden, weight)))
