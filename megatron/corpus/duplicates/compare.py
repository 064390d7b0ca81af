# SPDX-License-Identifier: Apache-2.0
"""Compare candidate pairs by their signatures, and doubtful ones by their texts.

Output of a task, with pairs as in `pairs.py`:
    accepted.npy, accepted_similarity.npy    near-duplicates by their signatures
    doubtful.npy, doubtful_similarity.npy    to be compared by their texts
    examples.npy, examples_similarity.npy    some of every similarity, for the report; also compared by their texts
    wanted.npy                               documents with texts to read, sorted
"""

import collections
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.corpus.duplicates import shingles
from megatron.corpus.duplicates.pairs import load_pairs, save_pairs
from megatron.corpus.duplicates.shards import PieceFile, blocks_of_lines, encoded, text_of
from megatron.corpus.duplicates.signatures import Fingerprints, Signing

BINS = 20  # of the histogram of similarities, from 0 to 1
DOUBT = 3.0  # an estimate is doubtful within this many standard errors around the threshold
_SHOWN = 240  # characters of a text in the report


def estimates(prints: Fingerprints, pairs: np.ndarray) -> np.ndarray:
    """The share of equal numbers in the signatures of each pair, [pairs] float32."""
    return (prints.signatures(pairs[:, 0]) == prints.signatures(pairs[:, 1])).mean(1, dtype=np.float32)


def pairs_in(memory: int, how: Signing) -> int:
    """Number of pairs that can be compared together: two signatures each, as read and as sorted."""
    return max(1, memory // (16 * how.numbers + 256))


def doubtful(similarity: np.ndarray, threshold: float, how: Signing, verify: str) -> np.ndarray:
    """Whether each pair has to be compared by its texts, [pairs] bool."""
    if verify == "signatures":
        return np.zeros(len(similarity), bool)
    margin = DOUBT * math.sqrt(max(threshold * (1 - threshold), 0.25 / how.numbers) / how.numbers)
    near = similarity >= threshold - margin
    return near if verify == "texts" else near & (similarity <= threshold + margin)


class ComparedPairs:
    """The pairs of a task with their similarities, divided into accepted and doubtful ones."""

    def __init__(self, how: Signing, threshold: float, verify: str, examples: int, earlier: int):
        self.how, self.threshold, self.verify, self.earlier = how, threshold, verify, earlier
        self.histogram = np.zeros(BINS, np.int64)
        self._examples = _Examples(examples)
        self._kept = dict(accepted=[], doubtful=[])

    def add(self, pairs: np.ndarray, similarity: np.ndarray) -> None:
        self.histogram += histogram(similarity)
        has_texts = pairs[:, 0] >= self.earlier  # an earlier corpus only has fingerprints
        doubt = doubtful(similarity, self.threshold, self.how, self.verify) & has_texts
        sure = ~doubt & (similarity >= self.threshold)
        self._kept["doubtful"].append((pairs[doubt], similarity[doubt]))
        self._kept["accepted"].append((pairs[sure], similarity[sure]))
        self._examples.add(pairs[has_texts], similarity[has_texts])

    def write(self, folder: Path) -> dict[str, int]:
        """Write the files. Returns counts."""
        files = {name: _together(parts) for name, parts in self._kept.items()}
        files["examples"] = self._examples.chosen()
        for name, (pairs, similarity) in files.items():
            save_pairs(folder / f"{name}.npy", pairs)
            np.save(folder / f"{name}_similarity.npy", similarity.astype("<f4"))
        wanted = np.unique(np.concatenate([files["doubtful"][0].ravel(), files["examples"][0].ravel()]))
        np.save(folder / "wanted.npy", wanted.astype("<i8"))
        np.save(folder / "histogram.npy", self.histogram)
        counts = {name: len(files[name][0]) for name in ("accepted", "doubtful")}
        return dict(pairs=int(self.histogram.sum()), **counts)


def _together(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    pairs, similarity = zip((np.zeros((0, 2), np.int64), np.zeros(0, np.float32)), *parts)
    return np.concatenate(pairs), np.concatenate(similarity)


def histogram(similarity: np.ndarray) -> np.ndarray:
    """Number of pairs with similarity in [k / BINS, (k + 1) / BINS), for each k; 1 counts in the last. [BINS] int64"""
    return np.bincount(_bin(similarity), minlength=BINS)[:BINS]


def _bin(similarity: np.ndarray) -> np.ndarray:
    return np.minimum((similarity * BINS + 1e-5).astype(np.int64), BINS - 1)


class _Examples:
    """A few pairs of every bin of similarity: those with the smallest hashes, in whatever order the pairs come."""

    def __init__(self, each: int):
        self.each, self._parts = each, []

    def add(self, pairs: np.ndarray, similarity: np.ndarray) -> None:
        self._parts.append((pairs, similarity))
        if len(self._parts) > 16:
            self._parts = [self.chosen()]

    def chosen(self) -> tuple[np.ndarray, np.ndarray]:
        pairs, similarity = _together(self._parts)
        take = least_hashed(pairs, similarity, self.each)
        return pairs[take], similarity[take]


def least_hashed(pairs: np.ndarray, similarity: np.ndarray, each: int) -> np.ndarray:
    """Positions of the `each` pairs with the smallest hashes in every bin of similarity, ascending."""
    hashes = pairs[:, 0].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + pairs[:, 1].astype(np.uint64)
    hashes = shingles.mixed(hashes)
    bins = _bin(similarity)
    order = np.lexsort((hashes, bins))
    first = np.searchsorted(bins[order], bins[order], "left")
    return np.sort(order[np.arange(len(order)) - first < each])


# ------------------------------------------------------------------------------------------------------------- texts


def write_sets(shard: Path, wanted: np.ndarray, first: int, folder: Path, how: Signing, text_key: str) -> int:
    """Write the sets of shingles and the beginnings of some texts of a shard. Returns the bytes of these texts.

    wanted: their numbers, ascending; first: the number of the shard's first document
    """
    rows = wanted - first
    row, at, size = 0, 0, 0
    with PieceFile(folder / "sets") as sets, PieceFile(folder / "heads") as heads:
        for lines in blocks_of_lines(shard) if len(rows) else ():
            end = int(np.searchsorted(rows, row + len(lines)))
            texts = [text_of(lines[number - row], text_key) or "" for number in rows[at:end].tolist()]
            hashes, ends = shingles.shingles(texts, how.shingle, how.width)
            for text, start, stop in zip(texts, ends[:-1].tolist(), ends[1:].tolist()):
                sets.add(np.unique(hashes[start:stop]).tobytes())
                heads.add(encoded(text[:_SHOWN]))
                size += len(encoded(text))
            row, at = row + len(lines), end
            if at == len(rows):
                break
    np.save(folder / "numbers.npy", wanted.astype("<i8"))
    return size


class ShingleStore:
    """The output of `write_sets` for all shards, by document number, with a cache of the last sets within `memory`."""

    def __init__(self, folders: Sequence[Path], memory: int):
        self._memory, self._held = memory, 0
        self._files = [_ShardSets(folder) for folder in folders]
        self._last = np.maximum.accumulate([file.last for file in self._files])
        self._sets: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()

    def beginning(self, number: int) -> str:
        return self._of(number).piece("heads", number).decode("utf-8", "surrogatepass")

    def shingle_set(self, number: int) -> np.ndarray:
        if number in self._sets:
            self._sets.move_to_end(number)
            return self._sets[number]
        self._sets[number] = hashes = np.frombuffer(self._of(number).piece("sets", number), "<u8")
        self._held += hashes.nbytes
        while self._held > self._memory and len(self._sets) > 2:
            self._held -= self._sets.popitem(last=False)[1].nbytes
        return hashes

    def _of(self, number: int) -> "_ShardSets":
        return self._files[int(np.searchsorted(self._last, number))]

    def similarity(self, pairs: np.ndarray) -> np.ndarray:
        """The Jaccard similarity of each pair's sets of shingles, [pairs] float32."""
        exact = (shingles.jaccard(self.shingle_set(one), self.shingle_set(other)) for one, other in pairs.tolist())
        return np.fromiter(exact, np.float32, len(pairs))


class _ShardSets:
    """The sets and beginnings of one shard."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._numbers = np.load(folder / "numbers.npy", mmap_mode="r")
        self._ends = {name: np.load(folder / f"{name}_ends.npy", mmap_mode="r") for name in ("sets", "heads")}
        self.last = int(self._numbers[-1]) if len(self._numbers) else -1

    def piece(self, name: str, number: int) -> bytes:
        at = int(np.searchsorted(self._numbers, number))
        start, end = self._ends[name][at : at + 2].tolist()
        with open(self._folder / f"{name}.bin", "rb") as file:
            file.seek(start)
            return file.read(end - start)


def between(file: Path, first: int, end: int) -> np.ndarray:
    """The numbers in [first, end) of a sorted file."""
    numbers = np.load(file, mmap_mode="r")
    start, stop = np.searchsorted(numbers, [first, end])
    return np.array(numbers[start:stop])


# ------------------------------------------------------------------------------------------------------------ report


def example_rows(folder: Path, known: ShingleStore) -> list[dict]:
    """A task's examples with both similarities and the beginnings of both texts."""
    rows = []
    pairs = np.asarray(load_pairs(folder / "examples.npy"))
    for (one, other), estimate in zip(pairs.tolist(), np.load(folder / "examples_similarity.npy").tolist()):
        exact = shingles.jaccard(known.shingle_set(one), known.shingle_set(other))
        shown = [known.beginning(number) for number in (one, other)]
        rows.append(dict(documents=[one, other], estimate=estimate, jaccard=round(exact, 4), texts=shown))
    return rows


def chosen_examples(folders: Sequence[Path], each: int) -> list[dict]:
    """`each` examples of every similarity from all tasks, independent of the number of tasks."""
    rows = [row for folder in folders for row in json.loads((folder / "examples.json").read_text(encoding="utf-8"))]
    pairs = np.array([row["documents"] for row in rows], np.int64).reshape(-1, 2)
    take = least_hashed(pairs, np.array([row["estimate"] for row in rows], np.float32), each)
    return sorted(
        (dict(rows[at], estimate=round(rows[at]["estimate"], 4)) for at in take), key=lambda row: row["estimate"]
    )


def pairs_by_similarity(folders: Sequence[Path]) -> dict[str, int]:
    """Histogram of the estimated similarities of candidate pairs: {"0.50": 12, ...}, by the lower edge of each bin."""
    total = sum((np.load(folder / "histogram.npy") for folder in folders), np.zeros(BINS, np.int64))
    return {f"{number / BINS:.2f}": int(pairs) for number, pairs in enumerate(total)}
