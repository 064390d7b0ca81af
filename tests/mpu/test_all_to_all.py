# SPDX-License-Identifier: Apache-2.0
"""All-to-all with uneven parts, against indexing in one process: values, gradients, and the order of events."""

import random
import time

import pytest
import torch

from megatron.mpu import collectives, mappings
from megatron.mpu.mesh import Mesh

FORMATS = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.float8_e4m3fn]


def splits(ranks: int, number: int) -> list[list[list[int]]]:
    """Tables sent[from][to] of rows, some of ranks that send or get nothing, and one in which nobody sends anything."""
    numbers = random.Random(ranks)
    tables = [[[numbers.choice((0, 0, 1, 2, 5)) for _ in range(ranks)] for _ in range(ranks)] for _ in range(number)]
    tables[0] = [[0] * ranks for _ in range(ranks)]
    tables[1][0] = [0] * ranks  # sends nothing
    for row in tables[2]:
        row[-1] = 0  # gets nothing
    return tables


def inputs(rank: int, rows: int, salt: int, dtype=torch.float64) -> torch.Tensor:
    x = torch.empty(rows, 3, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(100 * salt + rank))
    return x.mul(9).to(dtype)


def arrivals(xs: list[torch.Tensor], sent: list[list[int]], rank: int) -> torch.Tensor:
    """The rows for a rank, by indexing."""
    return torch.cat([x.split(rows)[rank] for x, rows in zip(xs, sent, strict=True)])


def received(sent: list[list[int]], rank: int) -> list[int]:
    return [rows[rank] for rows in sent]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rows_and_their_gradients(ranks, run_ranks):
    """Counts as lists and tensors, said for both directions or one; gradients to the bit, also of expanded ones."""
    tables = splits(ranks, 12)
    weigh = lambda rank, salt: inputs(rank, 1, 50 + salt)

    def body(rank):
        axis, found = Mesh(rank, ep=ranks, shard=ranks).ep, []
        for salt, sent in enumerate(tables):
            own, others = sent[rank], received(sent, rank)
            x = inputs(rank, sum(own), salt).requires_grad_()
            # Columns in another order: neither the input nor its gradient is contiguous.
            rows, flipped = inputs(rank, sum(own), salt).t().contiguous().t().requires_grad_(), [2, 0, 1]
            ways = ((own, others), (torch.tensor(own), None), (own, None), (torch.tensor(own), torch.tensor(others)))
            y = mappings.all_to_all(x, axis, *ways[salt % 4])
            z = mappings.all_to_all(rows, axis, own, others)
            ((y * y * weigh(rank, salt)).sum() + z[:, flipped].t().sum()).backward()
            found.append((y.detach(), x.grad, z.detach(), rows.grad))
        return found

    results = run_ranks(ranks, body)
    for salt, sent in enumerate(tables):
        xs = [inputs(rank, sum(sent[rank]), salt).requires_grad_() for rank in range(ranks)]
        wanted = [arrivals(xs, sent, rank) for rank in range(ranks)]
        sum((y * y * weigh(rank, salt)).sum() for rank, y in enumerate(wanted)).backward()
        for rank in range(ranks):
            y, gradient, z, ones = results[rank][salt]
            assert torch.equal(y, wanted[rank]) and torch.equal(z, y) and y.is_contiguous()
            assert torch.equal(gradient, xs[rank].grad) and torch.equal(ones, torch.ones_like(ones))


def test_gradients_are_those_of_finite_differences(run_ranks):
    """Through two exchanges with a function of each rank's own between, as through experts."""
    sent, step = [[1, 2], [3, 0]], 1e-6

    def through(axis, x, own, others):
        there = mappings.all_to_all(x, axis, own, others)
        return mappings.all_to_all(torch.sin(there * (1 + axis.rank)), axis, others, own)

    def body(rank):
        axis, own, others = Mesh(rank, ep=2, shard=2).ep, sent[rank], received(sent, rank)
        x = inputs(rank, 3, 7).requires_grad_()
        (through(axis, x, own, others) * inputs(rank, 3, 8)).sum().backward()
        slopes = torch.zeros_like(x)
        for place in range(x.numel()):
            moved = [x.detach().clone() for _ in range(2)]
            for each, by in zip(moved, (step, -step), strict=True):
                each.view(-1)[place] += by
            losses = [(through(axis, each, own, others) * inputs(rank, 3, 8)).sum() for each in moved]
            slopes.view(-1)[place] = (losses[0] - losses[1]) / (2 * step)
        return x.grad, slopes

    for gradient, slopes in run_ranks(2, body):
        torch.testing.assert_close(gradient, slopes, rtol=1e-6, atol=1e-6)


def test_all_formats(run_ranks):
    """Also those that gloo does not know, and rows of one and three dims; equal parts without counts."""
    sent = [[2, 0, 1], [0, 0, 3], [1, 4, 0]]

    def body(rank):
        axis, found = Mesh(rank, ep=3, shard=3).ep, []
        for dtype in FORMATS:
            x = inputs(rank, sum(sent[rank]), 1, dtype)
            found.append(collectives.all_to_all(x, axis, sent[rank]))
            found.append(collectives.all_to_all(x[:, 0], axis, sent[rank], received(sent, rank)))
            found.append(collectives.all_to_all(x.view(-1, 3, 1)[:0], axis))
            found.append(collectives.all_to_all(inputs(rank, 6, 2, dtype)[:, ::2], axis))
        return [(y.dtype, y.shape, bits(y)) for y in found]

    bits = lambda x: x.contiguous().view(torch.uint8)  # fp8 is not pickled
    for rank, found in enumerate(run_ranks(3, body)):
        for dtype, (y, column, none, even) in zip(FORMATS, zip(*[iter(found)] * 4, strict=True), strict=True):
            wanted = arrivals([inputs(r, sum(sent[r]), 1).to(dtype) for r in range(3)], sent, rank)
            assert y[0] == dtype and torch.equal(y[2], bits(wanted)) and none[1] == (0, 3, 1)
            assert torch.equal(column[2], bits(wanted[:, 0]))
            wanted = arrivals([inputs(r, 6, 2).to(dtype)[:, ::2] for r in range(3)], [[2] * 3] * 3, rank)
            assert torch.equal(even[2], bits(wanted))


def test_gradients_in_bf16(run_ranks):
    sent = [[3, 1], [0, 2]]

    def body(rank):
        x = inputs(rank, sum(sent[rank]), 3, torch.bfloat16).requires_grad_()
        y = mappings.all_to_all(x, Mesh(rank, ep=2, shard=2).ep, sent[rank])
        (y * (rank + 2)).sum().backward()
        return y.detach(), x.grad

    results = run_ranks(2, body)
    for rank, (y, gradient) in enumerate(results):
        assert torch.equal(y, arrivals([inputs(r, sum(sent[r]), 3, torch.bfloat16) for r in range(2)], sent, rank))
        factors = torch.tensor([2.0] * sent[rank][0] + [3.0] * sent[rank][1], dtype=torch.bfloat16)
        assert torch.equal(gradient, factors[:, None].expand(-1, 3))


class Noted(torch.autograd.Function):
    """The identity, which notes its passes."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append("work")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.events.append("work backward")
        return gradient, None


def test_what_runs_between_start_and_wait(run_ranks):
    """Other work of a rank comes after the launch and before the wait, in both passes; nobody waits in the launch."""

    def body(rank):
        axis, events, start = Mesh(rank, ep=2, shard=2).ep, [], collectives.start_all_to_all

        class Message:
            def __init__(self, work):
                self.work = work
                events.append("launch")

            def wait(self):
                self.work.wait()
                events.append("wait")

        collectives.start_all_to_all = lambda *args, **more: Message(start(*args, **more))
        x = inputs(rank, 4, 1).requires_grad_()
        own, others = ([3, 1], [3, 2]) if rank == 0 else ([2, 2], [1, 2])
        collectives.barrier(axis)
        if rank == 1:
            time.sleep(0.5)
        began = time.monotonic()
        pending = mappings.start_all_to_all(x, axis, own, others)
        launched = time.monotonic()
        beside = Noted.apply(x * 2, events)
        y = pending.wait()
        arrived = time.monotonic()
        y.mul_(2)  # what arrived belongs to the caller
        (y.sum() + beside.sum()).backward()
        return events, began, launched, arrived, x.grad

    (events, _, launched, arrived, gradient), (others, began, *_, last) = run_ranks(2, body)
    assert events == others == ["launch", "work", "wait", "launch", "work backward", "wait"]
    assert launched < began < arrived  # rank 0 has launched before rank 1 begins, and waits for it
    assert gradient.eq(4).all() and last.eq(4).all()


def test_two_exchanges_under_way(run_ranks):
    """Each has its own memory, whichever is waited for first."""

    def body(rank):
        axis = Mesh(rank, ep=2, shard=2).ep
        x = inputs(rank, 4, 1).requires_grad_()
        first = mappings.start_all_to_all(x, axis)
        second = mappings.start_all_to_all(x * 3, axis, [4, 0] if rank else [1, 3])
        (second.wait() * 5).sum().add(first.wait().sum()).backward()
        return x.grad

    for gradient in run_ranks(2, body):
        assert gradient.eq(16).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_without_gradients(mode, run_ranks):
    """In evaluation, and of an input that asks for no gradient."""

    def body(rank):
        with mode():
            y = mappings.all_to_all(inputs(rank, 3, 1), Mesh(rank, ep=2, shard=2).ep, [2, 1])
            return y.requires_grad, (y * 1).numpy()

    for rank, (asks, y) in enumerate(run_ranks(2, body)):
        assert not asks and torch.equal(
            torch.from_numpy(y), arrivals([inputs(r, 3, 1) for r in range(2)], [[2, 1]] * 2, rank)
        )


def test_an_axis_of_one_rank_keeps_its_rows():
    x = torch.ones(4, 2)
    assert mappings.all_to_all(x, Mesh().ep, [4]) is x and mappings.start_all_to_all(x, Mesh().ep).wait() is x
    arrived = torch.empty(4, 2)
    collectives.start_all_to_all(arrived, x, Mesh().ep).wait()
    assert torch.equal(arrived, x)


def test_counts_that_are_not_those_of_the_rows_are_refused():
    axis = Mesh(0, ep=2, shard=2, create_groups=False).ep
    for sent, said in (([1, 1], [2, 1]), ([3], [3]), (None, None)):
        with pytest.raises(AssertionError, match=r"3 rows(, \[| for 2 ranks)"):
            collectives.all_to_all(torch.ones(3, 2), axis, sent, said)


def test_counts_are_read_from_the_device_once(monkeypatch):
    """Not once for each direction, and not at all where they are lists."""
    reads, tolist, axis = [], torch.Tensor.tolist, Mesh(0, ep=2, shard=2, create_groups=False).ep
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x) or tolist(x))
    monkeypatch.setattr(collectives, "all_to_all", lambda x, axis: x + 1)  # of the counts
    assert collectives.row_counts(torch.ones(3, 2), axis, torch.tensor([2, 1])) == ([2, 1], [3, 2])
    assert len(reads) == 1
    assert collectives.row_counts(torch.ones(3, 2), axis, [2, 1], (0, 4)) == ([2, 1], [0, 4])
    assert len(reads) == 1
