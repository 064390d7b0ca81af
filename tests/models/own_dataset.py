# SPDX-License-Identifier: Apache-2.0
"""A GPT on samples of one's own: a dataset is anything with a length that gives seq_length + 1 token numbers by index.

    python -m tests.models.own_dataset --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
        --micro-batch-size 2 --train-iters 4 --lr 1e-2 --own-step 3 --vocab-size 100
"""

from dataclasses import dataclass, replace

import numpy as np

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.settings.schema import setting


@dataclass(frozen=True)
class OwnData:
    """Settings that only this recipe has."""

    own_step: int = setting("how far a number is after the previous one", 1)


@dataclass(frozen=True)
class Counting:
    """Samples of numbers that grow by `step`, [seq_length + 1] int64 each; a pure function of split and index."""

    size: int
    seq_length: int
    vocab_size: int
    step: int
    split: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        first = np.random.default_rng((self.split, index)).integers(self.vocab_size)
        return (first + self.step * np.arange(self.seq_length + 1)) % self.vocab_size


def build_datasets(config, tokenizer, vocab_size: int, sizes, log) -> tuple:
    """(train, valid, test), each with at least as many samples as `sizes` asks for, or None where it asks for none."""
    step, length = config.extra["data of its own"].own_step, config.model.seq_length
    made = [Counting(size, length, vocab_size, step, split) for split, size in enumerate(sizes)]
    return tuple(dataset if len(dataset) else None for dataset in made)


def recipe():
    """What is trained: a GPT, but for its data."""
    own = dict(build_datasets=build_datasets, own_data=True, groups={"data of its own": OwnData})
    return replace(pretrain_gpt.recipe(), model_type="tests.models.own_dataset", **own)


def main(argv: list[str]) -> None:
    start(argv, recipe())


if __name__ == "__main__":
    run_main(main)
