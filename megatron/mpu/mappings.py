# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel mappings: functions of autograd with a collective in the forward pass, the backward pass, or both.

| mapping                                      | forward                | backward               | paper                 |
|----------------------------------------------|------------------------|------------------------|-----------------------|
| `copy_to_tensor_model_parallel_region`       | nothing                | all-reduce             | 1909.08053, f         |
| `reduce_from_tensor_model_parallel_region`   | all-reduce             | nothing                | 1909.08053, g         |
| `gather_from_sequence_parallel_region`       | all-gather, dim 0      | reduce-scatter, dim 0  | 2205.05198, g         |
| `reduce_scatter_to_sequence_parallel_region` | reduce-scatter, dim 0  | all-gather, dim 0      | 2205.05198, g-bar     |
| `gather_from_tensor_model_parallel_region`   | all-gather, last dim   | own piece of last dim  | (logits in inference) |

Papers are those of arXiv.

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


copy_to_tensor_model_parallel_region = conjugate(_same, _total)
reduce_from_tensor_model_parallel_region = conjugate(_total, _same)
gather_from_sequence_parallel_region = conjugate(_whole(0), _piece_of_total(0))
reduce_scatter_to_sequence_parallel_region = conjugate(_piece_of_total(0), _whole(0))
gather_from_tensor_model_parallel_region = conjugate(_whole(-1), _piece(-1))
