# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of the settings of multi-latent attention (`settings.rules`)."""

from megatron.model.layer_ops import UP
from megatron.settings.declare import dashed
from megatron.settings.rules import Rule

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
