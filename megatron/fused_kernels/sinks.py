# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks: in the softmax each head has one more logit, of a key without a value (arXiv:2309.17453).

A sink changes only the sum that weights are divided by. So a result over the keys alone becomes that with the sink if it
is multiplied by the share of the keys in the softmax, sigmoid(log sum exp of scores - sink). Kernels that return the
log-sum-exp need nothing else, and their backward pass takes the one that includes the sink (`partial_attention`).

Legend: s queries, t keys, b samples, g key-value heads, q queries per group, h = g q heads, d channels per head. Sinks are
[g, q].
"""

import torch


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
