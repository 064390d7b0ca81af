# SPDX-License-Identifier: Apache-2.0
"""Sums of a model's modules that tensor parallelism cuts, in one order (--batch-invariant-mode, `mpu/ordered_sums.py`).

| sum                                                 | cut by              | order                                       |
|-----------------------------------------------------|---------------------|---------------------------------------------|
| row-parallel product, over inputs                   | tp                  | `BLOCKS` products, and the tree over them   |
| gradient of a column-parallel layer's input         | tp, over outputs    | the same                                    |
| gradient of the output layer's input, softmax       | tp, over vocabulary | the same (`mpu/cross_entropy.py`)           |
| gradients of norms, and of row-parallel biases      | sp, over tokens     | `BLOCKS` parts of a sample, and the tree    |
| gradients of column-parallel biases, over tokens    | nothing             | the tree: kernels treat columns differently |
| (activations of the MLP: no sum)                    | tp, over width      | a block at a time                           |

A rank has neighbouring blocks, as many as any other: a subtree. Sums over ranks are the tree of axes that are `ordered`.
All other sums of a pass are of one sample, and inside of a head, a row or a column.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Optional

import torch
from torch import nn

from megatron.fused_kernels import cpu_ops
from megatron.model.norms import NORMS
from megatron.mpu import collectives
from megatron.mpu.layers import LINEAR, RowParallelLinear
from megatron.mpu.linear_product import LinearProduct, Multiply, Operand
from megatron.mpu.mesh import Axis
from megatron.mpu.ordered_sums import NARROW, Blocks, tree_sum
from megatron.settings.groups.kernels import BLOCKS
from megatron.settings.schema import Model


def attach_ordered(chunks: Iterable[nn.Module], settings: Model) -> None:
    """Give the modules of a rank's chunks sums of one order."""
    for chunk in chunks:
        chunk.ordered = True  # the output layer's: `LanguageModel.cross_entropy`
        tokens = TokenBlocks(chunk.tp if chunk.sequence_parallel else chunk.tp.alone)
        for name, module in chunk.named_modules():
            if isinstance(module, LINEAR):
                module.unfused = isinstance(module, RowParallelLinear)  # whose bias is added after the sum over ranks
                module.product = OrderedProduct(module, name, settings, tokens)
            elif isinstance(module, tuple(NORMS.values())):
                module.in_blocks = tokens.each
            if hasattr(module, "attach_ordered"):
                module.attach_ordered()
            elif hasattr(module, "by_width"):  # an activation
                module.by_width = partial(_by_width, Blocks(BLOCKS // chunk.tp.size, 1 + module.gated))


class OrderedProduct(LinearProduct):
    """The products of a linear layer, in blocks of the dim that tp cuts. tokens: those of the rank between layers."""

    def __init__(self, layer: nn.Module, name: str, settings: Model, tokens: "TokenBlocks"):
        super().__init__(layer, name, settings)
        placement, self.tokens = layer.placements["weight"], tokens
        cut, last = placement.cut.get("tp"), len(placement.shape) - 1
        own = lambda parts: Blocks(BLOCKS // layer.tp.size, parts)
        self.inputs = own(1) if cut == last else None  # those that ranks divide
        self.outputs = own(math.prod(placement.shape[:cut])) if cut not in (None, last) else None

    def forward(self, multiply: Multiply, x: Operand, weight: Operand, bias: Optional[torch.Tensor]) -> torch.Tensor:
        if self.outputs:
            return self.outputs.product(multiply, x[0], weight[0], bias)
        y = self.inputs.sum(multiply, x[0], weight[0]) if self.inputs else multiply(x[0], weight[0], None)
        return y if bias is None else y + bias

    def pack(self, weight: torch.Tensor) -> bool:
        blocks = None
        if self.outputs and self.outputs.narrow(len(weight)):
            blocks = self.outputs.of(weight, 0)
        elif self.inputs and self.inputs.number > 1 and self.inputs.divide(weight.shape[1]):
            blocks = self.inputs.of(weight, 1)
        self.packed = tuple(map(cpu_ops.packed, blocks or [weight]))
        return True

    def forward_packed(self, x: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        x, weights, inside = x.contiguous(), self.packed, bias if self.outputs else None
        if len(weights) == 1:
            y = cpu_ops.onednn(x, weights[0], inside)
        elif self.outputs:
            biases = [None] * len(weights) if bias is None else self.outputs.of(bias, 0)
            y = self.outputs.joined([cpu_ops.onednn(x, *own) for own in zip(weights, biases)], 1)
        else:
            y = tree_sum([cpu_ops.onednn(*pair) for pair in zip(self.inputs.of(x, 1), weights)])
        return y if self.outputs or bias is None else y + bias

    def grad_input(self, multiply: Multiply, gradient: Operand, weight: Operand) -> torch.Tensor:
        if self.outputs:
            return self.outputs.sum(multiply, gradient[0], weight[0].mT)
        return (self.inputs or WHOLE).product(multiply, gradient[0], weight[0].mT)

    def grad_weight(self, multiply: Multiply, gradient: Operand, x: Operand) -> torch.Tensor:
        # Contiguous: for others the kernel's order depends on sizes (`cpu_ops.onednn`).
        rows, columns = gradient[0].t().contiguous(), x[0].contiguous().t()
        if self.outputs:
            return self.outputs.product(multiply, rows, columns, dim=0)
        return (self.inputs or WHOLE).product(multiply, rows, columns)

    def grad_bias(self, rows: torch.Tensor) -> torch.Tensor:
        return ALL_TOKENS.total(rows)

    def add_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return _AddBias.apply(x, bias, self.tokens)


class TokenBlocks:
    """Sums over the tokens of a sample, of which ranks of the axis have parts: `BLOCKS` blocks, and the tree over them.

    Over ranks, the first one gets the sum and the others get 0: gradients of such weights are partial (`Placement`).
    """

    def __init__(self, axis: Axis):
        self.axis, self.number = axis, BLOCKS // axis.size

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of rows [n, ...], added in fp32."""
        number = self.number if len(rows) % self.number == 0 else 1
        blocks = rows.to(torch.float32, copy=True).unflatten(0, (number, -1)).transpose(0, 1)  # [tokens, blocks, ...]
        return self._of_ranks(tree_sum(tree_sum(blocks))).to(rows.dtype)

    def each(self, norm: Callable) -> Callable:
        """A norm of (x [s, ...], *weights, epsilon) that is computed block by block."""

        def in_blocks(x: torch.Tensor, *weights) -> torch.Tensor:
            *weights, epsilon = weights
            if len(x) % self.number:
                return norm(x, *weights, epsilon)
            copies = zip(*(_Copies.apply(weight, self) for weight in weights))
            return torch.cat([norm(block, *own, epsilon) for block, own in zip(x.chunk(self.number), copies)])

        return in_blocks

    def _of_ranks(self, total: torch.Tensor) -> torch.Tensor:
        total = collectives.all_reduce(total, self.axis)
        return total if self.axis.rank == 0 else total.zero_()

    def total_of_blocks(self, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        """The sum of what blocks have, added in fp32."""
        return self._of_ranks(tree_sum([block.to(torch.float32, copy=True) for block in blocks]))


def _by_width(blocks: Blocks, activation: Callable) -> Callable:
    """An activation of x [s, b, f/tp] block by block: functions of the last elements of a row, after those that fill vector
    registers, may be rounded otherwise. Blocks that fill them (of `NARROW` elements) need not be apart.
    """

    def in_blocks(x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        if not blocks.divide(width) or width // (blocks.number * blocks.parts) % NARROW == 0:
            return activation(x)
        return torch.cat([activation(block) for block in blocks.of(x, x.dim() - 1)], -1)

    return in_blocks


WHOLE, ALL_TOKENS = Blocks(1), TokenBlocks(Axis("alone", (0,)))


class _Copies(torch.autograd.Function):
    """A weight for each block of tokens; the backward pass adds up its gradients."""

    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.tokens = tokens
        return tuple(weight.view_as(weight) for _ in range(tokens.number))

    @staticmethod
    def backward(ctx, *gradients):
        return ctx.tokens.total_of_blocks(gradients).to(gradients[0].dtype), None


class _AddBias(torch.autograd.Function):
    """x [s, b, h] + bias [h]."""

    @staticmethod
    def forward(ctx, x, bias, tokens):
        ctx.tokens = tokens
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        rows = gradient.reshape(-1, gradient.shape[-1])
        return gradient, ctx.tokens.total(rows) if ctx.needs_input_grad[1] else None, None
