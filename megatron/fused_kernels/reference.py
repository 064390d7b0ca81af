# SPDX-License-Identifier: Apache-2.0
"""Every op that has fast implementations, in plain PyTorch: these functions define what those compute.

Legend: s new tokens, t all tokens, b micro-batch, g key-value groups, q queries of a group, d channels of a head.
"""

from typing import Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels.dropout import DropoutMask


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    allowed: torch.Tensor | None = None,
    score_divisor: float = 1.0,
    softmax_in_fp32: bool = False,
    dropout: DropoutMask | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Softmax attention of query [s, b, g, q, d] over key, value [t, b, g, d] -> [s, b, g q d].

    causal:    no query sees a key after it, the queries being the last s <= t of the tokens. Without it every query
               sees every key, and s and t are independent: bidirectional self-attention, or cross-attention
    allowed:   [b, s, t] bool, which pairs may see each other besides; a query that then sees no key gets zeros, and
               gives no gradient
    dropout:   which weights stay, [b, g q, s, t]
    score_divisor: keeps scores in the range of fp16: they are divided by it and multiplied again in the fp32 softmax
    softcap:   scores become softcap x tanh(score / softcap)
    window:    of a causal case: a query sees its own key and at most this many before it
    """
    s, b, g, q, d = query.shape
    t = key.shape[0]
    rows = query.permute(1, 2, 3, 0, 4).reshape(b * g, q * s, d)  # the queries of a group share its keys
    keys, values = (x.reshape(t, b * g, d).transpose(0, 1) for x in (key, value))  # [b g, t, d]
    scores = torch.bmm(rows * (scale / score_divisor), keys.transpose(1, 2)).view(b, g * q, s, t)
    if softmax_in_fp32 or score_divisor != 1.0:
        scores = scores.float() * score_divisor
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    blind = None
    if allowed is not None:
        visible, blind = visible_keys(allowed, causal, window)
        scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    elif window is not None:
        scores = scores.masked_fill(~in_window(s, t, window, scores.device), float("-inf"))
    elif causal and s > 1:
        scores = scores + torch.full((s, t), float("-inf"), dtype=scores.dtype, device=scores.device).triu(t - s + 1)
    weights = scores.softmax(-1).to(value.dtype)
    if dropout is not None:
        weights = weights * dropout.mask() * dropout.factor
    attended = torch.bmm(weights.view(b * g, q * s, t), values)  # [b g, q s, d]
    attended = attended.view(b, g, q, s, d).permute(3, 0, 1, 2, 4).reshape(s, b, g * q * d)
    return attended if blind is None else attended.masked_fill(blind, 0.0)


def in_window(s: int, t: int, window: int, device) -> torch.Tensor:
    """[s, t] bool: the key is the query's own, or one of `window` before it; the queries are the last s of t tokens."""
    return torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s).triu(t - s - window)


def visible_keys(
    allowed: torch.Tensor, causal: bool, window: Optional[int] = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a softmax may look at, [b, s, t] bool, and queries whose results become zeros, [s, b, 1] bool.

    Those are the queries that see no key. In the first tensor they see all keys: a softmax over none is NaN, and so
    would be every gradient behind it.
    """
    s, t = allowed.shape[1:]
    if causal:
        allowed = allowed.tril(t - s)
    if window is not None:
        allowed = allowed.triu(t - s - window)
    blind = ~allowed.any(-1, keepdim=True)  # [b, s, 1]
    return allowed | blind, blind.transpose(0, 1)


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T + bias [n] -> [m, n]."""
    return F.linear(x, weight, bias)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim, in fp32 inside."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim, in fp32 inside."""
    return F.rms_norm(x, weight.shape, weight, epsilon)
