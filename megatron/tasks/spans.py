# SPDX-License-Identifier: Apache-2.0
"""Tasks whose answers are pieces of a text (CMRC 2018, DRCD): their files, figures, samples, and the answers of a model.

Files are SQuAD's:

    {"data": [{"paragraphs": [{"context": TEXT, "qas": [
        {"id": ID, "question": TEXT, "answers": [{"text": PIECE, "answer_start": 17}]}]}]}]}

A text is cut into *units*: a Chinese character, a word, a mark. Answers begin and end with a unit. Needs no torch.

A sample is a question and a window of its text, as a pair. Its target is the first and the last token of the answer, or the
first token of the sample, if the answer is not in the window. In training a question is one sample: of a text with several
windows, in half of the samples one with the answer, else any. In evaluations there is a sample for each window.

Legend: s tokens of a sample, n samples.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from megatron.data.tables import json_in, text_in
from megatron.errors import DataError, missing_file
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.tasks.description import Task
from megatron.tasks.examples import Examples, TaskExample, of_files
from megatron.tasks.readers import Ids, TextReader

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
UNIT = re.compile(rf"\s*(?:[{HAN}]|(?:(?![{HAN}])\w)+|[^\w\s])")  # with the blanks before it
# Of figures: CLUE's cmrc2018_evaluate counts these Chinese characters one by one, and leaves these marks out
WORDS = re.compile(r"[\u4e00-\u9fa5]|\d+(?:[.,]\d+)+|(?:(?![\u4e00-\u9fa5])\w)+|[^\w\s]")
MARKS = frozenset(
    "-:_*^/\\~`+=\uff0c\u3002\uff1a\uff1f\uff01\u201c\u201d\uff1b\u2019\u300a\u300b\u00b7\u3001\u300c\u300d\uff08\uff09"
    "\uff0d\uff5e\u300e\u300f"
)
LONGEST_ANSWER = 64  # tokens
OVERLAP = 128  # tokens that two windows of one text share, at most half of a window
QUESTION = 64  # tokens of a question that count


# ---- files -----------------------------------------------------------------------------------------------------------


def read_spans(task: Task, files: Mapping[str, Path], *, labelled: bool = True) -> Examples:
    """The questions of files. labelled: without it, as for test data, answers are optional.

    Raises DataError for files of another form. A question none of whose answers is in its text is left out, with a note.
    """

    def read(path: Path) -> tuple[list[TaskExample], list[str]]:
        questions = list(_questions(task, path, labelled))
        lost = [one.id for one in questions if labelled and not one.answers]
        rows = [one for one in questions if not labelled or one.answers]
        if not rows:
            raise DataError(f"{path} holds no questions{' with an answer in its text' if lost else ''}")
        first = f"(first: {lost[0]})" if lost else ""
        note = f"{path}: {len(lost):,} questions are left out, whose answer is not in the text {first}"
        return rows, [note] * bool(lost)

    return of_files(files, read)


def _questions(task: Task, path: Path, labelled: bool) -> Iterator[TaskExample]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise missing_file(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from None
    content = json_in(text, str(path), "give a file in SQuAD's form: data, paragraphs, context, qas")
    where = str(path)
    try:
        for number, article in enumerate(content["data"]):
            for paragraph in article["paragraphs"]:
                where = f"{path}, data {number}"
                context = text_in(paragraph["context"], f"{where}, context")
                for asked in paragraph["qas"]:
                    where = f"{path}, question {asked['id']}"
                    question, answers = text_in(asked["question"], where), asked.get("answers") or []
                    if labelled and not answers:
                        raise ValueError("it has no answers")
                    found = [place for one in answers if (place := _place(context, one, where)) is not None]
                    gold = tuple(text_in(one["text"], where) for one in answers)
                    label = 0.0 if gold else None
                    yield TaskExample(question, context, label, str(asked["id"]), answers=tuple(found), gold=gold)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{where} is not as {task.name} has them: {reason}", do="SQuAD's form is wanted: docs/finetuning.md#answers"
        ) from None


def _place(context: str, answer: Mapping[str, Any], where: str) -> "tuple[int, int] | None":
    """(first character, the one after the last) of an answer; where it is not at its place, the nearest one is taken."""
    text, start = text_in(answer["text"], where), int(answer["answer_start"])
    if not text:
        return None
    if context[start : start + len(text)] != text:
        places = [one.start() for one in re.finditer(re.escape(text), context)]
        if not places:
            return None
        start = min(places, key=lambda place: abs(place - start))
    return start, start + len(text)


# ---- texts and tokens ------------------------------------------------------------------------------------------------


def units(text: str) -> list[tuple[int, int]]:
    """(first character, the one after the last) of each unit, with the blanks before it.

    >>> [("ab \u4e2d\u6587, c"[start:end]) for start, end in units("ab \u4e2d\u6587, c")]
    ['ab', ' \u4e2d', '\u6587', ',', ' c']
    """
    return [match.span() for match in UNIT.finditer(text)]


class TokenizedText(NamedTuple):
    """The tokens of a text, unit by unit.

    ids:    [n]
    places: the characters of each token's unit, [n, 2]: the first one, and the one after the last
    """

    text: str
    ids: np.ndarray
    places: np.ndarray

    def between(self, first: int, last: int) -> str:
        """The text from one token to another one, both included."""
        return self.text[self.places[first, 0] : self.places[last, 1]].strip()

    def tokens_of(self, start: int, end: int) -> "tuple[int, int] | None":
        """(first, last) token of the characters from `start` up to `end`; None if no unit is there."""
        inside = np.flatnonzero((self.places[:, 0] < end) & (start < self.places[:, 1]))
        return (int(inside[0]), int(inside[-1])) if len(inside) else None


def tokenized(text: str, encode: Callable[[str], Sequence[int]]) -> TokenizedText:
    """encode: the tokens of a unit, with the blanks before it"""
    ids, places = [], []
    for start, end in units(text):
        own = encode(text[start:end])
        ids += own
        places += [(start, end)] * len(own)
    return TokenizedText(text, np.array(ids, np.int32), np.array(places, np.int32).reshape(-1, 2))


def windows(tokens: int, room: int) -> list[tuple[int, int]]:
    """Pieces of a text of so many tokens that fit, each of which shares some with the next one.

    >>> windows(10, 6), windows(5, 6), windows(0, 6)
    ([(0, 6), (3, 9), (4, 10)], [(0, 5)], [(0, 0)])
    """
    step, result = max(1, room - min(OVERLAP, room // 2)), []
    while not result or result[-1][1] < tokens:
        start = 0 if not result else min(result[-1][0] + step, tokens - room)
        result.append((start, min(tokens, start + room)))
    return result


# ---- figures ---------------------------------------------------------------------------------------------------------


def exact(answer: str, golds: Sequence[str]) -> float:
    """1 if an answer equals one of the right ones, without marks and blanks at the ends; else 0."""
    return float(any(_plain(answer) == _plain(gold) for gold in golds))


def overlap_f1(answer: str, golds: Sequence[str]) -> float:
    """The best F1 of the longest common piece, counted in characters of Chinese and words of other languages."""
    return max((_f1(_words(answer), _words(gold)) for gold in golds), default=0.0)


def span_figures(answers: Sequence[str], golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """f1 and em, means over questions, and their mean, as CLUE has them (there in percent).

    >>> span_figures(["\u5317\u4eac", "\u4e0a"], [["\u5317\u4eac\u3002"], ["\u4e0a\u6d77", "\u4e0a\u6d77\u5e02"]])
    {'f1': 0.8333333333333333, 'em': 0.5, 'f1 and em': 0.6666666666666666}
    """
    pairs = list(zip(answers, golds, strict=True))
    f1, em = (sum(of(*pair) for pair in pairs) / max(1, len(pairs)) for of in (overlap_f1, exact))
    return {"f1": f1, "em": em, "f1 and em": (f1 + em) / 2}


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower().strip() if letter not in MARKS)


def _words(text: str) -> list[str]:
    return WORDS.findall(_plain(text))


def _f1(answer: list[str], gold: list[str]) -> float:
    common = longest_common(answer, gold)
    return 2.0 * common / (len(answer) + len(gold)) if common else 0.0


def longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest piece that both have.

    >>> longest_common("xabcy", "zabz"), longest_common("", "a")
    (2, 0)
    """
    return SequenceMatcher(None, one, other, autojunk=False).find_longest_match().size


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
    def _encode(self) -> Callable[[str], Ids]:
        """The tokens of a question, or of a unit of a text; each is encoded once."""
        return cache(self.tokenizer.encode)

    @cached_property
    def _tokenized(self) -> Callable[[str], TokenizedText]:
        return cache(lambda text: tokenized(text, self._encode))

    def _text(self, row: int) -> TokenizedText:
        return self._tokenized(self.examples.rows[row].pair)

    @property
    def longest_question(self) -> int:
        """Tokens of a question that are read."""
        return min(QUESTION, self.reader.room(True) // 2)

    def questions_cut(self, most: int) -> int:
        """How many of the first `most` questions are longer."""
        rows = range(min(most, len(self.examples.rows)))
        return sum(len(self._encode(self.examples.rows[row].text)) > self.longest_question for row in rows)

    def _question(self, row: int) -> Ids:
        return self._encode(self.examples.rows[row].text)[: self.longest_question]

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
