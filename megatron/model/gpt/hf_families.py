# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face's decoders, each described by the settings in which it differs from Llama.

A model is exported as the first family that has all of its settings; if there is none, the error names the settings that
the nearest ones lack.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.errors import SettingsError
from megatron.model.gpt import hf_falcon, hf_hybrid
from megatron.model.kinds.experts.hf import DENSE, against_experts, effective_experts
from megatron.model.kinds.mla.hf import DEFAULTS, against_latents
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
