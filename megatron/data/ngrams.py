# SPDX-License-Identifier: Apache-2.0
"""Vectorized hashes of words and n-grams of words.

A word is a run of letters, digits and underscores in lower case, as in Megatron-LM's filter_ngrams. A Chinese or Japanese
character is a word by itself. Punctuation and white space do not count: "Don't stop!" and "DON T STOP" are the same three
words.

The hash of a word is a polynomial in its characters, the hash of an n-gram one in its words, both mod 2^64. A difference
of running sums gives any of them; multiplying by an inverse power removes the position. Two different n-grams share a hash
with probability of about 2^-64.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

OF_CHARACTERS, OF_WORDS = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95  # bases: odd, so that they have an inverse
CHUNK = 1 << 18  # characters processed together: their arrays fit into the CPU's cache
KNOWN = 0x40000  # code points from here on are not letters
SEPARATOR = "\n"


class WordSpans(NamedTuple):
    """Hash (uint64), start and end (int64, in characters) of each word."""

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
    chunks = list(_words_in_chunks(text))
    if len(chunks) == 1:
        return chunks[0]
    if not chunks:
        return WordSpans(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
    return WordSpans(*map(np.concatenate, zip(*chunks, strict=True)))


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """Hashes uint64 of all n-grams of a sequence of words, in order; empty for fewer than n words."""
    return next(iter(all_ngram_hashes(words, [n])))


def all_ngram_hashes(words: np.ndarray, lengths: Sequence[int]) -> Iterator[np.ndarray]:
    """`ngram_hashes` for several values of n."""
    forward, back = powers(OF_WORDS, len(words) + 1)
    sums = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words * forward[: len(words)], out=sums[1:])
    for n in lengths:
        if len(words) < n:
            yield np.empty(0, np.uint64)
            continue
        hashes = sums[n:] - sums[:-n]
        hashes *= back[: len(hashes)]
        yield hashes


def spread(numbers: np.ndarray) -> np.ndarray:
    """Hashes uint64 of integers, such as token ids, to use as words in `ngram_hashes`."""
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
        if at + len(chunk) < stop:  # cut between two words; extend the chunk for a longer word
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
    if kind.max(initial=0) > 1:  # characters that are words by themselves
        part = kind == 1
        first[1:] &= ~(part[:-1] & part[1:])
        last[:-1] &= ~(part[:-1] & part[1:])
    else:
        first[1:] &= ~inside[:-1]
        last[:-1] &= ~inside[1:]
    starts, ends = np.flatnonzero(first), np.flatnonzero(last) + 1
    forward, back = powers(OF_CHARACTERS, len(kind))
    sums = np.zeros(len(kind) + 1, np.uint64)
    values *= forward[: len(kind)]
    np.cumsum(values, out=sums[1:])
    hashes = _mixed((sums[ends] - sums[starts]) * back[starts])
    return WordSpans(hashes, starts + at, ends + at)


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Mix all bits, in place: the low bits of a polynomial depend only on the low bits of its terms."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(31)
    return hashes


def powers(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(base^i, base^-i) for i below `count` or more, mod 2^64."""
    return _table_of_powers(base, max(CHUNK, 1 << (count - 1).bit_length() if count else 1))


@lru_cache(maxsize=8)
def _table_of_powers(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    tables = []
    for factor in (base, pow(base, -1, 1 << 64)):
        table = np.full(count, factor, np.uint64)
        table[0] = 1
        tables.append(np.multiply.accumulate(table))
    return tables[0], tables[1]


@lru_cache(maxsize=2)
def _tables(count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each code point below `count`: 0 outside of words, 1 inside, 2 a word by itself (uint8); and a value (uint64)."""
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
