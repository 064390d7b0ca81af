# SPDX-License-Identifier: Apache-2.0
"""Fast implementations of gated activations on CPUs. Legend: f width of a gate."""

import torch
import torch.nn.functional as F


def geglu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """`reference.geglu`, but the gradients of gates and values are written into the halves of one tensor."""
    return _GeGLU.apply(x, approximate)


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, approximate):
        gate, value = x.chunk(2, -1)
        activated = F.gelu(gate, approximate=approximate)
        ctx.save_for_backward(x, activated)
        ctx.approximate = approximate
        return activated * value

    @staticmethod
    def backward(ctx, gradient):
        x, activated = ctx.saved_tensors
        gate, value = x.chunk(2, -1)
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        d_gate, d_value = d_x.chunk(2, -1)
        torch.mul(gradient, activated, out=d_value)
        torch.mul(gradient, value, out=d_gate)
        torch.ops.aten.gelu_backward.grad_input(d_gate, gate, approximate=ctx.approximate, grad_input=d_gate)
        return d_x, None
