# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv:2405.21060, section 7): one projection to gate, inputs, B, C and step sizes; a short convolution; a scan;
a norm of what the gate lets through; a projection back.

A group is r heads that share B and C.

Legend: s tokens, b micro-batch, h hidden, G groups of r heads of P channels, N channels of the state, W taps.
"""

from typing import Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.norms import gated, gated_rms_norm
from megatron.fused_kernels.ssd import ssd
from megatron.model.cache import State
from megatron.model.context import LayerSetup
from megatron.model.kinds.scan_layer import ScanLayer
from megatron.model.passed_states import PassedStates
from megatron.model.weights import Table


class Mamba(ScanLayer):
    """[s, b, h] -> [s, b, h]. weights: `kinds.mamba.kind.mamba(...)`."""

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__(weights, setup)
        m = setup.model
        self.head_dim, self.state_dim = m.mamba_head_dim, m.mamba_state_dim
        self.heads = m.mamba_heads // m.mamba_num_groups  # of a group
        self.normed, self.gate_first = m.mamba_rms_norm, not m.mamba_norm_before_gate

    def scan(
        self,
        y: torch.Tensor,
        before: Optional[State] = None,
        *,
        documents: Optional[Documents] = None,
        passing: Optional[PassedStates] = None,
    ) -> tuple[torch.Tensor, State]:
        """([s, b, G, 2 r P + 2 N + r], the state before) -> ([s, b, G, r P], the state after: rows of the convolution
        [b, W - 1, G, r P + 2 N], and that of the scan [b, G, r, P, N]).
        """
        r, width, n = self.heads, self.heads * self.head_dim, self.state_dim
        gate, mixed, dt = y.split((width, width + 2 * n, r), -1)
        mixed, rows = self.mixed(mixed, before, documents, passing)
        x, B, C = mixed.split((width, n, n), -1)
        x = x.unflatten(-1, (r, self.head_dim))  # [s, b, G/tp, r, P]
        dt = F.softplus(dt.float() + self.own("dt_bias").float())
        A, state = -self.own("A_log").float().exp(), before and before[1]
        x, state = self.eager(ssd)(x, dt, A, B, C, self.own("D"), documents=documents, state=state, passing=passing)
        x = x.flatten(-2)
        if self.normed:
            x = gated_rms_norm(x, gate, self.own("norm_weight"), self.epsilon, self.gate_first)
        else:
            x = gated(x, gate)
        return x, (rows, state)
