# SPDX-License-Identifier: Apache-2.0
"""Token files: `<prefix>.bin` holds token ids, `<prefix>.idx` the positions of sequences and documents.

The format is Megatron-LM's, byte for byte, little-endian without padding:

    offset  type        content
    0       9 bytes     "MMIDIDX" and two zero bytes
    9       uint64      version, 1
    17      uint8       code of the dtype of the ids (see DTYPES)
    18      uint64      S, number of sequences
    26      uint64      D, number of documents + 1
    34      int32[S]    tokens of each sequence
            int64[S]    byte offset of each sequence in the .bin
            int64[D]    sequences before each document; starts with 0, ends with S
            int8[S]     mode of each sequence, such as 0 text and 1 image; only in multimodal data

    tokens = IndexedDataset("corpus_text_document")
    tokens.get(0, offset=2, length=3)  # array([ 257, 1332,   13], dtype=uint16)

Datasets on token files name the origin of their samples, and check token ids (`refuse_unknown_tokens`).
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.errors import DataError, no_such_file

DTYPES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
LENGTH_TYPE, OFFSET_TYPE, MODE_TYPE = np.dtype("<i4"), np.dtype("<i8"), np.dtype("i1")
ENDINGS = (".bin", ".idx", "_ids.npy", "_idx.npz", "_ids.npz")  # of token files; the last three are PaddlePaddle's
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"


def token_dtype(vocab_size: int | None) -> np.dtype:
    """Megatron-LM's dtype of ids: uint16 for vocabularies below 65500 (not 65536), int32 otherwise."""
    return DTYPES[8] if vocab_size is not None and vocab_size < 65500 else DTYPES[4]


class TokenFiles:
    """Token files in any format, memory-mapped or read by one of `bin_readers`. Opening them reads no tokens.

    `prefix`, `tokens_path`, `index_path`, all `tokens` and their `dtype`, `sequence_lengths` int32[S] in tokens,
    `sequence_pointers` int64[S], the tokens before each sequence x `pointer_unit`, `document_indices`
    int64[documents + 1] in sequences, `sequence_modes` int8[S] (see above) or None. A subclass for each format opens the
    files, sets these attributes and calls `_check`.
    """

    prefix: str
    tokens_path: str
    index_path: str
    dtype: np.dtype
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    pointer_unit: int
    document_indices: np.ndarray
    sequence_modes: np.ndarray | None = None
    tokens: np.ndarray
    read_bin: Callable | None

    def place(self) -> tuple[str, int, int] | None:
        """(file, first byte, last byte + 1) of the tokens on disk; None if they are compressed."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def __reduce__(self):
        return type(self), (self.prefix, self.read_bin)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of one sequence: read-only, and a view where the file is memory-mapped.

        Raises IndexError for a range outside of the sequence, DataError if the index points outside of the tokens.
        """
        start, stop = self._range(sequence, offset, length)
        return self.tokens[start:stop]

    def get_parts(self, parts: Iterable[tuple[int, int, int]]) -> list[np.ndarray]:
        """The tokens of several (sequence, offset, length). From an object store they come together, not one by one."""
        ranges = [self._range(*part) for part in parts]
        if isinstance(self.tokens, np.ndarray):
            return [self.tokens[start:stop] for start, stop in ranges]
        return self.tokens.read_all(ranges)

    def _range(self, sequence: int, offset: int, length: int | None) -> tuple[int, int]:
        total = int(self.sequence_lengths[sequence])
        length = total - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > total:
            raise IndexError(f"tokens {offset}..{offset + length} of a sequence of {total}")
        start = int(self.sequence_pointers[sequence]) // self.pointer_unit + offset
        if start < 0 or start + length > len(self.tokens):
            raise DataError(
                f"{self.index_path}: sequence {sequence} points outside of the {Path(self.tokens_path).suffix}",
                f"tokens {start}..{start + length} of {len(self.tokens)}",
                "the index is damaged: run preprocess_data.py again",
            )
        return start, start + length

    def _check(self) -> None:
        """Checks that need not read the whole index; `get` checks each range."""
        documents, lengths = self.document_indices, self.sequence_lengths
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(self):
            raise DataError(
                f"{self.index_path}: its documents do not cover its {len(self)} sequences", do="preprocess it again"
            )
        expected = int(lengths.sum(dtype=np.int64))
        if expected != len(self.tokens) or (len(lengths) and lengths.min() < 0):
            raise DataError(
                f"{self.tokens_path} holds {len(self.tokens)} tokens, its {Path(self.index_path).suffix} describes "
                f"{expected}",
                do="one of the two is cut short or from another run: copy both again, or preprocess again",
            )


class IndexedDataset(TokenFiles):
    """Token files in Megatron-LM's format, `<prefix>.bin` and `<prefix>.idx`; `sequence_pointers` are in bytes.

    read_bin: how the `.bin` is read (bin_readers.py; default: memory-mapped).
    Raises DataError for a missing, truncated or inconsistent file, and names it.
    """

    def __init__(self, prefix: str | os.PathLike, read_bin: Callable | None = None):
        self.prefix, self.read_bin = bare_prefix(prefix), read_bin
        if "://" in self.prefix:
            raise DataError(
                f"{self.prefix} is not on this machine", do="copy .bin and .idx here, and give their prefix"
            )
        self.tokens_path, self.index_path = f"{self.prefix}.bin", f"{self.prefix}.idx"
        index = map_file(self.index_path)
        self.dtype, sequences, documents = _read_header(self.index_path, index)
        self.pointer_unit = self.dtype.itemsize
        at = HEADER.size
        self.sequence_lengths = np.frombuffer(index, LENGTH_TYPE, sequences, at)
        at += self.sequence_lengths.nbytes
        self.sequence_pointers = np.frombuffer(index, OFFSET_TYPE, sequences, at)
        at += self.sequence_pointers.nbytes
        self.document_indices = np.frombuffer(index, OFFSET_TYPE, documents, at)
        at += self.document_indices.nbytes
        self.sequence_modes = np.frombuffer(index, MODE_TYPE, sequences, at) if at < len(index) else None
        self.tokens = (read_bin or map_bin)(self.tokens_path, self.dtype)
        self._check()

    def place(self) -> tuple[str, int, int]:
        return self.tokens_path, 0, self.tokens.nbytes


def bare_prefix(prefix: str | os.PathLike) -> str:
    """The path without an ending such as `.bin` that tab completion left on it."""
    prefix = os.fspath(prefix)
    return next((prefix[: -len(ending)] for ending in ENDINGS if prefix.endswith(ending)), prefix)


def write_index(path: str | os.PathLike, dtype, sequence_lengths: np.ndarray, document_indices: np.ndarray) -> None:
    """Write an `.idx` from whole arrays: `sequence_lengths` [S] in tokens, `document_indices` [documents + 1]."""
    per_document = np.diff(np.asarray(document_indices, OFFSET_TYPE))
    lengths = np.asarray(sequence_lengths, LENGTH_TYPE)
    stream_index(path, dtype, len(lengths), len(per_document), lambda: [lengths], lambda: [per_document])


def stream_index(
    path: str | os.PathLike,
    dtype,
    num_sequences: int,
    num_documents: int,
    lengths: Callable[[], Iterable[np.ndarray]],
    per_document: Callable[[], Iterable[np.ndarray]],
    modes: Callable[[], Iterable[np.ndarray]] | None = None,
) -> None:
    """Write an `.idx` piece by piece, for indices larger than memory. The file is synced to disk on return.

    `lengths()` yields the tokens of each sequence in pieces (it is called twice), `per_document()` the number of
    sequences of each document, `modes()` the mode of each sequence, for multimodal data.
    """
    with open(path, "wb", buffering=1 << 20) as file:
        file.write(HEADER.pack(MAGIC, 1, dtype_code(dtype), num_sequences, num_documents + 1))
        for piece in lengths():
            file.write(np.ascontiguousarray(piece, LENGTH_TYPE).data)
        for sums in running_sums(lengths()):
            file.write((sums * np.dtype(dtype).itemsize).data)
        file.seek(-OFFSET_TYPE.itemsize, os.SEEK_CUR)  # the total is no start of a sequence
        for sums in running_sums(per_document()):
            file.write(sums.data)
        for piece in modes() if modes else ():
            file.write(np.ascontiguousarray(piece, MODE_TYPE).data)
        file.flush()
        expected = HEADER.size + (13 if modes else 12) * num_sequences + 8 * (num_documents + 1)
        assert file.tell() == expected, f"{path}: {file.tell()} bytes written instead of {expected}"
        os.fsync(file.fileno())


def running_sums(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """0 and the running sums of all values."""
    total = np.zeros(1, OFFSET_TYPE)
    yield total
    for piece in pieces:
        sums = np.cumsum(piece, dtype=OFFSET_TYPE) + total
        total = sums[-1:] if len(sums) else total
        yield sums


def dtype_code(dtype) -> int:
    """The code of a dtype in the header."""
    return next(code for code, known in DTYPES.items() if known == np.dtype(dtype))


def map_bin(path: str, dtype: np.dtype, at: int = 0, count: int | None = None) -> np.ndarray:
    """The tokens of a memory-mapped file: `count` of them from byte `at` on, by default all."""
    data = map_file(path)
    return np.frombuffer(data, dtype, whole_tokens(path, len(data) - at, dtype) if count is None else count, at)


def whole_tokens(path: str, size: int, dtype: np.dtype) -> int:
    """The number of tokens in so many bytes. Raises DataError unless it is whole."""
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: {size} bytes are no whole number of {dtype.name} tokens",
            do="the file is cut short or belongs to another .idx: copy or preprocess it again",
        )
    return size // dtype.itemsize


def map_file(path: str) -> mmap.mmap | bytes:
    """Map a file into read-only memory. An empty file cannot be mapped and gives b''."""
    with opened_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def opened_file(path: str, mode: str = "rb"):
    """A token file, opened without a buffer. Raises DataError if there is none."""
    try:
        return open(path, mode, buffering=0)
    except FileNotFoundError:
        raise DataError(f"{path}: {no_such_file(path)}", *why_missing(bare_prefix(path))) from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory, not a token file") from None


def why_missing(prefix: str) -> tuple[str | None, str]:
    """Why a token file may be missing, and what to do. Recognizes a folder, a text file and an incomplete prefix."""
    path = Path(prefix)
    if path.is_file():
        stem = path.name.partition(".")[0]
        return (
            f"{prefix} is a file, not a prefix of token files",
            f"python preprocess_data.py --input {prefix} --output-prefix {stem} --append-eod and the tokenizer's flags; "
            f"then --data-path {stem}_text_document (Colossal-AI's samples: --dataset-type webtext)",
        )
    for endings in (ENDINGS[:2], ENDINGS[2:4]):
        there, lost = (Path(f"{prefix}{ending}") for ending in endings)
        if there.exists() or lost.exists():
            there, lost = (there, lost) if there.exists() else (lost, there)
            return f"{there} is there: its {lost.suffix} was not copied", f"copy {lost.name} too, or preprocess again"
    name, folder = ("", path) if path.is_dir() else (path.name, path.parent)
    likely = [file for ending in (".idx", "_idx.npz") for file in folder.glob(f"{name}*{ending}")]
    near = sorted(bare_prefix(file) for file in likely) if path.parent.is_dir() else []
    if near and near != [prefix]:
        return f"there is: {', '.join(near[:5])}", "give the whole prefix, up to _document"
    missing = f"no folder {prefix}{nearest_folder(path)}" if path.parent.is_dir() else f"no folder {path.parent}"
    return (f"there is {missing}" if not path.is_dir() else f"the folder {path} has no token files", PREFIX)


PREFIX = (
    "a prefix is the path without .bin/.idx, for example corpus_text_document; preprocess_data.py makes both, and "
    "megatron.tools.create_pretraining_data a folder with _ids.npy and _idx.npz"
)


def nearest_folder(path: Path) -> str:
    """The end of a sentence about a missing folder: the similar name of one beside it, or ""."""
    return no_such_file(path, "folder").removeprefix("no such folder")


def _read_header(path: str, index) -> tuple[np.dtype, int, int]:
    """dtype, number of sequences and length of the document index, checked against the size of the file."""
    if len(index) < HEADER.size or index[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: not a Megatron .idx file", do="preprocess_data.py makes .bin/.idx from JSON lines")
    _, version, code, sequences, documents = HEADER.unpack_from(index)
    if version != 1 or code not in DTYPES:
        raise DataError(
            f"{path}: version {version} with dtype code {code} is unknown", "known: version 1, codes 1 to 8"
        )
    size = HEADER.size + 12 * sequences + 8 * documents
    if len(index) not in (size, size + sequences):  # multimodal files have one more byte per sequence
        raise DataError(
            f"{path}: {len(index)} bytes, but its header promises {size}",
            f"{sequences} sequences, {documents} document boundaries",
            "the file is cut short or damaged: copy or preprocess it again",
        )
    return DTYPES[code], sequences, documents


class SamplePart(NamedTuple):
    """A piece of a sample: tokens [offset, offset + length) of a sequence ("document") of a token file."""

    document: int
    offset: int
    length: int


class Origin(NamedTuple):
    """The origin of a sample: token file, index of the sample before the shuffle, and its pieces in order."""

    prefix: str
    number: int
    parts: list[SamplePart]


class UnknownToken(DataError):
    """A sample has a token outside of the vocabulary. token: its id; where: its file and sample"""

    def __init__(self, token: int, size: int, file: str, sample: str):
        self.token, self.where = token, f"{file}, {sample},"
        do = "train with the tokenizer that the data was preprocessed with"
        super().__init__(f"{file} holds token {token}, outside of the vocabulary of {size}", f"in {sample}", do)


def refuse_unknown_tokens(ids: np.ndarray, index: int, dataset) -> None:
    """Raise UnknownToken if sample `index` of a dataset has an id outside of its `vocab_size` (None: unknown)."""
    size = dataset.vocab_size
    if size is not None and (ids.max() >= size or ids.min() < 0):
        wrong = int(ids[(ids >= size) | (ids < 0)][0])
        document = dataset.origin(index).parts[0].document
        sample = f"sample {index}, which starts in document {document}"
        raise UnknownToken(wrong, size, str(dataset.tokens.tokens_path), sample)
