# SPDX-License-Identifier: Apache-2.0
"""Mapping between the weights of MLPs in Hugging Face's decoders and ours (`gpt.hf_names`)."""

from collections.abc import Callable

import torch

from megatron.model.hf_match import FUSED, Match, linear_matches, module_of
from megatron.settings.schema import Model


def matches(kind: str, model: Model, ours: str, theirs: str, norm: Callable[[str, str], Match]) -> list[Match]:
    """The matches of a layer's MLP. ours: `blocks.7.mlp.`; theirs: `model.layers.7.`"""
    theirs = module_of(kind, theirs, "mlp")
    whats = ("weight",) if model.disable_bias_linear else ("weight", "bias")
    if kind in FUSED:
        split, join = lambda t: t[0].unflatten(0, (2, -1)), lambda x: [x.flatten(0, 1)]
        up = [Match(f"{ours}up.{what}", (f"{theirs}gate_up_proj.{what}",), split, join) for what in whats]
    elif not model.gated:
        up = linear_matches(model, f"{ours}up", f"{theirs}up_proj")
    else:
        names = ("gate_proj", "up_proj")
        theirs_of = lambda what: tuple(f"{theirs}{name}.{what}" for name in names)
        up = [Match(f"{ours}up.{what}", theirs_of(what), torch.stack, lambda x: list(x)) for what in whats]
    return up + linear_matches(model, f"{ours}down", f"{theirs}down_proj")
