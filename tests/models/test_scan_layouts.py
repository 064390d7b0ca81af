# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets and Mamba-2 between attention and MLPs, and Mamba-2 beside attention after one norm, in all kinds of
layouts, against the same layers in plain torch, in one process, in fp64, whose scans go token by token; as letters of a
pattern, and as the attention of a transformer.

A sequence has 12 tokens, so chunks of context parallel ranks have fewer than the convolutions see.
"""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
import pretrain_hybrid
from tests.models import plain_layers
from tests.models.plain_layers import ATTENTION, MLP, Plain, letters, uniform
from tests.ranks import on_ranks
from tests.training.plain_loop import HIDDEN
from tests.training.test_plain_loop import ADAM, FLAGS

STEPS, LETTERS, BESIDE = 3, "GM-*MG", "P-PM"
G, R, K, V, TAPS = 3, 2, 4, 5, 3  # key heads of a gated delta net, value heads of each, channels of both, taps
DELTA = (K, K, R * V, R * V, R, R)  # query, key, values, gates, write strengths, decays of a key head
GROUPS, HEADS_OF_GROUP, WIDTH, STATE, M_TAPS = 3, 2, 4, 5, 4
INNER = HEADS_OF_GROUP * WIDTH  # channels of a group of Mamba-2
PARTS = (INNER, INNER, STATE, STATE, HEADS_OF_GROUP)  # gate, x, B, C, step sizes
MAMBA = (
    f"--mamba-num-groups {GROUPS} --mamba-num-heads {GROUPS * HEADS_OF_GROUP} --mamba-head-dim {WIDTH} "
    f"--mamba-state-dim {STATE}"
)
GDN = (
    f"--linear-num-key-heads {G} --linear-num-value-heads {G * R} --linear-key-head-dim {K} --linear-value-head-dim {V} "
    f"--linear-conv-kernel-dim {TAPS}"
)
COMMON = (
    f"--global-batch-size 8 --train-iters {STEPS} --eval-iters 0 {ADAM} --eod-mask-loss --log-interval 1 "
    f"--lr-decay-style constant"
)
LINE = f"{FLAGS.replace('--num-layers 2', '')} {COMMON} {MAMBA}"
PACKED = "--reset-attention-mask"
PP, TP, CP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--context-parallel-size"
MODULES = "--recompute-granularity selective --recompute-modules"
ONE = "--micro-batch-size 1"
GPT = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2"
NONE, FIRST = "--no-mamba-rms-norm", "--mamba-norm-before-gate"
LAYOUTS = {  # of three groups: two ranks of cp pass states on, three exchange rows for groups
    "one process": (1, LETTERS, ""),
    "documents": (1, LETTERS, PACKED),
    "recomputed core": (1, LETTERS, f"{MODULES} core_attn layernorm {PACKED}"),
    "recomputed layers": (1, LETTERS, f"--recompute-granularity full_attn {PACKED}"),
    "tp3": (3, LETTERS, f"{TP} 3"),
    "tp3 with sequence parallelism": (3, LETTERS, f"{TP} 3 --sequence-parallel {PACKED}"),
    "cp2, states and a ring": (2, LETTERS, f"{CP} 2"),
    "cp2, states, documents, a core recomputed": (2, LETTERS, f"{CP} 2 {PACKED} {MODULES} core_attn"),
    "cp3, rows for heads and a ring": (3, LETTERS, f"{CP} 3 {ONE}"),
    "cp3, all exchange rows": (3, LETTERS, f"{CP} 3 --cp-comm-type a2a {ONE} {PACKED} {MODULES} core_attn"),
    "cp6, states and a gather": (6, LETTERS, f"{CP} 6 --cp-comm-type allgather {PACKED}"),
    "cp6 in two levels": (
        6,
        LETTERS,
        f"{CP} 6 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 3 2 {ONE} {PACKED}",
    ),
    "tp3 cp2, states": (6, LETTERS, f"{TP} 3 --sequence-parallel {CP} 2 {ONE} {PACKED}"),
    "pp2": (2, "GM-|*MG", f"{PP} 2 {PACKED}"),
    "pp2, interleaved": (2, "G|M-|*|MG", f"{PP} 2 {ONE}"),
    "pp2, zb-h1": (2, "GM-|*MG", f"{PP} 2 --pipeline-schedule zb-h1 {ONE} {PACKED}"),
    "pp2 in a V": (2, "GM|-*|MG|", f"{PP} 2 --pipeline-schedule zb-v {ONE} --recompute-granularity full"),
    "pp2 cp2, zb-h1, states": (4, "GM-|*MG", f"{PP} 2 {CP} 2 --pipeline-schedule zb-h1 {ONE} {PACKED}"),
    "zero1": (2, LETTERS, "--sharding-stage 1"),
    "zero2": (2, LETTERS, f"--sharding-stage 2 {PACKED}"),
    "zero3": (2, LETTERS, "--sharding-stage 3 --recompute-granularity full"),
    "zero3 over cp2, states": (2, LETTERS, f"{CP} 2 --sharding-stage 3 --recompute-granularity full {PACKED}"),
    "beside attention": (1, BESIDE, NONE),
    "beside attention, documents": (1, BESIDE, f"{FIRST} {PACKED}"),
    "beside attention, recomputed core": (1, BESIDE, f"{NONE} {MODULES} core_attn layernorm {PACKED}"),
    "beside attention, recomputed layers": (1, BESIDE, f"{NONE} --recompute-granularity full_attn {PACKED}"),
    "beside attention, tp3": (3, BESIDE, f"{NONE} {TP} 3"),
    "beside attention, tp3 with sequence parallelism": (3, BESIDE, f"{TP} 3 --sequence-parallel {PACKED}"),
    "beside attention, cp2, states and a ring": (2, BESIDE, f"{NONE} {CP} 2 {PACKED}"),
    "beside attention, cp3, all exchange rows": (3, BESIDE, f"{NONE} {CP} 3 --cp-comm-type a2a {ONE} {PACKED}"),
    "beside attention, tp3 cp2, states": (6, BESIDE, f"{FIRST} {TP} 3 --sequence-parallel {CP} 2 {ONE} {PACKED}"),
    "beside attention, pp2, zb-h1": (2, "P-|PM", f"{NONE} {PP} 2 --pipeline-schedule zb-h1 {ONE} {PACKED}"),
    "beside attention, pp2, interleaved": (2, "P|-|P|M", f"{NONE} {PP} 2 {ONE}"),
    "beside attention, zero2": (2, BESIDE, f"{NONE} --sharding-stage 2 {PACKED}"),
    "beside attention, zero3": (2, BESIDE, f"{FIRST} --sharding-stage 3 --recompute-granularity full"),
    "GPT": (1, "", f"{GPT} {PACKED}"),
    "GPT, a list of layers, tp3": (3, "", f"{GPT[:-1]} [1]+[0] {TP} 3 --sequence-parallel {PACKED}"),
    "GPT, pp2, full recomputation": (2, "", f"{GPT} {PP} 2 {ONE} --recompute-granularity full"),
    "GPT, zero3": (2, "", f"{GPT} --sharding-stage 3 --recompute-granularity full"),
}
LONG = {
    "tp3 cp2, states",
    "zero1",
    "pp2",
    "recomputed layers",
    "cp3, all exchange rows",
    "pp2, interleaved",
    "GPT, zero3",
}
LONG |= {"beside attention, tp3 cp2, states", "beside attention, zero2", "beside attention, pp2, interleaved"}
LONG |= {"cp6 in two levels", "cp6, states and a gather"}


# ---- the same in plain torch -----------------------------------------------------------------------------------------


def convolved(mixed: torch.Tensor, weight: torch.Tensor, bias, ids: torch.Tensor) -> torch.Tensor:
    """SiLU of the sums over taps of [b, s, groups, channels], whose last tap is of the token itself."""
    taps, sums = weight.shape[-1], torch.zeros_like(mixed) + bias
    for back in range(taps):
        shifted = F.pad(mixed, (0, 0, 0, 0, back, 0))[:, : mixed.shape[1]]
        same = F.pad(ids, (back, 0), value=-1)[:, : ids.shape[1]] == ids
        sums = sums + shifted * same[..., None, None] * weight[..., taps - 1 - back]
    return sums / (1 + (-sums).exp())


def reset(state: torch.Tensor, ids: torch.Tensor, t: int) -> torch.Tensor:
    return state * (ids[:, t] == ids[:, t - 1]).view(-1, 1, 1, 1, 1) if t else state


def delta_net(weights, own: str, u: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A gated delta net of [b, s, h], token by token; ids [b, s] of documents."""
    projected = torch.einsum("bsh,gph->bsgp", u, weights[own + "in_proj.weight"])
    mixed, gate, strength, a = projected.split((sum(DELTA[:3]), *DELTA[3:]), -1)
    q, k, v = convolved(mixed, weights[own + "conv_weight"], 0, ids).split((K, K, R * V), -1)
    length = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k, v, gate = length(q) / K**0.5, length(k), v.unflatten(-1, (R, V)), gate.unflatten(-1, (R, V))
    decay = (-weights[own + "A_log"].exp() * (1 + (a + weights[own + "dt_bias"]).exp()).log()).exp()
    state, found = u.new_zeros(len(u), G, R, K, V), []
    for t in range(u.shape[1]):
        state = reset(state, ids, t) * decay[:, t, :, :, None, None]
        said = torch.einsum("bgrkv,bgk->bgrv", state, k[:, t])
        change = strength[:, t].sigmoid().unsqueeze(-1) * (v[:, t] - said)
        state = state + torch.einsum("bgk,bgrv->bgrkv", k[:, t], change)
        found.append(torch.einsum("bgrkv,bgk->bgrv", state, q[:, t]))
    o = torch.stack(found, 1)
    normal = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[own + "norm_weight"]
    return (normal * gate / (1 + (-gate).exp())).flatten(2) @ weights[own + "out_proj.weight"].T


def of_delta(own: str) -> dict[str, torch.Tensor]:
    """Rates start with the logarithms of 1 to 16, taps within 1 / sqrt(taps)."""
    most = TAPS**-0.5
    return {
        own + "conv_weight": uniform(own + "conv_weight", (G, sum(DELTA[:3]), TAPS), -most, most),
        own + "dt_bias": torch.ones(G, R),
        own + "A_log": uniform(own + "A_log", (G, R), 1, 16).log(),
        own + "norm_weight": torch.ones(V),
    }


def mamba(weights, own: str, u: torch.Tensor, ids: torch.Tensor, norm_first: bool = False) -> torch.Tensor:
    """Mamba-2 of [b, s, h], token by token; ids [b, s] of documents. norm_first: before the gate; without a weight none"""
    projected = torch.einsum("bsh,gph->bsgp", u, weights[own + "in_proj.weight"])
    gate, mixed, dt = projected.split((INNER, sum(PARTS[1:4]), HEADS_OF_GROUP), -1)
    mixed = convolved(mixed, weights[own + "conv_weight"], weights[own + "conv_bias"], ids)
    x, B, C = mixed.split((INNER, STATE, STATE), -1)
    x = x.unflatten(-1, (HEADS_OF_GROUP, WIDTH))  # [b, s, g, r, p]
    dt, rates = F.softplus(dt + weights[own + "dt_bias"]), weights[own + "A_log"].exp()
    state, ys = torch.zeros(len(u), GROUPS, HEADS_OF_GROUP, WIDTH, STATE, dtype=u.dtype), []
    for t in range(u.shape[1]):
        given = torch.einsum("bgr,bgrp,bgn->bgrpn", dt[:, t], x[:, t], B[:, t])
        state = reset(state, ids, t) * (-rates * dt[:, t]).exp()[..., None, None] + given
        ys.append(torch.einsum("bgrpn,bgn->bgrp", state, C[:, t]) + weights[own + "D"][..., None] * x[:, t])
    y, passed, weight = torch.stack(ys, 1).flatten(-2), gate / (1 + (-gate).exp()), weights.get(own + "norm_weight")
    norm = lambda x: x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    y = norm(y) * passed if norm_first else norm(y * passed)
    return y.flatten(2) @ weights[own + "out_proj.weight"].T


def of_mamba(own: str, normed: bool = True) -> dict[str, torch.Tensor]:
    """Rates log of 1 to 16, steps .001 to .1 by their logarithms, before the softplus; taps within 1 / sqrt(taps)."""
    heads, channels, most = (GROUPS, HEADS_OF_GROUP), sum(PARTS[1:4]), M_TAPS**-0.5
    steps = uniform(own + "dt_bias", heads, math.log(0.001), math.log(0.1)).exp()
    return {
        own + "conv_weight": uniform(own + "conv_weight", (GROUPS, channels, M_TAPS), -most, most),
        own + "conv_bias": uniform(own + "conv_bias", (GROUPS, channels), -most, most),
        own + "dt_bias": steps + torch.log(-torch.expm1(-steps)),
        own + "A_log": uniform(own + "A_log", heads, 1, 16).log(),
        own + "D": torch.ones(heads),
        **({own + "norm_weight": torch.ones(GROUPS, INNER)} if normed else {}),
    }


PRODUCTS = {
    "G": {"in_proj": (G, sum(DELTA), HIDDEN), "out_proj": (HIDDEN, G * R * V)},
    "M": {"in_proj": (GROUPS, sum(PARTS), HIDDEN), "out_proj": (HIDDEN, GROUPS * INNER)},
}
KINDS = {
    "*": ATTENTION,
    "-": MLP,
    "G": Plain("gdn", PRODUCTS["G"], delta_net, biased=False, others=of_delta),
    "M": Plain("mamba", PRODUCTS["M"], mamba, biased=False, others=of_mamba),
}
# Of a GPT whose second layer keeps its attention
PAIRS = (("blocks.0.", "G"), ("blocks.0.", "-"), ("blocks.1.", "*"), ("blocks.1.", "-"))


@cache
def plain(pattern: str, packed: bool, normed: bool, norm_first: bool) -> tuple[list[dict], dict[str, torch.Tensor]]:
    own = replace(KINDS["M"], adds=partial(mamba, norm_first=norm_first), others=partial(of_mamba, normed=normed))
    layers = letters(pattern, {"P": "*M"}) if pattern else PAIRS
    return plain_layers.train(layers, KINDS | {"M": own}, packed, STEPS)


def pretrain(rank: int, program, flags: str) -> None:
    program.main(flags.split())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in LAYOUTS])
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, pattern, words = LAYOUTS[layout]
    own = f"{LINE} --hybrid-layer-pattern {pattern}" if pattern else f"{FLAGS} {COMMON}"
    run = pretrain_hybrid if pattern else pretrain_gpt, f"{own} {GDN} {words} --save {tmp_path}"
    on_ranks(world, pretrain, *run)
    wanted = plain(pattern.replace("|", ""), PACKED in words, NONE not in words, FIRST in words)
    plain_layers.compare(tmp_path, *wanted)
