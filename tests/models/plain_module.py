# SPDX-License-Identifier: Apache-2.0
"""A module that knows nothing of this suite but what its forward pass is given: the smallest model of one's own.

    python -m tests.models.plain_module --seq-length 16 --hidden-size 24 --micro-batch-size 2 --train-iters 4 --lr 1e-2 \\
        --mock-data --vocab-size 100
"""

import torch
import torch.nn.functional as F
from torch import nn

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.plain import plain_recipe


class Block(nn.Module):
    """x plus an MLP of the mean of all tokens so far."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.arange(1, len(x) + 1, device=x.device).view(-1, 1, 1)
        return x + self.down(F.gelu(self.up(self.norm(x).cumsum(0) / count)))


class PlainModule(nn.Module):
    def __init__(self, width: int, vocab_size: int, depth: int = 2):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x, batch):
        x = self.table(batch.tokens)  # [s, b, h]
        for block in self.blocks:
            x = block(x)
        scores = (x * self.scale) @ self.table.weight.T
        losses = F.cross_entropy(scores.float().flatten(0, 1), batch.labels.flatten(), reduction="none")
        mask = torch.ones_like(losses) if batch.loss_mask is None else batch.loss_mask.flatten()
        return None, {"lm loss": (losses * mask).sum(), "tokens": batch.num_tokens}


def build(config, vocab_size: int) -> PlainModule:
    return PlainModule(config.model.hidden_size, vocab_size)


def recipe():
    return plain_recipe("tests.models.plain_module", build, pretrain_gpt.build_datasets)


def main(argv: list[str]) -> None:
    start(argv, recipe())


if __name__ == "__main__":
    run_main(main)
