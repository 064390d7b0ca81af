# SPDX-License-Identifier: Apache-2.0
"""The first stage: cut input files into shards of about the same size, and set aside lines that are no documents.

Plain files are cut at any line boundary; small ones share a shard. A compressed file or archive has to be read from its
start: one task cuts it, by the share of the file read so far. A damaged file or a decompression bomb is set aside as a
whole. Each document of plain text counts as a line.

A task writes `rejected.jsonl` (places, reasons and beginnings of rejected lines) and `pieces.json` (lines and documents of
each piece, in order) next to its shards.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from megatron.corpus.counts import text_bytes
from megatron.corpus.documents import SHARD, ShardWriter, decode, encode, join_shards
from megatron.data.json_input import (
    BYTE_ORDER_MARK,
    BadLine,
    LinesOfRange,
    Source,
    damage_as_data_error,
    find_sources,
    read_streams,
    values_of,
)
from megatron.errors import DataError

VERSION = "1"
CHUNK = 1 << 18
HEAD = 200  # bytes to keep of a rejected line
RATIO = {"gzip": 3.0, "bzip2": 4.0, "xz": 4.5, "zstd": 4.0}  # estimated compression ratios, for the number of shards
BOMB = 250  # compression ratio of a bomb: text rarely reaches 20, gzip at most 1000
FREE = 64 << 20  # bytes of text that any file may hold


@dataclass(frozen=True)
class InputPiece:
    """Bytes [start, stop) of a plain file; a whole file, in `parts` shards, where start is None."""

    path: str
    start: Optional[int]
    stop: int
    parts: int = 1

    @property
    def text(self) -> float:
        return self.stop if self.start is None else self.stop - self.start


def sources_of(inputs: list[str], on_damaged: str) -> tuple[list[Source], list[tuple[str, str]]]:
    """(input files in order, unreadable files with the reason).

    Raises DataError if a name of the recipe matches nothing, or, with "stop", for the first unreadable file.
    """
    sources, refused = [], []
    for given in inputs:
        for path in _expanded(given):
            try:
                [source] = find_sources([path])
                if source.compression == "pipe" or path == "-":
                    raise DataError(f"{path}: a pipe can be read once, and a plan reads it again after a kill")
                if not source.size:
                    raise DataError(f"{path}: the file is empty")
                sources.append(source)
            except DataError as error:
                if on_damaged == "stop":
                    raise
                refused.append((path, error.what + (f" ({error.why})" if error.why else "")))
    if not sources:
        why = "; ".join(reason for _, reason in refused[:3]) or None
        raise DataError(f"no input: {', '.join(inputs)}", why, "give files of JSON lines, or .txt")
    return sources, refused


def _expanded(given: str) -> list[str]:
    from megatron.data import json_input

    try:
        return json_input.expand(given)
    except DataError as error:
        raise DataError(error.what.replace("--input ", "input: "), error.why, error.do) from None


def pieces_of(sources: Iterable[Source], shard: int) -> list[list[InputPiece]]:
    """The pieces of each task, in the order of the input. shard: approximate bytes of text.

    >>> [[(p.start, p.stop) for p in row] for row in pieces_of([Source("a", 25, None), Source("b", 3, None)], 10)]
    [[(0, 9)], [(9, 18)], [(18, 25), (0, 3)]]
    """
    tasks: list[list[InputPiece]] = []
    room = 0.0
    for source in sources:
        if source.whole:
            text = source.size * RATIO.get(source.compression or "", 1.0)
            parts = max(1, math.ceil(text / shard))
            pieces = [(InputPiece(source.path, None, source.size, parts), text)]
        else:
            cuts = max(1, math.ceil(source.size / shard))
            edges = [source.size * i // cuts for i in range(cuts + 1)]
            edges = [-(-source.size // cuts) * i for i in range(cuts)] + [source.size]
            pieces = [(InputPiece(source.path, *edges[i : i + 2]), edges[i + 1] - edges[i]) for i in range(cuts)]
        for piece, text in pieces:
            if piece.parts > 1 or not tasks or text > room or tasks[-1][-1].parts > 1:
                tasks.append([])
                room = float(shard)
            tasks[-1].append(piece)
            room -= text
    return tasks


def names_of(pieces: list[InputPiece]) -> list[str]:
    """Names of the shards of a task."""
    parts = pieces[0].parts
    return [SHARD] if parts == 1 else [f"part-{number:05}.jsonl.zst" for number in range(parts)]


def cut(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write the shards of a task. options: pieces as [input, start, stop, parts], text_key, most (bytes a line),
    on_damaged; separator, where plain text has one."""
    count: Counter = Counter()
    reasons: Counter = Counter()
    damaged: dict[str, str] = {}
    pieces: list[dict] = []
    with open(output / "rejected.jsonl", "wb") as rejected, _Writers(output, options["pieces"]) as writers:
        for number, (which, start, stop, parts) in enumerate(options["pieces"]):
            piece = InputPiece(str(inputs[which]), start, stop, parts)
            writers.begin(number, whole=start is None)
            at, reasons_before, own = rejected.tell(), Counter(reasons), Counter()
            try:
                for line in lines_of(piece, options["most"], options.get("separator")):
                    reason = _take(line, options["text_key"], writers, own)
                    if reason:
                        reasons[reason.partition(":")[0].partition(" (")[0]] += 1
                        record = dict(input=which, row=line.row, bytes=line.size, reason=reason)
                        record["begins"] = line.data[:HEAD].decode("utf-8", "replace")
                        rejected.write(json.dumps(record).encode() + b"\n")
            except DataError as error:
                if options["on_damaged"] == "stop":
                    raise
                damaged[piece.path] = error.what.removeprefix(f"{piece.path}: ") + f": {error.why}" * bool(error.why)
                rejected.truncate(at)
                rejected.seek(at)
                reasons, own = reasons_before, Counter()
                writers.discard()
            pieces.append(dict(input=which, start=start, **{k: own[k] for k in ("lines", "documents", "bytes")}))
            count += own
    (output / "pieces.json").write_text(json.dumps(pieces))
    if len(options["pieces"]) > 1 or options["pieces"][0][3] == 1:
        join_shards(output)
    names = ("lines", "blank", "documents", "bytes")
    return {name: count[name] for name in names} | dict(rejected=dict(reasons), damaged=damaged)


class _Writers:
    """The output files of a task's pieces: one for each part, or for each piece."""

    def __init__(self, output: Path, pieces: list):
        self.output, self.parts = output, pieces[0][3]
        self.writer: Optional[ShardWriter] = None
        self.names: list[str] = []

    def begin(self, number: int, whole: bool) -> None:
        """Start a piece. A whole file has writers of its own, so that it can be discarded."""
        self.whole = whole
        if self.parts > 1:
            self.part = 0
            self._open("part-00000.jsonl.zst")
        elif whole or self.writer is None or self.was_whole:
            self._open(f"piece-{number:05}.jsonl.zst")
        self.was_whole = whole

    def _open(self, name: str) -> None:
        if self.writer:
            self.writer.close()
        self.writer = ShardWriter(self.output / name)
        self.names.append(name)

    def write(self, line: bytes, share: float) -> None:
        """Write a line. share: position of its end, as a share of the file"""
        if self.parts > 1:
            self._part(min(self.parts - 1, int(share * self.parts)))
        self.writer.write_line(line)

    def _part(self, part: int) -> None:
        while self.part < part:
            self.part += 1
            self._open(f"part-{self.part:05}.jsonl.zst")

    def discard(self) -> None:
        """Delete the output of the present piece, which is a compressed file: plain ones cannot be damaged."""
        self.writer.close()
        self.writer = None
        if self.parts > 1:
            for name in self.names:
                (self.output / name).unlink()
            self.names, self.part = [], 0
            self._open("part-00000.jsonl.zst")
        else:
            (self.output / self.names.pop()).unlink()

    def __enter__(self) -> "_Writers":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None and self.parts > 1:
            self._part(self.parts - 1)
        if self.writer:
            self.writer.close()


@dataclass(frozen=True)
class InputLine:
    """A line of a piece. data: without its end, or its first bytes where it is `too_long`; size: in bytes; share: of the
    file, read so far."""

    row: int
    data: bytes
    size: int
    share: float
    too_long: bool = False


def _take(line: InputLine, text_key: str, writers: _Writers, counts: Counter) -> str:
    """Write a line if it is a document. Returns the reason why it is not, or ""."""
    counts["lines"] += 1
    if not line.data or line.data.isspace():
        counts["blank"] += 1
        return ""
    try:
        document = document_of(line, text_key)
    except BadLine as error:
        return str(error)
    counts["documents"] += 1
    counts["bytes"] += text_bytes(document["text"])
    writers.write(encode(document), line.share)
    return ""


def document_of(line: InputLine, text_key: str) -> dict[str, Any]:
    """The document of a line, its text under "text". Raises BadLine; reasons are counted by their part before a colon."""
    if line.too_long:
        raise BadLine(f"too long: {line.size:,} bytes (see max-document-mb; of plain text, document-separator)")
    try:
        document = decode(line.data)
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}"[:300]) from None
    [text] = values_of(document, [text_key])
    if not isinstance(text, str):
        raise BadLine(f"a list of texts: under {text_key!r}")
    if text_key != "text":
        del document[text_key]
        document["text"] = text
    return document


# ---------------------------------------------------------------------------------------------------- lines


def lines_of(piece: InputPiece, most: int, separator: Optional[str] = None) -> Iterator[InputLine]:
    """All lines of a piece, truncated where they are longer than `most` bytes; a document of plain text is a line.

    Memory is bounded for any contents. Raises DataError for damage and bombs.
    """
    if piece.start is not None:
        yield from _lines_of_range(piece, most)
        return
    [source] = find_sources([piece.path])
    if source.size != piece.stop:
        raise _changed(piece.path)
    row, text, bound = 0, 0, FREE + BOMB * source.size
    with damage_as_data_error(piece.path):
        for stream, position in read_streams(replace(source, separator=separator)):
            first = True
            for data, size, too_long in split_lines(stream.read, most):
                text += size
                if text > bound:
                    raise DataError(f"{piece.path}: a bomb", f"{source.size:,} bytes hold more than {bound:,} of text")
                if first:
                    data, first = data.removeprefix(BYTE_ORDER_MARK), False
                yield InputLine(row, data, size, position() / max(1, source.size), too_long)
                row += 1


def _lines_of_range(piece: InputPiece, most: int) -> Iterator[InputLine]:
    """The lines with their first byte in the range."""
    with open(piece.path, "rb", buffering=0) as file:
        if file.seek(0, 2) < piece.stop:
            raise _changed(piece.path)
        stream = LinesOfRange(file, piece.start, piece.stop)
        for row, (data, size, too_long) in enumerate(split_lines(stream.read, most)):
            data = data.removeprefix(BYTE_ORDER_MARK) if piece.start == row == 0 else data
            yield InputLine(row, data, size, 0.0, too_long)


def _changed(path: str) -> DataError:
    return DataError(f"{path}: changed since the plan was made", do="run the same command again, for a new plan")


def split_lines(read: Callable[[int], bytes], most: int) -> Iterator[tuple[bytes, int, bool]]:
    """(line without its end, size with its end, whether it was truncated) of a stream.

    >>> import io
    >>> [row for row in split_lines(io.BytesIO(b"one" + b"x" * 9 + chr(10).encode() + b"two").read, 5)]
    [(b'onexxxxxxxxx', 13, True), (b'two', 3, False)]
    """
    rest, long = b"", 0  # beginning of an incomplete line; its length so far, if too long
    while chunk := read(CHUNK):
        if long:
            end = chunk.find(b"\n")
            if end < 0:
                long += len(chunk)
                continue
            yield rest, long + end + 1, True
            rest, long, chunk = b"", 0, chunk[end + 1 :]
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            yield (line[: 2 * HEAD], len(line) + 1, True) if len(line) > most else (line, len(line) + 1, False)
        if len(rest) > most:
            rest, long = rest[: 2 * HEAD], len(rest)
    if rest:
        yield rest, long or len(rest), bool(long)
