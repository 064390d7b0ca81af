# SPDX-License-Identifier: Apache-2.0
"""Examples as samples of training: tokens, filled up behind the text, and what is to be found out of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.tasks.description import Task
from megatron.tasks.examples import Examples, TaskExample

TOKENS, LENGTHS = "tokens", "lengths"  # of a sample: ids, filled up; how many of them are the text
ABOVE, BELOW = "above", "below"  # the number that is learned, as what of it is above 0, and below


def sample_arrays(task: Task, seq_length: int, vocab_size: int) -> dict[str, SampleArray]:
    """What a sample of a task consists of. Its loss mask is one number: 1 where the label is known."""
    numbers = {ABOVE: SampleArray(0, mask=True), BELOW: SampleArray(0, mask=True)} if task.regression else {}
    return {
        TOKENS: SampleArray(seq_length, below=vocab_size),
        LABELS: SampleArray(0, below=task.outputs),
        LOSS_MASK: SampleArray(0, mask=True),
        LENGTHS: SampleArray(0, below=seq_length + 1),
        **numbers,
    }


@dataclass(frozen=True)
class TaskSamples:
    """Samples of a split, in the order of its files, as dicts of `sample_arrays`; each a pure function of its place.

    whole: an evaluation goes over all of them.
    """

    examples: Examples
    task: Task
    tokenizer: Any
    seq_length: int
    whole: bool = False

    def __len__(self) -> int:
        return len(self.examples.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples.rows[index]
        text = token_ids(example, self.tokenizer, self.seq_length)
        return sample_of(self.task, text, example.label, self.seq_length)


def sample_of(task: Task, text: Sequence[int], label: Optional[float], seq_length: int) -> dict[str, Any]:
    """The sample of a text of at most seq_length tokens. label: None where nobody knows it."""
    tokens, value = np.zeros(seq_length, np.int64), label or 0
    tokens[: len(text)] = text
    sample = {TOKENS: tokens, LOSS_MASK: float(label is not None), LENGTHS: len(text)}
    if task.regression:
        return {**sample, LABELS: 0, ABOVE: max(value, 0.0), BELOW: max(-value, 0.0)}
    return {**sample, LABELS: int(value)}


@dataclass(frozen=True)
class MockTaskSamples:
    """Samples that are made up (--mock-data): texts of any length whose first token says the label."""

    size: int
    task: Task
    seq_length: int
    vocab_size: int
    seed: int
    split: int
    whole: bool = False

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = np.random.default_rng((self.seed, self.split, index))
        text = draw.integers(self.vocab_size, size=draw.integers(1, self.seq_length + 1))
        return sample_of(self.task, text.tolist(), int(text[0] % max(self.task.outputs, 2)), self.seq_length)


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
    rows = samples.examples.rows[:most]
    return sum(len(token_ids(example, samples.tokenizer, 1 << 20)) > samples.seq_length for example in rows)
