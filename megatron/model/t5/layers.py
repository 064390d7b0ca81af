# SPDX-License-Identifier: Apache-2.0
"""The parts of the layers of an encoder-decoder.

Legend: s tokens of a source, t of a target, b micro-batch, h hidden, g key-value groups, q queries per group, d channels
per head, tp ranks that divide the groups. With sequence parallelism a rank has s/tp and t/tp rows between layers.
"""

from collections.abc import Callable
from typing import Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels import Case, choose_kernel
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.kinds.mlp.module import MLP
from megatron.model.weights import Table


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
