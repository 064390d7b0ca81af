# SPDX-License-Identifier: Apache-2.0
"""Random words for dropout, and dropout with the residual addition, which saves the mask as bool."""

import torch
import triton
import triton.language as tl

from megatron.fused_kernels.dropout import DropoutMask

BLOCK, WARPS = 4096, 8
COUNTERS = 1024  # of Philox, for a program: eight words each


@triton.jit
def words_kernel(seeds, out, each, BLOCK: tl.constexpr):
    """Philox 4x32-10 with a sample's seed as its key. A sample has four parts of `each` int32: counter i gives the ith of
    each part.
    """
    sample, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, second, third, fourth = tl.randint4x(tl.load(seeds + sample), at)
    out += sample * each * 4 + at
    tl.store(out, first, at < each)
    tl.store(out + each, second, at < each)
    tl.store(out + 2 * each, third, at < each)
    tl.store(out + 3 * each, fourth, at < each)


@torch.compiler.disable
def words(count: int, seeds: list[int], device: torch.device) -> torch.Tensor:
    """Uniform random int16 [len(seeds), count], in one launch; each row depends only on its seed (63 bits)."""
    each = triton.cdiv(count, 8)
    on_host = torch.tensor(seeds, dtype=torch.int64)
    keys = on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host
    out = torch.empty((len(seeds), 4 * each), dtype=torch.int32, device=device)
    words_kernel[len(seeds), triton.cdiv(each, COUNTERS)](keys, out, each, BLOCK=COUNTERS, num_warps=4)
    return out.view(torch.int16)[:, :count]


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
