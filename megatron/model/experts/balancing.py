# SPDX-License-Identifier: Apache-2.0
"""Balancing the loads of experts: auxiliary losses, Sinkhorn's assignment, and a bias that a rule moves. Pure functions.

The losses are those of Megatron-Core, as a value per token. With c_i the tokens of expert i among T tokens,
f_i = c_i / (k T) its share, and p_ti the score of token t for it, normalized over experts,

    aux loss = E sum_i f_i (1/T sum_t p_ti) = 1/T sum_t b_t,   b_t = E sum_i f_i p_ti

so the mean over tokens of b_t is the loss. It is 1 if loads are equal. Gradients flow through p only. The losses differ in
the tokens that c counts: those of the micro-batch (aux_loss, arXiv:2101.03961), of the token's sequence (seq_aux_loss,
arXiv:2405.04434), or of all ranks and the micro-batches of the step so far (global_aux_loss, arXiv:2501.11873).

Legend: s sequence, b micro-batch, E experts, k experts of a token.
"""

from collections.abc import Callable
from typing import Optional

import torch

MOST_PASSES = 200  # of Sinkhorn's iteration, whose tolerance fp32 may not reach


def balance_loss(scores: torch.Tensor, loads: torch.Tensor) -> torch.Tensor:
    """b_t of each token, [s, b], for scores [s, b, E] and loads [b, E] or [E]."""
    shares = loads.to(scores.dtype) / loads.sum(-1, keepdim=True).clamp_min(1)
    return scores.shape[-1] * (shares * scores).sum(-1)


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """log(sum of exp(logits))^2 of each token (arXiv:2202.08906, eq. 5)."""
    return logits.logsumexp(-1).square()


def moved_bias(bias: torch.Tensor, loads: torch.Tensor, rate: float) -> torch.Tensor:
    """The expert bias after a step: up by `rate` for experts with fewer tokens than the mean, down for those with more
    (arXiv:2408.15664). loads: [E] int64, of all ranks; in integers, because a rounded mean may have the wrong sign.
    """
    return bias + rate * (loads.sum() - len(loads) * loads).sign()


def entropy(scores: torch.Tensor) -> torch.Tensor:
    """The entropy of each token's scores, in nats."""
    return torch.special.entr(scores).sum(-1)


@torch.no_grad()
def sinkhorn(
    logits: torch.Tensor,
    counted: Optional[torch.Tensor] = None,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    tolerance: float = 1e-4,
) -> torch.Tensor:
    """Scores [n, E] whose rows and columns all have equal sums: each expert is as much in demand as any other.

    counted: [n] bool: tokens of which columns are sums; None: all. total: sums a tensor over the ranks that have the other
    tokens. The iteration reads its error on the host after each pass.
    """
    cost, number = logits.float().exp(), logits.shape[-1]
    counts = cost.new_ones(len(cost)) if counted is None else counted.to(cost.dtype)
    tokens = total(counts.sum()).clamp_min(1)
    columns = cost.new_ones(number)
    for _ in range(MOST_PASSES):
        rows = 1 / (tokens * ((columns * cost).sum(1) + 1e-8))
        before, columns = columns, 1 / (number * (total(((counts * rows).unsqueeze(1) * cost).sum(0)) + 1e-8))
        if columns.is_meta or not (columns - before).abs().mean().item() > tolerance:
            break
    return columns * cost * rows.unsqueeze(1)
