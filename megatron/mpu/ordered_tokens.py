# SPDX-License-Identifier: Apache-2.0
"""Sums over the tokens of a sample whose rows ranks divide (those of context parallelism; for a router those of tensor
parallelism, too), with the bits of one rank that has them all (--batch-invariant-mode).

A rank has some rows of all columns. Ranks exchange rows for columns, and each computes a part of a weight's gradient from
all tokens in their order: the products of one rank alone, but for their width. So a gradient is a part on each rank, and 0
elsewhere: the sum over ranks, which the optimizer computes with that over samples, rounds nothing.

    x [s/cp, i], all columns   --all-gather-->   [s, i]        \\
                                                                 one product: [o/cp, i] of the weight's gradient [o, i]
    gradient [s/cp, o]         --all-to-all-->   [s, o/cp]     /

Legend: s tokens of a sample, o outputs, i inputs, cp ranks.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from megatron.mpu import collectives
from megatron.mpu.context_parallel import gather_rows, rows_for_columns
from megatron.mpu.mesh import Axis
from megatron.mpu.ordered_sums import Blocks


class SampleSums(NamedTuple):
    """Sums over whole samples, of which the ranks of an axis have rows. sp: ranks that divide these rows again"""

    axis: Axis
    sp: Optional[Axis] = None

    def product(
        self, blocks: Blocks, multiply: Callable, rows: torch.Tensor, x: torch.Tensor, dim: int = 0
    ) -> torch.Tensor:
        """rows^T [o, n] times x [n, i], over the tokens of all ranks: this rank's part of [o, i], elsewhere 0.

        blocks: of o (dim 0) or of i (dim 1), which ranks divide
        """
        ranks, number = self._ranks()
        if ranks == 1:  # contiguous: for others the kernel's order depends on sizes (`cpu_ops.onednn`)
            return blocks.product(multiply, rows.t().contiguous(), x.contiguous().t(), dim=dim)
        cut, whole = (rows, x) if dim == 0 else (x, rows)
        own, parts = blocks._replace(number=blocks.number // ranks), (blocks.parts, blocks.number)
        cut = cut.unflatten(1, (*parts, -1)).transpose(1, 2).flatten(1)  # neighbouring blocks go to a rank
        cut, whole = self._columns(cut), self._rows(whole)
        cut = cut.unflatten(1, (own.number, own.parts, -1)).transpose(1, 2).flatten(1)
        rows, x = (cut, whole) if dim == 0 else (whole, cut)
        part = own.product(multiply, rows.t().contiguous(), x.contiguous().t(), dim=dim)
        shape = [part.shape[0], part.shape[1]]
        shape[dim] *= ranks
        total = part.new_zeros(shape)
        places = total.unflatten(dim, (*parts, -1)).narrow(dim + 1, number * own.number, own.number)
        places.copy_(part.unflatten(dim, (own.parts, own.number, -1)))
        return total

    def _ranks(self) -> tuple[int, int]:
        """How many ranks have rows of a sample, and which of them this is, in the order of columns."""
        outer = self.sp or self.axis.alone
        return outer.size * self.axis.size, outer.rank * self.axis.size + self.axis.rank

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, in the order of the sequence."""
        return gather_rows(collectives.all_gather(x, self.sp) if self.sp else x, self.axis)

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        """All rows of this rank's columns."""
        if self.sp and self.sp.size > 1:
            x = collectives.all_to_all(torch.cat(x.chunk(self.sp.size, 1)), self.sp)
        return rows_for_columns(x, self.axis)

    def lookup(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`F.embedding`, whose gradient has a sum over all places of a token."""
        return F.embedding(tokens, weight) if self.axis.size == 1 else _Lookup.apply(tokens, weight, self.axis)

    def of_scalars(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of a number for each token, [n] of this rank, over those of all ranks: on the first, elsewhere 0."""
        if self.axis.size == 1:
            return x.sum()
        total = gather_rows(x, self.axis).sum()
        return total if self.axis.rank == 0 else torch.zeros_like(total)


class _Lookup(torch.autograd.Function):
    """Rows of a table [v, h] for tokens [s/cp, b]."""

    @staticmethod
    def forward(ctx, tokens, weight, axis):
        ctx.axis, ctx.rows = axis, len(weight)
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, gradient):
        axis, [tokens] = ctx.axis, ctx.saved_tensors
        own = rows_for_columns(gradient.flatten(0, 1), axis)  # [s, h/cp]
        tokens = gather_rows(tokens.flatten(), axis)
        own = torch.ops.aten.embedding_dense_backward(own, tokens, ctx.rows, -1, False)
        total, width = own.new_zeros(ctx.rows, gradient.shape[-1]), own.shape[1]
        total[:, axis.rank * width : axis.rank * width + width] = own
        return None, total, None
