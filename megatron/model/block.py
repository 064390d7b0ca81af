# SPDX-License-Identifier: Apache-2.0
"""One layer of the network: attention, then MLP, each behind a norm and added to the residual stream (pre-LN)."""

import math

import torch
from torch import nn

from megatron.model import recompute
from megatron.model.attention import Attention, Context
from megatron.model.mlp import MLP
from megatron.model.norms import NORMS
from megatron.mpu.mesh import Axis
from megatron.mpu.random import Dropout
from megatron.settings.schema import Kernels, Model


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); [s, b, h] (or [s/tp, b, h]) in and out.

    layer: its place in the whole network, from 0. again: what is computed again in the backward pass; "full" is up to
    the caller.
    """

    def __init__(
        self,
        model: Model,
        layer: int,
        tp: Axis,
        *,
        seed: int,
        kernels: Kernels,
        sequence_parallel: bool,
        again: str = "",
        dtype: torch.dtype,
        device,
    ):
        super().__init__()
        self.attention_again = again == "full_attn"
        common = dict(sequence_parallel=sequence_parallel, dtype=dtype, device=device)
        # Layers that write to the residual stream start smaller, so that its variance does not grow with depth.
        output_std = model.init_method_std / math.sqrt(2 * model.num_layers)
        norm, partial = NORMS[model.normalization], ("tp",) if sequence_parallel else ()
        axis = tp if sequence_parallel else None
        self.attention_norm = norm(model.hidden_size, model.norm_epsilon, partial, dtype=dtype, device=device)
        self.attention = Attention(
            model, layer, tp, output_std, seed=seed, kernels=kernels, again=again == "core_attn", **common
        )
        self.attention_dropout = Dropout(model.hidden_dropout, "after attention", layer, seed, axis=axis)
        self.mlp_norm = norm(model.hidden_size, model.norm_epsilon, partial, dtype=dtype, device=device)
        self.mlp = MLP(model, tp, output_std, **common)
        self.mlp_dropout = Dropout(model.hidden_dropout, "after mlp", layer, seed, axis=axis)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.attention_again:
            attended = recompute.again(self._attention_half, x, context, inside=context.region)
        else:
            attended = self._attention_half(x, context)
        x = x + self.attention_dropout(attended, context.samples)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), context.samples)

    def _attention_half(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return self.attention(self.attention_norm(x), context)
