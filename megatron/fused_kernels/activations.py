# SPDX-License-Identifier: Apache-2.0
"""A gated activation that keeps its input alone. Legend: f width of the MLP."""

from typing import Optional

import torch

from megatron.fused_kernels import reference


class _SigmoidGLU(torch.autograd.Function):
    """The backward pass computes the sigmoid again, and writes both gradients where the product before needs them."""

    @staticmethod
    def forward(ctx, x, alpha, limit, offset):
        ctx.save_for_backward(x)
        ctx.of = alpha, limit, offset
        return reference.sigmoid_glu(x, alpha, limit, offset)

    @staticmethod
    def backward(ctx, gradient):
        (x,), (alpha, limit, offset) = ctx.saved_tensors, ctx.of
        d_x = torch.empty_like(x)
        (gate, value), (d_gate, d_value) = x.chunk(2, -1), d_x.chunk(2, -1)
        open_gate = open_value = None
        if limit is not None:
            open_gate, open_value = gate <= limit, value.abs() <= limit
            gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
        s = torch.sigmoid(alpha * gate)
        torch.mul(gradient, gate * s, out=d_value)
        slope = (alpha * gate).mul_(1 - s).add_(1).mul_(s)
        torch.mul(gradient * (value + offset), slope, out=d_gate)
        if limit is not None:
            d_gate.mul_(open_gate)
            d_value.mul_(open_value)
        return d_x, None, None, None


def sigmoid_glu(x: torch.Tensor, alpha: float, limit: Optional[float] = None, offset: float = 0.0) -> torch.Tensor:
    """See `reference.sigmoid_glu`."""
    return _SigmoidGLU.apply(x, alpha, limit, offset)
