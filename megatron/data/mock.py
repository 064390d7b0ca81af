# SPDX-License-Identifier: Apache-2.0
"""Synthetic samples without files (`--mock-data`): for benchmarks, checks and first steps."""

import numpy as np


class MockDataset:
    """Synthetic samples that a model can learn; a pure function of (seed, split, index).

    A sample is a chain of short "documents", each counting upwards from a random number: 17 18 19 20 <eod> 5 6 7 ...
    Only the end of a document and the start of the next are uncertain, so the loss falls from ln(vocabulary) to well
    below 1 within a few hundred steps of a small model.

        >>> MockDataset(size=10, seq_length=6, vocab_size=100, eod=0, seed=1)[3]
        array([79, 80, 81, 82, 83, 84, 85])
    """

    SYMBOLS = 512  # distinct tokens: few, so that each occurs often
    MEAN_LENGTH = 64  # tokens of a document

    def __init__(self, size: int, seq_length: int, vocab_size: int, eod=None, seed: int = 0, split: int = 0):
        assert vocab_size > 1, f"vocab_size {vocab_size}"
        self.size, self.seq_length, self.eod = size, seq_length, eod
        self.entropy = (seed % 2**63, split)
        self.symbols = min(self.SYMBOLS, vocab_size)
        if eod is not None and eod < self.symbols:  # counts from above the end-of-document token, or stops below it
            self.first, self.symbols = (eod + 1, self.symbols - 1 - eod) if 2 * eod < self.symbols else (0, eod)
        else:
            self.first = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        """Token ids [seq_length + 1], int64."""
        random = np.random.default_rng((*self.entropy, int(index)))
        steps = np.arange(self.seq_length + 1)
        ends = random.random(self.seq_length + 1) < 1 / self.MEAN_LENGTH
        document = np.cumsum(ends) - ends  # an end belongs to its document
        starts = random.integers(self.symbols, size=document[-1] + 1)
        tokens = (starts[document] + steps) % self.symbols + self.first
        if self.eod is not None:
            tokens[ends] = self.eod
        return tokens
