# SPDX-License-Identifier: Apache-2.0
"""On a GPU: casts to fp8 are the reference's to the bit, at the sizes of models; products are those of the numbers that
were cast; a training in fp8 goes on as on a CPU.
"""

import pytest
import torch

from megatron.fused_kernels import SCALED_MM, TRITON, Case, choose_kernel, fp8
from tests.fused_kernels.interpret_kernels import drawn, unequal

pytestmark = pytest.mark.gpu
CASE = Case("cuda", torch.bfloat16)


def of(op: str, name: str):
    chosen = choose_kernel(op, CASE)
    if chosen.name != name:
        pytest.skip(f"{op} runs in {chosen.name} here")
    return chosen.run


def wide(n: int, k: int) -> torch.Tensor:
    """Numbers of many powers of two, zeros, subnormal ones, inf and NaN."""
    x = drawn(n, k) * torch.logspace(-20, 20, n)[:, None]
    x[0, :128], x[10] = 0, 1e-38
    x[5, 3], x[n - 9, k - 1] = torch.inf, torch.nan
    return x.bfloat16().cuda()


@pytest.mark.parametrize("kind", [fp8.E4M3, fp8.E5M2], ids=str)
@pytest.mark.parametrize("tile", [fp8.BLOCKS, fp8.MX, fp8.SQUARES, fp8.WHOLE], ids=str)
def test_casts_are_the_references_to_the_bit(tile, kind):
    cast, turn = of("fp8_cast", TRITON), of("fp8_turn", TRITON)
    x = wide(4096, 4096)
    amax = None if tile.columns else fp8.amax_of(x.nan_to_num(1.0, 1.0))
    for rows, columns in ((True, False), (False, True), (True, True)):
        found, wanted = (run(x, tile, kind, amax, rows, columns) for run in (cast, fp8.fp8_cast))
        assert [unequal(a, b) for a, b in zip(found, wanted, strict=True)] == [0.0] * len(wanted)
    if tile.rows <= 1:
        rows = fp8.fp8_cast(x, tile, kind, amax)
        assert [unequal(a, b) for a, b in zip(turn(rows, tile), fp8.fp8_turn(rows, tile), strict=True)] == [0.0, 0.0]


@pytest.mark.parametrize("n", [1, 129, 8192])
@pytest.mark.parametrize("k", [640, 1024])
@pytest.mark.parametrize(
    "op, of_a, of_b",
    [
        ("fp8_tensorwise", fp8.WHOLE, fp8.WHOLE),
        ("fp8_blockwise", fp8.BLOCKS, fp8.BLOCKS),
        ("fp8_blockwise_square", fp8.BLOCKS, fp8.SQUARES),
        ("fp8_mxfp8", fp8.MX, fp8.MX),
    ],
)
def test_products_are_those_of_the_cast_numbers(op, of_a, of_b, n, k):
    run = of(op, SCALED_MM)
    a = fp8.quantize(drawn(n, k).bfloat16().cuda(), of_a, fp8.E5M2)
    b = fp8.quantize(drawn(256, k, seed=1).bfloat16().cuda(), of_b, fp8.E4M3)
    exact = fp8.dequantize(a, of_a).double() @ fp8.dequantize(b, of_b).double().t()
    for dtype, bound in ((torch.bfloat16, 3e-3), (torch.float32, 1e-3)):
        assert ((run(a, b, dtype).double() - exact).norm() / exact.norm()).item() < bound
    bias = drawn(256, seed=2).bfloat16().cuda()
    found = run(a, b, torch.bfloat16, bias).double()
    assert ((found - exact - bias).norm() / exact.norm()).item() < 6e-3


@pytest.mark.parametrize("lengths", [[5, 0, 200], [0, 0, 64], [1000, 24, 3000]])
def test_grouped_products_are_those_of_the_cast_numbers(lengths):
    """And no expert's rows are another's. The host waits for nothing."""
    run, m, k, n = of("fp8_grouped", SCALED_MM), sum(lengths), 1024, 256
    a = fp8.quantize(drawn(m, k).bfloat16().cuda(), fp8.ROWS, fp8.E4M3)
    values, scales = fp8.quantize(drawn(3 * n, k, seed=1).bfloat16().cuda(), fp8.ROWS, fp8.E4M3)
    matrices = fp8.dequantize((values, scales), fp8.ROWS).double().view(3, n, k)
    rows = fp8.dequantize(a, fp8.ROWS).double().split(lengths)
    exact = torch.cat([one @ matrix.t() for one, matrix in zip(rows, matrices, strict=True)])
    ends = torch.tensor(lengths).cumsum(0).int().cuda()
    torch.cuda.set_sync_debug_mode("error")
    found = [run(a, (values.view(3, n, k), scales.view(3, n, 1)), ends, torch.bfloat16, None, fast) for fast in (0, 1)]
    torch.cuda.set_sync_debug_mode("default")
    for one, bound in zip(found, (3e-3, 1e-2), strict=True):
        assert ((one.double() - exact).norm() / exact.norm()).item() < bound


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256"


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "blockwise", "blockwise --fp8-param-gather", f"tensorwise --fp8-param-gather {EXPERTS}"]
)
def test_a_training_goes_as_on_a_cpu(recipe, tmp_path):
    """Losses of ten steps, in the kernels and in the reference."""
    import pretrain_gpt
    from tests.training.test_plain_loop import records

    flags = f"""--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --mock-data --vocab-size 500
        --micro-batch-size 4 --global-batch-size 8 --train-iters 10 --eval-iters 0 --lr 1e-3 --hidden-dropout 0
        --attention-dropout 0 --precision bf16 --fp8-format hybrid --fp8-recipe {recipe} --log-interval 1"""
    losses = {}
    for device in ("cpu", "cuda"):
        pretrain_gpt.main(f"{flags} --device {device} --save {tmp_path / device}".split())
        losses[device] = [one["lm loss"] for one in records(tmp_path / device, "step")]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=5e-3)
