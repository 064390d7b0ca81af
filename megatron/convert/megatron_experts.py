# SPDX-License-Identifier: Apache-2.0
"""Experts in Megatron-LM's checkpoints: their names, their parts, and the settings in the arguments of a run.

    mlp.router.weight, mlp.router.expert_bias
    mlp.experts.local_experts.3.linear_fc1.weight    SequentialMLP
    mlp.experts.linear_fc1.weight3                   TEGroupedMLP
    mlp.shared_experts.linear_fc1.weight, mlp.shared_experts.gate_weight

Number 3 is the fourth expert of the file's rank of ep. Each expert is a tensor [2 f/tp, h] with a gate, gate first.
Distributed checkpoints have all experts of a layer as one tensor, `mlp.experts.experts.linear_fc1.weight`.
"""

import re
from typing import Any, Optional

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError
from megatron.model.kinds.experts.hf import pattern_of
from megatron.mpu.placement import Placement

_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)|linear_fc([12])\.(weight|bias)(\d+))"
)
_MATRIX = {"1": "up", "2": "down"}
BIAS = "mlp.router.expert_bias"
SAME = (  # settings with the same name and meaning in Megatron-LM
    "num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk "
    "moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_scaling_factor moe_z_loss_coeff moe_router_enable_expert_bias moe_router_bias_update_rate "
    "moe_input_jitter_eps moe_router_force_load_balancing moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
    "moe_token_drop_policy"
).split()
OTHER = ("moe_layer_freq", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_dtype")
REFUSED = ("moe_latent_size", "moe_apply_probs_on_input", "mtp_num_layers")


def our_expert(theirs: str) -> Optional[tuple[str, int]]:
    """(our name, number of the expert on its rank) of a tensor in a layer; None: it is no expert's.

    >>> our_expert("mlp.experts.linear_fc2.weight11")
    ('mlp.experts.down.weight', 11)
    """
    found = _EXPERT.fullmatch(theirs)
    if not found:
        return None
    number, matrix, kind = found.group(1, 2, 3) if found[1] else found.group(6, 4, 5)
    return f"mlp.experts.{_MATRIX[matrix]}.{kind}", int(number)


def their_expert(ours: str, number: int, grouped: bool) -> str:
    """Their name of an expert's tensor. grouped: of TEGroupedMLP, otherwise of SequentialMLP."""
    matrix, kind = ours.removeprefix("mlp.experts.").split(".")
    layer = f"linear_fc{1 if matrix == 'up' else 2}"
    return f"mlp.experts.{layer}.{kind}{number}" if grouped else f"mlp.experts.local_experts.{number}.{layer}.{kind}"


def expert_piece(name: str, placed: Placement, x: torch.Tensor, number: int, tensor: int, file: str) -> Piece:
    """The piece of our tensor of all experts that is one of their tensors. tensor: its tensor parallel rank."""
    inner, cut = list(placed.shape[1:]), placed.cut.get("etp")
    if cut is not None:
        inner[cut - 1] = x.numel() * inner[cut - 1] // max(1, _size(inner))
    if x.numel() != _size(inner):
        raise CheckpointError(f"{file}: an expert of {name} has shape {tuple(x.shape)}, expected {placed.shape[1:]}")
    box = Box(*placed.box((1, *inner), {"ep": number, "etp": tensor}))
    return Piece(name, placed.shape, box, x.reshape(1, *inner).contiguous())


def _size(shape) -> int:
    return torch.Size(shape).numel()


def zero_counts(weights: dict[str, Placement]) -> list[Piece]:
    """The loads of experts, which their files do not have: 0 between steps."""
    counts = {name: one for name, one in weights.items() if one.buffer and one.buffer.combine == "sum"}
    return [
        Piece(name, one.shape, Box.whole(one.shape), torch.zeros(one.shape, dtype=getattr(torch, one.buffer.dtype)))
        for name, one in counts.items()
    ]


# ---- settings --------------------------------------------------------------------------------------------------------


def our_arguments(args: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Our settings from the arguments of a run with experts; empty without experts. Raises CheckpointError."""
    if (args.get("num_experts") or 0) < 2:
        return {}
    if refused := [name for name in REFUSED if args.get(name)]:
        raise CheckpointError(f"the checkpoint uses {', '.join(refused)}, which cannot be expressed here")
    tp, etp = args.get("tensor_model_parallel_size") or 1, args.get("expert_tensor_parallel_size")
    if etp not in (None, tp):
        raise CheckpointError(
            f"its experts are divided over {etp} ranks and other layers over {tp}",
            do="save it in the format torch_dist, or with --expert-tensor-parallel-size equal to tp",
        )
    ours = {name: args[name] for name in SAME if args.get(name) is not None}
    frequency = args.get("moe_layer_freq", 1)
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


def their_arguments(m, ep: int, tp: int, grouped: bool) -> dict[str, Any]:
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
        moe_grouped_gemm=grouped,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
    )
