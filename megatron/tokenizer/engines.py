# SPDX-License-Identifier: Apache-2.0
"""Libraries that turn text into ids, each as a function `text -> ids`. They are imported when one is built."""

import array
import os
import re
from collections.abc import Callable, Iterator

import numpy as np

from megatron.errors import DataError
from megatron.tokenizer.base import Encode

# How published vocabularies split text before byte-pair merging. Alternatives without look-ahead stand in one group,
# which the matcher then runs as a plain automaton: twice the speed of the published spelling, with equal matches. The
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
    """Hugging Face `tokenizers`. One thread: our processes are the parallelism, and fork must stay safe."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    model = Tokenizer.from_str(tokenizer_json)
    return lambda text: model.encode(text, add_special_tokens=False).ids


def gigatoken_engine(tokenizer_json: str, exact: Callable[[], Encode], may_cut: bool = False) -> Encode:
    """gigatoken, from the same description. Its `encode` never starts threads and its result is an array."""
    from gigatoken import Tokenizer

    return guarded(Tokenizer.from_json(tokenizer_json).encode, exact, may_cut)


def gigatoken_ranks_engine(path: str, pattern: str, exact: Callable[[], Encode], may_cut: bool = False) -> Encode:
    """gigatoken from a .tiktoken file; `pattern` is one of its names for ways to split."""
    from gigatoken import Tokenizer

    return guarded(Tokenizer.from_tiktoken(path, pretokenizer=pattern).encode, exact, may_cut)


def guarded(fast: Encode, exact: Callable[[], Encode], may_cut: bool = False) -> Encode:
    """`fast`, except for texts with letters of Unicode 17 and those it gives up on: they go to `exact()`.

    may_cut: texts may be cut as `pieces` does it, so that only the pieces with such letters go there.

    gigatoken 0.10 knows Unicode 17; tiktoken and `tokenizers`, which define the ids, do not take its new characters
    for letters and split the text elsewhere. All other code points were compared, one by one: they agree.
    """
    slow: list[Encode] = []

    def encode(text: str):
        if text.isascii() or not has_unicode_17(text):
            try:
                return fast(text)
            except BaseException as error:
                if not is_panic(error):
                    raise
        elif may_cut and len(parts := list(pieces(text, FEW))) > 1:
            return np.concatenate([np.asarray(encode(part), np.uint32) for part in parts])
        if not slow:
            slow.append(exact())
        return slow[0](text)

    return encode


PIECE, FEW = 1 << 16, 1 << 10  # characters: of a long text, and around a letter that only the reference knows
BOUNDARY = re.compile(r"\S(?= )")


def in_pieces(encode: Encode, size: int = PIECE) -> Encode:
    """The same ids, a piece of a long text at a time: one library takes 14 GB for a document of 100 MB as a whole.

    Only for the patterns above: none of them joins a space to what stands before it, so that a text may be cut between
    the two.
    """

    def encode_long(text: str):
        if len(text) <= size:
            return encode(text)
        return np.concatenate([np.asarray(encode(piece), np.uint32) for piece in pieces(text, size)])

    return encode_long


def pieces(text: str, size: int) -> Iterator[str]:
    """A text in pieces of at least `size` characters, cut before a space that follows something else."""
    start = 0
    while len(text) - start > size and (match := BOUNDARY.search(text, start + size - 1)):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up. The class is a BaseException that can be imported from nowhere."""
    return type(error).__name__ == "PanicException"


def has_unicode_17(text: str) -> bool:
    """Whether a text has a character that Unicode 17 added (370 MB/s and more, where a regular expression does 70)."""
    for character in UNICODE_17_LOW:
        if character in text:
            return True
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    points = points[points > 0xFFFF]
    starts, ends = UNICODE_17_HIGH
    return bool((np.searchsorted(starts, points, "right") > np.searchsorted(ends, points, "left")).any())


UNICODE_17_LOW = "\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1"
UNICODE_17_HIGH = np.array(  # first and last code point of each range; some have gaps, which does no harm
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
    """tiktoken from ranks (bytes -> merge priority). `ids[rank]` is the id where priorities are not the ids.

    Its matcher gives up on millions of spaces in a row: such a text goes to `exact()`, or raises DataError.
    """
    import tiktoken

    encode_list = tiktoken.Encoding("local", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode_ordinary

    def encode(text: str) -> np.ndarray:
        try:
            found = encode_list(text)
        except BaseException as error:
            if not is_panic(error):
                raise
            if exact is None:
                raise DataError("tiktoken gives up on this text", "a run of white space is too long for it") from None
            return np.array(exact()(text), np.uint32)
        # By way of `array`, three times as fast as numpy on a list, and as encode_to_numpy's search for special tokens.
        array_of_ranks = np.frombuffer(array.array("I", found), np.uint32) if found else np.empty(0, np.uint32)
        return array_of_ranks if ids is None else ids[array_of_ranks]

    return encode
