# SPDX-License-Identifier: Apache-2.0
"""Permute and unpermute of experts' rows.

Forward and backward pass are two kernels with the roles exchanged: a token goes to the rows of its k experts, and the rows
of a token are added. Both read and write a token once, for all of its experts, so only `place` is needed, not `order`.
Rows without a pair are 0 before. Each row belongs to one pair at most: no additions meet, and results are the same in
every run.

Legend: n tokens, K experts of a token, m rows, H width. A program has a token, or a pair, and a block of columns.
"""

import torch
import triton
import triton.language as tl

WIDEST = 1024  # columns of a program
# The number of rows is another one in each step: no kernel is compiled anew for a multiple of 16.


@triton.jit(do_not_specialize=["m"])
def permute_kernel(x, place, rows, m, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + token * H + column, column < H, 0.0)
    for j in tl.static_range(K):
        row = tl.load(place + token * K + j)
        tl.store(rows + row * H + column, v, (column < H) & (row < m))


@triton.jit(do_not_specialize=["m"])
def unpermute_kernel(
    rows, weights, place, y, m, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(place + token * K + j)
        v = tl.load(rows + row * H + column, (column < H) & (row < m), 0.0).to(tl.float32)
        if WEIGHTED:
            v *= tl.load(weights + token * K + j).to(tl.float32)
        total += v
    tl.store(y + token * H + column, total.to(y.dtype.element_ty), column < H)


@triton.jit(do_not_specialize=["m"])
def unpermute_backward_kernel(
    gradient, rows, weights, place, d_rows, d_weights, m, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs of a token's pairs follow each other, so all but the first find its gradient in the cache."""
    pair = tl.program_id(0).to(tl.int64)
    row, weight = tl.load(place + pair), tl.load(weights + pair).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, H, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = (column < H) & (row < m)
        g = tl.load(gradient + (pair // K) * H + column, inside, 0.0).to(tl.float32)
        total += g * tl.load(rows + row * H + column, inside, 0.0).to(tl.float32)
        tl.store(d_rows + row * H + column, (g * weight).to(d_rows.dtype.element_ty), inside)
    tl.store(d_weights + pair, tl.sum(total, 0).to(d_weights.dtype.element_ty))


def _rows_of(x: torch.Tensor, place: torch.Tensor, m: int, k: int, whole: bool) -> torch.Tensor:
    """Tokens [n, h] -> the rows of their experts, [m, h]."""
    x, h = x.contiguous(), x.shape[1]
    rows = (x.new_empty if whole else x.new_zeros)((m, h))
    permute_kernel[_grid(len(x), h)](x, place, rows, m, H=h, K=k, **_sizes(h))
    return rows


def _sums(rows: torch.Tensor, place: torch.Tensor, k: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Rows [m, h] -> the sum of those of each token, [n, h]."""
    rows, (m, h) = rows.contiguous(), rows.shape
    y, weighted = rows.new_empty((len(place) // k, h)), weights is not None
    unpermute_kernel[_grid(len(y), h)](rows, weights, place, y, m, H=h, K=k, WEIGHTED=weighted, **_sizes(h))
    return y


def _grid(count: int, h: int) -> tuple[int, int]:
    return count, triton.cdiv(h, _sizes(h)["BLOCK"])


def _sizes(h: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(h), WIDEST)
    return dict(BLOCK=block, num_warps=max(1, block // 256))  # 16 bytes of bf16 for each thread


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, place, m, k, whole):
        ctx.save_for_backward(place)
        ctx.k = k
        return _rows_of(x, place, m, k, whole)

    @staticmethod
    def backward(ctx, gradient):
        return _sums(gradient, *ctx.saved_tensors, ctx.k), *(None,) * 4


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, place, whole):
        y, weights = y.contiguous(), weights.contiguous()
        ctx.save_for_backward(y, weights, place)
        ctx.whole = whole
        return _sums(y, place, weights.shape[1], weights)

    @staticmethod
    def backward(ctx, gradient):
        y, weights, place = ctx.saved_tensors
        d_y, d_weights = (torch.empty_like if ctx.whole else torch.zeros_like)(y), torch.empty_like(weights)
        (m, h), k, gradient = y.shape, weights.shape[1], gradient.contiguous()
        unpermute_backward_kernel[len(place),](gradient, y, weights, place, d_y, d_weights, m, H=h, K=k, **_sizes(h))
        return d_y, d_weights, None, None


def permute(x: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """See `reference.permute`."""
    return _Permute.apply(x, place, len(order), k, whole)


def unpermute(
    y: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, place: torch.Tensor, whole: bool
) -> torch.Tensor:
    """See `reference.unpermute`."""
    return _Unpermute.apply(y, weights, place, whole)
