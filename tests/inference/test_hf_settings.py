# SPDX-License-Identifier: Apache-2.0
"""Every setting of the network leaves for Hugging Face with the same logits, or is named in the refusal; config.json of
published models; tokenizers in and out.
"""

import json
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from megatron.checkpoint.reader import Reader
from megatron.convert import huggingface
from megatron.convert.families import imported
from megatron.errors import CheckpointError, SettingsError
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.hf_families import FAMILIES, LLAMA, effective, kind_of
from megatron.model.gpt.hf_settings import our_settings, their_settings
from megatron.settings import schema
from megatron.settings.decoder_shapes import DECODERS
from megatron.settings.presets import preset
from megatron.settings.schema import Model
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import GPT2, V, save
from tests.inference.test_convert import LLAMA as OURS

QWEN3 = dict(OURS, qk_layernorm=True, kv_channels=8)
GEMMA = dict(OURS, swiglu=False, geglu=True, scale_embedding=True)
MIXTURE = dict(OURS, num_experts=4, moe_ffn_hidden_size=48)
SHARED = dict(MIXTURE, moe_shared_expert_intermediate_size=96)
SIGMOID = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
BASES = {
    "gpt2": GPT2,
    "llama": OURS,
    "smollm3": dict(OURS, no_rope_freq="[0,1,0,0]"),
    "mistral": dict(OURS, window_size="4,0"),
    "qwen2": dict(OURS, add_qkv_bias=True),
    "qwen3": QWEN3,
    "phi3": dict(OURS, rotary_percent=0.5),
    "olmo2": dict(OURS, norm_position="post", qk_layernorm=True, qk_layernorm_across_heads=True),
    "gemma": GEMMA,
    "gemma2": dict(GEMMA, norm_position="sandwich", attn_logit_softcapping=2.0),
    "gemma3_text": dict(GEMMA, norm_position="sandwich", qk_layernorm=True),
    "mixtral": MIXTURE,
    "olmoe": dict(
        MIXTURE, kv_channels=8, moe_router_pre_softmax=True, qk_layernorm=True, qk_layernorm_across_heads=True
    ),
    "qwen2_moe": dict(SHARED, moe_shared_expert_gate=True, add_qkv_bias=True),
    "qwen3_moe": dict(MIXTURE, qk_layernorm=True, moe_layer_freq="[0]*2+[1]*2"),
    "qwen3_next": dict(
        SHARED,
        moe_shared_expert_gate=True,
        qk_layernorm=True,
        attention_output_gate=True,
        rotary_percent=0.5,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq="2",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
    ),
    "dots1": dict(SHARED, **SIGMOID, qk_layernorm=True),
    "deepseek": dict(SHARED, moe_layer_freq="[0]*1+[1]*3", moe_router_pre_softmax=True),
}
BASES["gpt_oss"] = dict(
    OURS,
    swiglu=False,
    quick_geglu=True,
    activation_func_clamp_value=0.3,
    glu_linear_offset=1.0,
    disable_bias_linear=False,
    softmax_type="learnable",
    window_size="4,0",
    window_attn_skip_freq=2,
    num_experts=4,
    ffn_hidden_size=32,
    moe_ffn_hidden_size=32,
)
_LATENT = dict(
    SHARED,
    num_query_groups=None,
    group_query_attention=False,
    kv_channels=None,
    qk_layernorm=True,
    multi_latent_attention=True,
    kv_lora_rank=12,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=10,
)
BASES["deepseek_v2"] = dict(_LATENT, moe_router_pre_softmax=True)
BASES["deepseek_v3"] = dict(_LATENT, **SIGMOID, q_lora_rank=20)
MIXERS = dict(
    OURS,
    position_embedding_type="none",
    swiglu=False,
    squared_relu=True,
    mamba_num_groups=2,
    mamba_head_dim=8,
    mamba_num_heads=8,
    mamba_state_dim=6,
    rotary_base=1e4,
)
BASES["mamba2"] = dict(
    MIXERS,
    hybrid_layer_pattern="MM",
    num_layers=2,
    num_attention_heads=8,
    kv_channels=8,
    num_query_groups=None,
    ffn_hidden_size=None,
    seq_length=2048,
)
BASES["nemotron_h"] = dict(MIXERS, hybrid_layer_pattern="M*-", num_layers=3)
BASES["nemotron_h"] |= dict(hybrid_layer_pattern="M*-E", num_layers=4, **SIGMOID, num_experts=4, moe_ffn_hidden_size=24)
BASES["nemotron_h"] |= dict(moe_shared_expert_intermediate_size=40)
BESIDE = dict(position_embedding_type="rope", swiglu=True, squared_relu=False, rotary_base=3e4, mamba_rms_norm=False)
BASES["falcon_h1"] = dict(MIXERS, hybrid_layer_pattern="P-P-", num_layers=4) | BESIDE
OTHER = dict(  # another value of a setting that changes what a model computes, with what gives it an effect
    rotary_percent=dict(rotary_percent=0.5),
    rotary_seq_len_interpolation_factor=dict(rotary_seq_len_interpolation_factor=3.0),
    use_rope_scaling=dict(use_rope_scaling=True, rope_scaling_original_max_position_embeddings=8),
    rope_type=dict(rope_type="yarn", rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=8),
    rope_local_base_freq=dict(rope_local_base_freq=30.0, window_size="4,0"),
    norm_position=dict(norm_position="sandwich"),
    qk_layernorm_across_heads=dict(qk_layernorm=True, qk_layernorm_across_heads=True),
    query_pre_attn_scalar=dict(query_pre_attn_scalar=3.0),
    no_rope_freq=dict(no_rope_freq="2"),
    layer_settings=dict(layer_settings="0: no_op=mlp"),
    window_size=dict(window_size="5,0"),
    window_attn_skip_freq=dict(window_size="5,0", window_attn_skip_freq=2),
    attn_logit_softcapping=dict(attn_logit_softcapping=2.0),
    hybrid_layer_pattern=dict(hybrid_layer_pattern="*-*-", num_layers=4),
    final_logit_softcapping=dict(final_logit_softcapping=3.0),
    activation_func_clamp_value=dict(activation_func_clamp_value=0.2),
    glu_linear_offset=dict(glu_linear_offset=0.5),
    add_qkv_bias=dict(add_qkv_bias=True, disable_bias_linear=True),
    experimental_attention_variant=dict(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq="2",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    num_experts=dict(num_experts=4),
    moe_layer_freq=dict(num_experts=4, moe_layer_freq="2"),
    moe_shared_expert_intermediate_size=dict(num_experts=4, moe_shared_expert_intermediate_size=48),
    moe_latent_size=dict(num_experts=4, moe_latent_size=8),
    moe_shared_expert_gate=dict(num_experts=4, moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True),
    moe_router_load_balancing_type=dict(num_experts=4, moe_router_load_balancing_type=["sinkhorn"]),
    moe_router_score_function=dict(num_experts=4, moe_router_score_function="sigmoid"),
    moe_router_pre_softmax=dict(num_experts=4, moe_router_pre_softmax=True),
    moe_router_num_groups=dict(num_experts=4, moe_router_num_groups=2, moe_router_group_topk=1),
    moe_router_group_topk=dict(num_experts=8, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk=4),
    moe_router_group_score_topk=dict(
        num_experts=8,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk=4,
        moe_router_group_score_topk=1,
    ),
    moe_router_topk_scaling_factor=dict(num_experts=4, moe_router_topk_scaling_factor=2.5),
    moe_router_enable_expert_bias=dict(num_experts=4, **SIGMOID),
    moe_router_force_load_balancing=dict(num_experts=4, moe_router_force_load_balancing=True),
    moe_expert_capacity_factor=dict(num_experts=4, moe_expert_capacity_factor=1.0),
)
# Settings that change no logits in fp32, and those that only size the model.
TRAINING = """hidden_dropout attention_dropout label_smoothing z_loss_coeff init_method_std make_vocab_size_divisible_by
    model_type model_name_or_path apply_query_key_layer_scaling attention_softmax_in_fp32 linear
    moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate moe_input_jitter_eps moe_router_dtype
    moe_pad_expert_input_to_capacity moe_token_drop_policy
    lora_rank lora_alpha lora_dropout lora_target lora_split_fused use_rslora use_dora
    kd_hidden_projections""".split()
# Rounding of weights and inputs, and masks: a model with `linear` kinds is refused as a whole.
ROUNDING = """quantization weight_quantize_type activation_quantize_type activation_preprocess_type weight_bits
    activation_bits quantization_layers quantization_skip sparsity initial_sparsity sparsity_begin_step
    sparsity_end_step sparsity_frequency sparsity_layers sparsity_skip""".split()
SIZES = """mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads moe_ffn_hidden_size
    moe_router_topk hybrid_attention_ratio hybrid_mlp_ratio heterogeneous_layers_config_path
    heterogeneous_layers_config_encoded_json
    linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads
    mamba_num_heads mamba_head_dim mamba_state_dim mamba_num_groups
    num_layers hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size kv_channels
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    group_query_attention num_query_groups rotary_base norm_epsilon untie_embeddings_and_output_weights""".split()
OF_SCALING = ("rope_scaling_", "yarn_", "mscale", "rotary_scaling_factor")  # of use_rope_scaling and rope_type


def test_the_walk_is_over_all_settings():
    """A new setting is compared in the test after this one, or belongs to one of these lists."""
    names = {field.name for field in fields(Model) if not field.name.startswith(OF_SCALING)}
    assert names == {*LLAMA, *TRAINING, *ROUNDING, *SIZES} and set(BASES) == set(FAMILIES)


def another(name: str, base: dict) -> dict:
    if name in OTHER:
        return base | OTHER[name]
    kind, value = get_type_hints(Model)[name], base.get(name, LLAMA.get(name))
    if kind is bool:
        return base | {name: not base.get(name, Model.__dataclass_fields__[name].default)}
    choices = [choice for choice in kind.__args__ if choice != value and choice != "relative"]
    return base | {name: choices[0]}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("name", LLAMA)
def test_each_setting_leaves_or_is_named(name, kind, tmp_path):
    """At another value than each family has: the exported model agrees, which `to-hf` checks, or the error names it."""
    settings = another(name, BASES[kind])
    if (
        len({"swiglu", "geglu", "squared_relu", "quick_geglu"} & {flag for flag, on in settings.items() if on is True})
        > 1
    ):
        return  # two activations, which training refuses
    if settings.get("qk_layernorm_across_heads") and settings.get("normalization") != "RMSNorm":
        return
    model, base = Model(**settings), Model(**BASES[kind])
    assert kind_of(base) == kind
    if effective(model) == effective(base):
        return  # without effect there
    try:
        kind_of(model)
    except SettingsError as error:
        changed = effective(model)[name] != effective(base)[name]
        nearer = kind == "deepseek" and "group" in name  # DeepSeek-V2, which has groups, and other attention
        nearer |= kind == "mamba2" and "expert_bias" in name  # Nemotron-H, which has it
        assert f"--{name.replace('_', '-')}" in str(error) or nearer or not changed, str(error)
    else:
        pytest.importorskip("transformers")
        save(tmp_path / "ours", settings)
        tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--dtype", "fp32"])
        assert (tmp_path / "theirs" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", BASES)
def test_settings_come_back(kind):
    model = Model(**BASES[kind], init_method_std=0.01, hidden_dropout=0.0, attention_dropout=0.25)
    found, back, rows = our_settings(their_settings(model, V, None, "bfloat16"))
    assert (found, rows) == (kind, V)
    skipped = {"group_query_attention", "num_query_groups", "ffn_hidden_size", "kv_channels", "max_position_embeddings"}
    skipped |= {"attention_dropout"} if kind == "mamba2" else set()  # it has no attention
    skipped |= {"query_pre_attn_scalar"} if back.query_pre_attn_scalar == model.head_dim else set()
    different = {
        field.name: (getattr(model, field.name), getattr(back, field.name))
        for field in fields(Model)
        if field.name not in skipped and getattr(model, field.name) != getattr(back, field.name)
    }
    assert different == {} and (back.ffn_size, back.head_dim) == (model.ffn_size, model.head_dim)
    assert (back.query_groups, back.position_table) == (model.query_groups, model.position_table)


GEMMA_3_1B = dict(  # as published, in the words of its time
    model_type="gemma3_text",
    attention_bias=False,
    attention_dropout=0.0,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=1152,
    initializer_range=0.02,
    intermediate_size=6912,
    max_position_embeddings=32768,
    num_attention_heads=4,
    num_hidden_layers=26,
    num_key_value_heads=1,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    rope_local_base_freq=10000,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=512,
    sliding_window_pattern=6,
    vocab_size=262144,
)
QWEN_2_05B = dict(
    model_type="qwen2",
    attention_dropout=0.0,
    hidden_act="silu",
    hidden_size=896,
    initializer_range=0.02,
    intermediate_size=4864,
    max_position_embeddings=131072,
    max_window_layers=24,
    num_attention_heads=14,
    num_hidden_layers=24,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    sliding_window=131072,
    tie_word_embeddings=True,
    use_sliding_window=False,
    vocab_size=151936,
)
GEMMA_2_2B = dict(
    model_type="gemma2",
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=2304,
    intermediate_size=9216,
    max_position_embeddings=8192,
    num_attention_heads=8,
    num_hidden_layers=26,
    num_key_value_heads=4,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    sliding_window=4096,
    vocab_size=256000,
)


GPT_OSS_20B = dict(
    model_type="gpt_oss",
    attention_bias=True,
    attention_dropout=0.0,
    experts_per_token=4,
    head_dim=64,
    hidden_act="silu",
    hidden_size=2880,
    initial_context_length=4096,
    initializer_range=0.02,
    intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=8,
    num_local_experts=32,
    output_router_logits=False,
    quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"]),
    rms_norm_eps=1e-5,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    vocab_size=201088,
)
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3",
    attention_bias=False,
    attention_dropout=0.0,
    first_k_dense_replace=3,
    hidden_act="silu",
    hidden_size=7168,
    initializer_range=0.02,
    intermediate_size=18432,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=128,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=128,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]),
    rms_norm_eps=1e-6,
    rope_scaling=dict(
        type="yarn",
        beta_fast=32,
        beta_slow=1,
        factor=40,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
    ),
    rope_theta=10000,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    tie_word_embeddings=False,
    topk_group=4,
    topk_method="noaux_tc",
    v_head_dim=128,
    vocab_size=129280,
)


SHARED_WORDS = dict(shared_expert_intermediate_size=5632)
DEEPSEEK_WORDS = dict(n_routed_experts=64, num_experts_per_tok=6)
GROUPS = dict(n_group=3, topk_group=2, norm_topk_prob=True)


@pytest.mark.parametrize(
    "published, parameters, want",
    [
        (
            GPT_OSS_20B,
            20_914_757_184,  # as its model card says
            {name: DECODERS["gpt-oss-20b"][name] for name in DECODERS["gpt-oss-20b"]},
        ),
        (QWEN_2_05B, 494_032_768, dict(add_qkv_bias=True, window_size=None, rotary_base=1e6, norm_position="pre")),
        (
            GEMMA_2_2B,
            2_614_341_888,
            dict(window_size="4095,0", window_attn_skip_freq=2, norm_position="sandwich", attn_logit_softcapping=50.0),
        ),
        (
            GEMMA_3_1B,
            999_885_952,
            dict(
                window_size="511,0",
                window_attn_skip_freq=6,
                rope_local_base_freq=1e4,
                rotary_base=1e6,
                qk_layernorm=True,
            ),
        ),
    ],
)
def test_published_models(published, parameters, want):
    """Their number of parameters is that of the model cards."""
    _, model, vocab_size = our_settings(published)
    assert GPTFacts(model, vocab_size).parameters == parameters
    assert {name: getattr(model, name) for name in want} == want


@pytest.mark.parametrize(
    "name, vocabulary, parameters",
    [
        ("llama-3.1-8b", 128256, 8_030_261_248),
        ("qwen2.5-0.5b", 151936, 494_032_768),
        ("qwen2.5-7b", 152064, 7_615_616_512),
        ("qwen3-0.6b", 151936, 596_049_920),
        ("qwen3-8b", 151936, 8_190_735_360),
        ("phi-3-mini-4k", 32064, 3_821_079_552),
        ("olmo-2-7b", 100352, 7_298_617_344),
        ("gemma-2-2b", 256000, 2_614_341_888),
        ("gemma-2-9b", 256000, 9_241_705_984),
        ("gemma-3-1b", 262144, 999_885_952),
        ("mixtral-8x7b", 32000, 46_702_792_704),
        ("mixtral-8x22b", 32768, 140_630_071_296),
        ("qwen3-30b-a3b", 151936, 30_532_122_624),
        ("qwen3-235b-a22b", 151936, 235_093_634_560),
        ("qwen1.5-moe-a2.7b", 151936, 14_315_784_192),
        ("qwen3-next-80b-a3b", 151936, 79_674_391_296),
        ("olmoe-1b-7b", 50304, 6_919_161_856),
        ("deepseek-moe-16b", 102400, 16_375_728_128),
    ],
)
def test_named_shapes(name, vocabulary, parameters):
    """Their parameters are those that the model cards count, and they are of the family of their name."""
    model = Model(**preset(name.upper()))
    assert GPTFacts(model, vocabulary).parameters == parameters
    kind = their_settings(model, vocabulary, None, "bfloat16")["model_type"]
    family = {"phi-3": "mistral", "gemma-3": "gemma3_text", "qwen2": "qwen2"}  # a Phi-3 has the shape of a Mistral
    family |= {"qwen3-30b": "qwen3_moe", "qwen3-235b": "qwen3_moe", "qwen3-next": "qwen3_next", "qwen1.5": "qwen2_moe"}
    first = next((kind for start, kind in family.items() if name.startswith(start)), name.replace("-", ""))
    assert first.startswith(kind[:6])


@pytest.mark.parametrize(
    "theirs, change, text",
    [
        (QWEN_2_05B, dict(use_sliding_window=True, max_window_layers=12), "layer_types in config.json"),
        (
            QWEN_2_05B,
            dict(use_sliding_window=True, layer_types=["full_attention", "sliding_attention"] * 12),
            "layer_types",
        ),
        (QWEN_2_05B, dict(attention_bias=True), "attention_bias True"),
        (QWEN_2_05B, dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        (GEMMA_2_2B, dict(hidden_activation="gelu"), "hidden_activation 'gelu'"),
        (GEMMA_2_2B, dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (GEMMA_3_1B, dict(attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0"),
        (GEMMA_3_1B, dict(rope_scaling=dict(rope_type="yarn", factor=8.0)), "rope_type 'yarn'"),
        (GEMMA_3_1B, dict(model_type="gemma3"), "has a vision tower"),
        (QWEN_2_05B, dict(model_type="phi"), "attention and MLP in parallel"),
        (GPT_OSS_20B, dict(swiglu_alpha=2.0), "swiglu_alpha 2.0"),
        (GPT_OSS_20B, dict(attention_bias=False), "attention_bias False"),
        (QWEN_2_05B, dict(model_type="deepseek_v3"), "num_key_value_heads 2"),
        (DEEPSEEK_V3, dict(rope_interleave=False), "rope_interleave False"),
        (DEEPSEEK_V3, dict(rms_norm_eps=1e-5), "rms_norm_eps 1e-05"),
        (DEEPSEEK_V3, dict(scoring_func="softmax"), "scoring_func 'softmax'"),
        (DEEPSEEK_V3, dict(topk_method="greedy"), "topk_method 'greedy'"),
        (DEEPSEEK_V3, dict(num_experts_per_tok=1), "num_experts_per_tok 1"),
        (DEEPSEEK_V3, dict(norm_topk_prob=False), "norm_topk_prob False"),
        (DEEPSEEK_V3, dict(n_group=7), "7 groups of 256 experts, 4 for 8 experts"),
        (DEEPSEEK_V3, dict(quantization_config=dict(quant_method="awq")), "quant_method 'awq'"),
        (DEEPSEEK_V3, dict(model_type="deepseek_v2"), "norm_topk_prob True"),
        (QWEN_2_05B, dict(model_type="qwen3_moe", num_experts_per_tok=129), "128 of width 768, 129 for each token"),
        (QWEN_2_05B, dict(model_type="olmoe", clip_qkv=8.0), "clip_qkv 8.0"),
        (QWEN_2_05B, dict(model_type="qwen2_moe", **SHARED_WORDS, use_sliding_window=True), "use_sliding_window True"),
        (QWEN_2_05B, dict(model_type="deepseek", **DEEPSEEK_WORDS, scoring_func="sigmoid"), "scoring_func 'sigmoid'"),
        (QWEN_2_05B, dict(model_type="dots1", **DEEPSEEK_WORDS), "norm_topk_prob"),
        (QWEN_2_05B, dict(model_type="dots1", **DEEPSEEK_WORDS, **GROUPS), "3 groups of 64 experts"),
        (QWEN_2_05B, dict(model_type="phi3", rope_scaling=dict(type="longrope", factor=2.0)), "rope_type 'longrope'"),
    ],
)
def test_what_cannot_be_expressed_is_named(theirs, change, text):
    with pytest.raises(CheckpointError, match=text):
        our_settings(theirs | change)


MORE = {  # entries without which a default has no effect, or which a family's own class leaves empty
    "qwen2": [dict(use_sliding_window=True, num_hidden_layers=28), dict(use_sliding_window=True, max_window_layers=0)],
    "qwen3": [dict(use_sliding_window=True, num_hidden_layers=28), dict(use_sliding_window=True, max_window_layers=0)],
    "qwen3_moe": [dict(use_sliding_window=True)],
    "dots1": [dict(n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, norm_topk_prob=True)],
    "nemotron_h": [dict(layers_block_type=["linear_attention", "mlp", "full_attention"])],  # its own has experts
    "gemma3_text": [dict(layer_types=None, num_hidden_layers=12)],
    "deepseek_v2": [dict(num_experts_per_tok=6), dict(num_experts_per_tok=6, first_k_dense_replace=1)],
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", [*(kind for kind in BASES if kind != "deepseek"), "bert", "t5"])
def test_entries_that_are_missing_have_the_values_of_transformers(kind):
    """Of its configuration class: each entry left out alone is read as the class's own value of it, or is asked for."""
    classes = pytest.importorskip("transformers").CONFIG_MAPPING

    def read(theirs):
        facts = imported(dict(theirs)).facts
        return facts.settings, facts.vocab_size, getattr(facts, "own", None)

    for more in MORE.get(kind, []) + [{}] * (kind not in ("dots1", "deepseek_v2", "nemotron_h")):
        whole = json.loads(json.dumps(classes[kind](**more).to_dict())) | dict(model_type=kind)
        if kind.startswith("qwen"):
            whole.pop("layer_types", None)  # which the class makes of the entries that are asked here
        wanted, missing = read(whole), []
        for name in whole.keys() - {"model_type", *more}:
            try:
                assert read({key: value for key, value in whole.items() if key != name}) == wanted, (name, more)
            except CheckpointError as error:
                missing.append(str(error))
        assert all("config.json is not complete" in said for said in missing), missing


def test_the_format_is_bf16_unless_said(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    save(tmp_path / "ours", BASES["gemma2"])
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs")])
    told = capsys.readouterr().out
    assert "change by rounding to bf16 is" in told  # of weights, which are differences from 1 in norms
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert model.dtype == torch.bfloat16


def test_tokenizers_come_and_go_with_all_of_their_files(tmp_path, monkeypatch, capsys):
    """The chat template and the generation config among them. Of a Qwen2, tokenizer.json says how texts are split."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(huggingface, "PROBES", ("ab12 ba", "a1"))
    save(tmp_path / "a", BASES["qwen2"])
    tool.main(["to-hf", str(tmp_path / "a"), str(tmp_path / "hub"), "--unchecked"])
    hub = tmp_path / "hub"
    letters = {letter: n for n, letter in enumerate(("a", "b", "1", "2", "\u0120", "12", "<|endoftext|>"))}
    (hub / "vocab.json").write_text(json.dumps(letters))
    (hub / "merges.txt").write_text("#version: 0.2\n1 2\n")
    whole = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [("1", "2")]))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)  # 12 is two tokens, but one in GPT-2's way
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    whole.decoder = tokenizers.decoders.ByteLevel()
    whole.save(str(hub / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|endoftext|>")
    (hub / "tokenizer_config.json").write_text(json.dumps(config))
    (hub / "chat_template.jinja").write_text(template)
    (hub / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[6, 5], temperature=0.7, do_sample=True)))
    tool.main(["from-hf", str(hub), str(tmp_path / "b")])
    with Reader(tmp_path / "b" / "iter_0000000") as reader:
        tokenizer = schema.from_record(reader.state["config"]).tokenizer
    assert tokenizer.tokenizer_type == "HuggingFaceTokenizer"
    tool.main(["to-hf", str(tmp_path / "b"), str(tmp_path / "c")])
    assert capsys.readouterr().out.count("the tokenizer gives the same ids") == 2
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "c")
    assert again("12")["input_ids"] == [2, 3] and again.chat_template == template
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "c")
    assert (generation.eos_token_id, generation.temperature) == ([6, 5], 0.7)
    monkeypatch.setattr(huggingface, "auto_tokenizer", lambda folder: Letters())
    with pytest.raises(CheckpointError, match="gives other ids for the document .*\n.*transformers has .'Z', 'Z'"):
        tool.main(["from-hf", str(hub), str(tmp_path / "d")])
    assert not (tmp_path / "d").exists()


class Letters:
    """A tokenizer of transformers that gives each letter the same id."""

    chat_template, added_tokens_decoder = None, {}

    def __call__(self, text, **more):
        return dict(input_ids=[9 for _ in text])

    def convert_ids_to_tokens(self, ids):
        return ["Z" if id == 9 else str(id) for id in ids]


def test_a_shape_that_no_family_has_writes_nothing(tmp_path):
    save(tmp_path / "ours", dict(OURS, norm_position="post"))
    with pytest.raises(SettingsError, match="not Llama: --norm-position post\n(.|\n)*not OLMo 2: no --qk-layernorm"):
        tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs")])
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_folder_of_transformers_is_no_checkpoint(tmp_path):
    """A run that is to load it says how to convert it."""
    save(tmp_path / "ours", OURS)
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--unchecked"])
    with pytest.raises(CheckpointError, match="is in Hugging Face's format; convert it with .* from-hf"):
        tool.main(["inspect", str(tmp_path / "theirs")])


def test_a_generation_config_is_written(tmp_path):
    transformers = pytest.importorskip("transformers")
    save(tmp_path / "ours", OURS)
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--unchecked"])
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "theirs").eos_token_id is None
    (tmp_path / "ours" / "generation_config.json").write_text(json.dumps(dict(temperature=0.7, top_k=9)))
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "again"), "--unchecked"])
    found = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert (found["temperature"], found["top_k"]) == (0.7, 9)


@pytest.mark.parametrize("kind", BASES)
def test_keys_that_are_not_known_are_named(kind):
    """Of config.json: a key that nobody read has no effect. Those that an export writes are all read or neutral."""
    theirs = their_settings(Model(**BASES[kind]), V, 1, "float32")
    assert imported(theirs).unread == ()
    found = imported(theirs | dict(gating="ring", heads_of_another_model=3, nothing=None))
    assert found.unread == ("gating", "heads_of_another_model")
    assert found.unread_notices("x/config.json") == [
        "x/config.json: gating, heads_of_another_model are not known here and have no effect"
    ]
    assert imported(theirs | dict(router_aux_loss_coef=0.02)).unread_notices("x") == [
        "x: router_aux_loss_coef is a setting of training, and is not converted: to train on, give --moe-aux-loss-coeff"
    ]
