# SPDX-License-Identifier: Apache-2.0
"""What layers with a recurrent state have in common: a projection in, a scan over tokens, a projection back.

Weights and activations are in the order of groups, each with its heads, so tensor parallelism gives each rank whole groups.
So does context parallelism while it divides the groups: ranks exchange their rows for them. Other ranks have some rows of a
sequence, and pass states on (`model.passed_states`).
"""

from collections.abc import Callable
from typing import Optional

import torch
from torch import nn

from megatron.fused_kernels.causal_conv import causal_conv
from megatron.fused_kernels.documents import Documents
from megatron.model.cache import State
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.layer_ops import CORE
from megatron.model.passed_states import PassedStates, halves, whole
from megatron.model.recompute import recompute
from megatron.model.weights import Table, take_prefix
from megatron.mpu.context_parallel import heads_to_rows, rows_to_heads
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, create_parameters


class ScanLayer(nn.Module):
    """[s, b, h] -> [s, b, h]. A subclass defines `scan`.

    weights: those of the linear layers `in_proj`, whose rows begin with groups, and `out_proj`; others are its own, among
    them `A_log` [groups, ...]
    """

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__()
        self.layer, self.sharing = setup.layer, setup.sharing
        self.in_proj = ColumnParallelLinear(take_prefix(weights, "in_proj"), setup.tp, **setup.linear)
        own = {name: placed for name, placed in weights.items() if "." not in name}
        create_parameters(self, own, setup.tp, **setup.factory)
        self.out_proj = RowParallelLinear(take_prefix(weights, "out_proj"), setup.tp, **setup.linear)
        self.epsilon, self.recompute_core = setup.model.norm_epsilon, CORE in setup.recompute
        self.compiled = bool(setup.kernels.torch_compile)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        y = self.in_proj(x)
        if self.recompute_core:
            return self.out_proj(recompute(self.core, y, context, inside=context.region, of=(self,)))
        return self.out_proj(self.core(y, context))

    def eager(self, run: Callable) -> Callable:
        """The function `run` of a whole sequence, outside the graph of torch.compile: a graph would have the ops of each
        chunk, which takes minutes to compile for each length.
        """
        return torch.compiler.disable(run) if self.compiled else run

    def core(self, y: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """What is between the two projections: [s, b, outputs of the first] -> [s, b, inputs of the second]."""
        ranks, rows = self.sharing.heads, self.sharing.rows
        y = rows_to_heads(y.unflatten(-1, (len(self.A_log), -1)), ranks)
        if context.cache is not None:
            y = context.cache.scan(self.layer, y, self.scan)
        elif rows.size == 1:
            y, _ = self.scan(y, documents=context.all_documents)
        else:
            documents = context.of_halves and context.of_halves[rows.size]
            y, _ = self.scan(halves(y), documents=documents, passing=PassedStates(rows, documents))
            y = whole(y)
        return heads_to_rows(y, ranks).flatten(2)

    def scan(
        self,
        y: torch.Tensor,
        before: Optional[State] = None,
        *,
        documents: Optional[Documents] = None,
        passing: Optional[PassedStates] = None,
    ) -> tuple[torch.Tensor, State]:
        """([s, b, groups, outputs of one], the state before) -> ([s, b, groups, inputs of one], the state after).

        passing: the state before comes from other samples
        """
        raise NotImplementedError

    def mixed(
        self, x: torch.Tensor, before: Optional[State], documents: Optional[Documents], passing: Optional[PassedStates]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolution of x [s, b, groups, channels], and the rows that the next tokens will need [b, taps - 1, ...].

        See `scan`; the first part of a state is such rows.
        """
        weight, bias = self.own("conv_weight"), self.own("conv_bias") if hasattr(self, "conv_bias") else None
        if passing is not None:
            rows = passing.rows_before(x, weight.shape[-1] - 1)
        else:
            rows = None if before is None else before[0].movedim(0, 1)
        x, rows = causal_conv(x, weight, bias, documents=documents, before=rows)
        return x, rows.movedim(0, 1)

    def own(self, name: str) -> torch.Tensor:
        """A weight [groups, ...], of the groups that this rank has while ranks of context parallelism exchange rows."""
        weight, ranks = getattr(self, name), self.sharing.heads
        count = len(weight) // ranks.size
        return weight if ranks.size == 1 else weight.narrow(0, ranks.rank * count, count)
