# SPDX-License-Identifier: Apache-2.0
"""Candidate pairs: documents with the same key in a band.

The keys of a band are divided into partitions by their highest bits; a partition that does not fit into memory is
processed in smaller ranges. Within a group of documents with one key, in the order of their numbers, a document is paired
with the `links` before it and with the first one: all pairs of a small group, a chain with few gaps of a large one. Pairs
are stored as [pairs, 2] int64, the smaller number first, sorted, each once.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from megatron.corpus.duplicates.key_runs import fitting_ranges, partition_of_keys
from megatron.corpus.duplicates.signatures import Fingerprints

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
