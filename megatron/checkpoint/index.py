# SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint directory, validated before use.

The index of a large job is in parts: a rank reads those of its layers, and validates the entries that it loads.
An index is untrusted input. Names, shapes, sizes and offsets are compared with each other and with the files on the disk
before any memory is allocated for them, so a forged index is refused.
"""

import contextlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.boxes import Box, describe, find_flaw
from megatron.checkpoint.store import BLOCK, COPY, DTYPES, FORMAT, VERSIONS
from megatron.storage.durable import Damaged, checksum, read_sealed, unreadable
from megatron.storage.urls import UrlPath

_FILE_NAME = re.compile(r"shard_\d{5,9}(-[0-9a-f]{1,32})?\.safetensors")
_TABLE_NAME = re.compile(r"index_\d{5,9}(-[0-9a-f]{1,32})?\.json")
_PARITY_NAME = re.compile(r"parity_\d{5,9}\.bin")
_STATE_NAME = re.compile(r"state(-[0-9a-f]{1,32})?\.json")
_HEADER_LIMIT = 1 << 28
_BLOCK_LIMIT = 1 << 28
_MAX_DIMS = 16


class Stored(NamedTuple):
    """One stored box: its position in the tensor and on the disk."""

    box: Box
    file: str
    key: str
    checksums: list[str]


class Tensor(NamedTuple):
    """The index entry of a logical tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: list[Stored]


class IndexTable(NamedTuple):
    """A file with the entries of some tensors."""

    bytes: int
    checksum: str
    names: list[str]


class ParityFile(NamedTuple):
    """A parity file: its bytes, the checksums of its blocks, and the files that are XORed in it."""

    bytes: int
    checksums: list[str]
    of: list[str]


class Index(NamedTuple):
    """The content of index.json.

    block:           bytes under one checksum
    files:           file name -> (bytes, checksum of its header)
    tensors:         name -> Tensor
    tables:          file name -> IndexTable, of an index in parts
    parity:          file name -> ParityFile (--save-parity)
    """

    block: int
    files: dict[str, tuple[int, str]]
    tensors: Mapping[str, Tensor]
    state_checksum: str
    state_file: str = "state.json"
    tables: Mapping[str, IndexTable] = MappingProxyType({})
    parity: Mapping[str, ParityFile] = MappingProxyType({})

    @property
    def names(self) -> set[str]:
        """The names of all files of the checkpoint."""
        small = {"index.json", self.state_file, *self.tables}
        return {*small, *self.files, *self.parity, *(COPY + name for name in (small if self.parity else ()))}


class TensorsInParts(Mapping):
    """name -> Tensor of an index in parts. The first use of a name reads its file and validates its entry, not others'.

    bytes_read: of the files read so far. Looking up a name raises Damaged if its file or entry is.
    """

    def __init__(self, folder: Path, block: int, files: dict, tables: Mapping[str, IndexTable]):
        self.folder, self.block, self.files, self.tables = folder, block, files, tables
        self.file_of = {name: file for file, table in tables.items() for name in table.names}
        self.bytes_read = 0
        self._entries: dict[str, dict] = {}
        self._valid: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._valid:
            file = self.file_of[name]
            with self._lock:
                if file not in self._entries:
                    self._entries[file] = self._read(file)
            with _as_damage(self.folder / file):
                tensor = _tensor(name, self._entries[file][name], self.block, self.files)
                for stored in tensor.stored:  # so no other tensor has the same bytes
                    _demand(stored.key in (name, name + describe(stored.box)), f"{name}: key {stored.key!r}")
                _refuse_shared([tensor])
                self._valid[name] = tensor
        return self._valid[name]

    def __contains__(self, name: object) -> bool:
        return name in self.file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def _read(self, file: str) -> dict:
        path, table = self.folder / file, self.tables[file]
        mark, content = read_sealed(path)
        if mark != table.checksum:
            raise Damaged(f"{path} does not belong to index.json")
        self.bytes_read += table.bytes
        with _as_damage(path):
            _demand(sorted(content["tensors"]) == sorted(table.names), "other tensors than index.json lists")
            return content["tensors"]


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint directory. Raises Damaged when it is missing, altered or invalid."""
    path = folder / "index.json"
    _, content = read_sealed(path)
    if content.get("format") == FORMAT and content.get("version") not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise Damaged(f"{path} has version {content.get('version')!r} of its format, this program reads {known}")
    with _as_damage(path):
        _demand(content["format"] == FORMAT, f"format {content['format']!r}")
        block = _count(content["block"])
        _demand(0 < block <= _BLOCK_LIMIT and block % 16 == 0, f"block of {block} bytes")
        files = {name: _file_entry(name, entry) for name, entry in content["files"].items()}
        tensors = {name: _tensor(name, entry, block, files) for name, entry in content["tensors"].items()}
        _refuse_shared(tensors.values())
        if tables := {name: _table(name, entry) for name, entry in content.get("tables", {}).items()}:
            _demand(not tensors, "tensors in two places")
            names = [name for table in tables.values() for name in table.names]
            _demand(len(set(names)) == len(names), "a tensor in two files")
            tensors = TensorsInParts(folder, block, files, tables)
        state_file = content.get("state_file", "state.json")
        _demand(type(state_file) is str and _STATE_NAME.fullmatch(state_file) is not None, f"state {state_file!r}")
        parity = {name: _parity_file(name, entry, files) for name, entry in content.get("parity", {}).items()}
        return Index(block, files, tensors, str(content["state"]), state_file, tables, parity)


@contextlib.contextmanager
def _as_damage(path: Path):
    """A context in which errors of a forged or altered index become Damaged."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{path} is not a valid index: {error}") from None


def _refuse_shared(tensors: Iterable[Tensor]) -> None:
    pairs = [(stored.file, stored.key) for tensor in tensors for stored in tensor.stored]
    _demand(len(set(pairs)) == len(pairs), "two boxes share the same bytes")


def _table(name: str, entry: dict) -> IndexTable:
    _demand(_TABLE_NAME.fullmatch(name) is not None, f"file name {name!r}")
    names = entry["names"]
    _demand(type(names) is list and all(type(one) is str for one in names), f"names in {name}")
    return IndexTable(_count(entry["bytes"]), str(entry["checksum"]), names)


def _parity_file(name: str, entry: dict, files: dict) -> ParityFile:
    _demand(_PARITY_NAME.fullmatch(name) is not None, f"file name {name!r}")
    size, sums, of = _count(entry["bytes"]), entry["checksums"], entry["of"]
    _demand(type(of) is list and len(of) > 0 and all(one in files for one in of), f"files in {name}: {of!r}")
    _demand(size == max(files[one][0] for one in of), f"{size} bytes in {name}")
    _demand(type(sums) is list and len(sums) == -(-size // BLOCK), f"checksums of {name}")
    return ParityFile(size, [str(one) for one in sums], of)


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _count(value: Any) -> int:
    _demand(type(value) is int and 0 <= value < 1 << 63, f"{value!r} is not a count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    _demand(type(values) is list and len(values) <= _MAX_DIMS, f"{values!r} is not a list of counts")
    return tuple(map(_count, values))


def _file_entry(name: str, entry: dict) -> tuple[int, str]:
    _demand(_FILE_NAME.fullmatch(name) is not None, f"file name {name!r}")  # no paths, no dots, no devices
    return _count(entry["bytes"]), str(entry["header"])


def _tensor(name: str, entry: dict, block: int, files: dict) -> Tensor:
    _demand(entry["dtype"] in DTYPES, f"{name}: dtype {entry['dtype']!r}")
    dtype, shape = DTYPES[entry["dtype"]], _counts(entry["shape"])
    stored = []
    for offset, extent, file, key, checksums in entry["boxes"]:
        box = Box(_counts(offset), _counts(extent))
        size = box.size * dtype.itemsize
        _demand(file in files, f"{name}: file {file!r} is not listed")
        _demand(size <= files[file][0], f"{name}: {size} bytes in a file of {files[file][0]}")
        _demand(type(key) is str and type(checksums) is list, f"{name}: key {key!r} and its checksums")
        _demand(len(checksums) == -(-size // block), f"{name}: {len(checksums)} checksums of {size} bytes")
        stored.append(Stored(box, file, key, checksums))
    flaw = find_flaw(shape, [item.box for item in stored])
    _demand(flaw is None, f"{name}: {flaw}")
    return Tensor(dtype, shape, stored)


class ShardFile:
    """An open safetensors file whose size and header match the index. Closed when garbage collected."""

    def __init__(self, path: Path, size: int, header_checksum: str):
        """Raises Damaged when the file is missing or does not match."""
        self.path, self.size = path, size
        check_size(path, size)
        if not isinstance(path, UrlPath):
            try:
                self._file = open(path, "rb", buffering=0)
            except OSError as error:
                raise unreadable(path, error) from None
        try:
            self.entries = self._parse(header_checksum)
        except Damaged:
            if not isinstance(path, UrlPath):
                raise
            self.entries = self._parse(header_checksum)  # retry: it may have been damaged in transfer

    def _parse(self, header_checksum: str) -> dict[str, tuple[int, str, list[int]]]:
        """Parse the header: key -> (first byte, dtype code, shape)."""
        head = bytearray(8)
        self.read_into(0, memoryview(head), "the header")
        length = int.from_bytes(head, "little")
        if length > min(_HEADER_LIMIT, self.size - 8):
            raise Damaged(f"{self.path} is damaged: a header of {length:,} bytes in a file of {self.size:,}")
        header = bytearray(8 + length)
        self.read_into(0, memoryview(header), "the header")
        if checksum(header) != header_checksum:
            raise Damaged(f"{self.path} is damaged in its header, or belongs to another checkpoint")
        try:
            entries, end = {}, 0
            for key, entry in json.loads(header[8:]).items():
                start, stop = _counts(entry["data_offsets"])
                bytes_needed = prod(_counts(entry["shape"])) * DTYPES[entry["dtype"]].itemsize
                _demand(start == end and stop - start == bytes_needed, f"{key}: bytes {start} to {stop}")
                entries[key], end = (8 + length + start, entry["dtype"], entry["shape"]), stop
            _demand(8 + length + end == self.size, f"{end} bytes of data")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise Damaged(f"{self.path} has no valid header: {error}") from None
        return entries

    def read_into(self, at: int, data: memoryview, what: str) -> None:
        """Fill `data` with the bytes from `at` on. Raises Damaged. what: name of the content for its message."""
        done = 0
        while done < len(data):
            try:
                count = self._read(at + done, data[done:])
            except OSError as error:
                raise unreadable(self.path, error, what) from None
            if count == 0:
                raise Damaged(f"{self.path} ends in {what}, at byte {at + done:,}")
            done += count

    def holds(self, at: int, data: memoryview, what: str, wanted: str) -> bool:
        """Whether the bytes from `at` on, which are read into `data`, have a checksum. A transfer is tried twice."""
        for _ in range(2 if isinstance(self.path, UrlPath) else 1):
            self.read_into(at, data, what)
            if checksum(data) == wanted:
                return True
        return False

    def _read(self, at: int, data: memoryview) -> int:
        """Read bytes from `at` on into the start of `data`. Returns their number."""
        if not isinstance(self.path, UrlPath):
            return os.preadv(self._file.fileno(), [data], at)
        content = self.path.read_range(at, len(data))
        data[: len(content)] = content
        return len(content)


def differing_blocks(
    file: ShardFile, block: int, sums: Mapping[str, list[str]], every: int, turn: int
) -> Iterator[str]:
    """A sentence for each block of a file that does not have its checksum; reads every so many, from `turn` on.

    sums: key -> the checksums of its blocks
    """
    number, buffer = 0, memoryview(bytearray(block))
    for key, (at, code, shape) in file.entries.items():
        stop = at + prod(shape) * DTYPES[code].itemsize
        for wanted in sums[key]:
            data = buffer[: min(block, stop - at)]
            if number % every == turn and not file.holds(at, data, key, wanted):
                yield f"{file.path}: the bytes from {at:,} to {at + len(data):,} differ"
            at, number = at + len(data), number + 1


def check_size(path: Path, size: int) -> None:
    """Raise Damaged unless `path` is a regular file of this size. Reads no data."""
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path} is not a regular file")
    if status.st_size != size:
        raise Damaged(f"{path} has {status.st_size:,} bytes instead of {size:,}")
