# SPDX-License-Identifier: Apache-2.0
"""Sums of a model's modules that tensor parallelism cuts, in one order (--batch-invariant-mode, `mpu/ordered_sums.py`).

| sum                                                 | cut by              | order                                       |
|-----------------------------------------------------|---------------------|---------------------------------------------|
| row-parallel product, over inputs                   | tp                  | `BLOCKS` products, and the tree over them   |
| gradient of a column-parallel layer's input         | tp, over outputs    | the same                                    |
| gradient of the output layer's input, softmax       | tp, over vocabulary | the same (`mpu/cross_entropy.py`)           |
| gradients of norms, and of row-parallel biases      | sp, over tokens     | `BLOCKS` parts of a sample, and the tree    |
| gradients of query-key norms, over tokens and heads | tp, over heads; cp  | as above, and of each part blocks of heads  |
| label smoothing, over the vocabulary                | tp                  | blocks of the vocabulary, and the tree      |
| query-key norms across heads                        | tp, over heads      | blocks of heads, and the tree over them     |
| gradient of a router, over tokens                   | tp, over rows; cp   | one product of whole rows (`SampleSums`)    |
| gradients of column-parallel biases, over tokens    | nothing             | the tree: kernels treat columns differently |
| (activations of the MLP: no sum)                    | tp, over width      | a block at a time                           |

A rank has neighbouring blocks, as many as any other: a subtree. Sums over ranks are the tree of axes that are `ordered`.
All other sums of a pass are of one sample, and inside of a head, a row or a column.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Optional

import torch
from torch import nn

from megatron.fused_kernels import cpu_ops
from megatron.model.norms import NORMS, RMSNormAcrossHeads
from megatron.mpu import collectives
from megatron.mpu.context_parallel import gather_rows
from megatron.mpu.layers import LINEAR, RowParallelLinear, VocabParallelEmbedding
from megatron.mpu.linear_product import LinearProduct, Multiply, Operand
from megatron.mpu.mesh import Axis
from megatron.mpu.ordered_sums import NARROW, Blocks, tree_sum
from megatron.mpu.ordered_tokens import SampleSums
from megatron.settings.groups.kernels import BLOCKS
from megatron.settings.schema import Model


def attach_ordered(chunks: Iterable[nn.Module], settings: Model) -> None:
    """Give the modules of a rank's chunks sums of one order."""
    for chunk in chunks:
        sums = chunk.ordered = SampleSums(chunk.cp)  # the output layer's: `LanguageModel.cross_entropy`
        tokens = TokenBlocks(chunk.tp if chunk.sequence_parallel else chunk.tp.alone, chunk.cp)
        for name, module in chunk.named_modules():
            if isinstance(module, LINEAR):
                module.unfused = isinstance(module, RowParallelLinear)  # whose bias is added after the sum over ranks
                module.product = OrderedProduct(module, name, settings, tokens, sums)
            elif hasattr(module, "routes_rows"):
                module.product = OrderedProduct(module, name, settings, tokens, SampleSums(chunk.cp, chunk.tp))
            elif isinstance(module, tuple(NORMS.values())):
                module.in_blocks = tokens.of_heads(chunk.tp, module.groups).each if module.groups else tokens.each
            elif isinstance(module, RMSNormAcrossHeads):
                module.sums = HeadSums(head_blocks(chunk.tp, module.groups), tokens.of_whole_rows)
            elif isinstance(module, VocabParallelEmbedding):
                module.lookup = sums.lookup
            if hasattr(module, "attach_ordered"):
                module.attach_ordered()
            elif hasattr(module, "by_width"):  # an activation
                module.by_width = partial(_by_width, Blocks(BLOCKS // chunk.tp.size, 1 + module.gated))


class OrderedProduct(LinearProduct):
    """The products of a linear layer, in blocks of the dim that tp cuts. tokens, sums: of the rank's tokens between layers,
    and inside of them
    """

    def __init__(self, layer: nn.Module, name: str, settings: Model, tokens: "TokenBlocks", sums: SampleSums):
        super().__init__(layer, name, settings)
        placement, self.tokens, self.sums = layer.placements["weight"], tokens, sums
        self.rows = tokens.of_whole_rows
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
        blocks, dim = (self.outputs, 0) if self.outputs else (self.inputs or EACH, 1)
        return self.sums.product(blocks, multiply, gradient[0], x[0], dim)

    def grad_bias(self, rows: torch.Tensor) -> torch.Tensor:
        return self.rows.total(rows)

    def add_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return _AddBias.apply(x, bias, self.tokens)


class TokenBlocks:
    """Sums over the tokens of a sample, of which ranks have parts: `BLOCKS` blocks, and the tree over them.

    sp: ranks that have parts of the rows of a context parallel rank. tp, heads: ranks that have other heads of the same
    rows, and the blocks of heads of this rank. The first of all gets the sum, and the others get 0: gradients of such
    weights are partial (`Placement`), and those of context parallel ranks are added up, too.
    """

    def __init__(self, sp: Axis, cp: Axis, tp: Optional[Axis] = None, heads: int = 1):
        self.sp, self.cp, self.number = sp, cp, max(1, BLOCKS // (sp.size * cp.size))
        self.tp, self.heads = tp or sp.alone, heads

    @property
    def of_whole_rows(self) -> "TokenBlocks":
        """The same of rows that ranks of sp do not divide."""
        return TokenBlocks(self.sp.alone, self.cp)

    def of_heads(self, tp: Axis, groups: int) -> "TokenBlocks":
        """The same of whole rows with so many groups of heads on this rank of tp."""
        return TokenBlocks(self.sp.alone, self.cp, tp, head_blocks(tp, groups))

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of rows [n, ...], added in fp32."""
        number = self.number if len(rows) % self.number == 0 else 1
        blocks = rows.to(torch.float32, copy=True).unflatten(0, (number, -1)).transpose(0, 1)  # [tokens, blocks, ...]
        return self._of_ranks(tree_sum(blocks)).to(rows.dtype)

    def each(self, norm: Callable) -> Callable:
        """A norm of (x [s, ...], or [s, b, g/tp, ...] with heads, *weights, epsilon) that is computed block by block."""

        def in_blocks(x: torch.Tensor, *weights) -> torch.Tensor:
            *weights, epsilon = weights
            if len(x) % self.number:
                return norm(x, *weights, epsilon)
            blocks = [block for rows in x.chunk(self.number) for block in self._by_heads(rows)]
            copies = zip(*(_Copies.apply(weight, self) for weight in weights))
            found = [norm(block, *own, epsilon) for block, own in zip(blocks, copies)]
            if self.heads > 1:
                found = [torch.cat(found[at : at + self.heads], 2) for at in range(0, len(found), self.heads)]
            return torch.cat(found)

        return in_blocks

    def _by_heads(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return rows.chunk(self.heads, 2) if self.heads > 1 else (rows,)

    def _of_ranks(self, blocks: torch.Tensor) -> torch.Tensor:
        """The sum over the blocks [number, ...] of all ranks, in the order of the sequence."""
        total = tree_sum(gather_rows(collectives.all_gather(blocks, self.sp), self.cp))
        return total if self.sp.rank == self.tp.rank == self.cp.rank == 0 else total.zero_()

    def total_of_blocks(self, blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        """The sum of what blocks have, those of heads first in each block of tokens, added in fp32."""
        blocks = torch.stack([block.float() for block in blocks]).unflatten(0, (self.number, self.heads))
        of_heads = tree_sum(blocks.transpose(0, 1)).contiguous()
        return self._of_ranks(collectives.all_reduce(of_heads, self.tp))


class HeadSums(NamedTuple):
    """Sums of a norm across heads, of which this rank has so many blocks."""

    blocks: int
    tokens: TokenBlocks

    def over_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, g/tp, n, d] fp32 -> [s, b, 1, 1, 1]: the sum over this rank's heads."""
        return tree_sum([block.flatten(2).sum(-1) for block in x.chunk(self.blocks, 2)])[..., None, None, None]

    def over_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of rows [n, ...] over all tokens of a sample."""
        return self.tokens.total(rows)


def head_blocks(tp: Axis, groups: int) -> int:
    """Blocks of the heads of this rank, one of tp with so many groups each: no layout that divides the groups cuts one."""
    return math.gcd(groups * tp.size, BLOCKS) // tp.size


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


WHOLE, EACH = Blocks(1), Blocks(BLOCKS)


class _Copies(torch.autograd.Function):
    """A weight for each block of tokens; the backward pass adds up its gradients."""

    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.tokens = tokens
        return tuple(weight.view_as(weight) for _ in range(tokens.number * tokens.heads))

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
