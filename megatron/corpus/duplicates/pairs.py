# SPDX-License-Identifier: Apache-2.0
"""Keys, pairs and groups: records sorted by a 64-bit key, pairs of documents with the same key, and the groups they form.

The folder of a task holds runs of records: facts.json with the lengths of its runs, and for each column a file, run after
run; the column `keys` is sorted within each run. A reader takes the records of a range of keys from every run.

The keys of a band are divided into partitions by their highest bits; a partition that does not fit into memory is
processed in smaller ranges. Within a group of documents with one key, in the order of their numbers, a document is paired
with the `links` before it and with the first one: all pairs of a small group, a chain with few gaps of a large one. Pairs
are stored as [pairs, 2] int64, the smaller number first, sorted, each once.

Union-find of documents takes 4 bytes per document (8 beyond 4 billion), for any number of pairs.

>>> groups = DocumentGroups(5)
>>> groups.join(np.array([[1, 3], [3, 4]]))
>>> groups.smallest(0, 5).tolist()
[0, 1, 2, 1, 1]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.corpus.duplicates.shards import read_facts, write_facts
from megatron.corpus.duplicates.signatures import Fingerprints
from megatron.corpus.stage import Made
from megatron.errors import DataError

PAIRS = "pairs.npy"
RECORD = 96  # bytes of memory per record during sorting, including one or two pairs


def candidate_pairs(
    prints: Fingerprints, band: int, partition: int, partitions: int, links: int, earlier: int, memory: int
) -> tuple[np.ndarray, int]:
    """(pairs [n, 2] int64 of a partition of a band, number of records).

    earlier: documents below this number belong to an earlier corpus and are not paired with each other
    """
    count = partial(prints.count, band)
    pairs, records = [np.zeros((0, 2), np.int64)], 0
    for first, last in fitting_ranges(count, *partition_of_keys(partition, partitions), max(1, memory // RECORD)):
        keys, documents = prints.records(band, first, last)
        records += len(keys)
        pairs.append(_pairs(keys, documents, links, earlier))
    return sorted_pairs(np.concatenate(pairs)), records


def _pairs(keys: np.ndarray, documents: np.ndarray, links: int, earlier: int) -> np.ndarray:
    order = np.argsort(keys, kind="stable")  # within a key, documents keep their order
    keys, documents = keys[order], documents[order]
    again = keys[1:] == keys[:-1]
    kept = np.zeros(len(keys), bool)  # most keys have one document only
    kept[1:] |= again
    kept[:-1] |= again
    keys, documents = keys[kept], documents[kept]
    parts = []
    for back in range(1, min(links, len(keys) - 1) + 1):
        same = keys[back:] == keys[: len(keys) - back]
        parts.append(np.stack([documents[: len(keys) - back][same], documents[back:][same]], 1))
    places = np.arange(len(keys))
    begins = np.ones(len(keys), bool)
    begins[1:] = keys[1:] != keys[:-1]
    first = np.maximum.accumulate(np.where(begins, places, 0))
    far = places - first > links
    parts.append(np.stack([documents[first[far]], documents[far]], 1))
    pairs = np.concatenate(parts)
    return pairs[pairs[:, 1] >= earlier]


def sorted_pairs(pairs: np.ndarray) -> np.ndarray:
    """The pairs sorted by their first and then second document, without repetitions."""
    if not len(pairs):
        return pairs
    bits = int(pairs[:, 1].max()).bit_length()
    if int(pairs[:, 0].max()).bit_length() + bits < 64:  # one number is sorted ten times as fast as two
        packed = np.unique(pairs[:, 0] << bits | pairs[:, 1])
        return np.stack([packed >> bits, packed & ((1 << bits) - 1)], 1)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    new = np.ones(len(pairs), bool)
    new[1:] = (pairs[1:] != pairs[:-1]).any(1)
    return pairs[new]


def save_pairs(path: Path, pairs: np.ndarray) -> None:
    """Save pairs as [2, pairs], so that the first documents can be searched in the file without reading it."""
    np.save(path, np.ascontiguousarray(pairs.T, "<i8"))


def load_pairs(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r").T


def merged(files: list[Path], first: int, end: int, most: int) -> Iterator[np.ndarray]:
    """The pairs of many files with a first document in [first, end), sorted and unique, about `most` at a time."""
    parts = [part for file in files if len(part := between_pairs(load_pairs(file), first, end))]
    if sum(map(len, parts)) > most and end - first > 1:
        middle = (first + end) // 2
        del parts  # and the maps of the files
        yield from merged(files, first, middle, most)
        yield from merged(files, middle, end, most)
    elif parts:
        yield sorted_pairs(np.concatenate(parts))


def between_pairs(pairs: np.ndarray, first: int, end: int) -> np.ndarray:
    """The part of sorted pairs with first documents in [first, end)."""
    start, stop = np.searchsorted(pairs[:, 0], [first, end])
    return pairs[start:stop]


KEYS = 1 << 64
KEY = "keys"


def each_partition(partitions: int, memory: int) -> Callable[[Made], list[dict[str, int]]]:
    """`StagePhase.own` of a phase with a task for each partition of the keys. memory: bytes that a task may take"""
    return lambda made: [
        dict(memory=memory, partition=number, of_partitions=partitions) for number in range(partitions)
    ]


class RunWriter:
    """Adds runs to the files of a folder. columns: name -> type of number, in addition to the keys"""

    def __init__(self, folder: Path, columns: Mapping[str, str]):
        self._folder, self._columns = folder, {KEY: "<u8", **columns}
        self._runs: list[int] = []
        self._files = {name: open(folder / f"{name}.bin", "wb") for name in self._columns}

    def add(self, keys: np.ndarray, **columns: np.ndarray) -> None:
        order = np.argsort(keys, kind="stable")
        for name, values in {KEY: keys, **columns}.items():
            self._files[name].write(values[order].astype(self._columns[name], copy=False))
        self._runs.append(len(keys))

    def close(self, **facts: Any) -> None:
        for file in self._files.values():
            file.close()
        write_facts(self._folder, dict(facts, runs=self._runs, columns=self._columns))


class RunReader:
    """The runs of many folders."""

    def __init__(self, folders: Sequence[Path]):
        self.facts = [read_facts(folder) for folder in folders]
        self._folders = [Path(folder) for folder in folders]

    def count(self, first: int, last: int) -> int:
        """Number of records with first <= key <= last."""
        return sum(stop - start for _, start, stop in self._parts(first, last))

    def read(self, first: int, last: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(folder of each record, columns) of these records, in the order of the folders."""
        parts = list(self._parts(first, last))
        owners = np.repeat([number for number, _, _ in parts], [stop - start for _, start, stop in parts])
        columns = self.facts[0]["columns"] if self.facts else {KEY: "<u8"}
        values = {
            name: np.concatenate(
                [np.zeros(0, kind), *(self._column(number, name)[start:stop] for number, start, stop in parts)]
            )
            for name, kind in columns.items()
        }
        return owners.astype(np.int64), values

    def _parts(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(folder, first record, end) of each run that has records in the range."""
        for number, facts in enumerate(self.facts):
            keys, at = self._column(number, KEY), 0
            for length in facts["runs"]:
                run = keys[at : at + length]
                start = at + int(np.searchsorted(run, np.uint64(first)))
                stop = at + int(np.searchsorted(run, np.uint64(last), "right"))
                if start < stop:
                    yield number, start, stop
                at += length

    def _column(self, number: int, name: str) -> np.ndarray:
        path, kind = self._folders[number] / f"{name}.bin", self.facts[number]["columns"][name]
        records = sum(self.facts[number]["runs"])
        if not records:
            return np.zeros(0, kind)
        if path.stat().st_size != records * np.dtype(kind).itemsize:
            raise DataError(f"{path}: does not hold {records:,} records", do="remove its folder and run again")
        return np.memmap(path, kind, "r")


def partition_of_keys(number: int, of: int) -> tuple[int, int]:
    """[first, end) of the keys of a partition."""
    return KEYS * number // of, KEYS * (number + 1) // of


def fitting_ranges(count: Callable[[int, int], int], first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide keys [first, end) into ranges (first, last) of at most `most` records, or of one key."""
    if count(first, end - 1) <= most or end - first == 1:
        yield first, end - 1
        return
    middle = (first + end) // 2
    yield from fitting_ranges(count, first, middle, most)
    yield from fitting_ranges(count, middle, end, most)


_PIECE = 1 << 22  # documents or pairs that are processed together


class DocumentGroups:
    """Groups of documents. Each document points to a smaller one of its group; the smallest one points to itself.

    The result does not depend on the order of the pairs.
    """

    def __init__(self, documents: int):
        self._parent = np.arange(documents, dtype=np.uint32 if documents < 1 << 32 else np.int64)

    def join(self, pairs: np.ndarray) -> None:
        """Join the groups of each pair. [pairs, 2]"""
        for start in range(0, len(pairs), _PIECE):
            self._join(np.asarray(pairs[start : start + _PIECE]))

    def _join(self, pairs: np.ndarray) -> None:
        one, other = pairs[:, 0], pairs[:, 1]
        while True:
            one, other = self._roots(one), self._roots(other)
            apart = one != other
            if not apart.any():
                return
            one, other = one[apart], other[apart]
            # Of several pairs that give one root a new parent, the smallest wins; the loop repeats the others.
            np.minimum.at(self._parent, np.maximum(one, other), np.minimum(one, other))

    def _roots(self, documents: np.ndarray) -> np.ndarray:
        roots = self._parent[documents]
        while True:
            further = self._parent[roots]
            if (further == roots).all():
                self._parent[documents] = roots  # shortens the path
                return roots
            roots = further

    def smallest(self, first: int, end: int) -> np.ndarray:
        """The smallest document of the group of each of [first, end)."""
        return self._roots(np.arange(first, end))
