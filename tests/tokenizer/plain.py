# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that is made of two functions."""

import numpy as np

from megatron.tokenizer.base import Tokenizer


class PlainTokenizer(Tokenizer):
    """encode: text -> ids; decode: ids -> text."""

    def __init__(self, encode, decode=lambda ids: "".join(map(chr, ids)), eod=None, vocab_size=1 << 16, **more):
        engines = dict(plain=lambda: lambda text: np.array(encode(text), np.int64))
        super().__init__("plain", vocab_size, eod, "plain", engines, decode, **(dict(special_tokens={}) | more))


def letters(text: str) -> list[int]:
    """An id for each letter."""
    return [ord(letter) for letter in text]
