# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule by the package fla-core (flash-linear-attention), for GPUs: a chunk's products in Triton.

Its kernels read [b, s, heads, channels], and documents as the edges of all of them in one row. Two lengths of keys are in
the probe, because one of them was once miscompiled (flash-linear-attention issue 640).
"""

from typing import Optional

import torch

from megatron.fused_kernels.documents import Documents


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    documents: Optional[Documents] = None,
    state: Optional[torch.Tensor] = None,
    passing: None = None,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """See `delta_rule.delta_rule`; without a state if there are documents, and without passing states."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    assert passing is None and (documents is None or state is None)
    s, b, groups, r, channels = v.shape
    by_sample = lambda x: x.transpose(0, 1).reshape(b, s, -1, *x.shape[4:])  # of value heads
    inputs = [q.transpose(0, 1), k.transpose(0, 1), by_sample(v), by_sample(g), by_sample(beta)]
    edges = {}
    if documents is not None:
        inputs = [x.reshape(1, b * s, *x.shape[2:]) for x in inputs]
        edges = dict(cu_seqlens=documents.key_edges.long(), cu_seqlens_cpu=documents.edges_on_host)
    y, after = chunk_gated_delta_rule(
        *(x.contiguous() for x in inputs),
        initial_state=None if state is None else state.float().flatten(1, 2),
        output_final_state=documents is None,
        use_qk_l2norm_in_kernel=True,
        **edges,
    )
    y = y.reshape(b, s, groups, r, channels).transpose(0, 1)
    return y, None if after is None else after.unflatten(1, (groups, r))
