# SPDX-License-Identifier: Apache-2.0
"""The products of a linear layer with DoRA (`model/lora.py`). c is a number for each output.

    forward pass    z  = x W^T + s (x' A^T) B^T,  y = c z
    backward pass   dx, dA, dB: those of LoRA for the gradient c dy
                    dM = sum over tokens of dy z / |W + s B A|           z is computed again: it has the size of y

The norms of rows are computed once a step, in fp32: those of W and of W + s B A, which exists only there. In a row-parallel
layer a rank has a part of each row: one small message.

Legend: o outputs of this rank.
"""

from functools import partial
from typing import Optional

import torch

from megatron.model.fake_quantize import has_part
from megatron.model.lora_product import LoRAProduct
from megatron.mpu import collectives
from megatron.mpu.linear_product import Multiply, Operand

SMALLEST = 1e-30  # norm of a row of zeros


class DoRAProduct(LoRAProduct):
    """See above."""

    def __init__(self, layer, name, settings):
        super().__init__(layer, name, settings)
        self._norms: Optional[torch.Tensor] = None

    def after_update(self) -> None:
        self._norms = None

    def prepare_weights(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> Operand:
        return *super().prepare_weights(weight, a, b), self.factors(weight, a, b, m)

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        y = (super().forward(multiply, x, weight[:3], None) * weight[3]).to(x[0].dtype)
        return y if bias is None else y + bias

    def grad_input(self, multiply: Multiply, gradient: Operand, weight: Operand) -> torch.Tensor:
        return super().grad_input(multiply, (self.scaled(gradient[0], weight[3]), *gradient[1:]), weight[:3])

    def for_backward(self, parameters: Operand, trained: tuple[bool, ...], later: bool):
        assert not trained[0], "model/facts.py refuses it"
        weight, *own = (one.clone() for one in parameters) if later else parameters
        return self.weight_operand(*parameters), partial(self._grads_beside, trained, weight.shape, (*own, weight))

    def grad_own(self, multiply: Multiply, gradient: Operand, x: Operand, own: Operand) -> Operand:
        a, b, m, weight = own
        z = super().forward(multiply, x, super().prepare_weights(weight, a, b), None)
        norms = self.norms(weight, a, b)[1]
        d_m = (gradient[0].to(norms.dtype) * z).sum(0) / norms
        scaled = self.scaled(gradient[0], self.factors(weight, a, b, m))
        return *super().grad_own(multiply, (scaled, *gradient[1:]), x, (a, b)), d_m.view(m.shape)

    def factors(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        """c, [o] in fp32."""
        before, now = self.norms(weight, a, b)
        return (before + m.flatten()) / now

    @torch.no_grad()
    def norms(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The norms of the rows of W and of W + s B A on all ranks, [2, o] in fp32."""
        if self._norms is None:
            wide = torch.promote_types(weight.dtype, torch.float32)
            rows = weight.flatten(0, -2).to(wide)
            moved = rows + self.scale * (self.wide(b).to(wide) @ a.to(wide))
            squares = torch.stack([rows.square().sum(1), moved.square().sum(1)])
            if has_part(self.layer) and not weight.is_meta:
                collectives.all_reduce(squares, self.layer.tp)
            self._norms = squares.sqrt().clamp_min(SMALLEST)
        return self._norms

    @staticmethod
    def scaled(gradient: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """c dy, in the format of dy."""
        return (gradient * factors).to(gradient.dtype)
