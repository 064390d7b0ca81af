# SPDX-License-Identifier: Apache-2.0
"""Search texts for n-grams of evaluation sets; count the texts that have any, cut the n-grams out, or drop the texts.

An index holds every 13-gram of words of the registered sets. An item (a passage, a line) of 8 to 12 words is one n-gram of
its own length; shorter items are not searched for. A text with any of these n-grams is contaminated, as in Megatron-LM's
filter_ngrams. `ngrams.py` defines words.

    index = NgramIndex.open("evaluation.ngrams")
    hits = index.find(["a text", "another"])        # text, start, end, ngram of each
    index.sets_of(hits.ngrams)                      # {"LAMBADA": 3}: items that share an n-gram
    Screen(index, "cut")([(0, ["a text"])])         # what preprocessing keeps of each line, and notes on it
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, Optional

import numpy as np

from megatron.data.ngrams import SEPARATOR, all_ngram_hashes, ngram_hashes, words_of
from megatron.errors import DataError
from megatron.storage.array_file import Pieces, read_arrays, write_arrays
from megatron.storage.durable import whole_file

LONGEST, SHORTEST = 13, 8  # words of an n-gram
MOST = 50_000_000  # n-grams of an index: 600 MB in memory
ENDING = ".contamination"  # <prefix>.contamination: counts of n-grams in a token file
TOGETHER = 1 << 17  # characters of texts that are searched together
_KIND, _VERSION = "index of n-grams", 1
_COUNTS = "count of n-grams"


class EvaluationSet(NamedTuple):
    """Items [first, first + items) of an index."""

    name: str
    first: int
    items: int
    files: list[str]
    too_short: int  # items that are not searched for


class Hits(NamedTuple):
    """Occurrences of n-grams in texts, in order: index of the text, first and last character + 1, index of the n-gram."""

    texts: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    ngrams: np.ndarray


def item_ngrams(texts: Sequence[str], longest: int = LONGEST, shortest: int = SHORTEST) -> tuple[np.ndarray, set[int]]:
    """(hashes of the n-grams of an item, their lengths): all `longest`-grams; of a shorter text, one of all its words."""
    hashes, lengths = [], set()
    for text in texts:
        words = words_of(text).hashes
        n = min(longest, len(words))
        if n >= shortest:
            hashes.append(ngram_hashes(words, n))
            lengths.add(n)
    return (np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)), lengths


@dataclass(frozen=True)
class NgramIndex:
    """An index of the n-grams of evaluation sets.

    hashes   uint64 [n-grams], sorted
    starts   int64 [n-grams + 1]: owners[starts[i]:starts[i + 1]] are the items that have n-gram i
    owners   uint32
    lengths  lengths of the n-grams, in words
    """

    hashes: np.ndarray
    starts: np.ndarray
    owners: np.ndarray
    sets: tuple[EvaluationSet, ...]
    lengths: tuple[int, ...]
    longest: int = LONGEST
    shortest: int = SHORTEST
    sum: str = ""  # checksum of the file

    # -- construction --------------------------------------------------------------------------------------------------

    @classmethod
    def empty(cls, longest: int = LONGEST, shortest: int = SHORTEST) -> "NgramIndex":
        none = np.empty(0, np.uint64)
        return cls(none, np.zeros(1, np.int64), none.astype(np.uint32), (), (), longest, shortest)

    def with_set(self, name: str, items: Iterable[Sequence[str]], files: Sequence[str] = ()) -> "NgramIndex":
        """Add a set to the index; a set of the same name is replaced. items: the texts of each item.

        Raises DataError for a set without n-grams, or if the index becomes too large.
        """
        kept = [old for old in self.sets if old.name != name]
        renamed = np.full(sum(old.items for old in self.sets), -1, np.int64)
        sets, first = [], 0
        for old in kept:
            renamed[old.first : old.first + old.items] = np.arange(first, first + old.items)
            sets.append(old._replace(first=first))
            first += old.items
        owners = renamed[self.owners] if len(self.owners) else np.empty(0, np.int64)
        hashes = np.repeat(self.hashes, np.diff(self.starts))[owners >= 0]
        pieces, numbers, lengths = [hashes], [owners[owners >= 0]], set(self.lengths)
        count = too_short = 0
        total = len(hashes)
        for number, texts in enumerate(items):
            own, own_lengths = item_ngrams(texts, self.longest, self.shortest)
            lengths |= own_lengths
            count, too_short = number + 1, too_short + (not len(own))
            pieces.append(own)
            numbers.append(np.full(len(own), first + number, np.int64))
            total += len(own)
            if total > MOST:
                do = "register the sets that are evaluated, in several indexes if need be"
                raise DataError(f"{name} brings the index above {MOST:,} n-grams", do=do)
        if count == too_short:
            raise DataError(f"{name}: none of its {count:,} items has {self.shortest} words", do="check its files")
        sets.append(EvaluationSet(name, first, count, list(files), too_short))
        return self._of_pairs(np.concatenate(pieces), np.concatenate(numbers), tuple(sets), tuple(sorted(lengths)))

    def _of_pairs(self, hashes, items, sets, lengths) -> "NgramIndex":
        order = np.lexsort((items, hashes))
        hashes, items = hashes[order], items[order].astype(np.uint32)
        new = np.ones(len(hashes), bool)
        new[1:] = hashes[1:] != hashes[:-1]
        starts = np.append(np.flatnonzero(new), len(hashes)).astype(np.int64)
        return NgramIndex(hashes[new], starts, items, sets, lengths, self.longest, self.shortest)

    def without(self, ngrams: np.ndarray) -> "NgramIndex":
        """The index without the n-grams at these positions; sets and items stay."""
        keep = np.ones(len(self.hashes), bool)
        keep[ngrams] = False
        counts = np.diff(self.starts)
        pairs = np.repeat(keep, counts)
        hashes = np.repeat(self.hashes, counts)[pairs]
        return self._of_pairs(hashes, self.owners[pairs].astype(np.int64), self.sets, self.lengths)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path) -> None:
        """Write the index atomically."""
        about = dict(
            sets=[list(one) for one in self.sets], lengths=self.lengths, longest=self.longest, shortest=self.shortest
        )
        arrays = {name: Pieces.of(getattr(self, name)) for name in ("hashes", "starts", "owners")}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            write_arrays(file.name, _KIND, _VERSION, about, arrays)

    @classmethod
    def open(cls, path) -> "NgramIndex":
        """Read an index. Raises DataError for a file that is not one, or is damaged."""
        file = read_arrays(path, _KIND, _VERSION, verify=True)
        try:
            arrays = {name: np.array(file.arrays[name]) for name in ("hashes", "starts", "owners")}
            sets = tuple(EvaluationSet(*one) for one in file.about["sets"])
            lengths = tuple(file.about["lengths"])
            index = cls(*arrays.values(), sets, lengths, file.about["longest"], file.about["shortest"], file.sum)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is no index of n-grams: {error!r}") from None
        if len(index.starts) != len(index.hashes) + 1 or index.starts[-1] != len(index.owners):
            raise DataError(f"{path}: its arrays contradict each other", do="register the sets again")
        return index

    # -- search --------------------------------------------------------------------------------------------------------

    def find(self, texts: Sequence[str]) -> Hits:
        """Search texts for the n-grams of the index."""
        hits, group, size, first = [], [], 0, 0
        for number, text in enumerate(texts):
            group.append(text)
            size += len(text)
            if size >= TOGETHER or number + 1 == len(texts):
                hits.append(self._find_together(group, first))
                group, size, first = [], 0, number + 1
        if not hits:
            return Hits(*(np.empty(0, np.int64) for _ in Hits._fields))
        return Hits(*map(np.concatenate, zip(*hits, strict=True)))

    def _find_together(self, texts: list[str], first: int) -> Hits:
        words = words_of(texts[0] if len(texts) == 1 else SEPARATOR.join(texts))
        places, ngrams, sizes = [], [], []
        for n, hashes in zip(self.lengths, all_ngram_hashes(words.hashes, self.lengths), strict=True):
            at, number = self.lookup(hashes)
            places.append(at)
            ngrams.append(number)
            sizes.append(np.full(len(at), n))
        if not sum(map(len, places)):
            return Hits(*(np.empty(0, np.int64) for _ in Hits._fields))
        at, ngrams, sizes = np.concatenate(places), np.concatenate(ngrams), np.concatenate(sizes)
        starts, ends = words.starts[at], words.ends[at + sizes - 1]
        begins = np.cumsum([0] + [len(text) + len(SEPARATOR) for text in texts[:-1]])
        text = np.searchsorted(begins, starts, "right") - 1
        own = np.searchsorted(begins, ends - 1, "right") - 1 == text  # not from one text into the next
        order = np.lexsort((ends[own], starts[own]))
        text = text[own][order]
        shift = begins[text]
        return Hits(text + first, starts[own][order] - shift, ends[own][order] - shift, ngrams[own][order])

    def lookup(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(positions of the hashes that are in the index, their positions in the index)."""
        (leading, shift, _), (following, second_shift, mask) = self._likely
        maybe = np.flatnonzero(leading[hashes >> shift])
        maybe = maybe[following[(hashes[maybe] >> second_shift) & mask]]
        numbers = np.searchsorted(self.hashes, hashes[maybe])
        numbers[numbers == len(self.hashes)] = 0
        same = self.hashes[numbers] == hashes[maybe] if len(self.hashes) else np.zeros(len(maybe), bool)
        return maybe[same], numbers[same]

    @cached_property
    def _likely(self) -> list[tuple[np.ndarray, np.uint64, np.uint64]]:
        """Two tables (has any n-gram these bits?, shift, mask) that filter hashes before the search.

        1 of 64 other hashes passes both. A table of 8 bytes per n-gram stays in the CPU's cache.
        """
        bits = min(27, max(10, (8 * len(self.hashes)).bit_length()))
        tables, mask = [], np.uint64((1 << bits) - 1)
        for shift in (np.uint64(64 - bits), np.uint64(64 - 2 * bits)):
            table = np.zeros(1 << bits, bool)
            table[(self.hashes >> shift) & mask] = True
            tables.append((table, shift, mask))
        return tables

    def ngrams_of(self, one: EvaluationSet) -> int:
        """Number of n-grams of a set."""
        own = (self.owners >= one.first) & (self.owners < one.first + one.items)
        return int(np.count_nonzero(np.logical_or.reduceat(own, self.starts[:-1]))) if len(own) else 0

    def items_of(self, ngrams: np.ndarray) -> np.ndarray:
        """Items with any of these n-grams, sorted."""
        ngrams = np.unique(ngrams)
        wanted = np.zeros(len(self.hashes), bool)
        wanted[ngrams] = True
        return np.unique(self.owners[np.repeat(wanted, np.diff(self.starts))])

    def sets_of(self, ngrams: np.ndarray) -> dict[str, int]:
        """Number of items with any of these n-grams, by set; sets without such items are left out."""
        items = self.items_of(ngrams)
        counts = {
            one.name: int(np.count_nonzero((items >= one.first) & (items < one.first + one.items))) for one in self.sets
        }
        return {name: count for name, count in counts.items() if count}


# -- counts of a token file --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contained:
    """Counts of an index's n-grams in a token file (`<prefix>.contamination`).

    hashes   uint64, all n-grams of the search, sorted
    counts   int64, occurrences in the token file: 0 if the documents with them were cut or dropped
    before   int64, occurrences in the text
    about    sets, action, documents: figures of the preprocessing run
    """

    hashes: np.ndarray
    counts: np.ndarray
    before: np.ndarray
    about: dict

    def save(self, path) -> None:
        arrays = dict(hashes=self.hashes, counts=self.counts, before=self.before)
        write_arrays(path, _COUNTS, _VERSION, self.about, {name: Pieces.of(array) for name, array in arrays.items()})

    @classmethod
    def open(cls, path) -> "Contained":
        """Read the counts of a file. Raises DataError for a missing or damaged one."""
        file = read_arrays(path, _COUNTS, _VERSION, verify=True)
        arrays = [np.array(file.arrays.get(name, ())) for name in ("hashes", "counts", "before")]
        if len({len(array) for array in arrays}) > 1:
            raise DataError(f"{path}: its arrays contradict each other", do="preprocess again")
        return cls(*arrays, file.about)

    def joined(self, other: "Contained") -> "Contained":
        """The sum over two token files, of the n-grams that both were searched for."""
        common, mine, theirs = np.intersect1d(self.hashes, other.hashes, assume_unique=True, return_indices=True)
        about = dict(self.about)
        for name in ("documents", "contaminated", "removed"):
            about[name] = self.about.get(name, 0) + other.about.get(name, 0)
        if self.about.get("action") != other.about.get("action"):
            about["action"] = "several"
        return Contained(
            common, self.counts[mine] + other.counts[theirs], self.before[mine] + other.before[theirs], about
        )

    def look_up(self, hashes: np.ndarray) -> tuple[bool, bool]:
        """(whether all of these n-grams were searched for, whether any of them occurs)."""
        places = np.searchsorted(self.hashes, hashes)
        places[places == len(self.hashes)] = 0
        known = self.hashes[places] == hashes if len(self.hashes) else np.zeros(len(hashes), bool)
        return bool(known.all()), bool((self.counts[places[known]] > 0).any())


# -- cutting -----------------------------------------------------------------------------------------------------------

_ENDS = ".!?\u3002\uff01\uff1f"
_SENTENCE_END = re.compile(f"[{_ENDS}]")


def cut(
    text: str, spans: Iterable[tuple[int, int]], side: int = 200, least: int = 200, most_pieces: int = 10
) -> list[tuple[int, int]]:
    """Cut sorted spans out of a text; returns the spans (start, end) of the remaining pieces.

    At least `side` characters before and after a span are cut with it, up to the end of a sentence. Remaining pieces of at
    most `least` characters are dropped, and all text if more than `most_pieces` remain (Megatron-LM's filter_ngrams).
    """
    pieces, at = [], 0
    for start, end in spans:
        if start < at:
            continue
        stop = max(at, start - side)
        last = max(text.rfind(mark, at + 1, stop + 1) for mark in _ENDS)
        if last > at and last + 1 - at > least:
            pieces.append((at, last + 1))
        end_mark = _SENTENCE_END.search(text, min(len(text), end + side))
        at = end_mark.end() if end_mark else len(text)
        if len(text) - at <= least:
            at = len(text)
            break
    if at == 0 or at < len(text):
        pieces.append((at, len(text)))
    return pieces if len(pieces) <= most_pieces else []


def of_training_data(prefixes: Sequence[str]) -> tuple[Optional[Contained], list[str]]:
    """(the counts of all these token files together, prefixes without counts)."""
    contained, unknown = None, []
    for prefix in prefixes:
        if not Path(prefix + ENDING).exists():
            unknown.append(prefix)
            continue
        own = Contained.open(prefix + ENDING)
        contained = own if contained is None else contained.joined(own)
    return contained, unknown


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
