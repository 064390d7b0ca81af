# SPDX-License-Identifier: Apache-2.0
"""How each kind of model reads a pattern (pet.py) with words in the place of the label: the arrays of its samples, in which
`loss_mask` is 1 where a word of the label is to be found. Where labels are compared with each other alone (--pet-loss
labels), a sample is the same for all of them, and says where the first token is to be found, and what tokens all have.

- A model that looks back alone reads the sentence and finds tokens behind those before them: the label, or all from it on.
- A BERT reads [CLS] sentence [SEP] with a [MASK] for each token of the label, and finds them all at once.
- An encoder-decoder reads the sentence with the first sentinel in the place of the label; its decoder reads [BOS], the
  sentinel and the label, and finds each token of the label behind those before it.

Legend: s tokens of a sample, t of what a decoder reads.
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
from megatron.tasks.samples import sample_arrays
from megatron.tasks.texts import TOKENS, SampleReader

GAP = "gap"  # of a sample: the place at which the first token of a label is to be found
CHOICES = "choices"  # of a sample: the tokens of all labels, each as its number + 1; 0: a label has no further one

Parts = Sequence[tuple[str, list[int]]]  # ("text", ids), ("label", ids), ("", ids of words between them) ...
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Cloze(SampleReader):
    """Sentences with words in the place of the label. label_tokens: of a label, that are found without one another;
    gap: the texts on both sides of the label are read before it is found.
    """

    label_tokens = 1
    gap = True

    @classmethod
    def choice_arrays(cls, config: Config, vocab_size: int, task: Task, soft: bool) -> dict[str, SampleArray]:
        """What a sample of which a label is chosen consists of. soft: labels are probabilities."""
        text = cls.arrays(config, vocab_size)
        del text[LABELS]
        places = text.pop(LOSS_MASK).length
        choices = SampleArray(len(task.labels) * cls.label_tokens, below=vocab_size + 1)
        return sample_arrays(task, {**text, GAP: SampleArray(0, below=places), CHOICES: choices}, soft=soft)

    def read(self, pattern, example, label: str, encode, reserve: int) -> Arrays:
        """The sample of a sentence with a label. pattern: `pet.Pattern`; reserve: tokens that any label may have."""
        raise NotImplementedError

    def made_up(self, draw: np.random.Generator, vocab_size: int) -> Arrays:
        """A sample of random tokens (--mock-data)."""
        raise NotImplementedError

    def check(self, longest: int) -> None:
        """Raise DataError where there is no room for a label of so many tokens."""


@dataclass(frozen=True)
class CausalCloze(Cloze):
    """end: of a document, before the sentence."""

    end: Optional[int] = None

    gap = False

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "CausalCloze":
        return cls(config.model.seq_length, None if tokenizer is None else tokenizer.eod)

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
    """cls, sep, mask: ids of special tokens."""

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
        read, wanted, found = [self.cls], [0], [0.0]
        for name, ids in parts:
            gap = name == "label"
            read += [self.mask] * len(ids) if gap else ids
            wanted += ids if gap else [0] * len(ids)
            found += [float(gap)] * len(ids)
        read = np.array([*read, self.sep], np.int64)
        return {
            "text": padded(read, self.length),
            "types": np.zeros(self.length, np.int64),
            LABELS: padded(np.array(wanted, np.int64), self.length),
            LOSS_MASK: padded(np.array(found, np.float32), self.length),
            "padding_mask": padded(np.ones_like(read), self.length),
        }


@dataclass(frozen=True)
class T5Cloze(Cloze):
    """bos, sentinel: ids of special tokens; target: tokens that the decoder reads."""

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
                f"--pet-verbalizer: words of {longest} tokens, and the decoder finds {self.target - 1} behind its sentinel",
                do=f"--decoder-seq-length {longest + 1}",
            )

    def _named(self, parts: Parts) -> Arrays:
        read = np.array([one for name, ids in parts for one in ([self.sentinel] if name == "label" else ids)], np.int64)
        [words] = [ids for name, ids in parts if name == "label"]
        written = np.array([self.sentinel, *words], np.int64)
        before = np.array([self.bos, *written[:-1]], np.int64)
        found = np.array([0.0] + [1.0] * len(words), np.float32)
        return {
            "text_enc": padded(read, self.length),
            "text_dec": padded(before, self.target),
            LABELS: padded(written, self.target),
            LOSS_MASK: padded(found, self.target),
            "enc_mask": padded(np.ones_like(read), self.length),
            "dec_mask": padded(np.ones_like(before), self.target),
        }


def with_gap(arrays: Arrays, choices: np.ndarray) -> Arrays:
    """A sample with some label as one of which a label is chosen: `Cloze.choice_arrays`, but for what is to be found."""
    place = int(np.argmax(arrays[LOSS_MASK]))
    text = {name: array for name, array in arrays.items() if name not in (LABELS, LOSS_MASK)}
    return {**text, GAP: place, CHOICES: choices}


def random_parts(draw: np.random.Generator, vocab_size: int, most: int, label: int = 2) -> Parts:
    """A sentence of up to `most` random tokens and a label behind it."""
    text = draw.integers(vocab_size, size=int(draw.integers(1, max(2, most)))).tolist()
    return [("text", text), ("label", draw.integers(vocab_size, size=max(1, label)).tolist())]
