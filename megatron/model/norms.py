# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm over the last dim, with fp32 arithmetic inside whatever the format of the activations."""

import torch
from torch import nn

from megatron.fused_kernels import Case, choose
from megatron.fused_kernels.autocast import op
from megatron.mpu.placement import Constant, Placement


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias.

    `partial`: axes over which the gradient is a partial sum, because each of their ranks sees a part of the tokens
    (sequence parallelism) or of the heads (query-key norm).
    """

    def __init__(self, width: int, epsilon: float, partial: tuple[str, ...] = (), *, dtype=None, device=None):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.placements = {
            "weight": Placement((width,), Constant(1.0), partial=partial, decay=False),
            "bias": Placement((width,), Constant(0.0), partial=partial, decay=False),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv:1910.07467)."""

    def __init__(self, width: int, epsilon: float, partial: tuple[str, ...] = (), *, dtype=None, device=None):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.placements = {"weight": Placement((width,), Constant(1.0), partial=partial, decay=False)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon)


@op
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`reference.layer_norm` by the best kernel."""
    return choose("layer_norm", Case(x.device.type, x.dtype)).run(x, weight, bias, epsilon)


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`reference.rms_norm` by the best kernel."""
    return choose("rms_norm", Case(x.device.type, x.dtype)).run(x, weight, epsilon)


NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
