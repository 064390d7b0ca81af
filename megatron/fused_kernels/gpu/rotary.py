# SPDX-License-Identifier: Apache-2.0
"""Rotation of queries and keys. A program has a token and a tile of its heads; the backward pass rotates the other way.

Queries and keys are parts of one fused tensor, which is read in place with their strides.
"""

import torch
import triton
import triton.language as tl

ELEMENTS = 4096  # of the pairs that a program rotates


@triton.jit
def rotary_kernel(
    x,
    cos,
    sin,
    y,
    batch,
    heads,
    queries,
    s_stride,
    b_stride,
    g_stride,
    q_stride,
    s_angle,
    b_angle,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    SIGN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    source = x + (token // batch) * s_stride + (token % batch) * b_stride
    source += (head // queries)[:, None] * g_stride + (head % queries)[:, None] * q_stride
    target = y + (token * heads + head)[:, None] * D
    turned = (head < heads)[:, None] & (column < WIDTH // 2)[None, :]
    angle = (token // batch) * s_angle + (token % batch) * b_angle + column  # both halves of a row are equal
    c = tl.load(cos + angle, column < WIDTH // 2, 0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, column < WIDTH // 2, 0.0).to(tl.float32)[None, :] * SIGN
    first = tl.load(source + column[None, :], turned, 0.0).to(tl.float32)
    second = tl.load(source + column[None, :] + WIDTH // 2, turned, 0.0).to(tl.float32)
    tl.store(target + column[None, :], (first * c - second * s).to(y.dtype.element_ty), turned)
    tl.store(target + column[None, :] + WIDTH // 2, (second * c + first * s).to(y.dtype.element_ty), turned)
    if REST > 0:  # channels without rotation
        column = WIDTH + tl.arange(0, REST)
        passing = (head < heads)[:, None] & (column < D)[None, :]
        tl.store(target + column[None, :], tl.load(source + column[None, :], passing), passing)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    s, b, g, q, d = x.shape
    width = cos.shape[-1]
    y, angles = torch.empty(x.shape, dtype=x.dtype, device=x.device), cos.expand(s, b, 1, 1, width)
    block = triton.next_power_of_2(width // 2)
    tile = min(triton.next_power_of_2(g * q), max(1, ELEMENTS // block))
    rotary_kernel[s * b, triton.cdiv(g * q, tile)](
        x,
        cos,
        sin,
        y,
        b,
        g * q,
        q,
        *x.stride()[:4],
        *angles.stride()[:2],
        D=d,
        WIDTH=width,
        TILE=tile,
        BLOCK=block,
        REST=triton.next_power_of_2(d - width) if d > width else 0,
        SIGN=sign,
        num_warps=max(1, min(8, tile * block // 256)),
    )
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, gradient):
        return _turned(gradient, *ctx.saved_tensors, -1), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `reference.rotate`."""
    return _Rotate.apply(x, cos, sin)
