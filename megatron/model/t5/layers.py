# SPDX-License-Identifier: Apache-2.0
"""The layers of an encoder-decoder, and the inputs that they share.

Legend: s tokens of a source, t of a target, b micro-batch, h hidden, g key-value groups, q queries per group, d channels
per head, tp ranks that divide the groups. With sequence parallelism a rank has s/tp and t/tp rows between layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.fused_kernels import Case, choose_kernel
from megatron.model.attention import Attention, ForwardContext, core_of
from megatron.model.block import Block
from megatron.model.mlp import MLP
from megatron.model.norms import NORMS
from megatron.model.packed_rows import PackedRows
from megatron.model.recompute import recompute as recomputed
from megatron.model.t5.facts import ENCODER_END, T5Facts
from megatron.model.weights import Table, take_prefix
from megatron.mpu.context_parallel import UNSHARED
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.mesh import Axis
from megatron.mpu.random import Dropout
from megatron.settings.schema import Kernels


@dataclass(frozen=True)
class T5Context:
    """The shared inputs of all layers of a pass: for the encoder's attention, the decoder's own, and cross-attention.

    rows: the rows of the source that the encoder's layers compute; None: all
    """

    encoder: ForwardContext
    decoder: ForwardContext
    cross: ForwardContext
    rows: Optional[PackedRows] = None


class DecoderCache:
    """The keys and values of up to `capacity` tokens of each of `batch` targets, and of their sources, by layer.

    Layers fill it, and `decode` advances `length`.
    """

    def __init__(self, capacity: int, batch: int):
        self.capacity, self.batch, self.length = capacity, batch, 0
        self.own: dict[int, list[torch.Tensor]] = {}  # keys and values [capacity, b, g/tp, d]
        self.cross: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer, query, key, value, context: ForwardContext) -> torch.Tensor:
        """See `model.cache.Cache`."""
        return layer.core(query, *self.extend(layer.layer, key, value), layer, context)

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Add keys and values [t, b, g/tp, d] of a layer; returns those of all tokens, [length + t, b, g/tp, d]."""
        end = self.length + key.shape[0]
        assert end <= self.capacity and key.shape[1] == self.batch, (
            f"cache of {self.capacity} x {self.batch} is too small"
        )
        if layer not in self.own:
            self.own[layer] = [new.new_empty((self.capacity, *new.shape[1:])) for new in (key, value)]
        for stored, new in zip(self.own[layer], (key, value), strict=True):
            stored[self.length : end] = new
        return tuple(stored[:end] for stored in self.own[layer])

    def reorder(self, order: torch.Tensor) -> None:
        """Target n continues from the cache of target order[n]."""
        for both in self.own.values():
            for stored in both:
                stored[: self.length] = stored[: self.length, order]


class EncoderAttention(Attention):
    """Every query sees every key that is a token."""

    causal = False


class FeedForward(MLP):
    """The MLP with T5's activations in addition to GPT's. proj: --feed-forward-proj."""

    proj = "gelu"

    def _activation(self, x: torch.Tensor) -> torch.Tensor:
        if self.swiglu or self.proj == "gelu":
            return super()._activation(x)
        if self.proj == "relu":
            return F.relu(x)
        kernel = choose_kernel("geglu", Case(x.device.type, x.dtype, unfused=self.unfused)).run
        return kernel(x, self.approximate)

    def _bias_gelu(self, x: torch.Tensor) -> Optional[Callable]:
        return super()._bias_gelu(x) if self.proj == "gelu" else None


class EncoderBlock(Block):
    """A layer of the encoder; the last one includes the encoder's final norm. facts: of the model."""

    attention_class, mlp_class = EncoderAttention, FeedForward

    def __init__(self, facts: T5Facts, layer: int, tp: Axis, weights: Table, **keywords):
        super().__init__(facts.settings, layer, tp, weights, **keywords)
        self.mlp.proj = facts.own.feed_forward_proj
        if facts.own.unscaled_attention:
            self.attention.scale = 1.0
        self.encoder_norm = None
        if facts.layer_kind(layer) == ENCODER_END:
            kind, model = NORMS[facts.settings.normalization], facts.settings
            factory_kwargs = dict(dtype=keywords["dtype"], device=keywords["device"])
            self.encoder_norm = kind(take_prefix(weights, "encoder_norm"), model.norm_epsilon, **factory_kwargs)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x = super().forward(x, context)
        return x if self.encoder_norm is None else self.encoder_norm(x)


class CrossAttention(nn.Module):
    """Cross-attention of [t, b, h] over the encoder's output [s, b, h]. weights: `t5.facts.cross_attention(...)`."""

    causal, case = False, Attention.case

    def __init__(self, facts: T5Facts, layer: int, tp: Axis, weights: Table, *, seed: int, kernels: Kernels, **common):
        super().__init__()
        model = facts.settings
        self.layer, self.head_dim, self.groups = layer, model.head_dim, model.query_groups // tp.size
        self.scale = 1.0 if facts.own.unscaled_attention else self.head_dim**-0.5
        self.queries = model.num_attention_heads // model.query_groups
        self.q = ColumnParallelLinear(take_prefix(weights, "q"), tp, **common)
        self.kv = ColumnParallelLinear(take_prefix(weights, "kv"), tp, **common)
        self.output = RowParallelLinear(take_prefix(weights, "output"), tp, **common)
        self.dropout = Dropout(model.attention_dropout, "cross attention", layer, seed, batch_dim=0, cut=0, axis=tp)
        # Attributes of `Attention` for the core: scores may be capped; there is no divisor, no window and no sink.
        self.score_divisor, self.softmax_in_fp32 = 1.0, model.attention_softmax_in_fp32
        self.softcap, self.window, self.has_sinks = model.attn_logit_softcapping, None, False
        self.sharing = UNSHARED
        self.backend, self.plain_softmax = kernels.attention_backend, not kernels.masked_softmax_fusion
        self.recompute_core, self.core = False, core_of(self.causal, kernels)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        query = self.q(x)
        query = query.view(*query.shape[:2], self.groups, self.queries, self.head_dim)
        key, value = self.keys_and_values(memory, context)
        if self.recompute_core:
            attended = recomputed(self.core, query, key, value, self, context, inside=context.region, of=(self,))
        else:
            attended = self.core(query, key, value, self, context)
        return self.output(attended)

    def keys_and_values(self, memory: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """[s, b, g/tp, d] each. Generation computes them once and keeps them in the cache."""
        cache = context.cache
        if cache is not None and self.layer in cache.cross:
            return cache.cross[self.layer]
        both = self.kv(memory)
        both = both.view(*both.shape[:2], self.groups, 2, self.head_dim)
        key_value = both.unbind(3)
        if cache is not None:
            cache.cross[self.layer] = key_value
        return key_value


class DecoderBlock(Block):
    """A layer of the decoder: causal attention, cross-attention and MLP, each after a norm. facts: of the model."""

    mlp_class = FeedForward

    def __init__(self, facts: T5Facts, layer: int, tp: Axis, weights: Table, **keywords):
        model = facts.settings
        super().__init__(model, layer, tp, weights, **keywords)
        self.mlp.proj = facts.own.feed_forward_proj
        if facts.own.unscaled_attention:
            self.attention.scale = 1.0
        factory_kwargs = dict(dtype=keywords["dtype"], device=keywords["device"])
        kind, sp = NORMS[model.normalization], keywords["sequence_parallel"]
        self.cross_norm = kind(take_prefix(weights, "cross_norm"), model.norm_epsilon, **factory_kwargs)
        more = dict(seed=keywords["seed"], kernels=keywords["kernels"], sequence_parallel=sp)
        self.cross = CrossAttention(facts, layer, tp, take_prefix(weights, "cross"), **more, **factory_kwargs)
        self.cross.recompute_core = "core_attn" in keywords.get("recompute", ())
        axis = tp if sp else None
        self.cross_dropout = Dropout(model.hidden_dropout, "after cross attention", layer, keywords["seed"], axis=axis)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, context: T5Context) -> torch.Tensor:
        own = context.decoder
        x = self.attention_dropout.add(x, self._attended(x, own), own.samples)
        if self.recompute_attention:
            attended = recomputed(self._cross_half, x, memory, context.cross, inside=own.region, of=(self,))
        else:
            attended = self._cross_half(x, memory, context.cross)
        x, (branch, _) = self._mlp_after(x, attended, self.cross_dropout, own)
        return self.mlp_dropout.add(x, branch, own.samples)

    def _cross_half(self, x: torch.Tensor, memory: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        normal, reading = self._normal(self.cross_norm, x, context)
        with reading:
            return self.cross(normal, memory, context)
