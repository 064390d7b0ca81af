# SPDX-License-Identifier: Apache-2.0
"""The feed-forward half of a block: GeLU, or gated SiLU (SwiGLU, arXiv:2002.05202)."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.mesh import Axis
from megatron.settings.schema import Model


class MLP(nn.Module):
    """[s, b, h] -> [s, b, h] through a width of `ffn_size`, divided over tp.

    With --swiglu the two input matrices are one parameter [2, ffn, h]: gate first, then values.
    """

    def __init__(self, model: Model, tp: Axis, output_std: float, **common):
        super().__init__()
        self.gated = model.swiglu
        self.approximate = "tanh" if model.bias_gelu_fusion else "none"
        rows, cut = ((2, model.ffn_size), 1) if self.gated else ((model.ffn_size,), 0)
        common |= dict(bias=not model.disable_bias_linear)
        self.up = ColumnParallelLinear(model.hidden_size, rows, tp, cut=cut, std=model.init_method_std, **common)
        self.down = RowParallelLinear(model.ffn_size, model.hidden_size, tp, std=output_std, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)  # [s, b, ffn/tp] or [s, b, 2 ffn/tp]
        if self.gated:
            gate, value = x.chunk(2, -1)
            return self.down(F.silu(gate) * value)
        return self.down(F.gelu(x, approximate=self.approximate))
