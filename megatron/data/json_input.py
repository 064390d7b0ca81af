# SPDX-License-Identifier: Apache-2.0
"""Read JSON lines from files, globs, folders and stdin, plain, compressed or in tar archives, in blocks of whole lines.

Plain text (.txt) and the rows of Parquet and Arrow files are converted to JSON lines (`file_formats.py`). A file whose
content does not match its name is an error.
Members of an archive are selected by name, like files of a folder.
Only a newline byte ends a line: U+2028 and U+0085 inside a JSON string do not.
"""

import bz2
import contextlib
import glob
import gzip
import itertools
import json
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from megatron.data.file_formats import (
    CACHE,
    COMPRESSIONS,
    DESCRIPTIONS,
    HEAD,
    LINE_SUFFIXES,
    NAMES,
    SUFFIXES,
    TABLE_KINDS,
    TAR,
    TEXT,
    PlainText,
    TableRows,
    claimed,
    dataset_files,
    detected,
    members,
    note,
    refuse_another_format,
    without_other_splits,
    zstd,
)
from megatron.errors import DataError, no_such_file
from megatron.storage import hub

OUR_SUFFIXES = (".rejected.jsonl", ".contaminated.jsonl", ".stats.json", ".sums.json")
STDIN = "-"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """One input file. `size`: bytes on disk (0 for stdin); `compression`: None for uncompressed files.

    table: the kind of a file with rows (`file_formats.TABLE_KINDS`); columns: those to read, None: all
    text: the file is plain text; separator: separates documents of plain text, in an archive too
    lines_only: plain text is refused, in an archive too
    """

    path: str
    size: int
    compression: str | None
    archive: bool = False  # an uncompressed tar archive
    text: bool = False
    separator: str | None = None
    lines_only: bool = False
    table: str | None = None
    columns: tuple[str, ...] | None = None

    @property
    def whole(self) -> bool:
        """Whether the file has to be read from its start; other files can be read in parts."""
        return bool(self.compression or self.archive or self.text or self.table or self.path == STDIN)


def find_sources(
    inputs: list[str], separator: str | None = None, columns: Sequence[str] | None = None, lines_only: bool = False
) -> list[Source]:
    """The files of `--input`: each input is a file, a glob, a folder (searched recursively) or `-` for stdin.

    Files of a glob or folder are sorted by path, so that the order of documents does not depend on the file system.
    columns: of files with rows; lines_only: refuse plain text
    Raises DataError for inputs that do not exist or are empty.
    """
    paths = [path for given in inputs for path in expand(given)]
    if paths.count(STDIN) > 1:
        raise DataError("--input - is given twice: stdin can be read once")
    sources = with_separator([replace(_source(path), lines_only=lines_only) for path in paths], separator)
    if lines_only:
        for source in [source for source in sources if source.text]:
            refuse_plain_text(source.path)
    return [replace(source, columns=columns and tuple(columns)) if source.table else source for source in sources]


def with_separator(sources: list[Source], separator: str | None) -> list[Source]:
    """Set the document separator of the sources. Prints a note if none is plain text."""
    if separator and not any(source.text or _is_tar(source.path) for source in sources):
        note("the document separator has no effect: no file of the input is plain text (.txt)")
    return [replace(source, separator=separator or None) for source in sources]


def expand(given: str, flag: str = "--input") -> list[str]:
    """The paths of one input, sorted. flag: the one that names it. Raises DataError if there are none."""
    if hub.is_hub(given):
        return _of_hub(given, flag)
    if given == STDIN or os.path.isfile(given):
        return [given]
    if os.path.isdir(given):
        return _in_folder(given, flag)
    if os.path.exists(given):
        return [given]  # a named pipe, for example
    paths = sorted(path for path in glob.glob(given, recursive=True) if os.path.isfile(path))
    if not paths:
        why = None if glob.has_magic(given) else f"the working directory is {os.getcwd()}"
        raise DataError(
            f"{flag} {given}: {no_such_file(given)}",
            why,
            "give JSON lines or .txt: a file, a quoted glob, a folder, or -",
        )
    return paths


def _of_hub(name: str, flag: str) -> list[str]:
    """The files that an `hf://` name has; of several splits, only train."""
    place = hub.fetched(name, hub.DATA_FILES)
    paths = expand(str(place), flag)
    if not place.is_dir():
        return paths
    taken, left_out = without_other_splits(place, [Path(path) for path in paths])
    if left_out:
        note(f"{flag} {name}: {left_out}")
    return taken


def _in_folder(folder: str, flag: str) -> list[str]:
    """The input files of a folder, by name. Plain text next to JSON lines is left out, with a note."""
    root = Path(folder)
    paths = [path for path in root.rglob("*") if path.is_file() and CACHE not in path.relative_to(root).parts]
    lines = sorted(
        str(path) for path in paths if _is_lines(path.name) or not _is_ours(path.name) and _is_tar(path.name)
    )
    texts = sorted(str(path) for path in paths if _is_text(path.name))
    tables, left_out = dataset_files(folder)
    if tables:
        lines = [path for path in lines if Path(path).name not in DESCRIPTIONS and _claims_lines(path)]
        texts = []
        if not lines:
            if left_out:
                note(f"{flag} {folder}: {left_out}")
            return tables
        note(
            f"{flag} {folder}: {len(tables)} Parquet or Arrow files next to the JSON lines are left out: {tables[0]} ..."
        )
    if lines and texts:
        words = f"{len(texts)} files of plain text next to the JSON lines are left out: {texts[0]} ..."
        note(f"{flag} {folder}: {words} (a glob takes them: '{folder}/**/*.txt')")
    if not lines and not texts:
        do = f"files of a folder are taken by their names: {NAMES}, or *.tar"
        raise DataError(f"{flag} {folder}: the folder holds no JSON lines", do=do)
    return lines or texts


def _claims_lines(path: str) -> bool:
    """Whether a name has a suffix of lines or of an archive. Without one it may be a README or LICENSE beside rows."""
    return "." in Path(path).name


def _is_tar(name: str) -> bool:
    return TAR in claimed(name)


def _is_text(name: str) -> bool:
    """Whether a name implies plain text, compressed or not."""
    return not _is_ours(name) and claimed(name)[-1:] == (TEXT,)


def _is_lines(name: str) -> bool:
    if _is_ours(name):
        return False
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return "." not in name or name.endswith(LINE_SUFFIXES)


def _is_ours(name: str) -> bool:
    return name.startswith(".") or name.endswith(OUR_SUFFIXES)


def _source(path: str) -> Source:
    if path == STDIN:
        return Source(path, 0, None)
    text = claimed(path)[-1:] == (TEXT,)
    try:
        status = os.stat(path)
        if not os.path.isfile(path):
            return Source(path, 0, "pipe", text=text)  # cannot be read by ranges
        with open(path, "rb") as file:
            head = file.read(HEAD)
    except PermissionError:
        raise DataError(f"--input {path}: not readable", do="check its permissions") from None
    if text and not head:
        raise DataError(f"{path}: the file is empty", do="leave it out, or copy it again")
    if (kind := detected(head)) in TABLE_KINDS and claimed(path) in ((), (kind,)):
        return Source(path, status.st_size, None, table=kind)
    kind = refuse_another_format(path, head, claimed(path))
    return Source(path, status.st_size, compression_of(head), archive=kind == TAR, text=text)


def compression_of(head: bytes) -> str | None:
    """The compression of a file, detected from its first bytes."""
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), None)


def read_lines(file: BinaryIO, start: int, stop: int) -> tuple[int, bytes]:
    """(offset of the first line, the lines) that start in [start, stop) of an uncompressed file, opened without buffer.

    The last line may end after `stop`.
    """
    part = LinesOfRange(file, start, stop)
    place = part.at
    lines = b"".join(iter(lambda: part.read(max(1 << 16, stop - start)), b""))
    if start == 0 and lines.startswith(BYTE_ORDER_MARK):
        return len(BYTE_ORDER_MARK), lines[len(BYTE_ORDER_MARK) :]
    return place, lines


def read_part(source: Source, start: int, stop: int, block_size: int, longest: int) -> Iterator[bytes]:
    """Blocks of the lines that start in [start, stop) of an uncompressed file. longest: as in `read_blocks`."""
    with open(source.path, "rb", buffering=0) as file:
        yield from _whole_lines(LinesOfRange(file, start, stop), block_size, longest)


class LinesOfRange:
    """A stream of the lines that start in [start, stop) of a file. at: offset of what the next `read` returns"""

    def __init__(self, file: BinaryIO, start: int, stop: int):
        self._file, self.at, self._stop, self._ended = file, start, stop, start >= stop
        if start and not self._ended:
            self.at = start - 1  # the byte before decides whether a line starts at `start`
            self._file.seek(self.at)
            while data := self._file.read(1 << 16):
                end = data.find(b"\n") + 1
                self.at += end or len(data)
                if end:
                    break
            self._ended = self.at >= stop
        self._file.seek(self.at)

    def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end."""
        if self._ended:
            return b""
        data = self._file.read(size)
        last = data.find(b"\n", max(self._stop - 1 - self.at, 0)) + 1  # the end of the last line
        self.at += len(data)
        if last:
            self._ended, data = True, data[:last]
        return data


def read_blocks(source: Source, block_size: int, longest: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines of at least `block_size` bytes, each with the bytes read from disk so far.

    longest: longer lines may be cut after `longest` + 1 bytes, to bound memory
    Raises DataError for damaged or truncated compressed data.
    """
    with damage_as_data_error(source.path):
        for part, position in read_streams(source):
            for data in _whole_lines(part, block_size, longest):
                yield data, position()


def read_streams(source: Source) -> Iterator[tuple["Ahead", Callable[[], int]]]:
    """Streams of the JSON lines of a file, or of each file in an archive; read each before the next.

    Each comes with a function that returns the bytes read from disk so far. Read them inside `damage_as_data_error`.
    """
    if source.table:
        rows = TableRows(source.path, source.table, source.columns)
        yield Ahead(rows), lambda: int(source.size * rows.share)
        return
    with opened(source) as raw, damage_as_data_error(source.path):
        says, compression = claimed(source.path), _compression(raw, source)
        stream = Ahead(decompressed(raw, source))
        inside = compression or ""
        if refuse_another_format(source.path, stream.peek(HEAD), says[1:] if inside else says, inside) == TAR:
            parts = _lines_of_archive(stream, source)
        else:
            parts = [_as_lines(stream, source.path, source)]
        for part in parts:
            yield part, lambda: _position(raw)


def _whole_lines(stream, block_size: int, longest: int | None = None) -> Iterator[bytes]:
    pieces, first, held = [], True, 0  # the beginning of a line that has not ended, and its bytes
    longest = sys.maxsize if longest is None else longest
    while data := stream.read(block_size):
        if first:
            data, first = data.removeprefix(BYTE_ORDER_MARK), False
        if held > longest:
            end = data.find(b"\n")
            data = data[end:] if end >= 0 else b""
        cut = data.rfind(b"\n") + 1
        if not cut:
            pieces.append(data)
            held += len(data)
            if held > longest:
                pieces, held = [b"".join(pieces)[: longest + 1]], longest + 1
            continue
        yield b"".join([*pieces, data[:cut]])
        held = len(data) - cut
        pieces = [data[cut:]] if held else []
    if pieces:
        yield b"".join(pieces)


def _as_lines(stream: "Ahead", name: str, source: Source) -> "Ahead":
    """A stream of JSON lines: the stream itself, or, for a name of plain text, its documents converted."""
    is_text = source.text if name == source.path else _is_text(name.rpartition("/")[2])
    if not is_text:
        return stream
    if source.lines_only:
        refuse_plain_text(name)
    if stream.peek(1) == b"{":
        note(f"{name} begins as JSON lines do, and is read as plain text: lines of JSON want a name with .jsonl")
    return Ahead(PlainText(stream, name, source.separator))


def refuse_plain_text(name: str) -> None:
    """Raise DataError for a plain text where JSON lines are wanted."""
    do = f"{to_lines(name)}; if it holds JSON lines, give it a name with .jsonl"
    raise DataError(f"{name} is plain text (.txt), and --data-format JSON is one JSON object a line", do=do)


def to_lines(name: str) -> str:
    """The command that makes JSON lines of a plain text."""
    return f"python -m megatron.tools.raw_trans_to_json --input_path {name} --output_path OUT makes OUT.jsonl of a text"


def _lines_of_archive(stream: "Ahead", source: Source) -> Iterator["Ahead"]:
    """The decompressed members of a tar archive whose names imply documents; others are listed on stderr.

    As in a folder, plain text next to JSON lines is left out. The first such member decides the kind of the archive.
    """
    path, taken, left_out, of_text = source.path, 0, [], False
    for name, packed in members(stream):
        base = name.rpartition("/")[2]
        if packed is None or not (_is_lines(base) or _is_text(base) and (of_text or not taken)):
            left_out += [name] * (not _is_ours(base))
            continue
        if of_text and not _is_text(base):
            do = "unpack it, and give the files that are meant"
            raise DataError(f"{path}: {name} comes after plain text: the archive has both", do=do)
        taken, member, of_text = taken + 1, f"{path}:{name}", _is_text(base)
        packed, says = Ahead(packed), claimed(name)
        kind = refuse_another_format(member, packed.peek(HEAD), says)
        text = Ahead(decompressed(packed, Source(member, 0, kind if kind in COMPRESSIONS.values() else None)))
        if kind in COMPRESSIONS.values():
            refuse_another_format(member, text.peek(HEAD), says[1:], kind)
        yield _as_lines(text, member, source)
    if not taken:
        raise DataError(f"{path}: the archive holds no JSON lines", do=f"its members are taken by their names: {NAMES}")
    if left_out:
        what = f"{len(left_out)} of its {len(left_out) + taken} files"
        print(f"note: {path}: {what} are no JSON lines by their names: {left_out[0]} ...", file=sys.stderr, flush=True)


class Ahead:
    """A stream of bytes with `peek` before the first read."""

    def __init__(self, stream):
        self._stream, self._head, self._at = stream, b"", 0  # _at: position in the head

    def peek(self, size: int) -> bytes:
        """The next `size` bytes, fewer only at the end. Before the first `read`."""
        while len(self._head) < size and (data := self._stream.read(size - len(self._head))):
            self._head += data
        return self._head[:size]

    def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end."""
        if self._at == len(self._head):
            data = self._stream.read(size)
            if len(data) <= size:
                return data
            self._head, self._at = data, 0  # zstd may return much more
        start, self._at = self._at, min(self._at + size, len(self._head))
        return self._head[start : self._at]


def opened(source: Source) -> BinaryIO:
    """The bytes of a file, or of stdin."""
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb") if source.path == STDIN else open(source.path, "rb")


def _position(raw: BinaryIO) -> int:
    return raw.tell() if raw.seekable() else 0


def decompressed(raw: BinaryIO, source: Source) -> BinaryIO:
    """A decompressed stream of `raw`. The first bytes of stdin and pipes decide the compression."""
    compression = _compression(raw, source)
    openers = dict(
        gzip=lambda: gzip.GzipFile(fileobj=raw, mode="rb"),
        bzip2=lambda: bz2.BZ2File(raw),
        xz=lambda: lzma.LZMAFile(raw),
        zstd=lambda: ZstdStream(raw, source.path),
    )
    return openers[compression]() if compression in openers else raw


def _compression(raw: BinaryIO, source: Source) -> str | None:
    """The compression of `raw`: as known from its source, or by its first bytes."""
    if source.compression in (None, "pipe") and hasattr(raw, "peek"):
        return compression_of(raw.peek(6)[:6])
    return source.compression


@contextlib.contextmanager
def damage_as_data_error(path: str):
    """Convert the libraries' errors for truncated or damaged data to DataError."""
    try:
        yield
    except tarfile.TarError as error:
        raise damaged(path, error, "the archive") from None
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise damaged(path, error) from None
    except OSError as error:
        if error.errno is None:  # bz2 says "Invalid data stream" this way
            raise damaged(path, error) from None
        raise


def damaged(path: str, error, what: str = "the compressed data") -> DataError:
    return DataError(f"{path}: {what} is damaged or cut short", str(error), "copy or download it again")


class ZstdStream:
    """Decompress zstd frame by frame. The library's stream reader does not detect truncated files."""

    def __init__(self, raw: BinaryIO, path: str):
        zstandard = zstd(path)
        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._raw, self._path, self._frame = raw, path, None
        self._packed, self._taken = b"", 0

    def read(self, size: int) -> bytes:
        """At least `size` bytes; fewer only at the end."""
        pieces, length = [], 0
        while length < size and (data := self._take()):
            pieces += (out := self._decompress(data))
            length += sum(map(len, out))
        if length < size and self._frame is not None:
            raise damaged(self._path, "the last zstd frame is not complete")
        return b"".join(pieces)

    def _take(self) -> bytes:
        """The next 4 KiB of the file. They expand at most 32,768-fold, which bounds memory."""
        if self._taken >= len(self._packed):
            self._packed, self._taken = self._raw.read(1 << 17), 0
        self._taken += 1 << 12
        return self._packed[self._taken - (1 << 12) : self._taken]

    def _decompress(self, data: bytes) -> list[bytes]:
        out = []
        while data:
            self._frame = self._frame or self._new()
            try:
                out.append(self._frame.decompress(data))
            except self._error as error:
                raise damaged(self._path, error) from None
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        return out


class BadLine(ValueError):
    """A line without a valid document; the message gives the reason."""


def parse_line(line: bytes, keys: list[str]) -> list[str | list[str]] | None:
    """The values of `keys` in a line; None for a blank line. Each value is a text, or a list of texts (sentences).

    Raises BadLine with the reason for an invalid line. NaN, Infinity and huge numbers under other keys are accepted.
    """
    if not line or line.isspace():
        return None
    return values_of(parse_record(line), keys)


def read_texts(sources: list[Source], keys: list[str] | None = None) -> Iterator[str]:
    """All texts under the keys (default: text), sentences one by one. Raises DataError for an invalid line."""
    for source in sources:
        blocks = (block.removesuffix(b"\n").split(b"\n") for block, _ in read_blocks(source, 1 << 20))
        for number, line in enumerate(itertools.chain.from_iterable(blocks), 1):
            try:
                values = parse_line(line, keys or ["text"]) or []
            except BadLine as reason:
                do = "every line has to be a JSON object; --json-keys names its texts"
                raise DataError(f"{source.path}, line {number}: {reason}", do=do) from None
            for value in values:
                yield from [value] if isinstance(value, str) else value


def parse_record(line: bytes):
    """Parse the JSON of a line. Raises BadLine."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}") from None


def values_of(record, keys: list[str]) -> list[str | list[str]]:
    """The values of `keys` in a parsed record. Raises BadLine if one is missing or is not text."""
    if not isinstance(record, dict):
        raise BadLine(f"{_kind(record)} instead of an object")
    values = []
    for key in keys:
        if key not in record:
            raise BadLine(f"no key {key!r} (keys: {', '.join(list(record)[:8]) or 'none'})")
        value = record[key]
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise BadLine(f"{key!r} is {_kind(value)}, not text")
        if not all(_encodes(text) for text in texts):
            raise BadLine(f"{key!r} holds half of a surrogate pair, which is no text")
        values.append(value)
    return values


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
