# SPDX-License-Identifier: Apache-2.0
"""Samples of tasks whose answers are pieces of a text, and the answers in a model's scores.

A sample is a question and a window of its text, as a pair. Its target is the first and the last token of the answer, or the
first token of the sample, if the answer is not in the window. In training a question is one sample: of a text with several
windows, in half of the samples one with the answer, else any. In evaluations there is a sample for each window.

Legend: s tokens of a sample, n samples.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

import numpy as np

from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.tasks.examples import Examples
from megatron.tasks.spans import LONGEST_ANSWER, QUESTION, TokenizedText, tokenized, windows
from megatron.tasks.texts import Ids, TextReader

ENDS = "ends"  # array of a sample: the row of the answer's last token; that of the first one is its label
NOWHERE = 0  # the row of an answer that is not in the window


def span_arrays(text: dict[str, SampleArray], length: int) -> dict[str, SampleArray]:
    """The arrays of a sample. text: those of the model's input."""
    rows = {name: SampleArray(0, below=length) for name in (LABELS, ENDS)}
    return {**text, **rows, LOSS_MASK: SampleArray(0, mask=True)}


@dataclass(frozen=True)
class SpanSamples:
    """The samples of a split. whole: all windows, for evaluations."""

    examples: Examples
    tokenizer: Any
    reader: TextReader
    whole: bool = False

    def __len__(self) -> int:
        return len(self._places) if self.whole else len(self.examples.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.whole:
            row, window = self._places[index]
            return self._sample(row, self._windows(row)[window])
        found, answer = self._windows(index), self._answer(index)
        draw = np.random.default_rng(index)
        holding = [one for one in found if answer and one[0] <= answer[0] and answer[1] < one[1]]
        chosen = holding if holding and draw.random() < 0.5 else found
        return self._sample(index, chosen[draw.integers(len(chosen))])

    def _sample(self, row: int, window: tuple[int, int]) -> dict[str, Any]:
        (start, end), answer, question = window, self._answer(row), self._question(row)
        inside = answer is not None and start <= answer[0] and answer[1] < end
        first = self.reader.pair_place(len(question))
        places = (first + answer[0] - start, first + answer[1] - start) if inside else (NOWHERE, NOWHERE)
        return {
            **self.reader.read(question, self._text(row).ids[start:end].tolist()),
            LABELS: places[0],
            ENDS: places[1],
            LOSS_MASK: float(self.examples.rows[row].label is not None),
        }

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """(question, number of its window) of each sample of an evaluation."""
        return [(row, n) for row in range(len(self.examples.rows)) for n in range(len(self._windows(row)))]

    @cached_property
    def _texts(self) -> dict[str, TokenizedText]:
        return {}

    @cached_property
    def _questions(self) -> dict[int, Ids]:
        return {}

    @cached_property
    def _units(self) -> dict[str, list[int]]:
        return {}

    def _encode(self, unit: str) -> list[int]:
        if unit not in self._units:
            self._units[unit] = self.tokenizer.encode(unit)
        return self._units[unit]

    def _text(self, row: int) -> TokenizedText:
        context = self.examples.rows[row].pair
        if context not in self._texts:
            self._texts[context] = tokenized(context, self._encode)
        return self._texts[context]

    @property
    def longest_question(self) -> int:
        """Tokens of a question that are read."""
        return min(QUESTION, self.reader.room(True) // 2)

    def questions_cut(self, most: int) -> int:
        """How many of the first `most` questions are longer."""
        rows = range(min(most, len(self.examples.rows)))
        return sum(len(self._whole_question(row)) > self.longest_question for row in rows)

    def _question(self, row: int) -> Ids:
        return self._whole_question(row)[: self.longest_question]

    def _whole_question(self, row: int) -> Ids:
        if row not in self._questions:
            self._questions[row] = self.tokenizer.encode(self.examples.rows[row].text)
        return self._questions[row]

    def _windows(self, row: int) -> list[tuple[int, int]]:
        return windows(len(self._text(row).ids), self.reader.room(True) - len(self._question(row)))

    def _answer(self, row: int) -> Optional[tuple[int, int]]:
        """(first, last) token of the first answer in the text."""
        answers = self.examples.rows[row].answers
        return self._text(row).tokens_of(*answers[0]) if answers else None

    def answers(self, scores: np.ndarray) -> list[str]:
        """The best answer to each question, over its windows, from scores [n, 2 s] of evaluation samples."""
        best: dict[int, tuple[float, str]] = {}
        for (row, window), own in zip(self._places, scores, strict=True):
            (start, end), first = self._windows(row)[window], self.reader.pair_place(len(self._question(row)))
            begin, last = own.reshape(2, -1)[:, first : first + end - start]
            score, place = best_span(begin, last)
            if score > best.get(row, (-np.inf, ""))[0]:
                best[row] = score, self._text(row).between(start + place[0], start + place[1])
        return [best[row][1] if row in best else "" for row in range(len(self.examples.rows))]


def best_span(begin: np.ndarray, last: np.ndarray) -> tuple[float, tuple[int, int]]:
    """(sum of both scores, (first, last token)) of the best piece of at most LONGEST_ANSWER tokens.

    >>> best_span(np.array([1.0, 3.0, 0.0]), np.array([9.0, 1.0, 2.0]))
    (10.0, (0, 0))
    """
    best = (-np.inf, (0, 0))
    for length in range(min(LONGEST_ANSWER, len(begin))):
        sums = begin[: len(begin) - length] + last[length:]
        place = int(sums.argmax())
        if sums[place] > best[0]:
            best = float(sums[place]), (place, place + length)
    return best


@dataclass(frozen=True)
class MockSpanSamples:
    """Mock samples (--mock-data): the answer is where the text repeats the question's token."""

    size: int
    reader: TextReader
    vocab_size: int
    seed: int
    split: int
    whole: bool = False

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = np.random.default_rng((self.seed, self.split, index))
        count = self.reader.room(True) - 1
        text = draw.integers(self.vocab_size, size=count).tolist()
        place = int(draw.integers(count))
        row = self.reader.pair_place(1) + place
        return {**self.reader.read([text[place]], text), LABELS: row, ENDS: row, LOSS_MASK: 1.0}
