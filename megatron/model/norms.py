# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm over the last dim, computed in fp32 for any activation format.

With a second argument, a norm adds it to x and returns (sum, normalized sum), in one kernel if there is one.
unfused: only torch's kernels (--no-persist-layer-norm).
"""

from functools import partial
from typing import Optional

import torch
from torch import nn

from megatron.fused_kernels import Case, choose_kernel
from megatron.fused_kernels.autocast import op
from megatron.model.weights import Table
from megatron.mpu.collectives import all_reduce
from megatron.mpu.layers import create_parameters
from megatron.mpu.mesh import Axis


class Norm(nn.Module):
    """A norm over the last dim. weights: `model.weights.norm(...)`."""

    fusion, unfused = "persist_layer_norm", False
    in_blocks = staticmethod(lambda norm: norm)  # set by `ordered.attach_ordered`
    groups = 0  # of heads on this rank, in x [s, b, g/tp, ...]; 0: its rows have no heads

    def __init__(self, weights: Table, epsilon: float, *, dtype=None, device=None):
        super().__init__()
        self.epsilon = epsilon
        create_parameters(self, weights, None, dtype=dtype, device=device)


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias."""

    def forward(self, x: torch.Tensor, branch: Optional[torch.Tensor] = None):
        norm = self.in_blocks(partial(layer_norm, unfused=self.unfused))
        if branch is None:
            return norm(x, self.weight, self.bias, self.epsilon)
        added = choose_kernel("add_layer_norm", Case(x.device.type, x.dtype, unfused=self.unfused)).run
        return added(x, branch, self.weight, self.bias, self.epsilon, norm)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv:1910.07467)."""

    def forward(self, x: torch.Tensor, branch: Optional[torch.Tensor] = None):
        norm = self.in_blocks(partial(rms_norm, unfused=self.unfused))
        if branch is None:
            return norm(x, self.weight, self.epsilon)
        added = choose_kernel("add_rms_norm", Case(x.device.type, x.dtype, unfused=self.unfused)).run
        return added(x, branch, self.weight, self.epsilon, norm)


class RMSNormAcrossHeads(nn.Module):
    """RMSNorm over all heads of queries or keys, [s, b, g/tp, n, d]: each rank of tp has some of them.

    weights: the placement of the weight [g, n, d].
    """

    groups = 0
    sums = None  # over heads, and over tokens, of one order (`ordered.HeadSums`); set by `ordered.attach_ordered`

    def __init__(self, tp: Axis, weights: Table, epsilon: float, *, dtype=None, device=None):
        super().__init__()
        self.tp, self.epsilon = tp, epsilon
        create_parameters(self, weights, tp, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNormAcrossHeads.apply(x, self.weight, self.epsilon, self.tp, self.sums)


class _RMSNormAcrossHeads(torch.autograd.Function):
    """Saves x and a number per token."""

    @staticmethod
    def forward(ctx, x, weight, epsilon, tp, sums):
        if sums is None:
            squares = torch.linalg.vector_norm(x, dim=(2, 3, 4), keepdim=True, dtype=torch.float32).square_()
        else:
            squares = sums.over_heads(x.float().square())
        ctx.width, ctx.tp, ctx.sums = x[0, 0].numel() * tp.size, tp, sums
        inverse = all_reduce(squares, tp).div_(ctx.width).add_(epsilon).rsqrt_()  # [s, b, 1, 1, 1]
        ctx.save_for_backward(x, weight, inverse)
        return (x.float() * inverse * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        """With r = inverse: d_x = r (g w - x r^2 mean(g w x)), d_weight = sum over tokens of r g x."""
        x, weight, inverse = ctx.saved_tensors
        gradient, x = gradient.float(), x.float()
        scaled = gradient * weight.float()
        total = (lambda x: x.sum((2, 3, 4), keepdim=True)) if ctx.sums is None else ctx.sums.over_heads
        mean = all_reduce(total(scaled * x), ctx.tp).div_(ctx.width)
        d_x = (scaled - x * (inverse.square() * mean)).mul_(inverse)
        d_weight = (gradient * x).mul_(inverse)
        d_weight = d_weight.sum((0, 1)) if ctx.sums is None else ctx.sums.over_tokens(d_weight.flatten(0, 1))
        return d_x.to(ctx.saved_tensors[0].dtype), d_weight.to(weight.dtype), None, None, None


@op
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, unfused: bool = False
) -> torch.Tensor:
    """`reference.layer_norm` by the best kernel."""
    return choose_kernel("layer_norm", Case(x.device.type, x.dtype, unfused=unfused)).run(x, weight, bias, epsilon)


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, unfused: bool = False) -> torch.Tensor:
    """`reference.rms_norm` by the best kernel."""
    return choose_kernel("rms_norm", Case(x.device.type, x.dtype, unfused=unfused)).run(x, weight, epsilon)


NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
