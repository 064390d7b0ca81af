# SPDX-License-Identifier: Apache-2.0
"""Gated delta net (arXiv:2412.06464): one projection to queries, keys, values, gates, write strengths and decays; a short
convolution of the first three; the gated delta rule; a norm, then the gate; a projection back.

Weights and activations are in the order of key heads, each with its value heads, so tensor parallelism gives each rank
whole key heads, and so does context parallelism, whose ranks exchange their rows for heads: the rule needs all rows.

Legend: s tokens, b micro-batch, h hidden, G key heads of K channels, each of r value heads of V channels.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.fused_kernels.causal_conv import causal_conv
from megatron.fused_kernels.delta_rule import delta_rule
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.norms import gated_rms_norm
from megatron.model.cache import State
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.kinds.gdn.kind import DeltaSizes
from megatron.model.layer_ops import CORE
from megatron.model.recompute import recompute
from megatron.model.weights import Table, take_prefix
from megatron.mpu.context_parallel import heads_to_rows, rows_to_heads
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, create_parameters


class GatedDeltaNet(nn.Module):
    """[s, b, h] -> [s, b, h]. weights: `kinds.gdn.kind.gdn(...)`."""

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__()
        self.layer = setup.layer
        self.sizes, self.shared = DeltaSizes.of(setup.model), setup.sharing.heads
        self.in_proj = ColumnParallelLinear(take_prefix(weights, "in_proj"), setup.tp, **setup.linear)
        own = {name: placed for name, placed in weights.items() if "." not in name}
        create_parameters(self, own, setup.tp, **setup.factory)
        self.out_proj = RowParallelLinear(take_prefix(weights, "out_proj"), setup.tp, **setup.linear)
        self.epsilon, self.recompute_core = setup.model.norm_epsilon, CORE in setup.recompute
        # A graph would have the ops of each chunk: minutes of compilation for each length.
        self.rule = torch.compiler.disable(delta_rule) if setup.kernels.torch_compile else delta_rule

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        y = self.in_proj(x)
        if self.recompute_core:
            return self.out_proj(recompute(self.core, y, context, inside=context.region, of=(self,)))
        return self.out_proj(self.core(y, context))

    def core(self, y: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """What is between the two projections: [s, b, G/tp (2 K + 2 r V + 2 r)] -> [s, b, G/tp r V]."""
        y = rows_to_heads(y.unflatten(-1, (len(self.A_log), -1)), self.shared)
        if context.cache is not None:
            o = context.cache.scan(self.layer, y, self.scan)
        else:
            o, _ = self.scan(y, documents=context.all_documents)
        return heads_to_rows(o, self.shared).flatten(2)

    def scan(
        self, y: torch.Tensor, before: Optional[State] = None, *, documents: Optional[Documents] = None
    ) -> tuple[torch.Tensor, State]:
        """([s, b, G, 2 K + 2 r V + 2 r], the state before) -> ([s, b, G, r V], the state after: rows of the convolution
        [b, W - 1, G, 2 K + r V], and that of the rule [b, G, r, K, V]).
        """
        sizes = self.sizes
        rows, state = (None, None) if before is None else (before[0].movedim(0, 1), before[1])
        mixed, gate, beta, a = y.split((sizes.mixed, *sizes.parts[3:]), -1)
        mixed, rows = causal_conv(mixed, self.own("conv_weight"), documents=documents, before=rows)
        q, k, v = mixed.split(sizes.parts[:3], -1)
        by_head = lambda t: t.unflatten(-1, (sizes.heads, sizes.values))  # [s, b, G/tp, r, V]
        g = -self.own("A_log").float().exp() * F.softplus(a.float() + self.own("dt_bias").float())
        o, state = self.rule(q, k, by_head(v), g, beta.float().sigmoid(), documents=documents, state=state)
        o = gated_rms_norm(o, by_head(gate), self.norm_weight, self.epsilon, gate_first=False)
        return o.flatten(3), (rows.movedim(0, 1), state)

    def own(self, name: str) -> torch.Tensor:
        """A weight [G/tp, ...] of the key heads that this rank has while ranks of context parallelism exchange rows."""
        weight, ranks = getattr(self, name), self.shared
        count = len(weight) // ranks.size
        return weight if ranks.size == 1 else weight.narrow(0, ranks.rank * count, count)
