# SPDX-License-Identifier: Apache-2.0
"""The choice of experts: scores of a router's logits, the top k, their weights, the places of tokens in their experts, and
what balances them.

All are pure functions, with the definitions of Megatron-Core:

| scores               | chosen by                   | weights of the chosen                    | models               |
|----------------------|-----------------------------|------------------------------------------|----------------------|
| softmax              | logits                      | softmax over the chosen                  | Mixtral, Qwen3-MoE   |
| softmax, pre-softmax | softmax over all            | the same values                          | OLMoE, DeepSeek-MoE  |
| sigmoid              | sigmoid + the expert bias   | sigmoids, divided by their sum if k > 1  | DeepSeek-V3          |

Every weight is multiplied by the scaling factor. With groups, a token first chooses `group_topk` groups of experts, by the
sum of the best k / group_topk in each (or of so many as `group_score_topk` says: one in DeepSeek-V2, arXiv:2405.04434, two
in V3), and then its experts in these.

Legend: n tokens of this rank, E experts, k experts of a token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch

from megatron.model.kinds.experts.parts import ways_of
from megatron.settings.schema import Model

TINY = 1e-20  # added to a sum of sigmoids, which may underflow
MOST_PASSES = 200  # of Sinkhorn's iteration, whose tolerance fp32 may not reach


@dataclass(frozen=True)
class ExpertChoice:
    """How tokens choose experts. See the flags of the same names, without --moe-router-."""

    num_experts: int
    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    num_groups: Optional[int] = None
    group_topk: Optional[int] = None
    group_score_topk: Optional[int] = None
    topk_scaling_factor: Optional[float] = None


def choice_of(model: Model) -> ExpertChoice:
    """How the tokens of a model choose experts."""
    by_itself = any(way.chooses for way in ways_of(model).values())
    return ExpertChoice(
        model.num_experts,
        model.moe_router_topk,
        ("sigmoid" if model.moe_router_topk == 1 else "softmax") if by_itself else model.moe_router_score_function,
        model.moe_router_pre_softmax or by_itself,
        model.moe_router_num_groups,
        model.moe_router_group_topk,
        model.moe_router_group_score_topk,
        None if by_itself else model.moe_router_topk_scaling_factor,
    )


@torch.no_grad()
def choose(logits: torch.Tensor, rule: ExpertChoice, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """The experts [n, k] of tokens with these logits [n, E]. bias: [E], added to their scores."""
    scores = _scores(logits, rule)
    return best(scores if bias is None else scores + bias, rule)


def weights_of(logits: torch.Tensor, experts: torch.Tensor, rule: ExpertChoice) -> torch.Tensor:
    """What the outputs of the chosen experts [n, k] are multiplied by, [n, k]. A bias of the choice is no part of it."""
    weights = _scores(logits, rule).gather(-1, experts)
    if rule.score_function == "softmax" and not rule.pre_softmax:
        weights = weights.softmax(-1)
    elif rule.score_function == "sigmoid" and rule.topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights if rule.topk_scaling_factor is None else weights * rule.topk_scaling_factor


def _scores(logits: torch.Tensor, rule: ExpertChoice) -> torch.Tensor:
    """The scores of all experts that tokens choose by."""
    if rule.score_function == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(-1) if rule.pre_softmax else logits


def best(scores: torch.Tensor, rule: ExpertChoice) -> torch.Tensor:
    """The experts [n, k] with the highest scores [n, E], the highest first, in the chosen groups if there are groups."""
    if rule.group_topk is not None:
        groups = scores.unflatten(-1, (rule.num_groups, -1))  # [n, groups, experts of a group]
        best_sums = groups.topk(rule.group_score_topk or rule.topk // rule.group_topk, -1).values.sum(-1)
        others = torch.ones_like(best_sums, dtype=torch.bool).scatter(
            -1, best_sums.topk(rule.group_topk, -1).indices, False
        )
        scores = groups.masked_fill(others.unsqueeze(-1), -math.inf).flatten(-2)  # not 0: biased scores may be negative
    return scores.topk(rule.topk, -1).indices


def normalized_scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """Scores of all experts with the sum 1, [..., E] fp32, for losses that balance loads."""
    if score_function == "softmax":
        return logits.float().softmax(-1)
    scores = logits.float().sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + TINY)


def count_experts(experts: torch.Tensor, number: int, counted: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Tokens of each expert, [..., number] int64, from experts [..., n, k].

    counted: [..., n] bool, False for padding; None: all count
    """
    ones = torch.ones_like(experts) if counted is None else counted.to(experts.dtype).unsqueeze(-1).expand_as(experts)
    return experts.new_zeros((*experts.shape[:-2], number)).scatter_add(-1, experts.flatten(-2), ones.flatten(-2))


def places_of(
    experts: torch.Tensor, number: int, weights: Optional[torch.Tensor] = None, counted: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """The place of each pair of token and expert [n, k] among those of its expert: 0 is the first.

    weights: the largest are first (--moe-token-drop-policy probs); None: in the order of tokens (position).
    counted: [n] bool: padding comes last, so that it displaces no token
    """
    flat = experts.flatten()
    order = torch.arange(len(flat), device=flat.device)
    if weights is not None:
        order = weights.detach().flatten().argsort(descending=True, stable=True)
    if counted is not None:
        padding = ~counted.unsqueeze(-1).expand_as(experts).flatten()
        order = order[padding[order].to(torch.uint8).argsort(stable=True)]
    order = order[flat[order].argsort(stable=True)]
    loads = count_experts(experts, number)
    first = loads.cumsum(0) - loads
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), device=flat.device) - first[flat[order]]
    return places.view_as(experts)


# ---- balancing; the losses are in `parts` ---------------------------------------------------------------------------


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
