# SPDX-License-Identifier: Apache-2.0
"""How each kind of model reads a text, or a pair of texts: the arrays of its samples, filled up behind the text.

Legend: s tokens of a sample, t of what a decoder reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megatron.data.bert_dataset import join_pair, padded
from megatron.data.masked_dataset import special_tokens
from megatron.data.t5_dataset import with_ends
from megatron.model.bert.settings import own_settings as bert_settings
from megatron.model.sample_arrays import SampleArray
from megatron.model.t5.facts import T5Facts
from megatron.settings.schema import Config

TOKENS, LENGTHS = "tokens", "lengths"  # of a sample: ids, filled up; how many of them are the text
HIDDEN = "hidden"  # of a sample: its ids with all words of the texts hidden (--word-dropout)

Ids = Sequence[int]
Arrays = dict[str, Any]


@dataclass(frozen=True)
class SampleReader:
    """Makes samples of texts for a kind of model. length: tokens of a sample, those of the text and the special ones."""

    length: int

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "SampleReader":
        """That of a run. Without a tokenizer, for samples that are made up, special tokens are. Raises SettingsError for a
        vocabulary that lacks them.
        """
        raise NotImplementedError

    @classmethod
    def arrays(cls, config: Config, vocab_size: int) -> dict[str, SampleArray]:
        """What a sample consists of. The first array is the one with the tokens."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextReader(SampleReader):
    """Texts, and pairs of them."""

    def room(self, pair: bool) -> int:
        """Tokens that a text may have, or both texts of a pair together."""
        raise NotImplementedError

    def read(self, text: Ids, pair: Optional[Ids]) -> Arrays:
        """The arrays of texts for which there is room."""
        raise NotImplementedError

    @classmethod
    def hidden_word(cls, tokenizer: Any) -> int:
        """The token that stands in the place of a word that the model shall not see: what hid words from it in pretraining,
        or the end of a document. Without tokenizer, for samples that are made up, 0.
        """
        if tokenizer is None:
            return 0
        found = [*cls._hides(tokenizer), tokenizer.eod, 0]
        return next(id for id in found if id is not None)

    @classmethod
    def _hides(cls, tokenizer: Any) -> Sequence[Optional[int]]:
        """What hides words in pretraining; None: the vocabulary has none."""
        return ()

    def read_hidden(self, text: Ids, pair: Optional[Ids], hidden: Optional[int]) -> Arrays:
        """The same, and what the model reads where all words are hidden by this token; None: that is not asked for."""
        arrays = self.read(text, pair)
        if hidden is None:
            return arrays
        words = self.read([hidden] * len(text), pair if pair is None else [hidden] * len(pair))
        return {**arrays, HIDDEN: next(iter(words.values()))}


@dataclass(frozen=True)
class CausalReader(TextReader):
    """The text, and where there is another one, the end of a document and that. At least one token."""

    end: int = 0

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "CausalReader":
        end = 0 if tokenizer is None or tokenizer.eod is None else tokenizer.eod
        return cls(config.model.seq_length, end)

    @classmethod
    def arrays(cls, config: Config, vocab_size: int) -> dict[str, SampleArray]:
        length = config.model.seq_length
        return {TOKENS: SampleArray(length, below=vocab_size), LENGTHS: SampleArray(0, below=length + 1)}

    def room(self, pair: bool) -> int:
        return self.length - pair

    def read(self, text: Ids, pair: Optional[Ids]) -> Arrays:
        ids = [*text] if pair is None else [*text, self.end, *pair]
        ids = ids or [self.end]
        return {TOKENS: _filled(ids, self.length), LENGTHS: len(ids)}


@dataclass(frozen=True)
class BertReader(TextReader):
    """[CLS] text [SEP], or [CLS] text [SEP] pair [SEP]. kinds: of tokens that have an embedding (--num-tokentypes)."""

    cls: int
    sep: int
    kinds: int = 2

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "BertReader":
        ids = special_tokens(tokenizer, vocab_size, ("cls", "sep"), False, tokenizer is None).ids
        return cls(config.model.seq_length, ids["cls"], ids["sep"], bert_settings(config).num_tokentypes)

    @classmethod
    def arrays(cls, config: Config, vocab_size: int) -> dict[str, SampleArray]:
        length, kinds = config.model.seq_length, bert_settings(config).num_tokentypes
        return {
            "text": SampleArray(length, below=vocab_size),
            "types": SampleArray(length, below=max(2, kinds)),
            "padding_mask": SampleArray(length, below=2),
        }

    def room(self, pair: bool) -> int:
        return self.length - 2 - pair

    def read(self, text: Ids, pair: Optional[Ids]) -> Arrays:
        ids, types = join_pair(np.array(text, np.int64), np.array(pair or [], np.int64), self.cls, self.sep)
        types = np.minimum(types, max(0, self.kinds - 1))
        filled = (padded(array, self.length) for array in (ids, types, np.ones_like(ids)))
        return dict(zip(("text", "types", "padding_mask"), filled))

    @classmethod
    def _hides(cls, tokenizer: Any) -> Sequence[Optional[int]]:
        return (tokenizer.special("mask"),)


@dataclass(frozen=True)
class T5Reader(TextReader):
    """The encoder reads: text [EOS], or text [EOS] pair [EOS]. The decoder reads [BOS], where the head looks; with a target
    of no tokens there is none.
    """

    bos: int
    eos: int
    target: int = 1

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "T5Reader":
        ids = special_tokens(tokenizer, vocab_size, ("bos", "eos"), False, tokenizer is None).ids
        return cls(config.model.seq_length, ids["bos"], ids["eos"], T5Facts.of(config, vocab_size).target)

    @classmethod
    def arrays(cls, config: Config, vocab_size: int) -> dict[str, SampleArray]:
        length, target = config.model.seq_length, T5Facts.of(config, vocab_size).target
        source = {"text_enc": SampleArray(length, below=vocab_size), "enc_mask": SampleArray(length, below=2)}
        if not target:
            return source
        return {**source, "text_dec": SampleArray(target, below=vocab_size), "dec_mask": SampleArray(target, below=2)}

    def room(self, pair: bool) -> int:
        return self.length - 1 - pair

    def read(self, text: Ids, pair: Optional[Ids]) -> Arrays:
        ids = with_ends(text, pair, self.eos)
        source = {"text_enc": _filled(ids, self.length), "enc_mask": _filled([1] * len(ids), self.length)}
        if not self.target:
            return source
        return {**source, "text_dec": _filled([self.bos], self.target), "dec_mask": _filled([1], self.target)}

    @classmethod
    def _hides(cls, tokenizer: Any) -> Sequence[Optional[int]]:
        return tokenizer.sentinels[:1]


def _filled(ids: Ids, length: int) -> np.ndarray:
    """[length] int64, with zeros behind."""
    return padded(np.array(ids, np.int64), length)
