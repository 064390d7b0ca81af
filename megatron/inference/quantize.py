# SPDX-License-Identifier: Apache-2.0
"""Quantization after training: the linear layers of a loaded model multiply by weights of 8 or 4 bits.

    int8          a byte for each weight and a scale for each output channel; products in the format of the inputs
    int8-dynamic  inputs, too, are rounded to int8, by the abs-max of each token; products of integers
    int4          half a byte for each weight; a scale and a zero for each group of inputs of an output channel

Each weight becomes the nearest value, or those of `inference/gptq.py`.

A model of quantization aware training takes int8 alone: its layers then multiply integers, by the scales of inputs that
training has found, or those of each token. Embeddings, norms, biases and the output layer keep the model's format, and so
do layers that are skipped. Results do not depend on the number of tensor parallel ranks: scales are those of whole
channels and tokens.

Legend: n tokens, i inputs, o outputs of this rank, g groups of i.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, Optional

import torch
from torch import nn

from megatron.errors import SettingsError
from megatron.fused_kernels import cpu_ops
from megatron.model.facts import Facts
from megatron.model.fake_quantize import SMALLEST, FakeQuantizeProduct, has_part, rows_absmax, token_codes, token_grid
from megatron.model.linear_kinds import chosen_layers
from megatron.model.quantization import QuantizeOptions
from megatron.model.sparse_product import SparseProduct
from megatron.model.sparsity import MASK
from megatron.mpu import collectives
from megatron.mpu.layers import LINEAR, linear_products, matmul
from megatron.mpu.linear_product import LinearProduct, Multiply, Operand
from megatron.settings.schema import Model

LARGEST = 127  # of int8, symmetric
NIBBLE = 15  # of 4 bits, from 0
MIDDLE = 8  # of them: the zero of symmetric groups


class Codes(NamedTuple):
    """A weight [o, i] as whole numbers: (values - zero) * scale, where g groups of inputs have a scale and a zero each."""

    values: torch.Tensor  # [o, i]
    scale: torch.Tensor  # [o, g]
    zero: torch.Tensor  # [o, g]

    def weight(self) -> torch.Tensor:
        """The weight, [o, i] in fp32."""
        groups = self.values.float().unflatten(1, (self.scale.shape[1], -1))
        return ((groups - self.zero.float().unsqueeze(2)) * self.scale.float().unsqueeze(2)).flatten(1)


class Rounded(LinearProduct):
    """A weight as whole numbers from `least` to `largest`. A subclass defines how its scales follow from a weight."""

    once_a_step = True
    bits: ClassVar[int]
    least: ClassVar[int]
    largest: ClassVar[int]
    group_size: Optional[int] = None  # inputs that share a scale; None: all of an output channel
    stored_bits = 8  # of a value in `operand`

    def grid(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale [o, 1], zero [o, 1]) of a group of inputs, [o, k]; the scale has the format of the weight."""
        raise NotImplementedError

    def operand(self, codes: Codes) -> Operand:
        """The operand of `forward`."""
        raise NotImplementedError

    def codes(self) -> Codes:
        """The weight that the layer multiplies by."""
        raise NotImplementedError

    def hold(self, operand: Operand) -> None:
        """Multiply by this operand, in place of the layer's weight."""
        self._kept = operand


class Int8(Rounded):
    """Weights as int8."""

    bits, least, largest = 8, -LARGEST, LARGEST

    def grid(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._grid(rows.abs().amax(1, keepdim=True), rows)

    def _grid(self, absmax: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = in_format(absmax / self.largest, weight)
        return scale, torch.zeros_like(scale)

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        scale, _ = self._grid(rows_absmax(self.layer, weight)[:, None], weight)
        return rounded(weight, scale, self.largest), scale[:, 0]

    def operand(self, codes: Codes) -> Operand:
        return codes.values.to(torch.int8), codes.scale[:, 0]

    def codes(self) -> Codes:
        whole, scale = self.weight_operand(self.layer.weight)
        return Codes(whole, scale[:, None], torch.zeros_like(scale[:, None]))

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        [x], (whole, scale) = x, weight
        return _with_bias(multiply(x, whole.to(x.dtype), None) * scale.float(), bias, x)


class Int8Dynamic(Int8):
    """Weights and inputs as int8, inputs by the abs-max of each token."""

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        [x], (whole, scale) = x, weight
        largest = x.abs().amax(1).float()
        if has_part(self.layer):
            collectives.all_reduce(largest, self.layer.tp, "max")
        of_token = (largest.clamp_min(SMALLEST) / LARGEST)[:, None]
        return _with_bias(multiply_int8(rounded(x, of_token), whole) * of_token * scale.float(), bias, x)


class Int8Static(Int8):
    """Weights and inputs as int8, inputs by the scale of quantization aware training."""

    def __init__(self, layer, name, settings):
        super().__init__(layer, name, settings)
        self.trained = layer.product
        self.bits, self.largest = settings.weight_bits, self.trained.weight_levels
        self.least = -self.largest

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        per_tensor = self.settings.weight_quantize_type == "abs_max"
        scale = rows_absmax(self.layer, weight, per_tensor).clamp_min(SMALLEST) / self.largest
        return rounded(weight, scale[:, None], self.largest), scale

    @property
    def input_scale(self) -> Optional[torch.Tensor]:
        """The step between two values of the layer's inputs; None: they are not rounded."""
        if not self.trained.observes:
            return None
        total, count = self.layer.input_average
        return total / count / self.trained.input_levels

    def transform_input(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained.clip(x) if "pact_alpha" in self.layer.placements else x

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        [x], (whole, scale) = x, weight
        of_input = self.input_scale
        if of_input is None:
            return super().forward(multiply, (x,), weight, bias)
        products = multiply_int8(rounded(x, of_input, self.trained.input_levels), whole)
        return _with_bias(products * (of_input * scale.float()), bias, x)


class Int8OfTokens(Int8Static):
    """Weights and inputs as int8, inputs by the least and the largest value of each token."""

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        [x], (whole, scale), levels = x, weight, self.trained.token_levels
        step, zero = token_grid(self.layer, x, levels)  # [n, 1]
        middle = (levels + 1) // 2  # so that codes are signed
        codes = (token_codes(x, step, zero, levels) - middle).to(torch.int8)
        products = multiply_int8(torch.cat([codes, torch.ones_like(codes[:1])]), whole)
        sums = products[-1]  # of each output's weights
        return _with_bias((products[:-1] - (zero - middle) * sums) * step * scale.float(), bias, x)


class Int4(Rounded):
    """Weights as 4 bits, two in a byte, by the least and the largest of each group of inputs. One of the values is 0.

    symmetric: by the abs-max, with 8 as the zero of all groups
    """

    bits, stored_bits, least, largest, group_size = 4, 4, 0, NIBBLE, 128
    symmetric = False

    def grid(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.symmetric:
            scale = in_format(rows.abs().amax(1, keepdim=True).float() * 2 / NIBBLE, rows)
            return scale, torch.full_like(scale, MIDDLE, dtype=torch.float32)
        least, largest = rows.amin(1, keepdim=True).clamp_max(0), rows.amax(1, keepdim=True).clamp_min(0)
        scale = in_format((largest.float() - least.float()) / NIBBLE, rows)
        return scale, (-least.float() / scale.float()).round_().clamp_(0, NIBBLE)

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        groups = weight.unflatten(1, (-1, self.group_size)).flatten(0, 1)  # [o g, i/g]
        scale, zero = self.grid(groups)
        values = (groups.float() / scale.float() + zero).round_().clamp_(0, NIBBLE)
        return self.operand(Codes(values.view(weight.shape), scale.view(len(weight), -1), zero.view(len(weight), -1)))

    def operand(self, codes: Codes) -> Operand:
        whole = codes.values.to(torch.uint8)
        return whole[:, ::2] | whole[:, 1::2] << 4, codes.scale, codes.zero.to(torch.uint8)

    def codes(self) -> Codes:
        packed, scale, zero = self.weight_operand(self.layer.weight)
        return Codes(_unpacked(packed), scale, zero)

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        [x], (packed, scale, zero) = x, weight
        return multiply(x, Codes(_unpacked(packed), scale, zero).weight().to(x.dtype), bias)


def in_format(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A scale in the format of the weight, as other programs have it; of fp16, whose range is too small, in fp32."""
    return scale.float().clamp_min(SMALLEST).to(torch.float32 if weight.dtype == torch.float16 else weight.dtype)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """[o, i] from two numbers in a byte, [o, i/2]."""
    return torch.stack([packed & NIBBLE, packed >> 4], 2).flatten(1)


KINDS = {"int8": Int8, "int8-dynamic": Int8Dynamic, "int4": Int4}


def quantize_layers(chunks: Sequence[nn.Module], facts: Facts, how: QuantizeOptions) -> None:
    """Round the linear layers of a loaded model, or of this rank's stage of it, and free their weights.

    Raises SettingsError for a format that does not suit the model.
    """
    chosen = attach(chunks, facts, how)
    for layer in chosen.values():
        with torch.no_grad():
            layer.product.weight_operand(layer.weight)
    free_weights(chunks, chosen)


def attach(chunks: Sequence[nn.Module], facts: Facts, how: QuantizeOptions) -> dict[str, nn.Module]:
    """Give linear layers products of this format, whose weights are not yet rounded; returns name -> layer."""
    wanted = set(chosen_layers(facts, how))
    chosen = {name: layer for name, layer in linear_layers(chunks) if name in wanted}
    for name, layer in chosen.items():
        layer.product = product_of(layer, name, facts.settings, how)
    return chosen


def free_weights(chunks: Iterable[nn.Module], quantized: Mapping[str, nn.Module]) -> None:
    """Empty the weights of quantized layers. Others move to their own memory: all share one tensor, which is then freed."""
    emptied, moved = {id(layer.weight) for layer in quantized.values()}, {}
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        at = parameter.data_ptr()
        if id(parameter) in emptied:
            parameter.data = parameter.data.new_empty(0, *parameter.shape[1:])
        else:
            parameter.data = moved.setdefault(at, parameter.data.clone())


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
            if isinstance(layer, LINEAR) and "blocks." in name:
                yield name[name.index("blocks.") :], layer


def product_of(layer: nn.Module, name: str, settings: Model, how: QuantizeOptions) -> LinearProduct:
    """The product of a layer in this format."""
    present = layer.product
    if isinstance(present, SparseProduct):
        layer.weight.data.mul_(getattr(layer, MASK))
        present = present if isinstance(present, FakeQuantizeProduct) else None
    if isinstance(present, FakeQuantizeProduct):
        if how.quantize != "int8":
            raise SettingsError(
                f"--quantize {how.quantize}: {name} was trained with --quantization, which has found its own scales",
                do="say --quantize int8, or leave it out: the same values, in the format of training",
            )
        return (Int8OfTokens if present.of_tokens else Int8Static)(layer, name, settings)
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
        product.group_size, product.symmetric = size, how.quantize_symmetric
    return product


def rounded(x: torch.Tensor, scale: torch.Tensor, largest: int = LARGEST) -> torch.Tensor:
    """x / scale, rounded to int8."""
    return (x.float() / scale).round_().clamp_(-largest, largest).to(torch.int8)


def multiply_int8(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, i] times weight [o, i], both int8 -> [n, o] in fp32, from sums in int32.

    cuBLAS takes more than 16 rows, and multiples of 8. CPUs without instructions for int8 sum in fp32, which has all
    integers up to 2^24: torch's own loops take up to 20 times as long.
    """
    if x.device.type == "cpu" and torch.int8 not in cpu_ops.FORMATS:
        wide = x.float()
        return matmul(wide)(wide, weight.float())
    if x.device.type == "cpu":
        return torch._int_mm(x, weight.t()).float()
    rows, (outputs, inputs) = len(x), weight.shape
    x = nn.functional.pad(x, (0, -inputs % 8, 0, max(0, 24 - rows)))
    weight = nn.functional.pad(weight, (0, -inputs % 8, 0, -outputs % 8))
    return torch._int_mm(x, weight.t())[:rows, :outputs].float()


def _with_bias(y: torch.Tensor, bias: Optional[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (y if bias is None else y + bias).to(x.dtype)
