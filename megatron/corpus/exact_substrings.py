# SPDX-License-Identifier: Apache-2.0
"""Remove exact substrings: cut repeated runs of at least `length` tokens (or bytes), except their first occurrence.

    find     per shard       a suffix array of each block of documents: windows of `length` units that repeat in it;
                             a hash of each other window, sorted
    match    per partition   windows with the hash of an earlier one, over all blocks and shards
    cut      per shard       the shard without the repeated windows

A token is a run of letters and digits, another character that is no white space, or one character of a script without
spaces; white space between tokens does not count. `unit: bytes` takes the text as it is. The first occurrence of a window
in the order of documents stays: the result depends on neither shards nor blocks nor partitions. Blocks are as large as the
memory of a task allows. Lee et al. 2021, "Deduplicating training data makes language models better", with a length of 50
tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np

from megatron.corpus.documents import CUT, DROPPED, SHARD, ShardWriter, encode, names_of, note_of
from megatron.corpus.duplicates.pairs import RunReader, RunWriter, each_partition, fitting_ranges, partition_of_keys
from megatron.corpus.duplicates.shards import blocks_of_lines, document_of, encoded, fates
from megatron.corpus.duplicates.shingles import codes_of, span_hashes, window_hashes, word_bounds
from megatron.corpus.stage import Counts, Made, StagePhase, of_each_shard, options_of
from megatron.errors import MissingPackage, SettingsError

VERSION = "2"  # of the output of this stage's tasks
REASON = "exact_substring"
RECORD = 80  # bytes of memory per window in `match`
UNIT_BYTES = dict(tokens=112, bytes=80)  # bytes of memory per unit in `find`, including the suffix array
_SHOWN = 120  # characters of cut text in a note


@dataclass(frozen=True)
class ExactSubstringOptions:
    """Options of the stage."""

    length: int = 50  # the least length to cut, in units
    unit: Literal["tokens", "bytes"] = "tokens"
    # drop: drop documents of which at least `drop_share` repeats, and keep the others whole
    action: Literal["cut", "drop"] = "cut"
    drop_share: float = 0.5
    text_key: str = "text"
    shard_mb: float = 64.0  # an estimate, for the number of partitions
    partitions: int = 0  # 0: by the memory of a task

    def __post_init__(self):
        if not 2 <= self.length <= 1_000_000:
            raise SettingsError(f"length {self.length}: 2 to 1,000,000 {self.unit}")
        if not 0 < self.drop_share <= 1 or self.shard_mb <= 0 or self.partitions < 0:
            raise SettingsError("drop_share is above 0 and at most 1, shard_mb above 0, partitions from 0")


OPTIONS = ExactSubstringOptions


def phases(options: Mapping[str, Any], shards: int, memory: int) -> list[StagePhase]:
    """The phases of this stage. memory: bytes that a task may take."""
    asked = options_of(OPTIONS, options)
    _suffix_arrays()
    units = asked.shard_mb * 1e6 / (5 if asked.unit == "tokens" else 1)
    partitions = asked.partitions or max(1, -int(-shards * units * RECORD // memory))

    return [
        StagePhase("find", find, of_each_shard, lambda made: [dict(memory=memory) for _ in made["documents"]]),
        StagePhase(
            "match", match, lambda made: [[made["find"]] for _ in range(partitions)], each_partition(partitions, memory)
        ),
        StagePhase(
            "cut",
            cut,
            lambda made: [[shard, own, made["match"]] for shard, own in zip(made["documents"], made["find"])],
            lambda made: [dict(shard=number) for number in range(len(made["documents"]))],
        ),
    ]


# ------------------------------------------------------------------------------------------------------------ phases


def find(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [shard] -> windows that repeat within a block, and the hashes of all others, once per block."""
    asked = options_of(OPTIONS, options)
    writer = RunWriter(output, dict(places="<u4"))
    repeated, start, windows = [np.zeros(0, np.int64)], 0, 0
    for hashes, ends in _blocks(inputs[0], asked, max(1, options["memory"] // UNIT_BYTES[asked.unit])):
        whole = whole_windows(ends, asked.length)
        again = repeats(hashes, whole, asked.length)
        repeated.append(start + np.flatnonzero(again))
        first = np.flatnonzero(whole & ~again)
        if len(first):
            writer.add(window_hashes(hashes, asked.length)[first], places=start + first)
        windows += int(whole.sum())
        start += len(hashes)
    np.save(output / "repeats.npy", np.concatenate(repeated).astype("<i8"))
    writer.close(units=start)
    return dict(units=start, windows=windows, repeated_in_block=sum(map(len, repeated)))


def match(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [windows of all shards] -> windows of a partition with an earlier occurrence, [2, n]: shard, place; sorted."""
    reader = RunReader(inputs)
    first, end = partition_of_keys(options["partition"], options["of_partitions"])
    repeated = [np.zeros((2, 0), np.int64)]
    for low, high in fitting_ranges(reader.count, first, end, max(1, options["memory"] // RECORD)):
        owners, columns = reader.read(low, high)
        keys, places = columns["keys"], columns["places"].astype(np.int64)
        order = np.lexsort((places, owners, keys))
        again = order[1:][keys[order[1:]] == keys[order[:-1]]]
        repeated.append(np.stack([owners[again], places[again]]))
    pairs = np.concatenate(repeated, 1)
    pairs = pairs[:, np.lexsort((pairs[1], pairs[0]))]
    np.save(output / "repeats.npy", pairs)
    return dict(repeated_elsewhere=pairs.shape[1])


def cut(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Task [shard, its windows, repeated windows ...] -> the shard without repeated windows."""
    asked = options_of(OPTIONS, options)
    shard, own, *matched = inputs
    covered = _Cover(own, matched, options["shard"], asked.length)
    counts = dict(cut=0, passages=0, bytes_cut=0)
    sizes, dropped = [], []
    with (
        ShardWriter(output / SHARD, checksum=False) as kept,
        open(output / DROPPED, "wb") as notes_dropped,
        open(output / CUT, "wb") as notes_cut,
    ):
        for row, line, document, text in _documents(shard, asked):
            spans = [] if text is None else covered.next(text, asked.unit)
            left, repeated = decide(text or "", spans, asked)
            sizes.append(len(encoded(text or "")))
            if left is None:
                dropped.append(row)
                notes_dropped.write(_note(row, document, repeated, text, spans, asked.unit))
                continue
            if spans and asked.action == "cut":
                notes_cut.write(_note(row, document, repeated, text, spans, asked.unit))
                counts["cut"] += 1
                counts["passages"] += len(spans)
                counts["bytes_cut"] += sizes[-1] - len(encoded(left))
                line = encode({**document, asked.text_key: left})
            kept.write_line(line)
    totals = fates(np.array(sizes, np.int64), np.array(dropped, np.int64), REASON)
    totals["bytes"] -= counts["bytes_cut"]
    return dict(totals, **counts)


def decide(text: str, spans: Sequence, asked: ExactSubstringOptions) -> tuple[Optional[str], float]:
    """(what stays of a text, None to drop its document; the share of the text in the repeated `spans`)."""
    share = _share(text, spans, asked.unit)
    if not spans or asked.action == "drop":
        return None if spans and share >= asked.drop_share else text, share
    left = _without(text, spans, asked.unit)
    return left if left.strip() else None, share


def explain(made: Made, shard: int, row: int, document: dict, options: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """The fate of a document: dict(document=None or the changed one, reason, figures); None if it is unchanged."""
    asked = options_of(OPTIONS, options)
    if (note := note_of(made["cut"][shard], row)) is None:
        return None
    left, _ = decide(document[asked.text_key], note["spans"], asked)
    figures = dict(repeated=note["repeated"], begins=note["begins"])
    changed = None if left is None else {**document, asked.text_key: left}
    return dict(document=changed, reason=note["reason"], figures=figures)


# -------------------------------------------------------------------------------------------------- units of documents


def _documents(shard: Path, asked: ExactSubstringOptions) -> Iterator[tuple[int, bytes, dict, Optional[str]]]:
    """(row, line, document, text or None) of each line of a shard."""
    row = 0
    for lines in blocks_of_lines(shard):
        for line in lines:
            document = document_of(line)
            text = document.get(asked.text_key) if document is not None else None
            yield row, line, document or {}, text if isinstance(text, str) else None
            row += 1


def _blocks(shard: Path, asked: ExactSubstringOptions, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of documents with at most `most` units, as (units, ends of documents)."""
    held, count = [], 0
    for _, _, _, text in _documents(shard, asked):
        if text is None:
            continue
        units = units_of(text, asked.unit)[0]
        if held and count + len(units) > most:
            yield _joined(held)
            held, count = [], 0
        held.append(units)
        count += len(units)
    if held:
        yield _joined(held)


def _joined(held: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(held), np.cumsum([0, *map(len, held)])


def units_of(text: str, unit: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(units as numbers, their starts, their ends): tokens in characters, bytes in bytes.

    >>> units, starts, stops = units_of("Is it? Is", "tokens")
    >>> starts.tolist(), stops.tolist(), bool(units[0] == units[3])
    ([0, 3, 5, 7], [2, 5, 6, 9], True)
    """
    if unit == "bytes":
        data = np.frombuffer(encoded(text), np.uint8)
        return data, np.arange(len(data)), np.arange(1, len(data) + 1)
    codes = codes_of(text)
    starts, stops = word_bounds(codes, punctuation=True)
    return span_hashes(codes, starts, stops), starts, stops


# --------------------------------------------------------------------------------------------- windows that repeat


def _suffix_arrays():
    try:
        import pydivsufsort
    except ImportError as error:
        do = "pip install '.[corpus]' (or pydivsufsort)"
        raise MissingPackage("exact substrings need the package pydivsufsort", str(error), do) from None
    return pydivsufsort


def repeats(units: np.ndarray, whole: np.ndarray, length: int) -> np.ndarray:
    """Whether the window of `length` units at each place occurs earlier, [units] bool; only `whole` ones count.

    In a suffix array, places with the same first `length` units are adjacent.
    """
    result = np.zeros(len(units), bool)
    if len(units) <= length:
        return result
    library = _suffix_arrays()
    if units.dtype != np.uint8:
        units = np.unique(units, return_inverse=True)[1].astype(np.uint32)
    units = np.array(units)  # the library needs a writable array
    suffixes = library.divsufsort(units)
    common = library.kasai(units, suffixes)  # [i]: units that suffix i and the next one have in common
    begins = np.ones(len(suffixes), bool)
    begins[1:] = common[:-1] < length
    starts = np.flatnonzero(begins)
    first = np.minimum.reduceat(np.where(whole[suffixes], suffixes, len(suffixes)), starts)
    result[suffixes] = suffixes != np.repeat(first, np.diff([*starts, len(suffixes)]))
    return result & whole


def whole_windows(ends: np.ndarray, length: int) -> np.ndarray:
    """Whether the `length` units from each place belong to one document, [units] bool."""
    whole = np.zeros(int(ends[-1]) + 1, np.int64)
    fit = np.flatnonzero(np.diff(ends) >= length)
    np.add.at(whole, ends[fit], 1)
    np.add.at(whole, ends[fit + 1] - length + 1, -1)
    return np.cumsum(whole)[:-1] > 0


# ---------------------------------------------------------------------------------------------------------- cutting


class _Cover:
    """The repeated parts of a shard's documents, document by document."""

    def __init__(self, own: Path, matched: Sequence[Path], shard: int, length: int):
        places = [np.load(own / "repeats.npy")]
        for folder in matched:
            pairs = np.load(folder / "repeats.npy", mmap_mode="r")
            start, stop = np.searchsorted(pairs[0], [shard, shard + 1])
            places.append(np.array(pairs[1, start:stop]))
        self._places, self._length = np.unique(np.concatenate(places)), length
        self._start = 0  # the place of the next document's first unit

    def next(self, text: str, unit: str) -> list[tuple[int, int]]:
        """[start, end) of the next document's repeated parts, in bytes, or in characters with following white space."""
        _, starts, stops = units_of(text, unit)
        begin, self._start = self._start, self._start + len(starts)
        first, last = np.searchsorted(self._places, [begin, self._start])
        places = self._places[first:last] - begin
        if not len(places):
            return []
        gaps = np.flatnonzero(places[1:] > places[:-1] + self._length)
        firsts, lasts = places[[0, *(gaps + 1)]], places[[*gaps, len(places) - 1]] + self._length
        ends = np.append(starts[1:], len(text) if unit == "tokens" else len(starts))
        return list(zip(starts[firsts].tolist(), ends[lasts - 1].tolist()))


def _without(text: str, spans: list[tuple[int, int]], unit: str) -> str:
    """The text without some spans. With bytes, characters that are only partly in a span stay."""
    data, pieces, at = (text if unit == "tokens" else encoded(text)), [], 0
    for start, end in spans:
        if unit == "bytes":
            start, end = _whole_characters(data, start, end)
        pieces.append(data[at:start])
        at = end
    pieces.append(data[at:])
    return "".join(pieces) if unit == "tokens" else b"".join(pieces).decode("utf-8", "surrogatepass")


def _whole_characters(data: bytes, start: int, end: int) -> tuple[int, int]:
    """The largest part of a span of bytes that consists of whole characters."""
    while start < end and data[start] & 0xC0 == 0x80:
        start += 1
    while end > start and end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return start, end


def _share(text: str, spans: list[tuple[int, int]], unit: str) -> float:
    """The share of a text's characters (or bytes) in the spans."""
    whole = len(text) if unit == "tokens" else len(encoded(text))
    return sum(end - start for start, end in spans) / whole if whole else 0.0


def _note(row: int, document: dict, share: float, text: str, spans: list, unit: str) -> bytes:
    """A note on a document with repeated parts, with the beginning of the first one."""
    start, end = spans[0]
    shown = text[start:end] if unit == "tokens" else encoded(text)[start:end].decode("utf-8", "replace")
    note = dict(
        row=row, **names_of(document), reason=REASON, repeated=round(share, 4), spans=spans, begins=shown[:_SHOWN]
    )
    return json.dumps(note).encode() + b"\n"
