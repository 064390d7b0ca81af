# SPDX-License-Identifier: Apache-2.0
"""Remove exact duplicates: of documents with the same text only the first one is kept.

    digest    per shard        a 128-bit hash of each text, sorted
    number    one task         the number of documents of each shard
    match     per partition    documents with the hash of an earlier one
    remove    per shard        the shard without them

With `normalize: space`, runs of white space count as one blank; with `words`, texts with the same words in lower case are
the same. `against` names folders of `digest` of an earlier corpus, whose documents are removed too. The probability that
two different ones among 10^9 documents have the same hash is 10^-20.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from megatron.corpus.duplicates.pairs import (
    RunReader,
    RunWriter,
    between_pairs,
    each_partition,
    fitting_ranges,
    load_pairs,
    partition_of_keys,
    save_pairs,
)
from megatron.corpus.duplicates.shards import (
    Numbering,
    Removed,
    blocks_of_lines,
    copy_without,
    encoded,
    numbering_of,
    read_facts,
    saved_below,
    text_of,
    text_sizes,
)
from megatron.corpus.duplicates.shingles import codes_of, word_bounds
from megatron.corpus.stage import Counts, Made, StagePhase, of_each_shard, options_of
from megatron.errors import DataError, SettingsError

VERSION = "2"  # of the output of this stage's tasks
REASON = "exact_duplicate"
STARTS = "starts.npy"  # output of `number`
RECORD = 96  # bytes of memory per document in `match`


@dataclass(frozen=True)
class ExactDuplicateOptions:
    """Options of the stage."""

    normalize: Literal["none", "space", "words"] = "none"
    against: list[str] = field(default_factory=list)
    text_key: str = "text"
    documents_per_shard: int = 100_000  # an estimate, for the number of partitions
    partitions: int = 0  # 0: by the memory of a task

    def __post_init__(self):
        if min(self.documents_per_shard, self.partitions + 1) < 1:
            raise SettingsError("documents_per_shard starts at 1, partitions at 0")


OPTIONS = ExactDuplicateOptions


def phases(options: Mapping[str, Any], shards: int, memory: int) -> list[StagePhase]:
    """The phases of this stage. memory: bytes that a task may take"""
    asked = options_of(OPTIONS, options)
    _check_alike(_earlier(asked), asked)
    partitions = asked.partitions or max(1, -(-shards * asked.documents_per_shard * RECORD // memory))

    def each_shard(made: Made) -> list[dict[str, Any]]:
        return [dict(shard=number, shards=len(made["documents"])) for number in range(len(made["documents"]))]

    return [
        StagePhase("digest", digest, of_each_shard),
        StagePhase(
            "match",
            match,
            lambda made: [[made["digest"]] for _ in range(partitions)],
            each_partition(partitions, memory),
        ),
        StagePhase("number", number, lambda made: [[made["digest"]]]),
        StagePhase(
            "remove",
            remove,
            lambda made: [
                [shard, own, *made["number"], made["match"]] for shard, own in zip(made["documents"], made["digest"])
            ],
            each_shard,
        ),
    ]


def digest(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [shard] -> the hashes of its texts."""
    asked = options_of(OPTIONS, options)
    writer = RunWriter(output, dict(checks="<u8", rows="<u4"))
    documents, signed = 0, 0
    with open(output / "sizes.bin", "wb") as sizes:
        marks, rows = [], []
        for lines in blocks_of_lines(inputs[0]):
            texts = [text_of(line, asked.text_key) for line in lines]
            sizes.write(np.array([len(encoded(text or "")) for text in texts], "<u4"))
            for row, text in enumerate(texts, documents):
                if text is not None:
                    marks.append(xxhash.xxh3_128_digest(normalized(text, asked.normalize)))
                    rows.append(row)
            documents += len(texts)
    halves = np.frombuffer(b"".join(marks), ">u8").reshape(-1, 2).astype(np.uint64)
    writer.add(halves[:, 0], checks=halves[:, 1], rows=np.array(rows, np.uint32))
    signed = len(rows)
    writer.close(documents=documents, normalize=asked.normalize)
    return dict(documents=documents, without_text=documents - signed)


def normalized(text: str, how: str) -> bytes:
    """The part of a text that is compared.

    >>> normalized(" A  b. ", "space"), normalized("A, b.", "words")
    (b'A b.', b'a\\x00b')
    """
    if how == "space":
        text = " ".join(text.split())
    elif how == "words":
        text = text.lower()
        starts, stops = word_bounds(codes_of(text))
        text = "\0".join(text[start:stop] for start, stop in zip(starts.tolist(), stops.tolist()))
    return encoded(text)


def match(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [hashes of all shards] -> (document, first document with its text) for a partition."""
    asked = options_of(OPTIONS, options)
    before = _earlier(asked)
    folders = [*before, *inputs]
    reader, numbering = RunReader(folders), numbering_of(folders)
    first, end = partition_of_keys(options["partition"], options["of_partitions"])
    matches = []
    for low, high in fitting_ranges(reader.count, first, end, max(1, options["memory"] // RECORD)):
        owners, columns = reader.read(low, high)
        documents = numbering.starts[owners] + columns["rows"]
        order = np.lexsort((documents, columns["checks"], columns["keys"]))
        keys, checks, documents = columns["keys"][order], columns["checks"][order], documents[order]
        again = np.zeros(len(order), bool)
        again[1:] = (keys[1:] == keys[:-1]) & (checks[1:] == checks[:-1])
        kept = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
        matches.append(np.stack([documents[again], documents[kept[again]]], 1))
    pairs = np.concatenate(matches)
    pairs = pairs[pairs[:, 0] >= numbering.starts[len(before)]]
    save_pairs(output / "duplicates.npy", pairs[np.argsort(pairs[:, 0])])
    return dict(to_remove=len(pairs))


def number(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [hashes of all shards] -> the number of the first document of each, those of an earlier corpus first."""
    np.save(output / STARTS, numbering_of([*_earlier(options_of(OPTIONS, options)), *inputs]).starts)
    return {}


def remove(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [shard, its hashes, numbers, duplicates ...] -> the shard without duplicates."""
    asked, shard, shards = options_of(OPTIONS, options), options["shard"], options["shards"]
    before = _earlier(asked)
    numbering = Numbering(np.load(inputs[2] / STARTS))
    removed = removed_of(inputs[3:], numbering, shard + len(before))
    names = [*map(str, before), *range(shards)]
    return copy_without(inputs[0], removed, text_sizes(inputs[1]), numbering, names, REASON, output)


def removed_of(folders: list[Path], numbering: Numbering, shard: int) -> Removed:
    """The removed documents of a shard, from the tasks of `match`."""
    first, end = numbering.starts[shard : shard + 2].tolist()
    pairs = [between_pairs(load_pairs(folder / "duplicates.npy"), first, end) for folder in folders]
    pairs = np.concatenate([np.zeros((0, 2), np.int64), *pairs])
    pairs = pairs[np.argsort(pairs[:, 0])]
    return Removed(pairs[:, 0] - first, pairs[:, 1])


def _check_alike(folders: list[Path], asked: ExactDuplicateOptions) -> None:
    """Raise DataError where the texts of earlier hashes were normalized in another way."""
    for folder in folders:
        how = read_facts(folder).get("normalize")
        if how != asked.normalize:
            what = f"{folder}: made with normalize {how} (now {asked.normalize})"
            raise DataError(what, do="use the same options, or digest the earlier corpus again")


def _earlier(asked: ExactDuplicateOptions) -> list[Path]:
    return saved_below(asked.against, "checks.bin", "digest")
