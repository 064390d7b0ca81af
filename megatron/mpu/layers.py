# SPDX-License-Identifier: Apache-2.0
"""Linear layers and embeddings whose weight is cut over the tensor-parallel axis (arXiv:1909.08053, 2205.05198).

A layer picks its conjugate pair of mappings once, in its constructor. Over an axis of size 1 the mappings are the
identity, and these are ordinary layers.

Legend: s sequence, b micro-batch, h hidden, v padded vocabulary, tp size of the axis; activations are [s, b, ...].
Under sequence parallelism what enters a column layer and leaves a row layer is [s/tp, b, h].
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron.fused_kernels import Case, choose, reference
from megatron.fused_kernels.autocast import op
from megatron.mpu import mappings
from megatron.mpu.deferred import WeightGradients
from megatron.mpu.mesh import Axis
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.tokenizer import padded_vocab_size


def matmul(x: torch.Tensor):
    """The implementation of `reference.matmul` for operands like `x`."""
    return choose("matmul", Case(x.device.type, x.dtype)).run


@op
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
           later: WeightGradients | None = None) -> torch.Tensor:  # fmt: skip
    """x [..., i] times weight [rows..., i] -> [..., product of rows]; rows of a fused weight may have several dims.

    later: where the product for the weight's gradient may wait.
    """
    flat, bias = weight.flatten(0, -2), None if bias is None else bias.flatten()
    product = matmul(x)
    if later is not None and x.requires_grad and weight.requires_grad:
        # Autograd must not see the weight: where a gradient is missing it would call the weight's hooks without one.
        return _Linear.apply(x, flat.detach(), bias, product, partial(later.put, weight))
    return F.linear(x, flat, bias) if product is reference.matmul else _Linear.apply(x, flat, bias, product, None)


class _Linear(torch.autograd.Function):
    """The three products of a linear layer, each by `product(a [m, k], b [n, k], bias [n]) = a b^T + bias`.

    put: takes the product that makes the weight's gradient, instead of autograd (`mpu/deferred.py`).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, product, put):
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.has_bias, ctx.put = product, bias is not None, put
        return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows, multiply, d_weight = gradient.reshape(-1, gradient.shape[-1]), ctx.product, None
        d_x = multiply(rows, weight.t(), None).view(x.shape) if ctx.needs_input_grad[0] else None
        columns = x.detach().reshape(-1, x.shape[-1]).t()
        if ctx.needs_input_grad[1]:
            d_weight = multiply(rows.t(), columns, None)
        elif ctx.put:
            ctx.put(lambda: multiply(rows.t(), columns, None))
        return d_x, d_weight, rows.sum(0) if ctx.has_bias else None, None, None


class ColumnParallelLinear(nn.Module):
    """[s, b, h] -> [s, b, rows/tp]: each rank computes its part of the outputs from all inputs.

    `rows` is the logical shape of the outputs and `cut` the dim of it that is divided: fused query-key-value is
    `rows=(groups, queries + 2, head_dim), cut=0`, a gated MLP `rows=(2, ffn), cut=1`. So every shard is one box.
    """

    weight_gradients: WeightGradients | None = None  # set by `deferred.attach` for pipelines with W passes

    def __init__(self, inputs: int, rows: tuple[int, ...], tp: Axis, *, cut: int = 0, std: float, bias: bool = True,
                 sequence_parallel: bool = False, dtype=None, device=None):  # fmt: skip
        super().__init__()
        self.tp, self.enter = tp, mappings.gather_sequence if sequence_parallel else mappings.copy_to
        local = [n // tp.size if dim == cut else n for dim, n in enumerate(rows)]
        self.weight = nn.Parameter(torch.empty(*local, inputs, dtype=dtype, device=device))
        self.placements = {"weight": Placement((*rows, inputs), Normal(std), cut={"tp": cut})}
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(*local, dtype=dtype, device=device))
            self.placements["bias"] = Placement(tuple(rows), Constant(0.0), cut={"tp": cut}, decay=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.enter(x, self.tp), self.weight, self.bias, self.weight_gradients)


class RowParallelLinear(nn.Module):
    """[s, b, inputs/tp] -> [s, b, h]: the sum over ranks of each one's product with its part of the inputs."""

    weight_gradients: WeightGradients | None = None

    def __init__(self, inputs: int, outputs: int, tp: Axis, *, std: float, bias: bool = True,
                 sequence_parallel: bool = False, dtype=None, device=None):  # fmt: skip
        super().__init__()
        self.tp, self.leave = tp, mappings.scatter_sequence if sequence_parallel else mappings.reduce_from
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size, dtype=dtype, device=device))
        self.placements = {"weight": Placement((outputs, inputs), Normal(std), cut={"tp": 1})}
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device))
            partial = ("tp",) if sequence_parallel else ()  # each rank adds it to its own tokens only
            self.placements["bias"] = Placement((outputs,), Constant(0.0), partial=partial, decay=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return linear(x, self.weight, self.bias, self.weight_gradients)
        x = self.leave(linear(x, self.weight, None, self.weight_gradients), self.tp)
        return x if self.bias is None else x + self.bias  # once, after the sum


class VocabParallelEmbedding(nn.Module):
    """Token ids [s, b] -> [s, b, h] (or [s/tp, b, h]); each rank holds v/tp rows and looks up what it holds."""

    def __init__(self, vocab_size: int, hidden: int, tp: Axis, *, std: float, divisible_by: int = 128,
                 sequence_parallel: bool = False, dtype=None, device=None):  # fmt: skip
        super().__init__()
        self.tp, self.vocab_size = tp, vocab_size
        self.leave = mappings.scatter_sequence if sequence_parallel else mappings.reduce_from
        rows = padded_vocab_size(vocab_size, divisible_by, tp.size) // tp.size
        self.first_row = tp.rank * rows
        self.weight = nn.Parameter(torch.empty(rows, hidden, dtype=dtype, device=device))
        self.placements = {"weight": Placement((vocab_size, hidden), Normal(std), cut={"tp": 0})}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.leave(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)
