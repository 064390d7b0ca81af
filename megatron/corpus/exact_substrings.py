# SPDX-License-Identifier: Apache-2.0
"""Exact substrings: runs of at least `length` tokens (or bytes) that stand somewhere before are cut out.

    find     a shard each       a suffix array of each block of documents: which windows of `length` units repeat in it;
                                a hash of each other window, sorted
    match    a partition each   windows with the hash of an earlier one, over all blocks and shards
    cut      a shard each       the shard without what repeated windows cover

A token is a run of letters and digits, another character that is no white space, or one character of a script without
spaces; white space between tokens does not count. `unit: bytes` takes the text as it is. Of all places of a window the
first stays, in the order of documents: what comes out depends on neither shards nor blocks nor partitions. Blocks are as
large as the memory of a task allows. Lee et al. 2021, "Deduplicating training data makes language models better", with a
length of 50 tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np

from megatron.corpus.documents import decode, encode
from megatron.corpus.duplicates.key_runs import RunReader, RunWriter, fitting_ranges, partition_of_keys
from megatron.corpus.duplicates.shards import WRITTEN, blocks_of_lines, document_of, encoded, fates, shard_writer
from megatron.corpus.duplicates.shingles import codes_of, span_hashes, window_hashes, word_bounds
from megatron.corpus.stage import Counts, Made, StagePhase, options_of
from megatron.errors import SettingsError

VERSION = "2"  # of what the tasks of this stage write
REASON = "exact_substring"
RECORD = 80  # bytes of memory a window takes in `match`
UNIT_BYTES = dict(tokens=112, bytes=80)  # bytes of memory a unit takes in `find`, its suffix array included
DROPPED, CHANGED = "dropped.jsonl", "cut.jsonl"  # notes of a task of `cut`
_SHOWN = 120  # characters of a note of what was cut


@dataclass(frozen=True)
class ExactSubstringOptions:
    """Options of the stage."""

    length: int = 50  # the least length of what is cut, in units
    unit: Literal["tokens", "bytes"] = "tokens"
    action: Literal["cut", "drop"] = (
        "cut"  # drop: documents of which at least `drop_share` repeats, the others stay whole
    )
    drop_share: float = 0.5
    text_key: str = "text"
    shard_mb: float = 64.0  # a guess, for the number of partitions
    partitions: int = 0  # 0: as many as the memory of a task asks for

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

    def each_partition(made: Made) -> list[dict[str, Any]]:
        return [dict(memory=memory, partition=number, of_partitions=partitions) for number in range(partitions)]

    return [
        StagePhase(
            "find",
            find,
            lambda made: [[shard] for shard in made["documents"]],
            lambda made: [dict(memory=memory) for _ in made["documents"]],
        ),
        StagePhase("match", match, lambda made: [[made["find"]] for _ in range(partitions)], each_partition),
        StagePhase(
            "cut",
            cut,
            lambda made: [[shard, own, made["match"]] for shard, own in zip(made["documents"], made["find"])],
            lambda made: [dict(shard=number) for number in range(len(made["documents"]))],
        ),
    ]


# ------------------------------------------------------------------------------------------------------------ phases


def find(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """[shard] -> windows that repeat within a block, and the hashes of all others, each once a block."""
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
    """The windows of all shards -> those of a partition that stand before, as [2, n]: shard, place; sorted."""
    reader = RunReader(inputs)
    first, end = partition_of_keys(options["partition"], options["of_partitions"])
    found = [np.zeros((2, 0), np.int64)]
    for low, high in fitting_ranges(reader.count, first, end, max(1, options["memory"] // RECORD)):
        whose, columns = reader.read(low, high)
        keys, places = columns["keys"], columns["places"].astype(np.int64)
        order = np.lexsort((places, whose, keys))
        again = order[1:][keys[order[1:]] == keys[order[:-1]]]
        found.append(np.stack([whose[again], places[again]]))
    pairs = np.concatenate(found, 1)
    pairs = pairs[:, np.lexsort((pairs[1], pairs[0]))]
    np.save(output / "repeats.npy", pairs)
    return dict(repeated_elsewhere=pairs.shape[1])


def cut(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """[shard, its windows, repeated windows ...] -> the shard without what they cover."""
    asked = options_of(OPTIONS, options)
    shard, own, *matched = inputs
    covered = _Cover(own, matched, options["shard"], asked.length)
    counts = dict(cut=0, passages=0, bytes_cut=0)
    sizes, dropped, went_on = [], [], 0
    with (
        shard_writer(output / WRITTEN) as write,
        open(output / DROPPED, "wb") as notes_dropped,
        open(output / CHANGED, "wb") as notes_cut,
    ):
        for row, line, document, text in _documents(shard, asked):
            spans = [] if text is None else covered.next(text, asked.unit)
            size, repeated = len(encoded(text or "")), _share(text or "", spans, asked.unit)
            left = _without(text, spans, asked.unit) if spans else text
            sizes.append(size)
            gone = repeated >= asked.drop_share if asked.action == "drop" else bool(spans) and not left.strip()
            if spans and gone:
                dropped.append(row)
                notes_dropped.write(_note(row, document, repeated, text, spans, asked.unit))
                continue
            if spans and asked.action == "cut":
                notes_cut.write(_note(row, document, repeated, text, spans, asked.unit))
                counts["cut"] += 1
                counts["passages"] += len(spans)
                counts["bytes_cut"] += size - len(encoded(left))
                line = encode({**document, asked.text_key: left})
            write([line])
            went_on += 1
    told = fates(np.array(sizes, np.int64), np.array(dropped, np.int64), REASON)
    told["bytes"] -= counts["bytes_cut"]
    return dict(told, **counts)


def explain(made: Made, shard: int, row: int, document: dict, options: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """What became of a document: dict(document=None or as it went on, reason, figures); None where nothing did."""
    asked = options_of(OPTIONS, options)
    for name in (DROPPED, CHANGED):
        with open(made["cut"][shard] / name, "rb") as notes:
            for note in map(decode, notes):
                if note["row"] == row:
                    figures = dict(repeated=note["repeated"], begins=note["begins"])
                    spans = [tuple(span) for span in note["spans"]]
                    left = {**document, asked.text_key: _without(document[asked.text_key], spans, asked.unit)}
                    return dict(document=None if name == DROPPED else left, reason=note["reason"], figures=figures)
    return None


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
    """(units, ends of documents in them) of as many documents at a time as have `most` units together."""
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
    """(units as numbers, where each begins, where it ends): tokens in characters, bytes in bytes.

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
        raise SettingsError("exact substrings need the package pydivsufsort", str(error), do) from None
    return pydivsufsort


def repeats(units: np.ndarray, whole: np.ndarray, length: int) -> np.ndarray:
    """Which windows of `length` units stand at an earlier place, too, [units] bool; only `whole` ones count.

    In a suffix array, the places whose suffixes begin with the same `length` units stand side by side.
    """
    found = np.zeros(len(units), bool)
    if len(units) <= length:
        return found
    library = _suffix_arrays()
    if units.dtype != np.uint8:
        units = np.unique(units, return_inverse=True)[1].astype(np.uint32)
    units = np.array(units)  # the library takes no array that cannot be written to
    suffixes = library.divsufsort(units)
    common = library.kasai(units, suffixes)  # [i]: units that suffix i and the next one have in common
    begins = np.ones(len(suffixes), bool)
    begins[1:] = common[:-1] < length
    starts = np.flatnonzero(begins)
    first = np.minimum.reduceat(np.where(whole[suffixes], suffixes, len(suffixes)), starts)
    found[suffixes] = suffixes != np.repeat(first, np.diff([*starts, len(suffixes)]))
    return found & whole


def whole_windows(ends: np.ndarray, length: int) -> np.ndarray:
    """Whether `length` units from each place on are of one document, [units] bool."""
    whole = np.zeros(int(ends[-1]) + 1, np.int64)
    fit = np.flatnonzero(np.diff(ends) >= length)
    np.add.at(whole, ends[fit], 1)
    np.add.at(whole, ends[fit + 1] - length + 1, -1)
    return np.cumsum(whole)[:-1] > 0


# ------------------------------------------------------------------------------------------------------ what is cut


class _Cover:
    """What repeated windows cover of each document of a shard, one document after the other."""

    def __init__(self, own: Path, matched: Sequence[Path], shard: int, length: int):
        places = [np.load(own / "repeats.npy")]
        for folder in matched:
            pairs = np.load(folder / "repeats.npy", mmap_mode="r")
            start, stop = np.searchsorted(pairs[0], [shard, shard + 1])
            places.append(np.array(pairs[1, start:stop]))
        self._places, self._length = np.unique(np.concatenate(places)), length
        self._start = 0  # the place of the next document's first unit

    def next(self, text: str, unit: str) -> list[tuple[int, int]]:
        """[start, end) of what is covered, in characters (tokens: with the white space behind it) or bytes."""
        _, starts, stops = units_of(text, unit)
        begin, self._start = self._start, self._start + len(starts)
        first, last = np.searchsorted(self._places, [begin, self._start])
        places = self._places[first:last] - begin
        if not len(places):
            return []
        gaps = np.flatnonzero(places[1:] > places[:-1] + self._length)
        firsts, lasts = places[[0, *(gaps + 1)]], places[[*gaps, len(places) - 1]] + self._length
        behind = np.append(starts[1:], len(text) if unit == "tokens" else len(starts))
        return list(zip(starts[firsts].tolist(), behind[lasts - 1].tolist()))


def _without(text: str, spans: list[tuple[int, int]], unit: str) -> str:
    """The text without some spans; of bytes, characters that are covered in part stay."""
    data, pieces, at = (text if unit == "tokens" else encoded(text)), [], 0
    for start, end in spans:
        if unit == "bytes":
            start, end = _whole_characters(data, start, end)
        pieces.append(data[at:start])
        at = end
    pieces.append(data[at:])
    return "".join(pieces) if unit == "tokens" else b"".join(pieces).decode("utf-8", "surrogatepass")


def _whole_characters(data: bytes, start: int, end: int) -> tuple[int, int]:
    """The largest part of a span of bytes that holds whole characters."""
    while start < end and data[start] & 0xC0 == 0x80:
        start += 1
    while end > start and end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return start, end


def _share(text: str, spans: list[tuple[int, int]], unit: str) -> float:
    """Which share of a text's characters (or bytes) is covered."""
    whole = len(text) if unit == "tokens" else len(encoded(text))
    return sum(end - start for start, end in spans) / whole if whole else 0.0


def _note(row: int, document: dict, share: float, text: str, spans: list, unit: str) -> bytes:
    """What became of a document of which something repeats, with the beginning of that."""
    known = {key: document[key] for key in ("id", "url") if key in document}
    start, end = spans[0]
    shown = text[start:end] if unit == "tokens" else encoded(text)[start:end].decode("utf-8", "replace")
    told = dict(row=row, **known, reason=REASON, repeated=round(share, 4), spans=spans, begins=shown[:_SHOWN])
    return json.dumps(told).encode() + b"\n"
