# SPDX-License-Identifier: Apache-2.0
"""fp8 products of linear layers on one GPU beside bf16 and torchao: errors, speed of products and casts, and of a layer.

    python benchmarks/gpu_fp8.py                                    # about three minutes; results.md in runs/gpu-fp8
    python benchmarks/gpu_fp8.py --device cpu --sizes 256x256x384   # to see that it runs

A size is tokens x inputs x outputs. Whole models: `gpu_train.py --contenders suite suite-fp8-tensorwise
suite-fp8-blockwise`. torchao's layers are measured where the package is installed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megatron.fused_kernels import Case, choose_kernel, describe_kernels, fp8
from megatron.model import weights
from megatron.model.fp8_product import PRODUCTS
from megatron.model.kinds.experts.grouped import MultiplyByExpert, Rows
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Precision

SIZES = ["8192x4096x4096", "8192x4096x12288", "8192x4096x16384", "8192x16384x4096", "8192x2048x8192", "32768x768x3072"]
OPS = {  # op of the table of kernels -> tiles of a and b
    "fp8_tensorwise": (fp8.WHOLE, fp8.WHOLE),
    "fp8_blockwise_square": (fp8.BLOCKS, fp8.SQUARES),
    "fp8_blockwise": (fp8.BLOCKS, fp8.BLOCKS),
    "fp8_mxfp8": (fp8.MX, fp8.MX),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="TOKENSxINPUTSxOUTPUTS")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", default="runs/gpu-fp8", help="folder")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no GPU here: nothing to measure\n  -> --device cpu shows that the benchmark runs")
    folder, rows = Path(asked.output), []
    folder.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    head = [f"# fp8 on one {name}", "", f"torch {torch.__version__}; `python benchmarks/gpu_fp8.py`", ""]
    for recipe in PRODUCTS:
        head += [f"- {line}" for line in describe_kernels(asked.device, torch.bfloat16, recipe)]
    for size in asked.sizes:
        for row in measured(*map(int, size.split("x")), asked):
            rows.append(dict(size=size, **row))
            print(json.dumps(rows[-1]), flush=True)
            (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
            (folder / "results.md").write_text("\n".join([*head, "", *table(rows)]) + "\n")


def measured(n: int, i: int, o: int, asked):
    """A row for each product, cast and layer of a size."""
    x, w, dy = (drawn(*shape, device=asked.device) for shape in ((n, i), (o, i), (n, o)))
    seconds = lambda call: timed(call, asked)
    flops, plain = 2 * n * i * o, seconds(lambda: x @ w.t())
    yield dict(what="product, bf16", seconds=plain, tflops=flops / plain / 1e12)
    for op, (of_a, of_b) in OPS.items():
        chosen = choose_kernel(op, Case(asked.device, torch.bfloat16))
        if asked.device == "cuda" and chosen.name == "torch":
            continue  # no tensor cores for it
        a, b = fp8.quantize(x, of_a, fp8.E4M3), fp8.quantize(w, of_b, fp8.E4M3)
        rows = slice(0, 256)  # those that are compared with fp64
        exact = fp8.dequantize((a[0][rows], a[1][: 256 if of_a.columns else 1]), of_a).double()
        exact = exact @ fp8.dequantize(b, of_b).double().t()
        for fast in (False, True) if op == "fp8_tensorwise" else (False,):
            run = lambda fast=fast, chosen=chosen, a=a, b=b: chosen.run(a, b, torch.bfloat16, None, fast)
            error = ((run()[rows].double() - exact).norm() / exact.norm()).item()
            took = seconds(run)
            rate = dict(seconds=took, tflops=flops / took / 1e12, error=error, ratio=plain / took)
            yield dict(what=f"product, {op}{', fast' * fast}", **rate)
    yield from products_of_experts(x, w, flops, seconds)
    cast, turn = (choose_kernel(op, Case(asked.device, torch.bfloat16)).run for op in ("fp8_cast", "fp8_turn"))
    for words, tile, columns in (
        ("rows of 1 x 128", fp8.BLOCKS, False),
        ("rows and columns of 1 x 128", fp8.BLOCKS, True),
        ("squares", fp8.SQUARES, True),
        ("a tensor", fp8.WHOLE, False),
        ("each row", fp8.ROWS, False),
    ):
        source = w if tile == fp8.SQUARES else x
        amax = fp8.amax_of(source) if tile == fp8.WHOLE else None
        took = seconds(lambda: cast(source, tile, fp8.E4M3, amax, columns=columns))  # noqa: B023
        moved = source.numel() * (3 + columns)
        yield dict(what=f"cast, {words}", seconds=took, terabytes=moved / took / 1e12)
    rows_of_x = fp8.quantize(x, fp8.BLOCKS, fp8.E4M3)
    took = seconds(lambda: turn(rows_of_x, fp8.BLOCKS))
    yield dict(what="turn, 1 x 128", seconds=took, terabytes=2 * x.numel() / took / 1e12)
    yield from layers(x, w, dy, seconds)


def products_of_experts(x, w, flops, seconds, experts: int = 8):
    """Rows times the matrix of their expert, of which each has as many rows."""
    each = len(x) // experts
    rows = Rows(torch.full((experts,), each, device=x.device), each * experts, [each] * experts)
    x, multiply, matrices = x[: rows.total], MultiplyByExpert(rows), w.expand(experts, *w.shape).contiguous()
    a, (values, scales) = (fp8.quantize(one, fp8.ROWS, fp8.E4M3) for one in (x, matrices.flatten(0, 1)))
    b = values.view(matrices.shape), scales.view(experts, -1, 1)
    plain = seconds(lambda: multiply(x, matrices, None))
    yield dict(what=f"product of {experts} experts, bf16", seconds=plain, tflops=flops / plain / 1e12)
    run = choose_kernel("fp8_grouped", Case(x.device.type, torch.bfloat16)).run
    took = seconds(lambda: run(a, b, rows.ends, torch.bfloat16, multiply, True))
    rate = dict(seconds=took, tflops=flops / took / 1e12, ratio=plain / took)
    yield dict(what=f"product of {experts} experts, fp8_grouped", **rate)


def layers(x, w, dy, seconds):
    """Forward and backward pass of a linear layer."""
    plain = None
    for name, layer in contenders(w):
        own = x.clone().requires_grad_()

        def passes(layer=layer, own=own):
            own.grad = None
            layer(own).backward(dy)

        took = seconds(passes)
        plain = plain or took
        yield dict(what=f"layer, {name}", seconds=took, ratio=plain / took)


def contenders(w: torch.Tensor):
    def ours(recipe=None, form="hybrid"):
        layer = ColumnParallelLinear(
            weights.column(w.shape[1], (w.shape[0],), 1.0, bias=False), Mesh().tp, dtype=w.dtype, device=w.device
        )
        with torch.no_grad():
            layer.weight.copy_(w)
        if recipe:
            layer.product = PRODUCTS[recipe](layer, "layer", Precision(fp8_format=form, fp8_recipe=recipe))
        return layer

    yield "bf16", ours()
    for recipe, op in (("tensorwise", "fp8_tensorwise"), ("blockwise", "fp8_blockwise"), ("mxfp8", "fp8_mxfp8")):
        if w.device.type == "cpu" or choose_kernel(op, Case("cuda", torch.bfloat16)).name != "torch":
            yield recipe, ours(recipe, "hybrid" if recipe == "tensorwise" else "e4m3")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return
    if w.device.type == "cuda":
        model = torch.nn.Sequential(torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype))
        config = Float8LinearConfig.from_recipe_name("tensorwise")
        yield "torchao tensorwise, compiled", torch.compile(convert_to_float8_training(model, config=config))


def drawn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(device, torch.bfloat16)


def timed(call: Callable, asked) -> float:
    """Median seconds of a call, of five groups of calls that nobody waits between."""
    wait = torch.cuda.synchronize if asked.device == "cuda" else lambda: None
    for _ in range(3):
        call()
    times, count = [], max(1, asked.repeats // 5)
    for _ in range(5):
        wait()
        began = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        times.append((time.perf_counter() - began) / count)
    return statistics.median(times)


def table(rows: list[dict]) -> list[str]:
    cell = lambda row, key, form: format(row[key], form) if key in row else ""
    lines = ["| tokens x inputs x outputs | | ms | TFLOP/s | TB/s | error | of bf16 |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["size"], row["what"], f"{row['seconds'] * 1e3:.3f}", cell(row, "tflops", ".0f")]
        cells += [cell(row, "terabytes", ".2f"), cell(row, "error", ".1e"), cell(row, "ratio", ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
