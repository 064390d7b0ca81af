# SPDX-License-Identifier: Apache-2.0
"""Attention of ranks that share sequences, with keys and values that travel round a ring (arXiv:2310.01889).

Each rank keeps its queries. In steps it attends to its own keys and values, then to those of the rank before it, and so on.
Before a step computes, it sends the present keys and values on and posts the receive of the following ones: the messages
overlap with the step's attention. Results of steps are merged by their log-sum-exp (`fused_kernels.partial_attention`).
Four ranks, rank 1:

    step          0          1          2          3
    keys of       rank 1     rank 0     rank 3     rank 2
    overlapping   0 -> 1     3 -> 1     2 -> 1

The backward pass sends keys and values round again. The gradients of a rank's keys and values travel with them, one step
later, in fp32: each rank adds its part, and after the last step they arrive at their own rank.

Chunks of zigzag order that no query sees (`mpu.chunks`) are not computed: each step has half of the pairs, the same number
on each rank. Blocks skip ranks that see none of their keys, because of a window or documents. No rank holds more than three
blocks of keys and values: its own, the present one and the arriving one.

Legend: s rows of a rank, t all rows of a sequence, b micro-batch, g key-value groups, q queries per group, d channels of
keys, v of values, often d.
"""

from functools import lru_cache, partial
from typing import NamedTuple, Optional

import numpy as np
import torch

from megatron.fused_kernels import choose_kernel
from megatron.fused_kernels.autocast import op
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.dropout import DropoutMask
from megatron.fused_kernels.explicit_attention import Rectangle, Scores, largest_in
from megatron.fused_kernels.partial_attention import gradient_of_sinks, merge
from megatron.mpu import collectives
from megatron.mpu.chunks import chunk_pairs, own_chunks, part_of_chunks, parts_between, ring_distances
from megatron.mpu.mesh import Axis


class RingStep(NamedTuple):
    """The attention to the keys of the rank `distance` places before."""

    distance: int
    rectangles: tuple[Rectangle, ...]


Steps = tuple[RingStep, ...]  # at the same distances on each rank


@lru_cache(maxsize=64)
def ring_steps(t: int, rank: int, size: int, window: Optional[int]) -> Steps:
    """The steps of a rank without documents."""
    parts = {distance: parts_between(t, rank, (rank - distance) % size, size, window) for distance in range(size)}
    return tuple(
        RingStep(distance, tuple(map(_rectangle, parts[distance]))) for distance in ring_distances(t, size, window)
    )


def ring_steps_of_documents(starts: np.ndarray, ring: Axis, window: Optional[int], device) -> Steps:
    """The steps of a rank for packed documents, from the first position [b, t] of each token's document.

    Of the documents of a chunk of keys, only the last one can go on in a later chunk of queries. So two chunks are a
    rectangle for each sample, without a mask of documents.
    """
    (t, size, rank), steps = (starts.shape[1], ring.size, ring.rank), []
    c, own = t // (2 * size), own_chunks(t, rank, size)
    for distance in _distances_of_documents(starts, size, window):
        rectangles = []
        for pair in chunk_pairs(rank, (rank - distance) % size, size):
            if pair.query == pair.key:
                start, stop = own[pair.query_place]
                documents = Documents.of(starts, device, rows=(start, stop), first=start)
                rectangles.append(_rectangle(part_of_chunks(c, *pair, window), documents=documents))
            else:
                rectangles += _rectangles_of_samples(starts, c, pair, window)
        steps.append(RingStep(distance, tuple(rectangles)))
    return tuple(steps)


def _distances_of_documents(starts: np.ndarray, size: int, window: Optional[int]) -> list[int]:
    """`ring_distances`, of documents that reach from a chunk into another one. The same on all ranks."""
    t, numbers = starts.shape[1], np.arange(2 * size)
    c, ranks = t // (2 * size), np.minimum(numbers, numbers[::-1])
    begins = starts[:, ::c].min(0)  # of the first query of each chunk, in any sample
    keys, queries = numbers, numbers[:, None]
    seen = (keys < queries) & (begins[:, None] < keys * c + c)
    if window is not None:
        seen &= (queries - keys) * c - c < window  # between the first query and the last key
    return sorted({0, *((ranks[:, None] - ranks)[seen] % size).tolist()})


def _rectangles_of_samples(starts: np.ndarray, c: int, pair, window: Optional[int]) -> list[Rectangle]:
    """Of a chunk of queries and an earlier chunk of keys: the part of each sample's document that is in both."""
    rectangles = []
    for sample, begins in enumerate(starts[:, pair.query * c : pair.query * c + c]):
        queries = int((begins < pair.key * c + c).sum())
        first = max(0, int(begins[0]) - pair.key * c)
        part = part_of_chunks(c, *pair, window, queries, first) if queries else None
        if part is not None:
            rectangles.append(_rectangle(part, samples=slice(sample, sample + 1)))
    return rectangles


def _rectangle(part, **more) -> Rectangle:
    return Rectangle(slice(*part.rows), slice(*part.keys), part.causal, part.window, **more)


@op
def scaled_dot_product_attention(
    query, key, value, layer, steps: Steps, dropout: Optional[DropoutMask] = None
) -> torch.Tensor:
    """softmax(q k) v over the rows of all ranks of a ring: [s, b, g, q, d] over [s, b, g, d or v] -> [s, b, g q v].

    layer: an `Attention`, with the ring. dropout: words of the rank's own queries, [b, g q, s, t], in the sequence's order
    """
    s, b, g, q, d = query.shape
    documents = any(rectangle.documents for step in steps for rectangle in step.rectangles)
    case = layer.case(query, s, s, dropout=dropout is not None, documents=documents)
    kernel = choose_kernel("partial_attention", case, layer.backend).run
    scores = Scores(layer.scale, layer.score_divisor, layer.softcap, 1.0 if dropout is None else dropout.factor)
    kept = None if dropout is None else dropout.mask()
    query = query.reshape(s, b, g * q, d)
    sinks = layer.sinks(g) if layer.has_sinks else None
    watch = layer.max_logits and partial(layer.see_logits, largest=largest_in)
    attended = _RingAttention.apply(query, key, value, sinks, kept, layer.sharing.rows, steps, kernel, scores, watch)
    return attended.flatten(2)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, kept, ring, steps, kernel, scores, watch=None):
        total = query.new_zeros((*query.shape[:3], value.shape[-1]), dtype=torch.float32)
        lse = total.new_full(query.shape[:3], float("-inf"))
        if sinks is not None:  # as a part of the keys, without values
            lse.copy_(sinks.detach().flatten().expand_as(lse))
        arriving, message = torch.cat((key, value), -1), collectives.Done()
        for step, places in zip(steps, _moves(steps, ring)):
            message.wait()
            present = arriving
            if step is not steps[-1]:
                arriving, message = collectives.start_shift(present, ring, places)
            if watch is not None:
                by_group, keys = query.unflatten(2, (key.shape[2], -1)), present[..., : key.shape[-1]]
                watch(by_group, key=keys, rectangles=step.rectangles, scale=scores.scale)
            for rectangle in step.rectangles:
                operands = (query[rectangle.rows, rectangle.samples], *_of_keys(present, rectangle, key.shape[-1]))
                result = kernel.forward(*operands, rectangle, scores, _of_pairs(kept, rectangle, ring, step.distance))
                at = rectangle.rows, rectangle.samples
                merge(total[at], lse[at], *result)
        attended = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, attended, lse, sinks, kept)
        ctx.of = ring, steps, kernel, scores
        return attended

    @staticmethod
    def backward(ctx, gradient):
        (query, key, value, attended, lse, sinks, kept), (ring, steps, kernel, scores) = ctx.saved_tensors, ctx.of
        gradient, d = gradient.contiguous(), key.shape[-1]
        d_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        arriving, message = torch.cat((key, value), -1), collectives.Done()
        sums, sums_message = None, collectives.Done()  # gradients of the present keys and values by the ranks before
        for step, places in zip(steps, _moves(steps, ring)):
            message.wait()
            present = arriving
            if step is not steps[-1]:
                arriving, message = collectives.start_shift(present, ring, places)
            own = torch.zeros(present.shape, dtype=torch.float32, device=present.device)
            for rectangle in step.rectangles:
                at = rectangle.rows, rectangle.samples
                operands = (gradient[at], query[at], *_of_keys(present, rectangle, d), attended[at], lse[at])
                parts = kernel.backward(*operands, rectangle, scores, _of_pairs(kept, rectangle, ring, step.distance))
                d_query[at] += parts[0]
                for total, part in zip(_of_keys(own, rectangle, d), parts[1:]):
                    total += part
            sums_message.wait()
            if sums is not None:
                own += sums
            sums, sums_message = collectives.start_shift(own, ring, places)
        sums_message.wait()
        d_key, d_value = sums[..., :d], sums[..., d:]
        d_sinks = None if sinks is None else gradient_of_sinks(gradient, attended, lse, sinks)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, *[None] * 6


def _moves(steps: Steps, ring: Axis) -> list[int]:
    """How many places further the keys of each step are needed next; after the last step, to their own rank."""
    distances = [step.distance for step in steps] + [ring.size]
    return [after - before for before, after in zip(distances, distances[1:])]


def _of_keys(both: torch.Tensor, rectangle: Rectangle, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a rectangle, from [s, b, g, d + v]."""
    own = both[rectangle.keys, rectangle.samples]
    return own[..., :d], own[..., d:]


def _of_pairs(kept: Optional[torch.Tensor], rectangle: Rectangle, ring: Axis, distance: int) -> Optional[torch.Tensor]:
    """The dropout mask [b, h, n, m] of a rectangle. kept: [b, h, s, t], with keys in the order of the sequence."""
    if kept is None:
        return None
    source, t = (ring.rank - distance) % ring.size, kept.shape[-1]
    of_rank = torch.cat(
        [kept[:, :, rectangle.rows, start:stop] for start, stop in own_chunks(t, source, ring.size)], -1
    )
    return of_rank[rectangle.samples, :, :, rectangle.keys]
