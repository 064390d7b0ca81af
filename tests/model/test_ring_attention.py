# SPDX-License-Identifier: Apache-2.0
"""Ring attention with each of its kernels, against a softmax over all pairs in fp64. Ranks are threads; CUDA has a test if
there is a device.
"""

import itertools
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.fused_kernels import TABLE, Case
from megatron.fused_kernels.explicit_attention import Explicit, Scores
from megatron.fused_kernels.partial_attention import FlashOnCPU
from megatron.model import ring_attention
from megatron.mpu import collectives
from megatron.mpu.chunks import chunk_pairs, parts_between, row_numbers
from megatron.mpu.mesh import Axis

T, B = 192, 2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _seen(starts, window):
    """[b, t, t] bool, pair by pair."""
    order = torch.arange(T)
    seen = (order <= order[:, None]).expand(B, T, T)
    if window is not None:
        seen = seen & (order >= order[:, None] - window)
    return seen if starts is None else seen & (order >= torch.from_numpy(starts)[:, :, None])


def _dense(query, key, value, sinks, seen, scores, kept):
    """[t, b, h, d] of fp64."""
    key, value = (x.repeat_interleave(query.shape[2] // key.shape[2], 2) for x in (key, value))
    logits = torch.einsum("sbhd,tbhd->bhst", query, key) * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~seen[:, None].to(logits.device), float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.flatten()[None, :, None, None].expand(*logits.shape[:3], 1)), -1)
    weights = logits.softmax(-1)[..., : len(key)]
    weights = weights if kept is None else weights * kept * scores.factor
    return torch.einsum("bhst,tbhd->sbhd", weights, value)


class _Threads:
    """Ranks of a ring, each a thread; a queue for each pair of them."""

    def __init__(self, size):
        pairs = list(itertools.product(range(size), repeat=2))
        self.queues, self.came = {pair: queue.Queue() for pair in pairs}, {pair: [] for pair in pairs}
        self.posted, self.sent = {pair: itertools.count() for pair in pairs}, 0

    def start_shift(self, x, axis, places):
        if places % axis.size == 0:
            return x, collectives.Done()
        self.sent += 1
        arrived, ahead, behind = torch.empty_like(x), *((axis.rank + way) % axis.size for way in (places, -places))
        self.queues[axis.rank, ahead].put(x.clone())
        order = next(self.posted[behind, axis.rank])
        return arrived, SimpleNamespace(wait=lambda: arrived.copy_(self.message((behind, axis.rank), order)))

    def message(self, pair, order):
        """Messages arrive in the order of their receives, in which they need not be waited for."""
        while len(self.came[pair]) <= order:
            self.came[pair].append(self.queues[pair].get(timeout=60))
        return self.came[pair][order]


def _in_ring(monkeypatch, size, rank_body):
    """rank_body(axis) of all ranks at the same time."""
    monkeypatch.setattr(collectives, "start_shift", _Threads(size).start_shift)
    found, failed = [None] * size, []

    def run(rank):
        try:
            found[rank] = rank_body(Axis("cp", tuple(range(size)), rank))
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


class _Saved:
    """The context of an autograd function."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


STARTS = np.zeros((B, T), np.int32)
STARTS[0, 70:], STARTS[0, 150:], STARTS[1, 5:], STARTS[1, 96:] = 70, 150, 5, 96
SHORT = np.repeat(np.arange(0, T, 24, dtype=np.int32), 24)[None].repeat(B, 0)  # in chunks of two and of four ranks
PAIR = SHORT.copy()
PAIR[1, 48:72] = 24  # one document of two chunks of four ranks
CASES = {  # window, documents, softcap, dropout, heads, groups, channels; names with "sinks" have them
    "plain": (None, None, None, 0.0, 4, 4, 16),
    "grouped": (None, None, None, 0.0, 4, 2, 16),
    "narrow window": (7, None, None, 0.0, 4, 4, 16),
    "window of a chunk": (48, None, None, 0.0, 4, 2, 16),
    "wide window": (130, None, None, 0.0, 2, 2, 20),
    "documents in chunks": (None, SHORT, None, 0.0, 4, 4, 16),
    "a document of two ranks": (None, PAIR, None, 0.0, 4, 2, 16),
    "documents": (None, STARTS, None, 0.0, 4, 2, 16),
    "documents and window": (60, STARTS, None, 0.0, 4, 4, 16),
    "cap and dropout": (None, STARTS, 1.5, 0.3, 4, 2, 16),
    "sinks": (None, None, None, 0.0, 4, 2, 16),
    "sinks, documents and window": (60, STARTS, None, 0.0, 4, 4, 16),
    "sinks, cap and dropout": (7, None, 1.5, 0.3, 4, 2, 16),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_is_a_softmax_over_all_pairs(case, size, device, monkeypatch):
    window, starts, softcap, p, heads, groups, d = CASES[case]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator().manual_seed(1)
    drawn = lambda *shape: torch.randn(shape, generator=generator).to(dtype).to(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = [drawn(T, B, n, d) for n in (heads, groups, groups)]
    upstream = drawn(T, B, heads, d)
    kept = (torch.rand(B, heads, T, T, generator=generator) > p).to(device) if p else None
    scores = Scores(d**-0.5, 1.0, softcap, 1 / (1 - p))
    sinks = torch.linspace(-2, 3, heads).view(groups, -1).to(dtype).to(device) if "sinks" in case else None
    exact = [x.double().requires_grad_() for x in (*inputs, *([] if sinks is None else [sinks]))]
    value = _dense(*exact[:3], exact[3] if len(exact) > 3 else None, _seen(starts, window), scores, kept)
    wanted = [value, *torch.autograd.grad(value, exact, upstream.double())]
    marks = dict(dropout=p > 0, grouped=groups < heads, softcap=softcap is not None, documents=starts is not None)
    marks |= dict(sinks=sinks is not None)
    asked = Case(device, dtype, T // size, T // size, True, window=window, head_dim=d, **marks)
    fitting = [entry for entry in TABLE["partial_attention"] if entry.fits(asked)]
    assert len(fitting) == (1 if p else 2)  # flash attention has no caps and no masks of dropout
    for entry in fitting:

        def body(axis, kernel=entry.run):
            rows = row_numbers(T, axis.rank, size)
            if starts is not None:
                steps = ring_attention.ring_steps_of_documents(starts, axis, window, torch.device(device))
            else:
                steps = ring_attention.ring_steps(T, axis.rank, size, window)
            own, saved = [x[rows] for x in inputs], _Saved()
            mask = None if kept is None else kept[:, :, rows]
            attended = ring_attention._RingAttention.forward(saved, *own, sinks, mask, axis, steps, kernel, scores)
            gradients = ring_attention._RingAttention.backward(saved, upstream[rows])
            return rows, (attended, *gradients[:3]), gradients[3]

        of_ranks = _in_ring(monkeypatch, size, body)
        if sinks is not None:  # each rank has the part of its rows
            total, want = sum(gradient.double() for *_, gradient in of_ranks), wanted[4]
            assert (total - want).abs().max() < (2e-2 if device == "cuda" else 2e-5) * want.abs().max(), entry.name
        for rows, found, _ in of_ranks:
            for mine, want in zip(found, wanted[:4], strict=True):
                want = want[rows]
                assert mine.dtype == dtype
                tolerance = (2e-2 if device == "cuda" else 1e-5) * want.abs().max()
                assert (mine.double() - want).abs().max() < tolerance, (entry.name, case)


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an op returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, torch.Tensor):
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("kernel", [FlashOnCPU, Explicit])
def test_no_tensor_grows_with_the_sequence(kernel, monkeypatch):
    """As many rows a rank on more ranks: the largest tensors are a rank's own, in fp32, or the scores of a block."""
    monkeypatch.setattr(collectives, "start_shift", lambda x, axis, places: (torch.empty_like(x), collectives.Done()))
    s, b, h, d, found = 64, 1, 4, 16, []
    for size in (2, 8):
        steps = ring_attention.ring_steps(s * size, size // 2, size, None)
        saved = _Saved()
        own, ring = [torch.randn(s, b, h, d) for _ in range(4)], Axis("cp", tuple(range(size)), size // 2)
        with _Largest() as seen:
            ring_attention._RingAttention.forward(saved, *own[:3], None, None, ring, steps, kernel, Scores(0.25))
            ring_attention._RingAttention.backward(saved, own[3])
        found.append(seen.largest)
    assert found[0] == found[1] <= 4 * b * h * max(2 * s * d, s * s)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [None, 0, 1, 3, 4, 5, 11, 12, 30])
def test_parts_cover_each_visible_pair_once(size, window):
    """Pair by pair; windows of a part are counted as if its queries were the last of its keys."""
    t = 8 * size
    for rank in range(size):
        rows, found = row_numbers(t, rank, size), np.zeros((t, t), int)
        for source in range(size):
            columns = row_numbers(t, source, size)
            for part in parts_between(t, rank, source, size, window):
                (q0, q1), (k0, k1) = part.rows, part.keys
                for i in range(q1 - q0):
                    for j in range(k1 - k0):
                        place = i + (k1 - k0) - (q1 - q0)
                        near = part.window is None or place - j <= part.window
                        found[rows[q0 + i], columns[k0 + j]] += near and (not part.causal or j <= i)
        wanted = [[int(0 <= i - j <= (t if window is None else window)) for j in range(t)] for i in range(t)]
        for row in rows:
            assert found[row].tolist() == wanted[row]


def test_a_step_has_as_many_pairs_on_each_rank():
    """Half of all pairs of a rank with another, so that no rank waits for another one's attention."""
    for size in (2, 3, 8):
        pairs = lambda part: (part.rows[1] - part.rows[0]) * (part.keys[1] - part.keys[0])
        for step in range(1, size):
            counts = {
                sum(map(pairs, parts_between(16 * size, rank, (rank - step) % size, size))) for rank in range(size)
            }
            assert counts == {16 * 16 // 2}


def test_documents_that_end_before_are_not_computed():
    """Documents of a chunk: no rectangle but those of a chunk with itself, and no message."""
    t, size = 96, 3
    starts = np.repeat(np.arange(0, t, 16, dtype=np.int32), 16)[None]
    for rank in range(size):
        ring = Axis("cp", tuple(range(size)), rank)
        [(distance, own)] = ring_attention.ring_steps_of_documents(starts, ring, None, torch.device("cpu"))
        assert distance == 0 and len(own) == 2 and all(rectangle.causal for rectangle in own)
        assert sum(pair.query == pair.key for pair in chunk_pairs(rank, rank, size)) == 2


def test_blocks_skip_ranks_that_see_none_of_their_keys():
    """Of eight ranks with a window of a chunk only neighbours see each other: early chunks those of the rank before, late
    chunks those of the rank after. Documents that are longer in one sample set the way for all.
    """
    t, size, c = 256, 8, 16
    for window, distances in ((c, [0, 1, 7]), (c + 1, [0, 1, 2, 6, 7]), (None, list(range(8)))):
        for rank in range(size):
            steps = ring_attention.ring_steps(t, rank, size, window)
            assert [step.distance for step in steps] == distances
    starts = np.repeat(np.arange(0, t, c, dtype=np.int32), c)[None].repeat(2, 0)
    starts[1, 2 * c : 3 * c] = c  # of the second sample, chunks 1 and 2 are one document: ranks 1 and 2
    starts[1, 13 * c : 14 * c] = 12 * c  # chunks 12 and 13: ranks 3 and 2
    for rank in range(size):
        steps = ring_attention.ring_steps_of_documents(starts, Axis("cp", tuple(range(size)), rank), None, "cpu")
        assert [step.distance for step in steps] == [0, 1, 7]
        found = [(step.distance, rectangle.samples.start) for step in steps for rectangle in step.rectangles[:2]]
        assert [pair for pair in found if pair[0]] == ([(1, 1), (7, 1)] if rank == 2 else [])
