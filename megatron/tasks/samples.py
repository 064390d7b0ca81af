# SPDX-License-Identifier: Apache-2.0
"""Convert examples of a task to training samples: the model's input and the target."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np

from megatron.data.labelled import pair_lengths
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.tasks.description import Task
from megatron.tasks.examples import Examples, TaskExample
from megatron.tasks.readers import HIDDEN, Arrays, Ids, TextReader

ABOVE, BELOW = "above", "below"  # the target of a regression: its positive and its negative part
SHARES = "shares"  # probabilities of classes as the target
OPTIONS = "options"  # number of options
GAPS = re.compile("_+")  # placeholder for an option in a question
OF_SAMPLES = (LABELS, LOSS_MASK, ABOVE, BELOW, SHARES, OPTIONS)  # arrays per sample, not per option


def sample_arrays(
    task: Task, text: dict[str, SampleArray], hides: bool = False, soft: bool = False
) -> dict[str, SampleArray]:
    """The arrays of a task's sample. The loss mask is one number: 1 if the label is known.

    text: arrays of the model's input; hides: word dropout is used; soft: labels are probabilities
    """
    if hides:
        text = {**text, HIDDEN: next(iter(text.values()))}
    if task.options:
        text = {name: replace(array, length=task.outputs * (array.length or 1)) for name, array in text.items()}
        text[OPTIONS] = SampleArray(0, below=task.outputs + 1)
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
    """Samples of a split in the order of its files, as dicts of `sample_arrays`; each is a pure function of its index.

    whole: evaluate all samples. hidden: the token for word dropout, or None. soft: labels are probabilities, also in
    evaluations.
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
        texts = [ids_of(one, self.tokenizer, self.reader) for one in with_options(example)]
        return {
            **together([self.reader.read_hidden(*text, self.hidden) for text in texts], self.task),
            **wanted(self.task, example.label, example.shares, self.soft),
        }


def together(options: Sequence[Arrays], task: Task) -> Arrays:
    """The input of a sample: of its text, or of its options, concatenated. The first one fills missing options."""
    if not task.options:
        return options[0]
    filled = [*options, *[options[0]] * (task.outputs - len(options))]
    arrays = {name: np.concatenate([np.atleast_1d(one[name]) for one in filled]) for name in filled[0]}
    return {**arrays, OPTIONS: len(options)}


def wanted(
    task: Task, label: Optional[float], shares: Optional[Sequence[float]] = None, soft: bool = False
) -> dict[str, Any]:
    """The target of a sample, as arrays. label, shares: None if unknown. soft: as probabilities."""
    value, known = label or 0, {LOSS_MASK: float((label if shares is None else shares) is not None)}
    if soft:
        known[SHARES] = np.eye(task.outputs, dtype=np.float32)[int(value)] if shares is None else np.float32(shares)
    if task.regression:
        return {**known, LABELS: 0, ABOVE: max(value, 0.0), BELOW: max(-value, 0.0)}
    return {**known, LABELS: int(value)}


@dataclass(frozen=True)
class MockTaskSamples:
    """Mock samples (--mock-data): texts of any length whose first token determines the label.

    Of several options, the one with the largest first token is right.
    """

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
        count = self.task.outputs if self.task.options else 1
        texts = [self._text(draw) for _ in range(count)]
        label = np.argmax([text[0] for text in texts]) if count > 1 else texts[0][0] % max(self.task.outputs, 2)
        return {
            **together([self.reader.read_hidden(text, None, self.hidden) for text in texts], self.task),
            **wanted(self.task, label, soft=self.soft),
        }

    def _text(self, draw: np.random.Generator) -> Ids:
        return draw.integers(self.vocab_size, size=draw.integers(1, self.reader.room(False) + 1)).tolist()


def with_options(example: TaskExample) -> list[TaskExample]:
    """The example, or one for each option, with the option in the gaps of the text, or after a text without gaps."""
    if not example.options:
        return [example]
    text = example.text if GAPS.search(example.text) else f"{example.text} _".strip()
    return [example._replace(text=option.join(GAPS.split(text))) for option in example.options]


def ids_of(example: TaskExample, tokenizer, reader: TextReader) -> tuple[Ids, Optional[Ids]]:
    """The tokens of an example's text and of the second one. Long texts are truncated at the end, the longer one first."""
    first = tokenizer.encode(example.text)
    if example.pair is None:
        return first[: reader.room(False)], None
    second = tokenizer.encode(example.pair)
    keep = pair_lengths(len(first), len(second), reader.room(True))
    return first[: keep[0]], second[: keep[1]]


def longest_cut(samples: Optional[TaskSamples], most: int = 2000) -> int:
    """Number of the first `most` examples that are truncated, for the log."""
    if samples is None:
        return 0
    encode, room = samples.tokenizer.encode, samples.reader.room
    rows = [max(with_options(row), key=lambda one: len(one.text)) for row in samples.examples.rows[:most]]
    lengths = [(len(encode(row.text)) + len(encode(row.pair or "")), row.pair is not None) for row in rows]
    return sum(length > room(pair) for length, pair in lengths)
