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
from megatron.mpu.layers import create_parameters


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias. weights: `model.weights.norm(...)`."""

    fusion, unfused = "persist_layer_norm", False

    def __init__(self, weights: Table, epsilon: float, *, dtype=None, device=None):
        super().__init__()
        self.epsilon = epsilon
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, branch: Optional[torch.Tensor] = None):
        norm = partial(layer_norm, unfused=self.unfused)
        if branch is None:
            return norm(x, self.weight, self.bias, self.epsilon)
        added = choose_kernel("add_layer_norm", Case(x.device.type, x.dtype, unfused=self.unfused)).run
        return added(x, branch, self.weight, self.bias, self.epsilon, norm)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv:1910.07467). weights: `model.weights.norm(...)`."""

    fusion, unfused = "persist_layer_norm", False

    def __init__(self, weights: Table, epsilon: float, *, dtype=None, device=None):
        super().__init__()
        self.epsilon = epsilon
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, branch: Optional[torch.Tensor] = None):
        norm = partial(rms_norm, unfused=self.unfused)
        if branch is None:
            return norm(x, self.weight, self.epsilon)
        added = choose_kernel("add_rms_norm", Case(x.device.type, x.dtype, unfused=self.unfused)).run
        return added(x, branch, self.weight, self.epsilon, norm)


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
