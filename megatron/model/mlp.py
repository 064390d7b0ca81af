# SPDX-License-Identifier: Apache-2.0
"""The feed-forward half of a block: GeLU, squared ReLU (arXiv:2109.08668) or gated SiLU (SwiGLU, arXiv:2002.05202)."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.weights import Table, take_prefix
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.mesh import Axis
from megatron.settings.schema import Model


class MLP(nn.Module):
    """[s, b, h] -> [s, b, h] through a width of `ffn_size`, divided over tp.

    weights: `model.weights.mlp(...)`
    """

    def __init__(self, model: Model, tp: Axis, weights: Table, **common):
        super().__init__()
        self.gated, self.squared = model.swiglu, model.squared_relu
        self.approximate = "tanh" if model.bias_gelu_fusion else "none"
        self.up = ColumnParallelLinear(take_prefix(weights, "up"), tp, **common)
        self.down = RowParallelLinear(take_prefix(weights, "down"), tp, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)  # [s, b, ffn/tp] or [s, b, 2 ffn/tp]
        if self.gated:
            gate, value = x.chunk(2, -1)
            return self.down(F.silu(gate) * value)
        if self.squared:
            return self.down(F.relu(x).square())
        return self.down(F.gelu(x, approximate=self.approximate))
