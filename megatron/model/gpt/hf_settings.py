# SPDX-License-Identifier: Apache-2.0
"""Mapping between config.json of Hugging Face's decoders (`hf_families`) and our settings. `hf_names` has their tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.errors import CheckpointError
from megatron.model.gpt import hf_ahead, hf_falcon, hf_hybrid
from megatron.model.gpt.hf_families import ANY, FAMILIES, REFUSED, kind_of
from megatron.model.gpt.hf_layers import layer_types, our_rotation, our_windows, their_rotation, their_window, two_ropes
from megatron.model.gpt.hf_rope import our_rope, refuse, their_rope
from megatron.model.kinds.experts.hf import our_experts, their_experts
from megatron.model.kinds.gdn.hf import our_layers, their_layers
from megatron.model.kinds.mla.hf import ALIASES, our_latents, their_latents, with_temperature
from megatron.model.kinds.mlp.settings import QUICK
from megatron.settings.groups.model import Model

# ---- to config.json --------------------------------------------------------------------------------------------------


def their_settings(model: Model, vocab_size: int, end: int | None, dtype: str) -> dict[str, Any]:
    """The content of config.json. end: id of the end-of-document token; dtype: of the weights, in torch's words."""
    kind = kind_of(model)
    shared = dict(
        model_type=kind,
        architectures=[FAMILIES[kind].architecture],
        vocab_size=vocab_size,
        initializer_range=model.init_method_std,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=None,  # some have a default, which may be no id of this vocabulary
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        dtype=dtype,
        use_cache=True,
    )
    ahead = dict(num_nextn_predict_layers=model.own_depths) if model.depths and not hf_ahead.reason(kind, model) else {}
    return shared | (THEIRS[kind](model) if kind in THEIRS else _to_decoder(kind, model)) | ahead


def _to_gpt2(model: Model) -> dict[str, Any]:
    return dict(
        n_positions=model.position_table,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_attention_heads,
        n_inner=model.ffn_size,
        activation_function="relu2" if model.squared_relu else "gelu_new" if model.bias_gelu_fusion else "gelu",
        layer_norm_epsilon=model.norm_epsilon,
        embd_pdrop=model.hidden_dropout,
        resid_pdrop=model.hidden_dropout,
        attn_pdrop=model.attention_dropout,
    )


def _to_decoder(kind: str, m: Model) -> dict[str, Any]:
    part = dict(partial_rotary_factor=m.rotary_percent) if "rotary_percent" in FAMILIES[kind].differs else {}
    rope = dict(rope_theta=m.rotary_base, **their_rope(m), **part)
    common = dict(
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.query_groups,
        head_dim=m.head_dim,
        max_position_embeddings=m.position_table,
        rms_norm_eps=m.norm_epsilon,
        attention_dropout=m.attention_dropout,
        rope_theta=m.rotary_base,
        rope_parameters=rope,
        hidden_act="silu",
        attention_bias=not m.disable_bias_linear,
        **part,
    )
    windows = dict(sliding_window=their_window(m))
    rope = with_temperature(kind, m, rope)
    common |= their_experts(kind, m) | their_latents(kind, m) | their_layers(kind, m) | dict(rope_parameters=rope)
    if kind in ("llama", "smollm3"):
        return common | dict(mlp_bias=not m.disable_bias_linear) | their_rotation(kind, m)
    if kind in ("mistral", "mixtral"):
        return common | windows
    if kind == "qwen2_moe":
        return common | dict(use_sliding_window=False)
    if kind == "qwen3_moe":
        return common | windows | dict(use_sliding_window=m.window is not None)
    if kind == "dots1":
        return common | dict(sliding_window=None, layer_types=layer_types(m))
    if kind in ("qwen2", "qwen3"):
        used = m.window is not None
        return common | windows | dict(use_sliding_window=used, max_window_layers=0, layer_types=layer_types(m))
    if kind == "phi3":
        drops = dict(resid_pdrop=m.hidden_dropout, embd_pdrop=m.hidden_dropout)
        return common | windows | drops | dict(original_max_position_embeddings=m.position_table)
    if kind == "gemma":
        return common | dict(hidden_act="gelu_pytorch_tanh")
    if kind == "gpt_oss":
        gate = dict(swiglu_alpha=QUICK, swiglu_limit=m.activation_func_clamp_value)
        windows = dict(sliding_window=their_window(m) or m.position_table, layer_types=layer_types(m))
        return common | windows | gate | dict(attention_bias=True)
    if kind in ("gemma2", "gemma3_text"):
        common |= windows | dict(
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=int(m.query_pre_attn_scalar or m.head_dim),
            layer_types=layer_types(m),
            final_logit_softcapping=m.final_logit_softcapping,
            attn_logit_softcapping=m.attn_logit_softcapping,
        )
        common["sliding_window"] = their_window(m) or m.position_table  # it builds a mask even if no layer uses it
        del common["hidden_act"]
    if kind == "gemma3_text":
        base = m.rope_local_base_freq
        local = rope if base is None else dict(rope_type="default", rope_theta=base)
        common |= dict(rope_parameters=dict(full_attention=rope, sliding_attention=dict(local)))
        common |= dict(rope_local_base_freq=local["rope_theta"])
    return common


# ---- from config.json ------------------------------------------------------------------------------------------------


def our_settings(theirs: dict[str, Any], others: tuple[str, ...] = ()) -> tuple[str, Model, int]:
    """(kind, model, vocabulary) from the content of config.json. Raises CheckpointError if it is unsupported.

    others: model types that the caller reads, for the message
    """
    kind = theirs.get("model_type")
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"model_type {kind!r} in config.json is not read here",
            REFUSED.get(str(kind)),
            f"there are {', '.join((*FAMILIES, *others))}",
        )
    try:
        model, vocab_size = OURS[kind](theirs) if kind in OURS else _from_decoder(kind, theirs)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"config.json is not complete: {error!r}", do="get the whole file of the model") from None
    sizes = (
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.seq_length,
        model.ffn_size,
        model.query_groups,
        model.head_dim,
        vocab_size,
    )
    if not all(0 < size < 1 << 31 for size in sizes):
        what = f"config.json describes no model: sizes {', '.join(map(str, sizes))}"
        raise CheckpointError(what, do="get the whole file of the model")
    return kind, model, vocab_size


def _from_gpt2(c: dict[str, Any]) -> tuple[Model, int]:
    off = (False, None)
    refuse(
        c,
        activation_function=("gelu_new", "gelu_pytorch_tanh", "gelu", "relu2"),
        add_cross_attention=off,
        scale_attn_by_inverse_layer_idx=off,
        scale_attn_weights=(True,),
    )
    length = int(c.get("n_positions") or c.get("n_ctx"))
    model = Model(
        num_layers=int(c["n_layer"]),
        hidden_size=int(c["n_embd"]),
        num_attention_heads=int(c["n_head"]),
        seq_length=length,
        max_position_embeddings=length,
        ffn_hidden_size=int(c.get("n_inner") or 4 * c["n_embd"]),
        norm_epsilon=float(c.get("layer_norm_epsilon", 1e-5)),
        hidden_dropout=float(c.get("resid_pdrop", 0.1)),
        attention_dropout=float(c.get("attn_pdrop", 0.1)),
        init_method_std=float(c.get("initializer_range", 0.02)),
        squared_relu=c.get("activation_function") == "relu2",
        bias_gelu_fusion=c.get("activation_function", "gelu_new") != "gelu",
        untie_embeddings_and_output_weights=not c.get("tie_word_embeddings", True),
    )
    return model, int(c["vocab_size"])


def _from_decoder(kind: str, c: dict[str, Any]) -> tuple[Model, int]:
    differs, off = FAMILIES[kind].differs, (False, None)
    c = FAMILIES[kind].defaults | c
    gated_gelu = "geglu" in differs
    _refuse_other(kind, c, gated_gelu)
    local = {}
    if kind == "gemma3_text":
        c, local = two_ropes(c)
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}  # in this order, as transformers reads them
    part = rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0
    if "rotary_percent" not in differs:
        refuse(dict(partial_rotary_factor=part), partial_rotary_factor=(1, 1.0))
    heads, length = int(c["num_attention_heads"]), int(c["max_position_embeddings"])
    groups = int(c.get("num_key_value_heads") or heads)
    caps = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    own = {name: c[name] and float(c[name]) for name in caps if differs.get(name) is ANY and name in c}
    fixed = (
        *("norm_position", "qk_layernorm", "qk_layernorm_across_heads", "add_qkv_bias", "scale_embedding"),
        *("softmax_type", "quick_geglu", "glu_linear_offset", "attention_output_gate"),
    )
    if differs.get("activation_func_clamp_value") is ANY:
        own |= dict(activation_func_clamp_value=float(c["swiglu_limit"]))
    if kind == "qwen3_next":
        own |= our_layers(c)
    if "no_rope_freq" in differs:
        own |= dict(no_rope_freq=our_rotation(c))
    windows = our_windows(kind, c) if "window_size" in differs else {}
    latents = our_latents(kind, c, rope)
    model = Model(
        num_layers=int(c["num_hidden_layers"]),
        hidden_size=int(c["hidden_size"]),
        num_attention_heads=heads,
        num_query_groups=groups,
        group_query_attention=groups != heads,
        kv_channels=int(c.get("head_dim") or c["hidden_size"] // heads),
        ffn_hidden_size=int(c["intermediate_size"]),
        seq_length=length,
        max_position_embeddings=length,
        position_embedding_type="rope",
        rotary_base=float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0),
        rotary_percent=float(part),
        normalization="RMSNorm",
        norm_epsilon=float(c.get("rms_norm_eps", 1e-6)),
        swiglu=differs.get("swiglu", True),
        geglu=gated_gelu,
        disable_bias_linear=c.get("attention_bias") in off,
        hidden_dropout=float(c.get("resid_pdrop") or 0.0),
        attention_dropout=float(c.get("attention_dropout") or 0.0),
        init_method_std=float(c.get("initializer_range", 0.02)),
        untie_embeddings_and_output_weights=not c.get("tie_word_embeddings", False),
        **{name: differs[name] for name in fixed if name in differs},
        **own,
        **windows,
        **(local if windows.get("window_size") else {}),
        **our_rope(c, rope),
        **our_experts(kind, c),
    )
    model = replace(model, num_query_groups=None, kv_channels=None, **latents) if latents else model
    return model, int(c["vocab_size"])


def _refuse_other(kind: str, c: dict[str, Any], gated_gelu: bool) -> None:
    """Raise CheckpointError for entries of config.json that our model of this family does not have."""
    off, tanh = (False, None), ("gelu_pytorch_tanh", "gelu_new", None)
    if kind == "gemma":
        activation = c.get("hidden_activation") or c.get("hidden_act")
        refuse(dict(hidden_act=activation), hidden_act=(*tanh, "gelu"))  # "gelu" of old files means the tanh form
    elif gated_gelu:
        refuse(c, hidden_activation=tanh)
    else:
        refuse(c, hidden_act=("silu",))
    refuse(c, use_bidirectional_attention=off)
    if kind == "gpt_oss":
        refuse(c, attention_bias=(True,), swiglu_alpha=(QUICK,))
        refuse(c.get("quantization_config") or {}, quant_method=("mxfp4",))
    elif kind != "llama" or bool(c.get("attention_bias")) != bool(c.get("mlp_bias")):
        refuse(c, attention_bias=off, mlp_bias=off)
    if kind == "gemma3_text":
        refuse(c, attn_logit_softcapping=(None,))  # transformers does not use it


# ---- families with a config.json of their own ------------------------------------------------------------------------

THEIRS: dict[str, Callable[[Model], dict[str, Any]]] = dict(
    gpt2=_to_gpt2, mamba2=hf_hybrid.to_mamba2, nemotron_h=hf_hybrid.to_nemotron_h, falcon_h1=hf_falcon.to_falcon_h1
)
OURS: dict[str, Callable[[dict[str, Any]], tuple[Model, int]]] = dict(
    gpt2=_from_gpt2,
    mamba2=hf_hybrid.from_mamba2,
    nemotron_h=hf_hybrid.from_nemotron_h,
    falcon_h1=hf_falcon.from_falcon_h1,
)
