# SPDX-License-Identifier: Apache-2.0
"""The ops of multi-latent attention. Needs no torch.

Legend: n tokens of a micro-batch, g heads of a rank, of a head's keys d = ro + no channels, of its values v, kv channels of
the latent, e bytes per element.
"""

from dataclasses import replace
from typing import Optional

from megatron.model.kinds.attention.kind import AttentionHeads, calls_of, causal_core, stored_weights
from megatron.model.layer_ops import (
    ALWAYS,
    ATTENTION,
    UP,
    Collective,
    CoreAttention,
    Kernel,
    LayerOp,
    Product,
    RankSetup,
    Residual,
)
from megatron.settings.kernel_sizes import JOINED, causal_pairs
from megatron.settings.schema import Model


def heads_of(m: Model) -> AttentionHeads:
    """Keys and values of each head are its own once they are expanded."""
    return AttentionHeads(m.num_attention_heads, m.num_attention_heads, m.latent_key_dim, m.v_head_dim)


def latent_ops(facts, x: Residual) -> tuple[LayerOp, ...]:
    """Multi-latent attention of a layer."""
    results = x.model.num_attention_heads * x.model.v_head_dim // x.share.tp
    gathered = _gathered(x) if sends_latents(x.share) else None
    core = [_reading(x, op) for op in causal_core(facts, x, heads_of(x.model), _core_kept, gathered)]
    output = x.row("attention", results, again=(ATTENTION,), layer="attention.output")
    return *_latents(x), *_of_heads(x), *core, *output


def sends_latents(share: RankSetup) -> bool:
    """Whether ranks of context parallelism gather latents, as `LatentAttention.sends_latents`."""
    drops = share.pairs_drop and "attention.kv_up" in dict(share.pairs)
    return share.cp_rows > 1 and not share.ring and not drops


def _gathered(x: Residual) -> tuple[LayerOp, ...]:
    """Latents and rotated keys of all ranks of context parallelism, and the product that expands them, which the backward
    pass repeats."""
    m, share, again = x.model, x.share, dict(again=(ALWAYS,))
    kv, ro, whole = m.kv_lora_rank, m.qk_pos_emb_head_dim, replace(x, tokens=x.tokens * share.cp_rows)
    both = ("all_gather",), ("reduce_scatter",)
    sent = lambda size: Collective("attention", "cp", share.cp_rows, size * share.element, *both, **again)
    outputs = m.num_attention_heads // share.tp * (m.qk_head_dim + m.v_head_dim)
    latents = replace(whole, width=kv)
    expanded = latents.column("attention", outputs, layer="attention.kv_up", **again)
    expanded = (replace(op, given=0) if isinstance(op, Product) else op for op in expanded)
    kept = whole.tokens * heads_of(m).divided(share.tp)[1] * share.element  # keys and values
    joined = Kernel("attention", kept=kept, moved=3 * whole.tokens * outputs, starts=3, **again)
    return sent(latents.elements), sent(whole.tokens * ro), *expanded, joined


def _latents(x: Residual) -> list[LayerOp]:
    """The products for the latents, which read the same input, and the norms of these; the rotary key for all heads."""
    m, e, held, again = x.model, x.share.element, x.elements // x.h, dict(again=(ATTENTION,))
    kv, ro, ops, first = m.kv_lora_rank, m.qk_pos_emb_head_dim, [], True
    if m.q_lora_rank:
        ops += x.whole("attention", m.q_lora_rank, layer="attention.q_down", **again)
        ops += _norm(x, m.q_lora_rank)
        first = not x.share.keeps_whole_input("attention.q_down")
    ops += x.whole("attention", kv + ro, keeps=first, layer="attention.kv_down", **again)
    ops += _norm(x, kv, held * ro * e)  # it reads a part of the product's output
    return [*ops, replace(x.copied, size=x.tokens * ro * e, overlapped=(), **again)]


def _norm(x: Residual, width: int, beside: int = 0) -> list[LayerOp]:
    """The norm of a latent, if it has one. beside: bytes of the tensor that the latent is a part of"""
    elements = x.elements // x.h * width
    kept = x.share.norm_bytes(x.model, elements, width) + beside
    return [Kernel("norms", kept=kept, moved=2 * elements, again=(ATTENTION,))] * x.model.qk_layernorm


def _of_heads(x: Residual) -> list[LayerOp]:
    """Queries, keys and values of all heads, from the latents: what `mla_up_proj` computes again."""
    m, e, held, again = x.model, x.share.element, x.elements // x.h, dict(again=(UP, ATTENTION))
    g, (no, ro, v), kv = (
        m.num_attention_heads // x.share.tp,
        (m.qk_head_dim, m.qk_pos_emb_head_dim, m.v_head_dim),
        m.kv_lora_rank,
    )
    latent = held * (kv + ro * (not m.qk_layernorm)) * e  # without a norm it is a part of the product's output
    key = x.tokens * ro * e * x.share.sp  # of all heads, gathered
    if m.q_lora_rank:
        source = replace(x, width=m.q_lora_rank)
        queries = source.column("attention", g * (no + ro), layer="attention.q_up", **again)
    else:
        source, keeps = None, not x.share.keeps_whole_input("attention.kv_down")
        queries = x.column("attention", g * (no + ro), keeps=keeps, layer="attention.q", **again)
    read = latent + key + (source.nbytes if source else 0)
    *before, product = queries
    if sends_latents(x.share):  # what `_gathered` begins with is kept
        kept = Kernel("attention", kept=latent + x.tokens * ro * e, again=(ATTENTION,))
        turned = Kernel("attention", moved=2 * x.tokens * g * (no + ro), starts=1, **again)
        return [kept, *before, replace(product, given=source.nbytes if source else 0), turned]
    expanded = replace(x, width=kv).column("attention", g * (no + v), layer="attention.kv_up", **again)
    kept = lambda op: replace(op, kept=op.kept + latent - held * kv * e) if isinstance(op, Product) else op
    joined = Kernel("attention", moved=3 * x.tokens * g * (no + ro), starts=3, **again)
    return [*before, replace(product, given=read), *map(kept, expanded), joined]


def _reading(x: Residual, op: LayerOp) -> LayerOp:
    """Of the core, how many bytes of queries, keys and values it saves as they are; others it copies."""
    if not isinstance(op, CoreAttention):
        return op
    m, n, e, share = x.model, x.tokens, x.share.element, x.share
    queries, both, _ = (n * size * e for size in heads_of(m).divided(share.tp))
    values = n * m.num_attention_heads // share.tp * (m.qk_head_dim + m.v_head_dim) * e
    if share.cp_heads > 1 or op.kernel == "block-causal" and not share.ring:
        return replace(op, reads=0)
    if share.ring or op.kernel == "reference":
        return replace(op, reads=queries * (1 + share.ring) + values)
    if sends_latents(share):
        return replace(op, reads=queries)
    if share.cp_rows > 1:  # where keys are gathered again, the joined tensor is saved for the queries
        return replace(op, reads=-both)
    return replace(op, reads=2 * queries + values * (m.v_head_dim == m.latent_key_dim))


def _core_kept(facts, share: RankSetup, kernel: str, window: Optional[int]) -> tuple[int, int]:
    """(bytes saved, bytes saved if softmax(q k) v is recomputed). Values are views of a product that has keys, too."""
    m, e, b = facts.settings, share.element, share.micro_batch_size
    n, exchanged, of = m.seq_length // share.cp * b, share.cp_heads > 1, heads_of(m)
    queries, both, results = (size * n * e for size in of.divided(share.tp))
    keys, g, pads = queries, of.queries // share.tp, of.value < of.key
    expanded = n * g * (m.qk_head_dim + m.v_head_dim) * e
    given, gathers, sends = queries + keys + expanded, share.cp_rows > 1 and not share.ring, sends_latents(share)
    given = queries if sends else given
    read = queries + both if exchanged else given
    calls, drops = calls_of(facts, share, window, of), m.attention_dropout > 0
    if gathers:
        read = queries + both * (not sends if kernel == "flash" else share.cp)
    if share.ring:
        return read + results * exchanged + 4 * n * g + n * g * m.seq_length * drops, given
    if kernel == "flash":
        kept = read + 4 * n * g + results * (share.cp > 1)
        if pads:  # values with zeros after them, and results for these
            wide = sum(b * call.groups * call.keys * of.key * e for call in calls)
            kept = queries + (0 if sends else both if gathers or exchanged else keys) + wide + queries + 4 * n * g
        return kept + (n * min(JOINED, m.seq_length) * e + results * (not pads)) * (
            share.documents and share.device == "cpu"
        ), given
    if kernel == "block-causal":
        pairs = sum(b * call.heads * causal_pairs(call.queries, 1, window, call.keys - call.queries) for call in calls)
        copied = queries + sum(b * call.groups * call.keys * (of.key + of.value) * e for call in calls)
        return copied + pairs * (e + drops), given
    return read + stored_weights(m, sum(b * call.heads * call.queries * call.keys for call in calls), e), given
