# SPDX-License-Identifier: Apache-2.0
"""Pattern-exploiting training (arXiv:2001.07676): a task as text.

A pattern is a sentence with a placeholder for the label. The verbalizer maps labels to words. The prediction is the label
with the likeliest words.

A causal model scores the words of the label after the text. If some text follows the label, it scores everything from the
label on. A bidirectional model predicts the words in a gap (cloze.py). The score of several tokens is the sum of their
log-probabilities.

--pet-loss labels, as in the paper, is cross-entropy over the scores of labels: each example is read once, and all labels
must have the same number of tokens. --pet-loss words is cross-entropy over the vocabulary: labels may have any number of
tokens, and an evaluation reads each example with each label.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

import numpy as np
import torch

from megatron.data.labelled import pair_lengths
from megatron.data.requests import Scored
from megatron.data.tables import json_in, refuse_half_letters, text_of_file
from megatron.errors import DataError, UsageError, did_you_mean
from megatron.tasks.cloze import Cloze, with_gap
from megatron.tasks.description import Task
from megatron.tasks.evaluation import TaskMeasures
from megatron.tasks.examples import Examples, TaskExample
from megatron.tasks.samples import wanted
from megatron.tasks.settings import LM_LOSS, open_task

FIELDS = ("text", "pair", "label")


@dataclass(frozen=True)
class Pattern:
    """A pattern as pieces: ("text", ""), ("pair", ""), ("label", "") and ("", words between them).

    >>> Pattern.of("{text} It was {label}.").pieces
    (('text', ''), ('', ' It was '), ('label', ''), ('', '.'))
    """

    pieces: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, pattern: str, pairs: bool = False) -> "Pattern":
        """Parse a pattern. Raises UsageError for one without {label} or {text}. pairs: the task has two texts."""
        parts = re.split(r"\{(\w+)\}", pattern)
        pieces = [("", word) if number % 2 == 0 else (word, "") for number, word in enumerate(parts) if word]
        names = [name for name, _ in pieces if name]
        for name in names:
            if name not in FIELDS:
                raise UsageError(
                    f"--pet-pattern {pattern!r}: there is no {{{name}}}{did_you_mean(name, FIELDS)}",
                    do="{label}, {text}, and {pair} for the second text",
                )
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"--pet-pattern {pattern!r} has {{{twice}}} twice")
        if "label" not in names or not {"text", "pair"} & set(names):
            raise UsageError(f"--pet-pattern {pattern!r} needs {{label}} and {{text}}", do="'{text} It was {label}.'")
        if "pair" in names and not pairs:
            raise UsageError(f"--pet-pattern {pattern!r}: the task has no second text for {{pair}}")
        return cls(tuple(pieces))

    @cached_property
    def text_after_label(self) -> bool:
        """Whether some of the text follows the label."""
        names = [name for name, _ in self.pieces]
        return bool({"text", "pair"} & set(names[names.index("label") :]))

    def parts(
        self,
        example: TaskExample,
        label: str,
        encode,
        length: int,
        reserve: int = 0,
        front: Sequence[int] = (),
        whole: bool = True,
    ) -> list[tuple[str, list[int]]]:
        """The sentence as pieces of ids, at most `length` in total: `front`, then those of `pieces`.

        encode: text -> ids. reserve: tokens to reserve for the label, so that the text is truncated equally for all labels.
        whole: False leaves out words after the label if no text follows. A space before a piece becomes its first
        character, as in tokens.
        """
        ids: list[tuple[str, list[int]]] = [("", [*front])]
        space = ""
        for name, words in self.pieces:
            text = space + {"": words, "text": example.text, "pair": example.pair or "", "label": label}[name]
            space = " " if not name and text.endswith(" ") else ""
            ids.append((name, list(encode(text[: len(text) - len(space)]))))
            if name == "label" and not (whole or self.text_after_label):
                break
        texts = [piece for name, piece in ids if name in ("text", "pair")]
        others = [(name, piece) for name, piece in ids if name not in ("text", "pair")]
        around = sum(max(len(piece), reserve) if name == "label" else len(piece) for name, piece in others)
        room = length - around
        if room < len(texts):
            raise DataError(
                f"--pet-pattern: the words around the text are {around} tokens, and a sample has room for {length}",
                do="raise --seq-length, or shorten the pattern",
            )
        for piece, kept in zip(texts, [room] if len(texts) == 1 else pair_lengths(*map(len, texts), room)):
            del piece[kept:]
        return ids

    def filled(
        self, example: TaskExample, label: str, encode, eod: Optional[int], length: int, reserve: int = 0
    ) -> Scored:
        """The sentence for a causal model: at most `length` tokens, and the start of the scored ones."""
        ids = self.parts(example, label, encode, length, reserve, [] if eod is None else [eod], whole=False)
        start = sum(len(piece) for _, piece in ids[: [name for name, _ in ids].index("label")])
        return Scored([one for _, piece in ids for one in piece], start)

    def label_ids(self, label: str, encode) -> list[int]:
        """The tokens of a label within the pattern."""
        return dict(self.parts(TaskExample("", "", None, ""), label, encode, 1 << 20))["label"]


def read_verbalizer(path: str, task: Task) -> tuple[str, ...]:
    """Read the words of each label, in order. Raises DataError for missing or unknown labels, or duplicate words."""
    form = '{"0": "bad", "1": "good"}'
    text = text_of_file(path, f"--pet-verbalizer {path}")
    given = json_in(text, f"--pet-verbalizer {path}", f"a mapping of labels to words, as {form}")
    if not isinstance(given, Mapping) or not all(isinstance(words, str) and words.strip() for words in given.values()):
        raise DataError(f"--pet-verbalizer {path} is no mapping of labels to words", do=f"as {form}")
    for label in given:
        if label not in task.labels:
            raise DataError(
                f"--pet-verbalizer {path}: {task.name} has no label {label!r}{did_you_mean(label, task.labels)}",
                f"it has {', '.join(task.labels[:20])}",
            )
    if missing := [label for label in task.labels if label not in given]:
        raise DataError(f"--pet-verbalizer {path} says nothing of {', '.join(missing[:20])}", do=f"as {form}")
    words = tuple(given[label] for label in task.labels)
    for word in words:
        refuse_half_letters(word, f"--pet-verbalizer {path}")
    if twice := next((one for one in words if words.count(one) > 1), None):
        raise DataError(f"--pet-verbalizer {path}: {twice!r} stands for two labels")
    return words


@dataclass(frozen=True)
class PetSamples:
    """Training samples of --pet-loss words: the sentence with the words of the right label."""

    examples: Examples
    pattern: Pattern
    words: Sequence[str]
    encode: Callable[[str], Sequence[int]]
    cloze: Cloze
    reserve: int = 0

    def __len__(self) -> int:
        return len(self.examples.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        example = self.examples.rows[index]
        return self.cloze.read(self.pattern, example, self.words[int(example.label)], self.encode, self.reserve)


@dataclass(frozen=True)
class PetRequests(PetSamples):
    """Evaluation samples of --pet-loss words: each example with the words of each label. whole: evaluate all."""

    whole = True

    def __len__(self) -> int:
        return len(self.examples.rows) * len(self.words)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        example, label = divmod(index, len(self.words))
        return self.cloze.read(self.pattern, self.examples.rows[example], self.words[label], self.encode, self.reserve)


@dataclass(frozen=True)
class ChoiceSamples:
    """Samples of --pet-loss labels.

    choices: the tokens of all labels (`cloze.CHOICES`); soft: labels are probabilities; whole: evaluate all samples
    """

    examples: Examples
    task: Task
    pattern: Pattern
    word: str  # of any label: the sample is the same for all
    encode: Callable[[str], Sequence[int]]
    cloze: Cloze
    choices: np.ndarray
    reserve: int
    soft: bool = False
    whole: bool = False

    def __len__(self) -> int:
        return len(self.examples.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        example = self.examples.rows[index]
        filled = self.cloze.read(self.pattern, example, self.word, self.encode, self.reserve)
        return {**with_gap(filled, self.choices), **wanted(self.task, example.label, example.shares, self.soft)}


@dataclass(frozen=True)
class MockPatterns:
    """Mock samples (--mock-data). task: choose among its labels; None: predict words."""

    size: int
    cloze: Cloze
    vocab_size: int
    seed: int
    split: int
    task: Optional[Task] = None
    soft: bool = False

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng((self.seed, self.split, index))
        filled = self.cloze.made_up(draw, self.vocab_size)
        if self.task is None:
            return filled
        labels = len(self.task.labels)
        choices = choices_of([[label % self.vocab_size] for label in range(labels)], self.cloze.label_tokens)
        return {**with_gap(filled, choices), **wanted(self.task, draw.integers(labels), soft=self.soft)}


def choices_of(labels: Sequence[Sequence[int]], most: int) -> np.ndarray:
    """The tokens of labels as `cloze.CHOICES`: [labels x most]."""
    return np.array([one for ids in labels for one in [*(id + 1 for id in ids), *[0] * (most - len(ids))]], np.int64)


def pet_datasets(settings, examples: Mapping[str, Optional[Examples]], tokenizer, cloze: Cloze, log) -> tuple:
    """(train, valid, test) of a task with a pattern."""
    task = open_task(settings).task
    if task.regression:
        raise UsageError(f"--pet-pattern: {task.name} has numbers for labels, which no words stand for")
    if task.options:
        raise UsageError(
            f"--pet-pattern: {task.name} has options of each text's own, for which a verbalizer has no words"
        )
    pattern = Pattern.of(settings.pet_pattern, task.text_pair is not None)
    words, encode = read_verbalizer(settings.pet_verbalizer, task), tokenizer.encode
    labels = {word: pattern.label_ids(word, encode) for word in words}
    refuse_same_tokens(labels, settings.pet_verbalizer)
    reserve = max(map(len, labels.values()))
    cloze.check(reserve)
    more = dict(pattern=pattern, encode=encode, cloze=cloze, reserve=reserve)
    if settings.pet_loss == "labels":
        refuse_unequal(pattern, labels, cloze)
        more |= dict(task=task, word=words[0], choices=choices_of(list(labels.values()), cloze.label_tokens))
        more |= dict(soft=bool(settings.soft_labels))
        make = lambda split: ChoiceSamples(examples[split], **more, whole=split != "train")
    else:
        make = lambda split: (PetSamples if split == "train" else PetRequests)(examples[split], **more, words=words)
    if examples["train"] is not None:
        first = pattern.filled(examples["train"].rows[0], words[0], encode, None, cloze.length + 1)
        log(f" > the first example as text: {tokenizer.decode(first.ids)!r}")
    return tuple(examples[split] and make(split) for split in ("train", "valid", "test"))


def refuse_same_tokens(labels: Mapping[str, Sequence[int]], path: str) -> None:
    """Raise DataError if the words of two labels have the same tokens."""
    seen: dict[tuple[int, ...], str] = {}
    for word, ids in labels.items():
        if (other := seen.setdefault(tuple(ids), word)) != word:
            raise DataError(
                f"--pet-verbalizer {path}: {other!r} and {word!r} are the same tokens {[*ids]}",
                do="take words that the vocabulary has",
            )


def refuse_unequal(pattern: Pattern, labels: Mapping[str, Sequence[int]], cloze: Cloze) -> None:
    """Raise DataError if labels cannot be compared in a single forward pass of an example."""
    other = "--pet-loss words, which compares sentences with each label"
    if pattern.text_after_label and not cloze.gap:
        raise DataError(
            "--pet-loss labels: {label} stands before a text, which a causal model does not see there",
            do=f"put {{label}} after all texts, or give {other}",
        )
    (first, one), *others = labels.items()
    if unequal := next((word for word, ids in others if len(ids) != len(one)), None):
        raise DataError(
            f"--pet-loss labels: {first!r} and {unequal!r} have {len(one)} and {len(labels[unequal])} tokens",
            "an example is read once, with a gap for each token of a label",
            f"take words of equally many tokens, or give {other}",
        )
    if len(one) > cloze.label_tokens:
        raise DataError(
            f"--pet-loss labels: {first!r} has {len(one)} tokens, and this model predicts at most {cloze.label_tokens}",
            do=f"take words of fewer tokens, or give {other}",
        )


class PetMeasures(TaskMeasures):
    """The metrics of a task with a pattern, and the loss of the right labels' words.

    Values are for an example with a label: the log-probability of the words, and their number of tokens [b, 2].
    """

    of_choices = True

    def values(self, batch, outputs: torch.Tensor) -> torch.Tensor:
        losses = (outputs * batch.loss_mask).sum(0, dtype=torch.float64)
        return torch.stack((-losses, batch.loss_mask.sum(0, dtype=torch.float64)), 1)

    def figures(self, values: np.ndarray, dataset, split: str, final: bool, rank: int) -> dict[str, float]:
        if not isinstance(dataset, PetRequests):
            return {}  # mock data
        values = values.reshape(-1, self.classes, 2)
        rows = dataset.examples.rows
        known = [(place, int(row.label)) for place, row in enumerate(rows) if row.label is not None]
        results = {}
        if known:
            scores, tokens = values[tuple(np.array(known).T)].sum(0)
            results[LM_LOSS] = -scores / tokens
        return results | self.judged(values[..., 0], dataset.examples, split, final, rank)
