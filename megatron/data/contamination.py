# SPDX-License-Identifier: Apache-2.0
"""Which n-grams of evaluation sets a text holds, and the text without them.

An index knows every 13-gram of words of the sets that were registered with it; an item (a passage, a line) of 8 to 12 words
is one n-gram of its own length, a shorter one is not looked for. A text that has one of them is contaminated, as
Megatron-LM's filter_ngrams has it. `ngrams.py` says what a word is.

    index = NgramIndex.open("evaluation.ngrams")
    hits = index.find(["a text", "another"])        # text, start, end, ngram of each
    index.sets_of(hits.ngrams)                      # {"LAMBADA": 3}: items that share an n-gram
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from megatron.data.ngrams import SEPARATOR, all_ngram_hashes, ngram_hashes, words_of
from megatron.errors import DataError
from megatron.storage.array_file import Pieces, read_arrays, write_arrays
from megatron.storage.durable import whole_file

LONGEST, SHORTEST = 13, 8  # words of an n-gram
MOST = 50_000_000  # n-grams of an index: 600 MB in memory
ENDING = ".contamination"  # <prefix>.contamination: which n-grams a token file holds, and how often
TOGETHER = 1 << 17  # characters of texts that are searched together
_KIND, _VERSION = "index of n-grams", 1
_FOUND = "count of n-grams"


class EvaluationSet(NamedTuple):
    """Items [first, first + items) of an index."""

    name: str
    first: int
    items: int
    files: list[str]
    too_short: int  # items that are not looked for


class Hits(NamedTuple):
    """N-grams found in texts, in order: number of the text, first and last character + 1 there, number of the n-gram."""

    texts: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    ngrams: np.ndarray


def item_ngrams(texts: Sequence[str], longest: int = LONGEST, shortest: int = SHORTEST) -> tuple[np.ndarray, set[int]]:
    """(hashes of all n-grams of an item, their lengths): those of its longest n, or one of all words of a shorter text."""
    found, lengths = [], set()
    for text in texts:
        words = words_of(text).hashes
        n = min(longest, len(words))
        if n >= shortest:
            found.append(ngram_hashes(words, n))
            lengths.add(n)
    return (np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)), lengths


@dataclass(frozen=True)
class NgramIndex:
    """hashes   uint64 [n-grams], sorted
    starts   int64 [n-grams + 1]: owners[starts[i]:starts[i + 1]] are the items that have n-gram i
    owners   uint32
    lengths  the numbers of words that n-grams have
    """

    hashes: np.ndarray
    starts: np.ndarray
    owners: np.ndarray
    sets: tuple[EvaluationSet, ...]
    lengths: tuple[int, ...]
    longest: int = LONGEST
    shortest: int = SHORTEST
    sum: str = ""  # of the file: which index it is

    # -- making one ----------------------------------------------------------------------------------------------------

    @classmethod
    def empty(cls, longest: int = LONGEST, shortest: int = SHORTEST) -> "NgramIndex":
        none = np.empty(0, np.uint64)
        return cls(none, np.zeros(1, np.int64), none.astype(np.uint32), (), (), longest, shortest)

    def with_set(self, name: str, items: Iterable[Sequence[str]], files: Sequence[str] = ()) -> "NgramIndex":
        """This index and another set; one of the same name is replaced. items: the texts of each item.

        Raises DataError for a set without n-grams, and for an index that becomes too large.
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
        found, numbers, lengths = [hashes], [owners[owners >= 0]], set(self.lengths)
        count = too_short = 0
        total = len(hashes)
        for number, texts in enumerate(items):
            own, own_lengths = item_ngrams(texts, self.longest, self.shortest)
            lengths |= own_lengths
            count, too_short = number + 1, too_short + (not len(own))
            found.append(own)
            numbers.append(np.full(len(own), first + number, np.int64))
            total += len(own)
            if total > MOST:
                do = "register the sets that are evaluated, in several indexes if need be"
                raise DataError(f"{name} brings the index above {MOST:,} n-grams", do=do)
        if count == too_short:
            raise DataError(f"{name}: none of its {count:,} items has {self.shortest} words", do="check its files")
        sets.append(EvaluationSet(name, first, count, list(files), too_short))
        return self._of_pairs(np.concatenate(found), np.concatenate(numbers), tuple(sets), tuple(sorted(lengths)))

    def _of_pairs(self, hashes, items, sets, lengths) -> "NgramIndex":
        order = np.lexsort((items, hashes))
        hashes, items = hashes[order], items[order].astype(np.uint32)
        new = np.ones(len(hashes), bool)
        new[1:] = hashes[1:] != hashes[:-1]
        starts = np.append(np.flatnonzero(new), len(hashes)).astype(np.int64)
        return NgramIndex(hashes[new], starts, items, sets, lengths, self.longest, self.shortest)

    def without(self, ngrams: np.ndarray) -> "NgramIndex":
        """Without n-grams of these numbers; sets and items stay."""
        keep = np.ones(len(self.hashes), bool)
        keep[ngrams] = False
        counts = np.diff(self.starts)
        pairs = np.repeat(keep, counts)
        hashes = np.repeat(self.hashes, counts)[pairs]
        return self._of_pairs(hashes, self.owners[pairs].astype(np.int64), self.sets, self.lengths)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path) -> None:
        """Write it whole: whoever reads meanwhile has the old one."""
        about = dict(
            sets=[list(one) for one in self.sets], lengths=self.lengths, longest=self.longest, shortest=self.shortest
        )
        arrays = {name: Pieces.of(getattr(self, name)) for name in ("hashes", "starts", "owners")}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            write_arrays(file.name, _KIND, _VERSION, about, arrays)

    @classmethod
    def open(cls, path) -> "NgramIndex":
        """Raises DataError for a file that is no index, or a damaged one."""
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

    # -- looking texts up ----------------------------------------------------------------------------------------------

    def find(self, texts: Sequence[str]) -> Hits:
        """All places of n-grams of the index in some texts."""
        found, group, size, first = [], [], 0, 0
        for number, text in enumerate(texts):
            group.append(text)
            size += len(text)
            if size >= TOGETHER or number + 1 == len(texts):
                found.append(self._find_together(group, first))
                group, size, first = [], 0, number + 1
        if not found:
            return Hits(*(np.empty(0, np.int64) for _ in Hits._fields))
        return Hits(*map(np.concatenate, zip(*found, strict=True)))

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
        """(places of hashes that are in the index, their numbers there)."""
        (leading, shift, _), (following, second_shift, mask) = self._likely
        maybe = np.flatnonzero(leading[hashes >> shift])
        maybe = maybe[following[(hashes[maybe] >> second_shift) & mask]]
        numbers = np.searchsorted(self.hashes, hashes[maybe])
        numbers[numbers == len(self.hashes)] = 0
        same = self.hashes[numbers] == hashes[maybe] if len(self.hashes) else np.zeros(len(maybe), bool)
        return maybe[same], numbers[same]

    @cached_property
    def _likely(self) -> list[tuple[np.ndarray, np.uint64, np.uint64]]:
        """Two tables (has any n-gram these bits?, how far they are shifted, mask): one of 64 other hashes passes both, and
        a table of 8 bytes an n-gram stays in the cache where a search in all of them does not.
        """
        bits = min(27, max(10, (8 * len(self.hashes)).bit_length()))
        found, mask = [], np.uint64((1 << bits) - 1)
        for shift in (np.uint64(64 - bits), np.uint64(64 - 2 * bits)):
            table = np.zeros(1 << bits, bool)
            table[(self.hashes >> shift) & mask] = True
            found.append((table, shift, mask))
        return found

    def ngrams_of(self, one: EvaluationSet) -> int:
        """How many n-grams the items of a set have."""
        own = (self.owners >= one.first) & (self.owners < one.first + one.items)
        return int(np.count_nonzero(np.logical_or.reduceat(own, self.starts[:-1]))) if len(own) else 0

    def items_of(self, ngrams: np.ndarray) -> np.ndarray:
        """The items that have any of these n-grams, sorted."""
        ngrams = np.unique(ngrams)
        wanted = np.zeros(len(self.hashes), bool)
        wanted[ngrams] = True
        return np.unique(self.owners[np.repeat(wanted, np.diff(self.starts))])

    def sets_of(self, ngrams: np.ndarray) -> dict[str, int]:
        """Items of each set that have any of these n-grams; sets without one are left out."""
        items = self.items_of(ngrams)
        counts = {
            one.name: int(np.count_nonzero((items >= one.first) & (items < one.first + one.items))) for one in self.sets
        }
        return {name: count for name, count in counts.items() if count}


# -- what a token file holds -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contained:
    """What is known of the n-grams of an index in a token file: `<prefix>.contamination`.

    hashes   uint64, all n-grams that were looked for, sorted
    counts   int64, how often each is in the token file: 0 where documents that held it were cut or dropped
    before   int64, how often each was in the text
    about    sets, action, documents: figures of the run that made it
    """

    hashes: np.ndarray
    counts: np.ndarray
    before: np.ndarray
    about: dict

    def save(self, path) -> None:
        arrays = dict(hashes=self.hashes, counts=self.counts, before=self.before)
        write_arrays(path, _FOUND, _VERSION, self.about, {name: Pieces.of(array) for name, array in arrays.items()})

    @classmethod
    def open(cls, path) -> "Contained":
        """Raises DataError where there is none, or it is damaged."""
        file = read_arrays(path, _FOUND, _VERSION, verify=True)
        arrays = [np.array(file.arrays.get(name, ())) for name in ("hashes", "counts", "before")]
        if len({len(array) for array in arrays}) > 1:
            raise DataError(f"{path}: its arrays contradict each other", do="preprocess again")
        return cls(*arrays, file.about)

    def joined(self, other: "Contained") -> "Contained":
        """Of two token files together. What only one of them was searched for is left out: of the other it is not known."""
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
        """(whether all of these were looked for, whether any is there)."""
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
    """What is left of a text without some places [(start, end), ...], which are sorted: places of its pieces.

    At least `side` characters before and behind a place go with it, up to the end of a sentence; of what is left, pieces
    of no more than `least` characters go, too; and everything, where more than `most_pieces` are left (Megatron-LM's
    filter_ngrams).
    """
    pieces, at = [], 0
    for start, end in spans:
        if start < at:
            continue
        stop = max(at, start - side)
        last = max(text.rfind(mark, at + 1, stop + 1) for mark in _ENDS)
        if last > at and last + 1 - at > least:
            pieces.append((at, last + 1))
        found = _SENTENCE_END.search(text, min(len(text), end + side))
        at = found.end() if found else len(text)
        if len(text) - at <= least:
            at = len(text)
            break
    if at == 0 or at < len(text):
        pieces.append((at, len(text)))
    return pieces if len(pieces) <= most_pieces else []


def of_training_data(prefixes: Sequence[str]) -> tuple[Optional[Contained], list[str]]:
    """(what all these token files hold together, those of which it is not known)."""
    found, unknown = None, []
    for prefix in prefixes:
        if not Path(prefix + ENDING).exists():
            unknown.append(prefix)
            continue
        own = Contained.open(prefix + ENDING)
        found = own if found is None else found.joined(own)
    return found, unknown
