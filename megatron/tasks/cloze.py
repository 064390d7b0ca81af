# SPDX-License-Identifier: Apache-2.0
"""Samples of patterns (pet.py) for each kind of model: the label is replaced by its words.

`loss_mask` is 1 where a token of the label is predicted. If labels are only compared with each other (--pet-loss labels),
all labels share a sample, which has the position of the first predicted token and the tokens of all labels.

- A causal model reads the sentence and predicts the label, or all text from the label on.
- A BERT reads [CLS] sentence [SEP] with a [MASK] for each token of the label, and predicts all of them together.
- An encoder-decoder reads the sentence with the first sentinel in place of the label; its decoder reads [BOS], the
  sentinel and the label, and predicts the tokens of the label one after another.

Legend: s tokens of a sample, t tokens of a decoder's input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megatron.data.bert_dataset import padded
from megatron.data.masked_dataset import special_tokens
from megatron.data.requests import Scored, sample_of
from megatron.errors import DataError
from megatron.model.bert.settings import own_settings as bert_settings
from megatron.model.recipe import named_recipe
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.model.t5.facts import T5Facts
from megatron.settings.schema import Config
from megatron.tasks.description import Task
from megatron.tasks.readers import TOKENS, SampleReader
from megatron.tasks.samples import sample_arrays

GAP = "gap"  # array of a sample: the position of a label's first token
CHOICES = "choices"  # array of a sample: the tokens of all labels, as id + 1; 0: padding

Parts = Sequence[tuple[str, list[int]]]  # ("text", ids), ("label", ids), ("", ids of words between them) ...
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Cloze(SampleReader):
    """Makes samples of sentences with words in place of the label.

    label_tokens: most tokens of a label that are predicted independently; gap: the model sees text on both sides of it
    """

    label_tokens = 1
    gap = True

    @classmethod
    def choice_arrays(cls, config: Config, vocab_size: int, task: Task, soft: bool) -> dict[str, SampleArray]:
        """The arrays of a sample for choosing a label. soft: labels are probabilities."""
        text = cls.arrays(config, vocab_size)
        del text[LABELS]
        places = text.pop(LOSS_MASK).length
        choices = SampleArray(len(task.labels) * cls.label_tokens, below=vocab_size + 1)
        return sample_arrays(task, {**text, GAP: SampleArray(0, below=places), CHOICES: choices}, soft=soft)

    def read(self, pattern, example, label: str, encode, reserve: int) -> Arrays:
        """The sample of a sentence with a label. pattern: `pet.Pattern`; reserve: tokens to reserve for any label."""
        raise NotImplementedError

    def made_up(self, draw: np.random.Generator, vocab_size: int) -> Arrays:
        """A sample of random tokens (--mock-data)."""
        raise NotImplementedError

    def check(self, longest: int) -> None:
        """Raise DataError if there is no room for a label of `longest` tokens."""


@dataclass(frozen=True)
class CausalCloze(Cloze):
    """Samples for causal models. end: the token before the sentence: the tokenizer's beginning, or the end of document."""

    end: Optional[int] = None

    gap = False

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "CausalCloze":
        return cls(config.model.seq_length, None if tokenizer is None else tokenizer.begin)

    @classmethod
    def arrays(cls, config: Config, vocab_size: int) -> dict[str, SampleArray]:
        ids = SampleArray(config.model.seq_length, below=vocab_size)
        return {TOKENS: ids, LABELS: ids, LOSS_MASK: SampleArray(config.model.seq_length, mask=True)}

    def read(self, pattern, example, label: str, encode, reserve: int) -> Arrays:
        return self._named(pattern.filled(example, label, encode, self.end, self.length + 1, reserve))

    def made_up(self, draw: np.random.Generator, vocab_size: int) -> Arrays:
        ids = draw.integers(vocab_size, size=self.length + 1).tolist()
        return self._named(Scored(ids, int(draw.integers(1, len(ids)))))

    def _named(self, scored: Scored) -> Arrays:
        ids, mask = sample_of(scored, self.length, self.end or 0)
        return {TOKENS: ids[:-1], LABELS: ids[1:], LOSS_MASK: mask[1:]}


@dataclass(frozen=True)
class BertCloze(Cloze):
    """Samples for BERT. cls, sep, mask: ids of special tokens."""

    cls: int
    sep: int
    mask: int

    label_tokens = 8

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "BertCloze":
        ids = special_tokens(tokenizer, vocab_size, ("cls", "sep", "mask"), False, tokenizer is None).ids
        return cls(config.model.seq_length, ids["cls"], ids["sep"], ids["mask"])

    @classmethod
    def arrays(cls, config: Config, vocab_size: int) -> dict[str, SampleArray]:
        length, kinds = config.model.seq_length, bert_settings(config).num_tokentypes
        return {
            "text": SampleArray(length, below=vocab_size),
            "types": SampleArray(length, below=max(2, kinds)),
            LABELS: SampleArray(length, below=vocab_size),
            LOSS_MASK: SampleArray(length, mask=True),
            "padding_mask": SampleArray(length, below=2),
        }

    def read(self, pattern, example, label: str, encode, reserve: int) -> Arrays:
        return self._named(pattern.parts(example, label, encode, self.length - 2, reserve))

    def made_up(self, draw: np.random.Generator, vocab_size: int) -> Arrays:
        return self._named(random_parts(draw, vocab_size, self.length - 4))

    def _named(self, parts: Parts) -> Arrays:
        read, wanted, counts = [self.cls], [0], [0.0]
        for name, ids in parts:
            gap = name == "label"
            read += [self.mask] * len(ids) if gap else ids
            wanted += ids if gap else [0] * len(ids)
            counts += [float(gap)] * len(ids)
        read = np.array([*read, self.sep], np.int64)
        return {
            "text": padded(read, self.length),
            "types": np.zeros(self.length, np.int64),
            LABELS: padded(np.array(wanted, np.int64), self.length),
            LOSS_MASK: padded(np.array(counts, np.float32), self.length),
            "padding_mask": padded(np.ones_like(read), self.length),
        }


@dataclass(frozen=True)
class T5Cloze(Cloze):
    """Samples for T5. bos, sentinel: ids of special tokens; target: length of the decoder's input."""

    bos: int
    sentinel: int
    target: int

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "T5Cloze":
        special = special_tokens(tokenizer, vocab_size, ("bos",), True, tokenizer is None)
        target = T5Facts.of(config, vocab_size).target
        return cls(config.model.seq_length, special.ids["bos"], special.sentinels[0], target)

    @classmethod
    def arrays(cls, config: Config, vocab_size: int) -> dict[str, SampleArray]:
        return named_recipe("T5").arrays(config, vocab_size)

    def read(self, pattern, example, label: str, encode, reserve: int) -> Arrays:
        return self._named(pattern.parts(example, label, encode, self.length, reserve))

    def made_up(self, draw: np.random.Generator, vocab_size: int) -> Arrays:
        return self._named(random_parts(draw, vocab_size, self.length - 2, min(2, self.target - 1)))

    def check(self, longest: int) -> None:
        if longest + 1 > self.target:
            raise DataError(
                f"--pet-verbalizer: words of {longest} tokens, and the decoder has room for {self.target - 1}",
                do=f"--decoder-seq-length {longest + 1}",
            )

    def _named(self, parts: Parts) -> Arrays:
        read = np.array([one for name, ids in parts for one in ([self.sentinel] if name == "label" else ids)], np.int64)
        [words] = [ids for name, ids in parts if name == "label"]
        written = np.array([self.sentinel, *words], np.int64)
        before = np.array([self.bos, *written[:-1]], np.int64)
        counts = np.array([0.0] + [1.0] * len(words), np.float32)
        return {
            "text_enc": padded(read, self.length),
            "text_dec": padded(before, self.target),
            LABELS: padded(written, self.target),
            LOSS_MASK: padded(counts, self.target),
            "enc_mask": padded(np.ones_like(read), self.length),
            "dec_mask": padded(np.ones_like(before), self.target),
        }


def with_gap(arrays: Arrays, choices: np.ndarray) -> Arrays:
    """Convert a sample with any label to one for choosing a label: `Cloze.choice_arrays`, without the target."""
    place = int(np.argmax(arrays[LOSS_MASK]))
    text = {name: array for name, array in arrays.items() if name not in (LABELS, LOSS_MASK)}
    return {**text, GAP: place, CHOICES: choices}


def random_parts(draw: np.random.Generator, vocab_size: int, most: int, label: int = 2) -> Parts:
    """A sentence of up to `most` random tokens, followed by a label."""
    text = draw.integers(vocab_size, size=int(draw.integers(1, max(2, most)))).tolist()
    return [("text", text), ("label", draw.integers(vocab_size, size=max(1, label)).tolist())]
