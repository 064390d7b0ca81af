# SPDX-License-Identifier: Apache-2.0
"""Examples as samples of training: what the model reads of a text, and what is to be found out of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megatron.data.labelled import pair_lengths
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.tasks.description import Task
from megatron.tasks.examples import Examples, TaskExample
from megatron.tasks.texts import HIDDEN, Ids, TextReader

ABOVE, BELOW = "above", "below"  # the number that is learned, as what of it is above 0, and below
SHARES = "shares"  # how likely each class is, where that is learned


def sample_arrays(
    task: Task, text: dict[str, SampleArray], hides: bool = False, soft: bool = False
) -> dict[str, SampleArray]:
    """What a sample of a task consists of. text: what the model reads; hides: whether words of it may be hidden; soft:
    labels are probabilities. Its loss mask is one number: 1 where the label is known.
    """
    if hides:
        text = {**text, HIDDEN: next(iter(text.values()))}
    numbers = {ABOVE: SampleArray(0, mask=True), BELOW: SampleArray(0, mask=True)} if task.regression else {}
    shares = {SHARES: SampleArray(task.outputs, mask=True)} if soft else {}
    return {
        **text,
        LABELS: SampleArray(0, below=task.outputs),
        LOSS_MASK: SampleArray(0, mask=True),
        **numbers,
        **shares,
    }


@dataclass(frozen=True)
class TaskSamples:
    """Samples of a split, in the order of its files, as dicts of `sample_arrays`; each a pure function of its place.

    whole: an evaluation goes over all of them. hidden: the token that hides words, where some are hidden. soft: labels are
    probabilities, also those of an evaluation.
    """

    examples: Examples
    task: Task
    tokenizer: Any
    reader: TextReader
    whole: bool = False
    hidden: Optional[int] = None
    soft: bool = False

    def __len__(self) -> int:
        return len(self.examples.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples.rows[index]
        texts = ids_of(example, self.tokenizer, self.reader)
        return {
            **self.reader.read_hidden(*texts, self.hidden),
            **wanted(self.task, example.label, example.shares, self.soft),
        }


def wanted(
    task: Task, label: Optional[float], shares: Optional[Sequence[float]] = None, soft: bool = False
) -> dict[str, Any]:
    """What is to be found out, as arrays of a sample. label, shares: None where nobody knows it. soft: as probabilities."""
    value, known = label or 0, {LOSS_MASK: float((label if shares is None else shares) is not None)}
    if soft:
        known[SHARES] = np.eye(task.outputs, dtype=np.float32)[int(value)] if shares is None else np.float32(shares)
    if task.regression:
        return {**known, LABELS: 0, ABOVE: max(value, 0.0), BELOW: max(-value, 0.0)}
    return {**known, LABELS: int(value)}


@dataclass(frozen=True)
class MockTaskSamples:
    """Samples that are made up (--mock-data): texts of any length whose first token says the label."""

    size: int
    task: Task
    reader: TextReader
    vocab_size: int
    seed: int
    split: int
    whole: bool = False
    hidden: Optional[int] = None
    soft: bool = False

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = np.random.default_rng((self.seed, self.split, index))
        text = draw.integers(self.vocab_size, size=draw.integers(1, self.reader.room(False) + 1)).tolist()
        return {
            **self.reader.read_hidden(text, None, self.hidden),
            **wanted(self.task, text[0] % max(self.task.outputs, 2), soft=self.soft),
        }


def ids_of(example: TaskExample, tokenizer, reader: TextReader) -> tuple[Ids, Optional[Ids]]:
    """The tokens of an example's text, and of its other one. What is too long loses its end; of two texts the longer one
    first.
    """
    first = tokenizer.encode(example.text)
    if example.pair is None:
        return first[: reader.room(False)], None
    second = tokenizer.encode(example.pair)
    keep = pair_lengths(len(first), len(second), reader.room(True))
    return first[: keep[0]], second[: keep[1]]


def longest_cut(samples: Optional[TaskSamples], most: int = 2000) -> int:
    """Of the first `most` examples, how many are longer than the samples: the log says it."""
    if samples is None:
        return 0
    encode, room = samples.tokenizer.encode, samples.reader.room
    rows = samples.examples.rows[:most]
    lengths = [(len(encode(row.text)) + len(encode(row.pair or "")), row.pair is not None) for row in rows]
    return sum(length > room(pair) for length, pair in lengths)
