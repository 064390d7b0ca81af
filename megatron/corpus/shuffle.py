# SPDX-License-Identifier: Apache-2.0
"""Shuffle any number of documents through files, in the memory of a task.

A document's key is a hash of the seed and its place among all documents, counted over the shards in their order. The new
order is the order of the keys, so it does not depend on the cut into shards, the number of tasks or the memory. Equal
documents have different places, and so different keys.

    count      per shard       its number of documents
    places     one task        the place of the first document of each shard
    scatter    per shard       its documents by ranges of keys: partitions
               (several shards per task where there are very many)
    gather     per partition   its documents of all shards, sorted by key: one shard of the new order

A task of `scatter` writes its documents for all partitions into one file of pieces, with an index. A piece is a zstd frame
of records of one partition: key, place and length (8 bytes each) and the line without its newline.
"""

import json
import math
import os
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import Any, Optional

import numpy as np
import xxhash

from megatron.corpus.counts import text_bytes
from megatron.corpus.documents import ShardWriter, decode
from megatron.corpus.lines import lines
from megatron.corpus.stage import Counts, Made, StagePhase, TaskInputs, of_each_shard
from megatron.errors import DataError
from megatron.storage.durable import locked_folder, whole_file

VERSION = 2  # of the order, and of the files
SHARD_BYTES = 64_000_000  # assumed size of a shard
RECORD = struct.Struct("<QQQ")  # key, place, bytes of the line
MOST_SCATTERS = 1024  # tasks of `scatter`: each task of `gather` opens the files of all of them
OVERHEAD = 256  # bytes that Python needs for a record in addition to its line
PIECES, INDEX = "pieces.zst", "index.bin"
UNKNOWN = 64 << 30  # assumed bytes of stdin, for the number of partitions
PARTITION, OFFSET, STORED, SIZE, RECORDS = COLUMNS = range(5)  # of an index, sorted by partition


@dataclass(frozen=True)
class ShuffleOptions:
    """Options of the stage."""

    seed: int = 1234


OPTIONS = ShuffleOptions


def phases(options: Mapping[str, Any], shards: int, memory: int) -> list[StagePhase]:
    """The stage `shuffle`. options: those of ShuffleOptions.

    memory: bytes that a task may take. The number of shards stays the same, or grows where one would not fit; a partition
    that does not fit after all is read several times.
    """
    partitions = max(shards, fitting_partitions(shards * SHARD_BYTES, memory), 1)

    scatters = min(shards, MOST_SCATTERS)
    edges = [shards * n // scatters for n in range(scatters + 1)] if shards else [0]

    def split_of_scatter(made: Made) -> list[TaskInputs]:
        return [[*made["places"], *made["documents"][first:end]] for first, end in pairwise(edges)]

    def own_of_scatter(made: Made) -> list[Mapping[str, Any]]:
        return [dict(shard=first, partitions=partitions, memory=memory) for first in edges[:-1]]

    def split_of_gather(made: Made) -> list[TaskInputs]:
        return [[made["scatter"]] for _ in range(partitions)]

    def own_of_gather(made: Made) -> list[Mapping[str, Any]]:
        return [dict(partition=n, memory=memory) for n in range(partitions)]

    return [
        StagePhase("count", count, of_each_shard, lambda made: [dict(memory=memory)] * len(made["documents"])),
        StagePhase("places", places, lambda made: [[made["count"]]]),
        StagePhase("scatter", scatter, split_of_scatter, own_of_scatter),
        StagePhase("gather", gather, split_of_gather, own_of_gather),
    ]


def fitting_partitions(total: int, memory: int) -> int:
    """Number of parts of the text that fit into the memory one by one, including Python's overhead."""
    return math.ceil(total / (memory / 4))


def longest_line(memory: int) -> int:
    """Maximal bytes of a document for a task with this memory."""
    return memory // 8


# ---- the tasks ---------------------------------------------------------------------------------------------------------


def count(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Write the number of documents of a shard."""
    [shard] = inputs
    documents = sum(1 for _ in lines(shard, longest_line(options["memory"])))
    (output / "count.json").write_text(json.dumps(documents))
    return {}


def places(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Write the place of the first document of each shard."""
    counts = [json.loads((folder / "count.json").read_text()) for folder in inputs]
    np.save(output / "places.npy", np.cumsum([0, *counts])[:-1])
    return {}


def scatter(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Write the documents of consecutive shards by ranges of their keys."""
    folder, *shards = inputs
    first = int(np.load(folder / "places.npy", mmap_mode="r")[options["shard"]])
    most = longest_line(options["memory"])
    numbered = enumerate(chain.from_iterable(lines(shard, most) for shard in shards), first)
    seed = int(options.get("seed", ShuffleOptions.seed))
    scatter_lines(numbered, output, seed, options["partitions"], options["memory"])
    return {}


def gather(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Write a partition's documents in their new order: a shard, which may be empty."""
    size = 0
    with ShardWriter(output / f"part-{options['partition']:06}.jsonl.zst", level=3, checksum=False) as out:
        for line in gather_lines(inputs, options["partition"], options["memory"]):
            out.write_line(line)
            size += text_bytes(decode(line)["text"])
    return dict(documents_in=out.documents, bytes_in=size, documents=out.documents, bytes=size)


# ---- the work ----------------------------------------------------------------------------------------------------------


def key_of(seed: int, place: int) -> int:
    """The key of a document by its place: 64 pseudo-random bits that define the new order."""
    return xxhash.xxh3_64_intdigest(place.to_bytes(8, "little"), seed % 2**64)


def scatter_lines(numbered: Iterable[tuple[int, bytes]], output: Path, seed: int, partitions: int, memory: int) -> None:
    """Write the file of pieces, and its index, for lines as (place, line)."""
    import zstandard

    packer, index = zstandard.ZstdCompressor(level=1), []
    held: list[list[bytes]] = [[] for _ in range(partitions)]
    size = 0
    with open(output / PIECES, "wb") as out:

        def flush() -> None:
            for partition, records in enumerate(held):
                if records:
                    piece = b"".join(records)
                    stored, offset = packer.compress(piece), out.tell()
                    out.write(stored)
                    index.append((partition, offset, len(stored), len(piece), len(records) // 2))
                    records.clear()

        for place, line in numbered:
            key = key_of(seed, place)
            held[key * partitions >> 64] += (RECORD.pack(key, place, len(line)), line)
            size += len(line) + OVERHEAD
            if size > memory // 3:
                flush()
                size = 0
        flush()
    rows = np.array(index, "<i8").reshape(-1, len(COLUMNS))
    rows[np.argsort(rows[:, PARTITION], kind="stable")].tofile(output / INDEX)


def gather_lines(folders: list[Path], partition: int, memory: int) -> Iterator[bytes]:
    """The lines of a partition in the order of their keys.

    If they do not fit into the memory they are read several times, for one range of keys at a time.
    """
    pieces = []
    for folder in folders:
        pieces += [(folder, row) for row in _rows_of(folder / INDEX, partition).tolist()]
    needed = sum(row[SIZE] + OVERHEAD * row[RECORDS] for _, row in pieces)
    rounds = max(1, math.ceil(needed / (memory / 2)))
    if rounds == 1:
        yield from _sorted(pieces, 0, 1 << 64)
        return
    low, high = _range_of(pieces)
    edges = [low + (high - low) * number // rounds for number in range(rounds + 1)]
    for begin, end in zip(edges, edges[1:]):
        yield from _sorted(pieces, begin, end)


def _rows_of(path: Path, partition: int) -> np.ndarray:
    """The rows of a partition by binary search in the file: an index may have a row for every partition."""
    if not path.stat().st_size:
        return np.zeros((0, len(COLUMNS)), "<i8")
    index = np.memmap(path, "<i8", "r").reshape(-1, len(COLUMNS))
    start, stop = np.searchsorted(index[:, PARTITION], [partition, partition + 1])
    return np.array(index[start:stop])


def _sorted(pieces: list, begin: int, end: int) -> Iterator[bytes]:
    """The lines with keys in [begin, end), in order; places decide between equal keys."""
    records = [record for record in _records(pieces) if begin <= record[0] < end]
    records.sort(key=lambda record: record[:2])
    for _, _, line in records:
        yield line


def _range_of(pieces: list) -> tuple[int, int]:
    low, high = 1 << 64, 0
    for key, _, _ in _records(pieces):
        low, high = min(low, key), max(high, key + 1)
    return low, high


def _records(pieces: list) -> Iterator[tuple[int, int, bytes]]:
    """(key, place, line) of all pieces, one piece in memory at a time. Raises DataError if a piece is damaged."""
    import zstandard

    unpacker = zstandard.ZstdDecompressor()
    for folder, rows in groupby(pieces, lambda piece: piece[0]):
        with open(folder / PIECES, "rb") as file:
            for _, row in rows:
                file.seek(row[OFFSET])
                stored = file.read(row[STORED])
                try:
                    piece, at = unpacker.decompress(stored, max_output_size=row[SIZE]), 0
                except zstandard.ZstdError as error:
                    do = "remove it and run the same command again"
                    raise DataError(f"{folder / PIECES} is damaged", str(error), do) from None
                while at < len(piece):
                    key, place, length = RECORD.unpack_from(piece, at)
                    at += RECORD.size + length
                    yield key, place, piece[at - length : at]


# -- files --------------------------------------------------------------------------------------------------------------


def shuffle_files(files: list[str], target: Optional[Path], seed: int, memory: int, most: Optional[int] = None) -> None:
    """Write the shuffled lines of the files to `target`, which appears when it is complete; None: stdout."""
    sizes = [os.path.getsize(file) if os.path.isfile(file) else UNKNOWN for file in files]
    partitions = min(4096, max(1, fitting_partitions(sum(sizes), memory)))  # more if compressed: gathered in rounds
    temporary = (
        tempfile.TemporaryDirectory(prefix="megatron-shuf-")
        if target is None
        else locked_folder(target.with_name(f".{target.name}.shuf"), target, "shuffle")
    )
    with temporary as name:
        folder = Path(name)
        numbered = enumerate(chain.from_iterable(lines(file, longest_line(memory)) for file in files))
        scatter_lines(numbered, folder, seed, partitions, memory)
        ordered = chain.from_iterable(gather_lines([folder], number, memory) for number in range(partitions))
        with nullcontext(sys.stdout.buffer) if target is None else whole_file(target) as out:
            for line in islice(ordered, most):
                out.write(line + b"\n")
            out.flush()
