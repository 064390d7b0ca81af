# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of BERT's settings (`settings.rules`)."""

from megatron.model.bert.settings import own_settings
from megatron.model.gpt.gpt_rules import IDLE, NO_RELATIVE
from megatron.model.gpt.gpt_rules import RULES as GPT_RULES
from megatron.model.kinds.table import rules_of
from megatron.model.t5.t5_rules import NO_SINKS, refused
from megatron.settings.rules import Rule

RULES = (
    *GPT_RULES,
    NO_RELATIVE,
    *rules_of("attention", "mlp"),
    Rule(
        lambda s: own_settings(s.settings).num_tokentypes < 0,
        lambda s: f"--num-tokentypes {own_settings(s.settings).num_tokentypes} must be 0 (none) or more",
    ),
    Rule(
        lambda s: own_settings(s.settings).bert_binary_head and own_settings(s.settings).num_tokentypes == 1,
        lambda s: (
            "--num-tokentypes 1: samples are pairs of sentences, which need 2 token types; give 2, 0, or "
            "--bert-no-binary-head"
        ),
    ),
    Rule(
        lambda s: s.seq_length < 8,
        lambda s: f"--seq-length {s.seq_length} must be at least 8: two sentences and three special tokens",
    ),
    *refused(
        "reset_position_ids reset_attention_mask eod_mask_loss", "samples of masked words hold one text or a pair"
    ),
    *refused(
        "window_size qk_layernorm apply_query_key_layer_scaling add_qkv_bias query_pre_attn_scalar attention_output_gate",
        "this model's attention does not have it",
    ),
    NO_SINKS,
    *refused(
        "hybrid_layer_pattern hybrid_attention_ratio hybrid_mlp_ratio",
        "each layer of this model is attention and an MLP",
    ),
    *refused("mtp_num_layers", "this model does not predict tokens further ahead"),
    *refused("no_rope_freq", "all layers of this model have the same positions"),
    *refused(
        "layer_settings heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json",
        "all layers of this model have the same sizes",
    ),
    *refused(
        "geglu scale_embedding quick_geglu activation_func_clamp_value glu_linear_offset", "this model does not have it"
    ),
    Rule(
        lambda s: s.norm_position != "pre",
        lambda s: f"--norm-position {s.norm_position} is for GPT; --post-norm puts norms after the sums",
    ),
)

__all__ = ["IDLE", "RULES"]
