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


class MockPairs:
    """Sources of random length with reversed targets; a pure function of (seed, split, index).

    A source counts upwards from a random number, wrapping around; the target is the source backwards, truncated. Token 0
    begins a target; 1 ends and pads it.

        >>> sample = MockPairs(size=4, source=6, target=4, vocab_size=20, seed=3)[1]
        >>> sample["text_enc"].tolist(), sample["text_dec"].tolist(), sample["labels"].tolist()
        ([15, 16, 17, 18, 1, 1], [0, 18, 17, 16], [18, 17, 16, 15])
    """

    BEGIN, END, FIRST = 0, 1, 2
    SYMBOLS = 64  # distinct tokens

    def __init__(self, size: int, source: int, target: int, vocab_size: int, seed: int = 0, split: int = 0):
        assert vocab_size > self.FIRST, f"vocab_size {vocab_size}"
        self.size, self.source, self.target = size, source, target
        self.symbols, self.entropy = min(self.SYMBOLS, vocab_size - self.FIRST), (seed % 2**63, split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """text_enc, enc_mask [source]; text_dec, labels, loss_mask, dec_mask [target]."""
        random = np.random.default_rng((*self.entropy, int(index)))
        length = int(random.integers(max(1, self.source // 2), self.source + 1))
        text = (random.integers(self.symbols) + np.arange(length)) % self.symbols + self.FIRST
        answer = np.concatenate([text[::-1], [self.END]])[: self.target]
        source, labels = np.full(self.source, self.END), np.full(self.target, self.END)
        source[:length], labels[: len(answer)] = text, answer
        counts = (np.arange(self.target) < len(answer)).astype(np.float32)
        return dict(
            text_enc=source,
            text_dec=np.concatenate([[self.BEGIN], labels[:-1]]),
            labels=labels,
            loss_mask=counts,
            enc_mask=(np.arange(self.source) < length).astype(np.int64),
            dec_mask=counts.astype(np.int64),
        )


class MockMasked:
    """Two runs of consecutive numbers, some of them masked; a pure function of (seed, split, index).

    The second run continues the first, or starts anywhere (`is_random`). Tokens: 0 is [CLS], 1 is [SEP] and padding, 2 is
    [MASK].
    """

    CLASSIFY, SEPARATE, MASKED, FIRST = 0, 1, 2, 3
    SYMBOLS = 64  # distinct tokens
    SHARE = 0.15  # of masked tokens

    def __init__(self, size: int, seq_length: int, vocab_size: int, seed: int = 0, split: int = 0):
        assert vocab_size > self.FIRST and seq_length > 5, f"vocab_size {vocab_size}, seq_length {seq_length}"
        self.size, self.seq_length = size, seq_length
        self.symbols, self.entropy = min(self.SYMBOLS, vocab_size - self.FIRST), (seed % 2**63, split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """text, types, labels, loss_mask, padding_mask [seq_length]; is_random."""
        random = np.random.default_rng((*self.entropy, int(index)))
        tokens = int(random.integers(self.seq_length // 2, self.seq_length + 1)) - 3
        first, other = tokens - tokens // 2, int(random.integers(2))
        start = random.integers(self.symbols)
        follows = random.integers(self.symbols) if other else start + first
        count = lambda begin, length: (begin + np.arange(length)) % self.symbols + self.FIRST
        row = [[self.CLASSIFY], count(start, first), [self.SEPARATE], count(follows, tokens - first), [self.SEPARATE]]
        row = np.concatenate(row)
        labels = np.full(self.seq_length, self.SEPARATE)
        labels[: len(row)] = row
        places = np.arange(self.seq_length)
        masked = (random.random(self.seq_length) < self.SHARE) & (labels >= self.FIRST) & (places < len(row))
        masked[1] = True  # at least one
        return dict(
            text=np.where(masked, self.MASKED, labels),
            types=((places > first + 1) & (places < len(row))).astype(np.int64),
            labels=labels,
            is_random=np.int64(other),
            loss_mask=masked.astype(np.float32),
            padding_mask=(places < len(row)).astype(np.int64),
        )
