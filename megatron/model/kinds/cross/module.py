# SPDX-License-Identifier: Apache-2.0
"""Attention over another sequence.

Legend: t tokens of the layer's sequence, s of the other one, b micro-batch, h hidden, g key-value groups, d channels per
head, tp ranks that divide the groups.
"""

import torch

from megatron.model.attention import BidirectionalAttention
from megatron.model.context import ForwardContext


class CrossAttention(BidirectionalAttention):
    """Attention of [t, b, h] over `context.cross`, the states [s, b, h] of another sequence. weights: `cross_attention(...)`."""

    inputs, site = ("q", "kv"), "cross attention"

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        memory, context = context.cross
        query = self.q(x)
        query = query.view(*query.shape[:2], self.groups, self.queries, self.head_dim)
        return self.output(self.attended(query, *self.keys_and_values(memory, context), context))

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
