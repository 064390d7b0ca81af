# SPDX-License-Identifier: Apache-2.0
"""Mapping between Hugging Face's GPT-2, Llama and Mistral (Llama with a sliding window) and ours: names, shapes, settings.

| ours                      | GPT-2                              | Llama                                         |
|---------------------------|------------------------------------|-----------------------------------------------|
| qkv.weight [g, q+2, d, h] | c_attn.weight [h, 3 g d], q = 1    | q_proj [g q d, h], k_proj, v_proj [g d, h]    |
| up.weight [ffn, h]        | c_fc.weight [h, ffn]               | gate_proj, up_proj [ffn, h]; ours [2, ffn, h] |
| output.weight [h, g q d]  | c_proj.weight [g q d, h]           | o_proj.weight, the same                       |

Legend: h hidden, g key-value groups, q queries per group, d channels per head. GPT-2 stores its matrices transposed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron.errors import CheckpointError, SettingsError
from megatron.settings.schema import Model

Tensors = list[torch.Tensor]


class Match(NamedTuple):
    """A tensor of ours and the tensors of theirs with the same values."""

    ours: str
    theirs: tuple[str, ...]
    to_ours: Callable[[Tensors], torch.Tensor] = lambda theirs: theirs[0]
    to_theirs: Callable[[torch.Tensor], Tensors] = lambda ours: [ours]


def matches(kind: str, model: Model) -> list[Match]:
    """The matches of all tensors of a model of `kind` (gpt2, llama, mistral)."""
    return (_gpt2 if kind == "gpt2" else _llama)(model)


def _transposed(ours: str, theirs: str) -> Match:
    return Match(ours, (theirs,), lambda t: t[0].t(), lambda x: [x.t()])


def _gpt2(model: Model) -> list[Match]:
    h, g, d = model.hidden_size, model.query_groups, model.head_dim
    result = [
        Match("embedding.word.weight", ("transformer.wte.weight",)),
        Match("embedding.position.weight", ("transformer.wpe.weight",)),
    ]
    for n in range(model.num_layers):
        ours, theirs = f"blocks.{n}.", f"transformer.h.{n}."
        for mine, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            result += [Match(f"{ours}{mine}.{kind}", (f"{theirs}{name}.{kind}",)) for kind in ("weight", "bias")]
        result.append(
            Match(
                f"{ours}attention.qkv.weight",
                (f"{theirs}attn.c_attn.weight",),
                lambda t: t[0].view(h, 3, g, d).permute(2, 1, 3, 0),  # [h, q k v, g, d] -> [g, q k v, d, h]
                lambda x: [x.permute(3, 1, 0, 2).reshape(h, 3 * g * d)],
            )
        )
        result.append(
            Match(
                f"{ours}attention.qkv.bias",
                (f"{theirs}attn.c_attn.bias",),
                lambda t: t[0].view(3, g, d).transpose(0, 1),
                lambda x: [x.transpose(0, 1).reshape(3 * g * d)],
            )
        )
        linears = (("attention.output", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj"))
        for mine, name in linears:
            result.append(_transposed(f"{ours}{mine}.weight", f"{theirs}{name}.weight"))
            result.append(Match(f"{ours}{mine}.bias", (f"{theirs}{name}.bias",)))
    result += [Match(f"final_norm.{kind}", (f"transformer.ln_f.{kind}",)) for kind in ("weight", "bias")]
    return result + _output(model)


def _llama(model: Model) -> list[Match]:
    h, g, d = model.hidden_size, model.query_groups, model.head_dim
    q = model.num_attention_heads // g
    result = [Match("embedding.word.weight", ("model.embed_tokens.weight",))]
    for n in range(model.num_layers):
        ours, theirs = f"blocks.{n}.", f"model.layers.{n}."
        result += [
            Match(f"{ours}attention_norm.weight", (f"{theirs}input_layernorm.weight",)),
            Match(
                f"{ours}attention.qkv.weight",
                tuple(f"{theirs}self_attn.{x}_proj.weight" for x in "qkv"),
                lambda t: torch.cat([part.view(g, -1, d, h) for part in t], 1),
                lambda x: [part.reshape(-1, h) for part in x.split((q, 1, 1), 1)],
            ),
            Match(f"{ours}attention.output.weight", (f"{theirs}self_attn.o_proj.weight",)),
            Match(f"{ours}mlp_norm.weight", (f"{theirs}post_attention_layernorm.weight",)),
            Match(
                f"{ours}mlp.up.weight",
                (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"),
                torch.stack,
                lambda x: list(x),
            ),
            Match(f"{ours}mlp.down.weight", (f"{theirs}mlp.down_proj.weight",)),
        ]
    return result + [Match("final_norm.weight", ("model.norm.weight",))] + _output(model)


def _output(model: Model) -> list[Match]:
    return [Match("output.weight", ("lm_head.weight",))] if model.untie_embeddings_and_output_weights else []


# ---- settings --------------------------------------------------------------------------------------------------------


def kind_of(model: Model) -> str:
    """gpt2, llama or mistral. Raises SettingsError, with the reasons, if the model is none of them."""
    m = model
    capped = {
        "--attn-logit-softcapping": m.attn_logit_softcapping is not None,
        "--final-logit-softcapping": m.final_logit_softcapping is not None,
    }
    windowed = {f"--window-size {m.window_size}": m.window is not None}
    gpt2 = {
        **windowed,
        f"--position-embedding-type {m.position_embedding_type}": m.position_embedding_type != "learned_absolute",
        f"--normalization {m.normalization}": m.normalization != "LayerNorm",
        "--swiglu": m.swiglu,
        "--disable-bias-linear": m.disable_bias_linear,
        f"--num-query-groups {m.query_groups}": m.query_groups != m.num_attention_heads,
        f"--kv-channels {m.head_dim}": m.head_dim * m.num_attention_heads != m.hidden_size,
        "--qk-layernorm": m.qk_layernorm,
        **capped,
    }
    llama = {
        f"--position-embedding-type {m.position_embedding_type}": m.position_embedding_type != "rope",
        f"--rotary-percent {m.rotary_percent:g}": m.rotary_percent != 1,
        f"--normalization {m.normalization}": m.normalization != "RMSNorm",
        "no --swiglu": not m.swiglu,
        "no --disable-bias-linear": not m.disable_bias_linear,
        "--qk-layernorm": m.qk_layernorm,
        **capped,
    }
    mistral = {**llama, f"--window-attn-skip-freq {m.window_attn_skip_freq}": m.window_attn_skip_freq is not None}
    llama = {**llama, **windowed}
    for kind, against in (("gpt2", gpt2), ("llama", llama), ("mistral", mistral)):
        if not any(against.values()):
            return kind
    why = "\n  ".join(
        f"not {kind}: " + ", ".join(what for what, so in against.items() if so)
        for kind, against in (("GPT-2", gpt2), ("Llama", llama), ("Mistral", mistral))
    )
    raise SettingsError("Hugging Face has no model of this shape among GPT-2, Llama and Mistral", why)


def their_settings(model: Model, vocab_size: int, end: int | None, dtype: str) -> dict[str, Any]:
    """The content of config.json. end: id of the end-of-document token; dtype: of the weights, in torch's words."""
    shared = dict(
        vocab_size=vocab_size,
        initializer_range=model.init_method_std,
        bos_token_id=end,
        eos_token_id=end,
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        dtype=dtype,
        use_cache=True,
    )
    kind = kind_of(model)
    if kind == "gpt2":
        return dict(
            model_type="gpt2",
            architectures=["GPT2LMHeadModel"],
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
            **shared,
        )
    own = dict(architectures=["LlamaForCausalLM"], attention_bias=False, mlp_bias=False)
    if kind == "mistral":  # its window includes a token's own key
        own = dict(architectures=["MistralForCausalLM"], sliding_window=model.window + 1)
    return dict(
        model_type=kind,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.query_groups,
        head_dim=model.head_dim,
        hidden_act="silu",
        max_position_embeddings=model.position_table,
        rms_norm_eps=model.norm_epsilon,
        attention_dropout=model.attention_dropout,
        rope_theta=model.rotary_base,
        rope_parameters=dict(rope_theta=model.rotary_base, **_their_rope(model)),
        **own,
        **shared,
    )


def _their_rope(m: Model) -> dict[str, Any]:
    """The scaling of rotary frequencies, as entries of `rope_parameters`."""
    if m.rotary_seq_len_interpolation_factor is not None:
        return dict(rope_type="linear", factor=m.rotary_seq_len_interpolation_factor)
    if m.use_rope_scaling:
        return dict(
            rope_type="llama3",
            factor=m.rope_scaling_factor,
            low_freq_factor=m.rope_scaling_low_freq_factor,
            high_freq_factor=m.rope_scaling_high_freq_factor,
            original_max_position_embeddings=m.rope_scaling_original_max_position_embeddings,
        )
    if m.rope_type == "yarn":
        return dict(
            rope_type="yarn",
            factor=m.rotary_scaling_factor,
            beta_fast=m.yarn_beta_fast,
            beta_slow=m.yarn_beta_slow,
            truncate=m.yarn_correction_range_round_to_int,
            attention_factor=m.yarn_stretch,
            original_max_position_embeddings=m.yarn_original_max_position_embeddings,
        )
    return dict(rope_type="default")


def _our_rope(c: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Our settings from `rope_parameters`, or from `rope_scaling` of older files."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    known = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": (
            *("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
            "original_max_position_embeddings",
        ),
    }
    _refuse(dict(rope_type=kind), rope_type=tuple(known))
    _refuse(rope, partial_rotary_factor=(1, 1.0))
    common = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    other = sorted(set(rope) - set(known[kind]) - set(common)) if kind != "default" else []
    if other:
        raise CheckpointError(
            f"{', '.join(other)} in the rope_parameters of config.json cannot be expressed here",
            f"known of {kind}: {', '.join(known[kind])}",
        )
    if kind == "default":
        return {}
    name = "original_max_position_embeddings"
    # In this order, as transformers reads them.
    original = c.get(name) or rope.get(name) or c["max_position_embeddings"]
    if kind == "linear":
        return dict(rotary_seq_len_interpolation_factor=float(rope["factor"]))
    if kind == "llama3":
        return dict(
            use_rope_scaling=True,
            rope_scaling_factor=float(rope["factor"]),
            rope_scaling_low_freq_factor=float(rope["low_freq_factor"]),
            rope_scaling_high_freq_factor=float(rope["high_freq_factor"]),
            rope_scaling_original_max_position_embeddings=int(original),
        )
    factor = float(rope.get("factor") or c["max_position_embeddings"] / original)
    return dict(
        rope_type="yarn",
        rotary_scaling_factor=factor,
        yarn_original_max_position_embeddings=int(original),
        yarn_beta_fast=float(rope.get("beta_fast") or 32),
        yarn_beta_slow=float(rope.get("beta_slow") or 1),
        yarn_correction_range_round_to_int=bool(rope.get("truncate", True)),
        **_our_stretch(rope, factor),
    )


def _our_stretch(rope: dict[str, Any], factor: float) -> dict[str, float]:
    """--mscale and --mscale-all-dim from their YaRN, which may give the resulting factor instead."""
    given, pair = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if given is None:
        return dict(mscale=float(pair[0]), mscale_all_dim=float(pair[1])) if all(pair) else {}
    if factor > 1:
        return dict(mscale=(float(given) - 1) / (0.1 * math.log(factor)))
    _refuse(rope, attention_factor=(1, 1.0))
    return {}


def our_settings(theirs: dict[str, Any]) -> tuple[str, Model, int]:
    """(kind, model, vocabulary) from the content of config.json. Raises CheckpointError if it is unsupported."""
    kind = theirs.get("model_type")
    kinds = ("gpt2", "llama", "mistral")
    if kind not in kinds:
        raise CheckpointError(f"model_type {kind!r} in config.json is not read here", f"there are: {', '.join(kinds)}")
    try:
        model, vocab_size = (_from_gpt2 if kind == "gpt2" else _from_llama)(theirs)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"config.json is not complete: {error!r}") from None
    sizes = (
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.seq_length,
        model.ffn_hidden_size,
        vocab_size,
    )
    if not all(0 < size < 1 << 31 for size in sizes):
        raise CheckpointError(f"config.json describes no model: sizes {', '.join(map(str, sizes))}")
    return kind, model, vocab_size


def _refuse(theirs: dict[str, Any], **allowed) -> None:
    """Raise CheckpointError if a setting has a value that changes the arithmetic."""
    for name, values in allowed.items():
        if name in theirs and theirs[name] not in values:
            raise CheckpointError(
                f"{name} {theirs[name]!r} in config.json cannot be expressed here",
                f"known: {', '.join(map(repr, values))}",
            )


def _from_gpt2(c: dict[str, Any]) -> tuple[Model, int]:
    off = (False, None)
    _refuse(
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


def _from_llama(c: dict[str, Any]) -> tuple[Model, int]:
    off = (False, None)
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}  # in this order, as transformers reads them
    _refuse(c, hidden_act=("silu",), attention_bias=off, mlp_bias=off, partial_rotary_factor=(1, 1.0, None))
    heads, length = int(c["num_attention_heads"]), int(c["max_position_embeddings"])
    groups = int(c.get("num_key_value_heads") or heads)
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
        normalization="RMSNorm",
        norm_epsilon=float(c.get("rms_norm_eps", 1e-6)),
        swiglu=True,
        disable_bias_linear=True,
        hidden_dropout=0.0,
        attention_dropout=float(c.get("attention_dropout") or 0.0),
        init_method_std=float(c.get("initializer_range", 0.02)),
        untie_embeddings_and_output_weights=not c.get("tie_word_embeddings", False),
        window_size=_our_window(c),
        **_our_rope(c, rope),
    )
    return model, int(c["vocab_size"])


def _our_window(c: dict[str, Any]) -> str | None:
    """--window-size of a Mistral, whose window includes a token's own key; transformers' default is 4096."""
    window = c.get("sliding_window", 4096) if c["model_type"] == "mistral" else None
    if window is not None and int(window) < 1:
        raise CheckpointError(f"sliding_window {window!r} in config.json cannot be expressed here")
    return None if window is None else f"{int(window) - 1},0"
