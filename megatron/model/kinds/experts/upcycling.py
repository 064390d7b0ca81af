# SPDX-License-Identifier: Apache-2.0
"""Upcycling: the experts of a mixture from the MLPs of a dense model, so that the mixture computes the same function
(arXiv:2212.05055; experts narrower than the MLP: arXiv:2410.07524).

Each expert is a copy of the MLP. The weights of a token's experts have the sum 1 (softmax over the chosen, or sigmoids
divided by their sum), so the sum of their outputs is the MLP's. With --moe-ffn-hidden-size ffn / G an expert is one of G
segments of the MLP. G consecutive experts have its G segments and equal routers, so a token's k experts are k / G groups of
all segments. Their weights add up to 1 over all of them, and outputs are multiplied by G. Biases of outputs are not.

A scaling factor s of the weights divides the outputs by s.

Legend: E experts, k experts of a token, F width of the MLP, f = F / G width of an expert.
"""

from dataclasses import fields, replace
from typing import Any

import torch

from megatron.errors import SettingsError
from megatron.model.kinds.experts.parts import ways_of
from megatron.model.kinds.experts.settings import ExpertSettings
from megatron.mpu.placement import Placement
from megatron.mpu.random import init_parameter
from megatron.settings.schema import Model

EXPERTS, ROUTER = ".mlp.experts.", ".mlp.router."


def dense(model: Model) -> Model:
    """The dense model that a mixture starts from: the same shape without experts."""
    return replace(model, **vars(ExpertSettings()))


def granularity(model: Model) -> int:
    """G, the number of experts that together are one MLP."""
    return model.ffn_size // model.expert_ffn_size


def refuse_unequal(model: Model) -> None:
    """Raise SettingsError if the mixture would compute something else than the dense model."""
    g, k, f = granularity(model), model.moe_router_topk, model.expert_ffn_size
    choosing = [kind for kind, way in ways_of(model).items() if way.chooses]
    reasons = {
        "--moe-router-pre-softmax: weights of the chosen experts do not add up to 1": model.moe_router_pre_softmax,
        f"--moe-router-load-balancing-type {' '.join(choosing)}: weights do not add up to 1": bool(choosing),
        "--layer-settings: its MLPs are of one width": bool(model.layer_settings),
        "--moe-router-topk 1: the weight of one sigmoid is not 1": k == 1
        and model.moe_router_score_function == "sigmoid",
        "--moe-shared-expert-intermediate-size: the dense model has no shared expert": bool(
            model.moe_shared_expert_intermediate_size
        ),
        f"--moe-latent-size {model.moe_latent_size}: the dense model has no latents": bool(model.moe_latent_size),
        f"--moe-ffn-hidden-size {f}: it must divide the MLP's width {model.ffn_size}": model.ffn_size % f != 0,
        f"--moe-router-topk {k}: it must be a multiple of {g}, the experts that one MLP becomes": g > 0 and k % g != 0,
        f"--num-experts {model.num_experts}: it must be a multiple of {g}, the experts that one MLP becomes": g > 0
        and model.num_experts % g != 0,
        f"--moe-router-num-groups with experts of width {f}: groups would part the segments of an MLP": g > 1
        and bool(model.moe_router_num_groups),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise SettingsError(
            "the mixture would not compute what the dense model does", "\n  ".join(found), "change these settings"
        )


def source_of(name: str) -> str | None:
    """The tensor of the dense model that a tensor of experts comes from; None: it is no tensor of experts.

    >>> source_of("blocks.3.mlp.experts.up.weight")
    'blocks.3.mlp.up.weight'
    """
    return name.replace(EXPERTS, ".mlp.") if EXPERTS in name else None


def experts_of(name: str, mlp: torch.Tensor, model: Model, first: int, count: int) -> torch.Tensor:
    """`count` experts from number `first` on, stacked: a part of the tensor `name`, from the dense model's."""
    g, scaling = granularity(model), model.moe_router_topk_scaling_factor or 1.0
    if ".down.bias" in name:
        segments = [mlp / scaling] * g
    elif ".down." in name:
        segments = [segment * (g / scaling) for segment in mlp.chunk(g, -1)]
    else:
        segments = mlp.chunk(g, -2 if name.endswith(".weight") else -1)
    return torch.stack([segments[number % g] for number in range(first, first + count)])


def router_of(name: str, placed: Placement, model: Model, seed: int) -> torch.Tensor:
    """A whole tensor of a router: initial values, equal for the segments of an MLP."""
    dtype = torch.float32 if placed.buffer is None else getattr(torch, placed.buffer.dtype)
    whole, g = torch.empty(placed.shape, dtype=dtype), granularity(model)
    init_parameter(name, whole, placed, {}, seed)
    return whole[: len(whole) // g].repeat_interleave(g, 0)


def upcycled_settings(saved: dict[str, Any], model: Model) -> dict[str, Any]:
    """The saved settings of the dense model with the experts of the mixture."""
    return saved | {one.name: getattr(model, one.name) for one in fields(ExpertSettings)}
