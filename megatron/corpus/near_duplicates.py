# SPDX-License-Identifier: Apache-2.0
"""Remove near-duplicates: of documents with similar sets of shingles (MinHash and banding) only the first is kept.

    sign        per shard                signatures, and the keys of their bands, sorted
    number      one task                 the number of documents of each shard
    pair        per (band, partition)    pairs of documents with the same key
    compare     per range of documents   pairs of all bands, each once: similar by their signatures, or doubtful
    read        per shard                sets of shingles of documents in doubtful pairs and in examples
    decide      per range of documents   doubtful pairs by their texts; examples
    group       one task                 groups of documents (union-find), and the removed documents of each shard
    remove      per shard                the shard without them

The result only depends on the documents, their order and the options: not on the number of shards, partitions, ranges or
workers, nor on the memory of a task. See docs/corpus_duplicates.md.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron.corpus.duplicates import compare
from megatron.corpus.duplicates.pairs import (
    PAIRS,
    RECORD,
    DocumentGroups,
    candidate_pairs,
    load_pairs,
    merged,
    save_pairs,
)
from megatron.corpus.duplicates.shards import (
    Numbering,
    PieceFile,
    Removed,
    copy_without,
    read_piece,
    saved_below,
    text_sizes,
)
from megatron.corpus.duplicates.signatures import Fingerprints, Signing, write_fingerprints
from megatron.corpus.stage import Counts, Made, StagePhase, of_each_shard, options_of
from megatron.errors import SettingsError

VERSION = "2"  # of the output of this stage's tasks
REASON = "near_duplicate"
COUNTS = "counts.npy"  # output of `number` for each shard: documents, and those with a signature
REMOVED = "removed"  # output of `group` for each shard
PRESETS: dict[str, dict[str, Any]] = {
    # Megatron-LM's find_duplicates.py: shingles of 5 characters, 100 seeds in 10 bands, pairs above one half
    "megatron": dict(shingle="characters", width=5, bands=10, rows=10, threshold=0.5),
    # FineWeb: 5 words, 14 bands of 8, at least three quarters
    "fineweb": dict(shingle="words", width=5, bands=14, rows=8, threshold=0.75),
    # NeMo Curator: 24 characters, 20 bands of 13, at least .8
    "curator": dict(shingle="characters", width=24, bands=20, rows=13, threshold=0.8),
}
GROUP_BYTES = 8  # of memory per document in `group`: its parent, and the size of its group
MOST_RANGES = 256  # tasks of the phases `compare` and `decide`


@dataclass(frozen=True)
class NearDuplicateOptions:
    """Options of the stage. A preset sets those that are not given."""

    preset: Literal["megatron", "fineweb", "curator"] = "megatron"
    shingle: Literal["characters", "words"] = "characters"
    width: int = 5
    bands: int = 10
    rows: int = 10
    kind: Literal["minhash", "one_permutation"] = "minhash"
    seed: int = 1234
    threshold: float = 0.5  # the least similarity (Jaccard) of near-duplicates
    verify: Literal["signatures", "doubtful", "texts"] = "doubtful"  # see `compare.doubtful`
    links: int = 4  # documents of the same key that each is compared with, in addition to the first
    # Folders of fingerprints of an earlier corpus, which does not change
    against: list[str] = field(default_factory=list)
    examples: int = 3  # pairs of each of 20 similarities for the report
    text_key: str = "text"
    documents_per_shard: int = 100_000  # an estimate, for the number of partitions; memory is bounded in any case
    partitions: int = 0  # 0: by the memory of a task

    def __post_init__(self):
        _ = self.signing  # checks its options
        if not 0 < self.threshold <= 1:
            raise SettingsError(f"threshold {self.threshold}: above 0, at most 1")
        for name, least in dict(links=1, examples=0, documents_per_shard=1, partitions=0).items():
            if getattr(self, name) < least:
                raise SettingsError(f"{name} {getattr(self, name)}: at least {least} is needed")

    @property
    def signing(self) -> Signing:
        return Signing(**{one.name: getattr(self, one.name) for one in fields(Signing)})


OPTIONS = NearDuplicateOptions  # the engine checks a recipe's options with it


def read_options(options: Mapping[str, Any]) -> NearDuplicateOptions:
    """The stage's options, with those of the preset. Raises SettingsError."""
    preset = options.get("preset", NearDuplicateOptions.preset)
    return options_of(NearDuplicateOptions, {**PRESETS[preset], **options})


def phases(options: Mapping[str, Any], shards: int, memory: int) -> list[StagePhase]:
    """The phases of this stage. memory: bytes that a task may take."""
    asked = read_options(options)
    Fingerprints(_earlier(asked), asked.signing)  # raises now for missing or incompatible files, not in a worker
    partitions = asked.partitions or max(1, -(-shards * asked.documents_per_shard * RECORD // memory))
    ranges = min(max(shards, partitions), MOST_RANGES)
    keys = [
        dict(band=band, partition=partition, of_partitions=partitions)
        for band in range(asked.bands)
        for partition in range(partitions)
    ]

    def own(tasks: Callable[[Made], Iterable[Mapping[str, Any]]]) -> Callable[[Made], list[Mapping[str, Any]]]:
        return lambda made: [
            dict(task, memory=memory, shards=len(made["documents"]), ranges=ranges) for task in tasks(made)
        ]

    each_key = own(lambda made: keys)
    each_range = own(lambda made: [dict(range=number) for number in range(ranges)])
    each_shard = own(lambda made: [dict(shard=number) for number in range(len(made["documents"]))])
    return [
        StagePhase("sign", sign, of_each_shard),  # reused when shards are added
        StagePhase("number", number, lambda made: [[made["sign"]]]),
        StagePhase("pair", pair, lambda made: [[*made["number"], made["sign"]] for _ in keys], each_key),
        StagePhase(
            "compare",
            compare_pairs,
            lambda made: [[*made["number"], made["sign"], made["pair"]] for _ in range(ranges)],
            each_range,
        ),
        StagePhase(
            "read",
            read_texts,
            lambda made: [[shard, *made["number"], made["compare"]] for shard in made["documents"]],
            each_shard,
        ),
        StagePhase("decide", decide, lambda made: [[folder, made["read"]] for folder in made["compare"]], each_range),
        StagePhase(
            "group",
            group,
            lambda made: [[*made["number"], made["compare"], made["decide"]]],
            own(lambda made: [dict()]),
            document_bytes=GROUP_BYTES,
        ),
        StagePhase(
            "remove",
            remove,
            lambda made: [[shard, *made["group"], *made["number"], made["sign"]] for shard in made["documents"]],
            each_shard,
        ),
    ]


def sign(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [shard] -> its fingerprints."""
    asked = read_options(options)
    return write_fingerprints(inputs[0], output, asked.signing, asked.text_key)


def number(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [fingerprints] -> the number of documents of each shard, those of an earlier corpus first.

    Other tasks read this one file instead of a file per shard.
    """
    asked = read_options(options)
    counts = Fingerprints([*_earlier(asked), *inputs], asked.signing).counts
    np.save(output / COUNTS, counts)
    return dict(documents=int(counts[:, 0].sum()))


def pair(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [numbers, fingerprints ...] -> pairs of documents with the same key, for a partition of a band."""
    asked = read_options(options)
    prints, earlier = _fingerprints(inputs, asked)
    band, partition, partitions = (options[name] for name in ("band", "partition", "of_partitions"))
    pairs, records = candidate_pairs(prints, band, partition, partitions, asked.links, earlier, options["memory"])
    save_pairs(output / PAIRS, pairs)
    return dict(records=records, pairs_of_bands=len(pairs))


def compare_pairs(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [numbers, fingerprints, pairs of all bands] -> pairs of a range of first documents, compared by signatures."""
    asked, of_pairs = read_options(options), 1 + options["shards"]
    prints, earlier = _fingerprints(inputs[:of_pairs], asked)
    result = compare.ComparedPairs(asked.signing, asked.threshold, asked.verify, asked.examples, earlier)
    first, end = (prints.numbering.documents * edge // options["ranges"] for edge in _edges(options["range"]))
    files = [folder / PAIRS for folder in inputs[of_pairs:]]
    batch = compare.pairs_in(options["memory"], asked.signing)
    for pairs in merged(files, first, end, batch):
        result.add(pairs, compare.estimates(prints, pairs))
    return result.write(output)


def read_texts(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [shard, numbers, compared pairs ...] -> the sets of shingles for `decide`."""
    asked = read_options(options)
    numbering, earlier = _numbering(inputs[1], options["shards"])
    first, end = (int(numbering.starts[edge + earlier]) for edge in _edges(options["shard"]))
    wanted = [compare.between(folder / "wanted.npy", first, end) for folder in inputs[2:]]
    wanted = np.unique(np.concatenate([np.zeros(0, np.int64), *wanted]))
    size = compare.write_sets(inputs[0], wanted, first, output, asked.signing, asked.text_key)
    return dict(texts_read=len(wanted), bytes_read=size)


def decide(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [compared pairs, sets of shingles ...] -> the near-duplicates among doubtful pairs; examples for the report."""
    asked, (folder, *sets) = read_options(options), inputs
    known = compare.ShingleStore(sets, options["memory"] // 2)
    pairs = np.asarray(load_pairs(folder / "doubtful.npy"))
    similar = known.similarity(pairs) >= asked.threshold
    save_pairs(output / "accepted.npy", pairs[similar])
    rows = compare.example_rows(folder, known)
    (output / "examples.json").write_text(json.dumps(rows) + "\n", encoding="utf-8")
    return dict(compared_by_text=len(pairs), accepted_by_text=int(similar.sum()))


def group(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [numbers, compared pairs ..., decided pairs ...] -> removed documents by shard, and the report's figures."""
    asked, shards, ranges = read_options(options), options["shards"], options["ranges"]
    numbering, earlier = _numbering(inputs[0], shards)
    compared, decided = inputs[1 : 1 + ranges], inputs[1 + ranges :]
    groups = DocumentGroups(numbering.documents)
    for folder in (*compared, *decided):
        groups.join(load_pairs(folder / "accepted.npy"))
    sizes = np.zeros(numbering.documents, np.uint32)
    removed = 0
    with PieceFile(output / REMOVED) as lists:  # one file: syncing a hundred thousand small ones is slow
        for shard in range(shards):
            first, end = (int(numbering.starts[edge + earlier]) for edge in _edges(shard))
            smallest = groups.smallest(first, end).astype(np.int64)
            np.add.at(sizes, smallest, np.uint32(1))
            rows = np.flatnonzero(smallest != np.arange(first, end))
            lists.add(Removed(rows, smallest[rows]).to_bytes())
            removed += len(rows)
    report = dict(
        groups=int((sizes > 1).sum()),
        largest_group=int(sizes.max(initial=0)),
        to_remove=removed,
        similarities=compare.pairs_by_similarity(compared),
        examples=compare.chosen_examples(decided, asked.examples),
    )
    content = dict(report, options=asdict(asked))
    (output / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return report


def remove(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [shard, removal lists, numbers, fingerprints ...] -> the shard without near-duplicates."""
    asked, shard = read_options(options), options["shard"]
    before, signed = _earlier(asked), inputs[3:]
    prints = Fingerprints([*before, *signed], asked.signing, np.load(inputs[2] / COUNTS))
    removed = Removed.from_bytes(read_piece(inputs[1] / REMOVED, shard))
    pairs = np.stack([removed.rows + prints.numbering.starts[len(before) + shard], removed.kept], 1)
    batch = compare.pairs_in(options["memory"], asked.signing)
    parts = [compare.estimates(prints, pairs[start : start + batch]) for start in range(0, len(pairs), batch)]
    removed.similarity = np.concatenate([np.zeros(0, np.float32), *parts])
    names = [*map(str, before), *range(options["shards"])]
    return copy_without(inputs[0], removed, text_sizes(signed[shard]), prints.numbering, names, REASON, output)


def _fingerprints(inputs: list[Path], asked: NearDuplicateOptions) -> tuple[Fingerprints, int]:
    """(fingerprints of the earlier corpus and of this one, documents of the earlier one), from [numbers, fingerprints]."""
    before, (numbers, *folders) = _earlier(asked), inputs
    prints = Fingerprints([*before, *folders], asked.signing, np.load(numbers / COUNTS))
    return prints, int(prints.numbering.starts[len(before)])


def _numbering(numbers: Path, shards: int) -> tuple[Numbering, int]:
    """(numbers of the documents of both corpora, number of shards of the earlier one)."""
    counts = np.load(numbers / COUNTS)
    return Numbering.of(counts[:, 0]), len(counts) - shards


def _earlier(asked: NearDuplicateOptions) -> list[Path]:
    return saved_below(asked.against, "signatures.bin", "sign")


def _edges(number: int) -> tuple[int, int]:
    return number, number + 1
