# SPDX-License-Identifier: Apache-2.0
"""Casts to fp8 and products of fp8 numbers: against the references of TransformerEngine and torchao, by their digests;
against all numbers of a format, one by one; and against fp64.

The digests are of `numbers`, which need no random generator, and were computed on a CPU with torch 2.13 by

te:      TransformerEngine d0067d0d, tests/pytorch/references/blockwise_quantizer_reference.py
         `BlockwiseQuantizerReference().quantize(x, pow_2_scales=True)`: (q, scales, before their layout for cuBLAS)
mx:      torchao 0.18.0, `torchao.prototype.mx_formats.mx_tensor.to_mx(x, float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)`
linear:  torchao 0.18.0, `convert_to_float8_training(emulate=True)` of a bf16 Linear, recipes `tensorwise` with
         `round_scales_to_power_of_2` and `rowwise`: (y, dx, dw). Sums of `narrow` are exact in any order.
"""

import hashlib
import math

import pytest
import torch

from megatron.fused_kernels import scaled_mm
from megatron.fused_kernels.fp8 import (
    BLOCKS,
    E4M3,
    E5M2,
    MX,
    WHOLE,
    ScaleTile,
    amax_of,
    dequantize,
    fp8_cast,
    fp8_turn,
    multiply,
    quantize,
    scale_of,
)

OF_TE = {  # (shape, tile, format) -> digests of q and of the scales
    ((5, 384), (1, 128), E4M3): ("5cbf6d3a148c7e974b59aa71", "98dd82770391f45fbee22c0f"),
    ((5, 384), (1, 128), E5M2): ("fe391ef47532984b09c299ea", "97c00e8b12cc6cebcfbd6ff4"),
    ((256, 384), (128, 128), E4M3): ("cf37713fac1a945600c69c5d", "e2bf999fdf5be21d8efd99f0"),
    ((3, 200), (1, 128), E4M3): ("9536c9f61cbf126c8fefc158", "4ccee591b71988bbed46e991"),
    ((200, 300), (128, 128), E4M3): ("79e5732b30049e32ea2ef451", "e2bf999fdf5be21d8efd99f0"),
}
OF_MX = {
    ((5, 384), (1, 32), E4M3): ("656969073cf9e9d261e1c6e2", "a2be5af7ec8a6c872e5bfd8d"),
    ((64, 96), (1, 32), E4M3): ("970bc86a266c0d9edd05332d", "f1d7ea793b1fb2c27db3a34d"),
}
# TransformerEngine's scales of these largest numbers. Below 448 x 2^-126 and 57344 x 2^-126 its scale may be 2^-127, a
# subnormal number; here it is at least 2^-126.
LARGEST = [0, 1, 448, 449, 450, 2**-9, 2**-118, 2**-117, 3.3895e38, math.inf, 1e30, 57344, 57600]
SCALES = {
    E4M3: [1, 2**-8, 1, 1, 2, 2**-17, 2**-126, 2**-125, 2**120, math.inf, 2**91, 2**7, 2**8],
    E5M2: [1, 2**-15, 2**-7, 2**-7, 2**-6, 2**-24, 2**-126, 2**-126, 2**113, math.inf, 2**84, 1, 2],
}
OF_LINEAR = {
    "tensorwise": ["05734aa8119df58708e79ad6", "1df63f5908fcdcc0fa73fc6c", "abcc87898c81de4392a45077"],
    "rowwise": ["05734aa8119df58708e79ad6", "cec539f15fb30766c247d3a1", "5846e98a264ddbc66139d471"],
}


def mixed(rows: int, columns: int) -> torch.Tensor:
    """Whole numbers below 2^32 without a pattern."""
    n = (torch.arange(rows * columns) * 2654435761 + 12345) % 2**32
    n = ((n ^ (n >> 15)) * 2246822519) % 2**32
    return n ^ (n >> 13)


def numbers(rows: int, columns: int) -> torch.Tensor:
    """Of twenty powers of two, some rows larger than others."""
    n = mixed(rows, columns)
    exponent = ((n >> 9) % 41).double() - 20 + (torch.arange(rows * columns) // columns % 7).double()
    return (((n % 512).double() / 256 - 1) * 2.0 ** (exponent / 2)).bfloat16().view(rows, columns)


def narrow(rows: int, columns: int) -> torch.Tensor:
    """Of two powers of two."""
    n = mixed(rows, columns)
    size = (1 + (n % 128).double() / 128) * 2.0 ** (n >> 9 & 1).double()
    return ((1 - 2 * (n >> 20 & 1).double()) * size).bfloat16().view(rows, columns)


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:24]


@pytest.mark.parametrize("case", [*OF_TE, *OF_MX], ids=str)
def test_casts_are_those_of_transformer_engine_and_torchao(case):
    shape, tile, dtype = case
    values, scales = quantize(numbers(*shape), ScaleTile(*tile), dtype)
    assert (digest(values), digest(scales)) == (OF_TE | OF_MX)[case]


@pytest.mark.parametrize("tile", [BLOCKS, MX, ScaleTile(128, 128)], ids=str)
def test_what_fills_up_a_tile_is_not_looked_at(tile):
    """The last tiles of rows and of columns have fewer numbers, all of them small."""
    small = torch.full((3, 200), 2.0**-9, dtype=torch.bfloat16)
    for scales in fp8_cast(small, tile, E4M3, columns=True)[1::2]:
        assert (scales == 2.0**-17).all()


@pytest.mark.parametrize("dtype", SCALES)
def test_scales_of_the_largest_and_the_smallest_numbers(dtype):
    """449 is 448 in bf16."""
    assert scale_of(torch.tensor(LARGEST, dtype=torch.bfloat16), dtype).tolist() == SCALES[dtype]
    assert scale_of(torch.tensor([448.0, math.nextafter(449, 0), 2.0**-149]), E4M3).tolist() == [1, 2, 2.0**-126]


@pytest.mark.parametrize("recipe, tile, of_gradients", [("tensorwise", (0, 0), E5M2), ("rowwise", (1, 0), E4M3)])
def test_three_products_are_those_of_torchao(recipe, tile, of_gradients):
    x, w, dy = narrow(48, 128), narrow(64, 128) * 2.0**-6, narrow(48, 64) * 2.0**-8
    cast = lambda one, dtype=E4M3: dequantize(quantize(one.contiguous(), ScaleTile(*tile), dtype), ScaleTile(*tile))
    y = multiply(cast(x), cast(w))
    dx = multiply(cast(dy, of_gradients), cast(w.t()))
    dw = multiply(cast(dy.t(), of_gradients), cast(x.t()))
    assert [digest(one.bfloat16()) for one in (y, dx, dw)] == OF_LINEAR[recipe]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_cast_is_the_nearest_number_of_the_format(dtype):
    """All 256 numbers, and for each tile all powers of two: brute force."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()].unique()
    x = numbers(6, 256)
    values, scales = quantize(x, ScaleTile(1, 128), dtype)
    for row, columns in ((row, slice(at, at + 128)) for row in range(6) for at in (0, 128)):
        tile, scale = x[row, columns].double(), scales[row, columns.start // 128].item()
        powers = [2.0**e for e in range(-126, 128) if tile.abs().max() / 2.0**e <= every.max()]
        assert scale == min(powers)
        error = (values[row, columns].double() * scale - tile).abs()
        assert torch.equal(error, (every[:, None] * scale - tile).abs().amin(0))


def test_tiles_without_a_number_and_tiles_that_are_none():
    x = numbers(4, 256).float()
    x[0, :128], x[1, 3], x[2, 200] = 0, math.inf, math.nan
    back = dequantize(quantize(x, ScaleTile(1, 128), E4M3), ScaleTile(1, 128))
    assert torch.equal(back[0, :128], torch.zeros(128)) and back[0, 128:].isfinite().all() and back[3].isfinite().all()
    assert back[1, :128].isnan().all() and back[1, 128:].isfinite().all()
    assert back[2, 128:].isnan().all() and back[2, :128].isfinite().all()
    product = multiply(back, torch.ones(3, 256), 128)
    assert [row.isnan().all().item() for row in product] == [False, True, True, False]
    for tile in (ScaleTile(1, 128), ScaleTile(128, 128), ScaleTile(0, 0)):
        values, scales = quantize(torch.ones(0, 256), tile, E4M3)
        assert values.shape == (0, 256) and multiply(dequantize((values, scales), tile), x, 128).shape == (0, 4)
    turned = fp8_turn(quantize(torch.ones(0, 256), ScaleTile(1, 128), E4M3), ScaleTile(1, 128))
    assert torch.equal(multiply(dequantize(turned, ScaleTile(1, 128)), torch.ones(2, 0)), torch.zeros(256, 2))
    assert amax_of(torch.ones(0, 256)).item() == 0


def test_pieces_of_whole_tiles_are_cast_as_the_whole():
    """Cuts along either dim at multiples of 128 give equal bits; a cut inside of a tile does not."""
    w = numbers(768, 512)
    whole = quantize(w, ScaleTile(128, 128), E4M3)
    for dim, parts, same in ((0, 2, True), (0, 3, True), (1, 4, True), (0, 4, False), (1, 8, False)):
        pieces = [quantize(one.contiguous(), ScaleTile(128, 128), E4M3)[0] for one in w.chunk(parts, dim)]
        joined = torch.cat([one.view(torch.uint8) for one in pieces], dim)
        assert torch.equal(joined, whole[0].view(torch.uint8)) == same, (dim, parts)


def test_turned_rows_stand_for_nearly_the_same_numbers():
    """Powers of two: what a scale 2^n times as large changes are numbers that become subnormal."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    tile = ScaleTile(1, 128)
    scaled = quantize(x, tile, E4M3)
    before, after = dequantize(scaled, tile), dequantize(fp8_turn(scaled, tile), tile).t()
    assert (before != after).float().mean() < 1e-3
    assert torch.equal(after, dequantize(quantize(before.t(), tile, E4M3), tile).t())


def test_sums_of_128_are_added_up():
    """As TransformerEngine's: y += (q_a q_b) s_a s_b for each 128 of k. Scales of powers of two commute with rounding."""
    a, b = numbers(4, 384), numbers(130, 384)
    (qa, sa), (qb, sb) = quantize(a, ScaleTile(1, 128), E4M3), quantize(b, ScaleTile(128, 128), E4M3)
    y = torch.zeros(4, 130)
    for at in range(3):
        columns = slice(128 * at, 128 * at + 128)
        sums = qa[:, columns].float() @ qb[:, columns].float().t()
        y += sums * sa[:, at, None] * sb[:, at].repeat_interleave(128)[:130]
    mine = multiply(dequantize((qa, sa), ScaleTile(1, 128)), dequantize((qb, sb), ScaleTile(128, 128)), 128)
    assert torch.equal(y, mine)
    exact = dequantize((qa, sa), ScaleTile(1, 128)).double() @ dequantize((qb, sb), ScaleTile(128, 128)).double().t()
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())


@pytest.mark.parametrize("n, tiles", [(1, 1), (130, 5), (256, 8)])
def test_scales_of_mx_lie_where_tensor_cores_read_them(n, tiles):
    """cuBLAS, "1D block scaling factors layout": place by place."""
    scales = 2.0 ** (mixed(n, tiles) % 20 - 10).float().view(n, tiles)
    scales[0, 0] = math.inf
    found, across = scaled_mm.mx_scales(scales).float(), -(-tiles // 4)
    assert len(found) == -(-n // 128) * 128 * across * 4
    for row in range(n):
        for tile in range(tiles):
            place = (row // 128 * across + tile // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + tile % 4
            assert found[place].item() == scales[row, tile] or (row, tile) == (0, 0) and found[place].isnan()


def test_columns_are_padded_with_zeros_that_no_scale_sees():
    """To whole tiles, and to what tensor cores multiply at a time."""
    x = numbers(150, 256)
    for tile, length in ((BLOCKS, 256), (MX, 160), (WHOLE, 160)):
        values, scales = fp8_cast(x, tile, E4M3, amax_of(x) if tile == WHOLE else None, rows=False, columns=True)
        assert values.shape == (256, length) and not values[:, 150:].float().any()
        assert torch.equal(values[:, :150].float(), quantize(x.t().contiguous(), tile, E4M3)[0].float())
        assert fp8_turn(quantize(x, tile, E4M3), tile)[0].shape == (256, length)
    assert amax_of(torch.tensor([[1.0, math.nan]])).isnan() and amax_of(-x).item() == x.abs().max()


@pytest.mark.parametrize(
    "n, k, m, dtype, taken",
    [
        (32, 48, 5, torch.bfloat16, True),
        (24, 48, 5, torch.bfloat16, False),
        (32, 40, 5, torch.bfloat16, False),
        (32, 48, 0, torch.bfloat16, False),
        (32, 48, 5, torch.float32, False),
    ],
)
def test_torchs_grouped_product_gets_widths_of_16_rows_and_bf16_alone(n, k, m, dtype, taken, monkeypatch):
    """Other products are those of the numbers that fp8 stands for."""
    calls = []
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", lambda *_, **__: calls.append(1), raising=False)
    a = torch.ones(m, k, dtype=torch.float8_e4m3fn), torch.full((m, 1), 2.0)
    b = torch.ones(2, n, k, dtype=torch.float8_e4m3fn), torch.full((2, n, 1), 3.0)
    ends = torch.tensor([m // 2, m], dtype=torch.int32)
    product = scaled_mm.fp8_grouped(a, b, ends, dtype, lambda rows, matrices, _: rows @ matrices[0].T)
    assert calls == [1] * taken
    assert taken or torch.equal(product, torch.full((m, n), 6.0 * k, dtype=dtype))
