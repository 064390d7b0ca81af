# SPDX-License-Identifier: Apache-2.0
"""Experts in Megatron-LM's checkpoints: their names, and the settings in the arguments of a run.

    mlp.router.weight, mlp.router.expert_bias
    mlp.experts.local_experts.3.linear_fc1.weight    SequentialMLP
    mlp.experts.linear_fc1.weight3                   TEGroupedMLP
    mlp.shared_experts.linear_fc1.weight, mlp.shared_experts.gate_weight

Number 3 is the fourth expert of the file's rank of ep. Each expert is a tensor [2 f/tp, h] with a gate, gate first.
Distributed checkpoints have all experts of a layer as one tensor, `mlp.experts.experts.linear_fc1.weight`.
"""

import re
from collections.abc import Mapping
from typing import Any, Optional

from megatron.errors import CheckpointError
from megatron.model.kinds.experts.hf import pattern_of
from megatron.model.kinds.mlp.megatron import PARTS
from megatron.model.megatron_form import NORM, KindNames, MegatronForm, Names, same_settings
from megatron.settings.schema import Model

_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)|linear_fc([12])\.(weight|bias)(\d+))"
)
_MATRIX = {"1": "up", "2": "down"}
SAME = (  # settings with the same name and meaning in Megatron-LM
    "num_experts moe_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_scaling_factor moe_z_loss_coeff moe_router_enable_expert_bias moe_router_bias_update_rate "
    "moe_input_jitter_eps moe_router_force_load_balancing moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
    "moe_token_drop_policy"
).split()
OTHER = ("moe_layer_freq", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_dtype")
REFUSED = ("moe_apply_probs_on_input",)


def _names(model: Model, version: float) -> KindNames:
    modules = {
        NORM: Names(
            "pre_mlp_layernorm.",
            legacy="post_attention_layernorm.",
            also=("post_attention_norm.", "mlp.linear_fc1.layer_norm_"),
        ),
        "router": Names("mlp.router."),
        "experts.up": Names("mlp.experts.experts.linear_fc1."),  # of distributed checkpoints: [E, 2 f, h]
        "experts.down": Names("mlp.experts.experts.linear_fc2."),
        "latent_down": Names("mlp.fc1_latent_proj."),
        "latent_up": Names("mlp.fc2_latent_proj."),
        "shared_gate": Names("mlp.shared_experts.gate_"),
        "shared.up": Names("mlp.shared_experts.linear_fc1."),
        "shared.down": Names("mlp.shared_experts.linear_fc2."),
    }
    gated = [f"{name}.up.{what}" for name in ("experts", "shared") for what in ("weight", "bias")]
    return KindNames(modules, dict.fromkeys(gated, PARTS) if model.gated else {})


def our_expert(theirs: str) -> Optional[tuple[str, int]]:
    """(our tensor, number of the expert on its rank) of a tensor in a layer; None: it is no expert's.

    >>> our_expert("mlp.experts.linear_fc2.weight11")
    ('experts.down.weight', 11)
    """
    found = _EXPERT.fullmatch(theirs)
    if not found:
        return None
    number, matrix, kind = found.group(1, 2, 3) if found[1] else found.group(6, 4, 5)
    return f"experts.{_MATRIX[matrix]}.{kind}", int(number)


def their_expert(ours: str, number: int, grouped: bool) -> str:
    """Their name of an expert's tensor. grouped: of TEGroupedMLP, otherwise of SequentialMLP."""
    matrix, kind = ours.removeprefix("experts.").split(".")
    layer = f"linear_fc{1 if matrix == 'up' else 2}"
    return f"mlp.experts.{layer}.{kind}{number}" if grouped else f"mlp.experts.local_experts.{number}.{layer}.{kind}"


# ---- settings --------------------------------------------------------------------------------------------------------


def _ours(args: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Our settings from the arguments of a run with experts. Raises CheckpointError."""
    if refused := [name for name in REFUSED if args.get(name)]:
        raise CheckpointError(f"the checkpoint uses {', '.join(refused)}, which cannot be expressed here")
    tp, etp = args.get("tensor_model_parallel_size") or 1, args.get("expert_tensor_parallel_size")
    if etp not in (None, tp):
        raise CheckpointError(
            f"its experts are divided over {etp} ranks and other layers over {tp}",
            do="save it in the format torch_dist, or with --expert-tensor-parallel-size equal to tp",
        )
    ours = same_settings(SAME, args)
    frequency = 1 if args.get("hybrid_layer_pattern") else args.get("moe_layer_freq", 1)
    layers = frequency if isinstance(frequency, list) else [n % int(frequency) == 0 for n in range(num_layers)]
    kinds, weight = args.get("moe_router_load_balancing_type"), args.get("moe_aux_loss_coeff")
    as_list = lambda value: value if isinstance(value, list) or value is None else [value]
    if args.get("moe_router_dtype") == "fp64":  # others are fp32 here, at least
        ours["moe_router_dtype"] = "fp64"
    return ours | dict(
        moe_layer_freq=pattern_of([bool(one) for one in layers]),
        moe_router_load_balancing_type=as_list(kinds),
        moe_aux_loss_coeff=as_list(weight),
    )


def _theirs(m: Model) -> dict[str, Any]:
    """The arguments of a run with the experts of a model."""
    if not m.mixture:
        return dict(num_experts=None)
    kinds, weights = map(list, zip(*m.balancing))
    only = len(kinds) == 1
    return {name: getattr(m, name) for name in SAME} | dict(
        moe_ffn_hidden_size=m.expert_ffn_size,
        moe_layer_freq=[int(m.has_experts(n)) for n in range(m.num_layers)],
        moe_router_load_balancing_type=kinds[0] if only else kinds,
        moe_aux_loss_coeff=weights[0] if only else weights,
        moe_router_dtype=m.moe_router_dtype,
    )


FORM = MegatronForm(
    _names,
    other=(*SAME, *OTHER),
    asked=lambda args: (args.get("num_experts") or 0) > 1,
    ours=_ours,
    theirs=_theirs,
    one_of_experts=our_expert,
    their_expert=their_expert,
)
