# SPDX-License-Identifier: Apache-2.0
"""One transformer layer: attention, then MLP or experts, each with a norm before it, after it or both, and a sum with its
input.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Optional

import torch
from torch import nn

from megatron.errors import SettingsError
from megatron.model.attention import Attention, ForwardContext
from megatron.model.experts.layer import MoELayer
from megatron.model.mlp import MLP
from megatron.model.norms import NORMS
from megatron.model.recompute import recompute, recompute_output
from megatron.model.weights import Table, take_prefix
from megatron.mpu.context_parallel import UNSHARED, AttentionSharing
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.random import Dropout
from megatron.settings.schema import Kernels, Model


class Block(nn.Module):
    """A layer: x + attention(norm(x)), then x + mlp(norm(x)); [s, b, h] (or [s/tp, b, h]) in and out.

    It has those of its four norms that `weights` has: attention_norm and mlp_norm before the branches, post_attention_norm
    and post_mlp_norm after them, before the sum (--norm-position).

    With experts (--num-experts) it returns their sums, too: (x, {name: sum}).

    A variant is a subclass with other classes for the parts, or another `forward` (docs/extending.md).
    layer: its index in the whole network, from 0. weights: `layer_weights(...)`. recompute: the parts that are recomputed
    in the backward pass; the caller handles "full". cp: ranks that share each sequence;
    sharing: how, see `Attention`. mesh: the ranks of its experts.
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
        recompute: tuple[str, ...] = (),
        cp: Optional[Axis] = None,
        sharing: AttentionSharing = UNSHARED,
        mesh: Optional[Mesh] = None,
        dtype: torch.dtype,
        device,
    ):
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.recompute_attention, self.recompute_norms = "full_attn" in recompute, "layernorm" in recompute
        self.recompute_mlp = "mlp" in recompute
        factory_kwargs = dict(dtype=dtype, device=device)
        common = dict(sequence_parallel=sequence_parallel, **factory_kwargs)
        axis = tp if sequence_parallel else None

        def norm(name: str) -> Optional[nn.Module]:
            table = take_prefix(weights, name)
            return NORMS[model.normalization](table, model.norm_epsilon, **factory_kwargs) if table else None

        self.attention_norm = norm("attention_norm")
        self.attention = self.attention_class(
            model,
            layer,
            tp,
            take_prefix(weights, "attention"),
            seed=seed,
            kernels=kernels,
            recompute_core="core_attn" in recompute,
            sharing=sharing,
            gather_again=not {"core_attn", "full_attn", "full"}.intersection(recompute) and not kernels.torch_compile,
            **common,
        )
        self.post_attention_norm = norm("post_attention_norm")
        self.attention_dropout = Dropout(model.hidden_dropout, "after attention", layer, seed, axis=axis, cp=cp)
        self.mlp_norm = norm("mlp_norm")
        mlp_weights = take_prefix(weights, "mlp")
        if model.has_experts(layer):
            self._check_variant()
            moe = dict(seed=seed, compiled=bool(kernels.torch_compile))
            self.mlp = MoELayer(model, layer, mesh, mlp_weights, **moe, **common)
        else:
            self.mlp = self.mlp_class(model, tp, mlp_weights, **common)
        if "mlp_act" in recompute and not self.recompute_mlp:
            self._recompute_activation()
        self.post_mlp_norm = norm("post_mlp_norm")
        self.mlp_dropout = Dropout(model.hidden_dropout, "after mlp", layer, seed, axis=axis, cp=cp)

    def forward(self, x: torch.Tensor, context: ForwardContext):
        attended = self._attended(x, context)
        x, (branch, sums) = self._mlp_after(x, attended, self.attention_dropout, context)
        x = self.mlp_dropout.add(x, branch, context.samples)
        return (x, sums) if sums else x

    def attention_part(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """dropout(attention(norm(x))), for variants with another sum"""
        return self.attention_dropout(self._attended(x, context), context.samples)

    def mlp_part(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """dropout(mlp(norm(x))), for variants"""
        return self.mlp_dropout(self._mlp_half(x, context)[0], context.samples)

    def _check_variant(self) -> None:
        if type(self).forward is not Block.forward or self.mlp_class is not MLP:
            raise SettingsError(
                f"--num-experts: {type(self).__name__} has its own forward function or MLP",
                "experts take the place of the MLP in the forward function of Block, and return sums",
                "leave out --num-experts, or see docs/extending.md#experts",
            )

    def _recompute_activation(self) -> None:
        parts = (self.mlp.experts, self.mlp.shared) if isinstance(self.mlp, MoELayer) else (self.mlp,)
        for part in filter(None, parts):
            if isinstance(part, MLP) and type(part).forward is not MLP.forward:
                raise SettingsError(
                    f"--recompute-modules mlp_act: {type(part).__name__} has its own forward function",
                    "only that of MLP recomputes its activation",
                    "say mlp, which recomputes all of it",
                )
            part.recompute_activation = True

    def _attended(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if self.recompute_attention:
            return recompute(self._attention_half, x, context, inside=context.region, of=(self,))
        return self._attention_half(x, context)

    def _attention_half(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        normal, reading = self._normal(self.attention_norm, x, context)
        with reading:
            attended = self.attention(normal, context)
        return attended if self.post_attention_norm is None else self.post_attention_norm(attended)

    def _mlp_after(self, x: torch.Tensor, attended: torch.Tensor, dropout: Dropout, context: ForwardContext):
        """(x + dropout(attended), `_mlp` of its norm); the sum and its norm in one kernel if there is one."""
        if dropout.idle and not self.recompute_norms and self.mlp_norm is not None:
            x, normal = self.mlp_norm(x, attended)
            return x, self._mlp(normal, context)
        x = dropout.add(x, attended, context.samples)
        return x, self._mlp_half(x, context)

    def _mlp_half(self, x: torch.Tensor, context: ForwardContext):
        normal, reading = self._normal(self.mlp_norm, x, context)
        with reading:
            return self._mlp(normal, context)

    def _mlp(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """MLP or experts, and the norm after them; and their sums."""
        args, sums = (x, context) if isinstance(self.mlp, MoELayer) else (x,), {}
        if self.recompute_mlp:
            x = recompute(self.mlp, *args, inside=context.region, of=(self.mlp,))
        else:
            x = self.mlp(*args)
        if isinstance(x, tuple):
            x, sums = x
        return x if self.post_mlp_norm is None else self.post_mlp_norm(x), sums

    def _normal(
        self, norm: Optional[nn.Module], x: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, AbstractContextManager]:
        """norm(x), or x without a norm, and a context for the branch that reads it."""
        if norm is None:
            return x, nullcontext()
        if self.recompute_norms:
            return recompute_output(norm, x, inside=context.region, of=(norm,))
        return norm(x), nullcontext()
