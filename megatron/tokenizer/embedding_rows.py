# SPDX-License-Identifier: Apache-2.0
"""The rows of an embedding, and the tokens of a tokenizer that they belong to.

An embedding may have more rows than there are tokens (Qwen's, and every padded one), or fewer: Llama 2's tokenizers on the
hub have one more, for padding.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

import numpy as np

from megatron.errors import DataError, SettingsError
from megatron.settings.from_checkpoint import FILES
from megatron.settings.presets import published_rows
from megatron.settings.schema import Config, TokenizerSettings
from megatron.tokenizer.base import Tokenizer

NAMED = 4  # tokens that a message names


def has_learned(record: Mapping[str, Any], tokenizer: Tokenizer) -> Optional[bool]:
    """Whether the model of a checkpoint has learned this vocabulary. record: its state.json. None: that is not recorded."""
    learned = record.get("vocabulary")
    return None if learned is None else learned in (tokenizer.fingerprint, *tokenizer.superseded)


def is_own(record: Mapping[str, Any], tokenizer: Tokenizer, extra_ids: int, given: bool) -> bool:
    """Whether a tokenizer is that of a checkpoint, whatever number of tokens it has.

    extra_ids: its --vocab-extra-ids, which no fingerprint has; given: whether a user named its files
    """
    own, saved = has_learned(record, tokenizer), record["config"].get("tokenizer") or {}
    own = bool(record.get("origin")) and not given if own is None else own  # an import of an earlier version
    return own and (saved.get("vocab_extra_ids") or 0) == extra_ids


def rows_of_model(config: Config, tokenizer: Tokenizer, record: Optional[Mapping[str, Any]]) -> Optional[int]:
    """The rows of the embedding in a checkpoint that a run begins with; None if this is not its tokenizer."""
    if record is None or tokenizer.name == "NullTokenizer":
        return None
    given = any(map(config.given, ("tokenizer_type", *FILES)))
    return record.get("vocab_size") if is_own(record, tokenizer, config.tokenizer.vocab_extra_ids, given) else None


def rows_of(
    settings: TokenizerSettings, vocab_size: int, of_model: Optional[int] = None, shape: Optional[str] = None
) -> tuple[int, str]:
    """(rows of the embedding before padding, a note on rows of no token or ""), for a tokenizer of this size.

    of_model: rows of the model that a run begins with, if this is its tokenizer: they are the run's
    shape: the name of a published model. Its embedding has as many rows as published, if the difference may be padding;
    else it has the tokenizer's. The note says if they differ.
    Raises SettingsError if --vocab-size has no room for all tokens, and such a model neither.

    >>> rows_of(TokenizerSettings(vocab_size=50257), 8192)[1]
    '--vocab-size 50257 is larger than the vocabulary: 42065 rows of the embedding belong to none of its 8192 tokens'
    >>> rows_of(TokenizerSettings(vocab_size=51200), 50257)  # the difference may be padding
    (51200, '')
    >>> rows_of(TokenizerSettings(), 151669, of_model=151936)[0], rows_of(TokenizerSettings(), 32001, of_model=32000)[0]
    (151936, 32000)
    >>> rows_of(TokenizerSettings(), 151665, shape="qwen2.5-7b")
    (152064, 'the tokenizer has 151665 tokens, and the embedding has the 152064 rows of qwen2.5-7b')
    """
    asked, published = settings.vocab_size or of_model, published_rows(shape)
    if published and not asked and published != vocab_size:
        return _rows_beside(published, vocab_size, shape)
    if asked and asked < vocab_size and asked != of_model and settings.tokenizer_type != "NullTokenizer":
        raise SettingsError(
            f"--vocab-size {asked} is smaller than the tokenizer's {vocab_size}",
            do="leave --vocab-size out, or give at least the tokenizer's size",
        )
    note = ""
    if settings.vocab_size and not _may_be_padded(vocab_size, settings.vocab_size):
        rows = f"{settings.vocab_size - vocab_size} rows of the embedding belong to none of its {vocab_size} tokens"
        note = f"--vocab-size {asked} is larger than the vocabulary: {rows}"
    return of_model if asked == of_model and of_model else max(asked or 0, vocab_size), note


def _may_be_padded(vocab_size: int, rows: int) -> bool:
    return rows - vocab_size < max(128, vocab_size // 16)


def _rows_beside(published: int, vocab_size: int, shape: Optional[str]) -> tuple[int, str]:
    """`rows_of` a tokenizer that has not as many tokens as the published model has rows."""
    tokens = f"the tokenizer has {vocab_size} tokens"
    if vocab_size < published and _may_be_padded(vocab_size, published):
        return published, f"{tokens}, and the embedding has the {published} rows of {shape}"
    return vocab_size, f"{tokens}, and so has the embedding; that of {shape} has {published} rows (--vocab-size)"


def tokenless(tokenizer: Tokenizer, rows: int) -> str:
    """A note on a model that may write ids without a token; "" where the difference may be padding.

    rows: of its embedding, without padding
    """
    left = rows - tokenizer.vocab_size
    if _may_be_padded(tokenizer.vocab_size, rows):
        return ""
    return f"{left} of {rows} rows of the embedding have no token of this vocabulary; their ids print nothing"


def within(tokenizer: Tokenizer, rows: int) -> "Tokenizer | RowsTokenizer":
    """The tokenizer for a model with so many rows: a `RowsTokenizer` if it has more tokens."""
    return RowsTokenizer(tokenizer, rows) if tokenizer.vocab_size > rows else tokenizer


class RowsTokenizer:
    """A tokenizer with more tokens than the model's embedding has rows. A text with a token without a row is a DataError.

    whole: the tokenizer, which has all else. vocab_size: the rows
    """

    def __init__(self, whole: Tokenizer, rows: int):
        self.whole, self.vocab_size = whole, rows

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # of a copy, which has nothing yet
            raise AttributeError(name)
        found = getattr(self.whole, name)
        return self._checked(found) if "encode" in name else found

    @property
    def eod(self) -> Optional[int]:
        """The end of document, unless it has no row: no model writes it then."""
        return self.whole.eod if self.whole.eod is not None and self.whole.eod < self.vocab_size else None

    @property
    def named(self) -> str:
        """The tokens without a row."""
        ids = range(self.vocab_size, self.whole.vocab_size)
        return ", ".join(f"{self.whole.decode([id])} ({id})" for id in ids[:NAMED]) + ", ..." * (len(ids) > NAMED)

    @property
    def note(self) -> str:
        """What that means for a user."""
        return (
            f"the embedding has {self.vocab_size} rows, and none for {self.named}: such a token in a text is an error"
        )

    def refuse(self, ids: Iterable[int], where: str = "the text") -> None:
        """Raise DataError for an id without a row, with the name of its token."""
        wrong = next((int(id) for id in ids if self.vocab_size <= id < self.whole.vocab_size), None)
        if wrong is not None:
            raise DataError(
                f"{where} holds {self.whole.decode([wrong])} (token {wrong}), for which the model has no row",
                f"its embedding has {self.vocab_size} rows, and the tokenizer {self.whole.vocab_size} tokens",
                "leave the token out",
            )

    def inner(self) -> np.ndarray:
        """See `Tokenizer.inner`."""
        return self.whole.inner()[: self.vocab_size]

    def _checked(self, encode: Callable) -> Callable:
        """A function that gives ids, alone or before others of its results."""

        def checked(*texts: Any) -> Any:
            found = encode(*texts)
            self.refuse(found[0] if isinstance(found, tuple) else found)
            return found

        return checked
