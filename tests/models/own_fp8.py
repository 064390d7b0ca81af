# SPDX-License-Identifier: Apache-2.0
"""A GPT some of whose linear layers multiply numbers of fp8, emulated: each operand is cast to it and back.

Activations and weights are e4m3, gradients e5m2. A tile of neighbours along the last dim shares a scale, a power of two
(--fp8-tile, which divides what a tensor parallel rank has: no tile crosses a cut, and each layout casts alike).
Weights are cast once a step. Of an input what is cast is kept: a byte for each number, and the scales.

    python -m tests.models.own_fp8 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
        --micro-batch-size 2 --train-iters 4 --lr 1e-2 --mock-data --vocab-size 100 --linear "*=fp8, blocks.0.*=plain"
"""

from dataclasses import dataclass, replace

import torch

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.mpu.linear_product import LinearProduct
from megatron.settings.schema import setting


@dataclass(frozen=True)
class Fp8Settings:
    fp8_tile: int = setting("neighbours that share a scale", 8, on_resume="refused")


class Fp8(LinearProduct):
    group = Fp8Settings
    once_a_step = True

    def prepare_input(self, x):
        return cast(x, torch.float8_e4m3fn, self.settings.fp8_tile)

    prepare_weight = prepare_input

    def prepare_gradient(self, gradient):
        return cast(gradient, torch.float8_e5m2, self.settings.fp8_tile)

    def forward(self, multiply, x, weight, bias):
        return multiply(self.back(x), self.back(weight), bias)

    def grad_input(self, multiply, gradient, weight):
        return multiply(self.back(gradient), self.back(weight).mT, None)

    def grad_weight(self, multiply, gradient, x):
        return multiply(self.back(gradient).t(), self.back(x).t(), None)

    def back(self, operand):
        """What the numbers of fp8 stand for, in the format of the layer's weights."""
        numbers, scales = operand
        tiles = numbers.to(scales.dtype).unflatten(-1, (scales.shape[-1], -1))
        return (tiles * scales.unsqueeze(-1)).flatten(-2)


def cast(x: torch.Tensor, dtype: torch.dtype, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers [rows, n] of fp8, what each tile of them is multiplied by [rows, n / tile])."""
    tiles = x.unflatten(-1, (-1, tile))
    largest = tiles.abs().amax(-1, keepdim=True).float().clamp_min(2.0**-100)
    scales = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(dtype).max)))
    return (tiles / scales).to(dtype).flatten(-2), scales.squeeze(-1).to(x.dtype)


def recipe():
    """What is trained."""
    return replace(pretrain_gpt.recipe(), model_type="tests.models.own_fp8", linears={"fp8": Fp8})


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
