# SPDX-License-Identifier: Apache-2.0
"""Attention over another sequence, the output of an encoder: its weights and ops. Needs no torch."""

from dataclasses import replace

from megatron.model.kinds.attention.full import noncausal_core
from megatron.model.kinds.mixer import Mixer, Parts
from megatron.model.layer_ops import ATTENTION, CORE, LayerOp, Residual
from megatron.model.weights import add_prefix, column, output_std, row
from megatron.mpu.placement import Placement
from megatron.settings.schema import Model


def cross_attention(model: Model, sequence_parallel: bool) -> dict[str, Placement]:
    """The weights of cross-attention: queries [g, q, d, h] of the target, keys and values [g, 2, d, h] of the source."""
    m, bias = model, not model.disable_bias_linear
    queries, width = m.num_attention_heads // m.query_groups, m.num_attention_heads * m.head_dim
    of_query, of_memory = ((m.query_groups, number, m.head_dim) for number in (queries, 2))
    return {
        **add_prefix("q", column(m.hidden_size, of_query, m.init_method_std, bias=bias, matrices=(1, (queries,)))),
        **add_prefix("kv", column(m.hidden_size, of_memory, m.init_method_std, bias=bias, matrices=(1, (1, 1)))),
        **add_prefix(
            "output", row(width, m.hidden_size, output_std(m), bias=bias, sequence_parallel=sequence_parallel)
        ),
    }


def _cross_ops(facts, x: Residual) -> tuple[LayerOp, ...]:
    m, share, s, again = x.model, x.share, facts.source, (ATTENTION,)
    queries, keys = m.num_attention_heads * m.head_dim // share.tp, m.query_groups * m.head_dim // share.tp
    memory = replace(x, tokens=s * share.micro_batch_size)
    return (
        *x.column("attention", queries, again=again, layer="cross.q"),
        *memory.column("attention", 2 * keys, keeps=False, again=again, layer="cross.kv"),
        noncausal_core(m, share, facts.target, s, fused=False),
        *x.row("attention", queries, again=again, layer="cross.output"),
    )


def _clipped(model: Model, alpha: float) -> dict[str, Parts]:
    queries = model.num_attention_heads // model.query_groups
    return {"q.weight": ((queries, alpha),), "kv.weight": ((1, 1 - alpha), (1, 0.0))}


KIND = Mixer(
    "cross",
    "cross",
    "megatron.model.kinds.cross.module:CrossAttention",
    weights=lambda facts, model, sequence_parallel: cross_attention(model, sequence_parallel),
    ops=_cross_ops,
    mixes_tokens=True,
    recomputes=(CORE, ATTENTION),
    clipped=_clipped,
)
