# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (arXiv:2412.19437, section 2.2): depths after the network that predict tokens further ahead.

Depth k (from 1) reads, at each position, the hidden states of depth k - 1 (of the network after its final norm for depth 1)
and the embedding of the token k places later: norms of both, one matrix, a layer, a norm. The output layer, which all
depths share, then scores the token k + 1 places later.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from megatron.model.context import ForwardContext
from megatron.model.facts import Facts
from megatron.model.layer import Sums, added
from megatron.model.layer_ops import LAYER
from megatron.model.norms import NORMS
from megatron.model.recompute import recompute
from megatron.model.weights import Table, take_prefix
from megatron.mpu.layers import ReplicatedLinear
from megatron.mpu.mesh import Axis
from megatron.mpu.random import Dropout


class PredictionDepth(nn.Module):
    """([s, b, h] hidden states, [s, b, h] embeddings) -> ([s, b, h] hidden states of this depth, sums of its layers); with
    sequence parallelism [s/tp, b, h].

    weights:     `Facts.depth_weights`
    build_layer: (number of the layer, its weights) -> its module
    modules:     the parts that layers recompute; with "full" the depth is recomputed whole
    """

    def __init__(
        self,
        facts: Facts,
        depth: int,
        weights: Table,
        build_layer: Callable[[int, Table], nn.Module],
        *,
        tp: Axis,
        cp: Axis,
        seed: int,
        sequence_parallel: bool,
        modules: tuple[str, ...] = (),
        region: Callable[[], AbstractContextManager] = nullcontext,
        **factory,
    ):
        super().__init__()
        model, self.modules_again, self.region = facts.settings, modules, region
        of_norm = lambda name: NORMS[model.normalization](take_prefix(weights, name), model.norm_epsilon, **factory)
        axis = tp if sequence_parallel else None
        self.embedding_dropout = Dropout(
            model.hidden_dropout, f"embedding of depth {depth}", -1, seed, axis=axis, cp=cp
        )
        self.enorm, self.hnorm = of_norm("enorm"), of_norm("hnorm")
        self.eh_proj = ReplicatedLinear(
            take_prefix(weights, "eh_proj"), tp, sequence_parallel=sequence_parallel, **factory
        )
        first, numbers = depth * len(model.layers_ahead), model.layers_ahead
        tables = [take_prefix(weights, f"layers.{number}") for number in range(len(numbers))]
        self.layers = nn.ModuleList(build_layer(first + number, table) for number, table in zip(numbers, tables))
        self.final_norm = of_norm("final_norm")

    def forward(self, x: torch.Tensor, embedded: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Sums]:
        embedded = self.embedding_dropout(embedded, context.samples)
        if LAYER in self.modules_again:
            return recompute(self._states, x, embedded, context, inside=self.region, of=(self,))
        return self._states(x, embedded, context)

    def _states(self, x: torch.Tensor, embedded: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Sums]:
        x, sums = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), -1)), {}
        for layer in self.layers:
            x = layer(x, context)
            if isinstance(x, tuple):
                x, own = x
                sums = added(sums, own)
        return self.final_norm(x), sums
