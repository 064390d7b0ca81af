# SPDX-License-Identifier: Apache-2.0
"""Harm a loaded model in one place at a time, to measure how much it needs it: `tools.sensitivity`.

Each function yields (name of the place, context in which the model is harmed there), equally on all ranks.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Optional

import torch
from torch import nn

from megatron.errors import SettingsError
from megatron.inference.load import Loaded
from megatron.inference.prune import Importance, Network, most_important
from megatron.inference.quantize import linear_layers, quantized_alone
from megatron.inference.stages import chunks_of
from megatron.model.linear_kinds import chosen_layers
from megatron.model.pruning import KINDS
from megatron.model.quantization import PLAIN, QuantizeOptions
from megatron.model.sparse_product import mask_of
from megatron.model.sparsity import pattern_of
from megatron.mpu.linear_product import divided_over
from megatron.settings.schema import Model

Probe = tuple[str, AbstractContextManager]


def quantized(loaded: Loaded, how: QuantizeOptions) -> Iterator[Probe]:
    """Each linear layer, quantized."""
    own = _linear_layers(loaded)
    for name in chosen_layers(loaded.facts, how):
        yield name, quantized_alone(own.get(name), name, loaded.config.model, how)


def masked(loaded: Loaded, sparsity: Model) -> Iterator[Probe]:
    """Each linear layer, with zeros in place of its smallest weights. sparsity: settings with --sparsity."""
    own, pattern = _linear_layers(loaded), pattern_of(sparsity)
    for name in chosen_layers(loaded.facts, PLAIN):
        if name not in own:
            yield name, nullcontext()
            continue
        layer = own[name]
        if pattern and layer.weight.shape[-1] % pattern.group:
            raise SettingsError(
                f"--sparsity {sparsity.sparsity}: {name} has {layer.weight.shape[-1]} inputs on a rank",
                do=f"groups of {pattern.group} have to divide them",
            )
        total = math.prod(layer.placements["weight"].shape)
        mask = mask_of(layer.weight, pattern or float(sparsity.sparsity), total, divided_over(layer))
        yield name, _zeros(layer.weight, mask)


def pruned(
    loaded: Loaded, network: Network, importance: Importance, ratio: float, place: Mapping[str, int]
) -> Iterator[Probe]:
    """The heads, and the MLP channels, of each layer: the least important ones go. place: this rank's coordinates."""
    weights = {name: one for chunk in chunks_of(loaded.model) for name, one in chunk.named_parameters()}
    for kind in KINDS:
        for own, (name, cut) in network.readers(kind).items():
            values = importance.units[kind, own]
            kept = torch.zeros(len(values), dtype=torch.bool)
            kept[most_important(values, len(values) - round(len(values) * ratio))] = True
            context: AbstractContextManager = nullcontext()
            if name in weights:
                placement, weight = network.table[name], weights[name]
                offset, extent = placement.box(tuple(weight.shape), dict(place))
                columns = kept.repeat_interleave(cut.block)[offset[cut.dim] :][: extent[cut.dim]]
                context = _zeros(weight, columns.to(weight.device))
            yield f"{network.place_of(own)}.{kind}", context


def without_layers(loaded: Loaded) -> Iterator[Probe]:
    """Each layer, left out."""
    blocks = {name: block for chunk in chunks_of(loaded.model) for name, block in chunk.blocks.items()}
    for layer in range(loaded.facts.num_layers):
        block = blocks.get(str(layer))
        yield f"blocks.{layer}.layer", nullcontext() if block is None else _left_out(block)


def _linear_layers(loaded: Loaded) -> dict[str, Any]:
    return dict(linear_layers(chunks_of(loaded.model)))


@contextmanager
def _zeros(weight: torch.Tensor, mask: torch.Tensor) -> Iterator[None]:
    """A context in which a weight is multiplied by a mask."""
    kept = weight.detach().clone()
    weight.data.mul_(mask)
    try:
        yield
    finally:
        weight.data.copy_(kept)


@contextmanager
def _left_out(block: nn.Module) -> Iterator[None]:
    """A context in which a layer returns its input."""
    before: Optional[Any] = block.__dict__.get("forward")
    block.forward = lambda x, *more: x
    try:
        yield
    finally:
        del block.forward
        if before is not None:
            block.forward = before
