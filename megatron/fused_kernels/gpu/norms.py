# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm, alone and after the residual addition.

With r = 1 / sqrt(variance + epsilon), z = (x - mean) r and g the incoming gradient times the weight, the gradient of
x is r (g - mean(g) - z mean(g z)); RMSNorm subtracts neither the mean of x nor of g. The weight's gradient is the sum over
rows of gradient x z: each program of the backward pass sums its rows, and torch sums over programs.
"""

import torch
import triton
import triton.language as tl

from megatron.fused_kernels import reference
from megatron.fused_kernels.gpu.launch import Tile, programs, stages

WIDEST = 32768  # columns: the forward pass holds whole rows
WHOLE = 8192  # up to this width the backward pass holds whole rows and its sums; wider rows are processed in blocks


@triton.jit
def forward_kernel(
    x,
    branch,
    weight,
    bias,
    total,
    y,
    mean,
    inverse,
    rows,
    epsilon,
    H: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    ADD: tl.constexpr,
):
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < H)[None, :]
    at = row.to(tl.int64)[:, None] * H + column[None, :]
    value = tl.load(x + at, inside, 0.0).to(tl.float32)
    if ADD:  # the norm is that of the sum as it is stored
        rounded = (value + tl.load(branch + at, inside, 0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, rounded, inside)
        value = rounded.to(tl.float32)
    if CENTRED:
        middle = tl.sum(value, 1) / H
        tl.store(mean + row, middle, row < rows)
        value = tl.where(inside, value - middle[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / H + epsilon)
    tl.store(inverse + row, scale, row < rows)
    value = value * scale[:, None] * tl.load(weight + column, column < H, 0.0).to(tl.float32)[None, :]
    if CENTRED:
        value += tl.load(bias + column, column < H, 0.0).to(tl.float32)[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), inside)


@triton.jit
def backward_kernel(
    gradient,
    d_total,
    x,
    weight,
    mean,
    inverse,
    d_x,
    d_weight,
    d_bias,
    rows,
    H: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CENTRED: tl.constexpr,
    ADD: tl.constexpr,
):
    """Whole rows. Each is loaded once, while earlier ones are computed; the sums of weights stay in registers."""
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    scales = tl.load(weight + column, column < H, 0.0).to(tl.float32)[None, :]
    weight_sum, bias_sum = tl.zeros((TILE, BLOCK), tl.float32), tl.zeros((TILE, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, TILE), tl.num_programs(0), num_stages=STAGES):
        row = tile * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & (column < H)[None, :]
        at = row.to(tl.int64)[:, None] * H + column[None, :]
        g, z = tl.load(gradient + at, inside, 0.0).to(tl.float32), tl.load(x + at, inside, 0.0).to(tl.float32)
        if ADD:
            added = tl.load(d_total + at, inside, 0.0).to(tl.float32)
        scale = tl.load(inverse + row, row < rows, 0.0)[:, None]
        if CENTRED:
            z -= tl.load(mean + row, row < rows, 0.0)[:, None]
        z = tl.where(inside, z * scale, 0.0)
        weight_sum, bias_sum = weight_sum + g * z, bias_sum + g
        g *= scales
        value = g - z * (tl.sum(g * z, 1) / H)[:, None]
        if CENTRED:
            value -= (tl.sum(g, 1) / H)[:, None]
        value *= scale
        if ADD:
            value += added
        tl.store(d_x + at, value.to(d_x.dtype.element_ty), inside)
    own = program.to(tl.int64) * H + column
    tl.store(d_weight + own, tl.sum(weight_sum, 0), column < H)
    if CENTRED:
        tl.store(d_bias + own, tl.sum(bias_sum, 0), column < H)


@triton.jit
def _backward_block(gradient, x, at, inside, middle, scale):
    """The incoming gradient and the normalized x, fp32, 0 outside."""
    normal = (tl.load(x + at, inside, 0.0).to(tl.float32) - middle) * scale
    return tl.load(gradient + at, inside, 0.0).to(tl.float32), tl.where(inside, normal, 0.0)


@triton.jit
def wide_backward_kernel(
    gradient,
    d_total,
    x,
    weight,
    mean,
    inverse,
    d_x,
    d_weight,
    d_bias,
    rows,
    H: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    ADD: tl.constexpr,
):
    """Rows that are wider than a block: once for a row's sums, once for its gradient."""
    program, columns = tl.program_id(0), tl.arange(0, BLOCK)
    for tile in range(program, tl.cdiv(rows, TILE), tl.num_programs(0)):
        row = tile * TILE + tl.arange(0, TILE)
        start = row.to(tl.int64)[:, None] * H
        scale = tl.load(inverse + row, row < rows, 0.0)[:, None]
        middle = tl.load(mean + row, row < rows, 0.0)[:, None] if CENTRED else 0.0
        of_normal, of_one = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
        for first in range(0, H, BLOCK):
            column = first + columns
            inside = (row < rows)[:, None] & (column < H)[None, :]
            g, z = _backward_block(gradient, x, start + column[None, :], inside, middle, scale)
            g *= tl.load(weight + column, column < H, 0.0).to(tl.float32)[None, :]
            of_normal += tl.sum(g * z, 1)
            of_one += tl.sum(g, 1)
        for first in range(0, H, BLOCK):
            column = first + columns
            inside = (row < rows)[:, None] & (column < H)[None, :]
            at = start + column[None, :]
            g, z = _backward_block(gradient, x, at, inside, middle, scale)
            value = g * tl.load(weight + column, column < H, 0.0).to(tl.float32)[None, :] - z * (of_normal / H)[:, None]
            if CENTRED:
                value -= (of_one / H)[:, None]
            value *= scale
            if ADD:
                value += tl.load(d_total + at, inside, 0.0).to(tl.float32)
            tl.store(d_x + at, value.to(d_x.dtype.element_ty), inside)
            # The sums of a block are in memory, in this program's row.
            own, before = program.to(tl.int64) * H + column, (column < H) & (tile > program)
            tl.store(d_weight + own, tl.sum(g * z, 0) + tl.load(d_weight + own, before, 0.0), column < H)
            if CENTRED:
                tl.store(d_bias + own, tl.sum(g, 0) + tl.load(d_bias + own, before, 0.0), column < H)
        tl.debug_barrier()  # another thread may read them for the next tile


class _Norm(torch.autograd.Function):
    """x [..., h], branch of the same shape or None, bias None for RMSNorm -> (x + branch, norm of it), or only the norm."""

    @staticmethod
    def forward(ctx, x, branch, weight, bias, epsilon):
        h, rows = weight.numel(), x.numel() // weight.numel()
        source, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = x if branch is None else torch.empty_like(y)
        mean, inverse = torch.empty((2, rows), dtype=torch.float32, device=x.device)
        size = Tile.of(h, WIDEST)
        forward_kernel[triton.cdiv(rows, size.rows),](
            source,
            source if branch is None else branch.contiguous(),
            weight,
            bias,
            y if branch is None else total,
            y,
            mean,
            inverse,
            rows,
            epsilon,
            H=h,
            TILE=size.rows,
            BLOCK=size.columns,
            CENTRED=bias is not None,
            ADD=branch is not None,
            num_warps=size.warps,
        )
        ctx.save_for_backward(total, weight, *((inverse,) if bias is None else (inverse, mean)))
        ctx.has_branch = branch is not None
        return (total, y) if ctx.has_branch else y

    @staticmethod
    def backward(ctx, *gradients):
        x, weight, inverse, *mean = ctx.saved_tensors
        h, rows = weight.numel(), x.numel() // weight.numel()
        size = Tile.of(h, WHOLE)
        count = min(programs(x.device), triton.cdiv(rows, size.rows))
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sums = torch.empty((1 + len(mean), count, h), dtype=torch.float32, device=x.device)
        gradient, whole = gradients[-1].contiguous(), h <= size.columns
        kernel = backward_kernel if whole else wide_backward_kernel
        loaded = x.element_size() * size.rows * size.columns * (3 if ctx.has_branch else 2)
        kernel[count,](
            gradient,
            gradients[0].contiguous(),
            x.contiguous(),
            weight,
            mean[0] if mean else inverse,
            inverse,
            d_x,
            sums[0],
            sums[-1],
            rows,
            H=h,
            TILE=size.rows,
            BLOCK=size.columns,
            CENTRED=bool(mean),
            ADD=ctx.has_branch,
            num_warps=size.warps,
            **(dict(STAGES=stages(loaded)) if whole else {}),
        )
        d_weight, *d_bias = sums.sum(1).to(weight.dtype)
        return d_x, d_x if ctx.has_branch else None, d_weight, d_bias[0] if d_bias else None, None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `reference.layer_norm`."""
    if weight.numel() > WIDEST:
        return reference.layer_norm(x, weight, bias, epsilon)
    return _Norm.apply(x, None, weight, bias, epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `reference.rms_norm`."""
    if weight.numel() > WIDEST:
        return reference.rms_norm(x, weight, epsilon)
    return _Norm.apply(x, None, weight, None, epsilon)


def add_layer_norm(x, branch, weight, bias, epsilon, norm=None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_layer_norm`."""
    if weight.numel() > WIDEST or x.dtype != branch.dtype:
        return reference.add_layer_norm(x, branch, weight, bias, epsilon)
    return _Norm.apply(x, branch, weight, bias, epsilon)


def add_rms_norm(x, branch, weight, epsilon, norm=None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`."""
    if weight.numel() > WIDEST or x.dtype != branch.dtype:
        return reference.add_rms_norm(x, branch, weight, epsilon)
    return _Norm.apply(x, branch, weight, None, epsilon)
