# SPDX-License-Identifier: Apache-2.0
"""A file of named arrays with a head of its kind, version, sizes and checksum.

    offset  content
    0       8 bytes "MEGARRAY"
    8       uint32  bytes of the head that follows, a multiple of 64 together with these 12 bytes
    12      JSON    {"kind", "version", "about", "arrays": {name: {"dtype", "count", "offset"}}, "sum"}, then spaces
    ...     arrays, little-endian, each at a multiple of 64 bytes; `sum` is the xxh3 of all bytes of all of them

Arrays are written in pieces and read through a memory map, so they need not fit into memory.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from megatron.errors import DataError, missing_file

MAGIC = b"MEGARRAY"
LENGTH = struct.Struct("<I")
ALIGN = 64
UNKNOWN = "0" * 32  # placeholder of the checksum until all is written
PIECE = 1 << 24  # bytes per update of the checksum


class Pieces(NamedTuple):
    """An array to be written: `count` numbers of a type, in pieces that follow each other."""

    dtype: np.dtype
    count: int
    pieces: Iterable[np.ndarray]

    @classmethod
    def of(cls, array: np.ndarray) -> "Pieces":
        return cls(array.dtype, len(array), [array])


class ArrayFile(NamedTuple):
    """The head of a file, and its arrays as read-only views of a memory map."""

    path: Path
    about: dict[str, Any]
    arrays: dict[str, np.ndarray]
    sum: str


def write_arrays(path, kind: str, version: int, about: Mapping[str, Any], arrays: Mapping[str, Pieces]) -> None:
    """Write the file and flush it to the disk. `about` is JSON. The caller renames the file: see `Workspace`."""
    table, at = {}, 0
    for name, (dtype, count, _) in arrays.items():
        dtype = np.dtype(dtype)
        table[name] = dict(dtype=_type_words(dtype), count=int(count), offset=at)
        at += -(-count * dtype.itemsize // ALIGN) * ALIGN
    content = dict(kind=kind, version=version, about=about, arrays=table, sum=UNKNOWN)
    head = _head(content)
    digest = xxhash.xxh3_128()
    with open(path, "wb", buffering=1 << 20) as file:
        file.write(head)
        for name, (dtype, count, pieces) in arrays.items():
            written = 0
            for piece in pieces:
                piece = np.ascontiguousarray(piece, dtype)
                digest.update(piece.view(np.uint8))
                file.write(piece.view(np.uint8))
                written += len(piece)
            assert written == count, f"{path}: {written} of {count} numbers of {name}"
            file.write(bytes(-file.tell() % ALIGN))
        file.seek(0)
        file.write(_head(content | dict(sum=digest.hexdigest())))
        file.flush()
        os.fsync(file.fileno())


def read_arrays(path, kind: str, version: int, verify: bool = False) -> ArrayFile:
    """Open a file of this kind. verify: read all of it and compare the checksum.

    Raises DataError if the file is missing, of another kind or version, truncated or damaged.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(len(MAGIC) + LENGTH.size)
            length = LENGTH.unpack_from(start, len(MAGIC))[0] if len(start) == len(MAGIC) + LENGTH.size else 0
            if start[: len(MAGIC)] != MAGIC or length > size:
                raise _refused(path, kind, "it does not begin like one")
            head = file.read(length)
    except FileNotFoundError:
        raise missing_file(path) from None
    try:
        content = json.loads(head)
        arrays = content["arrays"]
        own = content["kind"], content["version"]
        if own != (kind, version):
            raise _refused(path, kind, f"it is version {own[1]} of {own[0]!r}, not version {version}")
        views, first = {}, len(start) + length
        for name, entry in arrays.items():
            views[name] = _view(path, size, first + entry["offset"], entry["count"], _type_of(entry["dtype"]))
        about, total = dict(content["about"]), str(content["sum"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(path, kind, f"its head is damaged: {error}") from None
    file = ArrayFile(path, about, views, total)
    if verify and checksum_of(file) != total:
        raise _refused(path, kind, "its checksum does not match: it is damaged")
    return file


def checksum_of(file: ArrayFile) -> str:
    """The checksum of the arrays' present contents, read in pieces."""
    digest = xxhash.xxh3_128()
    for array in file.arrays.values():
        data = array.view(np.uint8)
        for at in range(0, len(data), PIECE):
            digest.update(data[at : at + PIECE])
    return digest.hexdigest()


def _head(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False).encode()
    text += b" " * (-(len(MAGIC) + LENGTH.size + len(text)) % ALIGN)
    return MAGIC + LENGTH.pack(len(text)) + text


def _view(path: Path, size: int, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
    if type(count) is not int or count < 0 or offset < 0 or offset + count * dtype.itemsize > size:
        raise ValueError(f"{count} numbers at byte {offset} of {size}")
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)


def _type_words(dtype: np.dtype) -> str | list:
    return dtype.descr if dtype.names else dtype.str


def _type_of(words) -> np.dtype:
    return np.dtype([tuple(field) for field in words] if isinstance(words, list) else str(words))


def _refused(path: Path, kind: str, why: str) -> DataError:
    return DataError(f"{path} is no {kind}", why, "build it again, or copy it again")
