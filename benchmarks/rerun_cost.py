# SPDX-License-Identifier: Apache-2.0
"""What --rerun-mode costs a step, beside the same step without it.

    OMP_NUM_THREADS=1 python benchmarks/rerun_cost.py --repeats 3

Two ranks train a small GPT in each of LAYOUTS. The ways take turns; of each: seconds of CPU of a rank for a step (median of
its steps), as a ratio to the steps of `disabled` in the same turn (median and range over turns).
"""

import argparse
import os
import statistics
import tempfile
import time

import torch

import pretrain_gpt
from megatron.mpu.forked import run_ranks
from megatron.settings.parse import parse_pretrain
from megatron.training import loop
from megatron.training.rules import resolve

LAYOUTS = {
    "dp2": "",
    "ZeRO 1, dp2": "--use-distributed-optimizer",
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
}
WAYS = {
    "disabled": "",
    "validate_results": "--rerun-mode validate_results",
    "each 10th": "--rerun-mode validate_results --rerun-interval 10",
    "each": "--rerun-mode validate_results --rerun-interval 1",
    "report_stats": "--rerun-mode report_stats",
}
MODEL = (
    "--num-layers 4 --hidden-size 192 --num-attention-heads 4 --seq-length 128 --mock-data --vocab-size 4000 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --device cpu --num-workers 0 --log-interval 1000 "
    "--no-progress-bar "
)
SKIPPED = 2  # the first steps, which are slower


def body(rank: int, flags: str, steps: int) -> list[float]:
    """Seconds of CPU of each step."""
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    train_step, seconds = loop.train_step, []

    def timed(run):
        began = time.process_time()
        done = train_step(run)
        seconds.append(time.process_time() - began)
        return done

    loop.train_step = timed
    flags = f"{MODEL} --train-iters {steps} {flags}"
    loop.pretrain(resolve(parse_pretrain(flags.split()), 2), pretrain_gpt.recipe())
    return seconds[SKIPPED:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    options = parser.parse_args()
    print("| layout | " + " | ".join(WAYS) + " |\n" + "|---" * (len(WAYS) + 1) + "|")
    for layout in options.layouts:
        turns: list[dict[str, float]] = []
        for _ in range(options.repeats):
            turn = {}
            for way, flags in WAYS.items():
                with tempfile.TemporaryDirectory(prefix="rerun-") as folder:
                    saved = f"--metrics-file {folder}/metrics.jsonl"
                    ranks = run_ranks(2, body, f"{LAYOUTS[layout]} {flags} {saved}", options.steps, timeout=900)
                # The mean where some steps are computed again, and others are not.
                middle = statistics.fmean if way == "each 10th" else statistics.median
                turn[way] = statistics.fmean(middle(seconds) for seconds in ranks)
            turns.append(turn)
        cells = [f"{statistics.median(turn['disabled'] for turn in turns):.3f} s"]
        for way in [*WAYS][1:]:
            ratios = sorted(turn[way] / turn["disabled"] for turn in turns)
            cells.append(f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"| {layout} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
