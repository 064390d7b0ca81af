# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 in Megatron-LM's checkpoints: on each rank all gates, all x, all B, all C, all step sizes; ours are in the order
of groups. Its gated norm has an epsilon of 1e-5, whatever that of other norms is.
"""

from collections.abc import Mapping
from typing import Any

from megatron.errors import CheckpointError, SettingsError
from megatron.model.kinds.mamba.kind import ScanSizes
from megatron.model.megatron_form import NORM, KindNames, MegatronForm, Names, in_parts
from megatron.settings.schema import Model

SIZES = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
PARTS = ("z", "x", "B", "C", "dt")
EPSILON = 1e-5


def _names(model: Model, version: float) -> KindNames:
    parts = ScanSizes.of(model).parts
    modules = {
        "conv_weight": Names("mixer.conv1d_weight", also=("mixer.conv1d.weight",)),  # up to 0.16 a module
        "conv_bias": Names("mixer.conv1d_bias", also=("mixer.conv1d.bias",)),
        "dt_bias": Names("mixer.dt_bias"),
        "A_log": Names("mixer.A_log"),
        "D": Names("mixer.D"),
        NORM: Names("norm.", fused="mixer.in_proj.layer_norm_"),
        "in_proj": Names("mixer.in_proj."),
        "norm_weight": Names("mixer.norm.weight"),
        "out_proj": Names("mixer.out_proj."),
    }
    mixed = PARTS[1:4], parts[1:4]
    rows = {"in_proj.weight": in_parts(PARTS, parts)}
    rows |= {"conv_weight": in_parts(*mixed, taps=True), "conv_bias": in_parts(*mixed)}
    older = ("dt_bias", "A_log", "D", NORM, "in_proj", "conv_weight", "conv_bias", "norm_weight", "out_proj")
    return KindNames(modules, rows, older=older)


def _ours(args: Mapping[str, Any], layers: int) -> dict[str, Any]:
    epsilon = float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or EPSILON)
    if epsilon != EPSILON:
        raise CheckpointError(
            f"its norms have an epsilon of {epsilon:g}, and the gated norms of its Mamba-2 layers one of {EPSILON:g}",
            "all norms of a model have one here",
        )
    return {}


def _theirs(model: Model) -> dict[str, Any]:
    if model.has_mamba and model.norm_epsilon != EPSILON:
        raise SettingsError(
            f"--norm-epsilon {model.norm_epsilon:g}: gated norms of Mamba-2 have {EPSILON:g} in Megatron-LM",
            "other norms have that of the flag",
        )
    return {}


FORM = MegatronForm(_names, same=SIZES, ours=_ours, theirs=_theirs)
