# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's length rule: drop documents with fewer than 128 tokens (`cleanup_dataset.py`).

Only short texts are tokenized: a text of 1,024 characters has enough tokens even with 8 characters per token.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Optional

from megatron.corpus.stage import Document, Verdict

CHARACTERS_A_TOKEN = 8  # an upper bound: on average they are 5 in English


class ShortDocuments:
    """Drops documents with fewer than `min_tokens` tokens.

    vocab_file, merge_file, tokenizer_type, tokenizer_model: the vocabulary, as in preprocessing. Without one, the pieces of
    a byte-level BPE's pretokenizer are counted: their number is at most that of tokens
    """

    def __init__(
        self,
        min_tokens: int = 128,
        vocab_file: Optional[str] = None,
        merge_file: Optional[str] = None,
        tokenizer_type: Optional[str] = None,
        tokenizer_model: Optional[str] = None,
    ):
        self.min_tokens = min_tokens
        files = (vocab_file, merge_file, tokenizer_type, tokenizer_model)
        self.count = _token_counter(*files) if any(files) else count_pieces

    def __call__(self, document: Document) -> Verdict:
        text = document["text"]
        figures = {"characters": len(text)}
        if len(text) >= CHARACTERS_A_TOKEN * self.min_tokens:
            return Verdict(document, "", figures)
        figures["tokens"] = tokens = self.count(text)
        return Verdict(None, "too_few_tokens", figures) if tokens < self.min_tokens else Verdict(document, "", figures)


# Contractions, words, numbers and signs with the space before them, and white space: the pattern of the first byte-level
# BPE in the syntax of `re` ([^\W\d_] are letters).
_PIECE = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def count_pieces(text: str) -> int:
    """Number of words, numbers, signs and runs of white space.

    >>> count_pieces("It's 3 o'clock.")
    7
    """
    return sum(1 for _ in _PIECE.finditer(text))


@cache
def _token_counter(
    vocab_file: Optional[str], merge_file: Optional[str], tokenizer_type: Optional[str], tokenizer_model: Optional[str]
) -> Callable[[str], int]:
    from megatron.settings.schema import TokenizerSettings
    from megatron.tokenizer import build_tokenizer

    settings = TokenizerSettings(
        tokenizer_type=tokenizer_type, vocab_file=vocab_file, merge_file=merge_file, tokenizer_model=tokenizer_model
    )
    encode = build_tokenizer(settings).encode
    return lambda text: len(encode(text))
