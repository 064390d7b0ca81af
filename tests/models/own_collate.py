# SPDX-License-Identifier: Apache-2.0
"""A GPT on questions and answers of any length, of which the answers are learned: `Recipe.collate` makes samples of them.

    python -m tests.models.own_collate --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
        --micro-batch-size 2 --train-iters 4 --lr 1e-2 --vocab-size 100 --eval-iters 0
"""

from dataclasses import dataclass, replace

import numpy as np

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main


@dataclass(frozen=True)
class Pairs:
    """(question, answer) by index: numbers from 1 on, and those numbers backwards."""

    size: int
    split: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        random = np.random.default_rng((self.split, index))
        question = random.integers(1, 50, random.integers(2, 9)).tolist()
        return question, question[::-1]


def build_datasets(config, tokenizer, vocab_size: int, sizes, log) -> tuple:
    return tuple(Pairs(size, split) if size else None for split, size in enumerate(sizes))


def collate(given: list) -> list:
    """Pairs (question, answer) as samples of which the answer alone is learned, filled up with zeros."""
    samples = []
    for question, answer in given:
        ids, mask = np.zeros(17, np.int64), np.zeros(17, np.float32)
        text = [*question, *answer][:17]
        ids[: len(text)], mask[len(question) : len(text)] = text, 1.0
        samples.append((ids, mask))
    return samples


def recipe():
    own = dict(build_datasets=build_datasets, own_data=True, collate=collate)
    return replace(pretrain_gpt.recipe(), model_type="tests.models.own_collate", **own)


def main(argv: list[str]) -> None:
    start(argv, recipe())


if __name__ == "__main__":
    run_main(main)
