# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers as ONNX has them: the program keeps whole numbers, and onnxruntime chooses the kernels.

    int8           weight -> DequantizeLinear -> product
    int8-dynamic   inputs, divided by the abs-max of each token, and weight -> MatMulInteger
    trained int8   inputs -> QuantizeLinear -> DequantizeLinear, and weight -> DequantizeLinear -> product; if tokens have
                   their own scales, inputs are rounded by ordinary ops
    int4           MatMulNBits of onnxruntime, whose groups have 16, 32, 64, 128 or 256 inputs

Legend: n tokens, i inputs, o outputs, g groups of i.
"""

from typing import Optional

import torch
from torch import nn

from megatron.errors import SettingsError
from megatron.inference.quantize import LARGEST, Int4, Int8Dynamic, Int8OfTokens, Int8Static, Rounded
from megatron.model.fake_quantize import SMALLEST, rounded_tokens, token_grid
from megatron.mpu.layers import linear_products
from megatron.mpu.linear_product import LinearProduct, Multiply, Operand

GROUPS = (16, 32, 64, 128, 256)


def attach(model: nn.Module) -> None:
    """Replace the products of quantized layers. Raises SettingsError for groups that onnxruntime does not have."""
    for product in linear_products([model]):
        if isinstance(product, Int4) and product.group_size not in GROUPS:
            raise SettingsError(
                f"--format onnx: onnxruntime has no groups of {product.group_size} inputs",
                do=f"--quantize-group-size {', '.join(map(str, GROUPS))}",
            )
        if isinstance(product, Rounded):
            product.layer.product = OnnxProduct(product)


class OnnxProduct(LinearProduct):
    """The product of a quantized layer, by ops of ONNX."""

    def __init__(self, product: Rounded):
        super().__init__(product.layer, product.name, product.settings)
        self.product = product
        operand = product.weight_operand(product.layer.weight)
        self._kept = _blocks(*operand, product.group_size) if isinstance(product, Int4) else operand

    def transform_input(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.transform_input(x)

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        if isinstance(self.product, Int4):
            y = self._of_groups(x[0], *weight)
        elif isinstance(self.product, Int8Dynamic):
            y = self._of_whole_numbers(x[0], *weight)
        else:
            whole, scale = weight
            y = nn.functional.linear(self._input(x[0]), _dequantized(whole, scale.to(x[0].dtype), 0))
        return y if bias is None else y + bias

    def _input(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, i] with the values that training has rounded it to."""
        if isinstance(self.product, Int8OfTokens):
            levels = self.product.trained.token_levels
            return rounded_tokens(x, *token_grid(self.layer, x, levels), levels)
        scale = self.product.input_scale if isinstance(self.product, Int8Static) else None
        if scale is None:
            return x
        scale, levels = scale.to(x.dtype), self.product.trained.input_levels
        inside = torch.minimum(torch.maximum(x, -levels * scale), levels * scale)
        zero = torch.zeros((), dtype=torch.int8)
        whole = _op("QuantizeLinear", (inside, scale, zero), torch.int8, x.shape)
        return _op("DequantizeLinear", (whole, scale, zero), x.dtype, x.shape)

    def _of_whole_numbers(self, x: torch.Tensor, whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        step = x.abs().amax(1, keepdim=True).float().clamp_min(SMALLEST) / LARGEST
        rounded = (x.float() / step).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        sums = _op("MatMulInteger", (rounded, whole.t().contiguous()), torch.int32, (x.shape[0], len(whole)))
        return (sums.float() * step * scale.float()).to(x.dtype)

    def _of_groups(self, x, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        (outputs, groups, half), inputs = packed.shape, (x, packed, scale.to(x.dtype), zeros)
        sizes = dict(K=2 * half * groups, N=outputs, bits=4, block_size=2 * half)
        return _op("com.microsoft::MatMulNBits", inputs, x.dtype, (x.shape[0], outputs), sizes)


def _blocks(packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, size: int) -> Operand:
    """The weight of MatMulNBits: numbers [o, g, size/2], scales [o g], zeros, two in a byte."""
    outputs, groups = scale.shape
    pairs = nn.functional.pad(zero, (0, groups % 2))
    zeros = pairs[:, ::2] | pairs[:, 1::2] << 4
    return packed.view(outputs, groups, size // 2), scale.flatten(), zeros.flatten()


def _dequantized(whole: torch.Tensor, scale: torch.Tensor, axis: int) -> torch.Tensor:
    zero = torch.zeros(len(scale), dtype=torch.int8)
    return _op("DequantizeLinear", (whole, scale, zero), scale.dtype, whole.shape, dict(axis=axis))


def _op(name: str, inputs, dtype: torch.dtype, shape, attributes=None) -> torch.Tensor:
    return torch.onnx.ops.symbolic(
        name, inputs, attributes or {}, dtype=dtype, shape=shape, version=1 if "::" in name else None
    )
