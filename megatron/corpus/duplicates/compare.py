# SPDX-License-Identifier: Apache-2.0
"""Which candidate pairs are near-duplicates: their signatures decide, and where these leave a doubt, their texts.

What a task of pairs leaves behind, pairs as in `candidates`:
    accepted.npy, accepted_similarity.npy    by their signatures
    doubtful.npy, doubtful_similarity.npy    to be compared by their texts
    examples.npy, examples_similarity.npy    some of every similarity, for the report; compared by their texts, too
    wanted.npy                               the documents whose texts are needed, sorted
"""

import collections
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.corpus.duplicates import shingles
from megatron.corpus.duplicates.candidates import load_pairs, save_pairs
from megatron.corpus.duplicates.shards import PieceFile, blocks_of_lines, encoded, text_of
from megatron.corpus.duplicates.signatures import Fingerprints, Signing

BINS = 20  # of the histogram of similarities, from 0 to 1
DOUBT = 3.0  # standard errors of an estimate around the threshold within which the texts decide
_SHOWN = 240  # characters of a text in the report


def estimates(prints: Fingerprints, pairs: np.ndarray) -> np.ndarray:
    """The share of equal numbers in the signatures of each pair, [pairs] float32."""
    return (prints.signatures(pairs[:, 0]) == prints.signatures(pairs[:, 1])).mean(1, dtype=np.float32)


def pairs_in(memory: int, how: Signing) -> int:
    """How many pairs can be compared at once: two signatures each, as they are read and as they are put in order."""
    return max(1, memory // (16 * how.numbers + 256))


def doubtful(similarity: np.ndarray, threshold: float, how: Signing, verify: str) -> np.ndarray:
    """Which pairs have to be compared by their texts, [pairs] bool."""
    if verify == "signatures":
        return np.zeros(len(similarity), bool)
    margin = DOUBT * math.sqrt(max(threshold * (1 - threshold), 0.25 / how.numbers) / how.numbers)
    near = similarity >= threshold - margin
    return near if verify == "texts" else near & (similarity <= threshold + margin)


class Findings:
    """The pairs of a task, with their similarities, sorted into those files."""

    def __init__(self, how: Signing, threshold: float, verify: str, examples: int, earlier: int):
        self.how, self.threshold, self.verify, self.earlier = how, threshold, verify, earlier
        self.histogram = np.zeros(BINS, np.int64)
        self._examples = _Examples(examples)
        self._kept = dict(accepted=[], doubtful=[])

    def add(self, pairs: np.ndarray, similarity: np.ndarray) -> None:
        self.histogram += histogram(similarity)
        has_texts = pairs[:, 0] >= self.earlier  # of an earlier corpus there are fingerprints alone
        doubt = doubtful(similarity, self.threshold, self.how, self.verify) & has_texts
        sure = ~doubt & (similarity >= self.threshold)
        self._kept["doubtful"].append((pairs[doubt], similarity[doubt]))
        self._kept["accepted"].append((pairs[sure], similarity[sure]))
        self._examples.add(pairs[has_texts], similarity[has_texts])

    def write(self, folder: Path) -> dict[str, int]:
        """Returns counts."""
        found = {name: _together(parts) for name, parts in self._kept.items()}
        found["examples"] = self._examples.chosen()
        for name, (pairs, similarity) in found.items():
            save_pairs(folder / f"{name}.npy", pairs)
            np.save(folder / f"{name}_similarity.npy", similarity.astype("<f4"))
        wanted = np.unique(np.concatenate([found["doubtful"][0].ravel(), found["examples"][0].ravel()]))
        np.save(folder / "wanted.npy", wanted.astype("<i8"))
        np.save(folder / "histogram.npy", self.histogram)
        counts = {name: len(found[name][0]) for name in ("accepted", "doubtful")}
        return dict(pairs=int(self.histogram.sum()), **counts)


def _together(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    pairs, similarity = zip((np.zeros((0, 2), np.int64), np.zeros(0, np.float32)), *parts)
    return np.concatenate(pairs), np.concatenate(similarity)


def histogram(similarity: np.ndarray) -> np.ndarray:
    """How many pairs are in [k / BINS, (k + 1) / BINS), for each k; 1 counts in the last. [BINS] int64"""
    return np.bincount(_bin(similarity), minlength=BINS)[:BINS]


def _bin(similarity: np.ndarray) -> np.ndarray:
    return np.minimum((similarity * BINS + 1e-5).astype(np.int64), BINS - 1)


class _Examples:
    """A few pairs of every bin of similarity: those of the least hash, so that they do not depend on who saw them first."""

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
    """Places of the `each` pairs of the least hash in every bin of similarity, ascending."""
    hashes = pairs[:, 0].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + pairs[:, 1].astype(np.uint64)
    hashes = shingles.mixed(hashes)
    bins = _bin(similarity)
    order = np.lexsort((hashes, bins))
    first = np.searchsorted(bins[order], bins[order], "left")
    return np.sort(order[np.arange(len(order)) - first < each])


# ------------------------------------------------------------------------------------------------------------- texts


def write_sets(shard: Path, wanted: np.ndarray, first: int, folder: Path, how: Signing, text_key: str) -> int:
    """Keep the sets of shingles of some documents of a shard, and how their texts begin. Returns bytes of these texts.

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
    """What `write_sets` left of all shards, by the number of a document; the last sets used are kept, within `memory`."""

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
        self._sets[number] = found = np.frombuffer(self._of(number).piece("sets", number), "<u8")
        self._held += found.nbytes
        while self._held > self._memory and len(self._sets) > 2:
            self._held -= self._sets.popitem(last=False)[1].nbytes
        return found

    def _of(self, number: int) -> "_ShardSets":
        return self._files[int(np.searchsorted(self._last, number))]

    def similarity(self, pairs: np.ndarray) -> np.ndarray:
        """The Jaccard similarity of each pair's sets of shingles, [pairs] float32."""
        exact = (shingles.jaccard(self.shingle_set(one), self.shingle_set(other)) for one, other in pairs.tolist())
        return np.fromiter(exact, np.float32, len(pairs))


class _ShardSets:
    """Those of one shard."""

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
    """The numbers of a sorted file that are in [first, end)."""
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
    """Of the examples of all tasks, `each` of every similarity: the same however many tasks there were."""
    rows = [row for folder in folders for row in json.loads((folder / "examples.json").read_text(encoding="utf-8"))]
    pairs = np.array([row["documents"] for row in rows], np.int64).reshape(-1, 2)
    take = least_hashed(pairs, np.array([row["estimate"] for row in rows], np.float32), each)
    return sorted(
        (dict(rows[at], estimate=round(rows[at]["estimate"], 4)) for at in take), key=lambda row: row["estimate"]
    )


def pairs_by_similarity(folders: Sequence[Path]) -> dict[str, int]:
    """How many candidate pairs have which estimated similarity: {"0.50": 12, ...}, by the lower edge of each bin."""
    total = sum((np.load(folder / "histogram.npy") for folder in folders), np.zeros(BINS, np.int64))
    return {f"{number / BINS:.2f}": int(pairs) for number, pairs in enumerate(total)}
