# SPDX-License-Identifier: Apache-2.0
"""A step of a mixture with and without --overlap-moe-expert-parallel-comm, over two gloo ranks with ep 2, in turns.

    OMP_NUM_THREADS=1 python benchmarks/turns.py
    OMP_NUM_THREADS=1 python benchmarks/turns.py --link 10       # each exchange takes at least 10 ms from its launch

Prints the median seconds of a step, of CPU time and of waits for exchanges of a rank, and their ratios over the rounds.
On a CPU an exchange uses the cores that compute. --link adds what a network would take: a rank that waits for it sleeps.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt
from megatron.mpu import collectives
from megatron.mpu.forked import run_ranks
from megatron.training import loop

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --swiglu --disable-bias-linear "
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 1e-2 --mock-data --vocab-size 4096 "
    "--micro-batch-size 2 --lr 1e-3 --eval-iters 0 --device cpu --num-workers 0 --expert-model-parallel-size 2"
)
FLAGS = {"apart": "", "turns": "--overlap-moe-expert-parallel-comm"}
WARM = 2  # steps that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micros", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--link", type=float, default=0.0, help="least milliseconds of an exchange")
    asked = parser.parse_args()
    words = f"{MODEL} --train-iters {WARM + asked.steps} --global-batch-size {4 * asked.micros}"
    found = {name: [] for name in FLAGS}
    for _ in range(asked.rounds):
        for name, flag in FLAGS.items():
            found[name].append(run_ranks(2, measure, f"{words} {flag}", asked.link / 1000, timeout=600)[0])
    for place, what in enumerate(("seconds", "CPU seconds", "seconds in waits for exchanges")):
        columns = {name: [one[place] for one in rounds] for name, rounds in found.items()}
        ratios = [turns / apart for apart, turns in zip(columns["apart"], columns["turns"], strict=True)]
        medians = ", ".join(f"{name} {statistics.median(values):.3f}" for name, values in columns.items())
        print(
            f"{what} of a step: {medians}; ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def measure(rank: int, words: str, link: float) -> tuple[float, ...]:
    """The medians of this rank's steps."""
    torch.set_num_threads(1)
    times, step, start = [], loop.train_step, collectives.start_all_to_all
    now = lambda: (time.perf_counter(), time.process_time(), Exchange.waited)

    def train_step(run):
        began = now()
        result = step(run)
        times.append([end - start for start, end in zip(began, now(), strict=True)])
        return result

    loop.train_step = train_step
    collectives.start_all_to_all = lambda *args: Exchange(start(*args), time.perf_counter() + link)
    pretrain_gpt.main(words.split())
    return tuple(map(statistics.median, zip(*times[WARM:], strict=True)))


class Exchange:
    """A message that does not arrive before a moment."""

    waited = 0.0  # seconds of this process

    def __init__(self, work, moment: float):
        self.work, self.moment = work, moment

    def wait(self) -> None:
        began = time.perf_counter()
        self.work.wait()
        time.sleep(max(0.0, self.moment - time.perf_counter()))
        Exchange.waited += time.perf_counter() - began


if __name__ == "__main__":
    main()
