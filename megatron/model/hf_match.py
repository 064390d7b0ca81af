# SPDX-License-Identifier: Apache-2.0
"""`Match`: a tensor of ours and its values in the files of Hugging Face; `refuse_shape`."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from megatron.errors import SettingsError
from megatron.settings.schema import Model

Tensors = list[torch.Tensor]
FUSED = ("phi3",)  # queries, keys and values are one tensor, and so are gate and values of the MLP

MIXERS = ("mamba2", "nemotron_h")  # a layer has a norm and a `mixer`, whatever its kind
BESIDE = ("falcon_h1",)  # a layer has attention beside another mixer, then an MLP
OTHER = {"falcon_h1": {"mlp": "feed_forward"}}  # names of modules


class Match(NamedTuple):
    """A tensor of ours and the tensors of theirs with the same values.

    theirs: none for a count that is 0 between steps. exact: fp32 in their files, whatever the format of the weights
    """

    ours: str
    theirs: tuple[str, ...]
    to_ours: Callable[[Tensors], torch.Tensor] = lambda theirs: theirs[0]
    to_theirs: Callable[[torch.Tensor], Tensors] = lambda ours: [ours]
    exact: bool = False


def module_of(kind: str, layer: str, name: str) -> str:
    """The prefix of the names of a layer's module: `model.layers.7.self_attn.`."""
    return f"{layer}{'mixer' if kind in MIXERS else OTHER.get(kind, {}).get(name, name)}."


def linear_matches(model: Model, ours: str, theirs: str) -> list[Match]:
    """The matches of a linear layer that both have: its weight, and its bias if it has one."""
    whats = ("weight",) if model.disable_bias_linear else ("weight", "bias")
    return [Match(f"{ours}.{what}", (f"{theirs}.{what}",)) for what in whats]


def refuse_shape(kind: str, against: Mapping[str, bool]) -> None:
    """Raise SettingsError if a model is not Hugging Face's `kind`. against: reason -> whether it holds"""
    if why := ", ".join(reason for reason, holds in against.items() if holds):
        raise SettingsError(
            f"Hugging Face's {kind} is no model of this shape",
            f"not {kind}: {why}",
            "python -m megatron.tools.export --format onnx or torch-export writes a program of it",
        )
