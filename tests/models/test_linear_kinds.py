# SPDX-License-Identifier: Apache-2.0
"""Linear layers that make their products in another way (`--linear`): a mask, a LoRA pair, an emulated cast to fp8, each
a file of its own. Whole trainings are compared with the same network in plain torch.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch

from megatron.mpu.random import seed_of
from megatron.training.entry import start
from tests.models import own_fp8, own_lora, own_mask
from tests.training.plain_loop import HEADS, HIDDEN, LAYERS, LENGTH, Job, plain_linear, train
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, compare

LINE = f"{FLAGS} {SIX} {ADAM}"
TOKENS = 8 * LENGTH  # of a step: what is minimised is divided by them before its gradient goes through the layers
LAYOUTS = {
    "one process": (1, ""),
    "tp3 with sequence parallelism": (3, "--tensor-model-parallel-size 3 --sequence-parallel"),
    "tp3, recomputation, fusion": (
        3,
        "--tensor-model-parallel-size 3 --recompute-granularity full_attn --gradient-accumulation-fusion",
    ),
    "pp2 zb-h1, parameters gathered": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --sharding-stage 3",
    ),
    "zero3, recomputation, fusion": (
        2,
        "--sharding-stage 3 --recompute-granularity full --recompute-method uniform --gradient-accumulation-fusion",
    ),
}


# ---- the layers in plain torch ---------------------------------------------------------------------------------------


def masked(weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Two of each four weights along the inputs, those with the larger of drawn scores."""
    weight = weights[f"{name}.weight"]
    if ".mlp." in name:
        generator = torch.Generator().manual_seed(seed_of(7, name))
        scores = torch.rand((*weight.shape[:-1], weight.shape[-1] // 4, 4), generator=generator)
        keep = torch.zeros_like(scores).scatter(-1, scores.topk(2, -1).indices, 1.0)
        weights = {**weights, f"{name}.weight": weight * keep.flatten(-2)}
    return plain_linear(weights, name, x)


def with_pair(weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """y + 8 / 4 x (x A^T) B^T."""
    y = plain_linear(weights, name, x)
    if ".attention.qkv" in name or ".mlp.down" in name:
        a, b = weights[f"{name}.lora_a"], weights[f"{name}.lora_b"]
        y = y + 2.0 * (x @ a.T) @ b.reshape(-1, b.shape[-1]).T
    return y


def pairs(seed: int) -> dict[str, torch.Tensor]:
    found = {}
    for n in range(LAYERS):
        for name, rows, inputs in (
            ("attention.qkv", (HEADS, 3, HIDDEN // HEADS), HIDDEN),
            ("mlp.down", (HIDDEN,), 4 * HIDDEN),
        ):
            full = f"blocks.{n}.{name}.lora_a"
            generator = torch.Generator().manual_seed(seed_of(seed, full, 0))
            found[full] = torch.empty(4, inputs).normal_(0.0, 0.02, generator=generator).double()
            found[f"blocks.{n}.{name}.lora_b"] = torch.zeros((*rows, 4), dtype=torch.float64)
    return found


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To fp8 and back, eight neighbours at a time, by the power of two that brings the largest of them into range."""
    tiles = x.reshape(-1, 8)
    top = tiles.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    scale = 2.0 ** (top / torch.finfo(dtype).max).log2().ceil()
    return ((tiles / scale).float().to(dtype).to(x.dtype) * scale).reshape(x.shape)


class InFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = (rounded(one, torch.float8_e4m3fn) for one in (x, weight))
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        (x, weight), gradient = ctx.saved_tensors, TOKENS * rounded(gradient / TOKENS, torch.float8_e5m2)
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


def in_fp8(weights, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    if name.startswith("blocks.1."):
        return plain_linear(weights, name, x)
    return InFp8.apply(x, weight.reshape(-1, weight.shape[-1])) + bias.reshape(-1)


class Kind(NamedTuple):
    recipe: Callable
    flags: str
    job: dict
    near: dict = {}


KINDS = {
    "mask": Kind(own_mask.recipe, "--linear mlp.*=mask", dict(linear=masked)),
    "lora": Kind(
        own_lora.recipe, "--linear attention.qkv=lora,mlp.down=lora", dict(linear=with_pair, more=pairs)
    ),
    "fp8": Kind(own_fp8.recipe, "--linear *=fp8,blocks.1.*=plain", dict(linear=in_fp8), dict(rel=1e-4, step=1e-3)),
}


@cache
def plain(kind: str):
    return train(Job(**PLAIN, **KINDS[kind].job))


def pretrain(rank: int, kind: str, flags: str) -> None:
    start(f"{LINE} {KINDS[kind].flags} {flags}".split(), KINDS[kind].recipe())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_is_the_plain_loop(kind, layout, run_ranks, tmp_path):
    world, words = LAYOUTS[layout]
    line = f"{words} --save {tmp_path}"
    pretrain(0, kind, line) if world == 1 else run_ranks(world, pretrain, kind, line)
    compare(tmp_path, plain(kind), **KINDS[kind].near)
