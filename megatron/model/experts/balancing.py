# SPDX-License-Identifier: Apache-2.0
"""Pure functions of balanced experts: the z-loss of logits, a bias that a rule moves, entropy, Sinkhorn's assignment. The
balancing losses: `parts.Balancing`.

Legend: n tokens, E experts.
"""

from collections.abc import Callable
from typing import Optional

import torch

MOST_PASSES = 200  # of Sinkhorn's iteration, whose tolerance fp32 may not reach


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
