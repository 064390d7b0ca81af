# SPDX-License-Identifier: Apache-2.0
"""Find pairs of near-duplicate documents in JSON lines: step one of three, as in Megatron-LM's tools/openwebtext.

    python -m megatron.tools.openwebtext.find_duplicates --inputs clean.json url --output process_stage_one.json
    python -m megatron.tools.openwebtext.group_duplicate_url process_stage_one.json process_stage_two.json
    python -m megatron.tools.openwebtext.remove_group_duplicates process_stage_two.json clean.json dedup.json

--inputs takes pairs: a file, and the key of its documents' names. Documents whose 100 MinHash numbers agree in one of 10
bands form a bucket. In each bucket, the first is compared with the others by their 5-character shingles; similar ones
are written, {"first": [{"other": 0.93}, ...]} a line, and removed from the bucket; --heuristic-iter sets the number of
rounds. Unlike in Megatron-LM, each run gives the same output, each pair is in it once, and fingerprints are plain arrays
(.npz) without code. All texts are in memory; for larger data use the stage `near-duplicates` of a corpus recipe.
"""

import io
import json
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, Optional

import numpy as np

from megatron.corpus.duplicates.shards import encoded
from megatron.corpus.duplicates.shingles import jaccard, shingle_set
from megatron.corpus.duplicates.signatures import Signing, band_keys, sign_texts
from megatron.corpus.openwebtext.duplicate_files import LeftOut, documents, json_line
from megatron.corpus.processes import in_order
from megatron.errors import DataError, Failure, SettingsError, UsageError, missing_file, run_main
from megatron.mpu.cpu_threads import cores
from megatron.settings.positional import parse_one
from megatron.settings.schema import setting
from megatron.storage.durable import whole_file

PROG = "python -m megatron.tools.openwebtext.find_duplicates"
WIDTH = 5  # characters of a shingle
_BATCH = 500  # texts signed together
_SETS = 2000  # sets of shingles kept in memory


@dataclass(frozen=True)
class FindOptions:
    """The documents to compare, and the method."""

    inputs: Optional[list[str]] = setting("pairs of a file and a key: cc.json cc_id news.json news_id", None)
    output: Optional[str] = setting("the pairs found, with their similarities", None)
    save_fingerprints: Optional[str] = setting("save the signatures of all documents to this file (.npz)", None)
    load_fingerprints: Optional[list[str]] = setting("documents of earlier calls, from such files", None)
    jaccard: Literal["union", "min", "max"] = setting("what the common shingles are divided by", "union")
    jaccard_threshold: float = setting("pairs above it are written", 0.5)
    heuristic_iter: int = setting("how many documents of a bucket are compared with the rest of it; -1: all", 1)
    num_bands: int = setting("bands of a signature", 10)
    num_seeds: int = setting("numbers of a signature", 100)
    seed: int = setting("seed of the signatures", 1234)
    jaccard_parallel: bool = setting("compare the bands in several processes; the output is the same", False)
    workers: Optional[int] = setting("processes of --jaccard-parallel (default: one per core)", None)
    debug: bool = setting("tracebacks with error messages", False)

    @property
    def signing(self) -> Signing:
        """The method of signing documents. Raises SettingsError."""
        if self.num_bands < 1 or self.num_seeds < 1 or self.num_seeds % self.num_bands:
            raise SettingsError(
                f"--num-seeds {self.num_seeds} cannot be divided among --num-bands {self.num_bands}",
                do="--num-seeds is a multiple of --num-bands",
            )
        rows = self.num_seeds // self.num_bands
        return Signing("characters", WIDTH, self.num_bands, rows, "minhash", self.seed)


@dataclass
class Collection:
    """Documents by name, in order of arrival, with their texts and signatures."""

    how: Signing
    names: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    signatures: list[np.ndarray] = field(default_factory=list)  # pieces, [documents, numbers] uint32
    known: set[str] = field(default_factory=set)
    again: int = 0  # documents with a duplicate name: the first one counts

    def add(self, names: Sequence[str], texts: Sequence[str], signatures: Optional[np.ndarray] = None) -> None:
        new = []
        for number, name in enumerate(names):
            if name not in self.known:
                self.known.add(name)
                new.append(number)
        self.again += len(names) - len(new)
        self.names += [names[number] for number in new]
        self.texts += (fresh := [texts[number] for number in new])
        self.signatures.append(sign_texts(fresh, self.how)[0] if signatures is None else signatures[new])

    def all_signatures(self) -> np.ndarray:
        return np.concatenate([np.zeros((0, self.how.numbers), np.uint32), *self.signatures])


def main(argv: list[str]) -> None:
    """Collect the documents, save their fingerprints, write the pairs."""
    options = parse_one(argv, FindOptions, PROG, "Find pairs of near-duplicates.")
    check(options)
    collection = Collection(options.signing)
    for path in options.load_fingerprints or ():
        load(path, collection)
    pairs = options.inputs or []
    for path, key in zip(pairs[::2], pairs[1::2]):
        read(path, key, collection)
    print(f"{len(collection.names):,} documents", flush=True)
    if collection.again:
        print(f"{collection.again:,} documents have a name that another one has: the first counts", file=sys.stderr)
    if options.save_fingerprints:
        save(options.save_fingerprints, collection)
    if options.output:
        began = time.perf_counter()
        with whole_file(options.output) as file:
            lines, others, compared = 0, 0, 0
            for line, more in similar_pairs(collection, options):
                compared += more
                if line:
                    file.write(json_line(line))
                    lines, others = lines + 1, others + sum(map(len, line.values()))
        seconds = time.perf_counter() - began
        print(f"{compared:,} pairs compared in {seconds:.1f} s; {others:,} similar ones in {lines:,} lines", flush=True)


def check(options: FindOptions) -> None:
    """Raise UsageError or SettingsError for bad options."""
    if not (options.inputs or options.load_fingerprints):
        raise UsageError("nothing to compare", do="--inputs FILE KEY ..., or --load-fingerprints FILE ...")
    if len(options.inputs or ()) % 2:
        raise UsageError(
            f"--inputs takes pairs of a file and a key, got {len(options.inputs)}: {' '.join(options.inputs)}",
            do="--inputs clean.json url",
        )
    if not (options.output or options.save_fingerprints):
        raise UsageError("nothing would be kept", do="--output FILE, or --save-fingerprints FILE")
    if options.heuristic_iter < -1 or options.heuristic_iter == 0:
        raise SettingsError(f"--heuristic-iter {options.heuristic_iter}: -1 (all), or 1 and more")
    if not 0 <= options.jaccard_threshold < 1:
        raise SettingsError(f"--jaccard-threshold {options.jaccard_threshold}: 0 and more, below 1")
    if options.workers is not None and options.workers < 1:
        raise SettingsError(f"--workers {options.workers}: at least 1")
    _ = options.signing


def read(path: str, key: str, into: Collection) -> None:
    """Sign the documents of a file. Raises DataError if none has the key and a text."""
    left_out, names, texts, taken = LeftOut(path), [], [], 0
    for number, _, document in documents(path, left_out):
        name, text = document.get(key), document.get("text")
        if isinstance(name, (bool, float, list, dict)) or name in (None, ""):
            left_out.add(number, f"no {key}")
        elif not isinstance(text, str):
            left_out.add(number, "no text")
        else:
            names.append(str(name))
            texts.append(text)
            taken += 1
        if len(names) == _BATCH:
            into.add(names, texts)
            names, texts = [], []
    into.add(names, texts)
    left_out.tell()
    if not taken and left_out.counts:
        raise DataError(f"{path}: no document has both {key} and text", do="--inputs FILE KEY: KEY names a document")


# ---------------------------------------------------------------------------------------------------------- the pairs


def similar_pairs(collection: Collection, options: FindOptions) -> Iterator[tuple[dict, int]]:
    """Yield (a line of output or {}, pairs compared for it), band by band; each pair is in one line at most."""
    work = _Work(collection.texts, collection.all_signatures(), collection.how, options)
    written: set[tuple[int, int]] = set()
    processes = min(options.workers or cores(), work.how.bands) if options.jaccard_parallel else 1
    killed = Failure("a process was killed", "nothing was written", "if memory ran out, give fewer --workers")
    for groups in in_order(work.band, ((band,) for band in range(work.how.bands)), processes, killed):
        for first, others, compared in groups:
            new = [(other, similarity) for other, similarity in others if (first, other) not in written]
            written.update((first, other) for other, _ in new)
            line = [{collection.names[other]: similarity} for other, similarity in new]
            yield ({collection.names[first]: line} if line else {}), compared


class _Work:
    """The texts and their band keys, which decide the comparisons."""

    def __init__(self, texts: list[str], signatures: np.ndarray, how: Signing, options: FindOptions):
        self.how, self.options = how, options
        self._full = np.array([bool(text) for text in texts], bool)
        self._keys = list(band_keys(signatures, how))
        self._set = lru_cache(_SETS)(lambda number: shingle_set(texts[number], "characters", WIDTH))

    def band(self, band: int) -> list[tuple[int, list[tuple[int, float]], int]]:
        """[(first document, [(similar one, similarity)], pairs compared)] for each round of each bucket."""
        return [one for bucket in self._buckets(band) for one in self._rounds(bucket)]

    def _buckets(self, band: int) -> Iterator[list[int]]:
        """Groups of documents with the same key, in order."""
        rows = np.flatnonzero(self._full)
        keys = self._keys[band][rows]
        order = np.argsort(keys, kind="stable")
        groups = np.split(rows[order], np.flatnonzero(np.diff(keys[order])) + 1)
        return iter(sorted(group.tolist() for group in groups if len(group) > 1))

    def _rounds(self, bucket: list[int]) -> Iterator[tuple[int, list[tuple[int, float]], int]]:
        left, done = bucket, 0
        while len(left) > 1 and done != self.options.heuristic_iter:
            first, *others = left
            measured = [(other, self._similarity(first, other)) for other in others]
            similar = [pair for pair in measured if pair[1] > self.options.jaccard_threshold]
            yield first, similar, len(others)
            left = [other for other, similarity in measured if similarity <= self.options.jaccard_threshold]
            done += 1

    def _similarity(self, one: int, other: int) -> float:
        return round(jaccard(self._set(one), self._set(other), self.options.jaccard), 6)


# ------------------------------------------------------------------------------------------------------- fingerprints


def save(path: str, collection: Collection) -> None:
    """Save names, texts and signatures as plain arrays."""
    arrays = dict(
        facts=np.frombuffer(json.dumps(collection.how.facts(), sort_keys=True).encode(), np.uint8),
        signatures=collection.all_signatures(),
    )
    for name, texts in dict(names=collection.names, texts=collection.texts).items():
        data = [encoded(text) for text in texts]
        arrays[name] = np.frombuffer(b"".join(data), np.uint8)
        arrays[f"{name}_ends"] = np.cumsum([0, *map(len, data)], dtype=np.int64)
    with whole_file(path) as file:
        np.savez(file, **arrays)


def load(path: str, into: Collection) -> None:
    """Add the documents of a file of fingerprints. Raises DataError for another file, or other signing options."""
    do = f"make it with {PROG} --save-fingerprints; pickles of Megatron-LM can run code and are not read"
    if not Path(path).is_file():
        raise missing_file(path, "--load-fingerprints")
    try:
        with np.load(io.FileIO(path), allow_pickle=False) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            names, texts = (_texts(arrays[name], arrays[f"{name}_ends"]) for name in ("names", "texts"))
            signatures = arrays["signatures"]
            if not len(names) == len(texts) == len(signatures):
                raise ValueError("its arrays are of different lengths")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"--load-fingerprints {path}: no file of fingerprints", str(error), do) from None
    wanted = into.how.facts()
    if facts != wanted:
        differs = ", ".join(
            f"{key} {facts.get(key)} (now {wanted[key]})" for key in wanted if facts.get(key) != wanted[key]
        )
        raise DataError(
            f"--load-fingerprints {path}: signed with {differs}", do="give the same --num-bands, --num-seeds, --seed"
        )
    into.add(names, texts, signatures)


def _texts(data: np.ndarray, ends: np.ndarray) -> list[str]:
    whole = data.tobytes()
    return [whole[start:end].decode("utf-8", "surrogatepass") for start, end in zip(ends.tolist(), ends[1:].tolist())]


if __name__ == "__main__":
    run_main(main)
