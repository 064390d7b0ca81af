# SPDX-License-Identifier: Apache-2.0
"""The ops of attention that is not causal, or has another length of keys than of queries. Needs no torch."""

from dataclasses import replace

from megatron.model.kinds.attention.kind import KIND, self_attention, stored_weights
from megatron.model.layer_ops import CoreAttention, LayerOp, RankSetup, Residual
from megatron.settings.kernel_sizes import causal_blocks
from megatron.settings.schema import Model

WIDE = "relative"  # a value of --position-embedding-type


def full_attention_kernel(model: Model, share: RankSetup) -> str:
    """The kernel that `fused_kernels.choose_kernel` will select for non-causal attention."""
    if share.backend == "stored":
        return "reference"
    if not (model.attention_dropout or model.attn_logit_softcapping):
        if share.backend == "sdpa" or (share.device == "cuda" or share.plain_softmax) and share.backend != "explicit":
            return "flash"
    return "reference" if share.plain_softmax else "block-full"


def noncausal_core(model: Model, share: RankSetup, s: int, t: int, *, fused: bool, causal: str = "") -> CoreAttention:
    """Attention of s queries over t keys. fused: queries, keys and values are one tensor. causal: the kernel of causal
    attention; "": non-causal attention.
    """
    m, e, b, d = model, share.element, share.micro_batch_size, model.head_dim
    heads, groups = m.num_attention_heads // share.tp, m.query_groups // share.tp
    kernel = causal or full_attention_kernel(m, share)
    if fused and kernel == "flash" and m.position_embedding_type == WIDE and share.device == "cpu":
        kernel = "reference"  # torch stores all scores if the bias needs a gradient
    q, kv = s * b * heads * d * e, t * b * groups * d * e
    inputs = q + 2 * kv
    views = inputs + (q + kv if fused and m.position_embedding_type == "rope" else 0)
    if kernel == "flash":
        kept = views + 4 * s * b * heads
    elif kernel == "reference":
        kept = views + stored_weights(m, b * heads * s * t, e)
    else:
        pairs = _pairs(s, t, m.num_attention_heads // m.query_groups, bool(causal))
        kept = inputs + 2 * kv + b * heads * pairs * (e + (m.attention_dropout > 0))  # rows, copies, weights
    whole = 1 if causal else 2  # `CoreAttention` counts causal pairs twice
    kind = "block-causal" if kernel == "block-full" else kernel
    pairs = b * s * t * heads
    sizes = dict(
        kept=kept,
        given=views,
        workspace=(3 if m.attn_logit_softcapping else 2) * pairs * e,  # with a cap, scores are computed again
        moved=4 * s * b * heads * d,
        flops=4.0 * pairs * d,
    )
    return CoreAttention("attention core", kind, pairs * whole, (d, d), m.attention_dropout > 0, bool(causal), **sizes)


def _pairs(s: int, t: int, shared: int, causal: bool) -> int:
    """The pairs of query and key per head whose weights explicit attention saves."""
    if not causal:
        return s * t
    return sum((stop - start) * stop for start, stop in causal_blocks(s, shared))


def attention_over_all(x: Residual, causal: str = "") -> tuple[LayerOp, ...]:
    """Self-attention of a whole sequence. causal: as in `noncausal_core`."""
    rows = x.tokens // x.share.micro_batch_size
    return self_attention(x, noncausal_core(x.model, x.share, rows, rows, fused=True, causal=causal))


BIDIRECTIONAL = replace(
    KIND,
    module="megatron.model.kinds.attention.module:BidirectionalAttention",
    ops=lambda facts, x: attention_over_all(x),
)
