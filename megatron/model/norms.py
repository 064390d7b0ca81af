# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm over the last dim, with fp32 arithmetic inside whatever the format of the activations."""

import torch
from torch import nn

from megatron.fused_kernels import Case, choose_kernel
from megatron.fused_kernels.autocast import op
from megatron.model.weights import Table
from megatron.mpu.layers import create_parameters


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias. weights: `model.weights.norm(...)`."""

    def __init__(self, weights: Table, epsilon: float, *, dtype=None, device=None):
        super().__init__()
        self.epsilon = epsilon
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv:1910.07467). weights: `model.weights.norm(...)`."""

    def __init__(self, weights: Table, epsilon: float, *, dtype=None, device=None):
        super().__init__()
        self.epsilon = epsilon
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon)


@op
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`reference.layer_norm` by the best kernel."""
    return choose_kernel("layer_norm", Case(x.device.type, x.dtype)).run(x, weight, bias, epsilon)


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`reference.rms_norm` by the best kernel."""
    return choose_kernel("rms_norm", Case(x.device.type, x.dtype)).run(x, weight, epsilon)


NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
