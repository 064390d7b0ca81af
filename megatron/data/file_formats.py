# SPDX-License-Identifier: Apache-2.0
"""Detect the format of an input file, and read archives, plain text and tables as JSON lines.

claimed("corpus.jsonl.gz") -> ("gzip", LINES)    claimed("corpus.jsonl.zst.tar") -> (TAR,)    claimed("wiki_00") -> ()
claimed("poems.txt.zst") -> ("zstd", TEXT)
detected(first_bytes) -> "gzip", TAR, LINES or the name of a format without lines
PlainText(stream, "poems.txt", "blank-line").read(1 << 18) -> b'{"text": "Roses are red,"}\\n{"text": "violets ...'
TableRows("train-00000-of-00002.parquet", "Parquet", ("text",)).read(1) -> b'{"text": "Once upon a time"}\\n...'
dataset_files("wikitext")      files of a folder that `datasets.save_to_disk` wrote, or that the Hugging Face Hub has

A plain text is one document, or several between separators; documents are streamed, so memory does not depend on their
length. Rows of Parquet and Arrow files are read a batch at a time, and need pyarrow. A datasets folder is taken by its own
list of files (state.json); of several splits, only train is.
"""

import codecs
import functools
import json
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import BinaryIO

from megatron.errors import DataError, MissingPackage, did_you_mean

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
# By the suffix after decompression
INSIDE = {".tar": TAR, ".parquet": "Parquet"} | dict.fromkeys(LINE_SUFFIXES, LINES) | {TEXT_SUFFIX: TEXT}
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


def zstd(path: object = ""):
    """The package zstandard. Raises DataError if it is missing. path: of the file that needs it"""
    try:
        import zstandard
    except ImportError:
        what = f"{path}: zstd files need the package zstandard".removeprefix(": ")
        raise MissingPackage(what, do="pip install zstandard") from None
    return zstandard


def members(stream: BinaryIO) -> Iterator[tuple[str, BinaryIO | None]]:
    """(name, byte stream) of each file in a tar archive, in order; the stream is None for links and devices.

    stream: only needs `read`. Read each member before the next one. Raises tarfile.TarError.
    """
    with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 18, tarinfo=_Header) as archive:
        while (header := archive.next()) is not None:
            if not header.isdir():
                yield header.name, archive.extractfile(header) if header.isreg() else None
            archive.members = []  # else memory grows


BLANK_LINE = "blank-line"
SEPARATOR_HELP = "what parts the documents of a .txt: blank-line, or a text (default: a file is one document)"
BLOCK = 1 << 18  # bytes read at a time
_SPACE_AHEAD = re.compile(r"(?:[^\S\n]*\n)+")  # blank lines before a document


class PlainText:
    """A stream of JSON lines, one for each document of a plain text.

    separator: `blank-line` (one or more of them), or a text in which \\n is the end of a line and \\t a tab. Blank lines
    before a document and white space at its end count as part of the separator. Without a separator, the file is one
    document, unchanged. Documents of white space are left out. Reading raises DataError for text that is not UTF-8,
    for binary data, and for files without text.
    """

    def __init__(self, stream, path: str, separator: str | None = None):
        """stream: only needs `read`; path: for messages"""
        texts = _decoded(stream, path)
        self._lines = _as_lines(_separated(texts, path, separator) if separator else _whole(texts, path))

    def read(self, size: int) -> bytes:
        """The next bytes, of any number; b"" at the end."""
        return next(self._lines, b"")


def _decoded(stream, path: str) -> Iterator[str]:
    decoder, line = codecs.getincrementaldecoder("utf-8-sig")(), 1
    while True:
        data = stream.read(BLOCK)
        if (zero := data.find(b"\0")) >= 0:
            line += data.count(b"\n", 0, zero)
            why = "text has no byte of zero, but as UTF-16"
            raise DataError(f"{path}, line {line}: binary data", why, "give text in UTF-8, or leave the file out")
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            why = f"byte 0x{error.object[error.start]:02x}: {error.reason}"
            do = "convert it, for example: iconv -f LATIN1 -t UTF-8"
            raise DataError(f"{path}, line {line}: not UTF-8", why, do) from None
        if not data:
            return
        line += data.count(b"\n")


def _whole(texts: Iterator[str], path: str) -> Iterator[tuple[str, bool]]:
    """(a part of the one document, whether the document ends there)."""
    held, has_text = "", False  # white space at the start: there may be no text after it
    for text in texts:
        held, has_text = held + text, has_text or bool(text.strip())
        if has_text:
            yield held, False
            held = ""
    if not has_text:
        raise _empty(path)
    yield "", True


def _separated(texts: Iterator[str], path: str, separator: str) -> Iterator[tuple[str, bool]]:
    """(a part of a document, whether the document ends there)."""
    blank, separator = separator == BLANK_LINE, separator.replace("\\n", "\n").replace("\\t", "\t")
    pattern = re.compile(r"\n(?:[^\S\n]*\n)+" if blank else re.escape(separator))
    overlap = 0 if blank else len(separator) - 1  # characters at the end that may begin a separator
    held, is_open, occurs, has_text = "", False, False, False

    def begun(piece: str) -> str:
        return piece if is_open or not (ahead := _SPACE_AHEAD.match(piece)) else piece[ahead.end() :]

    for text in texts:
        *ended, rest = pattern.split(held + text)
        occurs = occurs or bool(ended)
        for piece in ended:
            piece = begun(piece).rstrip()
            if piece or is_open:
                yield piece, True
            is_open, has_text = False, has_text or bool(piece)
        # Hold back a possible start of a separator, and white space, which counts only if more text follows.
        part = rest[: len(rest) - overlap].rstrip() if len(rest) > overlap else ""
        held = rest[len(part) :]
        if part:
            yield begun(part), False
            is_open = has_text = True
    if last := begun(held).rstrip():
        yield last, True
    elif is_open:
        yield "", True
    elif not has_text:
        raise _empty(path)
    if not occurs:
        note(f"{path}: the separator {separator!r} does not occur in it: the file is one document")


def _empty(path: str) -> DataError:
    return DataError(f"{path}: there is no text in it", do="leave it out, or copy it again")


def _as_lines(parts: Iterator[tuple[str, bool]]) -> Iterator[bytes]:
    """JSON lines of documents given in parts."""
    is_open = False
    for text, ends in parts:
        head, tail = '{"text": "' * (not is_open), '"}\n' * ends
        if piece := head + json.dumps(text, ensure_ascii=False)[1:-1] + tail:  # b"" would end the stream
            yield piece.encode()
        is_open = not ends


@functools.cache
def note(words: str) -> None:
    """Print a note on stderr, once even if the file is read several times."""
    print(f"note: {words}", file=sys.stderr, flush=True)


PARQUET, ARROW, ARROW_STREAM = TABLE_KINDS = ("Parquet", "Arrow", "an Arrow stream")
TABLE_SUFFIXES = (".parquet", ".arrow")
STATE, SPLITS = "state.json", "dataset_dict.json"  # of `Dataset.save_to_disk`, and of `DatasetDict.save_to_disk`
DESCRIPTIONS = (STATE, SPLITS, "dataset_info.json", "dataset_infos.json")  # JSON beside the rows that is no document
BATCH = 1024  # rows
CACHE = "index_cache"  # the folder beside data files that holds what was computed from them
SPLIT_OF_NAME = re.compile(r"(train|test|validation|valid|dev)(?:[-_.]|$)")


class TableRows:
    """A stream of JSON lines, one for each row. Memory does not depend on the number of rows.

    columns: those that lines have; None: all but binary ones
    """

    def __init__(self, path: str, kind: str, columns: Sequence[str] | None = None):
        self.path, self.columns, self.done, self.rows = path, columns, 0, 0
        self._lines = self._read(kind)

    def read(self, size: int) -> bytes:
        """The next bytes, of any number; b"" at the end. Raises DataError for damaged files and unknown columns."""
        return next(self._lines, b"")

    @property
    def share(self) -> float:
        """The part of the rows that was read; 0 if their number is not known."""
        return self.done / self.rows if self.rows else 0.0

    def _read(self, kind: str) -> Iterator[bytes]:
        pyarrow = _pyarrow(self.path, kind)
        try:
            for batch in self._parquet(pyarrow) if kind == PARQUET else self._arrow(pyarrow, kind):
                self.done += batch.num_rows
                if batch.num_rows:
                    yield b"".join(_line(row) for row in batch.to_pylist())
        except (pyarrow.ArrowInvalid, OSError) as error:
            do = "copy or download it again"
            raise DataError(f"{self.path}: {kind} is damaged or cut short", str(error)[:200], do) from None

    def _parquet(self, pyarrow) -> Iterator:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self.path) as file:
            self.rows, columns = file.metadata.num_rows, self._taken(file.schema_arrow)
            yield from file.iter_batches(BATCH, columns=columns)

    def _arrow(self, pyarrow, kind: str) -> Iterator:
        with pyarrow.OSFile(self.path) as file:
            if kind == ARROW_STREAM:
                batches = pyarrow.ipc.open_stream(file)
                columns = self._taken(batches.schema)
            else:
                opened = pyarrow.ipc.open_file(file)
                columns = self._taken(opened.schema)
                batches = map(opened.get_batch, range(opened.num_record_batches))
            for batch in batches:
                batch = batch.select(columns)
                for start in range(0, batch.num_rows, BATCH):
                    yield batch.slice(start, BATCH)

    def _taken(self, schema) -> list[str]:
        if self.columns is None:
            return [field.name for field in schema if "binary" not in str(field.type)]
        for column in self.columns:
            if column not in schema.names:
                raise DataError(
                    f"{self.path}: no column {column!r}{did_you_mean(column, schema.names)}",
                    f"its columns: {', '.join(schema.names[:12])}",
                    "name the one that has the text: --json-keys COLUMN",
                )
        return list(self.columns)


def _line(row: dict) -> bytes:
    return json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n"


def _pyarrow(path: str, kind: str):
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise MissingPackage(
            f"{path} holds {kind}: reading it needs the package pyarrow", do="pip install pyarrow"
        ) from None
    return pyarrow


def dataset_files(folder: str) -> tuple[list[str], str]:
    """(files with rows below a folder, a sentence about those that are left out); ([], "") if it has none."""
    root = Path(folder)
    found = sorted(path for path in root.rglob("*") if path.suffix in TABLE_SUFFIXES and path.is_file())
    found = [path for path in found if not path.name.startswith(".")]
    states = {path.parent: _listed(path) for path in root.rglob(STATE)}
    saved = [path for path in found if path.parent not in states]
    saved += [path for folder in sorted(states) for path in states[folder]]  # in its order, without cache-*.arrow
    return without_other_splits(root, saved)


def without_other_splits(root: Path, files: Sequence[Path]) -> tuple[list[str], str]:
    """(the files below a folder, without those of other splits if there is one of train; a sentence about the others)."""
    splits = {path: _split_of(path.relative_to(root)) for path in files}
    others = sorted({split for split in splits.values() if split not in ("", "train")})
    if "train" not in splits.values() or not others:
        return [str(path) for path in files], ""
    taken = [str(path) for path in files if splits[path] in ("", "train")]
    return taken, f"of several splits only train is taken ({', '.join(others)}: name the files, or their folder)"


def _listed(state: Path) -> list[Path]:
    """The files of a saved dataset, from its state.json."""
    try:
        said = json.loads(state.read_text(encoding="utf-8"))
        if said.get("_indices_data_files"):
            do = "dataset.flatten_indices().save_to_disk(...) writes the rows in their order"
            raise DataError(f"{state.parent}: a choice of rows that an older version of datasets has saved", do=do)
        return [state.parent / one["filename"] for one in said["_data_files"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [path for path in state.parent.iterdir() if path.suffix in TABLE_SUFFIXES]


def _split_of(path: Path) -> str:
    """The split that a file belongs to by its name, or by its folder's; "" if they say none.

    >>> _split_of(Path("data/train-00000-of-00002.parquet")), _split_of(Path("dev/data-00000-of-00001.arrow"))
    ('train', 'dev')
    """
    for name in (path.name, *reversed(path.parts[:-1])):
        if found := SPLIT_OF_NAME.match(name):
            return found[1]
    return ""
