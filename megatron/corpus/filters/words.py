# SPDX-License-Identifier: Apache-2.0
"""Tokenize a text into words for rules, in numpy over its code points: some 100 MB/s, in any script.

    words = cut(text)            # one token per word, as in English and most languages
    words = cut(text, chinese=True)  # Han characters and kana are tokens of their own

A token is a run of letters, digits, marks and underscores. A dot between two of them belongs to it (3.14, e.g), and so do
comma, colon and slash between digits (1,000); an apostrophe between two starts a new token (don 't). Other characters that
are not white space are tokens of their own, except that consecutive dots, hyphens or tildes are one. This is close to
spaCy's English tokenizer, which datatrove uses.

The rules of a filter are evaluated until one drops the document (`judged`); those after it are not computed:

    def rules(self, text):
        words = len(text.split())
        yield "words", words, words < 50 and "too_few_words"
"""

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Literal, Optional

import numpy as np

from megatron.corpus.stage import Document, Verdict
from megatron.data.ngrams import powers

WORD, LETTER, SPACE, HAN, VISIBLE, RUN, JOINER, NUMBER = (1 << bit for bit in range(8))  # bits of a character's class
APOSTROPHES = (ord("'"), 0x2019)
HAN_RANGES = (
    (0x3040, 0x3100),
    (0x31F0, 0x3200),
    (0x3400, 0x4DC0),
    (0x4E00, 0xA000),
    (0xF900, 0xFB00),
    (0x20000, 0x323B0),
)
_ANYWHERE = (ord("."), *APOSTROPHES)  # join any two characters of words; other joiners join digits
BASE = 0x9E3779B97F4A7C15  # of the hashes


@dataclass(frozen=True)
class Words:
    """Tokens of a text: token i is text[starts[i]:ends[i]].

    points uint32 [characters]: code points of the text
    kinds  uint8 [characters]: bits of their classes
    starts, ends int64 [tokens]
    """

    points: np.ndarray
    kinds: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Characters of each token."""
        return self.ends - self.starts

    def having(self, bit: int) -> np.ndarray:
        """bool [tokens]: whether any character of the token has this class."""
        counts = np.zeros(len(self.points) + 1, np.int64)
        np.cumsum((self.kinds & bit) > 0, out=counts[1:])
        return counts[self.ends] > counts[self.starts]

    def count(self, words) -> int:
        """Number of these different words that occur."""
        return sum(self._occurs(word) for word in words)

    def _occurs(self, word: str) -> bool:
        at = self.starts[self.lengths == len(word)]
        for place, character in enumerate(word):
            at = at[self.points[at + place] == ord(character)]
        return len(at) > 0

    @cached_property
    def sums(self) -> np.ndarray:
        """uint64 [tokens + 1]: prefix sums of hashes before each token, over all characters except white space."""
        forward, _ = powers(BASE, len(self.points))
        inside = np.flatnonzero((self.kinds & SPACE) == 0)
        values = (self.points[inside] + np.uint64(1)) * forward[: len(inside)]
        totals = np.zeros(len(values) + 1, np.uint64)
        np.cumsum(values, out=totals[1:])
        return totals[self.places]

    @cached_property
    def places(self) -> np.ndarray:
        """int64 [tokens + 1]: number of characters in all tokens before each."""
        places = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, out=places[1:])
        return places

    def joined(self, n: int) -> np.ndarray:
        """uint64 [tokens - n + 1]: hashes of n consecutive tokens without spaces; equal texts have equal hashes."""
        if len(self) < n:
            return np.empty(0, np.uint64)
        return (self.sums[n:] - self.sums[:-n]) * self._shifts[: len(self) - n + 1]

    @cached_property
    def _shifts(self) -> np.ndarray:
        """uint64 [tokens]: factors that shift a sum from a token to the beginning of the text."""
        return powers(BASE, len(self.points))[1][self.places[:-1]]


@lru_cache(maxsize=1)  # consecutive filters process the same text
def cut(text: str, chinese: bool = False) -> Words:
    """The tokens of a text."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = classes()[points]
    if not len(points):
        return Words(points, kinds, np.empty(0, np.int64), np.empty(0, np.int64))
    word = (kinds & WORD) > 0
    joins = np.flatnonzero(kinds[1:-1] & JOINER) + 1
    around = kinds[joins - 1] & kinds[joins + 1]
    plain = np.isin(points[joins], _ANYWHERE)
    joins = joins[(around & np.where(plain, WORD, NUMBER)) > 0]
    word[joins] = True
    visible = (kinds & SPACE) == 0
    begins = visible.copy()
    runs = (kinds[1:] & RUN > 0) & (points[1:] == points[:-1])
    begins[1:] &= ~((word[1:] & word[:-1]) | runs)
    begins[joins[np.isin(points[joins], APOSTROPHES)]] = True
    if chinese:
        han = (kinds & HAN) > 0
        begins |= han
        begins[1:] |= visible[1:] & han[:-1]
    starts = np.flatnonzero(begins)
    stops = begins.copy()
    stops |= ~visible
    edges = np.append(np.flatnonzero(stops), len(points))
    return Words(points, kinds, starts, edges[np.searchsorted(edges, starts, "right")])


@cache
def classes() -> np.ndarray:
    """uint8 [0x110000]: the class bits of each code point, from Unicode's general categories."""
    table = np.zeros(sys.maxunicode + 1, np.uint8)
    for point in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(point))
        if category in ("Cn", "Co"):
            continue
        word = category[0] in "LNM"
        table[point] = WORD * (word or point == 95) | LETTER * (category[0] == "L") | VISIBLE * word
        table[point] |= NUMBER * (category[0] == "N")
    table[[point for point in range(0x3001) if chr(point).isspace()]] |= SPACE
    table[[*map(ord, ".-~")]] |= RUN
    table[[*_ANYWHERE, *map(ord, ",:/")]] |= JOINER
    for first, stop in HAN_RANGES:
        table[first:stop] |= HAN
    table.flags.writeable = False
    return table


Rule = tuple[str, float, Literal[False] | str]  # the figure's name, the figure, the reason to drop


def judged(document: Document, rules: Iterable[Rule]) -> Verdict:
    """The verdict of rules: the first one with a reason drops the document; figures are those up to it."""
    figures = {}
    for name, figure, reason in rules:
        figures[name] = figure
        if reason:
            return Verdict(None, reason, figures)
    return Verdict(document, "", figures)


def below(name: str, figure: float, least: Optional[float], reason: str) -> Iterator[Rule]:
    """A rule with a lower limit; None disables it."""
    if least is not None:
        yield name, figure, figure < least and reason


def above(name: str, figure: float, most: Optional[float], reason: str) -> Iterator[Rule]:
    """A rule with an upper limit; None disables it."""
    if most is not None:
        yield name, figure, figure > most and reason
