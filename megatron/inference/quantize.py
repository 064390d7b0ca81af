# SPDX-License-Identifier: Apache-2.0
"""Quantization after training: the linear layers of a loaded model multiply by weights of 8 or 4 bits.

    int8          a byte for each weight and a scale for each output channel; products in the format of the inputs
    int8-dynamic  inputs, too, are rounded to int8, by the abs-max of each token; products of integers
    int4          half a byte for each weight; a scale and a zero for each group of inputs of an output channel

A model of quantization aware training takes int8 alone: its layers then multiply integers by the scales of inputs that
training has found. Embeddings, norms, biases and the output layer keep the model's format, and so do layers that are
skipped. Results do not depend on the number of tensor parallel ranks: scales are those of whole channels and tokens.

Legend: n tokens, i inputs, o outputs of this rank, g groups of i.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Optional

import torch
from torch import nn

from megatron.errors import SettingsError
from megatron.model.facts import Facts
from megatron.model.fake_quantize import SMALLEST, FakeQuantizeProduct, has_part, rows_absmax
from megatron.model.linear_kinds import LinearChoice
from megatron.model.linear_kinds import linear_layers as linear_names
from megatron.model.quantization import QuantizeOptions, skipped_layers
from megatron.mpu import collectives
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, linear_products
from megatron.mpu.linear_product import LinearProduct, Multiply, Operand
from megatron.settings.schema import Model

LARGEST = 127  # of int8, symmetric
NIBBLE = 15  # of 4 bits, from 0


class Int8(LinearProduct):
    """Weights as int8."""

    once_a_step = True

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        scale = rows_absmax(self.layer, weight).clamp_min(SMALLEST) / LARGEST
        return rounded(weight, scale[:, None]), scale

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        [x], (whole, scale) = x, weight
        return _with_bias(multiply(x, whole.to(x.dtype), None) * scale, bias, x)


class Int8Dynamic(Int8):
    """Weights and inputs as int8, inputs by the abs-max of each token."""

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        [x], (whole, scale) = x, weight
        largest = x.abs().amax(1).float()
        if has_part(self.layer):
            collectives.all_reduce(largest, self.layer.tp, "max")
        of_token = (largest.clamp_min(SMALLEST) / LARGEST)[:, None]
        return _with_bias(multiply_int8(rounded(x, of_token), whole) * of_token * scale, bias, x)


class Int8Static(Int8):
    """Weights and inputs as int8, inputs by the scale of quantization aware training."""

    def __init__(self, layer, name, settings):
        super().__init__(layer, name, settings)
        self.trained = layer.product

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        per_tensor = self.settings.weight_quantize_type == "abs_max"
        scale = rows_absmax(self.layer, weight, per_tensor).clamp_min(SMALLEST) / self.trained.weight_levels
        return rounded(weight, scale[:, None], self.trained.weight_levels), scale

    def transform_input(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained.clip(x) if "pact_alpha" in self.layer.placements else x

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        [x], (whole, scale) = x, weight
        if not self.trained.observes:
            return super().forward(multiply, (x,), weight, bias)
        total, count = self.layer.input_average
        of_input, levels = total / count / self.trained.input_levels, self.trained.input_levels
        return _with_bias(multiply_int8(rounded(x, of_input, levels), whole) * (of_input * scale), bias, x)


class Int4(LinearProduct):
    """Weights as 4 bits, two in a byte, by the least and the largest of each group of inputs."""

    once_a_step = True
    group_size = 128

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        groups = weight.float().unflatten(1, (-1, self.group_size))  # [o, g, i/g]
        least, largest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = (largest - least).clamp_min(SMALLEST) / NIBBLE
        whole = ((groups - least) / scale).round_().clamp_(0, NIBBLE).to(torch.uint8).flatten(1)
        return whole[:, ::2] | whole[:, 1::2] << 4, scale, least

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        [x], (packed, scale, least) = x, weight
        whole = torch.stack([packed & NIBBLE, packed >> 4], 2).flatten(1)
        values = whole.unflatten(1, (-1, self.group_size)).to(scale.dtype).mul_(scale).add_(least)
        return multiply(x, values.flatten(1).to(x.dtype), bias)


KINDS = {"int8": Int8, "int8-dynamic": Int8Dynamic, "int4": Int4}


def quantize_layers(chunks: Sequence[nn.Module], facts: Facts, how: QuantizeOptions) -> None:
    """Quantize the linear layers of a loaded model, or of this rank's stage of it, and free their weights.

    Raises SettingsError for a format that does not suit the model.
    """
    settings, wanted = facts.settings, set(chosen_layers(facts, how))
    chosen = {name: layer for name, layer in linear_layers(chunks) if name in wanted}
    for name, layer in chosen.items():
        layer.product = product_of(layer, name, settings, how)
        with torch.no_grad():
            layer.product.weight_operand(layer.weight)
    for chunk in chunks:
        _free(chunk, {id(layer.weight) for layer in chosen.values()})


def chosen_layers(facts: Facts, how: QuantizeOptions) -> list[str]:
    """The names of the linear layers of a model, on all ranks, without those to skip.

    Raises SettingsError for a pattern that is no layer.
    """
    tables = {layer: facts.layer_weights(facts.layer_kind(layer), False) for layer in range(facts.num_layers)}
    names = {f"blocks.{layer}.{name}": name for layer, table in tables.items() for name in linear_names(table)}
    skip = [LinearChoice(pattern, "") for pattern in skipped_layers(how.quantize_skip, "--quantize-skip")]
    for choice in skip:
        if not any(map(choice.matches, names)):
            raise SettingsError(
                f"--quantize-skip: '{choice.pattern}' is no linear layer of this model",
                do=f"each block has {', '.join(dict.fromkeys(names.values()))}",
            )
    return [name for name in names if not any(one.matches(name) for one in skip)]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and of its quantized weights."""
    operands = [product.operand_bytes for product in linear_products([model])]
    return sum(parameter.nbytes for parameter in model.parameters()) + sum(operands)


@contextmanager
def quantized_alone(layer: Optional[nn.Module], name: str, settings: Model, how: QuantizeOptions) -> Iterator[None]:
    """A context in which one layer is quantized, if this rank has it. Its weight is kept."""
    if layer is not None:
        before, layer.product = layer.product, product_of(layer, name, settings, how)
    try:
        yield
    finally:
        if layer is not None:
            layer.product = before


def linear_layers(chunks: Iterable[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """(name, layer) of the linear layers of a model's blocks."""
    for chunk in chunks:
        for name, layer in chunk.named_modules():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) and "blocks." in name:
                yield name[name.index("blocks.") :], layer


def product_of(layer: nn.Module, name: str, settings: Model, how: QuantizeOptions) -> LinearProduct:
    """The product of a layer in this format."""
    present = layer.product
    if isinstance(present, FakeQuantizeProduct):
        if how.quantize != "int8":
            raise SettingsError(
                f"--quantize {how.quantize}: {name} was trained with --quantization, which has found its own scales",
                do="say --quantize int8, or leave it out: the same values, in the format of training",
            )
        return Int8Static(layer, name, settings)
    if present is not None:
        raise SettingsError(
            f"--quantize {how.quantize}: {name} multiplies in its own way (--linear {settings.linear})",
            do="leave --quantize out, or skip these layers with --quantize-skip",
        )
    product = KINDS[how.quantize](layer, name, settings)
    if isinstance(product, Int4):
        size, inputs = how.quantize_group_size, layer.weight.shape[-1]
        if size < 2 or size % 2 or inputs % size:
            raise SettingsError(
                f"--quantize-group-size {size} does not divide the {inputs} inputs of {name} on a rank",
                "a group is an even number of inputs of one rank",
                "choose another; 32, 64 and 128 are usual",
            )
        product.group_size = size
    return product


def rounded(x: torch.Tensor, scale: torch.Tensor, largest: int = LARGEST) -> torch.Tensor:
    """x / scale, rounded to int8."""
    return (x.float() / scale).round_().clamp_(-largest, largest).to(torch.int8)


def multiply_int8(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, i] times weight [o, i], both int8 -> [n, o] in fp32, from sums in int32.

    cuBLAS takes more than 16 rows, and multiples of 8.
    """
    if x.device.type == "cpu":
        return torch._int_mm(x, weight.t()).float()
    rows, (outputs, inputs) = len(x), weight.shape
    x = nn.functional.pad(x, (0, -inputs % 8, 0, max(0, 24 - rows)))
    weight = nn.functional.pad(weight, (0, -inputs % 8, 0, -outputs % 8))
    return torch._int_mm(x, weight.t())[:rows, :outputs].float()


def _with_bias(y: torch.Tensor, bias: Optional[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (y if bias is None else y + bias).to(x.dtype)


def _free(chunk: nn.Module, quantized: set[int]) -> None:
    """Empty the quantized weights. Others move to their own memory: all share one tensor, which is then freed."""
    moved: dict[int, torch.Tensor] = {}
    for parameter in chunk.parameters():
        at = parameter.data_ptr()
        if id(parameter) in quantized:
            parameter.data = parameter.data.new_empty(0, *parameter.shape[1:])
        else:
            parameter.data = moved.setdefault(at, parameter.data.clone())
