# SPDX-License-Identifier: Apache-2.0
"""Casts to fp8: a program reads a block of 128 x 128 numbers once, and writes it as rows, as columns, or as both.

Largest numbers are compared as bits, in whose order NaN is above all others, so no NaN is lost. A tile with inf or NaN gets
the scale inf, and its numbers are multiplied by 0: inf and NaN become NaN, as in `fused_kernels/fp8.py`.

Triton's interpreter rounds to fp8 in its own way. There numbers are written in fp32, and torch casts them (`_out`).

Legend: n rows, K columns of x, P rows of x with those of zeros after them, W columns (or rows) of a tile.
"""

import math
from typing import Optional

import torch
import triton
import triton.language as tl

from megatron.fused_kernels.fp8 import ROWS, TOP_EXPONENT, Scaled, ScaleTile, padded_to

BLOCK = 128
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _scale(bits, TOP: tl.constexpr):
    """(scale, its inverse) of a tile from the bits of its largest absolute value."""
    exponent = (bits >> 23) - TOP + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 254)
    exponent = tl.where(bits == 0, 127, exponent)
    whole = bits < 0x7F800000
    scale = tl.where(whole, exponent << 23, 0x7F800000).to(tl.float32, bitcast=True)
    return scale, tl.where(whole, (254 - exponent) << 23, 0).to(tl.float32, bitcast=True)


@triton.jit
def _fp8(v, LARGEST: tl.constexpr):
    v = tl.minimum(v, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(v, -LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def cast_kernel(
    x, x_scales, amax, rows, row_scales, columns, column_scales, n, P, K: tl.constexpr,
    W: tl.constexpr, EACH_ROW: tl.constexpr, SQUARE: tl.constexpr, FROM_CAST: tl.constexpr, TOP: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """W: 0 for a tile that is all of x, or EACH_ROW of it, whose largest values are in `amax`. FROM_CAST: x is fp8, with
    `x_scales` of 1 x W.
    """
    r = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    c = tl.program_id(1).to(tl.int64) * B + tl.arange(0, B)
    inside = (r < n)[:, None] & (c < K)[None, :]
    v = tl.load(x + r[:, None] * K + c[None, :], inside, 0.0).to(tl.float32)
    T: tl.constexpr = B // W if W > 0 else 1  # tiles of a block in a direction
    t = tl.arange(0, T)
    across, down = tl.program_id(1) * T + t, tl.program_id(0) * T + t
    A: tl.constexpr = (K + W - 1) // W if W > 0 else 1
    if FROM_CAST:
        of_tile = x_scales + r[:, None] * A + across[None, :]
        s = tl.load(of_tile, (r < n)[:, None] & (across < A)[None, :], 1.0)
        v = (v.reshape(B, T, W) * s[:, :, None]).reshape(B, B)
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if W == 0:
        largest = tl.load(amax + r * EACH_ROW, r < n, 0.0).to(tl.float32).to(tl.int32, bitcast=True)
        scale, inverse = _scale(largest & 0x7FFFFFFF, TOP)
        v = _fp8(v * inverse[:, None], LARGEST)
        if tl.program_id(1) == 0:
            tl.store(row_scales + r, scale, r < (n if EACH_ROW else 1))
    elif SQUARE:
        scale, inverse = _scale(tl.max(tl.max(bits, 1), 0), TOP)
        v = _fp8(v * inverse, LARGEST)
        if ROWS:
            tl.store(row_scales + tl.program_id(0).to(tl.int64) * A + tl.program_id(1), scale)
        if COLUMNS:
            tl.store(column_scales + tl.program_id(1).to(tl.int64) * (P // W) + tl.program_id(0), scale)
    if ROWS:
        q = v
        if W > 0 and not SQUARE:
            scale, inverse = _scale(tl.max(bits.reshape(B, T, W), 2), TOP)
            q = _fp8((v.reshape(B, T, W) * inverse[:, :, None]).reshape(B, B), LARGEST)
            at = row_scales + r[:, None] * A + across[None, :]
            tl.store(at, scale, (r < n)[:, None] & (across < A)[None, :])
        tl.store(rows + r[:, None] * K + c[None, :], q.to(rows.dtype.element_ty), inside)
    if COLUMNS:
        q = v
        if W > 0 and not SQUARE:
            scale, inverse = _scale(tl.max(bits.reshape(T, W, B), 1), TOP)
            q = _fp8((v.reshape(T, W, B) * inverse[:, None, :]).reshape(B, B), LARGEST)
            at = column_scales + c[None, :] * (P // W) + down[:, None]
            tl.store(at, scale, (c < K)[None, :] & (down < P // W)[:, None])
        within = (c < K)[:, None] & (r < P)[None, :]
        tl.store(columns + c[:, None] * P + r[None, :], tl.trans(q).to(columns.dtype.element_ty), within)


def _out(shape: tuple[int, int], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32 if INTERPRETED else dtype, device=like.device)


def _cast(
    x: torch.Tensor,
    scales: Optional[torch.Tensor],
    tile: ScaleTile,
    dtype: torch.dtype,
    amax: Optional[torch.Tensor],
    rows: bool,
    columns: bool,
) -> tuple[torch.Tensor, ...]:
    x, (n, k), w = (x.float() if INTERPRETED else x).contiguous(), x.shape, tile.columns
    square, each_row, padded = tile.rows > 1, tile == ROWS, padded_to(n, tile)
    if each_row and amax is None:
        amax = torch.linalg.vector_norm(x, math.inf, 1)
    of = lambda size: (-(-size // w)) if w else 1
    made = []
    for wanted, (length, width) in ((rows, (n, k)), (columns, (k, padded))):
        shape = (length, of(width)) if each_row or w and not square else (of(length), of(width))
        scale = torch.empty(shape, dtype=torch.float32, device=x.device)
        made.append((_out((length, width), x, dtype), scale) if wanted else (None, scale if not w else None))
    if not w:  # one scale for both
        made[1] = (made[1][0], made[0][1])
    cast_kernel[triton.cdiv(padded if columns else n, BLOCK), triton.cdiv(k, BLOCK)](
        x, scales, amax, *made[0], *made[1], n, padded, K=k, W=w, EACH_ROW=each_row, SQUARE=square,
        FROM_CAST=scales is not None, TOP=TOP_EXPONENT[dtype], LARGEST=torch.finfo(dtype).max, ROWS=rows, COLUMNS=columns,
        B=BLOCK, num_warps=8,
    )  # fmt: skip
    kept = [pair for pair, wanted in zip(made, (rows, columns), strict=True) if wanted]
    return tuple(one for values, scale in kept for one in (values.to(dtype), scale))


def fp8_cast(
    x: torch.Tensor,
    tile: ScaleTile,
    dtype: torch.dtype,
    amax: Optional[torch.Tensor] = None,
    rows: bool = True,
    columns: bool = False,
) -> tuple[torch.Tensor, ...]:
    """See `fp8.fp8_cast`."""
    return _cast(x, None, tile, dtype, amax, rows, columns)


def fp8_turn(scaled: Scaled, tile: ScaleTile) -> Scaled:
    """See `fp8.fp8_turn`."""
    values, scales = scaled
    if tile.columns:
        return _cast(values, scales, tile, values.dtype, None, rows=False, columns=True)
    largest = torch.full((1, 1), torch.finfo(values.dtype).max, device=values.device)  # whose scale is 1
    return _cast(values, None, tile, values.dtype, largest, rows=False, columns=True)[0], scales
