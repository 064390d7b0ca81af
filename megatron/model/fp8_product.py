# SPDX-License-Identifier: Apache-2.0
"""The products of a linear layer in fp8 (`model/fp8.py` says of which), in the arithmetic of `fused_kernels/fp8.py`.

                     tensorwise               blockwise                           mxfp8
    x, dy            one scale                1 x 128                             1 x 32
    w                one scale                128 x 128                           1 x 32
    y = x w^T        rows                     rows                                rows
    dx = dy w        rows; w turned           rows; w turned, scales as well      rows; w cast again along its columns
    dw = dy^T x      both turned              x turned from its saved numbers; dy cast along its columns

x and w are e4m3; dy is e5m2 with --fp8-format hybrid. Sums are fp32, those of blockwise of 128 each. Of x fp8 numbers are
saved, and under sequence parallelism gathered. dw is fp32, until it is added to a gradient. Biases are added before y is
rounded.

The scale of tensorwise is that of a whole tensor as far as ranks have parts of it in one place: of a weight, and of an
input that is gathered, over tp: a message of 4 bytes. An input of a row-parallel layer, and the gradient of a
column-parallel layer's output, are parts that no rank has whole: each part has its own scale. Never over data, context or
pipeline parallel ranks: another micro-batch is another tensor.

Legend: n tokens, i inputs, o outputs of this rank.
"""

from collections.abc import Callable, Iterable
from typing import ClassVar, Optional

import torch
from torch import nn

from megatron.fused_kernels import Case, choose_kernel
from megatron.fused_kernels.fp8 import BLOCKS, E4M3, E5M2, MX, ROWS, SQUARES, WHOLE, amax_of
from megatron.model.fp8 import fp8_layers, gathered_in_fp8
from megatron.model.weights import Table
from megatron.mpu import collectives
from megatron.mpu.linear_product import LinearProduct, Operand, attach_products
from megatron.settings.schema import Config

KIND, EXPERTS = "fp8", "fp8 of experts"


class BlockwiseProduct(LinearProduct):
    """Tiles of 1 x 128, and of weights 128 x 128 (DeepSeek-V3, arXiv:2412.19437).

    Operands of products are rows along what is summed: those of H100's tensor cores have to be. So a weight, and a
    gradient, are (q, s) of rows and (q, s) of columns.
    """

    rows, weights = BLOCKS, SQUARES
    times_weight, times_rows = "fp8_blockwise_square", "fp8_blockwise"  # ops of the table of kernels
    fast: ClassVar[bool] = False  # the forward pass may add up in less than fp32
    once_a_step = True
    held: Optional[Operand] = None  # values and scales of the weight, if the optimizer keeps it so

    def __init__(self, layer, name, settings):
        super().__init__(layer, name, settings)
        self.of_gradients = E5M2 if settings.fp8_format == "hybrid" else E4M3

    # ---- casts --------------------------------------------------------------------------------------------------------

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        return kernel("fp8_cast", weight)(weight, self.weights, E4M3, columns=True)

    def hold(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        self.held = values, scales

    def weight_operand(self, weight: Optional[torch.Tensor], *own: torch.Tensor) -> Operand:
        return self.held or super().weight_operand(weight, *own)

    def prepare_input(self, x: torch.Tensor) -> Operand:
        return self.cast_input(x) if self.settings.fp8_wgrad else (x,)

    def cast_input(self, x: torch.Tensor) -> Operand:
        """Values and scales of the input, with a row for each of its rows."""
        return kernel("fp8_cast", x)(x, self.rows, E4M3)

    def prepare_gradient(self, gradient: torch.Tensor) -> Operand:
        """(q and s of rows for dx; q and s of columns for dw, or the gradient itself.)"""
        wgrad = self.settings.fp8_wgrad
        cast = kernel("fp8_cast", gradient)(gradient, self.rows, self.of_gradients, self.amax(gradient), columns=wgrad)
        return cast if wgrad else (*cast, gradient)

    def amax(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """The largest absolute value, for a tile of all of x."""

    def gradient_of_weight(self, gradient: Operand) -> Operand:
        return gradient[2:]

    def scaled(self, operand: Operand) -> Operand:
        """(q, s) of an input, as products and `fp8_turn` read it."""
        return operand

    # ---- products -----------------------------------------------------------------------------------------------------

    def forward(self, multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        x = self.scaled(x if self.settings.fp8_wgrad else self.cast_input(x[0]))
        return kernel(self.times_weight, x[0])(x, weight[:2], self.layer.weight.dtype, bias, self.fast)

    def grad_input(self, multiply, gradient: Operand, weight: Operand) -> torch.Tensor:
        return kernel(self.times_weight, gradient[0])(
            gradient[:2], weight[2:] or turned(weight), self.layer.weight.dtype
        )

    def grad_weight(self, multiply, gradient: Operand, x: Operand) -> torch.Tensor:
        if not self.settings.fp8_wgrad:
            return product_in_fp32(gradient[0].t(), x[0])
        turned = kernel("fp8_turn", x[0])(self.scaled(x), self.rows)
        return kernel(self.times_rows, x[0])(gradient, turned, torch.float32)


class Mxfp8Product(BlockwiseProduct):
    """Tiles of 1 x 32 along what is summed (OCP MX): a weight is cast along its rows, and along its columns."""

    rows = weights = MX
    times_weight = times_rows = "fp8_mxfp8"


class TensorwiseProduct(BlockwiseProduct):
    """One scale for each tensor. That of x is repeated for each row, as an operand has to have rows."""

    rows = weights = WHOLE
    times_weight = times_rows = "fp8_tensorwise"
    fast = True
    _amax: Optional[torch.Tensor] = None  # of the weight on all ranks, until it changes

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        if self._amax is None:
            self._amax = self.over_tp(amax_of(weight), self.layer.placements["weight"].cut)
        return kernel("fp8_cast", weight)(weight, self.weights, E4M3, self._amax, columns=True)

    def after_update(self) -> None:
        self._amax = None

    def over_tp(self, amax: torch.Tensor, parts: object) -> torch.Tensor:
        """The largest of the ranks of tp, if these have parts of a tensor."""
        return collectives.all_reduce_amax(amax, self.layer.tp) if parts else amax

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        return amax_of(x)

    def cast_input(self, x: torch.Tensor) -> Operand:
        # With --no-fp8-wgrad the input is whole when it is cast.
        parts = getattr(self.layer, "row_axis", None) if self.settings.fp8_wgrad else None
        values, scale = kernel("fp8_cast", x)(x, self.rows, E4M3, self.over_tp(amax_of(x), parts))
        return values, scale.expand(len(x), 1).contiguous()

    def scaled(self, operand: Operand) -> Operand:
        values, scales = operand
        return values, scales[:1] if len(scales) else scales.new_ones((1, 1))


def kernel(op: str, x: torch.Tensor) -> Callable:
    """The kernel of an op on the device of x."""
    return choose_kernel(op, Case(x.device.type, torch.bfloat16)).run


def turned(weight: Operand) -> Operand:
    """The columns of a weight, whose tiles are squares: the same numbers."""
    values, scales = weight
    return kernel("fp8_turn", values)((values, scales), WHOLE)[0], scales.t().contiguous()


def product_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b of operands in the format of --precision."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class ExpertsProduct(LinearProduct):
    """Experts, with every recipe and format: rows of x and dy, and rows and columns of each matrix, are e4m3 with a scale
    each; dw is that of --precision. No expert has columns of its own tokens to cast, and none needs padding (torchao's and
    nanochat's choice).
    """

    once_a_step = True

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        cut = weight_cut(self.layer)
        inputs = cut == len(self.whole_shape) - 1
        return *self.cast_rows(weight, inputs), *self.cast_rows(weight.mT, cut is not None and not inputs)

    def cast_rows(self, weight: torch.Tensor, parts: bool) -> Operand:
        """Values [E, o, i] and scales [E, o, 1] of rows. parts: ranks of etp have parts of them."""
        amax = weight.abs().amax(-1, keepdim=True).float()
        amax = collectives.all_reduce_amax(amax, self.layer.tp) if parts else amax
        values, scales = kernel("fp8_cast", weight)(weight.flatten(0, 1), ROWS, E4M3, amax.flatten(0, 1))
        return values.view(weight.shape), scales.view(amax.shape)

    def times(self, multiply, x: torch.Tensor, matrices: Operand, fast: bool = False) -> torch.Tensor:
        """Rows x [n, k] times the matrix of their expert, [E, m, k]."""
        rows = kernel("fp8_cast", x)(x, ROWS, E4M3)
        return kernel("fp8_grouped", x)(rows, matrices, multiply.rows.ends, x.dtype, multiply, fast)

    def forward(self, multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        return self.times(multiply, x[0], weight[:2], fast=True)

    def grad_input(self, multiply, gradient: Operand, weight: Operand) -> torch.Tensor:
        return self.times(multiply, gradient[0], weight[2:])


def weight_cut(layer: nn.Module) -> Optional[int]:
    """The dim of an expert's weight that ranks of etp divide; None: each has whole experts."""
    return layer.placements["weight"].cut.get(layer.tp.name)


PRODUCTS = dict(tensorwise=TensorwiseProduct, blockwise=BlockwiseProduct, mxfp8=Mxfp8Product)


def attach_fp8(stages: Iterable[nn.Module], config: Config, tables: dict[int, Table]) -> None:
    """Attach the products of --fp8-format to the linear layers of a rank's stages. tables: as in `fp8_layers`."""
    blocks = config.model.num_layers
    chosen = {
        layer: [(name, EXPERTS if weight.stacked else KIND) for name, weight in own.items()]
        for layer, own in fp8_layers(config, tables).by_layer.items()
    }
    product = PRODUCTS[config.precision.fp8_recipe]
    kinds, own = {KIND: product, EXPERTS: ExpertsProduct}, {}
    if config.parallel.sharding_stage == 3:  # cast after each gather: a cache would hold whole weights
        own = dict.fromkeys(kinds, {"once_a_step": False})
    if gathered_in_fp8(config.precision):
        own[KIND] = {"gathered_as": product.weights}
    kinds |= {name: type(kinds[name].__name__, (kinds[name],), attributes) for name, attributes in own.items()}
    for stage in stages if chosen else ():
        depths = [(f"mtp.{n}.layers", blocks, depth.layers) for n, depth in enumerate(getattr(stage, "mtp", ()))]
        for name, first, layers in (("blocks", 0, stage.blocks), *depths):
            attach_products(
                dict(layers.named_children()),
                config.precision,
                kinds,
                lambda layer, first=first: chosen.get(first + layer, ()),
                compiled=bool(config.kernels.torch_compile),
                prefix=name,
            )
