# SPDX-License-Identifier: Apache-2.0
"""Experts in layers, over ranks that hold different ones (ep) and parts of each (etp): the network of `own_experts.py`
in all kinds of layouts against the same network in plain torch, in one process, in fp64.
"""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from megatron.errors import SettingsError
from megatron.mpu.forked import run_ranks
from megatron.mpu.random import seed_of
from megatron.training.entry import start
from tests.models import own_experts
from tests.models.plain_state import HIDDEN, LAYERS, LENGTH, LINE, VOCABULARY, compare, read_all, train

EXPERTS, CHOSEN, FFN = 8, 2, 4 * HIDDEN
EP2, ETP2 = "--expert-model-parallel-size 2", "--expert-tensor-parallel-size 2"
ETP1 = "--expert-tensor-parallel-size 1"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
EP4 = "--expert-model-parallel-size 4 --micro-batch-size 1"
LAYOUTS = {
    "one process": (1, ""),
    "one token goes to one expert": (1, "--experts-of-token 1"),
    "dp2": (2, ""),
    "ep2": (2, EP2),
    "ep2, one expert a token": (2, f"{EP2} --experts-of-token 1"),
    "ep4, one sample at a time": (4, EP4),
    "etp2": (2, ETP2),
    "tp2, experts divided likewise": (2, TP2),
    "tp2, whole experts": (2, f"{TP2} {ETP1}"),
    "tp2, ep over its ranks": (2, f"{TP2} {ETP1} {EP2}"),
    "tp2 dp2, ep2 etp2": (4, f"{TP2} {EP2} {ETP2}"),
    "tp2 dp2, ep2 of whole experts": (4, f"{TP2} {EP2} {ETP1}"),
    "ep2 and copies": (4, f"{EP2} --micro-batch-size 1"),
    "ep2, zero1": (4, f"{EP2} --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "ep2, zero2": (4, f"{EP2} --sharding-stage 2 --micro-batch-size 1 --overlap-grad-reduce"),
    "ep2, zero3": (4, f"{EP2} --sharding-stage 3 --overlap-param-gather"),
    "ep4, zero3, recomputation": (4, f"{EP4} --sharding-stage 3 --recompute-granularity full"),
    "tp2 ep2, zero3, two at a time": (
        4,
        f"{TP2} {EP2} {ETP1} --sharding-stage 3 --recompute-granularity full --recompute-num-layers 2",
    ),
    "ep2, zero1 with copies": (4, f"{EP2} --sharding-stage 1 --sharding-degree 2 --micro-batch-size 1"),
    "ep2, fused accumulation": (2, f"{EP2} --gradient-accumulation-fusion --micro-batch-size 1"),
    "cp2, ep over its ranks": (2, f"--context-parallel-size 2 {EP2}"),
    "pp2 ep2": (4, f"{PP2} {EP2}"),
    "pp2 ep2, zb-h1": (4, f"{PP2} {EP2} --pipeline-schedule zb-h1 --micro-batch-size 1"),
    "pp2 ep2, zb-h1, zero2": (4, f"{PP2} {EP2} --pipeline-schedule zb-h1 --sharding-stage 2"),
    "pp2 etp2, interleaved": (4, f"{PP2} {ETP2} --num-layers-per-virtual-pipeline-stage 1"),
    "pp2 ep2 in a V, zero3": (4, f"{PP2} {EP2} --pipeline-schedule zb-v --sharding-stage 3"),
}


def pretrain(rank: int, words: str) -> None:
    start(f"{LINE} {words}".split(), own_experts.recipe())


# ---- in plain torch --------------------------------------------------------------------------------------------------


def initial_weights() -> dict[str, torch.Tensor]:
    small, weights = 0.05 / math.sqrt(2 * LAYERS), {}
    drawn = {
        "embedding.word.weight": ((VOCABULARY, HIDDEN), 0.05),
        "embedding.position.weight": ((LENGTH, HIDDEN), 0.05),
    }
    for n in range(LAYERS):
        for part, experts in (("", ()), ("experts.", (EXPERTS,))):
            for name, shape, std in (("up", (FFN, HIDDEN), 0.05), ("down", (HIDDEN, FFN), small)):
                drawn[f"blocks.{n}.{part}{name}.weight"] = ((*experts, *shape), std)
                weights[f"blocks.{n}.{part}{name}.bias"] = torch.zeros(*experts, shape[0])
        drawn[f"blocks.{n}.router.weight"] = ((EXPERTS, HIDDEN), 0.05)
    for norm in ["final_norm", *(f"blocks.{n}.{half}norm" for n in range(LAYERS) for half in ("", "experts_"))]:
        weights |= {f"{norm}.weight": torch.ones(HIDDEN), f"{norm}.bias": torch.zeros(HIDDEN)}
    for name, (shape, std) in drawn.items():
        generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
        weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
    return {name: values.double() for name, values in weights.items()}


def logits(weights, tokens: torch.Tensor, chosen: int) -> torch.Tensor:
    """Tokens [b, s] -> [b, s, vocabulary]: every expert computes every token, and counts where it was chosen."""

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name, x):
        return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    gelu = lambda x: F.gelu(x, approximate="tanh")
    x = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][: tokens.shape[1]]
    for n in range(LAYERS):
        own = f"blocks.{n}."
        x = x + linear(own + "down", gelu(linear(own + "up", norm(own + "norm", x))))
        u = norm(own + "experts_norm", x)
        scores = (u @ weights[own + "router.weight"].T).softmax(-1)
        least = scores.topk(chosen, -1).values[..., -1:]
        scores = scores * (scores >= least)  # [b, s, experts], 0 for the others
        up, down = (weights[f"{own}experts.{name}.weight"] for name in ("up", "down"))
        inner = gelu(torch.einsum("bsh,efh->bsef", u, up) + weights[f"{own}experts.up.bias"])
        x = x + torch.einsum("bse,bsef,ehf->bsh", scores, inner, down) + scores @ weights[f"{own}experts.down.bias"]
    return norm("final_norm", x) @ weights["embedding.word.weight"].T


@cache
def plain(chosen: int = CHOSEN):
    network = lambda weights, tokens, buffers: logits(weights, tokens, chosen)
    return train(initial_weights(), lambda name: True, network=network)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{words} --save {tmp_path} --check-replicas-interval 2")
    compare(tmp_path, *plain(1 if "--experts-of-token 1" in words else CHOSEN))
