# SPDX-License-Identifier: Apache-2.0
"""Tokenizer libraries, each as a function `text -> ids`, imported on demand."""

import array
import os
import re
from collections.abc import Callable, Iterator

import numpy as np

from megatron.errors import DataError
from megatron.tokenizer.base import Encode

# Patterns of published vocabularies that split text before byte-pair merging. Alternatives without look-ahead are in one
# group, which the matcher runs as a plain automaton: equal matches at twice the speed of the published spelling. The
# possessive `++` keeps it from trying every length of a run of white space at the end of a text.
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    "gpt2": r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s++$|\s+(?!\S)|\s",
    "cl100k": r"(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": rf"(?:{_WORD[0]}{_ENDING}|{_WORD[1]}{_ENDING}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+)"
    r"|\s++$|\s+(?!\S)|\s",
    "v1": r"(?:[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n])|\s++$|\s+(?!\S)|\s",
    "v2": rf"(?:{_WORD[0]}|{_WORD[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+)|\s++$|\s+(?!\S)|\s",
}


def tokenizers_engine(tokenizer_json: str) -> Encode:
    """Hugging Face `tokenizers`, single-threaded: the workers are processes, and fork must stay safe."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    model = Tokenizer.from_str(tokenizer_json)
    return lambda text: model.encode(text, add_special_tokens=False).ids


def gigatoken_engine(tokenizer_json: str, exact: Callable[[], Encode], may_cut: bool = False) -> Encode:
    """gigatoken from a tokenizer.json. Its `encode` starts no threads and returns an array."""
    from gigatoken import Tokenizer

    return guarded(Tokenizer.from_json(tokenizer_json).encode, exact, may_cut)


def gigatoken_ranks_engine(path: str, pattern: str, exact: Callable[[], Encode], may_cut: bool = False) -> Encode:
    """gigatoken from a .tiktoken file; `pattern`: gigatoken's name of the splitting pattern."""
    from gigatoken import Tokenizer

    return guarded(Tokenizer.from_tiktoken(path, pretokenizer=pattern).encode, exact, may_cut)


def guarded(fast: Encode, exact: Callable[[], Encode], may_cut: bool = False) -> Encode:
    """`fast` with a fallback to `exact()`, for texts with letters of Unicode 17 and texts that it fails on.

    may_cut: texts may be cut by `pieces`, so that only pieces with such letters use the fallback.

    gigatoken 0.10 knows Unicode 17. tiktoken and `tokenizers`, which define the ids, do not treat its new characters as
    letters and split the text differently. All other code points were compared one by one and agree.
    """
    slow: list[Encode] = []

    def encode(text: str):
        try:
            ids = fast(text)  # first: Python keeps the UTF-8 that a library asks for, and has_unicode_17 reads it
            if text.isascii() or not has_unicode_17(text):
                return ids
            if may_cut and len(parts := list(pieces(text, FEW))) > 1:
                return np.concatenate([np.asarray(encode(part), np.uint32) for part in parts])
        except BaseException as error:
            if not is_panic(error):
                raise
        if not slow:
            slow.append(exact())
        return slow[0](text)

    return encode


PIECE, FEW = 1 << 16, 1 << 10  # characters: of pieces of a long text, and around a letter for the fallback
BOUNDARY = re.compile(r"\S(?= )")


def in_pieces(encode: Encode, size: int = PIECE) -> Encode:
    """Encode long texts in pieces, with the same ids. One library needs 14 GB for a whole document of 100 MB.

    Only for the patterns above: none of them joins a space to the character before it, so that a text may be cut there.
    """

    def encode_long(text: str):
        if len(text) <= size:
            return encode(text)
        return np.concatenate([np.asarray(encode(piece), np.uint32) for piece in pieces(text, size)])

    return encode_long


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut a text into pieces of at least `size` characters, before a space that follows another character."""
    start = 0
    while len(text) - start > size and (match := BOUNDARY.search(text, start + size - 1)):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic of a Rust library. Its class, a BaseException, cannot be imported."""
    return type(error).__name__ == "PanicException"


def has_unicode_17(text: str) -> bool:
    """Whether a text has a character added by Unicode 17.

    Searches for single bytes are fastest, so characters are compared only if the first byte of one of these is there:
    2.7 GB/s for English text, 560 MB/s for emoji (a regular expression: 70).
    """
    data = text.encode("utf-8", "surrogatepass")
    if (b"\xe0" in data or b"\xea" in data) and any(character in text for character in UNICODE_17_LOW):
        return True
    if b"\xf0" not in data:
        return False
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    points = points[points > 0xFFFF]
    starts, ends = UNICODE_17_HIGH
    return bool((np.searchsorted(starts, points, "right") > np.searchsorted(ends, points, "left")).any())


UNICODE_17_LOW = "\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1"
UNICODE_17_HIGH = np.array(  # first and last code point of each range; gaps in some are harmless
    [
        (0x10940, 0x10959),
        (0x10EC5, 0x10EC7),
        (0x11DB0, 0x11DE9),
        (0x16EA0, 0x16ED3),
        (0x16FF2, 0x16FF6),
        (0x187F8, 0x187FF),
        (0x18D09, 0x18DF2),
        (0x1E6C0, 0x1E6FF),
        (0x2B73A, 0x2B73F),
        (0x2CEA2, 0x2CEAD),
        (0x323B0, 0x33479),
    ]
).T


def tiktoken_engine(
    ranks: dict[bytes, int], pattern: str, ids: np.ndarray | None = None, exact: Callable[[], Encode] | None = None
) -> Encode:
    """tiktoken from ranks (bytes -> merge priority). `ids[rank]` is the id if ranks are not the ids.

    Its matcher fails on millions of spaces in a row: such a text is encoded by `exact()`, or raises DataError.
    """
    import tiktoken

    encode_list = tiktoken.Encoding("local", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode_ordinary

    def encode(text: str) -> np.ndarray:
        try:
            own_ranks = encode_list(text)
        except BaseException as error:
            if not is_panic(error):
                raise
            if exact is None:
                raise DataError("tiktoken gives up on this text", "a run of white space is too long for it") from None
            return np.array(exact()(text), np.uint32)
        # `array` is three times as fast as numpy on a list, and as encode_to_numpy, which searches for special tokens.
        array_of_ranks = np.frombuffer(array.array("I", own_ranks), np.uint32) if own_ranks else np.empty(0, np.uint32)
        return array_of_ranks if ids is None else ids[array_of_ranks]

    return encode
