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
def unpermute_kernel(rows, place, y, m, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(place + token * K + j)
        total += tl.load(rows + row * H + column, (column < H) & (row < m), 0.0).to(tl.float32)
    tl.store(y + token * H + column, total.to(y.dtype.element_ty), column < H)


def _rows_of(x: torch.Tensor, place: torch.Tensor, m: int, k: int, whole: bool) -> torch.Tensor:
    """Tokens [n, h] -> the rows of their experts, [m, h]."""
    x, h = x.contiguous(), x.shape[1]
    rows = (x.new_empty if whole else x.new_zeros)((m, h))
    permute_kernel[_grid(len(x), h)](x, place, rows, m, H=h, K=k, **_sizes(h))
    return rows


def _sums_of(rows: torch.Tensor, place: torch.Tensor, k: int) -> torch.Tensor:
    """Rows [m, h] -> the sum of those of each token, [n, h]."""
    rows, (m, h) = rows.contiguous(), rows.shape
    y = rows.new_empty((len(place) // k, h))
    unpermute_kernel[_grid(len(y), h)](rows, place, y, m, H=h, K=k, **_sizes(h))
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
        return _sums_of(gradient, *ctx.saved_tensors, ctx.k), *(None,) * 4


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, place, k, whole):
        # Not `save_for_backward`: recomputation would send rows again only to have this.
        ctx.place, ctx.rows, ctx.k, ctx.whole = place, len(y), k, whole
        return _sums_of(y, place, k)

    @staticmethod
    def backward(ctx, gradient):
        return _rows_of(gradient, ctx.place, ctx.rows, ctx.k, ctx.whole), None, None, None


def permute(x: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """See `reference.permute`."""
    return _Permute.apply(x, place, len(order), k, whole)


def unpermute(y: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """See `reference.unpermute`."""
    return _Unpermute.apply(y, place, k, whole)
