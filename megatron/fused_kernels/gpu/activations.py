# SPDX-License-Identifier: Apache-2.0
"""Activations of an MLP. Legend: f width. A program has a tile of rows and a block of columns.

GELU in its tanh form is x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), because 1 + tanh(u) = 2 sigmoid(2 u).
"""

import torch
import triton
import triton.language as tl

from megatron.fused_kernels.gpu.launch import programs

TILE, BLOCK, WARPS = 4, 1024, 8
SUMMED = dict(TILE=4, BLOCK=512, STAGES=3, num_warps=4)  # where programs loop over rows and sum them
TWICE, CUBE = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)  # 2 sqrt(2 / pi)


@triton.jit
def _inside(row, column, rows, F):
    return (row < rows)[:, None] & (column < F)[None, :]


@triton.jit
def gelu_kernel(x, bias, y, rows, F, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = _inside(row, column, rows, F), row.to(tl.int64)[:, None] * F + column[None, :]
    v = tl.load(x + at, inside, 0.0).to(tl.float32) + tl.load(bias + column, column < F, 0.0).to(tl.float32)[None, :]
    tl.store(y + at, (v * tl.sigmoid((v + v * v * v * CUBE) * TWICE)).to(y.dtype.element_ty), inside)


@triton.jit
def gelu_backward_kernel(
    gradient, x, bias, d_x, d_bias, rows, F, TILE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Programs of a block of columns share the rows; each writes its part of the bias's gradient to a row of `d_bias`."""
    program, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    added = tl.load(bias + column, column < F, 0.0).to(tl.float32)[None, :]
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, TILE), tl.num_programs(0), num_stages=STAGES):
        row = tile * TILE + tl.arange(0, TILE)
        inside, at = _inside(row, column, rows, F), row.to(tl.int64)[:, None] * F + column[None, :]
        v = tl.load(x + at, inside, 0.0).to(tl.float32) + added
        s = tl.sigmoid((v + v * v * v * CUBE) * TWICE)
        slope = s + v * s * (1.0 - s) * (1.0 + v * v * (3.0 * CUBE)) * TWICE
        value = tl.load(gradient + at, inside, 0.0).to(tl.float32) * slope
        tl.store(d_x + at, value.to(d_x.dtype.element_ty), inside)
        total += value
    tl.store(d_bias + program.to(tl.int64) * F + column, tl.sum(total, 0), column < F)


@triton.jit
def swiglu_kernel(x, y, rows, F, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = _inside(row, column, rows, F), row.to(tl.int64)[:, None] * F + column[None, :]
    both = at + row.to(tl.int64)[:, None] * F  # rows of x are twice as long
    gate, value = tl.load(x + both, inside, 0.0).to(tl.float32), tl.load(x + both + F, inside, 0.0).to(tl.float32)
    tl.store(y + at, (gate * tl.sigmoid(gate) * value).to(y.dtype.element_ty), inside)


@triton.jit
def swiglu_backward_kernel(gradient, x, d_x, rows, F, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = _inside(row, column, rows, F), row.to(tl.int64)[:, None] * F + column[None, :]
    both = at + row.to(tl.int64)[:, None] * F
    gate, value = tl.load(x + both, inside, 0.0).to(tl.float32), tl.load(x + both + F, inside, 0.0).to(tl.float32)
    g, s = tl.load(gradient + at, inside, 0.0).to(tl.float32), tl.sigmoid(gate)
    of_gate, of_value = g * value * s * (1.0 + gate * (1.0 - s)), g * gate * s
    tl.store(d_x + both, of_gate.to(d_x.dtype.element_ty), inside)
    tl.store(d_x + both + F, of_value.to(d_x.dtype.element_ty), inside)


def _grid(rows: int, f: int) -> tuple[int, int]:
    return triton.cdiv(rows, TILE), triton.cdiv(f, BLOCK)


SIZES = dict(TILE=TILE, BLOCK=BLOCK, num_warps=WARPS)


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        x, rows = x.contiguous(), x.numel() // x.shape[-1]
        y = torch.empty_like(x)
        gelu_kernel[_grid(rows, x.shape[-1])](x, bias, y, rows, x.shape[-1], **SIZES)
        ctx.save_for_backward(x, bias)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, bias = ctx.saved_tensors
        rows, f = x.numel() // x.shape[-1], x.shape[-1]
        tiles, blocks = triton.cdiv(rows, SUMMED["TILE"]), triton.cdiv(f, SUMMED["BLOCK"])
        count = min(tiles, max(1, 2 * programs(x.device) // blocks))
        d_x, d_bias = torch.empty_like(x), torch.empty((count, f), dtype=torch.float32, device=x.device)
        gelu_backward_kernel[count, blocks](gradient.contiguous(), x, bias, d_x, d_bias, rows, f, **SUMMED)
        return d_x, d_bias.sum(0).to(bias.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x, f, rows = x.contiguous(), x.shape[-1] // 2, x.numel() // x.shape[-1]
        y = torch.empty((*x.shape[:-1], f), dtype=x.dtype, device=x.device)
        swiglu_kernel[_grid(rows, f)](x, y, rows, f, **SIZES)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        d_x, f, rows = torch.empty_like(x), x.shape[-1] // 2, x.numel() // x.shape[-1]
        swiglu_backward_kernel[_grid(rows, f)](gradient.contiguous(), x, d_x, rows, f, **SIZES)
        return d_x


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `reference.bias_gelu`."""
    return _BiasGELU.apply(x, bias)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """See `reference.swiglu`."""
    return _SwiGLU.apply(x)
