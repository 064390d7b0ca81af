# SPDX-License-Identifier: Apache-2.0
"""The parts of the layers of an encoder-decoder.

Legend: s tokens of a source, t of a target, b micro-batch, h hidden, g key-value groups, q queries per group, d channels
per head, tp ranks that divide the groups. With sequence parallelism a rank has s/tp and t/tp rows between layers.
"""

from collections.abc import Callable
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.fused_kernels import Case, choose_kernel
from megatron.model.attention import Attention, core_of
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.layer_ops import CORE
from megatron.model.mlp import MLP
from megatron.model.recompute import recompute as recomputed
from megatron.model.weights import Table, take_prefix
from megatron.mpu.context_parallel import UNSHARED
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.random import Dropout


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


class DecoderAttention(Attention):
    """Scores may be unscaled (--unscaled-attention)."""

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__(weights, setup)
        if setup.facts.own.unscaled_attention:
            self.scale = 1.0


class EncoderAttention(DecoderAttention):
    """Every query sees every key that is a token."""

    causal = False


class FeedForward(MLP):
    """The MLP with T5's activations in addition to GPT's. proj: --feed-forward-proj."""

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__(weights, setup)
        self.proj = setup.facts.own.feed_forward_proj

    def _activation(self, x: torch.Tensor) -> torch.Tensor:
        if self.swiglu or self.proj == "gelu":
            return super()._activation(x)
        if self.proj == "relu":
            return F.relu(x)
        kernel = choose_kernel("geglu", Case(x.device.type, x.dtype, unfused=self.unfused)).run
        return kernel(x, self.approximate)

    def _bias_gelu(self, x: torch.Tensor) -> Optional[Callable]:
        return super()._bias_gelu(x) if self.proj == "gelu" else None


class CrossAttention(nn.Module):
    """Cross-attention of [t, b, h] over `context.cross`, the encoder's output. weights: `t5.facts.cross_attention`."""

    causal, case = False, Attention.case

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__()
        model, tp, self.layer = setup.model, setup.tp, setup.layer
        self.head_dim, self.groups = model.head_dim, model.query_groups // tp.size
        self.scale = 1.0 if setup.facts.own.unscaled_attention else self.head_dim**-0.5
        self.queries = model.num_attention_heads // model.query_groups
        self.q = ColumnParallelLinear(take_prefix(weights, "q"), tp, **setup.linear)
        self.kv = ColumnParallelLinear(take_prefix(weights, "kv"), tp, **setup.linear)
        self.output = RowParallelLinear(take_prefix(weights, "output"), tp, **setup.linear)
        drops = dict(batch_dim=0, cut=0, axis=tp)
        self.dropout = Dropout(model.attention_dropout, "cross attention", self.layer, setup.seed, **drops)
        # Attributes of `Attention` for the core: scores may be capped; there is no divisor, no window and no sink.
        self.score_divisor, self.softmax_in_fp32 = 1.0, model.attention_softmax_in_fp32
        self.softcap, self.window, self.has_sinks = model.attn_logit_softcapping, None, False
        self.sharing, self.backend = UNSHARED, setup.kernels.attention_backend
        self.plain_softmax = not setup.kernels.masked_softmax_fusion
        self.recompute_core, self.core = CORE in setup.recompute, core_of(self.causal, setup.kernels)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        memory, context = context.cross
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
