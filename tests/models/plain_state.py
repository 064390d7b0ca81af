# SPDX-License-Identifier: Apache-2.0
"""Training in plain torch of the networks of `adapters.py` and `observed.py`, and of a GPT that is frozen in part."""

import math
import re
from collections.abc import Callable
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.mock import MockDataset
from megatron.mpu.random import seed_of
from tests.models.observed import RATE
from tests.models.test_mlp_language_model import tensors_of
from tests.training.test_plain_loop import records

LAYERS, HIDDEN, HEADS, LENGTH, STEPS, WIDTH = 4, 24, 4, 12, 4, 4
EOD, VOCABULARY = 100, 101
LINE = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {LENGTH} --mock-data "
    f"--vocab-size 100 --micro-batch-size 2 --global-batch-size 8 --train-iters {STEPS} --eval-iters 0 --device cpu "
    "--num-workers 0 --hidden-dropout 0 --attention-dropout 0 --lr 1e-2 --lr-decay-style constant --adam-eps 1e-4 "
    "--log-interval 1 --peak-tflops 1 --init-method-std 0.05 --make-vocab-size-divisible-by 8"
)
Tensors = dict[str, torch.Tensor]


def initial_weights(adapters: bool = False) -> Tensors:
    small, weights, width = 0.05 / math.sqrt(2 * LAYERS), {}, HIDDEN // HEADS
    drawn = {
        "embedding.word.weight": ((VOCABULARY, HIDDEN), 0.05),
        "embedding.position.weight": ((LENGTH, HIDDEN), 0.05),
    }
    for n in range(LAYERS):
        own = {
            "attention.qkv": ((HEADS, 3, width, HIDDEN), 0.05),
            "attention.output": ((HIDDEN, HIDDEN), small),
            "mlp.up": ((4 * HIDDEN, HIDDEN), 0.05),
            "mlp.down": ((HIDDEN, 4 * HIDDEN), small),
        }
        drawn |= {f"blocks.{n}.{name}.weight": how for name, how in own.items()}
        weights |= {f"blocks.{n}.{name}.bias": torch.zeros(how[0][:-1]) for name, how in own.items()}
        if adapters:
            drawn[f"blocks.{n}.adapter.down"] = (WIDTH, HIDDEN), 0.05
            drawn[f"blocks.{n}.adapter.up"] = (HIDDEN, WIDTH), 0.05
    for norm in ["final_norm", *(f"blocks.{n}.{half}_norm" for n in range(LAYERS) for half in ("attention", "mlp"))]:
        weights |= {f"{norm}.weight": torch.ones(HIDDEN), f"{norm}.bias": torch.zeros(HIDDEN)}
    for name, (shape, std) in drawn.items():
        generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
        weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
    return {name: values.double() for name, values in weights.items()}


def initial_buffers() -> Tensors:
    found = {}
    for n in range(LAYERS):
        sizes = {"largest": HIDDEN, "load": HIDDEN, "bias": HIDDEN}
        found |= {f"blocks.{n}.watch.{name}": torch.zeros(size).double() for name, size in sizes.items()}
        found[f"blocks.{n}.watch.seen"] = torch.zeros((), dtype=torch.int64)
        found[f"blocks.{n}.attention.heads.largest"] = torch.zeros(HEADS).double()
    return found


def scores(weights: Tensors, tokens: torch.Tensor, buffers: Tensors | None = None) -> torch.Tensor:
    """Tokens [b, s] -> logits [b, s, vocabulary]; buffers change."""

    def linear(name, x):
        weight = weights[f"{name}.weight"]
        return x @ weight.reshape(-1, weight.shape[-1]).T + weights[f"{name}.bias"].reshape(-1)

    def norm(name, x):
        return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    b, s = tokens.shape
    x, hidden = (
        weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][:s],
        torch.ones(s, s).triu(1) > 0,
    )
    for n in range(LAYERS):
        own = f"blocks.{n}."
        if buffers is not None:
            watch = {name: buffers[f"{own}watch.{name}"] for name in ("largest", "load", "seen", "bias")}
            sizes = x.detach().abs()
            watch["largest"].copy_(torch.maximum(watch["largest"], sizes.amax((0, 1))))
            watch["load"].add_(sizes.sum((0, 1)))
            watch["seen"].add_(b * s)
            x = x + watch["bias"].clone()
        qkv = linear(own + "attention.qkv", norm(own + "attention_norm", x)).view(b, s, HEADS, 3, -1)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        allowed = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        heads = (allowed.softmax(-1) @ v).transpose(1, 2)  # [b, s, heads, width]
        if buffers is not None:
            most = buffers[f"{own}attention.heads.largest"]
            most.copy_(torch.maximum(most, heads.detach().abs().amax((0, 1, 3))))
        x = x + linear(own + "attention.output", heads.reshape(b, s, -1))
        x = x + linear(own + "mlp.down", F.gelu(linear(own + "mlp.up", norm(own + "mlp_norm", x)), approximate="tanh"))
        if f"{own}adapter.up" in weights:
            x = x + F.relu(x @ weights[f"{own}adapter.down"].T) @ weights[f"{own}adapter.up"].T
    return norm("final_norm", x) @ weights["embedding.word.weight"].T


def train(
    weights: Tensors,
    trained: Callable[[str], bool],
    buffers: Tensors | None = None,
    steps: range = range(STEPS),
    network: Callable = scores,
    update_buffers: Callable[[Tensors], None] | None = None,
    after_update: Callable[[Tensors], dict] = lambda weights: {},
) -> tuple[list[dict], Tensors]:
    """([{lm loss, grad_norm} of each step], weights and buffers at the end).

    trained: whether the weight of a name is. network: (weights, tokens, buffers) -> logits, or (logits, {name of another
    mean over tokens: (its value, its weight in the loss)}). update_buffers: called before each update.
    after_update: called after it, and returns further values of the step.
    """
    update_buffers = update_buffers or move_bias
    weights = {name: values.clone().requires_grad_(trained(name)) for name, values in weights.items()}
    learned = {name: values for name, values in weights.items() if values.requires_grad}
    decays = lambda name: bool(re.search(r"weight$|adapter", name)) and "norm" not in name
    groups = [
        dict(params=[v for name, v in learned.items() if decays(name) == yes], weight_decay=0.01 * yes)
        for yes in (True, False)
    ]
    adam = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, eps=1e-4)
    data, results = MockDataset(1 << 20, LENGTH, VOCABULARY, EOD, 1234, 0), []
    for number in steps:
        samples = torch.from_numpy(np.stack([data[place] for place in range(8 * number, 8 * number + 8)]))
        output = network(weights, samples[:, :-1], buffers)
        words, others = output if isinstance(output, tuple) else (output, {})
        loss = F.cross_entropy(words.flatten(0, 1), samples[:, 1:].flatten())
        adam.zero_grad()
        (loss + sum(weight * value for value, weight in others.values())).backward()
        norm = torch.nn.utils.clip_grad_norm_(learned.values(), 1.0).item()
        if buffers is not None:
            update_buffers(buffers)
        adam.step()
        values = {name: value.item() for name, (value, _) in others.items()}
        with torch.no_grad():
            values |= after_update(weights)
        results.append({"lm loss": loss.item(), **values, "grad_norm": norm})
    return results, {name: values.detach() for name, values in (weights | (buffers or {})).items()}


def move_bias(buffers: Tensors) -> None:
    """`Watch.update_buffers` of each layer."""
    for n in range(LAYERS):
        load = buffers[f"blocks.{n}.watch.load"]
        buffers[f"blocks.{n}.watch.bias"].add_(RATE * (load / load.mean() - 1))
        load.zero_()


def freezing(*patterns: str) -> Callable[[str], bool]:
    return lambda name: not any(fnmatchcase(name, pattern) for pattern in patterns)


def read_all(folder, step: int = STEPS) -> Tensors:
    """The weights, buffers and optimizer state of a checkpoint."""
    return tensors_of(folder, step)


def compare(folder, steps: list[dict], wanted: Tensors) -> Tensors:
    """A run against `train`: every step, and all weights and buffers at the end. Returns all that the checkpoint has."""
    found = [{name: step[name] for name in steps[0]} for step in records(folder, "step")]
    assert found == [pytest.approx(step, rel=2e-5) for step in steps]
    tensors = read_all(folder)
    assert {name for name in tensors if not name.startswith("optimizer.")} == set(wanted)
    for name, values in wanted.items():
        assert (tensors[name].double() - values).abs().max() < 2e-5, name
    return tensors
