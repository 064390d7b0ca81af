# SPDX-License-Identifier: Apache-2.0
"""The MLP of a layer: GeLU, squared ReLU (arXiv:2109.08668), or a gate with SiLU or GeLU (SwiGLU, GeGLU, arXiv:2002.05202),
whose parts may be clamped.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.errors import SettingsError
from megatron.fused_kernels import Case, choose_kernel, cpu_ops, reference
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.layer_ops import ACTIVATION
from megatron.model.layer_ops import MLP as WHOLE
from megatron.model.recompute import recompute_output
from megatron.model.weights import Table, take_prefix
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear


class Activation(nn.Module):
    """The activation between two linear layers: GeLU, squared ReLU, or a gate.

    unfused: by torch's ops (--no-bias-swiglu-fusion). recompute_activation: whether its output is discarded; region:
    see `ForwardContext`.
    """

    fusion, unfused = "bias_swiglu_fusion", False
    recompute_activation, region = False, nullcontext
    by_width = staticmethod(lambda activation: activation)  # set by `ordered.attach_ordered`

    def __init__(self, setup: LayerSetup):
        super().__init__()
        model, self.recompute_activation = setup.model, ACTIVATION in setup.recompute and WHOLE not in setup.recompute
        self.swiglu, self.geglu, self.squared = model.swiglu, model.geglu, model.squared_relu
        self.approximate = "tanh" if model.bias_gelu_fusion else "none"
        self.sigmoid_gate, self.gated = model.sigmoid_gate, model.gated

    @property
    def is_gelu(self) -> bool:
        """Whether the activation is GeLU, without a gate."""
        own = type(self)._activation is not Activation._activation  # a variant's
        return not (self.gated or self.squared or own)

    def _activation(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of the output of `up`, [s, b, ffn/tp]."""
        if self.sigmoid_gate:
            run = choose_kernel("sigmoid_glu", Case(x.device.type, x.dtype, unfused=self.unfused)).run
            return run(x, *self.sigmoid_gate)
        if self.swiglu:
            return choose_kernel("swiglu", Case(x.device.type, x.dtype, unfused=self.unfused)).run(x)
        if self.geglu:
            return choose_kernel("geglu", Case(x.device.type, x.dtype, unfused=self.unfused)).run(x, self.approximate)
        if self.squared:
            return F.relu(x).square()
        return choose_kernel("gelu", Case(x.device.type, x.dtype)).run(x, self.approximate)


class MLP(Activation):
    """[s, b, h] -> [s, b, h] through a hidden layer of width `ffn_size`, divided over tp.

    weights: `kinds.mlp.kind.mlp(...)`
    """

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__(setup)
        if self.recompute_activation and type(self).forward is not MLP.forward:
            raise SettingsError(
                f"--recompute-modules mlp_act: {type(self).__name__} has its own forward function",
                "only that of MLP recomputes its activation",
                "say mlp, which recomputes all of it",
            )
        self.up = ColumnParallelLinear(take_prefix(weights, "up"), setup.tp, **setup.linear)
        self.down = RowParallelLinear(take_prefix(weights, "down"), setup.tp, **setup.linear)

    def forward(self, x: torch.Tensor, context: Optional[ForwardContext] = None) -> torch.Tensor:
        if self.up.reads_packed(x) and self.is_gelu:
            return self.down(cpu_ops.onednn_gelu(x, self.up.packed, self.up.bias, self.approximate))
        adds_bias = self._bias_gelu(x)
        activation = partial(adds_bias, bias=self.up.bias) if adds_bias else self.by_width(self._activation)
        x = self.up(x, add_bias=not adds_bias)  # [s, b, ffn/tp], twice as wide with a gate
        if not self.recompute_activation:
            return self.down(activation(x))
        x, reading = recompute_output(activation, x, inside=self.region, of=(self,))
        with reading:
            return self.down(x)

    def _bias_gelu(self, x: torch.Tensor) -> Optional[Callable]:
        """A kernel that adds the bias of `up` before GeLU; None: the product adds it, at no cost."""
        if self.gated or self.squared or self.approximate != "tanh" or self.up.bias is None:
            return None
        kernel = choose_kernel("bias_gelu", Case(x.device.type, x.dtype)).run
        return None if kernel is reference.bias_gelu else kernel
