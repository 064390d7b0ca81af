# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 between attention and MLPs, and beside attention after one norm, in all kinds of layouts, against the same layers
in plain torch, in one process, in fp64, whose scan goes token by token; documents.
"""

import math
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

import pretrain_hybrid
from megatron.inference.load import load_model
from megatron.mpu.random import seed_of
from tests.models import plain_gpt
from tests.training.plain_loop import EOD, HEADS, HIDDEN, LENGTH, VOCABULARY
from tests.training.test_plain_loop import ADAM, FLAGS, records

STEPS, LETTERS, BESIDE = 3, "M-*M", "P-PM"
GROUPS, HEADS_OF_GROUP, WIDTH, STATE, TAPS = 6, 2, 4, 5, 4
INNER = HEADS_OF_GROUP * WIDTH  # channels of a group
PARTS = (INNER, INNER, STATE, STATE, HEADS_OF_GROUP)  # gate, x, B, C, step sizes
MAMBA = (
    f"--mamba-num-groups {GROUPS} --mamba-num-heads {GROUPS * HEADS_OF_GROUP} --mamba-head-dim {WIDTH} "
    f"--mamba-state-dim {STATE}"
)
LINE = FLAGS.replace("--num-layers 2", "") + (
    f" --global-batch-size 8 --train-iters {STEPS} --eval-iters 0 {ADAM} --eod-mask-loss --log-interval 1 "
    f"--lr-decay-style constant {MAMBA}"
)
PACKED = "--reset-attention-mask"
PP, TP, CP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--context-parallel-size"
MODULES = "--recompute-granularity selective --recompute-modules"
ONE = "--micro-batch-size 1"
LAYOUTS = {
    "one process": (1, LETTERS, ""),
    "documents": (1, LETTERS, PACKED),
    "recomputed core": (1, LETTERS, f"{MODULES} core_attn layernorm {PACKED}"),
    "recomputed layers": (1, LETTERS, f"--recompute-granularity full_attn {PACKED}"),
    "tp3": (3, LETTERS, f"{TP} 3"),
    "tp3 with sequence parallelism": (3, LETTERS, f"{TP} 3 --sequence-parallel {PACKED}"),
    "cp2, attention in a ring": (2, LETTERS, f"{CP} 2 {ONE}"),
    "cp2, documents, a core recomputed": (2, LETTERS, f"{CP} 2 {ONE} {PACKED} {MODULES} core_attn"),
    "cp3, all exchange rows": (3, LETTERS, f"{CP} 3 --cp-comm-type a2a {ONE} {PACKED}"),
    "tp3 cp2": (6, LETTERS, f"{TP} 3 --sequence-parallel {CP} 2 {ONE} {PACKED}"),
    "pp2": (2, "M-|*M", f"{PP} 2 {PACKED}"),
    "pp2, interleaved": (2, "M|-|*|M", f"{PP} 2 {ONE}"),
    "pp2, zb-h1": (2, "M-|*M", f"{PP} 2 --pipeline-schedule zb-h1 {ONE} {PACKED}"),
    "pp2 in a V": (2, "M|-*|M|", f"{PP} 2 --pipeline-schedule zb-v {ONE} --recompute-granularity full"),
    "beside attention": (1, BESIDE, "--no-mamba-rms-norm"),
    "beside attention, documents": (1, BESIDE, f"--mamba-norm-before-gate {PACKED}"),
    "beside attention, recomputed core": (1, BESIDE, f"--no-mamba-rms-norm {MODULES} core_attn layernorm {PACKED}"),
    "beside attention, recomputed layers": (
        1,
        BESIDE,
        f"--no-mamba-rms-norm --recompute-granularity full_attn {PACKED}",
    ),
    "beside attention, tp3": (3, BESIDE, f"--no-mamba-rms-norm {TP} 3"),
    "beside attention, tp3 with sequence parallelism": (3, BESIDE, f"{TP} 3 --sequence-parallel {PACKED}"),
    "beside attention, cp3": (3, BESIDE, f"--no-mamba-rms-norm {CP} 3 {ONE} {PACKED}"),
    "beside attention, pp2, zb-h1": (
        *(2, "P-|PM"),
        f"--no-mamba-rms-norm {PP} 2 --pipeline-schedule zb-h1 {ONE} {PACKED}",
    ),
    "beside attention, pp2, interleaved": (2, "P|-|P|M", f"--no-mamba-rms-norm {PP} 2 {ONE}"),
    "beside attention, zero2": (2, BESIDE, f"--no-mamba-rms-norm --sharding-stage 2 {PACKED}"),
    "beside attention, zero3": (2, BESIDE, "--mamba-norm-before-gate --sharding-stage 3 --recompute-granularity full"),
    "zero1": (2, LETTERS, "--sharding-stage 1"),
    "zero2": (2, LETTERS, f"--sharding-stage 2 {PACKED}"),
    "zero3": (2, LETTERS, "--sharding-stage 3 --recompute-granularity full"),
}
NORMS = ("--no-mamba-rms-norm", "--mamba-norm-before-gate")
LONG = {"tp3 cp2", "zero1", "pp2", "recomputed layers", "cp3, all exchange rows"}


# ---- the same in plain torch -----------------------------------------------------------------------------------------


def uniform(name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
    return torch.empty(shape).uniform_(low, high, generator=torch.Generator().manual_seed(seed_of(1234, name, 0)))


def of_mamba(own: str, normed: bool) -> dict[str, torch.Tensor]:
    """Rates log of 1 to 16, steps .001 to .1 by their logarithms, before the softplus; taps within 1 / sqrt(taps)."""
    heads, mixed, most = (GROUPS, HEADS_OF_GROUP), sum(PARTS[1:4]), TAPS**-0.5
    steps = uniform(own + "dt_bias", heads, math.log(0.001), math.log(0.1)).exp()
    return {
        own + "conv_weight": uniform(own + "conv_weight", (GROUPS, mixed, TAPS), -most, most),
        own + "conv_bias": uniform(own + "conv_bias", (GROUPS, mixed), -most, most),
        own + "dt_bias": steps + torch.log(-torch.expm1(-steps)),
        own + "A_log": uniform(own + "A_log", heads, 1, 16).log(),
        own + "D": torch.ones(heads),
        **({own + "norm_weight": torch.ones(GROUPS, INNER)} if normed else {}),
    }


def initial_weights(letters: str, normed: bool) -> dict[str, torch.Tensor]:
    """Output products start with the standard deviation divided by the root of the number of layers."""
    std, small = 0.02, 0.02 / len(letters) ** 0.5
    of_letter = {
        "M": {
            "mamba.in_proj": ((GROUPS, sum(PARTS), HIDDEN), std),
            "mamba.out_proj": ((HIDDEN, GROUPS * INNER), small),
        },
        "*": {
            "attention.qkv": ((HEADS, 3, HIDDEN // HEADS, HIDDEN), std),
            "attention.output": ((HIDDEN, HIDDEN), small),
        },
        "-": {"mlp.up": ((4 * HIDDEN, HIDDEN), std), "mlp.down": ((HIDDEN, 4 * HIDDEN), small)},
    }
    drawn = {"embedding.word.weight": ((VOCABULARY, HIDDEN), std), "embedding.position.weight": ((LENGTH, HIDDEN), std)}
    weights, norms = {}, ["final_norm"]
    for n, letter in enumerate(letters):
        for one in letter.replace("P", "*M"):
            drawn |= {f"blocks.{n}.{name}.weight": how for name, how in of_letter[one].items()}
            if one == "M":
                weights |= of_mamba(f"blocks.{n}.mamba.", normed)
            else:
                weights |= {f"blocks.{n}.{name}.bias": torch.zeros(how[0][:-1]) for name, how in of_letter[one].items()}
        norms.append(f"blocks.{n}.{ {'*': 'attention', 'P': 'attention', '-': 'mlp', 'M': 'mamba'}[letter] }_norm")
    for name in norms:
        weights |= {f"{name}.weight": torch.ones(HIDDEN), f"{name}.bias": torch.zeros(HIDDEN)}
    for name, (shape, scale) in drawn.items():
        generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
        weights[name] = torch.empty(shape).normal_(0.0, scale, generator=generator)
    return {name: values.double() for name, values in weights.items()}


def scan(weights, own: str, u: torch.Tensor, ids: torch.Tensor, norm_first: bool) -> torch.Tensor:
    """Mamba-2 of [b, s, h], token by token; ids [b, s] of documents."""
    projected = torch.einsum("bsh,gph->bsgp", u, weights[own + "in_proj.weight"])
    gate, mixed, dt = projected.split((INNER, sum(PARTS[1:4]), HEADS_OF_GROUP), -1)
    sums = weights[own + "conv_bias"].expand_as(mixed)
    for back in range(TAPS):
        shifted = F.pad(mixed, (0, 0, 0, 0, back, 0))[:, : mixed.shape[1]]
        same = F.pad(ids, (back, 0), value=-1)[:, : ids.shape[1]] == ids
        sums = sums + shifted * same[..., None, None] * weights[own + "conv_weight"][..., TAPS - 1 - back]
    mixed = sums / (1 + (-sums).exp())
    x, B, C = mixed.split((INNER, STATE, STATE), -1)
    x = x.unflatten(-1, (HEADS_OF_GROUP, WIDTH))  # [b, s, g, r, p]
    dt, rates = F.softplus(dt + weights[own + "dt_bias"]), weights[own + "A_log"].exp()
    state, ys = torch.zeros(len(u), GROUPS, HEADS_OF_GROUP, WIDTH, STATE, dtype=u.dtype), []
    for t in range(u.shape[1]):
        if t:
            state = state * (ids[:, t] == ids[:, t - 1]).view(-1, 1, 1, 1, 1)
        given = torch.einsum("bgr,bgrp,bgn->bgrpn", dt[:, t], x[:, t], B[:, t])
        state = state * (-rates * dt[:, t]).exp()[..., None, None] + given
        ys.append(torch.einsum("bgrpn,bgn->bgrp", state, C[:, t]) + weights[own + "D"][..., None] * x[:, t])
    y, passed = torch.stack(ys, 1).flatten(-2), gate / (1 + (-gate).exp())
    weight = weights.get(own + "norm_weight")
    norm = lambda x: x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    y = norm(y) * passed if norm_first else norm(y * passed)
    return y.flatten(2) @ weights[own + "out_proj.weight"].T


def network(weights, tokens: torch.Tensor, packed: bool, letters: str, norm_first: bool) -> torch.Tensor:
    """Tokens [b, s] -> logits [b, s, vocabulary]. packed: a document begins after each end of one."""
    linear, norm = (partial(layer, weights) for layer in (plain_gpt.linear, plain_gpt.norm))
    b, s = tokens.shape
    ids = F.pad((tokens == EOD).long().cumsum(1), (1, 0))[:, :-1] * packed
    hidden = (ids[:, None, :, None] != ids[:, None, None, :]) | (torch.ones(s, s).triu(1) > 0)
    x = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][:s]

    def attention(own, u):
        q, k, v = linear(own + "attention.qkv", u).view(b, s, HEADS, 3, -1).permute(3, 0, 2, 1, 4)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        return linear(own + "attention.output", (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1))

    for n, letter in enumerate(letters):
        own = f"blocks.{n}."
        if letter == "M":
            x = x + scan(weights, own + "mamba.", norm(own + "mamba_norm", x), ids, norm_first)
        elif letter == "*":
            x = x + attention(own, norm(own + "attention_norm", x))
        elif letter == "P":
            u = norm(own + "attention_norm", x)
            x = x + attention(own, u) + scan(weights, own + "mamba.", u, ids, norm_first)
        else:
            wide = F.gelu(linear(own + "mlp.up", norm(own + "mlp_norm", x)), approximate="tanh")
            x = x + linear(own + "mlp.down", wide)
    return norm("final_norm", x) @ weights["embedding.word.weight"].T


@cache
def plain(letters: str, packed: bool, normed: bool, norm_first: bool) -> tuple[list[dict], dict[str, torch.Tensor]]:
    def losses(weights, samples, counts):
        scores = network(weights, samples[:, :-1], packed, letters, norm_first)
        return {"lm loss": plain_gpt.cross_entropies(scores, samples[:, 1:])[counts].mean()}

    return plain_gpt.train(initial_weights(letters, normed), losses, STEPS, 0.0)


def pretrain(rank: int, flags: str) -> None:
    pretrain_hybrid.main(flags.split())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in LAYOUTS])
def test_any_layout_is_the_plain_loop(layout, run_ranks, tmp_path):
    world, pattern, words = LAYOUTS[layout]
    line = f"{LINE} --hybrid-layer-pattern {pattern} {words} --save {tmp_path}"
    pretrain(0, line) if world == 1 else run_ranks(world, pretrain, line)
    none, first = (word in words for word in NORMS)
    steps, weights = plain(pattern.replace("|", ""), PACKED in words, not none, first)
    found = [{name: step[name] for name in ("lm loss", "grad_norm")} for step in records(tmp_path, "step")]
    assert found == [pytest.approx(step, rel=2e-5) for step in steps]
    loaded = load_model(str(tmp_path))
    assert {name for name, _ in loaded.model.named_parameters()} == set(weights)
    for name, parameter in loaded.model.named_parameters():
        wanted = weights[name]
        assert (parameter[: len(wanted)].double() - wanted).abs().max() < 2e-5, name  # rows that pad the vocabulary
