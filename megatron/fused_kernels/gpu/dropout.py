# SPDX-License-Identifier: Apache-2.0
"""Dropout and the residual addition, with the suite's own random words; the mask is saved as bool."""

import torch
import triton
import triton.language as tl

from megatron.fused_kernels.dropout import DropoutMask

BLOCK, WARPS = 4096, 8


@triton.jit
def forward_kernel(x, words, residual, y, kept, batch, threshold, factor, s_stride, b_stride, H, BLOCK: tl.constexpr):
    """A program has a block of a row [h] of x [s, b, h]; words have separate strides: those of a sample are contiguous."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < H, row * H + column
    word = tl.load(words + (row // batch) * s_stride + (row % batch) * b_stride + column, inside, 0)
    stays = word.to(tl.int32) >= threshold
    value = tl.where(stays, tl.load(x + at, inside, 0.0).to(tl.float32) * factor, 0.0)
    value += tl.load(residual + at, inside, 0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), inside)
    tl.store(kept + at, stays.to(tl.int8), inside)


@triton.jit
def backward_kernel(gradient, kept, d_x, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gradient + at, at < count, 0.0).to(tl.float32) * factor
    stays = tl.load(kept + at, at < count, 0) != 0
    tl.store(d_x + at, tl.where(stays, value, 0.0).to(d_x.dtype.element_ty), at < count)


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, words, threshold, factor, residual):
        (s, b, h), x, residual = x.shape, x.contiguous(), residual.contiguous()
        block = min(BLOCK, triton.next_power_of_2(h))
        words = words if words.stride(-1) == 1 else words.contiguous()
        y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
        kept = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        forward_kernel[s * b, triton.cdiv(h, BLOCK)](
            x,
            words,
            residual,
            y,
            kept,
            b,
            threshold,
            factor,
            words.stride(0),
            words.stride(1),
            h,
            BLOCK=block,
            num_warps=max(1, min(WARPS, block // 256)),
        )
        ctx.save_for_backward(kept)
        ctx.factor, ctx.formats = factor, (x.dtype, residual.dtype)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (kept,), (mine, others) = ctx.saved_tensors, ctx.formats
        gradient = gradient.contiguous()
        d_x = torch.empty(gradient.shape, dtype=mine, device=gradient.device)
        count = gradient.numel()
        backward_kernel[triton.cdiv(count, BLOCK),](
            gradient, kept, d_x, ctx.factor, count, BLOCK=BLOCK, num_warps=WARPS
        )
        return d_x, None, None, None, gradient.to(others)


def dropout_add(x: torch.Tensor, keep: DropoutMask, residual: torch.Tensor) -> torch.Tensor:
    """See `reference.dropout_add`."""
    return _DropoutAdd.apply(x, keep.words, keep.threshold, keep.factor, residual)
