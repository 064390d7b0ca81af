# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks: in the softmax each head has one more logit, of a key without a value (arXiv:2309.17453).

A sink changes only the sum that weights are divided by. So a result over the keys alone becomes that with the sink if it
is multiplied by the share of the keys in the softmax, sigmoid(log sum exp of scores - sink). Kernels that return the
log-sum-exp need nothing else, and their backward pass takes the one that includes the sink (`partial_attention`).

Legend: s queries, t keys, b samples, g key-value heads, q queries per group, h = g q heads, d channels per head. Sinks are
[g, q].
"""

from typing import Optional

import torch

from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.partial_attention import FlashOnCPU, FlashOnCUDA, Rectangle, Scores


def flash(
    query,
    key,
    value,
    *,
    scale: float,
    sinks: torch.Tensor,
    documents: Optional[Documents] = None,
    window: Optional[int] = None,
    **_,
) -> torch.Tensor:
    """`reference.attention` of causal cases with sinks, by torch's flash attention."""
    s, b, g, q, d = query.shape
    t = len(key)
    if s < t and documents is None and window is None:
        window = t  # all keys: kernels count a window from the end of the keys
    whole = Rectangle(slice(0, s), slice(0, t), True, window, documents)
    attended = _FlashWithSinks.apply(query.reshape(s, b, g * q, d), key, value, sinks, whole, Scores(scale))
    return attended.reshape(s, b, g * q * d)


class _FlashWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, whole, scores):
        kernel = FlashOnCUDA if query.is_cuda else FlashOnCPU
        attended, lse = kernel.forward(query, key, value, whole, scores)
        with_sink = torch.logaddexp(lse, sinks.detach().float().flatten())  # [s, b, h]
        scaled = torch.empty_like(query, memory_format=torch.contiguous_format)
        attended = torch.mul(attended, (lse - with_sink).exp_().to(attended.dtype).unsqueeze(-1), out=scaled)
        ctx.save_for_backward(query, key, value, sinks, attended, with_sink)
        ctx.of = kernel, whole, scores
        return attended

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, sinks, attended, lse = ctx.saved_tensors
        kernel, whole, scores = ctx.of
        gradient = gradient.contiguous()
        gradients = kernel.backward(gradient, query, key, value, attended, lse, whole, scores)
        return *gradients, gradient_of_sinks(gradient, attended, lse, sinks), None, None


def gradient_of_sinks(gradient, attended, lse, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks, from results [s, b, h, d], their gradient, and the log-sum-exp [s, b, h] with the sinks."""
    of_rows = (gradient.float() * attended.float()).sum(-1)  # [s, b, h]
    weights = (sinks.float().flatten() - lse).exp_()
    return -(weights * of_rows).sum((0, 1)).view_as(sinks).to(sinks.dtype)


def scale_weights(weights: torch.Tensor, scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Weights [..., keys], the softmax of scores over the keys, become those with sinks [...] in the softmax, in place. The
    log-sum-exp is that of the largest score and its weight.
    """
    lse = scores.amax(-1).float() - weights.amax(-1).float().log_()
    return weights.mul_(torch.sigmoid(lse - sinks.float()).to(weights.dtype).unsqueeze(-1))
