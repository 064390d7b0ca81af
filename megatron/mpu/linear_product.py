# SPDX-License-Identifier: Apache-2.0
"""`LinearProduct`: the three matrix products of a linear layer. A subclass changes them for its kind of layer.

    forward pass    y  = forward(prepare_input(x), w)         w = prepare_weight(transform(weight, *own weights))
    backward pass   dx = grad_input(prepare_gradient(dy), w)
                    dw = grad_weight(prepare_gradient(dy), prepare_input(x)), which goes back through `transform`

`transform` is differentiable, and may use additional weights, as a mask or LoRA does; `transform_input`, to
which x goes first, is differentiable, too. `prepare_...` is not differentiated,
as a cast to fp8: gradients pass straight through. A kind may also multiply with its own weights beside the weight, as
LoRA does (`prepare_weights`, `grad_own`): then the gradient of a frozen weight is never computed. `mpu/layers.py` calls
them, and does everything else: it gathers and reduces over tensor parallel ranks, defers the product for the weight's
gradient (zero-bubble W), and adds to the optimizer's gradients. So every kind works with all of these. An ordinary linear
layer has `PLAIN`, this class itself.

The forward pass only saves the result of `prepare_input`. The transformed weight is recomputed in the backward pass, or
once a step (`once_a_step`).

Experts' matrices are stacked: their weight is [E, rows..., i], its operand [E, o, i], and `multiply` computes each row with
the matrix of its expert. Formulas with `.mT` of a weight, and `.t()` of rows, are those of both.

Legend: n tokens, i inputs, o outputs of this rank, E its experts.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import ClassVar, Optional

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from megatron.errors import SettingsError
from megatron.fused_kernels.fp8 import ScaleTile
from megatron.mpu.mesh import Axis
from megatron.mpu.placement import Placement
from megatron.mpu.random import Draws
from megatron.settings.schema import Model, Precision

Operand = tuple[torch.Tensor, ...]  # of a product: a matrix, or its representation, such as quantized values and scales
Multiply = Callable[..., torch.Tensor]  # (a [m, k], b [n, k], bias [n] or None) -> a b^T + bias, the suite's kernel; of
# experts: (rows [m, k], b [E, n, k]) -> [m, n], and (a [n, m], b [k, m]), transposed rows both -> [E, n, k]
Gradients = Callable[[Multiply, Operand, Operand], Operand]  # (multiply, gradient of the output, input) -> gradients


class LinearProduct:
    """The plain products of one layer; a subclass is a kind for `--linear PATTERN=KIND` (`Recipe.linears`).

    layer: a `ColumnParallelLinear`, `RowParallelLinear`, `ReplicatedLinear` or `GroupedLinear`, with `placements`, and
    `tp`, the axis whose ranks have parts or copies of its matrices. A subclass may register non-persistent buffers in it.
    Its parameters are allocated later: use those passed to `transform`, do not store them.
    name: the layer's name in the whole model, such as `blocks.3.mlp.up`. settings: of the model, with those of `group`; of
    products in fp8 `Precision`.
    """

    group: ClassVar[Optional[type]] = None  # a frozen dataclass of this kind's own settings
    once_a_step: ClassVar[bool] = False  # cache the result of `prepare_weight` until the weights change
    draws_samples = False  # `prepare_input` reads `draws.samples`, for random numbers that no layout changes
    together: ClassVar[bool] = False  # a layer may be of this kind and of others (`composed`)
    input_in_grad = False  # `grad_input` gets all tensors of `prepare_input` but the first, after those of the gradient
    draws: Optional[Draws] = None  # of its block, if `draws_samples`
    stacked = 0  # dims of the weight before those of a matrix: 1 for experts
    gathered_as: ClassVar[Optional[ScaleTile]] = None  # tiles of a weight that the optimizer keeps in fp8 (`hold`)
    packed: Optional[Operand] = None  # of a kind that `pack`s: what `forward_packed` reads
    _kept: Optional[Operand] = None

    def __init__(self, layer: nn.Module, name: str, settings: Model | Precision):
        self.layer, self.name, self.settings = layer, name, settings
        self.whole_shape, self.stacked = layer.placements["weight"].shape, layer.placements["weight"].stacked
        own = self.own_weights(settings, layer.placements["weight"])
        self.own_names = tuple(name for name, placed in own.items() if not placed.buffer)
        if type(self).update_buffers is not LinearProduct.update_buffers:
            layer.update_buffers = self.update_buffers

    # ---- what a kind may override ----------------------------------------------------------------------------------------

    @classmethod
    def own_weights(cls, settings: Model, weight: Placement) -> Mapping[str, Placement]:
        """Additional parameters of a layer with this weight: name -> placement (`placement.beside_rows`, `beside_inputs`).
        They are initialized, reduced, sharded and saved as all others.
        """
        return {}

    def transform(self, weight: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        """Compute the effective weight, [rows..., i] as `weight`: this rank's piece, with differentiable ops.

        own: this rank's pieces of `own_weights`, in their order.
        """
        return weight

    def pack(self, weight: torch.Tensor) -> bool:
        """Keep a weight [o, i] as `packed`, in oneDNN's order, for `torch.inference_mode`. Returns whether the kind can."""
        return False

    def forward_packed(self, x: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        """`forward` of x [n, i] by `packed`."""
        raise NotImplementedError

    def transform_input(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the effective input, of the shape of x, with differentiable ops.

        x: the input of the layer on this rank: with sequence parallelism its rows, in a row-parallel layer its part of
        each row.
        """
        return x

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        """The transformed weight [o, i], for `forward` and `grad_input`."""
        return (weight,)

    def prepare_weights(self, weight: torch.Tensor, *own: torch.Tensor) -> Operand:
        """The weight operand of `forward` and `grad_input`, from the layer's weight and the own weights."""
        return self.prepare_weight(self.matrix(self.transform(weight, *own).to(weight.dtype)))

    def prepare_input(self, x: torch.Tensor) -> Operand:
        """The input [n, i], for `forward` and `grad_weight`; it is saved for the backward pass.

        Each tensor has a row for each row of x: under sequence parallelism x has one rank's rows, and they are gathered.
        """
        return (x,)

    def prepare_gradient(self, gradient: torch.Tensor) -> Operand:
        """The gradient of the output [n, o], for `grad_input` and `grad_weight`."""
        return (gradient,)

    def gradient_of_weight(self, gradient: Operand) -> Operand:
        """What `grad_weight` gets of `prepare_gradient`; the rest is freed after `grad_input`."""
        return gradient

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        """The output, [n, o]."""
        return multiply(x[0], weight[0], bias)

    def grad_input(self, multiply: Multiply, gradient: Operand, weight: Operand) -> torch.Tensor:
        """The gradient of the input, [n, i]."""
        return multiply(gradient[0], weight[0].mT, None)

    def grad_weight(self, multiply: Multiply, gradient: Operand, x: Operand) -> torch.Tensor:
        """The gradient of the transformed weight, [o, i]."""
        return multiply(gradient[0].t(), x[0].t(), None)

    def grad_own(self, multiply: Multiply, gradient: Operand, x: Operand, own: Operand) -> Operand:
        """The gradients of the own weights, for a kind that multiplies with them beside the weight and defines
        `prepare_weights`. Without it they are computed from the gradient of the transformed weight.
        """
        raise NotImplementedError

    def grad_bias(self, rows: torch.Tensor) -> torch.Tensor:
        """The gradient of a bias [o] that `forward` adds, from that of the output [n, o]."""
        return rows.sum(0)

    def add_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x + bias, for a bias that is added after a sum over ranks. Differentiable."""
        return x + bias

    def after_update(self) -> None:
        """Called when the layer's weights have changed: once a step, and after loading a checkpoint. Weights cannot be read
        here, because ZeRO may still be gathering them; `transform` and `prepare_weight` can.
        """

    def hold(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Called once with the memory of the weight's fp8 numbers, if it is `gathered_as` such: it holds them whenever the
        weight is read, and the weight itself has no memory.
        """

    def after_load(self) -> None:
        """Called when a checkpoint has filled the layer's weights and buffers, before `after_update`."""

    def after_transform_changed(self) -> None:
        """Called by a kind whose `transform` gives other weights from now on, although the layer's are the same."""

    def update_buffers(self) -> None:
        """Called once a step that counts, to compute new values of the layer's buffers (`optimizer/buffers.py`)."""

    # ---- for kinds --------------------------------------------------------------------------------------------------

    def piece(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a tensor with the shape of the whole weight, such as a mask."""
        placement, axes = self.layer.placements["weight"], self.layer.axes
        local = placement.local_shape({axis.name: axis.size for axis in axes})
        offset, extent = placement.box(local, {axis.name: axis.rank for axis in axes})
        return whole[tuple(slice(at, at + n) for at, n in zip(offset, extent))].contiguous()

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight [rows..., i] as a matrix [o, i]; of experts [E, o, i]."""
        return weight.flatten(self.stacked, -2)

    # ---- for layers -------------------------------------------------------------------------------------------------

    @classmethod
    def of_any_layer(cls, stacked: int = 0) -> "LinearProduct":
        """The plain products, which need to know nothing else of a layer."""
        product = object.__new__(LinearProduct)
        product.stacked = stacked
        return product

    def parameters(self) -> list[torch.Tensor]:
        """The arguments of `transform`."""
        return [self.layer.weight, *(getattr(self.layer, name) for name in self.own_names)]

    @property
    def transforms(self) -> bool:
        """Whether the effective weight differs from the layer's."""
        return type(self).transform is not LinearProduct.transform

    @property
    def operand_bytes(self) -> int:
        """Bytes of what `once_a_step` keeps."""
        return sum(one.nbytes for one in self._kept or ())

    @property
    def multiplies_own(self) -> bool:
        """Whether it multiplies with its own weights beside the weight."""
        return type(self).grad_own is not LinearProduct.grad_own

    @torch.no_grad()
    def weight_operand(self, weight: Optional[torch.Tensor], *own: torch.Tensor) -> Operand:
        """The prepared weights, as an operand of products."""
        if self._kept is not None:
            return self._kept
        operand = self.prepare_weights(weight, *own)
        if self.once_a_step:
            self._kept = operand
        return operand

    def for_backward(self, parameters: Operand, trained: tuple[bool, ...], later: bool) -> tuple[Operand, Gradients]:
        """(weight operand of `grad_input`, function (multiply, gradient, x) -> gradients of the trained parameters).

        later: the function is called when the parameters may be freed (ZeRO 3), so what it reads is copied.
        """
        if self.multiplies_own:
            own = tuple(one.clone() for one in parameters[1:]) if later else parameters[1:]
            return self.weight_operand(*parameters), partial(self._grads_beside, trained, parameters[0].shape, own)
        if not self.transforms:
            whole = parameters[0].shape
            return self.weight_operand(*parameters), lambda *operands: (self.grad_weight(*operands).view(whole),)
        operand, pull_back = self._transformed(parameters, trained, later)
        return operand, lambda *operands: pull_back(self.grad_weight(*operands))

    def _grads_beside(
        self,
        trained: tuple[bool, ...],
        whole: torch.Size,
        own: Operand,
        multiply: Multiply,
        gradient: Operand,
        x: Operand,
    ) -> Operand:
        weight = (self.grad_weight(multiply, gradient, x).view(whole),) if trained[0] else ()
        if not any(trained[1:]):
            return weight
        beside = self.grad_own(multiply, gradient, x, own)
        return (*weight, *(one for one, wanted in zip(beside, trained[1:]) if wanted))

    def _transformed(self, parameters: Operand, trained: tuple[bool, ...], later: bool) -> tuple[Operand, Callable]:
        """(operand, function from the transformed weight's gradient to those of the trained parameters)."""
        with torch.enable_grad(), _copies_of(parameters) if later else nullcontext():
            leaves = [one.detach().requires_grad_(wanted) for one, wanted in zip(parameters, trained)]
            weight = self.transform(*leaves).to(parameters[0].dtype)
        if not weight.requires_grad:
            raise SettingsError(
                f"{type(self).__name__}.transform of {self.name}: no gradient goes through it",
                "transform must use differentiable ops on the weights that it is given",
                "move ops that gradients pass straight through to prepare_weight",
            )
        pull_back = partial(
            _pull_back, get_gradient_edge(weight), weight.shape, weight.dtype, [x for x in leaves if x.requires_grad]
        )
        return self._kept or self.prepare_weight(self.matrix(weight.detach())), pull_back

    def weights_changed(self, loaded: bool = False) -> None:
        """Clear the cache of `once_a_step`, and call `after_update`; loaded: from a checkpoint, or initially."""
        self._kept = None
        if loaded:
            self.after_load()
        self.after_update()


def divided_over(layer: nn.Module) -> Axis:
    """The axis whose ranks have parts of each matrix of a layer: its `tp`, or this rank alone if they have copies."""
    return layer.tp if layer.tp.name in layer.placements["weight"].cut else layer.tp.alone


PLAIN, PLAIN_OF_EXPERTS = LinearProduct.of_any_layer(), LinearProduct.of_any_layer(stacked=1)


def _copies_of(parameters: Operand) -> saved_tensors_hooks:
    """A context in which autograd saves copies of tensors that share memory with `parameters`."""
    memory = {one.untyped_storage().data_ptr() for one in parameters}
    copied = lambda kept: kept.clone() if kept.untyped_storage().data_ptr() in memory else kept
    return saved_tensors_hooks(copied, lambda kept: kept)


def _pull_back(
    edge, shape: torch.Size, dtype: torch.dtype, leaves: list[torch.Tensor], gradient: torch.Tensor
) -> Operand:
    """The gradients of `leaves`, from the gradient of a result with this graph edge, shape and dtype."""
    gradients = torch.autograd.grad([edge], leaves, [gradient.view(shape).to(dtype)], allow_unused=True)
    return tuple(torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, gradients))


def composed(*kinds: type[LinearProduct]) -> type[LinearProduct]:
    """The class of a layer that is of several kinds at once: `transform`s and `transform_input`s run in the order of
    `kinds`. Their methods call those of `super()`, so that each is called.
    """
    if len(kinds) == 1:
        return kinds[0]
    for kind in kinds:
        if any("own_weights" in vars(one) for one in kind.__mro__ if one is not LinearProduct):
            raise SettingsError(
                f"{kind.__name__} has weights of its own, and no layer can be of this kind and of others",
                do="choose layers for each kind with --linear",
            )
    return type("And".join(kind.__name__ for kind in reversed(kinds)), tuple(reversed(kinds)), {})


def attach_products(
    blocks: Mapping[str, nn.Module],
    settings: Model | Precision,
    kinds: Mapping[str, type[LinearProduct]],
    picked_of: Callable[[int], Iterable[tuple[str, str]]],
    draws: Callable[[], Draws] = Draws,
    compiled: bool = False,
    prefix: str = "blocks",
) -> None:
    """Attach a `LinearProduct` to linear layers of a stage's blocks (number -> module).

    settings: those that products get. kinds: name -> class. picked_of: number of a block -> (linear layer, kind) pairs, as
    --linear selects them; a kind may be several names with + between them. draws: makes the `Draws` of a block. compiled:
    the blocks are compiled; these layers are then excluded, because torch cannot trace the code of a kind. prefix: of their
    names.
    """
    for number, block in blocks.items():
        products = []
        for name, kind in picked_of(int(number)):
            layer, full = block.get_submodule(name), f"{prefix}.{number}.{name}"
            if not hasattr(layer, "product"):
                raise SettingsError(
                    f"--linear: {full} is a {type(layer).__name__}, whose product is its own",
                    do="pick layers that are ColumnParallelLinear, RowParallelLinear or ReplicatedLinear "
                    "(megatron/mpu/layers.py), such as attention.*, or experts' GroupedLinear",
                )
            layer.product = composed(*(kinds[one] for one in kind.split("+")))(layer, full, settings)
            products.append(layer.product)
            if compiled:
                layer.forward = torch.compiler.disable(layer.forward)
        if drawing := [product for product in products if product.draws_samples]:
            own = draws()
            own.follow(block)
            for product in drawing:
                product.draws = own
