# SPDX-License-Identifier: Apache-2.0
"""Hashes of shingles, which are runs of `width` characters or words of a text, for many texts together, in numpy.

With `width` = 3 characters, "abcd" -> {"abc", "bcd"}. A text shorter than a shingle is one shingle; a text without any unit
has none. Characters are unchanged code points; words are lower-cased runs of letters and digits, and each character of a
script without spaces (Chinese, Japanese, Thai ...) is a word of its own.

The hash of a shingle is a polynomial in its units modulo 2^64, mixed. Hashes are a stored format (FORMAT): fingerprints of
an earlier corpus hold minima of them.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from megatron.data.ngrams import powers

FORMAT = 1  # of the hashes: a change invalidates saved fingerprints
KINDS = ("characters", "words")

_BASE = 0x9E3779B97F4A7C15

_MIX = np.uint64(0xBF58476D1CE4E5B9)
_PIECE = 1 << 15  # hashes that are computed together: their arrays fit into the cache of a core
_SEPARATOR, _LETTER, _WORD = 0, 1, 2  # classes of code points


def shingles(texts: Sequence[str], kind: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(hashes [n] uint64, ends [texts + 1] int64): those of text i are hashes[ends[i]:ends[i + 1]], with repetitions.

    >>> hashes, ends = shingles(["abcd", "bcd", "", "ab"], "characters", 3)
    >>> ends.tolist(), bool(hashes[1] == hashes[4])
    ([0, 4, 7, 7, 10], True)
    """
    units, ends = _characters(texts, width) if kind == "characters" else _words(texts, width)
    return _windows(units, ends, width), ends


def shingle_set(text: str, kind: str, width: int) -> np.ndarray:
    """The hashes of a text's shingles, sorted, each once."""
    return np.unique(shingles([text], kind, width)[0])


def jaccard(one: np.ndarray, other: np.ndarray, over: str = "union") -> float:
    """|A & B| over |A or B| (union), or over the smaller or larger of both (min, max). 0 where one is empty."""
    if not len(one) or not len(other):
        return 0.0
    small, large = sorted((one, other), key=len)
    at = np.searchsorted(large, small)
    both = int(np.count_nonzero(large[np.minimum(at, len(large) - 1)] == small))
    return both / dict(union=len(one) + len(other) - both, min=len(small), max=len(large))[over]


def codes_of(text: str) -> np.ndarray:
    """The code points of a text, [characters] uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _characters(texts: Sequence[str], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(code points of all texts, ends of texts), short texts filled up with zeros."""
    filled = [text if len(text) >= width or not text else text.ljust(width, "\0") for text in texts]
    return codes_of("".join(filled)), _ends([len(text) for text in filled])


def _words(texts: Sequence[str], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(hashes of the words of all texts, ends of texts), short texts filled up with zeros."""
    lowered = [text.lower() for text in texts]
    codes = codes_of("\n".join(lowered))
    starts, stops = word_bounds(codes)
    hashes = span_hashes(codes, starts, stops)
    bounds = _ends([len(text) + 1 for text in lowered])  # of texts, in characters, with a newline after each
    words = np.diff(np.searchsorted(starts, bounds))
    padded = np.where(words > 0, np.maximum(words, width), 0)
    ends = _ends(padded)
    units = np.zeros(int(ends[-1]), np.uint64)
    units[np.arange(len(hashes)) + np.repeat(ends[:-1] - _ends(words)[:-1], words)] = hashes
    return units, ends


def word_bounds(codes: np.ndarray, punctuation: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(first character, end) of each word of some code points.

    punctuation: every character that is no letter, no digit and no white space is a word too
    """
    kinds = _kinds(punctuation)[codes]
    before = np.empty_like(kinds)
    before[:1], before[1:] = _SEPARATOR, kinds[:-1]
    begins = (kinds == _WORD) | ((kinds == _LETTER) & (before != _LETTER))
    starts = np.flatnonzero(begins)
    ends = np.empty(len(kinds) + 1, bool)  # at [i]: a word ends before character i
    ends[0], ends[-1] = False, bool(len(kinds)) and kinds[-1] != _SEPARATOR
    ends[1:-1] = (kinds[:-1] == _WORD) | ((kinds[:-1] == _LETTER) & (kinds[1:] != _LETTER))
    return starts, np.flatnonzero(ends)


def span_hashes(codes: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """A hash of each span of code points: a difference of prefix sums, shifted to the span's own start. [spans]"""
    forward, backward = powers(_BASE, len(codes) + 1)
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * forward[: len(codes)], out=sums[1:])
    return mixed((sums[stops] - sums[starts]) * backward[starts])


def _windows(units: np.ndarray, ends: np.ndarray, width: int) -> np.ndarray:
    """The hash of each run of `width` units, [units] uint64.

    A text of n units has n - width + 1 runs; the remaining places at its end repeat the last one, which changes neither the
    set of hashes nor its minima.
    """
    n = len(units)
    hashes = np.empty(n, np.uint64)
    for start in range(0, n, _PIECE):
        piece = units[start : start + _PIECE + width - 1].astype(np.uint64)
        rolled = _rolled(piece, width)
        hashes[start : start + len(rolled)] = mixed(rolled)
    filled = ends[1:][np.diff(ends) > 0]
    for back in range(1, width):
        hashes[filled - back] = hashes[filled - width]
    return hashes


def window_hashes(units: np.ndarray, width: int) -> np.ndarray:
    """The hash of each run of `width` numbers, across texts, [units - width + 1] uint64."""
    pieces = [np.zeros(0, np.uint64)]
    for start in range(0, len(units) - width + 1, _PIECE):
        pieces.append(mixed(_rolled(units[start : start + _PIECE + width - 1].astype(np.uint64), width)))
    return np.concatenate(pieces)


def _rolled(units: np.ndarray, width: int) -> np.ndarray:
    """sum of units[i + j] * BASE^(width - 1 - j) over j < width, for each i; by doubling the width, [n - width + 1]."""
    hashed, have = units, 1
    for bit in bin(width)[3:]:
        doubled = hashed[:-have] * _power(have)
        doubled += hashed[have:]
        hashed, have = doubled, 2 * have
        if bit == "1":
            hashed = hashed[:-1] * _power(1)
            hashed += units[have : have + len(hashed)]
            have += 1
    return hashed.copy() if width == 1 else hashed


def mixed(hashes: np.ndarray) -> np.ndarray:
    """Mix hashes in place, so that each input bit changes many output bits: the polynomial is linear in its units."""
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(29)
    return hashes


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(_BASE, exponent, 1 << 64))


def _ends(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


# Scripts whose words are not divided by spaces: Thai to Burmese, Khmer, Chinese and Japanese with their extensions.
_UNSPACED = ((0x0E00, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x9FFF))
_UNSPACED += ((0xF900, 0xFAFF), (0xFF66, 0xFF9D), (0x20000, 0x3FFFF))


@cache
def _kinds(punctuation: bool) -> np.ndarray:
    """[code points] uint8: the class of each."""
    kinds = np.full(0x110000, _WORD if punctuation else _SEPARATOR, np.uint8)
    for code in range(0x110000):
        character = chr(code)
        if character.isalnum():
            kinds[code] = _LETTER
        elif punctuation and character.isspace():
            kinds[code] = _SEPARATOR
    for first, last in _UNSPACED:
        part = kinds[first : last + 1]
        part[part == _LETTER] = _WORD
    return kinds
