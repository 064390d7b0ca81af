# SPDX-License-Identifier: Apache-2.0
"""Products of fp8 numbers by torch's `scaled_mm`, on GPUs whose tensor cores have them: scales in the layout that each
recipe asks for; and of rows with the matrices of their group by `scaled_grouped_mm`.

tensorwise: cuBLAS, from sm_89 on. blockwise: cuBLASLt 12.9 on sm_90. mxfp8: sm_100. Groups: sm_90 and sm_100. A probe finds
what is there.

Legend: a [m, k], b [n, k], rows both.
"""

from collections.abc import Callable
from typing import Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels import fp8
from megatron.fused_kernels.fp8 import UNIT, Scaled

LACKING = "" if hasattr(F, "scaled_mm") else "this torch has no scaled_mm (from 2.10 on)"


def fp8_tensorwise(
    a: Scaled, b: Scaled, dtype: torch.dtype, bias: Optional[torch.Tensor] = None, fast: bool = False
) -> torch.Tensor:
    """See `fp8.fp8_tensorwise`."""
    one = F.ScalingType.TensorWise
    if dtype == torch.float32:  # cuBLAS adds a bias to outputs of 16 bits alone
        return _multiply(a[0], b[0], a[1], one, b[1], one, dtype, bias, use_fast_accum=fast)
    return _multiply(a[0], b[0], a[1], one, b[1], one, dtype, bias=None, inside=bias, use_fast_accum=fast)


def fp8_blockwise(
    a: Scaled, b: Scaled, dtype: torch.dtype, bias: Optional[torch.Tensor] = None, fast: bool = False
) -> torch.Tensor:
    """See `fp8.fp8_blockwise`."""
    one = F.ScalingType.BlockWise1x128
    return _multiply(a[0], b[0], _outer(a[1]), one, _outer(b[1]), one, dtype, bias)


def fp8_blockwise_square(
    a: Scaled, b: Scaled, dtype: torch.dtype, bias: Optional[torch.Tensor] = None, fast: bool = False
) -> torch.Tensor:
    """See `fp8.fp8_blockwise_square`."""
    one, square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    # Of b, tiles along k are neighbours, and as many as a multiple of 4 (torch's, of cuBLASLt).
    scales = F.pad(b[1], (0, -b[1].shape[1] % 4), value=1.0).t()
    return _multiply(a[0], b[0], _outer(a[1]), one, scales, square, dtype, bias)


def fp8_mxfp8(
    a: Scaled, b: Scaled, dtype: torch.dtype, bias: Optional[torch.Tensor] = None, fast: bool = False
) -> torch.Tensor:
    """See `fp8.fp8_mxfp8`."""
    one, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    scales = mx_scales(a[1]), one, mx_scales(b[1]), one
    return _multiply(a[0], b[0], *scales, dtype, bias, swizzle_a=order, swizzle_b=order)


def fp8_grouped(
    a: Scaled,
    b: Scaled,
    ends: torch.Tensor,
    dtype: torch.dtype,
    multiply: Callable[..., torch.Tensor],
    fast: bool = False,
) -> torch.Tensor:
    """See `fp8.fp8_grouped`. torch has the product of e4m3 with outputs in bf16, of widths that are multiples of 16."""
    (n, k), rows = b[0].shape[1:], F.ScalingType.RowWise
    if dtype != torch.bfloat16 or n % UNIT or k % UNIT or not len(a[0]):
        return fp8.fp8_grouped(a, b, ends, dtype, multiply)
    scales = a[1].flatten(), rows, b[1].flatten(1), rows
    return F.scaled_grouped_mm(a[0], b[0].mT, *scales, offs=ends, output_dtype=dtype, use_fast_accum=fast)


def mx_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales [n, k / 32] as exponents (e8m0), in the order of tensor cores: 128 x 4 at a time, of which four rows that are
    32 apart lie beside each other (cuBLAS, "1D block scaling factors layout"). inf becomes NaN, which e8m0 has.
    """
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    n, k = exponents.shape
    blocks = F.pad(exponents, (0, -k % 4, 0, -n % 128)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return blocks.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)


def _outer(scales: torch.Tensor) -> torch.Tensor:
    """Scales of 1 x 128 [n, k / 128], neighbours along n."""
    return scales.t().contiguous().t()


def _multiply(
    a: torch.Tensor, b: torch.Tensor, scale_a, kind_a, scale_b, kind_b, dtype: torch.dtype, bias, inside=None, **more
) -> torch.Tensor:
    """a b^T + bias. inside: a bias that the product adds before it rounds"""
    if not (a.numel() and b.numel()):
        return a.new_zeros((len(a), len(b)), dtype=dtype)
    y = F.scaled_mm(a, b.t(), scale_a, kind_a, scale_b, kind_b, bias=inside, output_dtype=dtype, **more)
    return y if bias is None else y + bias
