# SPDX-License-Identifier: Apache-2.0
"""The planner's times against this machine: calibrate, predict, train a few steps, compare.

    OMP_NUM_THREADS=1 python benchmarks/planner.py                 # ten configurations on CPU processes of one thread
    OMP_NUM_THREADS=1 python benchmarks/planner.py --steps 10 --output results.json

Measured is the fastest of the steps behind the first: what the machine can do when nothing else runs on it.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BASE = """--seq-length 256 --num-layers 4 --mock-data --vocab-size 8192 --lr 1e-3 --train-iters 100 --eval-iters 0
    --device cpu --num-workers 0"""
SMALL = "--hidden-size 256 --num-attention-heads 8 --global-batch-size 16"
WIDE = "--hidden-size 512 --num-attention-heads 8"
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
CASES = {  # name -> ranks, flags
    "5 M, micro-batch 16": (1, f"{SMALL} {PLAIN} --micro-batch-size 16"),
    "5 M, micro-batch 2": (1, f"{SMALL} {PLAIN} --micro-batch-size 2"),
    "5 M, bf16": (1, f"{SMALL} {PLAIN} --micro-batch-size 16 --bf16"),
    "5 M, dropout 0.1": (1, f"{SMALL} --micro-batch-size 16"),
    "5 M, full recomputation": (1, f"{SMALL} {PLAIN} --micro-batch-size 16 --recompute-granularity full"),
    "17 M, micro-batch 4": (1, f"{WIDE} {PLAIN} --global-batch-size 8 --micro-batch-size 4"),
    "17 M, sequence 1024": (1, f"{WIDE} {PLAIN} --global-batch-size 2 --seq-length 1024"),
    "5 M, dp 2": (2, f"{SMALL} {PLAIN} --micro-batch-size 8"),
    "5 M, dp 2, ZeRO 2": (2, f"{SMALL} {PLAIN} --micro-batch-size 4 --sharding-stage 2"),
    "5 M, tp 2": (2, f"{SMALL} {PLAIN} --micro-batch-size 8 --tp 2"),
    "5 M, tp 2, sequence parallel": (2, f"{SMALL} {PLAIN} --micro-batch-size 8 --tp 2 --sequence-parallel"),
    "5 M, pp 2": (2, f"{SMALL} {PLAIN} --micro-batch-size 2 --pp 2"),
    "5 M, pp 2, zb-h1": (2, f"{SMALL} {PLAIN} --micro-batch-size 2 --pp 2 --pipeline-schedule zb-h1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", help="JSON file for the figures")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron.planner.calibrate import measure

    device = measure(print)
    print(f"\n| configuration | ranks | predicted | measured | ratio |\n|{'---|' * 5}")
    rows = []
    for name, (ranks, flags) in CASES.items():
        predicted, measured = predict(device, ranks, flags), train(ranks, flags, asked.steps)
        rows.append(dict(name=name, ranks=ranks, predicted=predicted, measured=measured))
        print(
            f"| {name} | {ranks} | {1000 * predicted:.0f} ms | {1000 * measured:.0f} ms | {predicted / measured:.2f} |",
            flush=True,
        )
    ratios = sorted(row["predicted"] / row["measured"] for row in rows)
    print(f"\nratios from {ratios[0]:.2f} to {ratios[-1]:.2f}, the middle one {ratios[len(ratios) // 2]:.2f}")
    if asked.output:
        Path(asked.output).write_text(json.dumps(dict(device=asdict(device), rows=rows), indent=1) + "\n")


def settings(ranks: int, flags: str):
    """Resolved settings of a case."""
    from megatron.settings.parse import parse_pretrain
    from megatron.training.rules import resolve

    return resolve(parse_pretrain(f"{BASE} {flags}".split()), ranks)


def predict(device, ranks: int, flags: str) -> float:
    """Seconds of a step as the planner sees it."""
    from megatron.planner import target
    from megatron.planner.cluster import Cluster
    from megatron.planner.layout import Layout
    from megatron.planner.speed import step

    config, cluster = settings(ranks, flags), Cluster(replace(device), ranks, ranks)
    layout = Layout.of(config, ranks)
    job, _ = target.job_of(config, cluster, layout.dp)
    return step(job, layout, cluster).seconds


def train(ranks: int, flags: str, steps: int) -> float:
    """Seconds of the fastest real step; every case in processes of its own."""
    from megatron.mpu.forked import run_ranks

    return min(run_ranks(ranks, _train, settings(ranks, flags), steps, timeout=600)[0])


def _train(rank: int, config, steps: int) -> list[float]:
    import pretrain_gpt
    from megatron.training.build import build_run
    from megatron.training.step import train_step

    times = []
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run = build_run(config, pretrain_gpt.recipe())
        for stage in run.stages:
            stage.train()
        for _ in range(steps + 1):
            start = time.perf_counter()
            train_step(run)
            times.append(time.perf_counter() - start)
        run.close()
    return times[1:]


if __name__ == "__main__":
    main()
