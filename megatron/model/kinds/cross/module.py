# SPDX-License-Identifier: Apache-2.0
"""Attention over the states of another sequence."""

import torch

from megatron.model.context import ForwardContext
from megatron.model.kinds.attention.module import BidirectionalAttention


class CrossAttention(BidirectionalAttention):
    """Attention over `context.cross`, the states [t, b, h] of another sequence."""

    inputs, site = ("q", "kv"), "cross attention"

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        memory, context = context.cross
        query = self.q(x)
        query = query.view(*query.shape[:2], self.groups, self.queries, self.head_dim)
        return self.output(self.attended(query, *self.keys_and_values(memory, context), context))

    def keys_and_values(self, memory: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """[t, b, g/tp, d] each. Generation computes them once and keeps them in the cache."""
        cache = context.cache
        if cache is not None and self.layer in cache.cross:
            return cache.cross[self.layer]
        both = self.kv(memory)
        both = both.view(*both.shape[:2], self.groups, 2, self.head_dim)
        key_value = both.unbind(3)
        if cache is not None:
            cache.cross[self.layer] = key_value
        return key_value
