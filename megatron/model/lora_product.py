# SPDX-License-Identifier: Apache-2.0
"""The products of a linear layer with a LoRA pair, or with DoRA (`model/lora.py`). Of a pair, none has the size of the
weight's gradient.

    forward pass    y  = x W^T + s (x' A^T) B^T           s = alpha / rank, x' = dropout(x)
    backward pass   dx = dy W + s (dy B) A                only this one goes on if the layer's pair is frozen, too
                    dA = s (dy B)^T x',  dB = s dy^T (x' A^T)

Of the input x is saved, with dropout also its mask, a byte for each element. With DoRA c is a number for each output:

    forward pass    z  = x W^T + s (x' A^T) B^T,  y = c z
    backward pass   dx, dA, dB: those of LoRA for the gradient c dy
                    dM = sum over tokens of dy z / |W + s B A|           z is computed again: it has the size of y

The norms of rows are computed once a step, in fp32: those of W and of W + s B A, which exists only there. In a row-parallel
layer a rank has a part of each row: one small message.

Legend: n tokens, i inputs, o outputs of this rank, r rank, R rank times the parts of a fused weight.
"""

from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F

from megatron.model.fake_quantize import has_part
from megatron.model.lora import own_weights, parts_of, scale_of
from megatron.mpu import collectives
from megatron.mpu.linear_product import LinearProduct, Multiply, Operand
from megatron.mpu.random import Dropout

SMALLEST = 1e-30  # norm of a row of zeros


class LoRAProduct(LinearProduct):
    """Those of LoRA."""

    own_weights = staticmethod(own_weights)

    def __init__(self, layer, name, settings):
        super().__init__(layer, name, settings)
        self.scale = scale_of(settings)
        self.part_dim, self.parts = parts_of(settings, layer.placements["weight"])
        self.draws_samples = self.input_in_grad = settings.lora_dropout > 0
        self.dropout: Optional[Dropout] = None

    def prepare_weights(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Operand:
        return (*self.prepare_weight(self.matrix(weight)), a, self.wide(b))

    def prepare_input(self, x: torch.Tensor) -> Operand:
        keep = self.keep(x)
        return (x,) if keep is None else (x, keep)

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        whole, a, b = weight
        return self.added(multiply, multiply(x[0], whole, bias), multiply(self.dropped(x), a, None), b)

    def grad_input(self, multiply: Multiply, gradient: Operand, weight: Operand) -> torch.Tensor:
        whole, a, b = weight
        d_x, narrow = multiply(gradient[0], whole.mT, None), multiply(gradient[0], b.mT, None)
        if len(gradient) == 1:
            return self.added(multiply, d_x, narrow, a.mT)
        return d_x.add_(self.masked(multiply(narrow, a.mT, None), gradient[1]), alpha=self.scale)

    def grad_own(self, multiply: Multiply, gradient: Operand, x: Operand, own: Operand) -> Operand:
        (a, b), seen = own, self.dropped(x)  # [n, i]
        d_a = self.scale * multiply(multiply(gradient[0], self.wide(b).mT, None).t(), seen.t(), None)  # [R, i]
        d_b = self.scale * multiply(gradient[0].t(), multiply(seen, a, None).t(), None)  # [o, R]
        return d_a, self.narrow(d_b, b.shape)

    def added(self, multiply: Multiply, total: torch.Tensor, narrow: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """total [n, o] + s narrow [n, R] b^T, in place. On CPUs a product that adds takes twice as long as both apart."""
        if total.device.type == "cpu" or self.stacked:
            return total.add_(multiply(narrow, b, None), alpha=self.scale)
        return total.addmm_(narrow, b.t(), alpha=self.scale)

    # ---- parts of a fused weight ---------------------------------------------------------------------------------------

    def wide(self, b: torch.Tensor) -> torch.Tensor:
        """B as a matrix [o, R]. A row is 0 outside of the columns of its own part."""
        return widened(b, self.part_dim, self.parts, self.stacked)

    def narrow(self, wide: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The columns of each row's own part, [rows..., r], from [o, R]."""
        if len(self.parts) == 1:
            return wide.view(shape)
        pieces = enumerate(wide.view(*shape[:-1], -1).split(self.parts, self.part_dim))
        return torch.cat([piece.unflatten(-1, (-1, shape[-1]))[..., n, :] for n, piece in pieces], self.part_dim)

    # ---- dropout ------------------------------------------------------------------------------------------------------

    def keep(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """The elements of x [n, i] that dropout keeps, as 0 and 1 of uint8; None: all of them.

        The mask depends on the sample and the layer alone, so it is the same in every layout. x has the samples of a
        micro-batch side by side: row t b + k is position t of sample k.
        """
        if not self.draws_samples or not self.layer.training:
            return None
        if self.dropout is None:
            self.dropout = self.made_dropout()
        samples = self.draws.samples
        mask = self.dropout.keep((len(x) // len(samples), len(samples), x.shape[-1]), samples, x.device).mask()
        return mask.reshape(x.shape).view(torch.uint8)

    def made_dropout(self) -> Dropout:
        """Ranks of tp have parts of the rows of x (sequence parallelism), or parts of a row (row-parallel layers)."""
        placement, tp = self.layer.placements["weight"], self.layer.tp
        by_row = placement.cut.get("tp") == len(placement.shape) - 1
        axis = tp if by_row or getattr(self.layer, "row_axis", None) else None
        return Dropout(
            self.settings.lora_dropout,
            f"lora {self.name}",
            -1,
            self.draws.seed,
            cut=by_row,
            axis=axis,
            cp=self.draws.cp,
        )

    def masked(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """x [n, i] where it is kept, scaled."""
        return (x * keep.to(x.dtype)).mul_(self.dropout.factor)

    def dropped(self, x: Operand) -> torch.Tensor:
        """The input of A."""
        return x[0] if len(x) == 1 else self.masked(*x)


class DoRAProduct(LoRAProduct):
    """Those of DoRA."""

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


def widened(b: torch.Tensor, dim: int, parts: tuple[int, ...], stacked: int = 0) -> torch.Tensor:
    """B [rows..., r] as a matrix [o, R], by the parts of the rows along `dim`; `stacked` for experts: as [E, o, R].

    >>> widened(torch.ones(3, 1), 0, (2, 1)).tolist()
    [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    r, last = b.shape[-1], len(parts) - 1
    if not last:
        return b.flatten(stacked, -2)
    pieces = enumerate(b.split(parts, dim))
    return torch.cat([F.pad(piece, (n * r, (last - n) * r)) for n, piece in pieces], dim).flatten(stacked, -2)
