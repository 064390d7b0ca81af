# SPDX-License-Identifier: Apache-2.0
"""Speed of bf16 training on one GPU: tokens/s, model TFLOP/s, MFU and peak memory, eager and compiled.

    python benchmarks/gpu_train.py                                  # 124 M, 345 M and 1.3 B
    python benchmarks/gpu_train.py --models 124M:16 --steps 30 --output results.json

MODEL:N is a model and its micro-batch. Each step is a real training step of the suite on synthetic samples: data loading,
forward, backward, clipping, AdamW with fp32 main weights.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SHAPES = {"124M": "gpt2-small", "345M": "gpt2-medium", "1.3B": "1.3B"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["124M:32", "345M:16", "1.3B:8"], metavar="MODEL:MICRO_BATCH")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--output", help="JSON file for the figures")
    asked = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU here: nothing to measure")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, sequence 1024, dropout 0")
    print(
        f"{'model':>6} {'mode':>9} {'micro':>5} {'ms/step':>8} {'tokens/s':>9} {'TFLOP/s':>8} {'MFU':>6} {'peak GiB':>8}"
    )
    rows = []
    for model in asked.models:
        name, _, micro = model.partition(":")
        for mode in asked.modes:
            try:
                row = measure(name, int(micro or 8), mode, asked.steps, asked.warmup)
            except torch.OutOfMemoryError as error:
                print(f"{name:>6} {mode:>9} {micro:>5}  out of memory: {str(error).splitlines()[0]}")
                continue
            rows.append(row)
            mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
            print(
                f"{name:>6} {mode:>9} {micro:>5} {row['ms']:8.1f} {row['tokens_per_second']:9.0f} "
                f"{row['tflops']:8.1f} {mfu:>6} {row['peak_gib']:8.1f}",
                flush=True,
            )
    if asked.output:
        Path(asked.output).write_text(json.dumps(rows, indent=1))


def measure(name: str, micro: int, mode: str, steps: int, warmup: int) -> dict:
    """Median step of one model. The run is built as pretrain_gpt.py builds it."""
    import torch

    import pretrain_gpt
    from megatron.model.recipe import facts_of
    from megatron.settings.parse import parse_pretrain
    from megatron.telemetry.peak_flops import peak_flops
    from megatron.training.build import build_run
    from megatron.training.loop import train_step
    from megatron.training.rules import resolve

    flags = f"""--model-name-or-path {SHAPES.get(name, name)} --mock-data --vocab-size 50256 --micro-batch-size {micro}
        --train-iters {steps + warmup} --lr 1e-4 --hidden-dropout 0 --attention-dropout 0 --bf16 --device cuda
        --eval-iters 1 --log-interval 1000000"""
    config = resolve(parse_pretrain([*flags.split(), *["--torch-compile"] * (mode == "compiled")]), 1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = build_run(config, pretrain_gpt.recipe())
    for stage in run.stages:
        stage.train()
    times = []
    for _ in range(warmup + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        train_step(run)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    run.close()
    seconds = statistics.median(times[warmup:])
    tokens = micro * config.model.seq_length / seconds
    rate = tokens * facts_of(config, run.vocab_size).flops()
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    return dict(
        model=name,
        mode=mode,
        micro_batch=micro,
        ms=seconds * 1e3,
        tokens_per_second=tokens,
        tflops=rate / 1e12,
        mfu=peak and rate / peak,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
    )


if __name__ == "__main__":
    main()
