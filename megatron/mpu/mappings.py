# SPDX-License-Identifier: Apache-2.0
"""Mappings: functions of autograd with a collective in the forward pass, the backward pass, or both.

| mapping                                      | forward                | backward               | paper                 |
|----------------------------------------------|------------------------|------------------------|-----------------------|
| `copy_to_tensor_model_parallel_region`       | nothing                | all-reduce             | 1909.08053, f         |
| `reduce_from_tensor_model_parallel_region`   | all-reduce             | nothing                | 1909.08053, g         |
| `gather_from_sequence_parallel_region`       | all-gather, dim 0      | reduce-scatter, dim 0  | 2205.05198, g         |
| `reduce_scatter_to_sequence_parallel_region` | reduce-scatter, dim 0  | all-gather, dim 0      | 2205.05198, g-bar     |
| `gather_from_tensor_model_parallel_region`   | all-gather, last dim   | own piece of last dim  | (logits in inference) |
| `all_to_all`                                 | all-to-all of rows     | all-to-all, reversed   | (tokens to experts)   |

Papers are those of arXiv.

A layer picks its mapping once, in its constructor; over an axis of size 1 each is the identity.
"""

from typing import Optional

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


def all_to_all(
    x: torch.Tensor, axis: Axis, sent: Optional[collectives.Rows] = None, received: Optional[collectives.Rows] = None
) -> torch.Tensor:
    """Rows of `x` go to the ranks of the axis (`collectives.all_to_all`); their gradients come back the same way.

    All ranks have to run the backward pass, also those that no rows have arrived at.
    """
    return start_all_to_all(x, axis, sent, received).wait()


def start_all_to_all(
    x: torch.Tensor, axis: Axis, sent: Optional[collectives.Rows] = None, received: Optional[collectives.Rows] = None
) -> "PendingRows":
    """Begin `all_to_all`; `wait()` of what this returns gives the rows that arrived.

    Operations between the two run next to the message, and their backward passes next to that of the gradients.
    """
    if axis.size == 1:
        return PendingRows(x)
    exchange = _RowExchange(axis, *collectives.row_counts(x, axis, sent, received))
    return PendingRows(_Start.apply(x, exchange), exchange)


class PendingRows:
    """Rows under way. They are not to be used before `wait()`, which is called once."""

    def __init__(self, rows: torch.Tensor, exchange: Optional["_RowExchange"] = None):
        self._rows, self._exchange = rows, exchange

    def wait(self) -> torch.Tensor:
        """The rows, in the order of the ranks that sent them."""
        return _Wait.apply(self._rows, self._exchange) if self._exchange else self._rows


class _RowExchange:
    """What the two halves of an exchange have in common: its sizes, and the message under way."""

    def __init__(self, axis: Axis, sent: Optional[list[int]], received: Optional[list[int]]):
        self.axis, self.sent, self.received = axis, sent, received
        self.rows = self.message = None

    def start(self, x: torch.Tensor, sent: Optional[list[int]], received: Optional[list[int]]) -> torch.Tensor:
        self.rows = collectives.empty_rows(x, received)
        self.message = collectives.start_all_to_all(self.rows, x, self.axis, sent, received)
        return self.rows

    def wait(self) -> torch.Tensor:
        rows, message, self.rows, self.message = self.rows, self.message, None, None  # nothing outlives the message
        message.wait()
        return rows


class _Start(torch.autograd.Function):
    """Launches the message; backward, waits for that of the gradients, which `_Wait` has launched."""

    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        return exchange.start(x, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx, _):
        return ctx.exchange.wait(), None


class _Wait(torch.autograd.Function):
    """Waits for the message; backward, launches that of the gradients."""

    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        exchange.wait()
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    def backward(ctx, gradient):
        ctx.exchange.start(gradient, ctx.exchange.received, ctx.exchange.sent)
        return gradient, None  # of the shape that autograd asks for; `_Start` has the rows of this rank
