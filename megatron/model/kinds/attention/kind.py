# SPDX-License-Identifier: Apache-2.0
"""Causal self-attention: its weights and ops. Needs no torch.

Legend: n tokens of a micro-batch (s x b), d channels per head, q queries per key-value group, e bytes per element.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Optional

from megatron.model.kinds.attention.attention_rules import RULES
from megatron.model.kinds.attention.settings import AttentionSettings
from megatron.model.kinds.mixer import Mixer, Parts
from megatron.model.layer_ops import (
    ALWAYS,
    ATTENTION,
    CORE,
    Collective,
    CoreAttention,
    LayerOp,
    RankSetup,
    Residual,
    rows_for_heads,
)
from megatron.model.weights import add_prefix, column, norm, output_std, row
from megatron.mpu.chunks import own_chunks, parts_between, ring_distances
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.settings.kernel_sizes import JOINED, RING_ROWS, causal_pairs
from megatron.settings.schema import Model


def attention(model: Model, sequence_parallel: bool) -> dict[str, Placement]:
    """The weights of self-attention. The fused weight is [g, q + 2, d, h]: of each group queries, then key, then value;
    with --attention-output-gate [g, 2 q + 2, d, h]: queries, their gates, key, value.
    """
    m, bias = model, not model.disable_bias_linear
    queries = m.num_attention_heads // m.query_groups
    rows, parts = (m.query_groups, sum(m.qkv_parts), m.head_dim), (1, m.qkv_parts)
    width = m.num_attention_heads * m.head_dim
    table = {
        **add_prefix("qkv", column(m.hidden_size, rows, m.init_method_std, bias=m.qkv_bias, matrices=parts)),
        **add_prefix(
            "output", row(width, m.hidden_size, output_std(m), bias=bias, sequence_parallel=sequence_parallel)
        ),
    }
    for name, heads in (("q_norm", queries), ("k_norm", 1)) if m.qk_layernorm else ():
        if m.qk_layernorm_across_heads:
            shape = (m.query_groups, heads, m.head_dim)
            table[f"{name}.weight"] = Placement(shape, Constant(1.0), cut={"tp": 0}, decay=False)
        else:  # one weight for all heads, of which a rank sees some
            table |= add_prefix(name, norm(m, m.head_dim, partial=True))
    if m.softmax_type == "learnable":
        shape = (m.query_groups, queries)
        table["softmax_offset"] = Placement(shape, Normal(m.init_method_std), cut={"tp": 0}, decay=False)
    return table


def rotated(model: Model) -> int:
    """The channels of a head that rotary positions turn."""
    return int(model.head_dim * model.rotary_percent) // 2 * 2


class AttentionHeads(NamedTuple):
    """The heads of a layer, on all ranks: of queries, and of keys and values; channels of a key, and of a value."""

    queries: int
    groups: int
    key: int
    value: int

    @classmethod
    def of(cls, m: Model) -> "AttentionHeads":
        """Those of self-attention."""
        return cls(m.num_attention_heads, m.query_groups, m.head_dim, m.head_dim)

    def divided(self, tp: int) -> tuple[int, int, int]:
        """Channels of all queries, of all keys and values together, and of all results, on a rank of tp."""
        queries, groups = self.queries // tp, self.groups // tp
        return queries * self.key, groups * (self.key + self.value), queries * self.value


class Call(NamedTuple):
    """The sizes of one call of an attention kernel. The queries are the last ones of the keys."""

    queries: int
    keys: int
    heads: int
    groups: int


def calls_of(facts, share: RankSetup, window: Optional[int], of: AttentionHeads) -> list[Call]:
    """The calls of a rank for the attention of a sample.

    If ranks share a sequence: the rank's two chunks, each with all keys up to its end, or those in its window; or the
    rectangles of a ring; or all rows of some heads.
    """
    s, rows = facts.settings.seq_length, share.cp_rows
    heads, groups = (n // share.tp // share.cp_heads for n in (of.queries, of.groups))
    if rows == 1:
        return [Call(s, s, heads, groups)]
    # Without a window all ranks have equally many pairs; with one, the last rank has most.
    if share.ring:
        parts = (part for source in range(rows) for part in parts_between(s, rows - 1, source, rows, window))
        lengths = lambda one: one[1] - one[0]
        return [Call(lengths(part.rows), lengths(part.keys), heads, groups) for part in parts]
    chunks = own_chunks(s, rows - 1, rows)
    return [
        Call(stop - start, stop - (0 if window is None else max(0, start - window)), heads, groups)
        for start, stop in chunks
    ]


def attention_ops(facts, x: Residual) -> tuple[LayerOp, ...]:
    """Causal self-attention of a layer."""
    kept = partial(_core_kept, rotates=x.model.position_embedding_type == "rope")
    return self_attention(x, *_norms_across_heads(x), *causal_core(facts, x, AttentionHeads.of(x.model), kept))


Gathered = tuple[LayerOp, ...]  # the messages, and what follows them on each rank
Kept = Callable[[Any, RankSetup, str, Optional[int]], tuple[int, int]]  # see `_core_kept`


def causal_core(
    facts, x: Residual, of: AttentionHeads, kept: Kept, gathered: Optional[Gathered] = None
) -> tuple[LayerOp, ...]:
    """softmax(q k) v of causal attention with these heads, and the messages of context parallel ranks.

    gathered: of ranks that gather something else than keys and values
    """
    window = x.model.window
    return _exchanged(facts, x.share, _core(facts, x.share, window, of, kept), window, of, gathered)


def _norms_across_heads(x: Residual) -> tuple[LayerOp, ...]:
    """The sums of squares of each token's queries and keys, with --qk-layernorm-across-heads."""
    sums = Collective("attention", "tp", x.share.tp, 4 * x.tokens, ("all_reduce",), ("all_reduce",), again=(ATTENTION,))
    return (sums, sums) if x.model.qk_layernorm and x.model.qk_layernorm_across_heads else ()


def self_attention(x: Residual, *core: LayerOp) -> tuple[LayerOp, ...]:
    """The product for queries, keys and values, softmax(q k) v, and the output's product."""
    m, tp = x.model, x.share.tp
    queries, keys = m.num_attention_heads * m.head_dim // tp, m.query_groups * m.head_dim // tp
    fused = x.column("attention", sum(m.qkv_parts) * keys, again=(ATTENTION,), layer="attention.qkv")
    return *fused, *core, *x.row("attention", queries, again=(ATTENTION,), layer="attention.output")


def causal_kernel(model: Model, share: RankSetup, window: Optional[int] = None) -> str:
    """The kernel that `fused_kernels.choose_kernel` will select. In a ring explicit attention stores no weights."""
    m = model
    if share.ring:
        return _ring_kernel(m, share)
    if share.backend == "stored" or share.plain_softmax and share.backend == "explicit":
        return "reference"
    drops, scaled = m.attention_dropout > 0, m.apply_query_key_layer_scaling and share.precision == "fp16"
    capped = m.attn_logit_softcapping is not None
    if scaled and (drops or capped or share.device == "cpu"):
        return "reference"
    sinks = m.softmax_type != "vanilla"
    if capped and not sinks and share.device == "cuda" and share.backend == "flash":
        return "flash"  # of the package flash-attn; torch has no soft caps
    if drops or capped:
        return "reference" if share.plain_softmax else "block-causal"
    if sinks and share.device == "cuda" and (share.precision == "fp32" or m.head_dim > 256):
        return "reference" if share.plain_softmax or scaled else "block-causal"
    if share.device == "cuda" and share.backend == "explicit":
        return "reference" if scaled else "block-causal"
    if share.device == "cuda":
        return "flash"
    reach = m.seq_length if window is None else min(m.seq_length, window + 1)
    if share.plain_softmax or reach > 4096:
        return "reference" if share.backend == "explicit" else "flash"
    return "flash" if share.backend == "sdpa" else "block-causal"


def _ring_kernel(m: Model, share: RankSetup) -> str:
    on_cuda = share.device == "cuda"
    scaled = m.apply_query_key_layer_scaling and share.precision == "fp16"
    flash = share.precision != "fp32" and m.head_dim <= 256 if on_cuda else not scaled
    explicit = m.attention_dropout > 0 or m.attn_logit_softcapping is not None
    return "flash" if flash and not explicit and share.backend not in ("explicit", "stored") else "block-causal"


def _exchanged(
    facts,
    share: RankSetup,
    core: CoreAttention,
    window: Optional[int],
    of: AttentionHeads,
    gathered: Optional[Gathered],
) -> tuple[LayerOp, ...]:
    """Attention with the messages of context parallel ranks: rows for heads, then keys and values of other rows."""
    m, e, b = facts.settings, share.element, share.micro_batch_size
    queries, keys, results = of.divided(share.tp)
    n, rows, ops = m.seq_length // share.cp * b, share.cp_rows, (core,)
    levels = rows > 1 and share.cp_heads > 1
    if rows > 1:
        axis, own = "cp_outer" if levels else "cp", n * keys * e  # of a rank
        if share.ring:
            steps = len(ring_distances(m.seq_length, rows, window))
            ahead, back = ("shift",) * (steps - 1), ("shift",) * (steps if steps > 1 else 0)
            gradients = own * 4 // e  # in fp32
            travelling = (
                Collective("attention", axis, rows, own, ahead, ahead, again=core.again, in_ring=True),
                Collective("attention", axis, rows, gradients, back=back, in_ring=True),
            )
            # The present block and the next one; gradients of the present one, and those that are sent and arrive.
            ops = *travelling, replace(core, workspace=core.workspace + 2 * own + 3 * gradients)
        else:
            again = (ALWAYS,) if core.kernel == "flash" else core.again  # a flash kernel would save them unchanged
            size = own * rows
            whole = Collective("attention", axis, rows, size, ("all_gather",), ("reduce_scatter",), again=again)
            # Gathered again: gradients of each chunk, their sum, and that in rank order.
            core = replace(core, workspace=core.workspace + 4 * size)
            ops = (whole, core) if gathered is None else (core, *gathered)
    axis, into = "cp_inner" if levels else "cp", n * (queries + keys) * e
    return rows_for_heads("attention", axis, share.cp_heads, into, n * results * e, *ops)


def _masked(share: RankSetup, window: Optional[int], sinks: bool) -> bool:
    """Whether a flash kernel takes a window as a mask, shared by all layers, and computes every pair.

    torch's kernels do, except those for documents and for sinks, on CUDA in half precision.
    """
    varlen = (share.documents or sinks) and share.device == "cuda" and share.precision != "fp32"
    return window is not None and share.backend != "flash" and not varlen


def _core(facts, share: RankSetup, window: Optional[int], of: AttentionHeads, kept_of: Kept) -> CoreAttention:
    m, s, b, e = facts.settings, facts.settings.seq_length, share.micro_batch_size, share.element
    n, heads, (queries, both, results) = s // share.cp * b, of.queries // share.tp, of.divided(share.tp)
    sinks = m.softmax_type != "vanilla"
    kernel, calls = causal_kernel(m, share, window), calls_of(facts, share, window, of)
    keys = s  # twice the mean number of keys per query
    if window is not None and kernel != "reference":
        reach = min(window + 1, s)
        whole = kernel == "flash" and _masked(share, window, sinks) and not share.ring
        seen = 2 * sum(call.keys for call in calls) // len(calls)
        keys = seen if whole else min(s, 2 * reach - reach * (reach - 1) / s)
    if share.ring:
        workspace = _ring_workspace(facts, share, kernel, calls, window, of)
    elif kernel == "flash":
        masked = [
            call
            for call in calls
            if _masked(share, window, sinks) or call.queries < call.keys and share.device == "cpu"
        ]
        workspace = max((call.queries * call.keys * e for call in masked), default=0)
        if share.documents and share.device == "cpu":  # gradients of queries, keys and values, concatenated twice
            workspace += 2 * n * (queries + both) * e
    else:
        whole = window is None or kernel == "reference"
        of_block = lambda call: call.keys if whole else min(call.keys, window + 256)  # keys of a block of queries
        matrices = 3 if m.attn_logit_softcapping else 2
        workspace = max(matrices * b * call.heads * call.queries * of_block(call) * e for call in calls)
    kept, given = kept_of(facts, share, kernel, window)
    all_keys = s if window is None else min(s, window + 1)
    sizes = dict(
        kept=kept, given=given, moved=2 * n * (queries + results), flops=2.0 * n * all_keys * (queries + results)
    )
    sizes |= dict(seen=1 - all_keys / (2 * s))  # the first queries see fewer keys than the window has
    pairs, widths, drops = n * keys * heads, (of.key, of.value), m.attention_dropout > 0
    return CoreAttention("attention core", kernel, pairs, widths, drops, workspace=workspace, **sizes)


def _ring_workspace(
    facts, share: RankSetup, kernel: str, calls: list[Call], window: Optional[int], of: AttentionHeads
) -> int:
    """Bytes of the backward pass of a ring's largest rectangle, and the gradients of queries in fp32."""
    m, e, b = facts.settings, share.element, share.micro_batch_size
    most = max(calls, key=lambda call: call.queries * call.keys)
    d, masked = of.key, window is not None or share.documents
    gradients = b * (most.queries * most.heads * d + most.keys * most.groups * (d + of.value))
    if kernel == "flash":
        masks = b * most.queries * most.keys * e * (masked and share.device == "cpu")
        return 4 * b * d * calls[0].heads * m.seq_length // share.cp_rows + gradients * e + masks
    of_block = 4 * b * most.heads * min(most.queries, RING_ROWS * most.groups // most.heads or 1) * most.keys
    matrices = 3 + (m.attn_logit_softcapping is not None)
    return 4 * b * d * calls[0].heads * m.seq_length // share.cp_rows + 4 * gradients + matrices * of_block


def _core_kept(facts, share: RankSetup, kernel: str, window: Optional[int], rotates: bool) -> tuple[int, int]:
    """(bytes saved, bytes saved if softmax(q k) v is recomputed), op by op as in `module.py` and the kernels."""
    m, e, b = facts.settings, share.element, share.micro_batch_size
    n, exchanged = m.seq_length // share.cp * b, share.cp_heads > 1
    heads, groups, d = m.num_attention_heads // share.tp, m.query_groups // share.tp, m.head_dim
    q, kv = n * heads * d * e, n * groups * d * e
    sent, gates = q + 2 * kv, q * m.attention_output_gate
    fused, turned = sent + gates, 2 * gates  # the sigmoid, and what it multiplies
    own = rotates or m.qk_layernorm  # queries and keys are separate tensors
    if m.qk_layernorm:
        turned += fused
        for number in (heads, groups):
            width = number * d if m.qk_layernorm_across_heads else d
            turned += share.norm_bytes(m, n * number * d, width, shared_input=True)
    views = q + kv + (0 if m.qk_layernorm else fused) if own else fused  # q, k, and v as a part of the fused output
    recomputed = turned + views
    gathers, queries = share.cp_rows > 1 and not share.ring, m.num_attention_heads // m.query_groups
    own, grouped = own and not exchanged, queries > 1  # exchanged parts arrive as one tensor
    if exchanged:
        views = sent
    elif gathers:
        views = (q if own else fused) + 2 * kv * (1 if kernel == "flash" else share.cp)  # flash: gathered again
    calls = calls_of(facts, share, window, AttentionHeads.of(m))
    if share.ring:  # the output is that of the next layer's input, unless rows come back for heads
        copied = q * (grouped and not own and calls[0].groups > 1) + q * exchanged
        drops = n * heads * m.seq_length * (m.attention_dropout > 0)
        return turned + views + copied + 4 * n * heads + drops, recomputed
    if kernel == "flash":
        # A copy, if no other op saves the queries; with cp also the output, which the next layer does not save.
        copied = q if grouped and not own and calls[0].groups > 1 else 0
        copied += q if share.cp > 1 else 0
        if share.documents and share.device == "cpu":  # outputs of a call for each; at most the masks of short ones
            copied += q + n * min(JOINED, m.seq_length) * e
        return turned + views + copied + 4 * n * heads, recomputed
    if kernel == "block-causal":
        pairs = sum(
            b * call.heads * causal_pairs(call.queries, queries, window, call.keys - call.queries) for call in calls
        )
        copied = q + sum(2 * b * call.groups * call.keys * d * e for call in calls)  # queries, keys and values
        return turned + copied + pairs * (e + (m.attention_dropout > 0)), recomputed
    stored = stored_weights(m, sum(b * call.heads * call.queries * call.keys for call in calls), e)
    if gathers:
        keys = 2 * kv * share.cp
    else:
        keys = fused if not own else kv + (0 if m.qk_layernorm else fused)
    return turned + keys + q + stored, recomputed


def stored_weights(m: Model, pairs: int, e: int) -> int:
    """Bytes that unfused attention saves for these pairs: a softmax, a cap's tanh, and weights if they differ from it."""
    wide = pairs * (4 if m.attention_softmax_in_fp32 or m.apply_query_key_layer_scaling else e)
    capped = wide if m.attn_logit_softcapping else 0
    if m.attention_dropout > 0:
        return wide + capped + pairs * (e + 1)
    return wide + capped + (pairs * e if wide != pairs * e else 0)


def clipped(model: Model, alpha: float) -> dict[str, Parts]:
    """What --qk-clip scales: see `Mixer.clipped`."""
    queries, *gates, key, value = model.qkv_parts
    return {"qkv.weight": ((queries, alpha), *((rows, 0.0) for rows in gates), (key, 1 - alpha), (value, 0.0))}


def _has_shape(model: Model) -> bool:
    if model.num_attention_heads < 1 or (model.num_query_groups is not None and model.num_query_groups < 1):
        return False
    model.window_of(0)
    own_sizes = model.kv_channels is not None or model.multi_latent_attention
    return own_sizes or model.hidden_size % model.num_attention_heads == 0


def _shrunk(model: Model, small: Model, tp: int) -> dict[str, Any]:
    """Keeps the ratios: groups of heads, heads wider than hidden / heads."""
    shared = model.query_groups < model.num_attention_heads
    wide = model.kv_channels is not None and model.kv_channels * model.num_attention_heads != model.hidden_size
    groups = 1 if model.query_groups == 1 else small.num_attention_heads // (2 if shared else 1)
    return dict(
        num_query_groups=groups if shared else None,
        group_query_attention=shared,
        kv_channels=small.hidden_size // small.num_attention_heads + 4 if wide else None,
        window_size=None if model.window is None else f"{min(model.window, small.seq_length // 2)},0",
    )


KIND = Mixer(
    "attention",
    "attention",
    "megatron.model.kinds.attention.module:Attention",
    weights=lambda facts, model, sequence_parallel: attention(model, sequence_parallel),
    ops=attention_ops,
    symbol="*",
    place="attention",
    settings=AttentionSettings,
    rules=RULES,
    hf_matches="megatron.model.kinds.attention.hf:matches",
    in_megatron="megatron.model.kinds.attention.megatron:FORM",
    mixes_tokens=True,
    recomputes=(CORE, ATTENTION),
    divided=lambda model: {"heads": model.num_attention_heads, "key-value heads": model.query_groups},
    heads=lambda model: model.query_groups,
    rotated=rotated,
    clipped=clipped,
    cached=lambda model, tp: 2 * model.query_groups // tp * model.head_dim,
    has_shape=_has_shape,
    shrunk=_shrunk,
)
