# SPDX-License-Identifier: Apache-2.0
"""Collectives over an `Axis` of the mesh. Over an axis of size 1 each is a no-op that returns its input.

torch 2.13 renamed two of the functions used here and warns at each call of the old names; older torch has only those.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from megatron.mpu.groups import GroupListener
from megatron.mpu.mesh import Axis
from megatron.mpu.ordered_sums import tree_sum
from megatron.telemetry import lanes, rank_times

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = dict(sum=dist.ReduceOp.SUM, max=dist.ReduceOp.MAX, min=dist.ReduceOp.MIN)


def _traced(kind: str, axis: Axis, work):
    """The handle of a collective that was just launched. It measures the wait for it, and records it while profiling."""
    if torch.compiler.is_compiling():
        return work
    if lanes.Recording.active is not None:
        work = lanes.note(lanes.lane_of(axis.name, kind), f"{kind}, {axis.label}", work)
    return rank_times.measured(work)


def _blocking(kind: str, axis: Axis) -> contextlib.AbstractContextManager:
    """A context around a blocking collective, which is measured, and recorded while profiling."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    if lanes.Recording.active is None:
        return rank_times.waiting()
    return _both(lanes.span(lanes.lane_of(axis.name, kind), f"{kind}, {axis.label}"), rank_times.waiting())


@contextlib.contextmanager
def _both(first: contextlib.AbstractContextManager, second: contextlib.AbstractContextManager):
    with first, second:
        yield


COMPUTED, SENT, RECEIVED = "computed", "sent", "received"
Hears = Callable[[str, str, torch.Tensor, Axis], None]


class Traffic:
    """Shows a listener what this rank computes for others, sends to them and receives from them. One per process.

    listener(way, what, x, axis): way is COMPUTED, SENT or RECEIVED; what is the kind of collective, F or B of a message
    between stages, or the name of what was computed; a received x is complete. Compiled code calls no listener.
    """

    listener: Optional[Hears] = None

    @classmethod
    @contextlib.contextmanager
    def heard_by(cls, listener: Optional[Hears]):
        """A context in which this one listens."""
        before, cls.listener = cls.listener, listener
        try:
            yield
        finally:
            cls.listener = before

    @classmethod
    def report(cls, way: str, what: str, x: torch.Tensor, axis: Axis) -> None:
        """Show a tensor that is complete."""
        if cls.listener is not None and not torch.compiler.is_compiling():
            cls.listener(way, what, x, axis)

    @classmethod
    def arriving(cls, what: str, x: torch.Tensor, axis: Axis, work):
        """The handle of a message that fills x. If somebody listens, it shows x after the wait."""
        if cls.listener is None or torch.compiler.is_compiling():
            return work
        return _Shown(what, x, axis, work)


class _Shown:
    """A handle that reports what has arrived, once."""

    def __init__(self, what: str, x: torch.Tensor, axis: Axis, work):
        self.message, self.work = (RECEIVED, what, x, axis), work

    def wait(self) -> None:
        self.work.wait()
        if self.message:
            Traffic.report(*self.message)
            self.message = None


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Reduce `x` over the axis, in place; returns `x`. `op`: sum, max or min."""
    if axis.size > 1 and axis.ordered and op == "sum":
        start_all_reduce(x, axis).wait()
    elif axis.size > 1:
        GroupListener.notify(axis.label)
        what = "all-reduce" if op == "sum" else f"all-reduce of {op}"
        Traffic.report(SENT, what, x, axis)
        with _blocking("all-reduce", axis):
            dist.all_reduce(x, _OPS[op], group=axis.group)
        Traffic.report(RECEIVED, what, x, axis)
    return x


def all_reduce_amax(amax: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The largest absolute values over the axis, fp32, in place. They are compared as bits, in whose order NaN is above all
    others: a maximum of numbers may lose it.
    """
    if not amax.is_meta:  # --preflight
        all_reduce(amax.view(torch.int32), axis, "max")
    return amax


def all_gather(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """Concatenate the pieces of all ranks along `dim`, in rank order: [n, ...] -> [n * size, ...]."""
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
    """Send rows of `x` [n, ...] to the ranks of the axis, in rank order; returns the received rows [m, ...], in rank order.

    sent: number of rows for each rank, which may be 0 (default: equal parts); received: number of rows from each (default:
    exchanged in a small all-to-all)
    If `sent` or `received` is a tensor on the device, reading it synchronizes with the device.
    """
    if axis.size == 1:
        return x
    sent, received = row_counts(x, axis, sent, received)
    arrived = empty_rows(x, received)
    with _blocking("all-to-all", axis):
        _send_rows(arrived, x, axis, sent, received)
    Traffic.report(RECEIVED, "all-to-all", arrived, axis)
    return arrived


def start_all_to_all(
    arrived: torch.Tensor,
    x: torch.Tensor,
    axis: Axis,
    sent: Optional[Sequence[int]] = None,
    received: Optional[Sequence[int]] = None,
):
    """Start an `all_to_all` of `x` [n, ...] into `arrived` [m, ...]; returns a handle with `wait()`."""
    if axis.size == 1:
        arrived.copy_(x)
        return Done()
    work = _traced("all-to-all", axis, _send_rows(arrived, x, axis, sent, received, async_op=True))
    return Traffic.arriving("all-to-all", arrived, axis, work)


def row_counts(x: torch.Tensor, axis: Axis, sent: Optional[Rows], received: Optional[Rows] = None):
    """`sent` and `received` of an `all_to_all` of `x` as lists, with one device read; (None, None) for equal parts."""
    if sent is None:
        assert received is None and len(x) % axis.size == 0, (
            f"{len(x)} rows for {axis.size} ranks: pass `sent`, the number for each"
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

    numbers: the kind of each row; rows of kind `count` go nowhere. On the meta device (--preflight) they have no values,
    and each kind is as frequent.
    """
    sent = count_kinds(numbers, count).view(axis.size, -1)
    received, message = start_counts(sent, axis, numbers.is_meta)
    message.wait()
    return sent, received


def count_kinds(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """How often each of `count` kinds occurs, [count], without reading it on the host; see `count_rows`."""
    if numbers.is_meta:
        return (torch.arange(count + 1) * len(numbers) // count).diff()  # on the host, where sizes can be read
    return numbers.new_zeros(count + 1).scatter_add_(0, numbers, torch.ones_like(numbers))[:-1]


def start_counts(sent: torch.Tensor, axis: Axis, alike: bool) -> tuple[torch.Tensor, Any]:
    """Start to exchange counts [ranks, ...] of rows for each rank; returns (those from each rank, a handle with `wait()`).

    alike: nothing is sent, because all ranks count the same
    """
    if alike:
        return sent[axis.rank].expand_as(sent), Done()
    received = torch.empty_like(sent)
    return received, start_all_to_all(received, sent, axis)


def empty_rows(x: torch.Tensor, rows: Optional[Sequence[int]]) -> torch.Tensor:
    """An uninitialized tensor for `sum(rows)` rows like those of `x`; None: for as many as `x` has."""
    return x.new_empty((len(x) if rows is None else sum(rows), *x.shape[1:]))


def _send_rows(arrived: torch.Tensor, x: torch.Tensor, axis: Axis, sent, received, async_op: bool = False):
    GroupListener.notify(axis.label)
    Traffic.report(SENT, "all-to-all", x, axis)
    # Rows are sent as bytes: gloo does not support int16 and fp8, nor NCCL int16.
    as_bytes = lambda rows: rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)
    arrived, x = as_bytes(arrived), as_bytes(x.detach().contiguous())
    return dist.all_to_all_single(arrived, x, received, sent, group=axis.group, async_op=async_op)


class Done:
    """A handle of an operation that is already complete."""

    def wait(self) -> None:
        pass


def start_all_reduce(x: torch.Tensor, axis: Axis):
    """Start to sum `x` over the axis, in place; returns a handle with `wait()`. `x` must not be used before."""
    if axis.size == 1:
        return Done()
    GroupListener.notify(axis.label)
    Traffic.report(SENT, "all-reduce", x, axis)
    work = _OrderedAllReduce(x, axis) if axis.ordered else dist.all_reduce(x, group=axis.group, async_op=True)
    return Traffic.arriving("all-reduce", x, axis, _traced("all-reduce", axis, work))


def start_all_gather(whole: torch.Tensor, piece: torch.Tensor, axis: Axis):
    """Start to gather the pieces [n] of all ranks into `whole` [n * size]; returns a handle with `wait()`."""
    if axis.size == 1:
        whole.copy_(piece)
        return Done()
    return _begin_gather(whole, piece, axis)


def start_reduce_scatter(piece: torch.Tensor, whole: torch.Tensor, axis: Axis):
    """Start to fill `piece` [n] with this rank's part of the sum of `whole` [n * size]; returns a handle with `wait()`."""
    if axis.size == 1:
        piece.copy_(whole)
        return Done()
    return _begin_scatter(piece, whole, axis)


def start_shift(x: torch.Tensor, axis: Axis, places: int = 1) -> tuple[torch.Tensor, Any]:
    """Start to send `x` to the rank so many places further on the axis, whose last rank comes before the first; returns (a
    tensor like `x` that arrives from as many places before, a handle with `wait()`). `x` must not change before.

    The two messages are one group of NCCL's: otherwise each rank's send would wait for a receive that is queued after it.
    """
    if places % axis.size == 0:
        return x, Done()
    GroupListener.notify(axis.label)
    x = x.contiguous()
    arrived = torch.empty_like(x)
    if x.is_meta:  # --preflight
        return arrived, Done()
    Traffic.report(SENT, "shift", x, axis)
    ahead, behind = (axis.ranks[(axis.rank + way) % axis.size] for way in (places, -places))
    messages = [dist.P2POp(dist.isend, x, ahead, axis.group), dist.P2POp(dist.irecv, arrived, behind, axis.group)]
    work = _traced("shift", axis, _All(dist.batch_isend_irecv(messages), x))
    return arrived, Traffic.arriving("shift", arrived, axis, work)


class _All:
    """Messages in flight, and the tensor that they send."""

    def __init__(self, messages: Sequence, sent: torch.Tensor):
        self.messages, self.sent = messages, sent

    def wait(self) -> None:
        for message in self.messages:
            message.wait()
        self.sent = None


def _begin_gather(whole: torch.Tensor, piece: torch.Tensor, axis: Axis):
    GroupListener.notify(axis.label)
    Traffic.report(SENT, "all-gather", piece, axis)
    return Traffic.arriving("all-gather", whole, axis, _traced("all-gather", axis, _start_gather(whole, piece, axis)))


def _start_gather(whole: torch.Tensor, piece: torch.Tensor, axis: Axis):
    if piece.element_size() == 1 and piece.is_floating_point():  # fp8 is sent as bytes: gloo does not support it
        whole, piece = whole.view(torch.uint8), piece.view(torch.uint8)
    if whole.device.type == "cpu" and _is_large(whole):
        places = whole.view(-1).chunk(axis.size)
        places[axis.rank].copy_(piece.view(-1))
        return _Exchange([places[axis.rank]] * axis.size, places, axis)
    return _gather(whole, piece, group=axis.group, async_op=True)


def _begin_scatter(piece: torch.Tensor, whole: torch.Tensor, axis: Axis):
    GroupListener.notify(axis.label)
    Traffic.report(SENT, "reduce-scatter", whole, axis)
    work = _traced("reduce-scatter", axis, _start_scatter(piece, whole, axis))
    return Traffic.arriving("reduce-scatter", piece, axis, work)


def _start_scatter(piece: torch.Tensor, whole: torch.Tensor, axis: Axis):
    if axis.ordered:
        return _OrderedSum(piece, whole, axis)
    if whole.device.type == "cpu":
        return _Sum(piece, whole, axis)
    return _scatter(piece, whole, group=axis.group, async_op=True)


# Size in bytes from which point-to-point messages are faster than gloo's collectives; for small ones latency is higher.
LARGE = 2 << 20


def _is_large(x: torch.Tensor) -> bool:
    """Whether `x.nbytes` is at least `LARGE`; torch.compile has no `nbytes` of sizes that it does not know."""
    return math.prod(x.shape) * x.element_size() >= LARGE


class _Exchange:
    """Point-to-point messages between all ranks of an axis, in flight; `outgoing`, `incoming`: a tensor for each rank.

    Compared with gloo's collectives they avoid a copy and the wait for one of gloo's two threads: 21 MB in five messages
    take half to two thirds of the time (`benchmarks/collectives.py`).
    """

    def __init__(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], axis: Axis):
        others = [place for place in range(axis.size) if place != axis.rank]
        self.messages = [dist.irecv(incoming[place], axis.ranks[place], group=axis.group) for place in others]
        self.messages += [dist.isend(outgoing[place], axis.ranks[place], group=axis.group) for place in others]

    def wait(self) -> None:
        for message in self.messages:
            message.wait()


class _Sum:
    """A reduce-scatter over gloo: ranks exchange parts and sum their own. gloo's own one moves twice the bytes.

    For large tensors the first part of another rank is received into `piece`, so two ranks need no further memory.
    """

    def __init__(self, piece: torch.Tensor, whole: torch.Tensor, axis: Axis):
        self.piece, whole = piece.view(-1), whole.view(-1)
        if not _is_large(whole):
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
        for part in others:  # in rank order, so that every rank has the same result
            self.piece.add_(part)


class _OrderedSum:
    """A reduce-scatter whose sum over ranks is `tree_sum`: ranks exchange parts, and each sums its own."""

    def __init__(self, piece: torch.Tensor, whole: torch.Tensor, axis: Axis):
        self.piece, whole = piece.view(-1), whole.view(-1)
        self.arrived = torch.empty_like(whole)
        if _is_large(whole):
            parts, arriving = whole.chunk(axis.size), self.arrived.chunk(axis.size)
            arriving[axis.rank].copy_(parts[axis.rank])
            self.work = _Exchange(parts, arriving, axis)
        else:
            self.work = dist.all_to_all_single(self.arrived, whole, group=axis.group, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        self.piece.copy_(tree_sum(self.arrived.view(-1, len(self.piece))))


class _OrderedAllReduce:
    """An all-reduce, in place, whose sum over ranks is `tree_sum`: `_OrderedSum`, then the parts are gathered."""

    def __init__(self, x: torch.Tensor, axis: Axis):
        self.x, self.axis, flat = x, axis, x.view(-1)
        self.whole = torch.cat([flat, flat.new_zeros(-len(flat) % axis.size)])
        self.piece = self.whole.new_empty(len(self.whole) // axis.size)
        self.work = _OrderedSum(self.piece, self.whole, axis)

    def wait(self) -> None:
        self.work.wait()
        _begin_gather(self.whole, self.piece, self.axis).wait()
        self.x.view(-1).copy_(self.whole[: self.x.numel()])


def broadcast(x: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Broadcast `x` from the rank at index `source` of the axis, in place; returns `x`."""
    if axis.size > 1:
        GroupListener.notify(axis.label)
        if axis.rank == source:
            Traffic.report(SENT, "broadcast", x, axis)
        with rank_times.waiting():
            dist.broadcast(x, axis.ranks[source], group=axis.group)
        Traffic.report(RECEIVED, "broadcast", x, axis)
    return x


def broadcast_object(value, axis: Axis, source: int = 0):
    """Broadcast a small picklable value from the rank at index `source` of the axis. For start-up, not for steps."""
    if axis.size == 1:
        return value
    GroupListener.notify(axis.label)
    box = [value]
    with rank_times.waiting():
        dist.broadcast_object_list(box, axis.ranks[source], group=axis.group)
    return box[0]


def all_gather_object(value, axis: Axis) -> list:
    """Gather small picklable values of all ranks of the axis, in rank order. For checks, not for steps."""
    if axis.size == 1:
        return [value]
    GroupListener.notify(axis.label)
    values = [None] * axis.size
    with rank_times.waiting():
        dist.all_gather_object(values, value, group=axis.group)
    return values


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has called this."""
    if axis.size > 1:
        GroupListener.notify(axis.label)
        nccl = dist.get_backend(axis.group) == "nccl"  # its barrier is an all-reduce, which needs a device
        with rank_times.waiting():
            dist.barrier(group=axis.group, device_ids=[torch.cuda.current_device()] if nccl else None)
