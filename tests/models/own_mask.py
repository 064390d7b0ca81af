# SPDX-License-Identifier: Apache-2.0
"""A GPT some of whose linear layers are sparse: two of each four weights along the inputs are 0, and stay so.

    python -m tests.models.own_mask --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
        --micro-batch-size 2 --train-iters 4 --lr 1e-2 --mock-data --vocab-size 100 --linear "mlp.*=mask"
"""

from dataclasses import dataclass, replace

import torch

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.mpu.linear_product import LinearProduct
from megatron.mpu.random import seed_of
from megatron.settings.schema import setting


@dataclass(frozen=True)
class MaskSettings:
    mask_seed: int = setting("seed of the masks of linear layers", 7, on_resume="refused")


class Mask(LinearProduct):
    group = MaskSettings

    def __init__(self, layer, name, settings):
        super().__init__(layer, name, settings)
        layer.register_buffer("mask", self.piece(drawn(name, self.whole_shape, settings.mask_seed)), persistent=False)

    def transform(self, weight):
        return weight * self.layer.mask


def drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Of each four neighbours along the last dim two are kept; by the layer's name alone, so in every layout the same."""
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    scores = torch.rand((*shape[:-1], shape[-1] // 4, 4), generator=generator)
    return (scores.argsort(-1).argsort(-1) >= 2).flatten(-2).float()


def recipe():
    """What is trained."""
    return replace(pretrain_gpt.recipe(), model_type="tests.models.own_mask", linears={"mask": Mask})


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
