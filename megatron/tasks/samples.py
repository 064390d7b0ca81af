# SPDX-License-Identifier: Apache-2.0
"""Examples as samples of training: tokens, filled up behind the text, and what is to be found out of them."""

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megatron.tasks.examples import Examples, TaskExample

TARGETS = "targets"  # of a sample: [label, tokens of the text] fp32


@dataclass(frozen=True)
class TaskSamples:
    """Samples of a split, in the order of its files; each a pure function of its place.

    ids are those of the text, filled up to seq_length + 1. The loss mask has a 1 for the last token of the text, which is
    the one that is pooled: an example of known label counts as one token. whole: an evaluation goes over all of them.
    """

    examples: Examples
    tokenizer: Any
    seq_length: int
    whole: bool = False

    def __len__(self) -> int:
        return len(self.examples.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        example = self.examples.rows[index]
        text = token_ids(example, self.tokenizer, self.seq_length)
        ids, mask = np.zeros(self.seq_length + 1, np.int64), np.zeros(self.seq_length + 1, np.float32)
        ids[: len(text)] = text
        known = example.label is not None
        mask[len(text)] = known  # that of a label stands beside the token before it
        targets = np.array([example.label if known else 0, len(text)], np.float32)
        return dict(input_ids=ids, loss_mask=mask, targets=targets)


def token_ids(example: TaskExample, tokenizer, length: int) -> list[int]:
    """At least one and at most `length` ids: the text, and where there is another one, the end of a document and that. What
    is too long loses its end; of two texts the longer one first.
    """
    first = tokenizer.encode(example.text)
    if example.pair is None:
        return first[:length] or [_end(tokenizer)]
    second = tokenizer.encode(example.pair)
    keep = cut(len(first), len(second), length - 1)
    return [*first[: keep[0]], _end(tokenizer), *second[: keep[1]]]


def cut(first: int, second: int, length: int) -> tuple[int, int]:
    """How many tokens of each text stay, of `length` together: the longer one is cut, the second where both are alike.

    >>> cut(10, 3, 8), cut(10, 9, 8), cut(2, 3, 8), cut(4, 9, 9)
    ((5, 3), (4, 4), (2, 3), (4, 5))
    """
    half = length // 2
    if first + second <= length:
        return first, second
    if second <= half:
        return length - second, second
    return (first, length - first) if first <= length - half else (length - half, half)


def _end(tokenizer) -> int:
    return 0 if tokenizer.eod is None else tokenizer.eod


def longest_cut(samples: Optional[TaskSamples], most: int = 2000) -> int:
    """Of the first `most` examples, how many are longer than the samples: the log says it."""
    if samples is None:
        return 0
    more = TaskSamples(samples.examples, samples.tokenizer, 1 << 20)
    lengths = (len(token_ids(example, more.tokenizer, more.seq_length)) for example in samples.examples.rows[:most])
    return sum(length > samples.seq_length for length in lengths)
