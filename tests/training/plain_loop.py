# SPDX-License-Identifier: Apache-2.0
"""Pretraining in plain PyTorch: what the training loop is compared with.

Written from the definitions (GPT-2, AdamW, Megatron-LM's schedules and loss scaler) and not from `megatron`: one process,
one batch at a time, torch's AdamW, no resuming. Of the package it takes the mock samples and the seeds of initial weights.

    outcome = train(Job(batches=[8] * 6, rate=lambda samples: 1e-2, decay=lambda samples: 0.01))
    outcome.steps[0]["lm loss"], outcome.tensors["blocks.0.mlp.up.weight"]
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F

from megatron.data.mock import MockDataset
from megatron.mpu.random import seed_of

LAYERS, HIDDEN, HEADS, LENGTH = 2, 24, 3, 12
EOD = 100  # a NullTokenizer's end of document stands behind its numbers
VOCABULARY = EOD + 1
LARGEST_HALF = 65504.0
TRAIN, VALID, TEST = range(3)


@dataclass
class Scale:
    """Megatron-LM's dynamic loss scale; without `window` a constant one."""

    value: float = 1.0
    window: Optional[int] = None
    hysteresis: int = 2
    least: float = 1.0

    def __post_init__(self):
        self.good, self.patience = 0, self.hysteresis

    def update(self, overflow: bool) -> None:
        if self.window is None:
            return
        if overflow:
            self.good = 0
            self.patience -= 1
            if self.patience <= 0:
                self.value = max(self.value * 0.5, self.least)
            return
        self.good += 1
        if self.good == self.window:
            self.good, self.patience = 0, self.hysteresis
            self.value *= 2.0


@dataclass
class Job:
    """What is trained, and how. batches: samples of each step; rate, decay: samples that were trained on -> value."""

    batches: Sequence[int]
    rate: Callable[[int], float]
    decay: Callable[[int], float]
    micro: int = 2  # samples of a micro-batch
    mean_of_means: bool = False  # average over micro-batches what was averaged over tokens
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    seed: int = 1234
    mask_eod: bool = False
    restart_positions: bool = False
    cut_attention: bool = False
    smoothing: float = 0.0
    cyclic: Optional[int] = None  # samples of an epoch that is shuffled
    weights_in: torch.dtype = torch.float64  # the format that weights are rounded to for the passes
    scale: Scale = field(default_factory=Scale)
    left_out: Sequence[int] = ()  # steps whose samples are passed over
    spike_threshold: Optional[float] = None  # steps that stand out by more are skipped
    eval_interval: Optional[int] = None
    eval_iters: int = 1
    eval_size: int = 8  # samples of a batch of an evaluation
    start: Optional[dict[str, torch.Tensor]] = None  # weights, instead of initial ones
    forget_moments_after: Optional[int] = None  # a step
    optimizer: Optional[Callable] = None  # groups of weights -> an optimizer of torch, instead of AdamW
    moments: Sequence[str] = ("exp_avg", "exp_avg_sq")  # what that keeps of each weight
    linear: Optional[Callable] = None  # (weights, name of a layer, x) -> its output, instead of x W^T + b
    # seed -> further initial weights; they decay, except those named "..._alpha"
    more: Callable[[int], dict[str, torch.Tensor]] = lambda seed: {}
    word_rate: Optional[Callable[[int], float]] = None  # the rate of the table of words, if it has its own
    trains: Callable[[str], bool] = lambda name: True  # whether a weight is trained; the others are frozen
    # (scores [b, s, v], tokens [b, s]) -> a loss of each token to minimize with a weight, the cross-entropy having the rest
    teacher: Optional[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = None
    alpha: float = 0.0
    # (outputs of layers, [b, s, h] each, tokens) -> a loss of each token, which is added
    hidden_teacher: Optional[Callable[[list[torch.Tensor], torch.Tensor, dict], torch.Tensor]] = None


@dataclass
class Outcome:
    """What a run says and leaves behind; tensors by their names in a checkpoint."""

    steps: list[dict]
    evals: list[dict]
    tensors: dict[str, torch.Tensor]
    trained: int  # samples
    consumed_valid: int
    updates: int


# ---- the network -----------------------------------------------------------------------------------------------------


def initial_weights(seed: int) -> dict[str, torch.Tensor]:
    """GPT-2's initial weights: N(0, 0.02), less for what writes to the residual stream; norms 1, biases 0."""
    small = 0.02 / math.sqrt(2 * LAYERS)
    width = HIDDEN // HEADS
    shapes = {
        "embedding.word.weight": ((VOCABULARY, HIDDEN), 0.02),
        "embedding.position.weight": ((LENGTH, HIDDEN), 0.02),
    }
    norms = ["final_norm"]
    for n in range(LAYERS):
        shapes |= {
            f"blocks.{n}.attention.qkv.weight": ((HEADS, 3, width, HIDDEN), 0.02),
            f"blocks.{n}.attention.output.weight": ((HIDDEN, HIDDEN), small),
            f"blocks.{n}.mlp.up.weight": ((4 * HIDDEN, HIDDEN), 0.02),
            f"blocks.{n}.mlp.down.weight": ((HIDDEN, 4 * HIDDEN), small),
        }
        norms += [f"blocks.{n}.attention_norm", f"blocks.{n}.mlp_norm"]
    weights = {}
    for name, (shape, std) in shapes.items():
        generator = torch.Generator().manual_seed(seed_of(seed, name, 0))
        weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator).double()
        if name.startswith("blocks."):
            weights[name.replace("weight", "bias")] = torch.zeros(shape[:-1], dtype=torch.float64)
    for norm in norms:
        weights[f"{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.float64)
        weights[f"{norm}.bias"] = torch.zeros(HIDDEN, dtype=torch.float64)
    return weights


def logits(
    weights: dict[str, torch.Tensor], tokens: torch.Tensor, job: Job, outputs: Optional[list] = None
) -> torch.Tensor:
    """Tokens [b, s] through a GPT-2 of any size: [b, s, vocabulary]. outputs: gets those of layers."""
    places, allowed = documents(tokens, job)
    hidden, layers = (
        weights["final_norm.weight"].numel(),
        sum(f"blocks.{n}.mlp.up.weight" in weights for n in range(len(weights))),
    )
    heads = len(weights["blocks.0.attention.qkv.weight"])

    linear = partial(job.linear or plain_linear, weights)

    def norm(name, x):
        return F.layer_norm(x, (hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    x = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][places]
    for n in range(layers):
        block = f"blocks.{n}."
        qkv = linear(block + "attention.qkv", norm(block + "attention_norm", x))
        q, k, v = qkv.view(*tokens.shape, heads, 3, -1).permute(3, 0, 2, 1, 4)  # each [b, heads, s, width]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])
        x = x + linear(block + "attention.output", mixed.transpose(1, 2).reshape(x.shape))
        wide = linear(block + "mlp.up", norm(block + "mlp_norm", x))
        x = x + linear(block + "mlp.down", F.gelu(wide, approximate="tanh"))
        if outputs is not None:
            outputs.append(x)
    return norm("final_norm", x) @ weights["embedding.word.weight"].T


def plain_linear(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """x W^T + b of a layer."""
    weight = weights[f"{name}.weight"]
    return x @ weight.reshape(-1, weight.shape[-1]).T + weights[f"{name}.bias"].reshape(-1)


def documents(tokens: torch.Tensor, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [b, s], and [b, s, s] which token may see which. An end of document belongs to what it ends."""
    places = torch.arange(LENGTH).repeat(len(tokens), 1)
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().repeat(len(tokens), 1, 1)
    for row, at in (tokens == EOD).nonzero().tolist():
        if job.restart_positions:
            places[row, at + 1 :] = torch.arange(LENGTH - at - 1)
        if job.cut_attention:
            allowed[row, at + 1 :, : at + 1] = False
    return places, allowed


def token_losses(weights, samples: torch.Tensor, job: Job, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples [b, s + 1] -> cross-entropies and whether they count, [b, s] each."""
    return losses_of(logits(weights, samples[:, :-1], job), samples, job, smoothing)


def losses_of(scores, samples: torch.Tensor, job: Job, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, from scores [b, s, v]."""
    tokens, labels = samples[:, :-1], samples[:, 1:]
    losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing)
    counts = tokens != EOD if job.mask_eod else torch.ones_like(tokens, dtype=torch.bool)
    return losses.view(labels.shape), counts


# ---- the loop --------------------------------------------------------------------------------------------------------


def train(job: Job) -> Outcome:
    """The run from its first step to its last, and the evaluations behind it."""
    names = initial_weights(job.seed) | job.more(job.seed)
    weights = {name: (job.start or names)[name].clone().requires_grad_() for name in names}
    adam, scale = new_adam(weights, job), replace(job.scale)
    seen = trained = consumed_valid = updates = 0
    steps, evals, recent = [], [], []

    def evaluation(split: str, start: int) -> None:
        loss = mean_loss(weights, split, start, job)
        evals.append({"split": split, "iteration": len(steps), "consumed_samples": seen, "lm loss": loss})

    for number, size in enumerate(job.batches, 1):
        rate, decay = job.rate(trained), job.decay(trained)
        samples = take(TRAIN, range(seen, seen + size), job)
        seen += size
        step = dict(iteration=number, consumed_samples=seen, batch_size=size, learning_rate=rate, skipped=True)
        steps.append(step)
        if number in job.left_out:
            step |= dict(grad_norm=None, loss_scale=scale.value)
        else:
            loss, gradients, overflow, of_teacher = backward(weights, samples, scale.value, job)
            gradients = {name: gradient for name, gradient in gradients.items() if job.trains(name)}
            norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
            skipped = overflow or stands_out(loss, norm, recent, job.spike_threshold)
            scale.update(overflow)
            step |= {"lm loss": loss, "grad_norm": None if overflow else norm, "loss_scale": scale.value}
            step |= {"kd loss": of_teacher[0]} if job.teacher else {}
            step |= {"kd hidden loss": of_teacher[1]} if job.hidden_teacher else {}
            if not skipped:
                for name, gradient in gradients.items():  # AdamW leaves weights without a gradient as they are
                    weights[name].grad = gradient * (min(1.0, job.clip / (norm + 1e-6)) if job.clip else 1.0)
                own = job.word_rate(trained) if job.word_rate else rate
                for group, *wanted in zip(adam.param_groups, (rate, rate, own), (decay, 0.0, decay), strict=True):
                    group.update(zip(("lr", "weight_decay"), wanted, strict=True))
                adam.step()
                step["skipped"] = False
                recent.append((loss, norm))
                trained, updates = trained + size, updates + 1
        if number == job.forget_moments_after:
            adam, updates = new_adam(weights, job), 0
        if job.eval_interval and number % job.eval_interval == 0:
            evaluation("validation", consumed_valid)
            consumed_valid += job.eval_iters * job.eval_size
    if job.eval_interval:
        evaluation("validation", consumed_valid)
        evaluation("test", 0)
    return Outcome(steps, evals, named(weights, adam, job), trained, consumed_valid, updates)


def new_adam(weights: dict[str, torch.Tensor], job: Job) -> torch.optim.Optimizer:
    """AdamW, or the job's own, with three groups: matrices, which decay; biases and norms; the table of words."""
    words = "embedding.word.weight"
    decayed = {name for name in weights if name.endswith("weight") and "norm" not in name}
    decayed |= {name for name in job.more(job.seed) if not name.endswith(("_alpha", "_magnitude"))}
    matrices = [v for name, v in weights.items() if name in decayed and name != words]
    others = [v for name, v in weights.items() if name not in decayed]
    groups = [dict(params=matrices), dict(params=others), dict(params=[weights[words]])]
    return job.optimizer(groups) if job.optimizer else torch.optim.AdamW(groups, betas=job.betas, eps=job.eps)


def take(split: int, places: range, job: Job) -> torch.Tensor:
    """Samples at places of the order in which a split is gone through, [n, s + 1]."""
    if job.cyclic and split == TRAIN:
        orders = [torch.randperm(job.cyclic, generator=torch.Generator().manual_seed(n)).tolist() for n in range(3)]
        places = [orders[place // job.cyclic][place % job.cyclic] for place in places]
    data = MockDataset(1 << 20, LENGTH, VOCABULARY, EOD, job.seed, split)
    return torch.from_numpy(np.stack([data[place] for place in places]))


def backward(
    weights, samples: torch.Tensor, scale: float, job: Job
) -> tuple[float, dict[str, torch.Tensor], bool, tuple[float, float]]:
    """(mean loss of the tokens that count, gradients of what is minimised, whether fp16 could not hold one of them, mean
    losses on the teacher's logits and hidden states)."""
    rounded = {name: values.detach().to(job.weights_in).double().requires_grad_() for name, values in weights.items()}
    micros = samples.split(job.micro)
    total = tokens = on_logits = on_states = 0
    gradients = {name: torch.zeros_like(values) for name, values in rounded.items()}
    largest = 0.0
    for micro in micros:
        outputs: list[torch.Tensor] = []
        scores = logits(rounded, micro[:, :-1], job, outputs)
        losses, counts = losses_of(scores, micro, job, job.smoothing)
        tokens += counts.sum().item()
        total += losses[counts].sum().item()
        if job.teacher:
            distilled = job.teacher(scores, micro[:, :-1])
            on_logits += distilled[counts].sum().item()
            losses = (1 - job.alpha) * losses + job.alpha * distilled
        if job.hidden_teacher:
            added = job.hidden_teacher(outputs, micro[:, :-1], rounded)
            on_states += added[counts].sum().item()
            losses = losses + added
        minimised = losses[counts].mean() / len(micros) if job.mean_of_means else losses[counts].sum()
        for name, gradient in zip(gradients, torch.autograd.grad(minimised, list(rounded.values())), strict=True):
            gradients[name] += gradient
            largest = max(largest, gradient.abs().max().item())
    # A micro-batch's gradients are in fp16, times the loss scale; sums of losses are divided by all tokens, masked or not.
    in_fp16 = largest * scale / (1 if job.mean_of_means else samples[:, 1:].numel()) / LARGEST_HALF
    overflow = job.weights_in is torch.float16 and in_fp16 > 1
    assert job.weights_in is not torch.float16 or not 0.97 < in_fp16 < 1.03, f"too near to the limit: {in_fp16}"
    if not job.mean_of_means:
        gradients = {name: gradient / tokens for name, gradient in gradients.items()}
    return total / tokens, gradients, overflow, (on_logits / tokens, on_states / tokens)


def stands_out(loss: float, norm: float, recent: list[tuple[float, float]], threshold: Optional[float]) -> bool:
    """Whether loss or norm lies far above the median of the last 32 steps, in units of 1.4826 x their median deviation."""
    if threshold is None or len(recent) < 32:
        return False
    scores = []
    for value, values in zip((loss, norm), zip(*recent[-32:], strict=True), strict=False):
        middle = median(values)
        spread = 1.4826 * median(abs(other - middle) for other in values)
        scores.append((value - middle) / max(spread, 0.01 * middle))
    return max(scores) > threshold


@torch.no_grad()
def mean_loss(weights, split: str, start: int, job: Job) -> float:
    """Mean over the tokens that count of the samples from `start` onwards; without label smoothing."""
    rounded = {name: values.to(job.weights_in).double() for name, values in weights.items()}
    places = range(start, start + job.eval_iters * job.eval_size)
    losses, counts = token_losses(rounded, take(VALID if split == "validation" else TEST, places, job), job)
    return losses[counts].mean().item()


def named(weights, adam: torch.optim.Optimizer, job: Job) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's moments, as a checkpoint names them."""
    found = {name: values.detach() for name, values in weights.items()}
    for moment in job.moments:
        for name, values in ((name, weights[name]) for name in weights if job.trains(name)):
            found[f"optimizer.{moment}.{name}"] = adam.state[values].get(moment, torch.zeros_like(values))
    return found


# ---- Megatron-LM's schedules, in samples -----------------------------------------------------------------------------


def rate_of(
    style: str, highest: float, lowest: float = 0.0, *, warmup: float = 0, end: int, start: float = 0.0, anneal: int = 0
) -> Callable[[int], float]:
    """The learning rate by the samples that were trained on. style: `linear`, ..., `WSD cosine`. start: of the warm-up;
    end: of the decay, warm-up included; anneal: the last part of it, where WSD decays.
    """

    def rate(samples: int) -> float:
        if style == "linear-from-start" and samples >= warmup:
            return lowest + max(0, 1 - samples / end) * (highest - lowest)
        if warmup and samples <= warmup:
            return start + (highest - start) * samples / warmup
        if style == "constant":
            return highest
        if samples > end:
            return lowest
        if style == "inverse-square-root":
            return max(lowest, highest * math.sqrt(max(warmup, 1) / max(samples, 1)))
        begin = end - anneal if style.startswith("WSD") else warmup
        if samples <= begin:
            return highest
        done = (samples - begin) / (end - begin)
        left = {
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "exponential": 2 ** (1 - done) - 1,
            "minus_sqrt": 1 - done**0.5,
        }[style.removeprefix("WSD ")]
        return lowest + left * (highest - lowest)

    return rate


def decay_of(style: str, start: float, end: float, *, total: int) -> Callable[[int], float]:
    """Weight decay by the samples that were trained on, which grows over the whole run."""

    def decay(samples: int) -> float:
        done = min(1.0, samples / total)
        share = {"constant": 1.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[style]
        return start + share * (end - start)

    return decay
