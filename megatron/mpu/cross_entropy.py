# SPDX-License-Identifier: Apache-2.0
"""Output layer and cross-entropy in one, over a vocabulary cut along the tensor-parallel axis, a chunk of rows at a
time.

The logits of a whole micro-batch never exist: each chunk's logits become its losses and, when gradients are wanted,
at once its gradients, since d loss / d logits = softmax - onehot needs nothing from later. Backward only multiplies
by the gradient that arrives. Rows of the vocabulary that are padding are kept out of the softmax: no probability,
no gradient.

Legend: n tokens (s x b), h hidden, v padded vocabulary, tp size of the axis.
"""

from typing import Optional

import torch

from megatron.mpu import collectives
from megatron.mpu.mesh import Axis

CHUNK_BYTES = 32 << 20  # of one chunk's logits


def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, vocab_size: int, tp: Axis,
                         mask: Optional[torch.Tensor] = None, chunk: Optional[int] = None) -> torch.Tensor:  # fmt: skip
    """Sum over tokens of mask x cross-entropy of `hidden @ weight.T` against `labels`: a scalar in fp32.

    hidden [n, h], equal on all ranks of `tp`; its gradient here is this rank's part of a sum over them, which the
    mapping that brought it (`copy_to` or `gather_sequence`) completes. weight [v/tp, h]: rows tp.rank * v/tp
    onwards of the padded vocabulary; labels [n] int64 below `vocab_size`; mask [n] or None for all ones; chunk:
    rows of logits that exist at a time.
    """
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    losses, hidden_gradient, weight_gradient = _chunks(
        hidden.detach(), weight.detach(), labels, mask, _Vocabulary(weight, vocab_size, tp), chunk, wanted
    )
    loss = losses.sum() if mask is None else (losses * mask).sum()
    return _Precomputed.apply(loss, hidden, weight, hidden_gradient, weight_gradient) if wanted else loss


@torch.no_grad()
def token_losses(hidden, weight, labels, *, vocab_size: int, tp: Axis, chunk: Optional[int] = None) -> torch.Tensor:
    """Cross-entropy of each token, [n] fp32, without gradients. Arguments as in `linear_cross_entropy`."""
    return _chunks(hidden, weight, labels, None, _Vocabulary(weight, vocab_size, tp), chunk, False)[0]


class _Precomputed(torch.autograd.Function):
    """A scalar whose gradients are already known: backward scales them by what arrives."""

    @staticmethod
    def forward(ctx, loss, hidden, weight, hidden_gradient, weight_gradient):
        ctx.gradients = hidden_gradient, weight_gradient
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        hidden_gradient, weight_gradient = ctx.gradients
        del ctx.gradients  # they are scaled in place, so a second backward would be wrong
        return None, hidden_gradient.mul_(upstream), weight_gradient.mul_(upstream), None, None


class _Vocabulary:
    """Which rows of the vocabulary this rank holds, and how many of those are real."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, tp: Axis):
        self.tp, self.rows = tp, weight.shape[0]
        self.first = tp.rank * self.rows
        self.real = max(0, min(self.rows, vocab_size - self.first))


def _chunks(hidden, weight, labels, mask, vocabulary: _Vocabulary, chunk, wanted: bool):
    """Losses [n]; with `wanted` also the gradients of their masked sum to hidden [n, h] and weight [v/tp, h]."""
    n = hidden.shape[0]
    chunk = chunk or max(64, CHUNK_BYTES // (vocabulary.rows * 4))
    losses = torch.empty(n, dtype=torch.float32, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden) if wanted else None
    # Summed over chunks in fp32: in bf16 each chunk's addition would round away what the next one brings.
    weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted else None
    for start in range(0, n, chunk):
        rows = slice(start, start + chunk)
        logits = (hidden[rows] @ weight.t()).float()
        losses[rows], probabilities = _softmax_loss(logits, labels[rows], vocabulary, wanted)
        if wanted:
            if mask is not None:
                probabilities.mul_(mask[rows].unsqueeze(1))
            gradient = probabilities.to(hidden.dtype)
            torch.mm(gradient, weight, out=hidden_gradient[rows])
            weight_gradient += gradient.t() @ hidden[rows]
    return losses, hidden_gradient, weight_gradient.to(weight.dtype) if wanted else None


def _softmax_loss(logits: torch.Tensor, labels: torch.Tensor, vocabulary: _Vocabulary, wanted: bool):
    """Losses [c] and, with `wanted`, softmax - onehot [c, v/tp], which reuses the memory of `logits` (fp32)."""
    logits[:, vocabulary.real :] = float("-inf")
    local = labels - vocabulary.first
    elsewhere = (local < 0) | (local >= vocabulary.real)
    local = local.masked_fill(elsewhere, 0).unsqueeze(1)
    target = logits.gather(1, local).squeeze(1).masked_fill(elsewhere, 0.0)
    log_sum = _log_sum_exp(logits, vocabulary.tp)
    target = collectives.all_reduce(target, vocabulary.tp)
    if not wanted:
        return log_sum - target, None
    probabilities = logits.sub_(log_sum.unsqueeze(1)).exp_()
    probabilities.scatter_add_(1, local, (elsewhere.float() - 1.0).unsqueeze(1))
    return log_sum - target, probabilities


def _log_sum_exp(logits: torch.Tensor, tp: Axis) -> torch.Tensor:
    """log sum exp over the whole vocabulary, [c], from this rank's part of the logits [c, v/tp]."""
    local = torch.logsumexp(logits, 1)
    if tp.size == 1:
        return local
    return torch.logsumexp(collectives.all_gather(local.unsqueeze(0), tp), 0)
