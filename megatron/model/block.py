# SPDX-License-Identifier: Apache-2.0
"""One transformer layer: attention, then MLP, each after a norm and added to the residual stream (pre-LN)."""

from typing import Optional

import torch
from torch import nn

from megatron.model.attention import Attention, ForwardContext
from megatron.model.mlp import MLP
from megatron.model.norms import NORMS
from megatron.model.recompute import recompute
from megatron.model.weights import Table, take_prefix
from megatron.mpu.context_parallel import UNSHARED, AttentionSharing
from megatron.mpu.mesh import Axis
from megatron.mpu.random import Dropout
from megatron.settings.schema import Kernels, Model


class Block(nn.Module):
    """A pre-LN layer: x + attention(norm(x)), then x + mlp(norm(x)); [s, b, h] (or [s/tp, b, h]) in and out.

    A variant is a subclass with other classes for the parts, or another `forward` (docs/extending.md).
    layer: its index in the whole network, from 0. weights: `layer_weights(...)`. recompute: the part that is recomputed
    in the backward pass; the caller handles "full". cp: ranks that share each sequence;
    sharing: how, see `Attention`.
    """

    attention_class: type[Attention] = Attention
    mlp_class: type[MLP] = MLP

    def __init__(
        self,
        model: Model,
        layer: int,
        tp: Axis,
        weights: Table,
        *,
        seed: int,
        kernels: Kernels,
        sequence_parallel: bool,
        recompute: str = "",
        cp: Optional[Axis] = None,
        sharing: AttentionSharing = UNSHARED,
        dtype: torch.dtype,
        device,
    ):
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.recompute_attention = recompute == "full_attn"
        factory_kwargs = dict(dtype=dtype, device=device)
        common = dict(sequence_parallel=sequence_parallel, **factory_kwargs)
        norm, axis = NORMS[model.normalization], tp if sequence_parallel else None
        self.attention_norm = norm(take_prefix(weights, "attention_norm"), model.norm_epsilon, **factory_kwargs)
        self.attention = self.attention_class(
            model,
            layer,
            tp,
            take_prefix(weights, "attention"),
            seed=seed,
            kernels=kernels,
            recompute_core=recompute == "core_attn",
            sharing=sharing,
            gather_again=not recompute and not kernels.torch_compile,
            **common,
        )
        self.attention_dropout = Dropout(model.hidden_dropout, "after attention", layer, seed, axis=axis, cp=cp)
        self.mlp_norm = norm(take_prefix(weights, "mlp_norm"), model.norm_epsilon, **factory_kwargs)
        self.mlp = self.mlp_class(model, tp, take_prefix(weights, "mlp"), **common)
        self.mlp_dropout = Dropout(model.hidden_dropout, "after mlp", layer, seed, axis=axis, cp=cp)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        attended = self._attended(x, context)
        if self.attention_dropout.idle:
            x, normal = self.mlp_norm(x, attended)
        else:
            x = self.attention_dropout.add(x, attended, context.samples)
            normal = self.mlp_norm(x)
        return self.mlp_dropout.add(x, self.mlp(normal), context.samples)

    def attention_part(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """dropout(attention(norm(x))), for variants with another sum"""
        return self.attention_dropout(self._attended(x, context), context.samples)

    def mlp_part(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """dropout(mlp(norm(x))), for variants"""
        return self.mlp_dropout(self.mlp(self.mlp_norm(x)), context.samples)

    def _attended(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if self.recompute_attention:
            return recompute(self._attention_half, x, context, inside=context.region, of=(self,))
        return self._attention_half(x, context)

    def _attention_half(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.attention(self.attention_norm(x), context)
