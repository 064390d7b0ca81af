# SPDX-License-Identifier: Apache-2.0
"""`LinearProduct`: how a linear layer makes its three products. A subclass says what a kind of layer does otherwise.

    forward pass    y  = forward(prepare_input(x), w)         w = prepare_weight(transform(weight, *own weights))
    backward pass   dx = grad_input(prepare_gradient(dy), w)
                    dw = grad_weight(prepare_gradient(dy), prepare_input(x)), which goes back through `transform`

`transform` is differentiable, and brings weights of its own: a mask, the sum of LoRA. What `prepare_...` does is not seen
by autograd, as a cast to fp8: gradients go straight through. `mpu/layers.py` calls them, and does all else: it gathers and
reduces over tensor parallel ranks, defers the product for the weight's gradient (zero-bubble W), and adds to the
optimizer's gradients. So a kind says nothing of any of these, and works with all of them.

Of a forward pass only what `prepare_input` returns is kept. The transformed weight is made again in the backward pass,
or once a step (`once_a_step`).

Legend: n tokens, i inputs, o outputs that this rank has.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import ClassVar, Optional

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from megatron.errors import SettingsError
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.settings.schema import Model

Operand = tuple[torch.Tensor, ...]  # of a product: a matrix, or what stands for it, such as numbers and their scales
Multiply = Callable[..., torch.Tensor]  # (a [m, k], b [n, k], bias [n] or None) -> a b^T + bias, the suite's kernel


class LinearProduct:
    """The products of one layer, made plainly; a subclass is a kind that `--linear PATTERN=KIND` chooses
    (`Recipe.linears`).

    layer: a `ColumnParallelLinear` or `RowParallelLinear`, with `tp` and `placements`. It may be given buffers that are
    not saved. Its parameters get their memory later: they are arguments of `transform`, and not to be kept.
    name: the layer's name in the whole model, such as `blocks.3.mlp.up`. settings: of the model, with those of `group`.
    """

    group: ClassVar[Optional[type]] = None  # a frozen dataclass of settings that only this kind has
    once_a_step: ClassVar[bool] = False  # what `prepare_weight` gives is kept until the weights change

    def __init__(self, layer: nn.Module, name: str, settings: Model):
        self.layer, self.name, self.settings = layer, name, settings
        self.whole_shape = layer.placements["weight"].shape
        self.own_names = tuple(self.own_weights(settings, layer.placements["weight"]))
        self._kept: Optional[Operand] = None

    # ---- what a kind may say ----------------------------------------------------------------------------------------

    @classmethod
    def own_weights(cls, settings: Model, weight: Placement) -> Mapping[str, Placement]:
        """The parameters that a layer with this weight has besides it: name -> placement (`beside_rows`,
        `beside_inputs`). They are initialised, reduced, sharded and saved as all others.
        """
        return {}

    def transform(self, weight: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        """The weight that is multiplied, [rows..., i] as `weight`: this rank's piece, by differentiable ops.

        own: this rank's pieces of `own_weights`, in their order.
        """
        return weight

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        """The transformed weight [o, i], for `forward` and `grad_input`."""
        return (weight,)

    def prepare_input(self, x: torch.Tensor) -> Operand:
        """The input [n, i], for `forward` and `grad_weight`: this is what the backward pass keeps.

        Each tensor has a row for each of x: under sequence parallelism x is a rank's rows, and all ranks' are gathered.
        """
        return (x,)

    def prepare_gradient(self, gradient: torch.Tensor) -> Operand:
        """The gradient of the output [n, o], for `grad_input` and `grad_weight`."""
        return (gradient,)

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        """The output, [n, o]."""
        return multiply(x[0], weight[0], bias)

    def grad_input(self, multiply: Multiply, gradient: Operand, weight: Operand) -> torch.Tensor:
        """The gradient of the input, [n, i]."""
        return multiply(gradient[0], weight[0].t(), None)

    def grad_weight(self, multiply: Multiply, gradient: Operand, x: Operand) -> torch.Tensor:
        """The gradient of the transformed weight, [o, i]."""
        return multiply(gradient[0].t(), x[0].t(), None)

    def after_update(self) -> None:
        """The layer's weights have changed: once a step, and when a checkpoint was loaded. They cannot be read here: with
        ZeRO they are on their way. `transform` and `prepare_weight` see them first.
        """

    # ---- for kinds --------------------------------------------------------------------------------------------------

    def piece(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a tensor that is as large as the whole weight, such as a mask of it."""
        placement, tp = self.layer.placements["weight"], self.layer.tp
        local = placement.local_shape({tp.name: tp.size})
        offset, extent = placement.box(local, {tp.name: tp.rank})
        return whole[tuple(slice(at, at + n) for at, n in zip(offset, extent))].contiguous()

    # ---- for layers -------------------------------------------------------------------------------------------------

    def parameters(self) -> list[torch.Tensor]:
        """What `transform` is given."""
        return [self.layer.weight, *(getattr(self.layer, name) for name in self.own_names)]

    @property
    def transforms(self) -> bool:
        """Whether the weight that is multiplied is another than the layer's."""
        return type(self).transform is not LinearProduct.transform

    @torch.no_grad()
    def weight_operand(self, weight: Optional[torch.Tensor], *own: torch.Tensor) -> Operand:
        """The weight as products take it."""
        if self._kept is not None:
            return self._kept
        operand = self.prepare_weight(self.transform(weight, *own).to(weight.dtype).flatten(0, -2))
        if self.once_a_step:
            self._kept = operand
        return operand

    def transformed(self, parameters: Operand, trained: tuple[bool, ...], later: bool) -> tuple[Operand, Callable]:
        """(the weight as `grad_input` takes it, what turns its gradient into those of the trained parameters).

        later: when gradients are asked for, the parameters may be gone (ZeRO 3): what they are made from is copied.
        """
        if not self.transforms:
            return self.weight_operand(*parameters), lambda gradient: (gradient.view(parameters[0].shape),)
        with torch.enable_grad(), _copies_of(parameters) if later else nullcontext():
            leaves = [one.detach().requires_grad_(wanted) for one, wanted in zip(parameters, trained)]
            weight = self.transform(*leaves).to(parameters[0].dtype)
        if not weight.requires_grad:
            raise SettingsError(
                f"{type(self).__name__}.transform of {self.name}: no gradient goes through it",
                "it is made of ops that autograd follows, from the weights that it is given",
                "do in prepare_weight what gradients are to go straight through",
            )
        pull_back = partial(
            _pull_back, get_gradient_edge(weight), weight.shape, weight.dtype, [x for x in leaves if x.requires_grad]
        )
        return self._kept or self.prepare_weight(weight.detach().flatten(0, -2)), pull_back

    def weights_changed(self) -> None:
        """Forget what was made from the old ones."""
        self._kept = None
        self.after_update()


def _copies_of(parameters: Operand) -> saved_tensors_hooks:
    """Inside, autograd keeps copies of what lies in the memory of these."""
    memory = {one.untyped_storage().data_ptr() for one in parameters}
    copied = lambda kept: kept.clone() if kept.untyped_storage().data_ptr() in memory else kept
    return saved_tensors_hooks(copied, lambda kept: kept)


def _pull_back(
    edge, shape: torch.Size, dtype: torch.dtype, leaves: list[torch.Tensor], gradient: torch.Tensor
) -> Operand:
    """The gradients of `leaves` from that of what was made of them."""
    found = torch.autograd.grad([edge], leaves, [gradient.view(shape).to(dtype)], allow_unused=True)
    return tuple(torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found))


def attach_products(
    blocks: Mapping[str, nn.Module],
    settings: Model,
    picked_of: Callable[[int], Iterable[tuple[str, str]]],
    compiled: bool = False,
) -> None:
    """Give linear layers of a stage's blocks (number -> module) their `LinearProduct`.

    picked_of: number of a block -> (linear layer, kind) of those that --linear picks. compiled: the blocks are; then
    calls of these layers are not, because torch cannot trace what a kind does.
    """
    for number, block in blocks.items() if settings.linear else ():
        for name, kind in picked_of(int(number)):
            layer, full = block.get_submodule(name), f"blocks.{number}.{name}"
            if not hasattr(layer, "product"):
                raise SettingsError(
                    f"--linear {settings.linear}: {full} is a {type(layer).__name__}, whose product is its own",
                    do="pick layers that are ColumnParallelLinear or RowParallelLinear (megatron/mpu/layers.py)",
                )
            layer.product = settings.own_linears[kind](layer, full, settings)
            if compiled:
                layer.forward = torch.compiler.disable(layer.forward)


def beside_rows(weight: Placement, width: int, init: Normal | Constant, decay: bool = True) -> Placement:
    """Of a layer's weight [rows..., i] the placement of a tensor [rows..., width]: cut as the rows are.

    >>> beside_rows(Placement((8, 4), Normal(0.02), cut={"tp": 1}), 2, Constant(0.0)).partial
    ('tp',)
    """
    last = len(weight.shape) - 1
    cut = {axis: dim for axis, dim in weight.cut.items() if dim < last}
    return _beside(weight, (*weight.shape[:-1], width), cut, init, decay)


def beside_inputs(weight: Placement, height: int, init: Normal | Constant, decay: bool = True) -> Placement:
    """Of a layer's weight [rows..., i] the placement of a tensor [height, i]: cut as the inputs are.

    >>> beside_inputs(Placement((8, 4), Normal(0.02), cut={"tp": 1}), 2, Normal(0.02)).cut
    {'tp': 1}
    """
    last = len(weight.shape) - 1
    cut = {axis: 1 for axis, dim in weight.cut.items() if dim == last}
    return _beside(weight, (height, weight.shape[-1]), cut, init, decay)


def _beside(weight: Placement, shape: tuple[int, ...], cut: dict[str, int], init, decay: bool) -> Placement:
    """Ranks that have other pieces of the weight have each a part of the gradient of what they all hold whole."""
    partial_over = (*weight.partial, *(axis for axis in weight.cut if axis not in cut))
    return Placement(shape, init, cut=cut, partial=partial_over, decay=decay)
