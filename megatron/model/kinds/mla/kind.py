# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention: its weights and rules. Needs no torch.

Legend: h hidden, g heads, of a head's keys ro rotated and no other channels, v of its values; latents of q_lora and kv.
"""

from typing import Any

from megatron.model.kinds.mixer import Mixer, Parts
from megatron.model.kinds.mla.ops import latent_ops
from megatron.model.kinds.mla.settings import LatentSettings
from megatron.model.layer_ops import ATTENTION, CORE, UP
from megatron.model.weights import add_prefix, column, norm, output_std, replicated, row
from megatron.mpu.placement import Placement
from megatron.settings.declare import dashed
from megatron.settings.rules import Rule
from megatron.settings.schema import Model


def latent_attention(model: Model, sequence_parallel: bool) -> dict[str, Placement]:
    """`q` is [g, ro + no, h], or after a latent `q_down` [q_lora, h] and `q_up` [g, ro + no, q_lora]; `kv_down` is
    [kv + ro, h], the latent before the rotary key of all heads, and `kv_up` [g, no + v, kv], a head's key before its value.

    Rotated channels come first in queries and keys: they are those that `rotate` turns. Latents are normalized with
    --qk-layernorm, as in Megatron-LM.
    """
    m, g, std, sp = model, model.num_attention_heads, model.init_method_std, sequence_parallel
    no, ro, v, keys = m.qk_head_dim, m.qk_pos_emb_head_dim, m.v_head_dim, m.latent_key_dim
    down = lambda outputs, parts=None: replicated(
        m.hidden_size, outputs, std, bias=False, sequence_parallel=sp, parts=parts
    )
    table: dict[str, Placement] = {}
    if m.q_lora_rank is None:
        table |= add_prefix("q", column(m.hidden_size, (g, keys), std, bias=False, matrices=(1, (keys,))))
    else:
        table |= add_prefix("q_down", down(m.q_lora_rank))
        if m.qk_layernorm:
            table |= add_prefix("q_norm", norm(m, m.q_lora_rank, sp))
        table |= add_prefix("q_up", column(m.q_lora_rank, (g, keys), std, bias=False, matrices=(1, (keys,))))
    table |= add_prefix("kv_down", down(m.kv_lora_rank + ro, (m.kv_lora_rank, ro)))
    if m.qk_layernorm:
        table |= add_prefix("kv_norm", norm(m, m.kv_lora_rank, sp))
    table |= add_prefix("kv_up", column(m.kv_lora_rank, (g, no + v), std, bias=False, matrices=(1, (no, v))))
    bias = not m.disable_bias_linear
    return table | add_prefix("output", row(g * v, m.hidden_size, output_std(m), bias=bias, sequence_parallel=sp))


# Settings of self-attention that multi-latent attention does not have -> the value with which they do nothing, and why.
WITHOUT = {
    "group_query_attention": (False, "keys and values of all heads come from one latent"),
    "num_query_groups": (None, "keys and values of all heads come from one latent"),
    "qk_layernorm_across_heads": (False, "--qk-layernorm normalizes the latents"),
    "add_qkv_bias": (False, "its products have no bias"),
    "query_pre_attn_scalar": (None, "scores are divided by the root of the channels of a key"),
    "softmax_type": ("vanilla", "its heads have no sinks"),
    "attention_output_gate": (False, "its heads have no gates"),
    "rope_local_base_freq": (None, "its rotary key is one for all layers"),
    "no_rope_freq": (None, "its rotary channels are rotated in all layers"),
}


def latent(s) -> bool:
    return s.settings.model.multi_latent_attention


def _refused(s) -> list[str]:
    same = lambda name: name == "num_query_groups" and s.num_query_groups == s.num_attention_heads
    return [name for name, (off, _) in WITHOUT.items() if getattr(s, name) != off and not same(name)]


RULES = (
    Rule(
        lambda s: "+" in s.settings.model.all_letters and set("*P") & set(s.settings.model.all_letters),
        lambda s: (
            f"--hybrid-layer-pattern {s.settings.model.hybrid_layer_pattern} lists attention and multi-latent attention "
            "(+), and a model has one of them"
        ),
    ),
    Rule(
        lambda s: UP in s.settings.recompute.modules and not latent(s),
        lambda s: f"--recompute-modules {UP} is a part of --multi-latent-attention, which these layers do not have",
    ),
    Rule(
        lambda s: latent(s) and _refused(s),
        lambda s: (
            f"--multi-latent-attention has no {dashed(_refused(s)[0])}: {WITHOUT[_refused(s)[0]][1]}; leave it out"
        ),
    ),
    Rule(
        lambda s: latent(s) and s.position_embedding_type != "rope",
        lambda s: (
            f"--multi-latent-attention has rotary positions, in channels of their own; --position-embedding-type is "
            f"{s.position_embedding_type}: say rope"
        ),
    ),
    Rule(
        lambda s: latent(s) and s.qk_pos_emb_head_dim % 2,
        lambda s: (
            f"rotary positions turn pairs: --qk-pos-emb-head-dim {s.qk_pos_emb_head_dim} is odd; nearest: "
            f"{s.qk_pos_emb_head_dim - 1 or 2} or {s.qk_pos_emb_head_dim + 1}"
        ),
    ),
    Rule(
        lambda s: latent(s) and s.rotary_percent != 1,
        lambda s: (
            f"--rotary-percent {s.rotary_percent:g}: --multi-latent-attention rotates all of its "
            f"--qk-pos-emb-head-dim {s.qk_pos_emb_head_dim} channels; choose that instead"
        ),
    ),
    Rule(
        lambda s: latent(s) and s.v_head_dim > s.qk_head_dim + s.qk_pos_emb_head_dim,
        lambda s: (
            f"--v-head-dim {s.v_head_dim}: values of --multi-latent-attention are at most as wide as keys, "
            f"--qk-head-dim {s.qk_head_dim} + --qk-pos-emb-head-dim {s.qk_pos_emb_head_dim}"
        ),
    ),
)


def _shrunk(model: Model, small: Model, tp: int) -> dict[str, Any]:
    """Narrow latents and heads; values narrower than keys if they are."""
    if not model.multi_latent_attention:
        return {}
    return dict(
        q_lora_rank=None if model.q_lora_rank is None else 24,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8 if model.v_head_dim < model.latent_key_dim else 12,
    )


def _clipped(model: Model, alpha: float) -> dict[str, Parts]:
    """The rotary key is one for all heads, and stays: rotated channels of queries have all of eta (arXiv:2507.20534)."""
    rotated, own, value = model.qk_pos_emb_head_dim, model.qk_head_dim, model.v_head_dim
    queries = "q.weight" if model.q_lora_rank is None else "q_up.weight"
    return {queries: ((rotated, 1.0), (own, alpha)), "kv_up.weight": ((own, 1 - alpha), (value, 0.0))}


KIND = Mixer(
    "mla",
    "attention",
    "megatron.model.kinds.mla.module:LatentAttention",
    weights=lambda facts, model, sequence_parallel: latent_attention(model, sequence_parallel),
    ops=latent_ops,
    symbol="+",
    listed=(("multi_latent_attention", True),),
    place="attention",
    takes=lambda model, layer: model.multi_latent_attention,
    asked=lambda model: "--multi-latent-attention" if model.multi_latent_attention else "",
    settings=LatentSettings,
    reads=("window_size",),
    rules=RULES,
    mixes_tokens=True,
    recomputes=(CORE, UP, ATTENTION),
    hf_matches="megatron.model.kinds.mla.hf:matches",
    in_megatron="megatron.model.kinds.mla.megatron:FORM",
    divided=lambda model: {"heads": model.num_attention_heads},
    heads=lambda model: model.num_attention_heads,
    rotated=lambda model: model.qk_pos_emb_head_dim,
    clipped=_clipped,
    cached=lambda model, tp: model.kv_lora_rank + model.qk_pos_emb_head_dim,
    shrunk=_shrunk,
)
