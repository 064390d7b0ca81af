# SPDX-License-Identifier: Apache-2.0
"""Autograd functions with a collective in the forward pass, the backward pass, or both (mappings).

| mapping                                      | forward                | backward               | paper                 |
|----------------------------------------------|------------------------|------------------------|-----------------------|
| `copy_to_tensor_model_parallel_region`       | nothing                | all-reduce             | 1909.08053, f         |
| `reduce_from_tensor_model_parallel_region`   | all-reduce             | nothing                | 1909.08053, g         |
| `gather_from_sequence_parallel_region`       | all-gather, dim 0      | reduce-scatter, dim 0  | 2205.05198, g         |
| `reduce_scatter_to_sequence_parallel_region` | reduce-scatter, dim 0  | all-gather, dim 0      | 2205.05198, g-bar     |
| `cut_rows`                                   | own piece of dim 0     | all-gather, dim 0      | (tokens to experts)   |
| `join_rows`                                  | all-gather, dim 0      | own piece of dim 0     | (tokens from experts) |
| `gather_from_tensor_model_parallel_region`   | all-gather, last dim   | own piece of last dim  | (logits in inference) |
| `all_to_all`                                 | all-to-all of rows     | all-to-all, reversed   | (tokens to experts)   |

Papers are on arXiv.

A layer picks its mapping once, in its constructor; over an axis of size 1 each is the identity.
"""

from collections.abc import Sequence
from typing import Optional, Protocol

import torch

from megatron.mpu import collectives
from megatron.mpu.mesh import Axis
from megatron.mpu.two_passes import pass_turn


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
cut_rows = conjugate(_piece(0), _whole(0))
join_rows = conjugate(_whole(0), _piece(0))
gather_from_tensor_model_parallel_region = conjugate(_whole(-1), _piece(-1))


def all_to_all(
    x: torch.Tensor, axis: Axis, sent: Optional[collectives.Rows] = None, received: Optional[collectives.Rows] = None
) -> torch.Tensor:
    """Send rows of `x` to the ranks of the axis (`collectives.all_to_all`); the backward pass sends gradients back.

    All ranks have to run the backward pass, even those that have received no rows. While rows are under way, the other one
    of two passes that take turns computes (`mpu/two_passes.py`).
    """
    return all_to_all_of((x,), axis, sent, received)[0]


def all_to_all_of(
    tensors: Sequence[torch.Tensor],
    axis: Axis,
    sent: Optional[collectives.Rows] = None,
    received: Optional[collectives.Rows] = None,
) -> tuple[torch.Tensor, ...]:
    """`all_to_all` of several tensors with equally many rows, whose messages are under way together. Whole numbers have no
    gradients.
    """
    if axis.size == 1:
        return tuple(tensors)
    return exchanged(_RowExchange(axis, *collectives.row_counts(tensors[0], axis, sent, received)), *tensors)


class Exchange(Protocol):
    """Messages of one mapping between ranks, there and back."""

    def start(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Launch the messages; returns what they will have filled after `wait`."""

    def start_back(self, gradients: Sequence[torch.Tensor]) -> None:
        """Launch those of the gradients of what arrived; `wait` returns the gradients of what was sent."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Let the device wait for the messages in flight, and return what arrived."""


def exchanged(exchange: Exchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What arrives when tensors are sent. The other one of two passes computes meanwhile. Whole numbers get no gradient."""
    started = _Start.apply(exchange, *tensors)
    pass_turn()
    return _Wait.apply(exchange, *started)


def start_all_to_all(
    x: torch.Tensor, axis: Axis, sent: Optional[collectives.Rows] = None, received: Optional[collectives.Rows] = None
) -> "PendingRows":
    """Start an `all_to_all`; `wait()` of the result returns the received rows.

    Operations between the two overlap with the message, and their backward passes with that of the gradients.
    """
    if axis.size == 1:
        return PendingRows(x)
    exchange = _RowExchange(axis, *collectives.row_counts(x, axis, sent, received))
    return PendingRows(*_Start.apply(exchange, x), exchange)


class PendingRows:
    """Rows of an `all_to_all` in flight. Call `wait()` once, before using them."""

    def __init__(self, rows: torch.Tensor, exchange: Optional["_RowExchange"] = None):
        self._rows, self._exchange = rows, exchange

    def wait(self) -> torch.Tensor:
        """The rows, in the order of the ranks that sent them."""
        return _Wait.apply(self._exchange, self._rows)[0] if self._exchange else self._rows


class _RowExchange:
    """An `Exchange` of rows: its sizes, and the messages in flight."""

    def __init__(self, axis: Axis, sent: Optional[list[int]], received: Optional[list[int]]):
        self.axis, self.sent, self.received = axis, sent, received
        self.flying = ()

    def start(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self._launch(tensors, self.sent, self.received)

    def start_back(self, gradients: Sequence[torch.Tensor]) -> None:
        self._launch(gradients, self.received, self.sent)

    def _launch(self, tensors: Sequence[torch.Tensor], sent, received) -> tuple[torch.Tensor, ...]:
        arriving = tuple(collectives.empty_rows(x, received) for x in tensors)
        self.flying = tuple(
            (rows, collectives.start_all_to_all(rows, x, self.axis, sent, received))
            for rows, x in zip(arriving, tensors, strict=True)
        )
        return arriving

    def wait(self) -> tuple[torch.Tensor, ...]:
        flying, self.flying = self.flying, ()  # free them with the messages
        for _, message in flying:
            message.wait()
        return tuple(rows for rows, _ in flying)


class _Start(torch.autograd.Function):
    """Launches the messages; its backward pass waits for those of gradients, which `_Wait` has launched."""

    @staticmethod
    def forward(ctx, exchange, *tensors):
        ctx.exchange, ctx.real = exchange, [x.is_floating_point() for x in tensors]
        return exchange.start(tensors)

    @staticmethod
    def backward(ctx, *_):
        gradients = iter(ctx.exchange.wait())
        return None, *(next(gradients) if real else None for real in ctx.real)


class _Wait(torch.autograd.Function):
    """Waits for the messages; its backward pass launches those of gradients."""

    @staticmethod
    def forward(ctx, exchange, *rows):
        ctx.exchange, ctx.real = exchange, [x.is_floating_point() for x in rows]
        exchange.wait()
        ctx.mark_dirty(*rows)
        return rows

    @staticmethod
    def backward(ctx, *gradients):
        real = [gradient for gradient, real in zip(gradients, ctx.real, strict=True) if real]
        ctx.exchange.start_back(real)
        pass_turn()
        # Only for their shapes: `_Start` returns the rows of this rank.
        return None, *(gradient if real else None for gradient, real in zip(gradients, ctx.real, strict=True))
