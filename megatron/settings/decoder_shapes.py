# SPDX-License-Identifier: Apache-2.0
"""Published shapes of decoders with rotary positions, for `--model-name-or-path`, and the rows of their embeddings.

From the config.json of each model: Llama 2 and 3, Mistral, Qwen2.5, Qwen3, Phi-3, OLMo 2, Gemma 2 and 3; with states
Nemotron-H and Falcon-H1; with experts Mixtral, Qwen3, Qwen3-Next, Qwen1.5, OLMoE, gpt-oss and DeepSeek-MoE.

    >>> DECODERS["gemma-2-2b"]["window_attn_skip_freq"], DECODERS["qwen3-0.6b"]["kv_channels"], ROWS["qwen2.5-7b"]
    (2, 128, 152064)
"""

from typing import Any

_LLAMA = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    swiglu=True,
    disable_bias_linear=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
_UNTIED = dict(untie_embeddings_and_output_weights=True)
_LLAMA_2 = dict(_LLAMA | _UNTIED, norm_epsilon=1e-5)
_LLAMA_3 = dict(_LLAMA_2, rotary_base=5e5)
_LLAMA_3_1 = dict(_LLAMA_3, use_rope_scaling=True)
_LLAMA_3_2 = dict(_LLAMA, norm_epsilon=1e-5, rotary_base=5e5, use_rope_scaling=True, rope_scaling_factor=32.0)
_GEMMA = dict(
    _LLAMA, swiglu=False, geglu=True, scale_embedding=True, norm_position="sandwich", query_pre_attn_scalar=256.0
)
_GEMMA_2 = dict(
    _GEMMA, window_size="4095,0", window_attn_skip_freq=2, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
)
_GEMMA_3 = dict(
    _GEMMA, qk_layernorm=True, window_size="511,0", window_attn_skip_freq=6, rotary_base=1e6, rope_local_base_freq=1e4
)
_GEMMA_3_LONG = dict(_GEMMA_3, window_size="1023,0", rotary_seq_len_interpolation_factor=8.0)
_QWEN = dict(_LLAMA, rotary_base=1e6)
_QWEN_2 = dict(_QWEN, add_qkv_bias=True)
_QWEN_2_LARGE = dict(_QWEN_2 | _UNTIED, norm_epsilon=1e-5)
_QWEN_3 = dict(_QWEN, qk_layernorm=True)

_MIXTRAL = dict(_LLAMA | _UNTIED, norm_epsilon=1e-5, rotary_base=1e6, num_experts=8, moe_router_topk=2)
_QWEN_MOE = dict(_QWEN | _UNTIED, num_experts=128, moe_router_topk=8, qk_layernorm=True)
_QWEN_NEXT = dict(
    _QWEN_MOE,
    num_experts=512,
    moe_router_topk=10,
    moe_ffn_hidden_size=512,
    moe_shared_expert_intermediate_size=512,
    moe_shared_expert_gate=True,
    rotary_base=1e7,
    rotary_percent=0.25,
    attention_output_gate=True,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="4",
)
_OLMOE = dict(
    _LLAMA | _UNTIED,
    norm_epsilon=1e-5,
    qk_layernorm=True,
    qk_layernorm_across_heads=True,
    num_experts=64,
    moe_router_topk=8,
    moe_router_pre_softmax=True,
)
_QWEN_SHARED = dict(
    _QWEN | _UNTIED,
    add_qkv_bias=True,
    num_experts=60,
    moe_router_topk=4,
    moe_router_pre_softmax=True,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=5632,
    moe_shared_expert_gate=True,
)
_DEEPSEEK = dict(
    _LLAMA | _UNTIED,
    num_experts=64,
    moe_router_topk=6,
    moe_router_pre_softmax=True,
    moe_layer_freq="[0]*1+[1]*27",
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=2816,
)

_LATENT = dict(
    _LLAMA | _UNTIED,
    multi_latent_attention=True,
    qk_layernorm=True,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    rope_type="yarn",
    yarn_original_max_position_embeddings=4096,
)
_LATENT_V2_LITE = dict(
    _LATENT | _DEEPSEEK, moe_layer_freq="[0]*1+[1]*26", rotary_scaling_factor=40.0, mscale=0.707, mscale_all_dim=0.707
)
_LATENT_V3 = dict(
    _LATENT,
    q_lora_rank=1536,
    mscale=1.0,
    mscale_all_dim=1.0,
    num_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
_V3 = dict(
    _LATENT_V3,
    rotary_scaling_factor=40.0,
    moe_layer_freq="[0]*3+[1]*58",
    moe_router_num_groups=8,
    moe_router_group_topk=4,
    moe_router_topk_scaling_factor=2.5,
)
_KIMI_K2 = dict(
    _LATENT_V3,
    rotary_base=5e4,
    rotary_scaling_factor=32.0,
    yarn_beta_fast=1.0,
    num_experts=384,
    moe_layer_freq="[0]*1+[1]*60",
    moe_router_topk_scaling_factor=2.827,
)

_GPT_OSS = dict(
    _LLAMA | _UNTIED,
    norm_epsilon=1e-5,
    swiglu=False,
    quick_geglu=True,
    activation_func_clamp_value=7.0,
    glu_linear_offset=1.0,
    disable_bias_linear=False,
    softmax_type="learnable",
    window_size="127,0",
    window_attn_skip_freq=2,
    rotary_base=150000.0,
    rope_type="yarn",
    rotary_scaling_factor=32.0,
    yarn_original_max_position_embeddings=4096,
    yarn_correction_range_round_to_int=False,
    moe_router_topk=4,
)

_NEMOTRON_H = dict(
    _LLAMA | _UNTIED,
    position_embedding_type="none",
    norm_epsilon=1e-5,
    swiglu=False,
    squared_relu=True,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_num_groups=8,
)
_NEMOTRON_3 = dict(
    _NEMOTRON_H,
    num_experts=128,
    moe_router_topk=6,
    moe_ffn_hidden_size=1856,
    moe_shared_expert_intermediate_size=3712,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
)
_FALCON_H1 = dict(
    _LLAMA | _UNTIED, norm_epsilon=1e-5, rotary_base=1e11, mamba_head_dim=64, mamba_num_groups=1, mamba_rms_norm=False
)


def _shape(
    of: dict[str, Any],
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    head: int | None,
    ffn: int,
    length: int,
    **more,
) -> dict[str, Any]:
    sizes = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, ffn_hidden_size=ffn)
    sizes |= dict(seq_length=length, max_position_embeddings=length)
    if head:
        sizes |= dict(kv_channels=head)
    if groups != heads:
        sizes |= dict(group_query_attention=True, num_query_groups=groups)
    return of | sizes | more


# Name -> (rows of the embedding, settings)
_PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-2-7b": (32000, _shape(_LLAMA_2, 32, 4096, 32, 32, 128, 11008, 4096)),
    "llama-2-13b": (32000, _shape(_LLAMA_2, 40, 5120, 40, 40, 128, 13824, 4096)),
    "llama-2-70b": (32000, _shape(_LLAMA_2, 80, 8192, 64, 8, 128, 28672, 4096)),
    "llama-3-8b": (128256, _shape(_LLAMA_3, 32, 4096, 32, 8, 128, 14336, 8192)),
    "llama-3-70b": (128256, _shape(_LLAMA_3, 80, 8192, 64, 8, 128, 28672, 8192)),
    "llama-3.1-8b": (128256, _shape(_LLAMA_3_1, 32, 4096, 32, 8, 128, 14336, 131072)),
    "llama-3.1-70b": (128256, _shape(_LLAMA_3_1, 80, 8192, 64, 8, 128, 28672, 131072)),
    "llama-3.1-405b": (128256, _shape(_LLAMA_3_1, 126, 16384, 128, 8, 128, 53248, 131072)),
    "llama-3.2-1b": (128256, _shape(_LLAMA_3_2, 16, 2048, 32, 8, 64, 8192, 131072)),
    "llama-3.2-3b": (128256, _shape(_LLAMA_3_2, 28, 3072, 24, 8, 128, 8192, 131072)),
    "llama-3.3-70b": (128256, _shape(_LLAMA_3_1, 80, 8192, 64, 8, 128, 28672, 131072)),
    "mistral-7b-v0.1": (32000, _shape(_LLAMA_2, 32, 4096, 32, 8, 128, 14336, 32768, window_size="4095,0")),
    "mistral-7b-v0.3": (32768, _shape(_LLAMA_2, 32, 4096, 32, 8, 128, 14336, 32768, rotary_base=1e6)),
    "qwen2.5-0.5b": (151936, _shape(_QWEN_2, 24, 896, 14, 2, 64, 4864, 32768)),
    "qwen2.5-1.5b": (151936, _shape(_QWEN_2, 28, 1536, 12, 2, 128, 8960, 131072)),
    "qwen2.5-3b": (151936, _shape(_QWEN_2, 36, 2048, 16, 2, 128, 11008, 32768)),
    "qwen2.5-7b": (152064, _shape(_QWEN_2 | _UNTIED, 28, 3584, 28, 4, 128, 18944, 131072)),
    "qwen2.5-14b": (152064, _shape(_QWEN_2_LARGE, 48, 5120, 40, 8, 128, 13824, 131072)),
    "qwen2.5-32b": (152064, _shape(_QWEN_2_LARGE, 64, 5120, 40, 8, 128, 27648, 131072)),
    "qwen2.5-72b": (152064, _shape(_QWEN_2_LARGE, 80, 8192, 64, 8, 128, 29568, 131072)),
    "qwen3-0.6b": (151936, _shape(_QWEN_3, 28, 1024, 16, 8, 128, 3072, 40960)),
    "qwen3-1.7b": (151936, _shape(_QWEN_3, 28, 2048, 16, 8, 128, 6144, 40960)),
    "qwen3-4b": (151936, _shape(_QWEN_3, 36, 2560, 32, 8, 128, 9728, 40960)),
    "qwen3-8b": (151936, _shape(_QWEN_3 | _UNTIED, 36, 4096, 32, 8, 128, 12288, 40960)),
    "qwen3-14b": (151936, _shape(_QWEN_3 | _UNTIED, 40, 5120, 40, 8, 128, 17408, 40960)),
    "qwen3-32b": (151936, _shape(_QWEN_3 | _UNTIED, 64, 5120, 64, 8, 128, 25600, 40960)),
    "phi-3-mini-4k": (
        32064,
        _shape(_LLAMA | _UNTIED, 32, 3072, 32, 32, 96, 8192, 4096, norm_epsilon=1e-5, window_size="2046,0"),
    ),
    "olmo-2-7b": (
        100352,
        _shape(
            *(_LLAMA | _UNTIED, 32, 4096, 32, 32, 128, 11008, 4096),
            **dict(rotary_base=5e5, norm_position="post", qk_layernorm=True, qk_layernorm_across_heads=True),
        ),
    ),
    "gemma-2-2b": (256000, _shape(_GEMMA_2, 26, 2304, 8, 4, 256, 9216, 8192)),
    "gemma-2-9b": (256000, _shape(_GEMMA_2, 42, 3584, 16, 8, 256, 14336, 8192)),
    "gemma-2-27b": (256000, _shape(_GEMMA_2, 46, 4608, 32, 16, 128, 36864, 8192, query_pre_attn_scalar=144.0)),
    "gemma-3-270m": (262144, _shape(_GEMMA_3, 18, 640, 4, 1, 256, 2048, 32768)),
    "gemma-3-1b": (262144, _shape(_GEMMA_3, 26, 1152, 4, 1, 256, 6912, 32768)),
    "gemma-3-4b": (262208, _shape(_GEMMA_3_LONG, 34, 2560, 8, 4, 256, 10240, 131072)),
    "gemma-3-12b": (262208, _shape(_GEMMA_3_LONG, 48, 3840, 16, 8, 256, 15360, 131072)),
    "gemma-3-27b": (262208, _shape(_GEMMA_3_LONG, 62, 5376, 32, 16, 128, 21504, 131072, query_pre_attn_scalar=168.0)),
    "nemotron-h-8b": (
        131072,
        _shape(
            *(_NEMOTRON_H, 52, 4096, 32, 8, 128, 21504, 8192),
            **dict(hybrid_layer_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-", mamba_num_heads=128),
        ),
    ),
    "nemotron-3-nano-30b-a3b": (
        131072,
        _shape(
            *(_NEMOTRON_3, 52, 2688, 32, 2, 128, 1856, 262144),
            **dict(hybrid_layer_pattern="MEMEM*E" * 5 + "MEMEMEM*EMEMEMEME", mamba_num_heads=64),
        ),
    ),
    "falcon-h1-0.5b": (
        32784,
        _shape(
            *(_FALCON_H1, 72, 1024, 8, 2, 64, 2048, 16384),
            **dict(hybrid_layer_pattern="P-" * 36, mamba_num_heads=24, mamba_state_dim=128),
        ),
    ),
    "mixtral-8x7b": (32000, _shape(_MIXTRAL, 32, 4096, 32, 8, 128, 14336, 32768)),
    "mixtral-8x22b": (32768, _shape(_MIXTRAL, 56, 6144, 48, 8, 128, 16384, 65536)),
    "qwen3-30b-a3b": (151936, _shape(_QWEN_MOE, 48, 2048, 32, 4, 128, 6144, 40960, moe_ffn_hidden_size=768)),
    "qwen3-235b-a22b": (151936, _shape(_QWEN_MOE, 94, 4096, 64, 4, 128, 12288, 40960, moe_ffn_hidden_size=1536)),
    "qwen3-next-80b-a3b": (151936, _shape(_QWEN_NEXT, 48, 2048, 16, 2, 256, 5120, 262144)),
    "qwen1.5-moe-a2.7b": (151936, _shape(_QWEN_SHARED, 24, 2048, 16, 16, 128, 5632, 8192)),
    "olmoe-1b-7b": (50304, _shape(_OLMOE, 16, 2048, 16, 16, 128, 1024, 4096)),
    "gpt-oss-20b": (201088, _shape(_GPT_OSS, 24, 2880, 64, 8, 64, 2880, 131072, num_experts=32)),
    "gpt-oss-120b": (201088, _shape(_GPT_OSS, 36, 2880, 64, 8, 64, 2880, 131072, num_experts=128)),
    "deepseek-moe-16b": (102400, _shape(_DEEPSEEK, 28, 2048, 16, 16, 128, 10944, 4096)),
    "deepseek-v2-lite": (102400, _shape(_LATENT_V2_LITE, 27, 2048, 16, 16, None, 10944, 163840)),
    "deepseek-v3": (129280, _shape(_V3, 61, 7168, 128, 128, None, 18432, 163840)),
    "kimi-k2": (163840, _shape(_KIMI_K2, 61, 7168, 64, 64, None, 18432, 131072)),
}
DECODERS = {name: shape for name, (_, shape) in _PUBLISHED.items()}
ROWS = {name: rows for name, (rows, _) in _PUBLISHED.items()}
