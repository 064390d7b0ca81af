# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel mappings: functions of autograd with a collective in the forward pass, the backward pass, or both.

| mapping            | forward                    | backward                   | paper                       |
|--------------------|----------------------------|----------------------------|-----------------------------|
| `copy_to`          | nothing                    | all-reduce                 | f of arXiv:1909.08053       |
| `reduce_from`      | all-reduce                 | nothing                    | g of arXiv:1909.08053       |
| `gather_sequence`  | all-gather along dim 0     | reduce-scatter along dim 0 | g of arXiv:2205.05198       |
| `scatter_sequence` | reduce-scatter along dim 0 | all-gather along dim 0     | g-bar of arXiv:2205.05198   |
| `join_last`        | all-gather along last dim  | own piece of last dim      | logits for inference        |

A layer picks its mapping once, in its constructor; over an axis of size 1 each is the identity.
"""

import torch

from megatron.mpu import collectives
from megatron.mpu.mesh import Axis


def _same(x, axis):
    return x


def _total(x, axis):
    return collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def _piece(dim):
    return lambda x, axis: x.chunk(axis.size, dim)[axis.rank].contiguous()


def _whole(dim):
    return lambda x, axis: collectives.all_gather(x, axis, dim)


def _piece_of_total(dim):
    return lambda x, axis: collectives.reduce_scatter(x, axis, dim)


def conjugate(forward, backward):
    """A differentiable mapping `f(x, axis)` that applies `forward` to values and `backward` to gradients."""

    class Mapping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, axis):
            ctx.axis = axis
            return forward(x, axis)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, ctx.axis), None

    def mapping(x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return x if axis.size == 1 else Mapping.apply(x, axis)

    return mapping


copy_to = conjugate(_same, _total)
reduce_from = conjugate(_total, _same)
gather_sequence = conjugate(_whole(0), _piece_of_total(0))
scatter_sequence = conjugate(_piece_of_total(0), _whole(0))
join_last = conjugate(_whole(-1), _piece(-1))
