# SPDX-License-Identifier: Apache-2.0
"""Gated delta net (arXiv:2412.06464): one projection to queries, keys, values, gates, write strengths and decays; a short
convolution of the first three; the gated delta rule; a norm, then the gate; a projection back.

A group is a key head with its value heads.

Legend: s tokens, b micro-batch, h hidden, G key heads of K channels, each of r value heads of V channels.
"""

from collections.abc import Callable
from typing import Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels import Case, choose_kernel
from megatron.fused_kernels.delta_rule import delta_rule
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.norms import gated_rms_norm
from megatron.model.cache import State
from megatron.model.context import LayerSetup
from megatron.model.kinds.gdn.kind import DeltaSizes
from megatron.model.kinds.scan_layer import ScanLayer
from megatron.model.passed_states import PassedStates
from megatron.model.weights import Table


class GatedDeltaNet(ScanLayer):
    """[s, b, h] -> [s, b, h]. weights: `kinds.gdn.kind.gdn(...)`."""

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__(weights, setup)
        self.sizes = DeltaSizes.of(setup.model)

    def scan(
        self,
        y: torch.Tensor,
        before: Optional[State] = None,
        *,
        documents: Optional[Documents] = None,
        passing: Optional[PassedStates] = None,
    ) -> tuple[torch.Tensor, State]:
        """([s, b, G, 2 K + 2 r V + 2 r], the state before) -> ([s, b, G, r V], the state after: rows of the convolution
        [b, W - 1, G, 2 K + r V], and that of the rule [b, G, r, K, V]).
        """
        sizes, state = self.sizes, before and before[1]
        mixed, gate, beta, a = y.split((sizes.mixed, *sizes.parts[3:]), -1)
        mixed, rows = self.mixed(mixed, before, documents, passing)
        q, k, v = mixed.split(sizes.parts[:3], -1)
        by_head = lambda t: t.unflatten(-1, (sizes.heads, sizes.values))  # [s, b, G/tp, r, V]
        g = -self.own("A_log").float().exp() * F.softplus(a.float() + self.own("dt_bias").float())
        beta = beta.float().sigmoid()
        o, state = self.rule(q, documents, state, passing)(
            q, k, by_head(v), g, beta, documents=documents, state=state, passing=passing
        )
        o = gated_rms_norm(o, by_head(gate), self.norm_weight, self.epsilon, gate_first=False)
        return o.flatten(3), (rows, state)

    def rule(self, q: torch.Tensor, documents, state, passing) -> Callable:
        """The kernel of the delta rule for such a call."""
        run = delta_rule
        if passing is None and (documents is None or state is None):
            run = choose_kernel("delta_rule", Case(q.device.type, q.dtype, head_dim=q.shape[-1])).run
        return self.eager(run)
