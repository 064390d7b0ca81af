# SPDX-License-Identifier: Apache-2.0
"""The formats of token files: detection, opening, names, writing, and the datasets in a folder.

tokens = open_tokens("corpus_text_document")  # .bin/.idx of Megatron-LM, or _ids.npy/_idx.npz of PaddlePaddle

Token files of PaddleNLP and PaddleFleetX come first: `<prefix>_ids.npy` holds ids, `<prefix>_idx.npz` what follows.

    file                 array   type            content
    <prefix>_ids.npy             uint16, int32   ids of all sequences back to back
    <prefix>_idx.npz     lens    int32[S]        tokens of each sequence ("sentence")
                         sents   int64[S + 1]    tokens before each sequence, and their total; only in PaddleNLP's files
                         docs    int64[D + 1]    sequences before each document; starts with 0, ends with S
    <prefix>_ids.npz     ids     uint16, int32   early versions: both in one file; each sequence is a document
                         lens    uint32[S]

Both are numpy's own formats. Arrays in an .npz are stored uncompressed, so they can be memory-mapped.
"""

import io
import mmap
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

from megatron.data.indexed import (
    DTYPES,
    ENDINGS,
    LENGTH_TYPE,
    OFFSET_TYPE,
    IndexedDataset,
    TokenFiles,
    bare_prefix,
    map_file,
    running_sums,
    stream_index,
    token_dtype,
)
from megatron.errors import DataError

IDS, INDEX, OLD = "_ids.npy", "_idx.npz", "_ids.npz"
HEAD = 128  # bytes of the header of a one-dimensional .npy of any size
TOKEN_TYPES = tuple(dtype for dtype in DTYPES.values() if dtype.kind in "iu")
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip's member: lengths of its name and of its extra field
KNOWN = ("ids", "lens", "sents", "docs")
# zipfile's exceptions for invalid or damaged archives; RuntimeError: encrypted.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError, ValueError)
_AGAIN = "copy it again, or make it again with python -m megatron.tools.create_pretraining_data"


def paddle_dtype(vocab_size: int | None) -> np.dtype:
    """PaddleNLP's dtype of ids: uint16 for vocabularies below 65535, int32 otherwise."""
    return DTYPES[8] if vocab_size is not None and vocab_size < 2**16 - 1 else DTYPES[4]


class Mapped(NamedTuple):
    """An array and the offset of its data in the file; `at` is None for an array decompressed into memory."""

    array: np.ndarray
    at: int | None


class PaddleDataset(TokenFiles):
    """Token files in PaddlePaddle's format: `<prefix>_ids.npy` with `<prefix>_idx.npz`, or an old `<prefix>_ids.npz`.

    Raises DataError for a missing, truncated, inconsistent or foreign file, and names it. Pickled objects are never
    loaded.
    """

    def __init__(self, prefix: str | os.PathLike, read_bin: Callable | None = None):
        self.prefix, self.read_bin = bare_prefix(prefix), read_bin
        self.tokens_path, self.index_path = f"{self.prefix}{IDS}", f"{self.prefix}{INDEX}"
        old = f"{self.prefix}{OLD}"
        if os.path.exists(old) and not os.path.exists(self.index_path):
            self.tokens_path = self.index_path = old
            arrays = _read_npz(old, ("ids", "lens"))
            ids = arrays["ids"]
        else:
            arrays = _read_npz(self.index_path, ("lens", "docs"))
            data = map_file(self.tokens_path)
            ids = _array(data, 0, len(data), self.tokens_path)
        self.dtype, self.tokens, self._at = ids.array.dtype, ids.array, ids.at
        if read_bin and ids.at is not None:
            self.tokens = read_bin(self.tokens_path, self.dtype, ids.at, len(ids.array))
        if self.dtype not in TOKEN_TYPES:
            raise DataError(
                f"{self.tokens_path} holds numbers of type {self.dtype}, not token ids",
                f"known: {', '.join(dtype.name for dtype in TOKEN_TYPES)}",
                _AGAIN,
            )
        self.sequence_lengths = _signed(arrays["lens"].array, LENGTH_TYPE, f"{self.index_path}: lens")
        if "docs" in arrays:
            self.document_indices = _signed(arrays["docs"].array, OFFSET_TYPE, f"{self.index_path}: docs")
        else:
            self.document_indices = np.arange(len(self) + 1, dtype=OFFSET_TYPE)
        self._check()
        self.sequence_pointers, self.pointer_unit = self._find_starts(arrays.get("sents"))[:-1], 1

    def place(self) -> tuple[str, int, int] | None:
        return None if self._at is None else (self.tokens_path, self._at, self._at + self.tokens.nbytes)

    def _find_starts(self, sents: Mapped | None) -> np.ndarray:
        """Tokens before each sequence, and their total: int64 [S + 1]. Without `sents`, in memory."""
        if sents is None:
            starts = np.zeros(len(self) + 1, OFFSET_TYPE)
            np.cumsum(self.sequence_lengths, dtype=OFFSET_TYPE, out=starts[1:])
            return starts
        starts = _signed(sents.array, OFFSET_TYPE, f"{self.index_path}: sents")
        if len(starts) != len(self) + 1 or starts[0] != 0 or starts[-1] != self.num_tokens:
            raise DataError(f"{self.index_path}: lens and sents disagree", do=_AGAIN)
        return starts


def _signed(array: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """View counts as a signed dtype. Old files have lens as uint32; too large values become negative."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize != dtype.itemsize:
        raise DataError(f"{what} are of type {array.dtype}, not {dtype.name}", do=_AGAIN)
    return array.view(dtype)


def _read_npz(path: str, needed: tuple[str, ...]) -> dict[str, Mapped]:
    """The arrays of an .npz by name."""
    data = map_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            lacks = [name for name in needed if name not in members]
            if lacks:
                has = ", ".join(members) or "nothing"
                raise DataError(f"{path} has no array {' and no '.join(lacks)}", f"it has: {has}", _AGAIN)
            return {name: _member(archive, info, data, path) for name, info in members.items() if name in KNOWN}
    except _DAMAGE as error:
        raise DataError(f"{path}: cut short, damaged or no .npz file", str(error), _AGAIN) from None


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, data: mmap.mmap | bytes, path: str) -> Mapped:
    """One array of an archive: memory-mapped if stored uncompressed, else decompressed."""
    what = f"{path}: {info.filename}"
    if info.compress_type != zipfile.ZIP_STORED:
        return _array(content := archive.read(info), 0, len(content), what)._replace(at=None)
    name, extra = _LOCAL_HEADER.unpack_from(data, info.header_offset)
    start = info.header_offset + 30 + name + extra
    return _array(data, start, start + info.file_size, what)


def _array(data: mmap.mmap | bytes, start: int, stop: int, what: str) -> Mapped:
    """The array in bytes [start, stop) of a file, in numpy's format: one dimension, little-endian, no objects."""
    head = io.BytesIO(data[start : min(stop, start + (1 << 16))])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from damaged headers
            version = npy.read_magic(head)
            read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
            shape, _, dtype = read_header(head)
    except Exception as error:  # numpy parses the header as Python, with any of its errors
        raise DataError(f"{what}: cut short, damaged or not of numpy's format", str(error), _AGAIN) from None
    if dtype.kind not in "iu" or dtype.byteorder == ">" or len(shape) != 1:
        raise DataError(
            f"{what}: numbers of type {dtype.str}, shape {list(shape)}, instead of a list of little-endian integers",
            do=_AGAIN,
        )
    at, size = start + head.tell(), shape[0] * dtype.itemsize
    if at + size != stop or stop > len(data):
        raise DataError(
            f"{what}: {min(stop, len(data)) - at:,} bytes of numbers, but its header promises {size:,}",
            "the file is cut short or damaged",
            _AGAIN,
        )
    return Mapped(np.frombuffer(data, dtype, shape[0], at), at)


# Writing ------------------------------------------------------------------------------------------------------------------


def npy_head(dtype: np.dtype, count: int) -> bytes:
    """numpy's header of HEAD bytes for an array of `count` numbers."""
    head = io.BytesIO()
    npy.write_array_header_1_0(head, dict(descr=npy.dtype_to_descr(dtype), fortran_order=False, shape=(count,)))
    assert head.tell() == HEAD, f"numpy's header has {head.tell()} bytes"
    return head.getvalue()


def stream_npz(
    path: str | os.PathLike,
    num_sequences: int,
    num_documents: int,
    lengths: Callable[[], Iterable[np.ndarray]],
    per_document: Callable[[], Iterable[np.ndarray]],
) -> None:
    """Write an `_idx.npz` piece by piece, with the bytes of `numpy.savez(lens=..., sents=..., docs=...)`.

    `lengths()` yields the tokens of each sequence in pieces (it is called twice), `per_document()` the number of
    sequences of each document. The file is synced to disk on return.
    """
    members = (
        ("lens", LENGTH_TYPE, num_sequences, (piece.astype(LENGTH_TYPE) for piece in lengths())),
        ("sents", OFFSET_TYPE, num_sequences + 1, running_sums(lengths())),
        ("docs", OFFSET_TYPE, num_documents + 1, running_sums(per_document())),
    )
    with open(path, "wb", buffering=1 << 20) as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, dtype, count, pieces in members:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    member.write(npy_head(dtype, count))
                    written = sum(member.write(piece.data) for piece in pieces)
                assert written == count * dtype.itemsize, f"{path}: {written} bytes of {name} for {count} numbers"
        file.flush()
        os.fsync(file.fileno())


# ---- all formats -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A format of token files.

    `endings`: of the token file and of the index. `dtype`: vocabulary size -> dtype of an id. `head`: bytes before the
    tokens; `make_head`: (dtype, tokens) -> these bytes. `write_index`: (path, dtype, sequences, documents, lengths,
    per_document) as `indexed.stream_index`. `keeps_empty`: whether a document without tokens counts.
    """

    name: str
    endings: tuple[str, str]
    open: Callable[..., TokenFiles]
    dtype: Callable[[int | None], np.dtype]
    head: int
    make_head: Callable[[np.dtype, int], bytes]
    write_index: Callable[..., None]
    keeps_empty: bool


MEGATRON = Format(
    "megatron", (".bin", ".idx"), IndexedDataset, token_dtype, 0, lambda dtype, count: b"", stream_index, True
)
PADDLE = Format(
    "paddle",
    (IDS, INDEX),
    PaddleDataset,
    paddle_dtype,
    HEAD,
    npy_head,
    lambda path, dtype, *rest: stream_npz(path, *rest),
    False,
)
FORMATS = {form.name: form for form in (MEGATRON, PADDLE)}
LAYOUTS = (MEGATRON.endings, PADDLE.endings, (OLD,))  # endings of the files of one dataset


def open_tokens(prefix: str | os.PathLike, read_bin: Callable | None = None) -> TokenFiles:
    """Open the token files of a prefix, in any format. Raises DataError for missing or damaged files, or two formats.

    read_bin: how the tokens are read (bin_readers.py; default: memory-mapped)
    """
    kind = MEGATRON if endings_of(prefix) == MEGATRON.endings else PADDLE
    return kind.open(prefix, read_bin)


def endings_of(prefix: str | os.PathLike) -> tuple[str, ...]:
    """The endings of a prefix's files: those of the format that exists, else of .bin/.idx.

    Raises DataError for files of two formats: companion files (checksums, vocabulary) could belong to either.
    """
    prefix = bare_prefix(prefix)
    there = [endings for endings in LAYOUTS if os.path.exists(prefix + endings[-1])]
    there = there or [endings for endings in LAYOUTS if os.path.exists(prefix + endings[0])]
    if len(there) > 1:
        names = " and ".join(prefix + endings[-1] for endings in there)
        raise DataError(f"{names} both exist", do="one name must be one dataset: rename or remove one of them")
    return there[0] if there else MEGATRON.endings


def is_folder(word: str) -> bool:
    """Whether a word names a folder, and no token files with the same prefix exist."""
    return os.path.isdir(word) and not any(os.path.exists(word + ending) for ending in ENDINGS)


def datasets_of(word: str) -> list[str]:
    """The prefixes of a word: the word itself, or all prefixes in the folder that it names."""
    return prefixes_in(word) if is_folder(word) else [word]


def prefixes_in(folder: str | os.PathLike) -> list[str]:
    """The prefixes of all token files in a folder, sorted; sub-folders are not searched.

    Raises DataError for a folder without token files, or if one file of a pair is missing.
    """
    files = [path for path in Path(folder).iterdir() if path.is_file() and not path.name.startswith(".")]
    prefixes = prefixes_of(files)
    if not prefixes:
        why = "token files are *.bin with *.idx, *_ids.npy with *_idx.npz, or *_ids.npz; sub-folders are not searched"
        raise DataError(f"there are no token files in the folder {folder}", why, "give a prefix or another folder")
    return prefixes


def prefixes_of(files: Iterable[Path]) -> list[str]:
    """The prefixes of the token files among some files, sorted. Raises DataError if one file of a pair is missing."""
    paths, prefixes = set(map(str, files)), set()
    for endings in LAYOUTS:
        for path in sorted(path for path in paths if path.endswith(endings)):
            prefix = path.removesuffix(next(ending for ending in endings if path.endswith(ending)))
            if lost := [prefix + ending for ending in endings if prefix + ending not in paths]:
                do = "copy both, or remove it from the folder"
                raise DataError(f"{path} has no {Path(lost[0]).name} next to it", do=do)
            prefixes.add(prefix)
    return sorted(prefixes)
