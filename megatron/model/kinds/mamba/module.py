# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv:2405.21060, section 7): one projection to gate, inputs, B, C and step sizes; a short convolution; a scan;
a norm of what the gate lets through; a projection back.

A group is r heads that share B and C. Weights and activations are in the order of groups, so tensor parallelism gives each
rank whole groups, and so does context parallelism, whose ranks exchange their rows for groups: the scan needs all rows.

Legend: s tokens, b micro-batch, h hidden, G groups of r heads of P channels, N channels of the state, W taps.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.fused_kernels.causal_conv import causal_conv
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.norms import gated_rms_norm
from megatron.fused_kernels.ssd import ssd
from megatron.model.cache import State
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.layer_ops import CORE
from megatron.model.recompute import recompute
from megatron.model.weights import Table, take_prefix
from megatron.mpu.context_parallel import heads_to_rows, rows_to_heads
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, create_parameters


class Mamba(nn.Module):
    """[s, b, h] -> [s, b, h]. weights: `kinds.mamba.kind.mamba(...)`."""

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__()
        m, self.layer, self.shared = setup.model, setup.layer, setup.sharing.heads
        self.in_proj = ColumnParallelLinear(take_prefix(weights, "in_proj"), setup.tp, **setup.linear)
        own = {name: placed for name, placed in weights.items() if "." not in name}
        create_parameters(self, own, setup.tp, **setup.factory)
        self.out_proj = RowParallelLinear(take_prefix(weights, "out_proj"), setup.tp, **setup.linear)
        self.head_dim, self.state_dim, self.epsilon = m.mamba_head_dim, m.mamba_state_dim, m.norm_epsilon
        self.heads = m.mamba_heads // m.mamba_num_groups  # of a group
        self.recompute_core = CORE in setup.recompute

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        y = self.in_proj(x)
        if self.recompute_core:
            return self.out_proj(recompute(self.core, y, context, inside=context.region, of=(self,)))
        return self.out_proj(self.core(y, context))

    def core(self, y: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """What is between the two projections: [s, b, G/tp (2 r P + 2 N + r)] -> [s, b, G/tp r P]."""
        y = rows_to_heads(y.unflatten(-1, (len(self.A_log), -1)), self.shared)
        if context.cache is not None:
            x = context.cache.scan(self.layer, y, self.scan)
        else:
            x, _ = self.scan(y, documents=context.all_documents)
        return heads_to_rows(x, self.shared).flatten(2)

    def scan(
        self, y: torch.Tensor, before: Optional[State] = None, *, documents: Optional[Documents] = None
    ) -> tuple[torch.Tensor, State]:
        """([s, b, G, 2 r P + 2 N + r], the state before) -> ([s, b, G, r P], the state after: rows of the convolution
        [b, W - 1, G, r P + 2 N], and that of the scan [b, G, r, P, N]).
        """
        r, width, n = self.heads, self.heads * self.head_dim, self.state_dim
        rows, state = (None, None) if before is None else (before[0].movedim(0, 1), before[1])
        gate, mixed, dt = y.split((width, width + 2 * n, r), -1)
        weight, bias = self.own("conv_weight"), self.own("conv_bias")
        mixed, rows = causal_conv(mixed, weight, bias, documents=documents, before=rows)
        x, B, C = mixed.split((width, n, n), -1)
        x = x.unflatten(-1, (r, self.head_dim))  # [s, b, G/tp, r, P]
        dt = F.softplus(dt.float() + self.own("dt_bias").float())
        A = -self.own("A_log").float().exp()
        x, state = ssd(x, dt, A, B, C, self.own("D"), documents=documents, state=state)
        x = gated_rms_norm(x.flatten(-2), gate, self.own("norm_weight"), self.epsilon)
        return x, (rows.movedim(0, 1), state)

    def own(self, name: str) -> torch.Tensor:
        """A weight [G/tp, ...], of the groups that this rank has while ranks exchange rows for them."""
        weight, ranks = getattr(self, name), self.shared
        count = len(weight) // ranks.size
        return weight if ranks.size == 1 else weight.narrow(0, ranks.rank * count, count)
