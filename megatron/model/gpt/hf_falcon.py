# SPDX-License-Identifier: Apache-2.0
"""Mapping between config.json of Falcon-H1 and ours: layers of attention beside Mamba-2 after one norm, each followed by an
MLP (`P-` in a pattern).

Theirs multiplies embeddings, keys, rows of the first projection of Mamba-2 and other parts by numbers of config.json. Each
of these parts is linear in a weight, so an import multiplies the weight, and an export says 1 for all of them:

| entries of config.json                        | weights that are multiplied                                       |
|-----------------------------------------------|-------------------------------------------------------------------|
| embedding_multiplier, lm_head_multiplier      | embedding; output layer, or the final norm if that is the embedding |
| attention_in_, key_, attention_out_multiplier | queries, keys and values; keys; the output product of attention   |
| ssm_in_multiplier, ssm_multipliers            | the first projection: all rows; those of gate, x, B, C, step sizes |
| ssm_out_multiplier                            | the last projection                                               |
| mlp_multipliers                               | gate, and the output product                                      |
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron.errors import CheckpointError
from megatron.model.gpt.hf_rope import our_rope, refuse, their_rope
from megatron.model.hf_match import Match, Tensors
from megatron.model.kinds.mamba.kind import TAPS, ScanSizes
from megatron.settings.groups.model import Model

KIND = "falcon_h1"
LAYER = "P-"
OFF = (False, None)
ONE = """embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier
    ssm_in_multiplier ssm_out_multiplier""".split()
SEVERAL = dict(mlp_multipliers=2, ssm_multipliers=5)
DEFAULTS = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    mamba_d_ssm=1024,
    mamba_n_heads=128,
    mamba_n_groups=1,
    mamba_d_state=256,
    mamba_expand=2,
    mamba_norm_before_gate=True,
    mamba_rms_norm=False,
    rms_norm_eps=1e-5,
)


def against(m: Model) -> dict[str, bool]:
    layers = m.num_layers // len(LAYER)
    return {
        f"--hybrid-layer-pattern {m.letters}": m.letters != LAYER * layers,
        "--disable-bias-linear is missing": m.qkv_bias,
    }


def from_falcon_h1(c: dict[str, Any]) -> tuple[Model, int]:
    c = DEFAULTS | c
    c.get("mlp_expansion_factor"), c.get("mamba_chunk_size")
    refuse(c, **dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), OFF))
    refuse(c, hidden_act=("silu",), mamba_conv_bias=(True, None), mamba_d_conv=(TAPS, None), mamba_use_mlp=(True, None))
    refuse(c, time_step_limit=([0.0, {"__float__": "Infinity"}], [0.0, math.inf], None), attn_layer_indices=(None,))
    multipliers(c)
    layers, hidden, heads = int(c["num_hidden_layers"]), int(c["hidden_size"]), int(c["num_attention_heads"])
    groups, length = int(c.get("num_key_value_heads") or heads), int(c["max_position_embeddings"])
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    inner, scanned = c.get("mamba_d_ssm"), int(c["mamba_n_heads"])
    inner = int(c["mamba_expand"]) * hidden if inner is None else int(inner)
    width = c.get("mamba_d_head") or "auto"
    if inner % scanned or width not in ("auto", inner // scanned):
        raise CheckpointError(f"config.json has {inner} channels in {scanned} heads of {width} (mamba_d_ssm)")
    model = Model(
        num_layers=len(LAYER) * layers,
        hybrid_layer_pattern=LAYER * layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        group_query_attention=groups != heads,
        kv_channels=int(c.get("head_dim") or hidden // heads),
        ffn_hidden_size=int(c["intermediate_size"]),
        seq_length=length,
        max_position_embeddings=length,
        position_embedding_type="rope",
        rotary_base=float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0),
        normalization="RMSNorm",
        norm_epsilon=float(c["rms_norm_eps"]),
        swiglu=True,
        disable_bias_linear=True,
        hidden_dropout=0.0,
        attention_dropout=float(c.get("attention_dropout") or 0.0),
        init_method_std=float(c.get("initializer_range", 0.02)),
        untie_embeddings_and_output_weights=not c.get("tie_word_embeddings", False),
        mamba_num_heads=scanned,
        mamba_head_dim=inner // scanned,
        mamba_state_dim=int(c["mamba_d_state"]),
        mamba_num_groups=int(c["mamba_n_groups"]),
        mamba_rms_norm=bool(c["mamba_rms_norm"]),
        mamba_norm_before_gate=bool(c["mamba_rms_norm"] and c["mamba_norm_before_gate"]),
        **our_rope(c, rope),
    )
    return model, int(c["vocab_size"])


def to_falcon_h1(m: Model) -> dict[str, Any]:
    return dict(
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn_size,
        num_hidden_layers=m.num_layers // len(LAYER),
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.query_groups,
        head_dim=m.head_dim,
        max_position_embeddings=m.position_table,
        rms_norm_eps=m.norm_epsilon,
        attention_dropout=m.attention_dropout,
        rope_theta=m.rotary_base,
        rope_parameters=dict(rope_theta=m.rotary_base, **their_rope(m)),
        hidden_act="silu",
        mamba_d_ssm=m.mamba_heads * m.mamba_head_dim,
        mamba_n_heads=m.mamba_heads,
        mamba_d_head=m.mamba_head_dim,
        mamba_d_state=m.mamba_state_dim,
        mamba_n_groups=m.mamba_num_groups,
        mamba_d_conv=TAPS,
        mamba_conv_bias=True,
        mamba_rms_norm=m.mamba_rms_norm,
        mamba_norm_before_gate=m.mamba_norm_before_gate,
        **dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), False),
        **dict.fromkeys(ONE, 1.0),
        **{name: [1.0] * number for name, number in SEVERAL.items()},
    )


# ---- multipliers -----------------------------------------------------------------------------------------------------


def multipliers(c: dict[str, Any]) -> dict[str, list[float]]:
    """Name in config.json -> its numbers. Raises CheckpointError for one that no weight can express."""
    number = lambda value: 1.0 if value is None else float(value)
    found = {name: [number(c.get(name))] for name in ONE}
    found |= {name: list(map(float, c.get(name) or [1.0] * count)) for name, count in SEVERAL.items()}
    for name, values in found.items():
        if len(values) != SEVERAL.get(name, 1) or not all(value and math.isfinite(value) for value in values):
            raise CheckpointError(
                f"{name} {', '.join(map(str, values))} in config.json cannot be expressed here",
                f"it is {SEVERAL.get(name, 1)} finite numbers other than 0, which are multiplied into weights",
            )
    return found


def folded(matches: list[Match], c: dict[str, Any], model: Model) -> list[Match]:
    """The matches of a file's tensors, whose multipliers the weights of ours have."""
    factors = _factors(multipliers(c), model)
    return [_scaled(match, [_factor_of(name, factors) for name in match.theirs]) for match in matches]


def are_multiplied(c: dict[str, Any]) -> list[str]:
    """The multipliers of config.json that are not 1."""
    return [name for name, values in multipliers(c).items() if set(values) != {1.0}]


def _factors(of: dict[str, list[float]], model: Model) -> dict[str, list[float]]:
    """End of a tensor's name -> the factors of its rows, or one for all of them."""
    of_one = {name: of[name][0] for name in ONE}
    inside, (gate, down) = of_one["attention_in_multiplier"], of["mlp_multipliers"]
    embedding, head = of_one["embedding_multiplier"], of_one["lm_head_multiplier"]
    parts = [part * model.mamba_num_groups for part in ScanSizes.of(model).parts]
    rows = [
        of_one["ssm_in_multiplier"] * factor for factor, part in zip(of["ssm_multipliers"], parts) for _ in range(part)
    ]
    own = model.untie_embeddings_and_output_weights
    return {
        "embed_tokens.weight": [embedding],
        "lm_head.weight": [head],
        "final_layernorm.weight": [1.0 if own else head / embedding],
        "self_attn.q_proj.weight": [inside],
        "self_attn.k_proj.weight": [inside * of_one["key_multiplier"]],
        "self_attn.v_proj.weight": [inside],
        "self_attn.o_proj.weight": [of_one["attention_out_multiplier"]],
        "mamba.in_proj.weight": rows,
        "mamba.out_proj.weight": [of_one["ssm_out_multiplier"]],
        "feed_forward.gate_proj.weight": [gate],
        "feed_forward.down_proj.weight": [down],
    }


def _factor_of(name: str, factors: dict[str, list[float]]) -> Sequence[float]:
    return next((own for end, own in factors.items() if name.endswith(end)), [1.0])


def _scaled(match: Match, factors: list[Sequence[float]]) -> Match:
    if all(set(own) == {1.0} for own in factors):
        return match
    rows = [torch.tensor(own, dtype=torch.float64) for own in factors]

    def times(tensors: Tensors, power: int) -> Tensors:
        columns = (own.pow(power).view(-1, *[1] * (x.dim() - 1)) for own, x in zip(rows, tensors))
        return [(x * own.to(x.device, x.dtype)) for x, own in zip(tensors, columns)]

    return match._replace(
        to_ours=lambda theirs: match.to_ours(times(theirs, 1)), to_theirs=lambda ours: times(match.to_theirs(ours), -1)
    )
