# SPDX-License-Identifier: Apache-2.0
"""Gopher's repetition rules (Rae et al. 2021, table A1): lines, paragraphs, frequent and repeated n-grams.

An n-gram is n tokens of `words.cut`. Top n-grams: characters of the most frequent one (with a space between tokens) times
its count, over the text's. Duplicate n-grams: characters in n-grams that occurred before (without spaces), each
character counted once: after a repeated n-gram, the search continues at its end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from megatron.corpus.filters.words import Rule, Words, above, cut, judged
from megatron.corpus.stage import Document, Verdict

Limits = Mapping[int, float]  # n -> maximal share of the text's characters

TOP = {2: 0.20, 3: 0.18, 4: 0.16}
DUPLICATE = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
CHINESE_TOP, CHINESE_DUPLICATE = ({2 * n: limit for n, limit in limits.items()} for limits in (TOP, DUPLICATE))
_MIXERS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F], np.uint64)


@dataclass
class GopherRepetition:
    """Drops texts with repeated lines, paragraphs or n-grams."""

    max_duplicate_lines: Optional[float] = 0.3
    max_duplicate_paragraphs: Optional[float] = 0.3
    max_duplicate_line_characters: Optional[float] = 0.2
    max_duplicate_paragraph_characters: Optional[float] = 0.2
    top_ngrams: Limits = field(default_factory=lambda: TOP)
    duplicate_ngrams: Limits = field(default_factory=lambda: DUPLICATE)

    chinese = False

    def __call__(self, document: Document) -> Verdict:
        return judged(document, self._rules(document["text"]))

    def _rules(self, text: str) -> Iterator[Rule]:
        size = len(text)
        yield "characters", size, not size and "empty"
        for kind, cut_into in (("paragraph", paragraphs), ("line", lines)):
            pieces = cut_into(text)
            count, characters = repeated(pieces)
            yield from self._above(f"duplicate_{kind}s", count / len(pieces))
            yield from self._above(f"duplicate_{kind}_characters", characters / size)
        words = cut(text, self.chinese)
        for n, limit in self.top_ngrams.items():  # keys of a mapping from JSON are strings
            yield from above(f"top_{n}_gram", top_characters(words, int(n)) / size, limit, f"top_{n}_gram")
        for n, limit in self.duplicate_ngrams.items():
            share = duplicate_characters(words, int(n)) / size
            yield from above(f"duplicate_{n}_grams", share, limit, f"duplicate_{n}_grams")

    def _above(self, name: str, share: float) -> Iterator[Rule]:
        return above(name, share, getattr(self, f"max_{name}"), name)


@dataclass
class GopherRepetitionChinese(GopherRepetition):
    """The same for Chinese, with n-grams of double length: tokens are characters, and a word has about two."""

    top_ngrams: Limits = field(default_factory=lambda: CHINESE_TOP)
    duplicate_ngrams: Limits = field(default_factory=lambda: CHINESE_DUPLICATE)

    chinese = True


def paragraphs(text: str) -> list[str]:
    """The parts of a text between blank lines, without white space around the text.

    >>> paragraphs("a\\nb\\n\\n\\nc\\n\\n")
    ['a\\nb', 'c']
    """
    text = text.strip()
    return [piece for pair in text.split("\n\n") if (piece := pair.lstrip("\n"))] or [text]


def lines(text: str) -> list[str]:
    """The lines of a text without blank ones, but with an empty line for a break at its beginning or end.

    >>> lines("a\\n\\nb\\n")
    ['a', 'b', '']
    """
    inner = [line for line in text.split("\n") if line]
    return [""] * text.startswith("\n") + inner + [""] * text.endswith("\n")


def repeated(pieces: list[str]) -> tuple[int, int]:
    """(number of pieces that are equal to an earlier one, their characters)."""
    different = set(pieces)
    count = len(pieces) - len(different)
    return count, sum(map(len, pieces)) - sum(map(len, different)) if count else 0


def top_characters(words: Words, n: int) -> int:
    """Characters of the most frequent n-gram times its count; the earliest of equally frequent ones."""
    if len(words) < n:
        return 0
    grams = _tuples(words, n)
    order = np.sort(grams)
    edges = np.flatnonzero(np.concatenate(([True], order[1:] != order[:-1], [True])))
    runs = np.diff(edges)
    count = int(runs.max())
    first = 0
    if count > 1:
        most = order[edges[:-1][runs == count]]
        first = int(np.isin(grams, most).argmax()) if len(most) > 1 else int((grams == most[0]).argmax())
    return (int(words.lengths[first : first + n].sum()) + n - 1) * count


def _tuples(words: Words, n: int) -> np.ndarray:
    """uint64 [tokens - n + 1]: hashes of n consecutive tokens, as a sequence of tokens."""
    single = words.joined(1)
    single ^= single >> np.uint64(29)
    count = len(single) - n + 1
    total = np.zeros(count, np.uint64)
    for place in range(n):
        mixer = _MIXERS[place % len(_MIXERS)] + np.uint64(2 * (place // len(_MIXERS)))
        mixed = single[place : place + count] * mixer
        mixed ^= mixed >> np.uint64(32)
        total += mixed
    return total


def duplicate_characters(words: Words, n: int) -> int:
    """Characters in n-grams that occurred before, from left to right and without overlaps."""
    grams = words.joined(n)
    if len(grams) < 2:
        return 0
    where = np.flatnonzero(_perhaps_twice(grams))
    sizes = words.places[where + n] - words.places[where]
    seen, free, characters = set(), 0, 0
    for at, gram, size in zip(where.tolist(), grams[where].tolist(), sizes.tolist()):
        if at < free:
            continue
        if gram in seen:
            characters += size
            free = at + n
        else:
            seen.add(gram)
    return characters


def _perhaps_twice(grams: np.ndarray) -> np.ndarray:
    """bool: true for each n-gram that occurs more than once, and for one in eight of the others.

    A table of slots holds the last n-gram written into each. It is written from both ends: an n-gram that is alone in its
    slot is there both times.
    """
    bits = (8 * len(grams)).bit_length()
    slots = ((grams ^ (grams >> np.uint64(31))) * _MIXERS[0]) >> np.uint64(64 - bits)
    slots = slots.astype(np.int64)
    table, numbers = np.empty(1 << bits, np.int32), np.arange(len(grams), dtype=np.int32)
    table[slots] = numbers
    shared = table[slots] != numbers
    table[slots[::-1]] = numbers[::-1]
    return shared | (table[slots] != numbers)
