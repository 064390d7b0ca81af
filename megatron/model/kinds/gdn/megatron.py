# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets in Megatron-LM's checkpoints: on each rank all queries, all keys, all values, all gates, all write
strengths, all decays; ours are in the order of key heads.
"""

from collections.abc import Mapping
from typing import Any

from megatron.errors import CheckpointError
from megatron.model.kinds.gdn.kind import DeltaSizes, settings_of
from megatron.model.kinds.gdn.settings import linear_layers
from megatron.model.megatron_form import NORM, KindNames, MegatronForm, Names, in_parts
from megatron.settings.schema import Model

SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
VARIANTS = ("gated_delta_net", "gdn")
PARTS = ("query", "key", "value", "z", "beta", "alpha")


def _names(model: Model, version: float) -> KindNames:
    parts = DeltaSizes.of(model).parts
    modules = {
        "dt_bias": Names("self_attention.dt_bias"),
        "A_log": Names("self_attention.A_log"),
        NORM: Names("input_layernorm.", fused="self_attention.in_proj.layer_norm_"),
        "in_proj": Names("self_attention.in_proj."),
        "conv_weight": Names("self_attention.conv1d.weight"),
        "norm_weight": Names("self_attention.out_norm.weight"),
        "out_proj": Names("self_attention.out_proj."),
    }
    rows = {"in_proj.weight": in_parts(PARTS, parts), "conv_weight": in_parts(PARTS[:3], parts[:3], taps=True)}
    return KindNames(modules, rows)


def _asked(args: Mapping[str, Any]) -> bool:
    return bool(args.get("experimental_attention_variant"))


def _ours(args: Mapping[str, Any], layers: int) -> dict[str, Any]:
    variant = args.get("experimental_attention_variant")
    if variant not in (None, *VARIANTS):
        raise CheckpointError(f"its --experimental-attention-variant is {variant}: there are {', '.join(VARIANTS)}")
    frequency = args.get("linear_attention_freq")
    if args.get("hybrid_layer_pattern") or variant is None:
        return {}
    try:
        text = str(frequency).replace(" ", "")
        return settings_of(linear_layers(text, layers))
    except ValueError as error:
        raise CheckpointError(f"its --linear-attention-freq is {frequency}: {error}") from None


def _theirs(model: Model) -> dict[str, Any]:
    if not model.has_gdn or model.letters:
        return {}
    linear = [int(model.is_linear(n)) for n in range(model.num_layers)]
    return dict(experimental_attention_variant="gdn", linear_attention_freq=linear)


FORM = MegatronForm(
    _names,
    same=SIZES,
    other=("experimental_attention_variant", "linear_attention_freq"),
    asked=_asked,
    ours=_ours,
    theirs=_theirs,
    flags=True,
)
