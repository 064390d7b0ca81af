# SPDX-License-Identifier: Apache-2.0
"""The MLP of a block: GeLU, squared ReLU (arXiv:2109.08668) or gated SiLU (SwiGLU, arXiv:2002.05202)."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron.fused_kernels import Case, choose_kernel, reference
from megatron.model.weights import Table, take_prefix
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.mesh import Axis
from megatron.settings.schema import Model


class MLP(nn.Module):
    """[s, b, h] -> [s, b, h] through a hidden layer of width `ffn_size`, divided over tp.

    weights: `model.weights.mlp(...)`. unfused: activations by torch's ops (--no-bias-swiglu-fusion).
    """

    fusion, unfused = "bias_swiglu_fusion", False

    def __init__(self, model: Model, tp: Axis, weights: Table, **common):
        super().__init__()
        self.gated, self.squared = model.swiglu, model.squared_relu
        self.approximate = "tanh" if model.bias_gelu_fusion else "none"
        self.up = ColumnParallelLinear(take_prefix(weights, "up"), tp, **common)
        self.down = RowParallelLinear(take_prefix(weights, "down"), tp, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activated(x))

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, ffn/tp]."""
        if self.gated:
            x = self.up(x)  # [s, b, 2 ffn/tp]
            return choose_kernel("swiglu", Case(x.device.type, x.dtype, unfused=self.unfused)).run(x)
        if self.squared:
            return F.relu(self.up(x)).square()
        if self.approximate == "tanh" and self.up.bias is not None:
            kernel = choose_kernel("bias_gelu", Case(x.device.type, x.dtype)).run
            if kernel is not reference.bias_gelu:  # the reference: the product adds the bias at no cost
                return kernel(self.up(x, add_bias=False), self.up.bias)
        return reference.gelu(self.up(x), self.approximate)
