# SPDX-License-Identifier: Apache-2.0
"""Hashes of the words of texts and of n words in a row, without a loop over either.

A word is a run of letters, digits and underscores in small letters, as Megatron-LM's filter_ngrams has it; a Chinese
or Japanese character is a word by itself. Punctuation and white space do not count: "Don't stop!" and "DON T STOP" are
the same three words.

The hash of a word is a polynomial in its characters, that of an n-gram one in its words, both mod 2^64. Running sums give
any of them by one subtraction; multiplying by an inverse power takes the position out. Two different n-grams share a hash
with a chance of about 2^-64.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

OF_CHARACTERS, OF_WORDS = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95  # bases: odd, so that they have an inverse
CHUNK = 1 << 18  # characters that are looked at together: their arrays stay in the cache
KNOWN = 0x40000  # code points with letters among them; those above are no words
SEPARATOR = "\n"


class WordSpans(NamedTuple):
    """Of each word: its hash uint64, and where it starts and ends (int64), in characters."""

    hashes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def words_of(text: str) -> WordSpans:
    """The words of a text.

    >>> words = words_of("Don't stop!  DON T stop")
    >>> words.starts.tolist(), words.ends.tolist()
    ([0, 4, 6, 13, 17, 19], [3, 5, 10, 16, 18, 23])
    >>> bool((words.hashes[:3] == words.hashes[3:]).all())
    True
    """
    found = list(_words_in_chunks(text))
    if len(found) == 1:
        return found[0]
    if not found:
        return WordSpans(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
    return WordSpans(*map(np.concatenate, zip(*found, strict=True)))


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """Hashes uint64 of all n-grams of some words, in their order; none where there are fewer than n words."""
    return next(iter(all_ngram_hashes(words, [n])))


def all_ngram_hashes(words: np.ndarray, lengths: Sequence[int]) -> Iterator[np.ndarray]:
    """`ngram_hashes` of each of these lengths."""
    forward, back = _powers(OF_WORDS, len(words) + 1)
    sums = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words * forward[: len(words)], out=sums[1:])
    for n in lengths:
        if len(words) < n:
            yield np.empty(0, np.uint64)
            continue
        hashes = sums[n:] - sums[:-n]
        hashes *= back[: len(hashes)]
        yield hashes  # the leading bits are those of all words; words were spread over all bits before


def spread(numbers: np.ndarray) -> np.ndarray:
    """Hashes uint64 of whole numbers, such as ids of tokens, that stand for words in `ngram_hashes`."""
    return _mixed(numbers.astype(np.uint64) + np.uint64(1))


def _words_in_chunks(text: str) -> Iterator[WordSpans]:
    if text.isascii():
        codes = np.frombuffer(text.encode("ascii"), np.uint8)
        kinds, values = _tables(128)
    else:
        codes = np.minimum(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32), KNOWN)
        kinds, values = _tables(KNOWN + 1)
    at = 0
    while at < len(codes):
        chunk = codes[at : at + CHUNK]
        kind = kinds[chunk]
        stop = len(codes)
        if at + len(chunk) < stop:  # cut between two words; a longer word is taken as a whole
            size = len(chunk)
            while kind.all() and at + size < stop:
                size *= 2
                chunk = codes[at : at + size]
                kind = kinds[chunk]
            stop = at + (len(chunk) if kind.all() else len(kind) - int(np.argmin(kind[::-1] != 0)))
            chunk, kind = chunk[: stop - at], kind[: stop - at]
        yield _words_of_chunk(kind, values[chunk], at)
        at = stop


def _words_of_chunk(kind: np.ndarray, values: np.ndarray, at: int) -> WordSpans:
    inside = kind != 0
    first, last = inside.copy(), inside.copy()
    if kind.max(initial=0) > 1:  # characters that are words
        part = kind == 1
        first[1:] &= ~(part[:-1] & part[1:])
        last[:-1] &= ~(part[:-1] & part[1:])
    else:
        first[1:] &= ~inside[:-1]
        last[:-1] &= ~inside[1:]
    starts, ends = np.flatnonzero(first), np.flatnonzero(last) + 1
    forward, back = _powers(OF_CHARACTERS, len(kind))
    sums = np.zeros(len(kind) + 1, np.uint64)
    values *= forward[: len(kind)]
    np.cumsum(values, out=sums[1:])
    hashes = _mixed((sums[ends] - sums[starts]) * back[starts])
    return WordSpans(hashes, starts + at, ends + at)


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Spread over all bits, in place: the low bits of a polynomial depend on the low bits of its terms alone."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(31)
    return hashes


def _powers(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(base^i, base^-i) for i below `count` or more, mod 2^64."""
    return _table_of_powers(base, max(CHUNK, 1 << (count - 1).bit_length() if count else 1))


@lru_cache(maxsize=4)
def _table_of_powers(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    tables = []
    for factor in (base, pow(base, -1, 1 << 64)):
        table = np.full(count, factor, np.uint64)
        table[0] = 1
        tables.append(np.multiply.accumulate(table))
    return tables[0], tables[1]


@lru_cache(maxsize=2)
def _tables(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each code point below `count`: 0 outside of words, 1 inside, 2 a word by itself (uint8); and a value (uint64)."""
    kinds, lower = np.zeros(count, np.uint8), np.arange(count, dtype=np.uint64)
    for code in range(min(count, KNOWN)):
        character = chr(code)
        if character.isalnum() or character == "_":
            kinds[code] = 1
            small = character.lower()
            if len(small) == 1:
                lower[code] = ord(small)
    if count > 128:
        lower[ord("\u03c2")] = ord("\u03c3")  # the sigma at the end of a word
        for start, stop in ((0x3040, 0x3100), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, KNOWN)):
            kinds[start:stop] *= 2
    return kinds, _mixed(lower + np.uint64(1))
