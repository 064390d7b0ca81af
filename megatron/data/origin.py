# SPDX-License-Identifier: Apache-2.0
"""The source of each document of a token file: `<prefix>.origin`, 20 bytes per document and a table of source files.

    file     uint32  index of the source file in the table
    place    uint64  offset of the document's line in bytes, after decompression (without a byte order mark) and after
                     conversion of plain text to JSON lines; in the highest 8 bits the number of the piece, from 1, if
                     parts of the text were cut out, else 0
    hash     uint64  xxh3 of the text as UTF-8, or of its sentences joined by newlines

Documents are in the order of the token file. Preprocessing writes the file, merge_datasets.py merges it, verify_data
checks it.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import xxhash

from megatron.errors import DataError
from megatron.storage.array_file import Pieces, read_arrays, write_arrays

ENDING = ".origin"
ROW = np.dtype([("file", "<u4"), ("place", "<u8"), ("hash", "<u8")])
NO_ORIGINS = np.empty(0, ROW)
_digest = xxhash.xxh3_64_intdigest
PIECE_SHIFT = 56
_KIND, _VERSION = "origin of documents", 1
_BLOCK = 1 << 20


def text_hash(text: "str | Sequence[str]") -> int:
    """The hash of a text, or of a list of sentences."""
    if type(text) is not str:
        text = "\n".join(text)
    try:
        return _digest(text.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return _digest(text.encode("utf-8", "surrogatepass"))


def origins_of(starts: np.ndarray, lines: Sequence[int], hashes: Sequence[int]) -> np.ndarray:
    """Rows of documents, without the source file.

    starts: offsets of all lines; lines: the line of each document, + the number of its piece << PIECE_SHIFT
    """
    rows = np.zeros(len(hashes), ROW)
    numbers = np.array(lines, np.uint64)
    mask = np.uint64((1 << PIECE_SHIFT) - 1)
    rows["place"] = starts[(numbers & mask).astype(np.int64)].astype(np.uint64) | (numbers & ~mask)
    rows["hash"] = np.array(hashes, np.uint64)
    return rows


class DocumentOrigin(NamedTuple):
    """The source of a document.

    piece: from 1 if the document is a part of its text, else 0; hash: 16 hexadecimal digits; separator: between documents
    of plain text; columns: that were read, of a file with rows
    """

    file: str
    offset: int
    piece: int
    hash: str
    separator: Optional[str] = None
    columns: Optional[list[str]] = None


@dataclass(frozen=True)
class Origins:
    """The origins of all documents of a token file."""

    path: Path
    files: list[dict]  # path and bytes of each source
    rows: np.ndarray
    about: dict

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, document: int) -> DocumentOrigin:
        file, place, digest = self.rows[document].tolist()
        if file >= len(self.files):
            raise DataError(f"{self.path}: document {document} comes from file {file} of {len(self.files)}")
        offset = place & ((1 << PIECE_SHIFT) - 1)
        source = self.files[file]
        return DocumentOrigin(
            source["path"], offset, place >> PIECE_SHIFT, f"{digest:016x}", *map(source.get, ("separator", "columns"))
        )


def write_origins(path, files: Sequence[dict], count: int, pieces: Iterable[np.ndarray], tokens: int) -> None:
    """Write the origins of `count` documents, given in pieces, for a token file of `tokens` tokens."""
    write_arrays(
        path, _KIND, _VERSION, dict(files=list(files), tokens=tokens), dict(documents=Pieces(ROW, count, pieces))
    )


def open_origins(prefix: str, documents: Optional[int] = None, verify: bool = False) -> Optional[Origins]:
    """Open the origins of a token file; None if there are none.

    documents: number of documents of the token file; verify: also check the checksum
    Raises DataError for a damaged file, or one of another token file.
    """
    path = Path(f"{prefix}{ENDING}")
    if not path.exists():
        return None
    file = read_arrays(path, _KIND, _VERSION, verify=verify)
    rows, files = file.arrays.get("documents"), file.about.get("files")
    sound = isinstance(files, list) and all(isinstance(one, dict) and "path" in one for one in files)
    if rows is None or rows.dtype != ROW or not sound:
        raise DataError(f"{path}: it does not hold what it should", do="preprocess again")
    if documents is not None and len(rows) != documents:
        raise DataError(
            f"{path} tells of {len(rows):,} documents, {prefix} has {documents:,}",
            "it is from another run",
            "remove it, or preprocess again",
        )
    return Origins(path, files, rows, file.about)


def problems_of(prefix: str, documents: int, tokens: int) -> list[str]:
    """The problems with the origins of a token file; reads all of them."""
    try:
        origins = open_origins(prefix, documents, verify=True)
    except DataError as error:
        return [error.what + (f": {error.why}" if error.why else "")]
    if origins is None:
        return []
    if origins.about.get("tokens") != tokens:
        return [f"{origins.path} is of a token file of {origins.about.get('tokens'):,} tokens, not of {tokens:,}"]
    for at in range(0, len(origins), _BLOCK):
        if origins.rows["file"][at : at + _BLOCK].max() >= len(origins.files):
            return [f"{origins.path}: documents come from files that are not in its table"]
    return []


def joined_files(all_origins: Sequence[Origins]) -> tuple[list[dict], list[np.ndarray]]:
    """(merged table of source files, for each origin the indices of its files in that table)."""
    table, numbers = {}, []
    for origins in all_origins:
        keys = [(one["path"], one.get("bytes"), one.get("separator"), str(one.get("columns"))) for one in origins.files]
        for key, one in zip(keys, origins.files, strict=True):
            table.setdefault(key, one)
        order = {key: number for number, key in enumerate(table)}
        numbers.append(np.array([order[key] for key in keys], np.uint32))
    return list(table.values()), numbers


def renumbered(origins: Origins, numbers: np.ndarray) -> Iterator[np.ndarray]:
    """The rows with new indices of files, in pieces."""
    for at in range(0, len(origins), _BLOCK):
        rows = np.array(origins.rows[at : at + _BLOCK])
        rows["file"] = numbers[rows["file"]]
        yield rows


def find_file(path: str, folders: Sequence[str] = ()) -> Optional[str]:
    """The current path of a source: under its name in one of the folders, or as recorded; None if it is not found."""
    for folder in folders:
        parts = Path(path).parts
        for start in range(len(parts)):  # the longest part of the path first
            place = os.path.join(folder, *parts[max(start, 1) :])
            if os.path.isfile(place):
                return place
    return path if os.path.isfile(path) else None


def lines_at(
    path: str, offsets: Sequence[int], separator: Optional[str] = None, columns: Optional[Sequence[str]] = None
) -> dict[int, bytes]:
    """Read the lines of a source that start at these offsets. Compressed files are read from their start.

    separator: between documents of plain text; columns: of a file with rows. Raises DataError for a file that is too short.
    """
    from megatron.data.json_input import find_sources, read_blocks

    source = find_sources([path], separator, columns)[0]
    wanted, lines = sorted(set(offsets)), {}
    if not source.whole:
        with open(path, "rb") as file:
            for offset in wanted:
                file.seek(offset)
                lines[offset] = file.readline().rstrip(b"\r\n")
        return lines
    at = number = 0
    for block, _ in read_blocks(source, _BLOCK):
        while number < len(wanted) and wanted[number] < at + len(block):
            start = wanted[number] - at
            stop = block.find(b"\n", start)
            lines[wanted[number]] = block[start : len(block) if stop < 0 else stop]
            number += 1
        at += len(block)
        if number == len(wanted):
            break
    if number < len(wanted):
        raise DataError(f"{path} ends at byte {at:,}, before a document at {wanted[number]:,}", "it has changed")
    return lines
