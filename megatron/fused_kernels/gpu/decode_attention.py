# SPDX-License-Identifier: Apache-2.0
"""Attention of texts' newest tokens over a cache in blocks. A program has the queries of one group and a part of a text's
tokens, whose places it looks up in the table of blocks; a second kernel joins the parts (arXiv:2311.01282, section 3).

Parts have a fixed number of tokens, and empty ones add zeros: a text's result does not depend on the others, to the bit.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from megatron.fused_kernels.decode_attention import Places

PART = 256  # tokens of a text for one program
BYTES = 32 << 10  # of keys that it reads at a time, and of values; at most 64 tokens
LEAST = 16  # rows and columns of a product


@triton.jit
def part_kernel(
    query,
    keys,
    values,
    blocks,
    lengths,
    sinks,
    attended,
    log_sums,
    scale,
    softcap,
    window,
    most_blocks,
    G,
    Q: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    text, group, part = (tl.program_id(0) // G).to(tl.int64), tl.program_id(0) % G, tl.program_id(1)
    length = tl.load(lengths + text)
    start, stop = part * TOKENS, tl.minimum(length, (part + 1) * TOKENS)
    if WINDOWED:
        start = tl.maximum(start, length - 1 - window)
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    first = (text * G + group) * Q  # row of the queries
    own = (row < Q)[:, None] & (channel < D)[None, :]
    q = tl.load(query + (first + row)[:, None] * D + channel[None, :], own, 0.0)
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # of a key without a value, in the first part
        if part == 0:
            best = tl.load(sinks + group * Q + row, row < Q, 0.0).to(tl.float32)
            total += 1.0
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(start, stop, STEP):
        token = at + tl.arange(0, STEP)
        seen = token < stop
        block = tl.load(blocks + text * most_blocks + token // BLOCK, seen, 0).to(tl.int64)
        place = (block * BLOCK + token % BLOCK) * G + group
        k = tl.load(keys + place[None, :] * D + channel[:, None], seen[None, :] & (channel < D)[:, None], 0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale  # [ROWS, STEP]
        if CAPPED:
            capped = 2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0  # tanh
            scores = capped * softcap
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(best - higher)
        v = tl.load(values + place[:, None] * D + channel[None, :], seen[:, None] & (channel < D)[None, :], 0.0)
        summed = summed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        best = higher
    some = tl.where(total > 0.0, total, 1.0)
    place = (part.to(tl.int64) * tl.num_programs(0) * Q + first) + row
    result = (summed / some[:, None]).to(attended.dtype.element_ty)
    tl.store(attended + place[:, None] * D + channel[None, :], result, own)
    tl.store(log_sums + place, tl.where(total > 0.0, best + tl.log(some), float("-inf")), row < Q)


@triton.jit
def join_kernel(parts, log_sums, attended, count, D: tl.constexpr, WIDTH: tl.constexpr):
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    best, total = -1e30, 0.0
    summed = tl.zeros([WIDTH], tl.float32)
    for part in range(count):
        place = part * tl.num_programs(0) + row
        log_sum = tl.load(log_sums + place)
        higher = tl.maximum(best, log_sum)
        kept, weight = tl.exp(best - higher), tl.exp(log_sum - higher)
        summed = summed * kept + weight * tl.load(parts + place * D + channel, channel < D, 0.0)
        total = total * kept + weight
        best = higher
    tl.store(attended + row * D + channel, (summed / total).to(attended.dtype.element_ty), channel < D)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: Places,
    *,
    scale: float,
    softcap: Optional[float] = None,
    window: Optional[int] = None,
    sinks: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """See `reference.decode_attention`."""
    query = query.contiguous()
    n, g, q, d = query.shape
    rows, width = (max(LEAST, triton.next_power_of_2(size)) for size in (q, d))
    count, attended = triton.cdiv(places.longest, PART), query.new_empty((n, g * q * d))
    parts = attended if count == 1 else query.new_empty((count, n * g * q, d), dtype=torch.float32)
    log_sums = query.new_empty((count, n * g * q), dtype=torch.float32)
    part_kernel[n * g, count](
        query,
        keys,
        values,
        places.blocks,
        places.lengths,
        log_sums if sinks is None else sinks.contiguous(),
        parts,
        log_sums,
        scale,
        1.0 if softcap is None else softcap,
        0 if window is None else window,
        places.blocks.shape[1],
        g,
        Q=q,
        D=d,
        ROWS=rows,
        WIDTH=width,
        BLOCK=places.block_size,
        STEP=min(64, BYTES // (width * keys.element_size())),
        TOKENS=PART,
        CAPPED=softcap is not None,
        WINDOWED=window is not None,
        SINKS=sinks is not None,
        num_warps=4 if width < 256 else 8,
    )
    if count > 1:
        join_kernel[n * g * q,](parts, log_sums, attended, count, D=d, WIDTH=width, num_warps=1)
    return attended
