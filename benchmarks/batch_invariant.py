# SPDX-License-Identifier: Apache-2.0
"""What --batch-invariant-mode costs: CPU time of steps with and without it, in turn, in one process. With --texts N: of the
generation of N texts at a time, 64 tokens after 192 each.

python benchmarks/batch_invariant.py [--bf16] [--steps 5] [--micro-batch-size 4] [--threads 1] [--hidden-size 512] ...
python benchmarks/batch_invariant.py --texts 8 [--bf16] ...
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt
from megatron.inference.engine import Engine
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.planner.parity import laid_out, parse_layout
from megatron.settings.parse import parse_pretrain
from megatron.training.build import build_run
from megatron.training.step import train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--texts", type=int)
    for name, value in dict(steps=5, micro_batch_size=4, threads=1, layers=4, hidden_size=512, seq_length=512).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    asked = parser.parse_args()
    plain, mode = (start(asked, words) for words in ("", "--batch-invariant-mode"))
    torch.set_num_threads(asked.threads)
    if asked.texts:
        run = partial(seconds_of_generation, asked.texts)
        plain, mode = plain.stages[0].eval(), mode.stages[0].eval()
    else:
        run = seconds
    times = [(run(plain), run(mode)) for _ in range(asked.steps + 1)][1:]
    ratios = [of_mode / of_plain for of_plain, of_mode in times]
    columns = {"plain, s": [a for a, _ in times], "mode, s": [b for _, b in times], "ratio": ratios}
    for name, numbers in columns.items():
        print(f"{name}: median {statistics.median(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})")


def start(asked: argparse.Namespace, words: str):
    """A run of a GPT with a gated MLP, and micro-batches of the size that was asked for."""
    flags = f"""--num-layers {asked.layers} --hidden-size {asked.hidden_size} --num-attention-heads 8 --swiglu --mock-data
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length {asked.seq_length}
        --vocab-size 8192 --lr 1e-4 --global-batch-size 8 --micro-batch-size {asked.micro_batch_size} --train-iters 1000
        --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 {"--bf16" if asked.bf16 else "--precision fp32"} {words}"""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return build_run(laid_out(parse_pretrain(flags.split()), parse_layout("")), pretrain_gpt.recipe())


def seconds(run) -> float:
    """The CPU time of a step."""
    begun = time.process_time()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train_step(run)
    return time.process_time() - begun


def seconds_of_generation(texts: int, model) -> float:
    """The CPU time of some texts."""
    engine = Engine(model, longest=model.facts.settings.seq_length, max_batch=texts)
    for number in range(texts):
        prompt = tuple((place * 31 + number) % 8192 for place in range(192))
        engine.add(Request(prompt, Sampling(64, greedy=True), logprobs=0))
    begun = time.process_time()
    while engine.busy:
        engine.step()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
