# SPDX-License-Identifier: Apache-2.0
"""fp8 numbers in plain torch: casts with a scale for each tile, and products. It runs on every device, and defines what
kernels compute.

    x ~ q s        q = cast(clamp(x / s, -top, top)), top = 448 (e4m3) or 57344 (e5m2)
                   s = 2^ceil(log2(amax / top)), one for each tile of x; at least 2^-126
                   1 for a tile of zeros; inf if amax is inf or NaN: then the tile stands for NaN, which guards see

Scales are powers of two: rows can be turned into columns without a loss of precision, pieces of a whole tile have nearly
the numbers of the whole, and a product of q s is exact in fp32. Values and scales are TransformerEngine's blockwise ones
(`pow_2_scales`) and torchao's RCEIL of MX formats (`tests/fused_kernels/test_fp8.py`). Tiles of 1 x 128 and 128 x 128 are
those of DeepSeek-V3 (arXiv:2412.19437, section 3.3), 1 x 32 those of the OCP MX specification.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The exponent of the largest number, which is 1.75 x 2^exponent in both formats.
TOP_EXPONENT = {E4M3: 8, E5M2: 15}
_BIAS, _MANTISSA, _THREE_QUARTERS = 127, 0x7FFFFF, 0x600000  # of fp32
UNIT = 16  # tensor cores multiply rows whose lengths are multiples of it

Scaled = tuple[torch.Tensor, torch.Tensor]  # (q [n, k] in fp8, s [tiles of n, tiles of k] in fp32)


class ScaleTile(NamedTuple):
    """Neighbours that share a scale: rows x columns; 0: all."""

    rows: int
    columns: int


WHOLE, BLOCKS, SQUARES, MX = ScaleTile(0, 0), ScaleTile(1, 128), ScaleTile(128, 128), ScaleTile(1, 32)
ROWS = ScaleTile(1, 0)


# ---- casts --------------------------------------------------------------------------------------------------------------


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of tiles with these largest absolute values, in fp32.

    >>> scale_of(torch.tensor([448.0, 449.0, 1.0, 0.0, float("inf")]), E4M3).tolist()
    [1.0, 2.0, 0.00390625, 1.0, inf]
    """
    bits = amax.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) - TOP_EXPONENT[dtype] + ((bits & _MANTISSA) > _THREE_QUARTERS)
    scale = (exponent.clamp(1, 2 * _BIAS) << 23).view(torch.float32)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.inf)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, [1, 1] in fp32; 0 of no values."""
    if not x.numel():
        return x.new_zeros((1, 1), dtype=torch.float32)
    return torch.linalg.vector_norm(x, math.inf).float().view(1, 1)  # reads x once, and stores nothing of its size


def quantize(x: torch.Tensor, tile: ScaleTile, dtype: torch.dtype, amax: Optional[torch.Tensor] = None) -> Scaled:
    """Cast x [n, k]; the last tiles may be smaller. amax: of the tiles, if it is known, as over several ranks."""
    (n, k), (rows, columns) = x.shape, _sizes(x, tile)
    if not x.numel():
        return x.to(dtype), x.new_ones((-(-n // rows), -(-k // columns)), dtype=torch.float32)
    padded = F.pad(x.float(), (0, -k % columns, 0, -n % rows))
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = scale_of(tiles.abs().amax((1, 3)) if amax is None else amax, dtype)
    top = torch.finfo(dtype).max
    values = (tiles / scales[:, None, :, None]).clamp(-top, top).to(dtype)
    return values.view(padded.shape)[:n, :k].contiguous(), scales


def dequantize(scaled: Scaled, tile: ScaleTile) -> torch.Tensor:
    """The numbers that q and s stand for, [n, k] in fp32."""
    (values, scales), (rows, columns) = scaled, _sizes(scaled[0], tile)
    n, k = values.shape
    return values.float() * scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def _tiles_of_part(part: torch.Tensor, first: int, width: int, tile: ScaleTile) -> tuple[torch.Tensor, int, int]:
    """Elements [first, first + n) of a matrix with rows of this width, in whole tiles [a, rows, b, columns] with zeros
    around them; the first row of tiles; and the first element in it.
    """
    block = tile.rows * width
    top, before = divmod(first, block)
    padded = F.pad(part, (before, -(before + len(part)) % block))
    return padded.view(-1, tile.rows, width // tile.columns, tile.columns), top, before


def amax_of_part(part: torch.Tensor, first: int, width: int, tile: ScaleTile, into: torch.Tensor) -> None:
    """Write the largest absolute values in a part of a matrix (see `cast_part`) to those of the matrix's tiles."""
    if not tile.columns:
        into.copy_(amax_of(part))
        return
    tiles, top, _ = _tiles_of_part(part, first, width, tile)
    into[top : top + len(tiles)] = tiles.abs().amax((1, 3))


def cast_part(part: torch.Tensor, first: int, width: int, tile: ScaleTile, scales: torch.Tensor) -> torch.Tensor:
    """The values in e4m3 of elements [first, first + n) of a matrix whose tiles are whole: those of `quantize` of it all.

    width: of its rows; scales: of all its tiles. Scales are powers of two, so a quotient in bf16 is exact, or rounds to 0.
    """
    top = torch.finfo(E4M3).max
    if not tile.columns:
        return (part / scales.to(part.dtype).view(1)).clamp_(-top, top).to(E4M3)
    tiles, row, before = _tiles_of_part(part, first, width, tile)
    own = scales[row : row + len(tiles), None, :, None].to(part.dtype)
    return (tiles / own).clamp_(-top, top).to(E4M3).flatten()[before : before + len(part)]


def padded_to(n: int, tile: ScaleTile) -> int:
    """The length of the rows of a transpose that had n rows: whole tiles, or what tensor cores multiply."""
    unit = tile.columns or UNIT
    return -(-n // unit) * unit


def fp8_cast(
    x: torch.Tensor,
    tile: ScaleTile,
    dtype: torch.dtype,
    amax: Optional[torch.Tensor] = None,
    rows: bool = True,
    columns: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Cast x [n, k] to what products read: (q, s) of its rows, and then (q, s) of its columns, which are transposed.

    Columns [k, `padded_to` n] have zeros after n. amax: the largest absolute value of a tensor that x is a part of, [1, 1],
    for a tile that is all of x; of rows [n, 1]. A tile of whole rows has no columns.
    """
    found = quantize(x, tile, dtype, amax) if rows else ()
    if not columns:
        return found
    turned = F.pad(x.t(), (0, padded_to(len(x), tile) - len(x)))
    return *found, *quantize(turned.contiguous(), tile, dtype, amax)


def fp8_turn(scaled: Scaled, tile: ScaleTile) -> Scaled:
    """The columns of x, as `fp8_cast` has them, from its rows: cast again from the numbers that these stand for.

    With a scale for all the numbers stay as they are.
    """
    values, scales = scaled
    if not tile.columns:
        turned = F.pad(values.view(torch.uint8).t(), (0, padded_to(len(values), tile) - len(values)))
        return turned.contiguous().view(values.dtype), scales
    return fp8_cast(dequantize(scaled, tile), tile, values.dtype, rows=False, columns=True)


# ---- products -----------------------------------------------------------------------------------------------------------


def multiply(a: torch.Tensor, b: torch.Tensor, sums_of: int = 0) -> torch.Tensor:
    """a [m, k] b[n, k]^T in fp32, of numbers from `dequantize`.

    sums_of: as many products are added by themselves, and their sums added up: 128 in DeepSeek-V3; 0: all
    """
    if not sums_of or a.shape[1] <= sums_of:
        return a @ b.t()
    total = a[:, :sums_of] @ b[:, :sums_of].t()
    for left, right in zip(a.split(sums_of, 1)[1:], b.split(sums_of, 1)[1:]):
        total += left @ right.t()
    return total


def _product(
    a: Scaled,
    b: Scaled,
    dtype: torch.dtype,
    bias: Optional[torch.Tensor] = None,
    fast: bool = False,
    *,
    tile: ScaleTile,
    of_b: Optional[ScaleTile] = None,
    sums_of: int = 0,
) -> torch.Tensor:
    """a [m, k] b[n, k]^T + bias, in `dtype`.

    tile: of a, and of b without of_b. fast: an H100 may add up in 14 bits instead of fp32; here it makes no difference
    """
    y = multiply(dequantize(a, tile), dequantize(b, of_b or tile), sums_of)
    return (y if bias is None else y + bias).to(dtype)


fp8_tensorwise = partial(_product, tile=WHOLE)
fp8_blockwise = partial(_product, tile=BLOCKS, sums_of=128)  # b has tiles of 1 x 128
fp8_blockwise_square = partial(_product, tile=BLOCKS, of_b=SQUARES, sums_of=128)  # b is a weight
fp8_mxfp8 = partial(_product, tile=MX)


def fp8_grouped(
    a: Scaled,
    b: Scaled,
    ends: torch.Tensor,
    dtype: torch.dtype,
    multiply: Callable[..., torch.Tensor],
    fast: bool = False,
) -> torch.Tensor:
    """Rows a [m, k] times the matrix of their group, b [E, n, k] -> [m, n], in `dtype`. Rows have a scale each, both.

    ends: the row after each group's last, [E] int32. multiply: (rows, matrices, None) -> the same product of numbers in
    `dtype`, where q s is exact
    """
    return multiply(dequantize(a, ROWS).to(dtype), (b[0].float() * b[1]).to(dtype), None)


def _sizes(x: torch.Tensor, tile: ScaleTile) -> tuple[int, int]:
    return tile.rows or max(len(x), 1), tile.columns or max(x.shape[1], 1)
