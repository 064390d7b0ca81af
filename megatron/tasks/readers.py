# SPDX-License-Identifier: Apache-2.0
"""Convert a text, or a pair of texts, to the arrays of a sample for each kind of model, right-padded.

Legend: s tokens of a sample, t tokens of a decoder's input.
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

TOKENS, LENGTHS = "tokens", "lengths"  # arrays of a sample: padded ids; number of tokens of the text
HIDDEN = "hidden"  # array of a sample: its ids with all words hidden (--word-dropout)

Ids = Sequence[int]
Arrays = dict[str, Any]


@dataclass(frozen=True)
class SampleReader:
    """Makes samples for a kind of model. length: tokens of a sample, special tokens included."""

    length: int

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "SampleReader":
        """Create the reader of a run. Without a tokenizer (mock data), special tokens are chosen freely.

        Raises SettingsError for a vocabulary that lacks them.
        """
        raise NotImplementedError

    @classmethod
    def arrays(cls, config: Config, vocab_size: int) -> dict[str, SampleArray]:
        """The arrays of a sample. The first one has the tokens."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextReader(SampleReader):
    """Makes samples of texts and pairs of texts."""

    def room(self, pair: bool) -> int:
        """The most tokens of a text, or of both texts of a pair together."""
        raise NotImplementedError

    def read(self, text: Ids, pair: Optional[Ids]) -> Arrays:
        """The arrays of a text or pair that fits."""
        raise NotImplementedError

    def pair_place(self, tokens: int) -> int:
        """The row of the first token of a second text, after a first one of so many tokens."""
        raise NotImplementedError

    @classmethod
    def hidden_word(cls, tokenizer: Any) -> int:
        """The token that replaces a dropped word: the mask of pretraining, or the end of document; 0 without tokenizer
        (mock data).
        """
        if tokenizer is None:
            return 0
        candidates = [*cls._hides(tokenizer), tokenizer.eod, 0]
        return next(id for id in candidates if id is not None)

    @classmethod
    def _hides(cls, tokenizer: Any) -> Sequence[Optional[int]]:
        """The tokens that mask words in pretraining; None: not in the vocabulary."""
        return ()

    def read_hidden(self, text: Ids, pair: Optional[Ids], hidden: Optional[int]) -> Arrays:
        """`read`, and the input with all words replaced by `hidden`; None: without it."""
        arrays = self.read(text, pair)
        if hidden is None:
            return arrays
        words = self.read([hidden] * len(text), pair if pair is None else [hidden] * len(pair))
        return {**arrays, HIDDEN: next(iter(words.values()))}


@dataclass(frozen=True)
class CausalReader(TextReader):
    """Samples for causal models: the text, or the text, an end of document and the second text. At least one token.

    prefix: what the tokenizer puts before a prompt
    """

    end: int = 0
    prefix: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "CausalReader":
        end = 0 if tokenizer is None or tokenizer.eod is None else tokenizer.eod
        return cls(config.model.seq_length, end, () if tokenizer is None else tuple(tokenizer.prefix))

    @classmethod
    def arrays(cls, config: Config, vocab_size: int) -> dict[str, SampleArray]:
        length = config.model.seq_length
        return {TOKENS: SampleArray(length, below=vocab_size), LENGTHS: SampleArray(0, below=length + 1)}

    def room(self, pair: bool) -> int:
        return self.length - len(self.prefix) - pair

    def read(self, text: Ids, pair: Optional[Ids]) -> Arrays:
        ids = [*self.prefix, *text] if pair is None else [*self.prefix, *text, self.end, *pair]
        ids = ids or [self.end]
        return {TOKENS: _filled(ids, self.length), LENGTHS: len(ids)}

    def pair_place(self, tokens: int) -> int:
        return len(self.prefix) + tokens + 1


@dataclass(frozen=True)
class BertReader(TextReader):
    """Samples for BERT: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP]. kinds: number of token types."""

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

    def pair_place(self, tokens: int) -> int:
        return tokens + 2

    @classmethod
    def _hides(cls, tokenizer: Any) -> Sequence[Optional[int]]:
        return (tokenizer.special("mask"),)


@dataclass(frozen=True)
class T5Reader(TextReader):
    """Samples for T5. The encoder reads text [EOS], or text [EOS] pair [EOS]. The decoder reads [BOS], the head's input;
    target 0: there is no decoder.
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
    """Ids padded with zeros, int64 [length]."""
    return padded(np.array(ids, np.int64), length)
