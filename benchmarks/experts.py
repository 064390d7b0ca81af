# SPDX-License-Identifier: Apache-2.0
"""A training step of a mixture of experts against our dense model of the same active parameters, and against transformers'
Mixtral of the same shape, in one process, taking turns.

    python benchmarks/experts.py                                        # 1 and 2 threads, then 2 processes: 8 minutes
    python benchmarks/experts.py --shapes small --precisions bf16 --threads 1 --rounds 9 --processes 0
    python benchmarks/experts.py --peers all --rounds 2                 # every variant of the peer

A step is forward, backward, clipping and AdamW on fp32 weights, with a load balancing loss, without dropout, over 4096
tokens. Each of `SHAPES` is Mixtral's kind of network: RMSNorm, rotary positions, SwiGLU, no biases, an output layer of its
own. The dense model's MLP is as wide as the experts of a token together; everything else is equal. Its optimizer has fewer
weights: a step of more tokens hides that, a step of fewer shows it.

Peers differ in attention (torch's sdpa, or explicit), in the products of experts (`experts_implementation`: eager is a
loop, grouped_mm is torch's op; batched_mm is left out, because it copies the weights for each token), and in bf16 in the
weights (fp32 under autocast, or bf16 with fp32 main weights, as ours). All have torch's fused AdamW, and share the process
with ours, so they profit from `keep_memory`. The fastest one counts.

Every round runs one step of each. A ratio is the median over rounds of (time of the other / time of ours): above 1, ours is
faster. It is taken of CPU seconds of all threads, which other programs disturb less, and of the clock. Then two processes
of one thread train the first shape: with ep 2, and the dense model with dp 2.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from peer_steps import Times, adamw_step, cpu_seconds

import pretrain_gpt
from megatron.model.command_line import parse_any
from megatron.mpu.cpu_memory import keep_memory
from megatron.training.build import build_run
from megatron.training.rules import resolve
from megatron.training.step import train_step

ROOT = Path(__file__).resolve().parent.parent
OURS, DENSE, VOCABULARY = "experts", "dense", 8191


class Shape(NamedTuple):
    """ffn: width of an expert; k: experts of a token; batch: samples of a step, in one micro-batch."""

    layers: int
    hidden: int
    heads: int
    experts: int
    k: int
    ffn: int
    length: int
    batch: int

    def flags(self, precision: str, dense: bool = False) -> str:
        experts = f"""--num-experts {self.experts} --moe-router-topk {self.k} --moe-ffn-hidden-size {self.ffn}
            --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"""
        return f"""--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads}
            --ffn-hidden-size {self.k * self.ffn} --seq-length {self.length} --vocab-size {VOCABULARY}
            --make-vocab-size-divisible-by 1 --position-embedding-type rope --normalization RMSNorm --swiglu
            --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
            --lr 3e-4 --mock-data --num-workers 0 --eval-iters 0 --log-interval 100000
            --train-iters 100000 --device cpu --precision {precision} {"" if dense else experts}"""


SHAPES = {
    "small": Shape(4, 256, 4, 8, 2, 512, 256, 16),
    "medium": Shape(4, 512, 8, 8, 2, 1024, 512, 8),
    "fine": Shape(4, 512, 8, 64, 8, 128, 512, 8),
}


def ours(dense: bool, shape: Shape, precision: str) -> Callable[[], None]:
    """A step of the suite's own training loop."""
    batch = f" --micro-batch-size {shape.batch} --global-batch-size {shape.batch}"
    run = build_run(resolve(parse_any((shape.flags(precision, dense) + batch).split()), 1), pretrain_gpt.recipe())
    for stage in run.stages:
        stage.train()
    return lambda: train_step(run)


def mixtral(shape: Shape, attention: str, experts: str) -> torch.nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.k,
        max_position_embeddings=shape.length,
        sliding_window=None,
        use_cache=False,
        output_router_logits=True,
        router_aux_loss_coef=1e-2,
        attn_implementation=attention,
        experts_implementation=experts,
    )
    return MixtralForCausalLM(config).train()


def hugging_face(
    attention: str, experts: str, main: bool, compiled: bool, shape: Shape, precision: str
) -> Callable[[], None]:
    """A step of transformers' Mixtral. main: weights are bf16, and the optimizer has fp32 ones; otherwise autocast."""
    module, half = mixtral(shape, attention, experts), precision == "bf16"
    run = torch.compile(module) if compiled else module

    def loss() -> torch.Tensor:
        tokens = torch.randint(VOCABULARY, (shape.batch, shape.length + 1))
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return run(inputs, labels=labels, shift_labels=labels).loss

    return adamw_step(module, main, half and not main, loss)


def peers(precision: str, which: str) -> dict[str, Callable]:
    """Name -> a peer's step from shape and precision. which: those that were fastest ("best"), "all", or "compiled"."""
    found, compiled = {}, which == "compiled"
    for attention, experts in itertools.product(("sdpa", "eager"), ("grouped_mm", "eager")):
        for main in (True, False) if precision == "bf16" else (False,):
            words = ["mixtral", attention, experts, *["main"] * main, *["compiled"] * compiled]
            found["-".join(words)] = partial(hugging_face, attention, experts, main, compiled)
    return {name: found[name] for name in BEST[precision]} if which == "best" else found


BEST = {
    "fp32": ["mixtral-sdpa-grouped_mm", "mixtral-sdpa-eager"],
    "bf16": ["mixtral-eager-grouped_mm-main", "mixtral-eager-eager-main", "mixtral-eager-eager"],
}


def measure(contenders: dict[str, Callable[[], None]], rounds: int, warmup: int) -> dict[str, Times]:
    """The times of steps that take turns."""
    times = {name: Times([], []) for name in contenders}
    for number in range(-warmup, rounds):
        for name, step in contenders.items():
            start = time.perf_counter(), cpu_seconds()
            step()
            if number >= 0:
                times[name].wall.append(time.perf_counter() - start[0])
                times[name].cpu.append(cpu_seconds() - start[1])
    return times


def ratio(other: list[float], own: list[float]) -> float:
    return statistics.median(theirs / mine for theirs, mine in zip(other, own, strict=True))


def compare(name: str, precision: str, threads: int, asked: argparse.Namespace) -> str:
    """A row of the table: steps of one shape."""
    torch.set_num_threads(threads)
    shape = SHAPES[name]
    with contextlib.redirect_stdout(io.StringIO()):
        steps = {OURS: ours(False, shape, precision), DENSE: ours(True, shape, precision)}
    steps |= {peer: make(shape, precision) for peer, make in peers(precision, asked.peers).items()}
    times = measure(steps, asked.rounds, asked.warmup)
    median = {contender: statistics.median(of.wall) for contender, of in times.items()}
    found = {
        contender: dict(
            ms=round(median[contender] * 1e3, 1),
            wall=round(ratio(of.wall, times[OURS].wall), 3),
            cpu=round(ratio(of.cpu, times[OURS].cpu), 3),
        )
        for contender, of in times.items()
    }
    facts = dict(shape=name, precision=precision, threads=threads, torch=torch.__version__, rounds=asked.rounds)
    print(json.dumps(facts | dict(contenders=found)), flush=True)
    best = min(set(times) - {OURS, DENSE}, key=median.get)
    tokens = shape.length * shape.batch / median[OURS]
    cells = [f"{name}, {precision}, {threads}", f"{median[OURS] * 1e3:.0f} ms, {tokens:,.0f} tokens/s"]
    for other, label in ((DENSE, ""), (best, f" ({best})")):
        values = found[other]
        cells.append(f"{values['ms']:.0f} ms{label} | {values['wall']:.2f} ({values['cpu']:.2f})")
    return f"| {' | '.join(cells)} |"


# ---- two processes ---------------------------------------------------------------------------------------------------


def step_seconds(flags: str, steps: int) -> float:
    """The median of the steps of a run of two processes of one thread, the first three left out."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 pretrain_gpt.py {flags}"
        limits = f" --train-iters {steps + 3} --metrics-file {metrics}"
        words = command.replace("--train-iters 100000", "").split() + limits.split()
        environment = os.environ | dict(OMP_NUM_THREADS="1")
        if subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"a run failed: {' '.join(words)}")
        records = map(json.loads, metrics.read_text().splitlines())
        return statistics.median([record["seconds"] for record in records if record["kind"] == "step"][3:])


def compare_processes(name: str, precision: str, rounds: int) -> str:
    """A row: ep 2 against the dense model with dp 2, runs of their own that take turns."""
    shape = SHAPES[name]
    batch = f" --micro-batch-size {shape.batch // 2} --global-batch-size {shape.batch}"
    runs = {
        "ep 2": shape.flags(precision) + batch + " --expert-model-parallel-size 2",
        "dp 2": shape.flags(precision) + batch,
        "dense, dp 2": shape.flags(precision, dense=True) + batch,
    }
    seconds = {run: [] for run in runs}
    for _ in range(rounds):
        for run, flags in runs.items():
            seconds[run].append(step_seconds(flags, 6))
    print(json.dumps(dict(shape=name, precision=precision, processes=2, seconds=seconds)), flush=True)
    cells = [f"{run} {statistics.median(of) * 1e3:.0f} ms" for run, of in seconds.items()]
    ratios = [f"{ratio(seconds[other], seconds['ep 2']):.2f}" for other in ("dense, dp 2", "dp 2")]
    return f"| {name}, {precision} | {' | '.join([*cells, *ratios])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precisions", nargs="+", choices=list(BEST), default=list(BEST))
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--peers", choices=["best", "all", "compiled"], default="best")
    parser.add_argument("--processes", type=int, default=2, metavar="ROUNDS", help="rounds of two processes; 0: none")
    asked = parser.parse_args()
    keep_memory()
    rows = [
        compare(shape, precision, threads, asked)
        for threads in asked.threads
        for shape in asked.shapes
        for precision in asked.precisions
    ]
    print("\n| shape, format, threads | experts | dense | ratio | peer | ratio |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    if asked.processes:
        rows = [compare_processes(asked.shapes[0], precision, asked.processes) for precision in asked.precisions]
        print("\n| two processes | experts | experts | dense | dense / ep 2 | dp 2 / ep 2 |\n|---|---|---|---|---|---|")
        print("\n".join(rows))


if __name__ == "__main__":
    main()
