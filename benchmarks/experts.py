# SPDX-License-Identifier: Apache-2.0
"""A training step of a mixture of experts, against our dense model of the same active parameters and against transformers'
Mixtral of the same shape, in one process, taking turns.

    python benchmarks/experts.py                                              # all of it, in 8 minutes
    python benchmarks/experts.py --shapes small --precisions bf16 --threads 1 --rounds 9
    python benchmarks/experts.py --peers all --rounds 3                       # every variant of the peer
    python benchmarks/experts.py --layer                                      # where the time goes
    python benchmarks/experts.py --processes                                  # two ranks: ep 2 against the dense model's dp 2

A step is forward, backward, clipping and AdamW on fp32 weights, with a load balancing loss, without dropout, over the same
number of tokens. Each of `SHAPES` is Mixtral's kind of network: RMSNorm, rotary positions, SwiGLU, no biases, an output
layer of its own. The dense model's MLP is as wide as the experts of a token together; everything else is equal. Its
optimizer has fewer weights to update: a step of more tokens hides that, a step of fewer shows it.

Peers differ in attention (torch's sdpa, or explicit), in the products of experts (`experts_implementation`: eager is a loop,
grouped_mm is torch's op; batched_mm copies the weights for each token, which no machine has memory for), and in bf16 in
the weights (fp32 under autocast, or bf16 with fp32 main weights, as ours); all have torch's fused AdamW. The fastest counts.

Every round runs one step of each; a ratio is the median over rounds of (time of the other / time of ours), by the clock and
in CPU seconds of all threads, which other programs disturb less. All share the process, so peers profit from `keep_memory`.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import pretrain_gpt
from megatron.fused_kernels.cpu import keep_memory
from megatron.model.arguments import parse_any
from megatron.training.build import build_run
from megatron.training.rules import resolve
from megatron.training.step import train_step

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 8191


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
    weights = list((module.bfloat16() if main else module).parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights] if main else weights
    optimizer = torch.optim.AdamW(masters, lr=3e-4, weight_decay=0.1, fused=True)
    run = torch.compile(module) if compiled else module

    def step() -> None:
        tokens = torch.randint(VOCABULARY, (shape.batch, shape.length + 1))
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half and not main):
            loss = run(inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        if main:
            for weight, master in zip(weights, masters):
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if main:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        loss.item()

    return step


def peers(precision: str, which: str) -> dict[str, Callable]:
    """Name -> a peer's step from shape and precision. which: those that were fastest ("best"), or "all"."""
    found = {}
    for attention in ("sdpa", "eager"):
        for experts in ("grouped_mm", "eager"):
            for main in (True, False) if precision == "bf16" else (False,):
                for compiled in (False, True):
                    words = [attention, experts, *["main"] * main, *["compiled"] * compiled]
                    found["mixtral-" + "-".join(words)] = partial(hugging_face, attention, experts, main, compiled)
    return found if which == "all" else {name: found[name] for name in BEST[precision]}


BEST = {
    "fp32": ["mixtral-sdpa-grouped_mm", "mixtral-sdpa-eager"],
    "bf16": ["mixtral-sdpa-grouped_mm-main", "mixtral-eager-grouped_mm-main"],
}


class Times(NamedTuple):
    """Of the steps of a contender, in rounds: seconds by the clock, and CPU seconds of all threads."""

    wall: list[float]
    cpu: list[float]


def measure(contenders: dict[str, Callable[[], None]], rounds: int, warmup: int = 2) -> dict[str, Times]:
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


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ratio(other: list[float], own: list[float]) -> float:
    return statistics.median(theirs / mine for theirs, mine in zip(other, own, strict=True))


