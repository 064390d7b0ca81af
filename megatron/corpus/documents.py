# SPDX-License-Identifier: Apache-2.0
"""Shards: files of documents, one JSON object a line, `.jsonl` or `.jsonl.zst`, read and written in bounded memory."""

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

import orjson

from megatron.corpus.stage import Document
from megatron.data.file_formats import zstd
from megatron.errors import DataError

SHARD = "documents.jsonl.zst"  # name of the shard in a task's folder
DROPPED, CUT = "dropped.jsonl", "cut.jsonl"  # notes beside a shard, on documents that it lacks, and that it has changed
LEVEL = 1  # of zstd: 400 MB/s a core; 3 is a tenth smaller and half as fast
PIECE = 1 << 20


def read_lines(path: Path | str) -> Iterator[bytes]:
    """The lines of a shard without their ends, blank ones left out."""
    with open(path, "rb") as raw:
        stream = zstd(path).ZstdDecompressor().stream_reader(raw, read_across_frames=True) if _packed(path) else raw
        with io.BufferedReader(stream, PIECE) as file:
            for line in file:
                if line := line.rstrip(b"\r\n"):
                    yield line


def read_documents(path: Path | str) -> Iterator[Document]:
    """The documents of a shard, in order. Raises DataError for a line that is not JSON."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield decode(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from None


def decode(line: bytes) -> Any:
    """Parse a line of JSON with orjson, or with Python's parser where that is too strict (NaN, huge numbers).

    Raises ValueError, RecursionError.
    """
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line.decode("utf-8"))


def encode(document: Document) -> bytes:
    """A document as its line, without the end. The same document gives the same bytes."""
    try:
        return orjson.dumps(document)
    except TypeError:  # huge numbers, half of a surrogate pair
        return json.dumps(document, separators=(",", ":")).encode()


def names_of(document: Document) -> dict[str, Any]:
    """The names of a document for notes: its id and url, where it has them."""
    return {key: document[key] for key in ("id", "url") if key in document}


def note_of(folder: Path, row: int, files: Iterable[str] = (DROPPED, CUT)) -> Optional[dict[str, Any]]:
    """The note on a row of the shard that a task has read, from the files in its folder; None if there is none."""
    for path in map(folder.joinpath, files):
        for note in map(decode, read_lines(path) if path.exists() else ()):
            if note.get("row") == row:
                return note
    return None


class ShardWriter:
    """Writes the lines of a shard; the name decides whether they are compressed. The same lines give the same bytes."""

    def __init__(self, path: Path | str, level: int = LEVEL, checksum: bool = True):
        """checksum: at the end of a compressed file"""
        self._raw = open(path, "wb")
        packer = zstd(path).ZstdCompressor(level=level, write_checksum=checksum) if _packed(path) else None
        self._file = packer.stream_writer(self._raw, closefd=False) if packer else self._raw
        self._lines: list[bytes] = []
        self._held = 0
        self.documents = 0

    def write(self, document: Document) -> None:
        self.write_line(encode(document))

    def write_line(self, line: bytes) -> None:
        """line: of one document, without its end"""
        self._lines.append(line)
        self._held += len(line) + 1
        self.documents += 1
        if self._held >= PIECE:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._file.write(b"\n".join(self._lines) + b"\n")
            self._lines, self._held = [], 0

    def close(self) -> None:
        self._flush()
        if self._file is not self._raw:
            self._file.close()
        self._raw.close()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.close()
        else:  # the attempt has failed: the file will not be read
            self._raw.close()


def write_documents(path: Path | str, documents: Iterable[Document]) -> int:
    """Write a whole shard; returns its number of documents."""
    with ShardWriter(path) as writer:
        for document in documents:
            writer.write(document)
    return writer.documents


def join_shards(folder: Path) -> None:
    """Join the shards in a task's folder into one, `documents.jsonl.zst`, in the order of their names.

    Concatenated zstd frames are one valid file. Without any shard, write an empty one.
    """
    parts = sorted(folder.glob("*.jsonl.zst"))
    if parts == [folder / SHARD]:
        return
    if not parts:
        write_documents(folder / SHARD, [])
        return
    aside = folder / "joined"
    with open(aside, "wb") as whole:
        for path in parts:
            with open(path, "rb") as part:
                while piece := part.read(PIECE):
                    whole.write(piece)
    for path in parts:
        path.unlink()
    aside.rename(folder / SHARD)


def _packed(path: Path | str) -> bool:
    return str(path).endswith(".zst")
