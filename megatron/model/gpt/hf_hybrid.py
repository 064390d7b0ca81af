# SPDX-License-Identifier: Apache-2.0
"""Mapping between config.json of Hugging Face's models whose layers are single mixers, and ours with a pattern: Mamba-2,
and Nemotron-H, which has attention and MLPs between its Mamba-2 layers. `hf_names` has their tensors.

transformers' Nemotron-H has no step size below `time_step_min`; NVIDIA's own code and Megatron-LM have. Exports say
a number so small that it makes no difference, and imports are compared with it.
"""

from collections.abc import Sequence
from typing import Any

from megatron.errors import CheckpointError
from megatron.model.gpt.hf_rope import refuse
from megatron.model.kinds.experts.hf import against_experts, mixer_experts, their_mixer_experts
from megatron.model.kinds.mamba.kind import TAPS
from megatron.settings.groups.model import Model

ANY_STEP = 1e-9  # of time_step_min, which must not be 0
LENGTH = 2048  # of the texts that Mamba-2 was trained on; its config.json says none
WORDS = dict(linear_attention="M", mamba="M", full_attention="*", attention="*", mlp="-", moe="E")
WORDS |= {letter: letter for letter in "M*-E"}
OFF = (False, None)
# Of layers that a model may lack, and of predictions of more tokens, which transformers leaves out, too
UNREAD = """moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_overlap n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group
    output_router_logits mtp_layers_block_type mtp_hybrid_override_pattern num_nextn_predict_layers norm_eps""".split()
EXPERTS = dict(  # what its class has for missing entries
    n_routed_experts=8,
    moe_intermediate_size=7688,
    moe_shared_expert_intermediate_size=7688,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)
UNUSED = dict(time_step_limit=([0.0, {"__float__": "Infinity"}], [0.0, float("inf")], None))


def against_mamba2(m: Model) -> dict[str, bool]:
    inner = m.mamba_heads * m.mamba_head_dim
    return {
        f"--hybrid-layer-pattern {m.letters}": bool(m.letters.strip("M")),
        f"{inner} channels in Mamba-2 layers": inner % m.hidden_size != 0,
    }


def against_nemotron_h(m: Model) -> dict[str, bool]:
    return {
        f"--hybrid-layer-pattern {m.letters}": bool(m.all_letters.strip("M*-E")),
        "--disable-bias-linear is missing": m.qkv_bias,
        # Its class has no ties.
        "--untie-embeddings-and-output-weights is missing": not m.untie_embeddings_and_output_weights,
    } | against_experts("nemotron_h")(m)


def from_mamba2(c: dict[str, Any]) -> tuple[Model, int]:
    c.get("residual_in_fp32")  # which is how theirs compute in half precision
    refuse(c, hidden_act=("silu",), use_bias=OFF, use_conv_bias=(True, None), conv_kernel=(TAPS, None), **UNUSED)
    heads, width = int(c["num_heads"]), int(c["head_dim"])
    layers = dict(hybrid_layer_pattern="M" * int(c["num_hidden_layers"]), num_attention_heads=heads, kv_channels=width)
    layers |= dict(mamba_num_heads=heads, mamba_head_dim=width, mamba_state_dim=int(c.get("state_size", 128)))
    return _model(dict(initializer_range=0.1) | c, LENGTH, **layers), int(c["vocab_size"])


def from_nemotron_h(c: dict[str, Any]) -> tuple[Model, int]:
    refuse(c, mamba_hidden_act=("silu",), mlp_hidden_act=("relu2",), sliding_window=OFF, residual_in_fp32=OFF)
    refuse(c, **dict.fromkeys(("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"), OFF))
    refuse(c, use_conv_bias=(True, None), conv_kernel=(TAPS, None), **UNUSED)
    c.get("num_nextn_predict_layers")
    words = c.get("layers_block_type") or c.get("hybrid_override_pattern") or ()
    for key in UNREAD:
        c.get(key)
    heads, groups = int(c["num_attention_heads"]), int(c.get("num_key_value_heads") or 8)
    letters = _letters(words, "layers_block_type")
    layers = dict(
        hybrid_layer_pattern=letters,
        num_attention_heads=heads,
        num_query_groups=groups,
        group_query_attention=groups != heads,
        kv_channels=int(c.get("head_dim") or c.get("attention_head_dim") or 128),
        ffn_hidden_size=int(c["intermediate_size"]),
        mamba_num_heads=int(c["mamba_num_heads"]),
        mamba_head_dim=int(c["mamba_head_dim"]),
        mamba_state_dim=int(c["ssm_state_size"]),
        **(mixer_experts(EXPERTS | c) if "E" in letters else {}),
    )
    return _model(c, int(c["max_position_embeddings"]), **layers), int(c["vocab_size"])


def letters_ahead(c: dict[str, Any]) -> str:
    """The layers of a depth of multi-token prediction of a Nemotron-H."""
    words = c.get("mtp_layers_block_type") or c.get("mtp_hybrid_override_pattern") or ("full_attention", "moe")
    return _letters(words, "mtp_layers_block_type")


def _letters(words: Sequence[str], key: str) -> str:
    if other := sorted({str(word) for word in words} - set(WORDS)):
        raise CheckpointError(
            f"layers of {', '.join(other)} ({key} in config.json) cannot be expressed here",
            f"a Nemotron-H has layers of {', '.join(word for word in WORDS if len(word) > 1)}",
        )
    return "".join(WORDS[word] for word in words)


def _model(c: dict[str, Any], length: int, **layers: Any) -> Model:
    return Model(
        num_layers=len(layers["hybrid_layer_pattern"]),
        hidden_size=int(c["hidden_size"]),
        seq_length=length,
        max_position_embeddings=length,
        position_embedding_type="none",
        normalization="RMSNorm",
        norm_epsilon=float(c.get("layer_norm_epsilon", 1e-5)),
        squared_relu=True,
        disable_bias_linear=True,
        hidden_dropout=float(c.get("hidden_dropout") or 0.0),
        attention_dropout=float(c.get("attention_dropout") or 0.0),
        init_method_std=float(c.get("initializer_range", 0.02)),
        untie_embeddings_and_output_weights=not c.get("tie_word_embeddings", False),
        mamba_num_groups=int(c.get("n_groups", 8)),
        **layers,
    )


def to_mamba2(m: Model) -> dict[str, Any]:
    return _common(m) | dict(
        num_hidden_layers=m.num_layers,
        num_heads=m.mamba_heads,
        head_dim=m.mamba_head_dim,
        state_size=m.mamba_state_dim,
        expand=m.mamba_heads * m.mamba_head_dim // m.hidden_size,
        hidden_act="silu",
    )


def to_nemotron_h(m: Model) -> dict[str, Any]:
    words = {letter: word for word, letter in reversed(WORDS.items()) if len(word) > 1}
    return _common(m) | dict(
        layers_block_type=[words[letter] for letter in m.letters],
        num_nextn_predict_layers=m.own_depths,
        **(dict(mtp_layers_block_type=[words[letter] for letter in m.letters_ahead]) if m.depths else {}),
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.query_groups,
        head_dim=m.head_dim,
        max_position_embeddings=m.position_table,
        intermediate_size=m.ffn_size,
        mlp_hidden_act="relu2",
        hidden_dropout=m.hidden_dropout,
        attention_dropout=m.attention_dropout,
        mamba_num_heads=m.mamba_heads,
        mamba_head_dim=m.mamba_head_dim,
        ssm_state_size=m.mamba_state_dim,
        time_step_min=ANY_STEP,
        **their_mixer_experts(m),
    )


def _common(m: Model) -> dict[str, Any]:
    return dict(
        hidden_size=m.hidden_size,
        layer_norm_epsilon=m.norm_epsilon,
        n_groups=m.mamba_num_groups,
        conv_kernel=TAPS,
        use_bias=False,
        use_conv_bias=True,
        residual_in_fp32=False,
    )
