# SPDX-License-Identifier: Apache-2.0
"""Output layer and cross-entropy in chunks equal F.cross_entropy over whole logits: values, gradients, padding,
tp.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.mpu.cross_entropy import linear_cross_entropy, ordered_log_sum, ordered_logits, token_losses
from megatron.mpu.deferred_wgrad import WeightGradStore, run_deferred_wgrads
from megatron.mpu.mesh import Mesh
from megatron.mpu.ordered_tokens import SampleSums
from megatron.settings import kernel_sizes

N, H, V, PADDED = 37, 16, 100, 128


def problem(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, H, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=generator)
    mask = (torch.rand(N, generator=generator) > 0.3).float()
    return hidden, weight, labels, mask


def plain(hidden, weight, labels, mask=None, label_smoothing=0.0):
    logits = (hidden @ weight[:V].t()).float()
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    return losses.sum() if mask is None else (losses * mask).sum()


@pytest.mark.parametrize("chunk", [None, 1, 10, 37, 64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "label_smoothing, ordered", [(0.0, False), (0.1, False), (0.9, False), (0.0, True), (0.1, True)]
)
def test_equals_plain_cross_entropy(chunk, masked, label_smoothing, ordered):
    """ordered: with sums of eight blocks of the vocabulary, of which the last one is padding"""
    hidden, weight, labels, mask = problem()
    mask = mask if masked else None
    want = plain(hidden, weight, labels, mask, label_smoothing)
    wanted = torch.autograd.grad(want * 0.25, (hidden, weight))
    got, _ = linear_cross_entropy(
        hidden,
        weight,
        labels,
        vocab_size=V,
        tp=Mesh().tp,
        mask=mask,
        chunk=chunk,
        label_smoothing=label_smoothing,
        ordered=SampleSums(Mesh().cp) if ordered else None,
    )
    torch.testing.assert_close(got, want)
    gradients = torch.autograd.grad(got * 0.25, (hidden, weight))
    for gradient, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    assert gradients[1][V:].abs().sum() == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("softcap, z_loss", [(3.0, 0.0), (None, 0.05), (3.0, 0.05)])
def test_capped_logits_and_z_losses(run_ranks, chunk, label_smoothing, softcap, z_loss):
    """On one rank, and on two that each hold a part of the vocabulary, padding at the end of the second."""
    hidden, weight, labels, mask = problem()
    capped = (lambda x: softcap * torch.tanh(x / softcap)) if softcap else lambda x: x
    logits = capped(hidden @ weight[:V].t())
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    want, want_z = (losses * mask).sum(), (logits.exp().sum(1).log() ** 2 * mask).sum()
    wanted = torch.autograd.grad(want + z_loss * want_z, (hidden, weight))
    each = token_losses(hidden, weight, labels, vocab_size=V, tp=Mesh().tp, softcap=softcap, chunk=chunk)
    torch.testing.assert_close(each, F.cross_entropy(logits, labels, reduction="none"))
    told = dict(mask=mask, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, chunk=chunk)

    def body(rank, tp):
        rows = PADDED // tp
        own = weight.detach()[rank * rows : rank * rows + rows].clone().requires_grad_()
        mine = hidden.detach().clone().requires_grad_()
        loss, z = linear_cross_entropy(mine, own, labels, vocab_size=V, tp=Mesh(rank, tp=tp).tp, **told)
        assert not z.requires_grad
        (loss + z_loss * z).backward()
        return loss.item(), z.item(), mine.grad.numpy(), own.grad.numpy()

    for results in ([body(0, 1)], run_ranks(2, body, 2)):
        for loss, z, _, _ in results:
            assert (loss, z) == pytest.approx((want.item(), want_z.item()), rel=2e-6)
        of_hidden, of_weight = sum(r[2] for r in results), np.concatenate([r[3] for r in results])
        np.testing.assert_allclose(of_hidden, wanted[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(of_weight, wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, None])
def test_bf16_gradients_do_not_lose_by_chunking(chunk):
    """The error against fp64 stays that of the bf16 format itself, however many chunks are added up."""
    hidden, weight, labels, _ = problem(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    losses = F.cross_entropy(exact[0] @ exact[1][:V].t(), labels, reduction="sum")
    wanted = torch.autograd.grad(losses, exact)
    got, _ = linear_cross_entropy(hidden, weight, labels, vocab_size=V, tp=Mesh().tp, chunk=chunk)
    assert abs(got.item() - losses.item()) < 0.01 * losses.item()
    for gradient, expected in zip(torch.autograd.grad(got, (hidden, weight)), wanted, strict=True):
        assert gradient.dtype == torch.bfloat16
        error = (gradient.double() - expected).norm() / expected.norm()
        assert error < 0.01


def test_fp16_keeps_small_probabilities_and_large_sums():
    """Probabilities below 6e-8 vanish in fp16, and the weight's gradient over many equal tokens overflows it: with the
    loss scale over the tokens as what arrives, neither happens.
    """
    n, scale = 40000, 0.25
    hidden = torch.full((n, H), 2.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(PADDED, H, dtype=torch.float16)
    weight[1] = -0.5  # logit -16: its probability is 1e-9
    weight.requires_grad_()
    labels = torch.zeros(n, dtype=torch.long)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    losses = F.cross_entropy(exact[0] @ exact[1][:V].t(), labels, reduction="sum")
    wanted = torch.autograd.grad(losses * scale, exact)
    got, _ = linear_cross_entropy(hidden, weight, labels, vocab_size=V, tp=Mesh().tp)
    gradients = torch.autograd.grad(got * scale, (hidden, weight))
    for gradient, expected in zip(gradients, wanted, strict=True):
        assert gradient.dtype == torch.float16
        torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=2e-4)
    assert wanted[1][0].abs().min() / scale > 65504 and wanted[1][1].abs().max() / n < 6e-8
    torch.testing.assert_close(gradients[1][1].double(), wanted[1][1], rtol=2e-2, atol=0)


def test_losses_of_tokens_and_no_gradient_work():
    hidden, weight, labels, _ = problem()
    want = F.cross_entropy(hidden @ weight[:V].t(), labels, reduction="none")
    got = token_losses(hidden, weight, labels, vocab_size=V, tp=Mesh().tp, chunk=8)
    torch.testing.assert_close(got, want.detach())
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels, vocab_size=V, tp=Mesh().tp)[0].requires_grad


def test_extreme_logits_stay_finite():
    hidden, weight, labels, _ = problem()
    got, _ = linear_cross_entropy(hidden * 100, weight * 100, labels, vocab_size=V, tp=Mesh().tp, chunk=7)
    torch.testing.assert_close(got, plain(hidden * 100, weight * 100, labels))
    assert all(g.isfinite().all() for g in torch.autograd.grad(got, (hidden, weight)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_vocabulary_cut_over_ranks(run_ranks, label_smoothing):
    """Four ranks of 32 rows: the last holds 4 real ones. Gradients to hidden are partial sums."""
    hidden, weight, labels, mask = problem()
    want = plain(hidden, weight, labels, mask, label_smoothing)
    wanted = torch.autograd.grad(want, (hidden, weight))

    def body(rank):
        tp = Mesh(rank, tp=4).tp
        own = weight.detach()[rank * 32 : rank * 32 + 32].clone().requires_grad_()
        mine = hidden.detach().clone().requires_grad_()
        loss, _ = linear_cross_entropy(
            mine, own, labels, vocab_size=V, tp=tp, mask=mask, chunk=10, label_smoothing=label_smoothing
        )
        loss.backward()
        return loss.item(), mine.grad.numpy(), own.grad.numpy()

    results = run_ranks(4, body)
    for loss, _, _ in results:
        assert loss == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(sum(torch.from_numpy(r[1]) for r in results), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([torch.from_numpy(r[2]) for r in results]), wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1 << 27, 1])
def test_the_product_for_the_weight_may_wait(monkeypatch, dtype, block):
    """Pass I gives the gradient to hidden alone; W that of the weight: the same bits, of one block or of several."""
    monkeypatch.setattr(kernel_sizes, "BLOCK_BYTES", block)
    found = []
    for deferred in (None, WeightGradStore()):
        hidden, weight, labels, mask = problem(dtype)
        with deferred.collect() if deferred else nullcontext([]) as products:
            more = dict(mask=mask, chunk=10, deferred=deferred)
            loss, _ = linear_cross_entropy(hidden, weight, labels, vocab_size=V, tp=Mesh().tp, **more)
            (loss * 0.3).backward()
        assert (weight.grad is None) == bool(deferred) and len(products) == bool(deferred)
        run_deferred_wgrads(products)
        found.append((hidden.grad, weight.grad))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_losses_of_blocks_are_those_of_generation():
    """To the bit: with gradients, without, and from whole logits."""
    hidden, weight, labels, _ = problem()
    more = dict(vocab_size=V, tp=Mesh().tp, ordered=SampleSums(Mesh().cp))
    with torch.no_grad():
        logits = ordered_logits(hidden, weight, Mesh().tp)[:, :V]
        want = ordered_log_sum(logits, PADDED).squeeze(1) - logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    assert torch.equal(token_losses(hidden, weight, labels, **more), want)
    assert torch.equal(linear_cross_entropy(hidden, weight, labels, **more)[0].detach(), want.sum())


def test_smoothed_losses_of_blocks_are_those_of_one_rank(run_ranks):
    """To the bit, of logits so large that another order of their sum changes a loss."""
    hidden, weight, labels, _ = problem()
    hidden, weight = hidden.detach(), weight.detach()
    hidden[:, 0], weight[:, 0] = 1.0, weight[:, 0] + 1000.0

    def loss(rank, tp):
        mesh = Mesh(rank, tp=tp, ordered=True)
        more = dict(vocab_size=V, tp=mesh.tp, label_smoothing=0.9, ordered=SampleSums(mesh.cp))
        return linear_cross_entropy(hidden, weight.chunk(tp)[rank], labels, **more)[0]

    want = loss(0, 1)
    torch.testing.assert_close(want, plain(hidden, weight, labels, label_smoothing=0.9), rtol=1e-4, atol=0)
    for tp in (2, 4):
        assert [want] * tp == run_ranks(tp, lambda rank, tp=tp: loss(rank, tp)), tp


def test_the_gradient_of_a_bias_is_of_all_blocks(monkeypatch):
    monkeypatch.setattr(kernel_sizes, "BLOCK_BYTES", 1)
    hidden, weight, labels, _ = problem(torch.float32)
    bias = torch.randn(len(weight), generator=torch.Generator().manual_seed(4)).requires_grad_()
    loss, _ = linear_cross_entropy(hidden, weight, labels, vocab_size=V, tp=Mesh().tp, chunk=10, bias=bias)
    logits = hidden @ weight.t() + bias
    want = torch.nn.functional.cross_entropy(logits[:, :V], labels, reduction="sum")
    [found], [wanted] = (torch.autograd.grad(x, bias) for x in (loss, want))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
