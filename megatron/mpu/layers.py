# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel linear layers and embeddings (arXiv:1909.08053, 2205.05198).

A layer picks its conjugate pair of mappings once, in its constructor. Over an axis of size 1 the mappings are the
identity, and these are ordinary layers.

Legend: s sequence, b micro-batch, h hidden, v padded vocabulary, tp size of the axis; activations are [s, b, ...].
Under sequence parallelism the input of a column layer and the output of a row layer are [s/tp, b, h].
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron.errors import SettingsError
from megatron.fused_kernels import Case, choose_kernel, cpu_ops, reference
from megatron.fused_kernels.autocast import op
from megatron.mpu import collectives, mappings
from megatron.mpu.deferred_wgrad import WeightGradStore, wgrad_defer_function
from megatron.mpu.linear_product import PLAIN, PLAIN_OF_EXPERTS, Gradients, LinearProduct, Operand
from megatron.mpu.mesh import Axis
from megatron.mpu.placement import Buffer, Own, Placement


def matmul(x: torch.Tensor):
    """The kernel of `reference.matmul` for operands like `x`."""
    return choose_kernel("matmul", Case(x.device.type, x.dtype)).run


class WgradGemm(NamedTuple):
    """The pending matrix product for a weight's gradient: [out, tokens] times [in, tokens]^T."""

    rows: torch.Tensor  # gradient of the output, [tokens, out]
    columns: Callable[[], torch.Tensor]  # returns the input, [in, tokens]; waits for its all-gather, if any
    multiply: Callable  # an implementation of `reference.matmul`

    def __call__(self) -> torch.Tensor:
        """The gradient, [out, in], in the format of its operands."""
        return self.multiply(self.rows.t(), self.columns(), None)

    def start(self) -> None:
        """Start the all-gather of the input, if there is one, before the product is computed."""
        if isinstance(self.columns, _Columns):
            self.columns.start()

    def add_to(self, total: torch.Tensor, overwrite: bool) -> None:
        """Add the gradient to `total` [out..., in], or copy it there if `overwrite`.

        If its operands have the format of `total`, and on CUDA, the product accumulates into `total`: then the gradient is
        neither rounded nor written to memory and read again.
        """
        if self.multiply is not None and getattr(self.multiply, "by_expert", False):
            return Given(self()).add_to(total, overwrite)
        rows, columns, total = self.rows.t(), self.columns().t(), total.flatten(0, -2)
        if rows.dtype == total.dtype:
            torch.addmm(total, rows, columns, beta=0 if overwrite else 1, out=total)
        elif rows.device.type == "cuda":
            torch.addmm(total, rows, columns, beta=0 if overwrite else 1, out_dtype=total.dtype, out=total)
        else:
            gradient = self.multiply(rows, columns.t(), None)
            total.copy_(gradient) if overwrite else total.add_(gradient)


class LinearOptions(NamedTuple):
    """Communication of a linear layer, and the handling of its weight's gradient.

    gather:     x is this rank's piece of the input along dim 0. The pieces are gathered in the forward pass and again for
                the weight's gradient, so that only the piece is saved (arXiv:2205.05198, section 4.2.2), and the gradient
                of x is reduce-scattered
    reduce:     x is the whole input, equal on all ranks of this axis; the gradient of x is all-reduced (the conjugate of
                arXiv:1909.08053, as `mappings.copy_to_tensor_model_parallel_region`)
    deferred:   defers the product for the weight's gradient while it collects (zero-bubble W)
    accumulate: weight -> function that adds the product to the weight's gradient, or None if there is none
    product:    the layer's own products, if they are not plain ones
    multiply:   in place of the suite's kernel: of the rows of experts
    packed:     the weight as `pack_weights` has it, for `torch.inference_mode`

    Communication in the backward pass overlaps with the other product.
    """

    gather: Axis | None = None
    reduce: Axis | None = None
    deferred: WeightGradStore | None = None
    accumulate: Callable[[torch.Tensor], Callable[["WgradGemm | Given"], None] | None] | None = None
    product: LinearProduct | None = None
    packed: torch.Tensor | None = None
    multiply: Callable | None = None

    def wgrad_handler(self, x: torch.Tensor, weight: torch.Tensor) -> Callable[[WgradGemm], None] | None:
        """The function that receives the product for the weight's gradient; None: autograd computes it."""
        wgrad_handler = wgrad_defer_function(self.deferred, x, weight)
        if wgrad_handler is None and self.accumulate and x.requires_grad and weight.requires_grad:
            return self.accumulate(weight)
        return wgrad_handler

    def wgrads_handler(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Callable[["OwnWgrad"], None] | None:
        """As `wgrad_handler`, for several weights with one product."""
        trained = [weight for weight in weights if weight.requires_grad]
        if not (x.requires_grad and trained):
            return None
        if self.deferred is not None:
            return partial(self.deferred.defer, trained)
        handlers = [self.accumulate(weight) for weight in trained] if self.accumulate else [None]
        return partial(_distribute, handlers) if all(handlers) else None


ALONE = LinearOptions()  # on one rank, gradients by autograd


def attach_wgrad_accumulator(modules: Iterable[nn.Module], accumulate: Callable) -> None:
    """Make the linear layers in `modules` add their weights' gradients with `accumulate`."""
    for layer in (layer for module in modules for layer in module.modules()):
        if hasattr(layer, "accumulate"):
            layer.accumulate = accumulate


def linear_products(modules: Iterable[nn.Module]) -> list[LinearProduct]:
    """The `LinearProduct`s of the layers in `modules`, of those that have one."""
    products = (getattr(layer, "product", None) for module in modules for layer in module.modules())
    return [product for product in products if product is not None]


@op
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, options: LinearOptions = ALONE
) -> torch.Tensor:
    """Multiply x [..., i] by weight [rows..., i] -> [..., product of rows]; fused weights may have several dims of rows."""
    bias, own = None if bias is None else bias.flatten(), options.product is not None
    multiply = options.multiply or matmul(x)
    if own and options.product.packed and torch.is_inference_mode_enabled():
        y = options.product.forward_packed(x.reshape(-1, x.shape[-1]), bias)
        return y.view(*x.shape[:-1], y.shape[-1])
    if not (own or torch.is_grad_enabled() or options.gather):
        return _linear_without_gradients(x, weight, bias, options, multiply)
    weights = [weight]
    if own:
        weights += [one.to(weight.dtype) for one in options.product.parameters()[1:]]
    handler = options.wgrads_handler(x, weights) if own else options.wgrad_handler(x, weight)
    trained = tuple(one.requires_grad for one in weights)
    if handler:
        weights = [one.detach() for one in weights]
    elif not (own or options.gather or options.reduce) and multiply is reference.matmul:
        return F.linear(x, weight.flatten(0, -2), bias)
    return _Linear.apply(x, bias, options, multiply, handler, trained, *weights)


def _linear_without_gradients(x, weight, bias, options: LinearOptions, multiply: Callable) -> torch.Tensor:
    packed, flat = options.packed, weight.flatten(1 if options.multiply else 0, -2)
    if packed is not None and x.dtype == packed.dtype and torch.is_inference_mode_enabled():
        return cpu_ops.onednn(x, packed, bias)
    if multiply is reference.matmul:
        return F.linear(x, flat, bias)
    return multiply(x.reshape(-1, x.shape[-1]), flat, bias).view(*x.shape[:-1], flat.shape[-2])


def pack_weights(model: nn.Module, output: nn.Module | None = None) -> list[nn.Module]:
    """Keep copies of the weights of a model's products in the order in which oneDNN reads them, on a CPU, for
    `torch.inference_mode`. Products of few rows then take half the time in bf16 and three quarters in fp32, and a row of a
    result does not depend on the number of rows.

    output: the output layer. Returns the layers, or their products; set their `packed` to None when their weights change.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, LINEAR)]
    layers = [layer for layer in [*layers, *([output] if output else [])] if layer.packed is None]
    layers, found = [layer for layer in layers if cpu_ops.packs(layer.weight)], []
    for layer in layers:
        product, weight = getattr(layer, "product", None), layer.weight.detach().flatten(0, -2)
        if product is None:
            layer.packed = cpu_ops.packed(weight)
            found.append(layer)
        elif product.pack(weight):
            found.append(product)
    return found


class _Linear(torch.autograd.Function):
    """The three products of a linear layer (`LinearProduct`), and its communication.

    handler: receives the products for the weights' gradients, instead of autograd (`LinearOptions.wgrad_handler`, or
    `wgrads_handler`). trained: which of the weights get a gradient.
    """

    @staticmethod
    def forward(ctx, x, bias, options, multiply, handler, trained, *weights):
        gather = options.gather
        product = options.product or (PLAIN_OF_EXPERTS if options.multiply else PLAIN)
        operand = whole = product.prepare_input(x.reshape(-1, x.shape[-1]))
        learns = handler is not None or any(ctx.needs_input_grad[6:])
        kept = operand if learns or product.input_in_grad else ()  # only gradients of weights need the input
        ctx.save_for_backward(*kept, *weights)
        ctx.options, ctx.product, ctx.multiply, ctx.handler, ctx.trained = options, product, multiply, handler, trained
        ctx.has_bias, ctx.kept, ctx.shape, ctx.dtype = bias is not None, len(kept), x.shape, x.dtype
        if gather is not None:
            whole = tuple(collectives.all_gather(part, gather) for part in operand)
        y = product.forward(multiply, whole, product.weight_operand(*weights), bias)
        return y.reshape(x.shape[0] * (gather.size if gather else 1), *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, gradient):
        saved, options, product, handler = ctx.saved_tensors, ctx.options, ctx.product, ctx.handler
        operand, weights, gather = saved[: ctx.kept], saved[ctx.kept :], options.gather
        rows = gradient.reshape(-1, gradient.shape[-1])
        prepared, wgrad = product.prepare_gradient(rows), None
        by_autograd = any(ctx.needs_input_grad[6:])
        waits = bool(options.deferred and handler and options.deferred.collecting)
        if not (by_autograd or handler):
            weight = product.weight_operand(*weights)
        elif options.product is None:
            weight, wgrad = product.weight_operand(*weights), WgradGemm(rows, _Columns(*operand, gather), ctx.multiply)
        else:
            weight, gradients_of = product.for_backward(weights, ctx.trained, later=waits)
            kept = product.gradient_of_weight(prepared)
            wgrad = OwnWgrad(gradients_of, ctx.multiply, kept, _Operand(operand, gather))
        # Communication is launched before the product that it overlaps with: on a GPU it then runs before the product
        # fills the device. The all-gather overlaps with the first product, the reduction with the second.
        if by_autograd or handler and not waits:
            wgrad.start()
        d_x, d_weights = None, [None] * len(weights)
        if ctx.needs_input_grad[0]:
            more = _Operand(operand[1:], gather)() if product.input_in_grad else ()
            d_rows = product.grad_input(ctx.multiply, (*prepared, *more), weight).to(ctx.dtype)
            d_x = start_input_reduction(d_rows, ctx.shape, gather, options.reduce)
        if by_autograd and options.product is None:
            d_weights = [wgrad().view(weights[0].shape)]
        elif by_autograd:
            gradients = iter(wgrad())
            d_weights = [next(gradients).to(one.dtype) if wanted else None for one, wanted in zip(weights, ctx.trained)]
        elif handler:
            handler(wgrad)
        d_bias = product.grad_bias(rows) if ctx.has_bias else None
        return d_x and d_x(), d_bias, None, None, None, None, *d_weights


class OwnWgrad(NamedTuple):
    """The pending product for the gradients of a layer's trained weights, by its `LinearProduct`."""

    gradients_of: Gradients  # `LinearProduct.for_backward`
    multiply: Callable
    gradient: Operand  # of the output
    operand: "_Operand"  # returns the input; waits for its all-gather, if any

    def __call__(self) -> Operand:
        """The gradient of each trained weight."""
        return self.gradients_of(self.multiply, self.gradient, self.operand())

    def start(self) -> None:
        """As `WgradGemm.start`."""
        self.operand.start()


class Given(NamedTuple):
    """A computed gradient, with the interface of `WgradGemm`."""

    gradient: torch.Tensor

    def add_to(self, total: torch.Tensor, overwrite: bool) -> None:
        """Add the gradient to `total`, or copy it there if `overwrite`."""
        gradient = self.gradient.view(total.shape)
        total.copy_(gradient) if overwrite else total.add_(gradient)


def _distribute(handlers: Sequence[Callable[[Given], None]], wgrad: OwnWgrad) -> None:
    """Compute the product, and pass each gradient to its handler."""
    for handle, gradient in zip(handlers, wgrad()):
        handle(Given(gradient))


class _Operand:
    """Returns a whole operand, from this rank's rows; gathered over the axis if there is one."""

    def __init__(self, parts: Operand, axis: Axis | None):
        self.parts = [_Columns(part.reshape(len(part), math.prod(part.shape[1:])), axis) for part in parts]
        self.shapes = [part.shape[1:] for part in parts]

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def __call__(self) -> Operand:
        return tuple(part().t().view(-1, *shape) for part, shape in zip(self.parts, self.shapes))


class _Columns:
    """Returns x [n, ..., i] as [i, tokens], gathered over the axis if there is one; `start` starts the all-gather."""

    def __init__(self, x: torch.Tensor, axis: Axis | None):
        self.x, self.axis, self.work = x.detach(), axis, None
        if axis is not None:
            self.x = self.x.contiguous()  # stored, because it is read until the wait

    def start(self) -> None:
        if self.axis is not None and self.work is None:
            self.whole = self.x.new_empty((self.axis.size * self.x.shape[0], *self.x.shape[1:]))
            self.work = collectives.start_all_gather(self.whole, self.x, self.axis)

    def __call__(self) -> torch.Tensor:
        if self.axis is None:
            return self.x.reshape(-1, self.x.shape[-1]).t()
        self.start()
        self.work.wait()
        return self.whole.view(-1, self.x.shape[-1]).t()


def start_input_reduction(
    rows: torch.Tensor, shape: torch.Size, gather: Axis | None, reduce: Axis | None
) -> Callable[[], torch.Tensor]:
    """Start to reduce the gradient of an input over an axis, if one is given (`LinearOptions`).

    rows: this rank's part of the whole input's gradient. Returns a function that waits and returns the gradient, [*shape].
    """
    if gather is None and reduce is None:
        return lambda: rows.view(shape)
    if gather is None:
        source = total = rows.view(shape)
        work = collectives.start_all_reduce(total, reduce)
    else:
        source, total = rows.contiguous(), rows.new_empty(shape)
        work = collectives.start_reduce_scatter(total, source, gather)

    def reduced(keep=source):  # keeps the source alive until the wait
        work.wait()
        return total

    return reduced


def create_parameters(
    module: nn.Module, weights: Mapping[str, Placement], axes: Axis | Sequence[Axis] | None, *, dtype, device
) -> None:
    """Register the parameters and buffers of a table of weights in a module: this rank's pieces, uninitialized.

    axes: that split them: the tensor parallel axis, or for experts `(mesh.ep, mesh.etp)`; None: no axis
    dtype: of parameters, except of those that are `exact`
    """
    sizes = {axis.name: axis.size for axis in ([axes] if isinstance(axes, Axis) else axes or ())}
    for name, placement in weights.items():
        shape, buffer = placement.local_shape(sizes), placement.buffer
        if buffer:
            module.register_buffer(name, torch.empty(shape, dtype=getattr(torch, buffer.dtype), device=device))
        else:
            own = torch.float32 if placement.exact else dtype
            module.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=own, device=device)))
    if "bias" not in weights:
        module.register_parameter("bias", None)
    module.placements = dict(weights)


def register_buffer(
    module: nn.Module,
    name: str,
    tensor: torch.Tensor,
    combine: str = "same",
    *,
    shape: tuple[int, ...] | None = None,
    cut: Mapping[str, int] | None = None,
    partial: tuple[str, ...] = (),
    saved: bool = True,
) -> None:
    """Register a buffer that training changes in a module, with its initial values, a CPU tensor.

    combine, saved: how the values of ranks are combined, once a step, and whether checkpoints have it (`placement.Buffer`)
    shape, cut, partial: of the logical tensor, as in `Placement`; without them each rank has all of it
    Raises SettingsError for an unknown rule or format.
    """
    module.register_buffer(name, tensor)
    kind = Buffer(combine, str(tensor.dtype).removeprefix("torch."), saved)
    placed = Placement(
        tuple(shape or tensor.shape), Own(), cut=dict(cut or {}), partial=partial, decay=False, buffer=kind
    )
    module.placements = {**getattr(module, "placements", {}), name: placed}


def place_persistent_buffers(chunks: Iterable[nn.Module]) -> None:
    """Add a placement to each persistent buffer without one: "same", or "mean" for running statistics of torch's norms."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        listed = getattr(module, "placements", {})
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in listed and name not in module._non_persistent_buffers_set:
                statistic = isinstance(module, nn.modules.batchnorm._NormBase) and buffer.is_floating_point()
                register_buffer(module, name, buffer, "mean" if statistic else "same")


def map_buffers(model: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every buffer of a module tree by function(buffer); a shared buffer stays shared."""
    replaced: dict[int, tuple] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in replaced:
                replaced[id(buffer)] = buffer, function(buffer)
            setattr(module, name, replaced[id(buffer)][1])


def place_buffers(model: nn.Module, device) -> None:
    """Move every buffer to a device. Raises SettingsError for those on the meta device, which have no values."""
    if lost := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise SettingsError(
            f"buffers of the model have no values: {', '.join(lost[:8])}",
            "they were created on the meta device, where tensors have no data, as parameters do until they are allocated",
            'create them with device="cpu": they are moved to the device of the run (docs/extending.md#buffers)',
        )
    map_buffers(model, lambda buffer: buffer.to(device))


class ColumnParallelLinear(nn.Module):
    """[s, b, h] -> [s, b, rows/tp]: each rank computes its part of the outputs from all inputs.

    weights: `model.weights.column(...)`: the weight [rows..., h], split along one dim of its rows, and optionally a bias.
    """

    # Set by `deferred_wgrad.attach_weight_grad_store` for pipelines with W passes
    weight_grad_store: WeightGradStore | None = None
    # Set by `attach_wgrad_accumulator` where products add to the optimizer's gradients
    accumulate: Callable | None = None
    # Overlap the all-reduce of the input's gradient with the product for the weight's. Not under --amp-level O1, which
    # casts x before the product: the gradient is reduced in the format of x.
    overlap = True
    product: LinearProduct | None = None  # set by `linear_product.attach_products`
    packed: torch.Tensor | None = None  # set by `pack_weights`
    fusion, unfused = "fused_linear", False  # unfused: the bias is added after the product

    def __init__(self, weights: Mapping[str, Placement], tp: Axis, *, sequence_parallel=False, dtype=None, device=None):
        super().__init__()
        self.tp, self.axes, self.row_axis = tp, (tp,), _row_axis(tp, sequence_parallel)
        create_parameters(self, weights, tp, dtype=dtype, device=device)

    def reads_packed(self, x: torch.Tensor) -> bool:
        """Whether `forward` uses the weight as `pack_weights` has it."""
        return self.packed is not None and x.dtype == self.packed.dtype and torch.is_inference_mode_enabled()

    def forward(self, x: torch.Tensor, add_bias: bool = True) -> torch.Tensor:
        """add_bias: False if a later kernel adds it."""
        x = x if self.product is None else self.product.transform_input(x)
        reduce = self.tp if self.tp.size > 1 and not self.row_axis else None
        if reduce and not self.overlap:
            x, reduce = mappings.copy_to_tensor_model_parallel_region(x, self.tp), None
        options = LinearOptions(
            self.row_axis, reduce, self.weight_grad_store, self.accumulate, self.product, self.packed
        )
        bias = self.bias if add_bias else None
        if bias is not None and self.unfused:
            return linear(x, self.weight, None, options) + bias.flatten()
        return linear(x, self.weight, bias, options)

    def parts(self, x: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """As `forward`, with a product for each part of the second dim of the weight's rows: [..., rows, size, ...] each.

        Autograd concatenates the gradients of the parts, so their products are not deferred and do not accumulate into
        the optimizer's gradients.
        """
        if self.tp.size > 1 and not self.row_axis:
            x = mappings.copy_to_tensor_model_parallel_region(x, self.tp)
        options = LinearOptions(self.row_axis)
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes, 1)
        products = [linear(x, w, b, options) for w, b in zip(self.weight.split(sizes, 1), biases)]
        return tuple(y.view(*y.shape[:-1], -1, size, *self.weight.shape[2:-1]) for y, size in zip(products, sizes))


class RowParallelLinear(nn.Module):
    """[s, b, inputs/tp] -> [s, b, h]: each rank multiplies its part of the inputs, and the products are summed over ranks.

    weights: `model.weights.row(...)`: the weight [h, inputs], split along its inputs, and optionally a bias [h].
    """

    weight_grad_store: WeightGradStore | None = None
    accumulate: Callable | None = None
    product: LinearProduct | None = None
    packed: torch.Tensor | None = None
    fusion, unfused = "fused_linear", False

    def __init__(self, weights: Mapping[str, Placement], tp: Axis, *, sequence_parallel=False, dtype=None, device=None):
        super().__init__()
        self.tp, self.axes, self.reduce_output = (
            tp,
            (tp,),
            mappings.reduce_scatter_to_sequence_parallel_region
            if sequence_parallel
            else mappings.reduce_from_tensor_model_parallel_region,
        )
        create_parameters(self, weights, tp, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.product is None else self.product.transform_input(x)
        options = LinearOptions(None, None, self.weight_grad_store, self.accumulate, self.product, self.packed)
        if self.tp.size == 1 and not self.unfused:
            return linear(x, self.weight, self.bias, options)
        x = self.reduce_output(linear(x, self.weight, None, options), self.tp)  # all-reduce over tp
        return x if self.bias is None else (self.product or PLAIN).add_bias(x, self.bias)  # once, after the sum


class ReplicatedLinear(nn.Module):
    """[s, b, h] -> [s, b, rows]: each rank has the whole weight. With sequence parallelism [s/tp, b, h] -> [s/tp, b, rows]
    of its own tokens, and gradients of the weights are parts of sums (`Placement.partial`). Nothing is sent.

    The gradient of the output has to be complete on each rank: what follows is a column-parallel layer, which sums it, or
    `mappings.copy_to_tensor_model_parallel_region`.

    weights: `model.weights.replicated(...)`: the weight [rows, h], and optionally a bias [rows].
    """

    weight_grad_store: WeightGradStore | None = None
    accumulate: Callable | None = None
    product: LinearProduct | None = None
    packed: torch.Tensor | None = None

    def __init__(self, weights: Mapping[str, Placement], tp: Axis, *, sequence_parallel=False, dtype=None, device=None):
        super().__init__()
        self.tp, self.axes, self.row_axis = tp, (tp,), _row_axis(tp, sequence_parallel)
        create_parameters(self, weights, tp, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.product is None else self.product.transform_input(x)
        options = LinearOptions(None, None, self.weight_grad_store, self.accumulate, self.product, self.packed)
        return linear(x, self.weight, self.bias, options)


LINEAR = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


def _row_axis(tp: Axis, sequence_parallel: bool) -> Axis | None:
    """The axis whose ranks have other rows of a layer's input; None: all have the same."""
    return tp if sequence_parallel and tp.size > 1 else None


class VocabParallelEmbedding(nn.Module):
    """Token ids [s, b] -> [s, b, h] (or [s/tp, b, h]); each rank has v/tp rows and looks up the tokens of these.

    weights: `model.weights.vocab_embedding(...)`
    """

    packed: torch.Tensor | None = None  # set by `pack_weights` for an output layer
    lookup = staticmethod(F.embedding)  # set by `ordered.attach_ordered`

    def __init__(self, weights: Mapping[str, Placement], tp: Axis, *, sequence_parallel=False, dtype=None, device=None):
        super().__init__()
        self.tp, self.reduce_output = (
            tp,
            mappings.reduce_scatter_to_sequence_parallel_region
            if sequence_parallel
            else mappings.reduce_from_tensor_model_parallel_region,
        )
        create_parameters(self, weights, tp, dtype=dtype, device=device)
        self.first_row = tp.rank * self.weight.shape[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.lookup(tokens, self.weight)
        local = tokens - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        x = self.lookup(local.masked_fill(elsewhere, 0), self.weight)
        return self.reduce_output(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)
