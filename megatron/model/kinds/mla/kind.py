# SPDX-License-Identifier: Apache-2.0
"""The record of multi-latent attention. Needs no torch."""

from typing import Any

from megatron.model.kinds.mixer import Mixer, Parts
from megatron.model.kinds.mla.mla_rules import RULES
from megatron.model.kinds.mla.ops import latent_ops
from megatron.model.kinds.mla.settings import LatentSettings
from megatron.model.kinds.mla.weights import latent_attention
from megatron.model.layer_ops import ATTENTION, CORE, UP
from megatron.settings.schema import Model


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
