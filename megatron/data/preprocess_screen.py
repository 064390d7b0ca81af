# SPDX-License-Identifier: Apache-2.0
"""Decontamination in preprocessing: count n-grams of evaluation sets, cut them out, or drop the texts with them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron.data.contamination import NgramIndex, cut
from megatron.data.ngrams import SEPARATOR

Action = Literal["count", "cut", "drop"]
Part = tuple[int, int, "str | list[str]"]  # key, number of the piece from 1 (0: the whole text), text to tokenize


@dataclass(frozen=True)
class Cutting:
    """The amount of text to cut around an n-gram: see `contamination.cut`."""

    side: int = 200
    least: int = 200
    most_pieces: int = 10


@dataclass
class Screening:
    """The results of a search in a block of lines.

    parts    line -> the parts of it to tokenize; other lines are unchanged
    matches  a row for each text with n-grams: for <prefix>.contaminated.jsonl
    ngrams   key -> (indices of n-grams, how often each occurs)
    """

    parts: dict[int, list[Part]] = field(default_factory=dict)
    matches: list[dict] = field(default_factory=list)
    ngrams: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


class Screen:
    """Searches the texts of lines for the n-grams of an index."""

    def __init__(self, index: NgramIndex, action: Action = "count", cutting: Cutting = Cutting()):
        self.index, self.action, self.cutting = index, action, cutting

    def __call__(self, lines: Iterable[tuple[int, list]]) -> Screening:
        """lines: (number, values) of each line; a value is a text, or the sentences of one."""
        values = {}  # (line, key) -> value, in order
        whole = {}
        for line, of_keys in lines:
            whole[line] = of_keys
            values.update({(line, key): value for key, value in enumerate(of_keys)})
        places = list(values)
        texts = [value if type(value) is str else SEPARATOR.join(value) for value in values.values()]
        hits, screening = self.index.find(texts), Screening()
        bounds = np.flatnonzero(np.diff(hits.texts, prepend=-1, append=-1)).tolist()
        numbers: dict[int, list[np.ndarray]] = {}
        changed: dict[tuple[int, int], list] = {}
        for start, stop in zip(bounds, bounds[1:]):
            number = int(hits.texts[start])
            line, key = places[number]
            ngrams = hits.ngrams[start:stop]
            spans = list(zip(hits.starts[start:stop].tolist(), hits.ends[start:stop].tolist()))
            pieces = self._pieces(values[line, key], texts[number], spans)
            numbers.setdefault(key, []).append(ngrams)
            row = dict(line=line, key=key, ngrams=len(ngrams), sets=self.index.sets_of(ngrams))
            row["first"] = texts[number][slice(*spans[0])]
            far = np.maximum.accumulate(hits.ends[start:stop])[:-1]  # n-grams that overlap are one passage
            row["passages"] = 1 + int((hits.starts[start + 1 : stop] > far).sum())
            if self.action != "count":
                row["pieces"] = len(pieces)
                changed[line, key] = pieces
            screening.matches.append(row)
        for line in {line for line, _ in changed}:
            screening.parts[line] = [
                part
                for key, value in enumerate(whole[line])
                for part in _numbered(key, changed.get((line, key)), value)
            ]
        screening.ngrams = {key: np.unique(np.concatenate(all), return_counts=True) for key, all in numbers.items()}
        return screening

    def _pieces(self, value, text: str, spans: list[tuple[int, int]]) -> list:
        """The remaining pieces of a value: pieces of its text, or lists of the sentences in each piece."""
        if self.action != "cut":
            return []
        c = self.cutting
        pieces = cut(text, spans, c.side, c.least, c.most_pieces)
        if type(value) is str:
            return [text[start:stop] for start, stop in pieces]
        bounds = np.cumsum([0] + [len(sentence) + len(SEPARATOR) for sentence in value])
        starts, ends = bounds[:-1], bounds[1:] - len(SEPARATOR)
        kept = [value[np.searchsorted(starts, a) : np.searchsorted(ends, b, "right")] for a, b in pieces]
        return [sentences for sentences in kept if sentences]


def _numbered(key: int, pieces: "list | None", value) -> list[Part]:
    if pieces is None:
        return [(key, 0, value)]
    return [(key, number, piece) for number, piece in enumerate(pieces, 1)]
