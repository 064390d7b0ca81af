# SPDX-License-Identifier: Apache-2.0
"""Every collective of the suite, over an `Axis`. Over an axis of size 1 each is a no-op that returns its input.

torch 2.13 renamed two of the functions used here and warns at each call of the old names; older torch has only those.
This is the one place that knows.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Optional, Union

import torch
import torch.distributed as dist

from megatron.mpu.groups import GroupListener
from megatron.mpu.mesh import Axis
from megatron.telemetry import lanes

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = dict(sum=dist.ReduceOp.SUM, max=dist.ReduceOp.MAX, min=dist.ReduceOp.MIN)


def _noted(kind: str, axis: Axis, work):
    """A message that was just launched; while steps are profiled, one that notes when it is waited for."""
    if lanes.Recording.active is None or torch.compiler.is_compiling():
        return work
    return lanes.note(lanes.lane_of(axis.name, kind), f"{kind}, {axis.label}", work)


def _at_once(kind: str, axis: Axis) -> contextlib.AbstractContextManager:
    """Around a message that is waited for at once."""
    if lanes.Recording.active is None or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return lanes.span(lanes.lane_of(axis.name, kind), f"{kind}, {axis.label}")


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Combine `x` over the axis, in place; returns `x`. `op`: sum, max or min."""
    if axis.size > 1:
        GroupListener.notify(axis.label)
        with _at_once("all-reduce", axis):
            dist.all_reduce(x, _OPS[op], group=axis.group)
    return x


def all_gather(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """Pieces of all ranks, joined along `dim` in rank order: [n, ...] -> [n * size, ...]."""
    if axis.size == 1:
        return x
    whole = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    _begin_gather(whole, x.contiguous(), axis).wait()
    return whole if dim == 0 else torch.cat(whole.chunk(axis.size), dim)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """This rank's piece along `dim` of the sum over the axis: [n * size, ...] -> [n, ...]."""
    if axis.size == 1:
        return x
    source = x.contiguous() if dim == 0 else torch.cat(x.chunk(axis.size, dim))
    piece = source.new_empty((source.shape[0] // axis.size, *source.shape[1:]))
    _begin_scatter(piece, source, axis).wait()
    return piece


Rows = Union[Sequence[int], torch.Tensor]  # a number of rows for each rank of an axis


def all_to_all(x: torch.Tensor, axis: Axis, sent: Optional[Rows] = None, received: Optional[Rows] = None):
    """Rows of `x` [n, ...] go to the ranks of the axis, in rank order; those that arrive [m, ...] are in rank order, too.

    sent: rows for each rank, any of which may be 0 (default: as many for each); received: rows from each (default: the
    ranks tell each other, in a small message)
    Rows that are a tensor of the device are read by the host, which waits for the device.
    """
    if axis.size == 1:
        return x
    sent, received = row_counts(x, axis, sent, received)
    arrived = empty_rows(x, received)
    with _at_once("all-to-all", axis):
        _send_rows(arrived, x, axis, sent, received)
    return arrived


def start_all_to_all(
    arrived: torch.Tensor,
    x: torch.Tensor,
    axis: Axis,
    sent: Optional[Sequence[int]] = None,
    received: Optional[Sequence[int]] = None,
):
    """Begin to fill `arrived` [m, ...] with rows of `x` [n, ...] of all ranks (`all_to_all`); `wait()` ends it."""
    if axis.size == 1:
        arrived.copy_(x)
        return Done()
    return _noted("all-to-all", axis, _send_rows(arrived, x, axis, sent, received, async_op=True))


def row_counts(x: torch.Tensor, axis: Axis, sent: Optional[Rows], received: Optional[Rows] = None):
    """`sent` and `received` of an `all_to_all` of `x` as lists, in one read of the device; (None, None): equal parts."""
    if sent is None:
        assert received is None and len(x) % axis.size == 0, (
            f"{len(x)} rows for {axis.size} ranks: say how many for each"
        )
        return None, None
    if received is None:
        sent = torch.as_tensor(sent, dtype=torch.int64, device=x.device)
        sent, received = torch.stack((sent, all_to_all(sent, axis))).tolist()
    sent, received = (rows.tolist() if isinstance(rows, torch.Tensor) else list(rows) for rows in (sent, received))
    assert len(sent) == len(received) == axis.size and sum(sent) == len(x), (
        f"{len(x)} rows, {sent} to {axis.size} ranks"
    )
    return sent, received


def count_rows(numbers: torch.Tensor, count: int, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of each of `count` kinds, of which each rank of the axis has an equal part: (sent, received), both [ranks, kinds
    of a rank], of rows for each rank, and from each.

    numbers: the kind of each row. On the meta device (--preflight) they have no values, and each kind is as frequent.
    """
    if not numbers.is_meta:
        sent = torch.bincount(numbers, minlength=count)
        return sent.view(axis.size, -1), all_to_all(sent, axis).view(axis.size, -1)
    borders = torch.arange(count + 1) * len(numbers) // count  # on the host, where sizes can be read
    sent = borders.diff().view(axis.size, -1)
    return sent, sent[axis.rank].expand_as(sent)


def empty_rows(x: torch.Tensor, rows: Optional[Sequence[int]]) -> torch.Tensor:
    """Memory for so many rows like those of `x`, contiguous; None: for as many."""
    return x.new_empty((len(x) if rows is None else sum(rows), *x.shape[1:]))


def _send_rows(arrived: torch.Tensor, x: torch.Tensor, axis: Axis, sent, received, async_op: bool = False):
    GroupListener.notify(axis.label)
    # Rows are sent as bytes: gloo does not know int16 and fp8, nor NCCL int16.
    as_bytes = lambda rows: rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)
    arrived, x = as_bytes(arrived), as_bytes(x.detach().contiguous())
    return dist.all_to_all_single(arrived, x, received, sent, group=axis.group, async_op=async_op)


class Done:
    """What was complete when it was started."""

    def wait(self) -> None:
        pass


def start_all_reduce(x: torch.Tensor, axis: Axis):
    """Begin to sum `x` over the axis, in place. `wait()` of what this returns ends it; until then `x` is not to be used."""
    if axis.size == 1:
        return Done()
    GroupListener.notify(axis.label)
    return _noted("all-reduce", axis, dist.all_reduce(x, group=axis.group, async_op=True))


def start_all_gather(whole: torch.Tensor, piece: torch.Tensor, axis: Axis):
    """Begin to fill `whole` [n * size] with the pieces [n] of all ranks; `wait()` of what this returns ends it."""
    if axis.size == 1:
        whole.copy_(piece)
        return Done()
    return _begin_gather(whole, piece, axis)


def start_reduce_scatter(piece: torch.Tensor, whole: torch.Tensor, axis: Axis):
    """Begin to fill `piece` [n] with this rank's part of the sum of `whole` [n * size]; `wait()` ends it."""
    if axis.size == 1:
        piece.copy_(whole)
        return Done()
    return _begin_scatter(piece, whole, axis)


def _begin_gather(whole: torch.Tensor, piece: torch.Tensor, axis: Axis):
    GroupListener.notify(axis.label)
    if piece.element_size() == 1 and piece.is_floating_point():  # fp8 is sent as bytes: gloo does not know it
        whole, piece = whole.view(torch.uint8), piece.view(torch.uint8)
    if whole.device.type == "cpu" and whole.nbytes >= LARGE:
        places = whole.view(-1).chunk(axis.size)
        places[axis.rank].copy_(piece.view(-1))
        return _noted("all-gather", axis, _Exchange([places[axis.rank]] * axis.size, places, axis))
    return _noted("all-gather", axis, _gather(whole, piece, group=axis.group, async_op=True))


def _begin_scatter(piece: torch.Tensor, whole: torch.Tensor, axis: Axis):
    GroupListener.notify(axis.label)
    if whole.device.type == "cpu":
        return _noted("reduce-scatter", axis, _Sum(piece, whole, axis))
    return _noted("reduce-scatter", axis, _scatter(piece, whole, group=axis.group, async_op=True))


# Bytes from which messages from rank to rank are faster than gloo's collectives; small ones wake up later.
LARGE = 2 << 20


class _Exchange:
    """Messages between all ranks of an axis, under way: `outgoing` and `incoming` are a tensor for each rank.

    What gloo gathers and scatters by them is neither copied on its way nor waits for a thread of gloo's, of which it
    has two: 21 MB in five messages take half to two thirds of the time (`benchmarks/collectives.py`).
    """

    def __init__(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], axis: Axis):
        others = [place for place in range(axis.size) if place != axis.rank]
        self.messages = [dist.irecv(incoming[place], axis.ranks[place], group=axis.group) for place in others]
        self.messages += [dist.isend(outgoing[place], axis.ranks[place], group=axis.group) for place in others]

    def wait(self) -> None:
        for message in self.messages:
            message.wait()


class _Sum:
    """A reduce-scatter by gloo, whose own one moves twice the bytes: parts are exchanged, and summed where they belong.

    Of large ones the first part of another rank arrives in `piece` itself: between two ranks nothing else is allocated.
    """

    def __init__(self, piece: torch.Tensor, whole: torch.Tensor, axis: Axis):
        self.piece, whole = piece.view(-1), whole.view(-1)
        if whole.nbytes < LARGE:
            arrived = torch.empty_like(whole)
            self.work = dist.all_to_all_single(arrived, whole, group=axis.group, async_op=True)
            self.parts = arrived.chunk(axis.size)
            return
        own = whole.chunk(axis.size)
        first, *others = (place for place in range(axis.size) if place != axis.rank)
        parts = list(own)
        parts[first] = self.piece
        for place in others:
            parts[place] = torch.empty_like(self.piece)
        self.work = _Exchange(own, parts, axis)
        self.parts = [self.piece, *(part for place, part in enumerate(parts) if place != first)]

    def wait(self) -> None:
        self.work.wait()
        first, *others = self.parts
        if first is not self.piece:
            self.piece.copy_(first)
        for part in others:  # in the order of ranks, so that every rank has the same result
            self.piece.add_(part)


def broadcast(x: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """`x` of the rank at place `source` of the axis, in place on the others; returns `x`."""
    if axis.size > 1:
        GroupListener.notify(axis.label)
        dist.broadcast(x, axis.ranks[source], group=axis.group)
    return x


def broadcast_object(value, axis: Axis, source: int = 0):
    """A small picklable value of the rank at place `source`, on every rank of the axis. For start-up, not for steps."""
    if axis.size == 1:
        return value
    GroupListener.notify(axis.label)
    box = [value]
    dist.broadcast_object_list(box, axis.ranks[source], group=axis.group)
    return box[0]


def all_gather_object(value, axis: Axis) -> list:
    """Small picklable values of all ranks of the axis, in their order. For checks, not for steps."""
    if axis.size == 1:
        return [value]
    GroupListener.notify(axis.label)
    values = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.size > 1:
        GroupListener.notify(axis.label)
        nccl = dist.get_backend(axis.group) == "nccl"  # its barrier is an all-reduce, on a device that is to be named
        dist.barrier(group=axis.group, device_ids=[torch.cuda.current_device()] if nccl else None)
