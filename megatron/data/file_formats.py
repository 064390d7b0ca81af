# SPDX-License-Identifier: Apache-2.0
"""Detect the format of an input file from its name and its first bytes, and stream the members of a tar archive.

claimed("corpus.jsonl.gz") -> ("gzip", LINES)    claimed("corpus.jsonl.zst.tar") -> (TAR,)    claimed("wiki_00") -> ()
claimed("poems.txt.zst") -> ("zstd", TEXT)
detected(first_bytes) -> "gzip", TAR, LINES or the name of a format without lines
"""

import tarfile
from collections.abc import Iterator
from pathlib import PurePath
from typing import BinaryIO

from megatron.errors import DataError

TAR, LINES, TEXT = "tar", "lines", "text"
HEAD = 512  # bytes that identify a file: the header of a tar archive
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
OTHERS = {  # common formats that are not supported; none of these begins a line of JSON
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x1f\x9d": "compress (.Z)",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"\x89HDF": "HDF5",
    b"\x93NUMPY": "a numpy array",
    b"SQLite format 3": "SQLite",
    b"%PDF": "PDF",
    b"MMIDIDX": "a token index (.idx)",
}
SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
TAR_SUFFIXES = {".tgz": ".tar.gz", ".tzst": ".tar.zst", ".tbz2": ".tar.bz2", ".txz": ".tar.xz"}
LINE_SUFFIXES = (".json", ".jsonl", ".ndjson")
TEXT_SUFFIX = ".txt"
INSIDE = (
    {".tar": TAR, ".parquet": "Parquet"} | dict.fromkeys(LINE_SUFFIXES, LINES) | {TEXT_SUFFIX: TEXT}
)  # by the suffix after decompression
NAMES = f"*{' *'.join(LINE_SUFFIXES)} or without suffix, else *{TEXT_SUFFIX}; each also with {' '.join(SUFFIXES)}"
WORDS = {TAR: "a tar archive", LINES: "lines of text", TEXT: "plain text"}


def claimed(name: str) -> tuple[str, ...]:
    """The formats that a file name implies, outermost first: compression, then content, as far as known."""
    suffix = PurePath(name).suffix.lower()
    if suffix in TAR_SUFFIXES:
        name = name[: -len(suffix)] + TAR_SUFFIXES[suffix]
        suffix = PurePath(name).suffix
    if suffix in SUFFIXES:
        inner = claimed(name[: -len(suffix)])
        return (SUFFIXES[suffix], *inner)
    return (INSIDE[suffix],) if suffix in INSIDE else ()


def detected(head: bytes) -> str:
    """The format of a file by its first HEAD bytes."""
    for table in (COMPRESSIONS, OTHERS):
        for magic, name in table.items():
            if head.startswith(magic):
                return name
    return TAR if _is_tar(head) else LINES


def _is_tar(head: bytes) -> bool:
    if len(head) < HEAD or not head[0]:
        return len(head) == HEAD and not any(head)  # an empty archive begins with its end
    try:
        tarfile.TarInfo.frombuf(head[:HEAD], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True  # the header's checksum is right


def refuse_another_format(path: str, head: bytes, says: tuple[str, ...], inside: str = "") -> str:
    """The `detected` format. Raises DataError if the name implies another one, or if the format is not supported.

    inside: the compression that `head` was decompressed from
    """
    kind = detected(head)
    if kind in OTHERS.values() or inside and kind in COMPRESSIONS.values():
        do = "unpack or convert it: Parquet and Arrow files are read; JSON lines and .txt also in tar, or packed by gzip, "
        do += "zstd, bzip2 or xz"
        raise DataError(f"{path} holds {_words(kind)}{' inside ' + inside if inside else ''}, not JSON lines", do=do)
    if says and kind != says[0] and (kind, says[0]) != (LINES, TEXT):
        why = f"its name says {_words(says[0])}{' inside ' + inside if inside else ''}, its bytes are {_words(kind)}"
        raise DataError(f"{path} is not what its name says", why, "rename it, or copy or download it again")
    return kind


def _words(kind: str) -> str:
    return WORDS.get(kind, kind)


class _Header(tarfile.TarInfo):
    """A tar header that must be present: tarfile accepts an archive that is truncated between two members."""

    @classmethod
    def fromtarfile(cls, archive):
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # the blocks of zeros at the end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {archive.offset}") from None


def members(stream: BinaryIO) -> Iterator[tuple[str, BinaryIO | None]]:
    """(name, byte stream) of each file in a tar archive, in order; the stream is None for links and devices.

    stream: only needs `read`. Read each member before the next one. Raises tarfile.TarError.
    """
    with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 18, tarinfo=_Header) as archive:
        while (header := archive.next()) is not None:
            if not header.isdir():
                yield header.name, archive.extractfile(header) if header.isreg() else None
            archive.members = []  # else memory grows
