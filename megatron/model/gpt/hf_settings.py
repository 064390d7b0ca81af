# SPDX-License-Identifier: Apache-2.0
"""Mapping between config.json of Hugging Face's decoders and our settings. `hf_names` has their tensors.

A family is described by the settings in which it differs from Llama (`FAMILIES`). A model is exported as the first family
that has all of its settings; if there is none, the error names the settings that the nearest ones lack.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.errors import CheckpointError, SettingsError
from megatron.model.gpt import hf_ahead, hf_falcon, hf_hybrid
from megatron.model.gpt.hf_layers import layer_types, our_rotation, our_windows, their_rotation, their_window, two_ropes
from megatron.model.gpt.hf_rope import our_rope, refuse, their_rope
from megatron.model.kinds.experts.hf import DENSE, against_experts, effective_experts, our_experts, their_experts
from megatron.model.kinds.gdn.hf import our_layers, their_layers
from megatron.model.kinds.mla.hf import ALIASES, DEFAULTS, against_latents, our_latents, their_latents, with_temperature
from megatron.model.kinds.mlp.settings import QUICK
from megatron.settings.declare import dashed
from megatron.settings.groups.model import Model
from megatron.settings.hybrid_pattern import FLAG

# The settings that change what a model computes -> their values in a Llama; other settings only change training.
LLAMA: dict[str, Any] = dict(
    position_embedding_type="rope",
    rotary_percent=1.0,
    rotary_seq_len_interpolation_factor=None,
    use_rope_scaling=False,
    rope_type="rope",
    rope_local_base_freq=None,
    no_rope_freq=None,
    layer_settings=None,
    normalization="RMSNorm",
    norm_position="pre",
    qk_layernorm=False,
    qk_layernorm_across_heads=False,
    multi_latent_attention=False,
    swiglu=True,
    geglu=False,
    squared_relu=False,
    quick_geglu=False,
    activation_func_clamp_value=None,
    glu_linear_offset=0.0,
    bias_gelu_fusion=True,
    disable_bias_linear=True,
    add_qkv_bias=False,
    scale_embedding=False,
    query_pre_attn_scalar=None,
    window_size=None,
    window_attn_skip_freq=None,
    attn_logit_softcapping=None,
    softmax_type="vanilla",
    attention_output_gate=False,
    experimental_attention_variant=None,
    final_logit_softcapping=None,
    hybrid_layer_pattern=None,
    mamba_rms_norm=True,
    mamba_norm_before_gate=False,
    **DENSE,
)
ANY = object()  # any value of a setting
SCALED = dict.fromkeys(("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_type"), ANY)
EXPERTS = dict(num_experts=ANY)
LAYERS_DENSE = dict(EXPERTS, moe_layer_freq=ANY, moe_router_pre_softmax=ANY)
SHARED = dict(LAYERS_DENSE, moe_shared_expert_intermediate_size=ANY)
GROUPED = dict(moe_router_num_groups=ANY, moe_router_group_topk=ANY, moe_router_topk_scaling_factor=ANY)
GROUPED |= dict(moe_router_group_score_topk=ANY)
SIGMOID = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
WINDOWS = dict.fromkeys(("window_size", "window_attn_skip_freq"), ANY)
GPT_OSS = dict(
    SCALED,
    **EXPERTS,
    **WINDOWS,
    softmax_type="learnable",
    swiglu=False,
    quick_geglu=True,
    activation_func_clamp_value=ANY,
    glu_linear_offset=1.0,
    disable_bias_linear=False,
)
GEMMA = dict(swiglu=False, geglu=True, scale_embedding=True)
GEMMA_2 = dict(GEMMA, **WINDOWS, norm_position="sandwich", query_pre_attn_scalar=ANY, final_logit_softcapping=ANY)


MIXERS = dict(position_embedding_type="none", swiglu=False, hybrid_layer_pattern=ANY)


def _uneven_heads(m: Model) -> dict[str, bool]:
    return {f"--num-attention-heads {m.num_attention_heads}": m.hidden_size % m.num_attention_heads != 0}


def _gemma_2(m: Model) -> dict[str, bool]:
    scalar = m.query_pre_attn_scalar or m.head_dim
    return {f"--query-pre-attn-scalar {scalar:g}": scalar != int(scalar), **_uneven_heads(m)}


def _gpt2(m: Model) -> dict[str, bool]:
    return {
        f"--num-query-groups {m.query_groups}": m.query_groups != m.num_attention_heads,
        f"--kv-channels {m.head_dim}": m.head_dim * m.num_attention_heads != m.hidden_size,
    }


def _latent(kind: str) -> Callable[[Model], dict[str, bool]]:
    even = _uneven_heads if kind == "deepseek_v2" else lambda model: {}
    return lambda model: against_experts(kind)(model) | against_latents(model) | even(model)


class DecoderFamily(NamedTuple):
    """A family of transformers.

    name, architecture: in words, and the class of its model
    differs:  setting -> its value, if it is not that of a Llama
    against:  more reasons why a model does not belong to it: reason -> whether it holds
    defaults: values that its configuration class has for missing entries of config.json
    """

    name: str
    architecture: str
    differs: dict[str, Any]
    defaults: dict[str, Any] = {}
    against: Callable[[Model], dict[str, bool]] = lambda model: {}

    def reasons(self, model: Model) -> list[str]:
        """Flags of the model that this family does not have, or lacks."""
        wanted = LLAMA | self.differs
        values = effective(model)
        other = [name for name in LLAMA if wanted[name] is not ANY and values[name] != wanted[name]]
        return [_flag(name, values[name]) for name in other] + [why for why, so in self.against(model).items() if so]


_EPSILON_5 = dict(rms_norm_eps=1e-5)
_GEMMA = dict(head_dim=256, tie_word_embeddings=True, query_pre_attn_scalar=256, sliding_window=4096)
_MISTRAL = dict(num_key_value_heads=8, sliding_window=4096)
_YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
_GPT_OSS = dict(
    _EPSILON_5,
    num_key_value_heads=8,
    head_dim=64,
    attention_bias=True,
    sliding_window=128,
    rope_theta=150000.0,
    rope_parameters=dict(_YARN, original_max_position_embeddings=4096),
    num_local_experts=128,
    num_experts_per_tok=4,
    swiglu_limit=7.0,
    swiglu_alpha=QUICK,
)
_QWEN = dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=28, use_sliding_window=False)
_QWEN3_NEXT = dict(
    num_key_value_heads=2,
    head_dim=256,
    intermediate_size=5632,
    num_experts=512,
    num_experts_per_tok=10,
    norm_topk_prob=True,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    partial_rotary_factor=0.25,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
_LATENT = dict(SCALED, **SHARED, **GROUPED, multi_latent_attention=True, qk_layernorm=True)
FAMILIES: dict[str, DecoderFamily] = {  # model_type -> family
    "gpt2": DecoderFamily(
        "GPT-2",
        "GPT2LMHeadModel",
        dict(
            position_embedding_type="learned_absolute",
            normalization="LayerNorm",
            swiglu=False,
            squared_relu=ANY,
            bias_gelu_fusion=ANY,
            disable_bias_linear=False,
        ),
        against=_gpt2,
    ),
    "llama": DecoderFamily("Llama", "LlamaForCausalLM", dict(SCALED, disable_bias_linear=ANY)),
    "smollm3": DecoderFamily(
        "SmolLM3",
        "SmolLM3ForCausalLM",
        dict(SCALED, no_rope_freq=ANY),
        dict(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True),
    ),
    "mistral": DecoderFamily("Mistral", "MistralForCausalLM", dict(SCALED, window_size=ANY), _MISTRAL),
    "qwen2": DecoderFamily("Qwen2", "Qwen2ForCausalLM", dict(SCALED, **WINDOWS, add_qkv_bias=True), _QWEN),
    "qwen3": DecoderFamily(
        "Qwen3", "Qwen3ForCausalLM", dict(SCALED, **WINDOWS, qk_layernorm=True), dict(_QWEN, head_dim=128)
    ),
    "phi3": DecoderFamily("Phi-3", "Phi3ForCausalLM", dict(rotary_percent=ANY, window_size=ANY), _EPSILON_5),
    "olmo2": DecoderFamily(
        "OLMo 2",
        "Olmo2ForCausalLM",
        dict(SCALED, norm_position="post", qk_layernorm=True, qk_layernorm_across_heads=True),
        _EPSILON_5,
    ),
    "gemma": DecoderFamily("Gemma", "GemmaForCausalLM", dict(SCALED, **GEMMA), dict(_GEMMA, num_key_value_heads=16)),
    "gemma2": DecoderFamily(
        "Gemma 2",
        "Gemma2ForCausalLM",
        dict(SCALED, **GEMMA_2, attn_logit_softcapping=ANY),
        dict(_GEMMA, num_key_value_heads=4, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        against=_gemma_2,
    ),
    "gemma3_text": DecoderFamily(
        "Gemma 3",
        "Gemma3ForCausalLM",
        dict(GEMMA_2, rotary_seq_len_interpolation_factor=ANY, rope_local_base_freq=ANY, qk_layernorm=True),
        dict(_GEMMA, num_key_value_heads=4, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6),
        against=_gemma_2,
    ),
    "mixtral": DecoderFamily(
        "Mixtral",
        "MixtralForCausalLM",
        dict(SCALED, **EXPERTS, window_size=ANY),
        dict(_EPSILON_5, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6),
        against=against_experts("mixtral"),
    ),
    "olmoe": DecoderFamily(
        "OLMoE",
        "OlmoeForCausalLM",
        dict(SCALED, **EXPERTS, moe_router_pre_softmax=ANY, qk_layernorm=True, qk_layernorm_across_heads=True),
        dict(_EPSILON_5, num_experts=64, num_experts_per_tok=8, intermediate_size=2048),
        against=against_experts("olmoe"),
    ),
    "qwen2_moe": DecoderFamily(
        "Qwen2-MoE",
        "Qwen2MoeForCausalLM",
        dict(SCALED, **SHARED, moe_shared_expert_gate=True, add_qkv_bias=True),
        dict(num_key_value_heads=16, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408),
        against=against_experts("qwen2_moe"),
    ),
    "qwen3_moe": DecoderFamily(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        dict(SCALED, **LAYERS_DENSE, window_size=ANY, qk_layernorm=True),
        dict(
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            sliding_window=4096,
        )
        | dict(use_sliding_window=False),
        against=against_experts("qwen3_moe"),
    ),
    "qwen3_next": DecoderFamily(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        dict(
            SCALED,
            **SHARED,
            moe_shared_expert_gate=True,
            qk_layernorm=True,
            attention_output_gate=True,
            experimental_attention_variant=ANY,
            rotary_percent=ANY,
        ),
        _QWEN3_NEXT,
        against=against_experts("qwen3_next"),
    ),
    "dots1": DecoderFamily(
        "dots.llm1",
        "Dots1ForCausalLM",
        dict(SCALED, **SHARED, **GROUPED, **SIGMOID, qk_layernorm=True),
        dict(num_key_value_heads=32, moe_intermediate_size=1408, sliding_window=None, norm_topk_prob=False),
        against=against_experts("dots1"),
    ),
    "deepseek": DecoderFamily(
        "DeepSeek-MoE",
        "DeepseekForCausalLM",
        dict(SCALED, **SHARED, moe_router_topk_scaling_factor=ANY),
        dict(moe_intermediate_size=1407),
        against=against_experts("deepseek"),
    ),
    "deepseek_v2": DecoderFamily(
        "DeepSeek-V2", "DeepseekV2ForCausalLM", _LATENT, DEFAULTS["deepseek_v2"], against=_latent("deepseek_v2")
    ),
    "deepseek_v3": DecoderFamily(
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        dict(_LATENT, **dict.fromkeys(SIGMOID, ANY)),
        DEFAULTS["deepseek_v3"],
        against=_latent("deepseek_v3"),
    ),
    "gpt_oss": DecoderFamily("gpt-oss", "GptOssForCausalLM", GPT_OSS, _GPT_OSS, against=against_experts("gpt_oss")),
    "mamba2": DecoderFamily(
        "Mamba-2", "Mamba2ForCausalLM", dict(MIXERS, swiglu=ANY, squared_relu=ANY), against=hf_hybrid.against_mamba2
    ),
    "nemotron_h": DecoderFamily(
        "Nemotron-H",
        "NemotronHForCausalLM",
        dict(MIXERS, **SHARED, **GROUPED, **dict.fromkeys(SIGMOID, ANY), squared_relu=True, moe_latent_size=ANY),
        against=hf_hybrid.against_nemotron_h,
    ),
    "falcon_h1": DecoderFamily(
        "Falcon-H1",
        "FalconH1ForCausalLM",
        dict(SCALED, hybrid_layer_pattern=ANY, mamba_rms_norm=ANY, mamba_norm_before_gate=ANY),
        against=hf_falcon.against,
    ),
}
# Known families that are refused -> the reason.
REFUSED = dict(
    gemma3="it has a vision tower; save its language model alone, as a Gemma3ForCausalLM",
    phi="its layers run attention and MLP in parallel, and its output layer has a bias",
    phimoe="its router is trained by SparseMixer, and its layers have biases",
)


def effective(m: Model) -> dict[str, Any]:
    """The values of the settings of `LLAMA` in a model; those without an effect are those of a Llama."""
    rope, windowed = m.position_embedding_type == "rope", any(m.window_of(n) is not None for n in range(m.num_layers))
    idle = dict(
        rotary_percent=not rope,
        rotary_seq_len_interpolation_factor=not rope,
        use_rope_scaling=not rope,
        rope_type=not rope or m.rotary_scaling_factor <= 1,
        rope_local_base_freq=not rope or not windowed,
        no_rope_freq=not rope or all(map(m.rotates, range(m.num_layers))),
        qk_layernorm_across_heads=not m.qk_layernorm,
        bias_gelu_fusion=m.swiglu or m.squared_relu or m.quick_geglu,
        activation_func_clamp_value=m.sigmoid_gate is None,
        glu_linear_offset=m.sigmoid_gate is None,
        add_qkv_bias=not m.disable_bias_linear,
        query_pre_attn_scalar=m.query_pre_attn_scalar == m.head_dim,
        experimental_attention_variant=not any(map(m.is_linear, range(m.num_layers))),
        mamba_rms_norm=not m.has_mamba,
        mamba_norm_before_gate=not m.has_mamba or not m.mamba_rms_norm,
        window_size=not windowed,
        window_attn_skip_freq=all(m.window_of(n) == m.window for n in range(m.num_layers)),
    )
    own = effective_experts(m)
    return {name: value if idle.get(name) else own.get(name, getattr(m, name)) for name, value in LLAMA.items()}


def _flag(name: str, value: Any) -> str:
    flag = dashed(name)
    if isinstance(value, bool) or value is None:
        return flag if value else f"no {flag}"
    return f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"


def kind_of(model: Model) -> str:
    """The model_type of the family of a model. Raises SettingsError if there is none, with what the nearest ones lack."""
    reasons = {kind: family.reasons(model) for kind, family in FAMILIES.items()}
    for kind, why in reasons.items():
        if not why:
            return kind
    if model.letters:  # the families that have patterns, unless they cannot express this one
        known = {kind: why for kind, why in reasons.items() if not any(one.startswith(FLAG) for one in why)}
        reasons = known or reasons
    least = min(map(len, reasons.values()))
    nearest = [kind for kind, why in sorted(reasons.items(), key=lambda item: len(item[1])) if len(why) <= least + 1]
    pattern = f", {FLAG} {model.hybrid_layer_pattern}," * bool(model.letters)
    raise SettingsError(
        f"Hugging Face has no model of this shape{pattern} among "
        + ", ".join(family.name for family in FAMILIES.values()),
        "\n  ".join(f"not {FAMILIES[kind].name}: {', '.join(reasons[kind])}" for kind in nearest),
    )


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
