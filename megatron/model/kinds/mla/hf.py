# SPDX-License-Identifier: Apache-2.0
"""Mapping between multi-latent attention in Hugging Face's DeepSeek-V2 and V3 and ours: entries of config.json, tensors.

Their rotated channels are pairs of neighbours, and come after a head's others; ours are halves, and come first.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from megatron.errors import CheckpointError
from megatron.model.gpt.hf_rope import refuse
from megatron.model.hf_match import Match, linear_matches
from megatron.settings.schema import Model

FAMILIES = ("deepseek_v2", "deepseek_v3")
_V2 = dict(
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    moe_intermediate_size=1407,
    topk_method="greedy",
)
_V3 = _V2 | dict(
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    moe_intermediate_size=2048,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    norm_topk_prob=True,
    topk_method="noaux_tc",
)
DEFAULTS = dict(deepseek_v2=_V2, deepseek_v3=_V3)  # of missing entries of config.json
ALIASES = dict(kimi_k2="deepseek_v3")  # other names of a model_type, whose code is the same
EPSILON = 1e-6  # of the norms of their latents, whatever rms_norm_eps says


def against_latents(m: Model) -> dict[str, bool]:
    """Reasons why a model is not of these families -> whether they hold."""
    return {f"--norm-epsilon {m.norm_epsilon:g}": m.norm_epsilon != EPSILON}


# ---- config.json -----------------------------------------------------------------------------------------------------


def their_latents(kind: str, m: Model) -> dict[str, Any]:
    """The entries of config.json for the latents of a model."""
    if kind not in FAMILIES:
        return {}
    return dict(
        q_lora_rank=m.q_lora_rank,
        kv_lora_rank=m.kv_lora_rank,
        qk_nope_head_dim=m.qk_head_dim,
        qk_rope_head_dim=m.qk_pos_emb_head_dim,
        v_head_dim=m.v_head_dim,
        head_dim=m.qk_pos_emb_head_dim,
        num_key_value_heads=m.num_attention_heads,
        **(dict(rope_interleave=True, num_nextn_predict_layers=m.own_depths) if kind == "deepseek_v3" else {}),
    )


def our_latents(kind: str, c: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Our settings for the latents of a config.json. Raises CheckpointError for those that we do not have."""
    if kind not in FAMILIES:
        return {}
    refuse(
        c, rope_interleave=(True, None), rms_norm_eps=(EPSILON,), num_key_value_heads=(c["num_attention_heads"], None)
    )
    refuse(c.get("quantization_config") or {}, quant_method=("fp8",))
    q = c.get("q_lora_rank")
    return dict(
        multi_latent_attention=True,
        q_lora_rank=q and int(q),
        kv_lora_rank=int(c["kv_lora_rank"]),
        qk_head_dim=int(c["qk_nope_head_dim"]),
        qk_pos_emb_head_dim=int(c["qk_rope_head_dim"]),
        v_head_dim=int(c["v_head_dim"]),
        **_temperature(c, rope),
    )


def _temperature(c: dict[str, Any], rope: dict[str, Any]) -> dict[str, float]:
    """--mscale and --mscale-all-dim. Scores have the second one, whatever the factor of rotated channels is."""
    all_dim = float(rope.get("mscale_all_dim") or 0.0)
    kind, factor = rope.get("rope_type") or rope.get("type") or "default", float(rope.get("factor") or 1.0)
    if kind != "yarn" or factor <= 1:
        if all_dim and factor > 1 and kind != "default":
            raise CheckpointError(f"mscale_all_dim of rope_type {kind} in config.json cannot be expressed here")
        return {}
    heat = 0.1 * math.log(factor)
    given = rope.get("attention_factor")
    if given is None and rope.get("mscale") and all_dim:
        return dict(mscale=float(rope["mscale"]), mscale_all_dim=all_dim)
    stretch = float(given) if given is not None else heat + 1
    return dict(mscale=(stretch * (heat * all_dim + 1) - 1) / heat, mscale_all_dim=all_dim)


def with_temperature(kind: str, m: Model, rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` with what scores are multiplied by; as in DeepSeek's files, if they can say it."""
    if kind not in FAMILIES or m.rope_type != "yarn":
        return rope
    if not (m.mscale and m.mscale_all_dim):
        return rope | dict(mscale_all_dim=m.mscale_all_dim)
    both = dict(mscale=m.mscale, mscale_all_dim=m.mscale_all_dim)
    return {name: value for name, value in rope.items() if name != "attention_factor"} | both


# ---- tensors ---------------------------------------------------------------------------------------------------------


def matches(kind: str, model: Model, ours: str, theirs: str, norm: Callable[[str, str], Match]) -> list[Match]:
    """The matches of a layer's attention. ours: `blocks.7.attention.`; theirs: `model.layers.7.`"""
    theirs, m = f"{theirs}self_attn.", model
    g, no, ro, kv = m.num_attention_heads, m.qk_head_dim, m.qk_pos_emb_head_dim, m.kv_lora_rank
    halves = torch.arange(ro).view(-1, 2).t().flatten()  # of pairs: the first of each, then the second
    of_queries = torch.cat((no + halves, torch.arange(no)))
    of_latent = torch.cat((torch.arange(kv), kv + halves))
    back = of_queries.argsort(), of_latent.argsort()
    q, name = ("q", "q_proj") if m.q_lora_rank is None else ("q_up", "q_b_proj")
    result = []
    if m.q_lora_rank is not None:
        result.append(Match(f"{ours}q_down.weight", (f"{theirs}q_a_proj.weight",)))
        result.append(norm(f"{ours}q_norm", f"{theirs}q_a_layernorm"))
    return [
        *result,
        Match(
            f"{ours}{q}.weight",
            (f"{theirs}{name}.weight",),
            lambda t: t[0].unflatten(0, (g, -1))[:, of_queries],
            lambda x: [x[:, back[0]].flatten(0, 1)],
        ),
        Match(
            f"{ours}kv_down.weight",
            (f"{theirs}kv_a_proj_with_mqa.weight",),
            lambda t: t[0][of_latent],
            lambda x: [x[back[1]]],
        ),
        norm(f"{ours}kv_norm", f"{theirs}kv_a_layernorm"),
        Match(
            f"{ours}kv_up.weight",
            (f"{theirs}kv_b_proj.weight",),
            lambda t: t[0].unflatten(0, (g, -1)),
            lambda x: [x.flatten(0, 1)],
        ),
        *linear_matches(model, f"{ours}output", f"{theirs}o_proj"),
    ]
