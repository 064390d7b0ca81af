# SPDX-License-Identifier: Apache-2.0
"""Filter files of JSON lines in several processes; the output has the order of the input.

    totals = clean_files(find_sources(["raw.jsonl"]), LineCleaner([("gate", BinaryGate())]), "clean.jsonl", workers=8)

The output has the same bytes for any number of processes, and is complete or absent. Lines that are no documents are set
aside in `<output>.rejected.jsonl` with file, line and reason. Memory does not grow with the input: a few blocks of 1 MiB
per process, and no line longer than `LineCleaner.longest`.
"""

import bz2
import contextlib
import gzip
import json
import lzma
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Optional

from megatron.corpus.processes import in_order
from megatron.corpus.stage import Document, Filter
from megatron.data.file_formats import zstd
from megatron.data.json_input import BadLine, Source, parse_record, read_blocks, read_part, values_of
from megatron.data.workspace import Workspace
from megatron.errors import DataError, Failure, Locked, StorageError, UsageError
from megatron.storage.durable import sync_folder

BLOCK = 1 << 20  # bytes of lines: some 20 ms of work
LONGEST = 16 << 20  # bytes of the longest line: parsed, it may take 25 times as much
_to_json = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of file number `source`; `first`: number of earlier lines in this part of the file"""

    source: int
    first: int
    data: bytes


@dataclass
class Cleaned:
    """The result of a block of file number `source`; `first` as in `LineBlock`.

    kept, dropped: bytes for the files, compressed where the file is
    counts: "documents", "rejected", and "<filter>.<reason>" and "<filter>.<reason>.characters" of dropped documents, and
            of changed ones
    rejected: (line of the block, reason)
    """

    source: int
    first: int
    kept: bytes
    dropped: bytes
    counts: Counter
    rejected: list[tuple[int, str]]


@dataclass
class LineCleaner:
    """Parses, filters and writes a block. Each process has one.

    filters: (name, filter), in order
    dropped: what to write for a dropped document: nothing, the original document, or that with its reason
    """

    filters: Sequence[tuple[str, Filter]]
    dropped: Literal["nothing", "document", "reason"] = "nothing"
    longest: int = LONGEST
    pack: Callable[[bytes], bytes] = bytes
    pack_dropped: Callable[[bytes], bytes] = bytes

    def __call__(self, block: LineBlock, shard: tuple[int, int] = (0, 1)) -> Cleaned:
        """Process a block. shard: (number from 0, count): which lines to take, by their numbers in the file"""
        lines = block.data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        kept, dropped, counts, rejected = [], [], Counter(), []
        number, count = shard
        for at in range((number - block.first) % count, len(lines), count):
            try:
                document = self._parsed(lines[at])
                if document is None:
                    continue
                kept_line, dropped_line = self._filtered(document, counts)
            except BadLine as reason:
                rejected.append((at, str(reason)))
                continue
            counts["documents"] += 1
            kept += kept_line
            dropped += dropped_line
        counts["rejected"] += len(rejected)
        packed = self.pack(b"".join(kept)) if kept else b""
        left_out = self.pack_dropped(b"".join(dropped)) if dropped else b""
        return Cleaned(block.source, block.first, packed, left_out, counts, rejected)

    def _parsed(self, line: bytes) -> Optional[Document]:
        """The document of a line; None for a blank one. Raises BadLine."""
        if len(line) > self.longest:
            raise BadLine(f"longer than {self.longest:,} bytes")
        if not line or line.isspace():
            return None
        document = parse_record(line)
        [text] = values_of(document, ["text"])
        if not isinstance(text, str):
            raise BadLine("'text' is a list, not text")
        return document

    def _filtered(self, document: Document, counts: Counter) -> tuple[list[bytes], list[bytes]]:
        """(lines of kept documents, lines of dropped ones) for a document. Raises BadLine."""
        now = document
        for name, keep in self.filters:
            try:
                verdict = keep(now)
            except Failure:
                raise
            except Exception as error:  # a text that breaks a library is one bad document, not the end of the run
                raise BadLine(f"filter {name}: {type(error).__name__}: {error}"[:500]) from None
            if verdict.document is None:
                self._count(counts, f"{name}.{verdict.reason}", now)
                return [], self._dropped(document, f"{name}.{verdict.reason}", verdict.figures)
            now = verdict.document
            if verdict.reason:
                self._count(counts, f"{name}.{verdict.reason}", now)
        return [_line(now)], []

    def _dropped(self, document: Document, reason: str, figures) -> list[bytes]:
        if self.dropped == "nothing":
            return []
        record = (
            document if self.dropped == "document" else dict(reason=reason, figures=dict(figures), document=document)
        )
        return [_line(record)]

    @staticmethod
    def _count(counts: Counter, reason: str, document: Document) -> None:
        counts[reason] += 1
        counts[f"{reason}.characters"] += len(document["text"])


def _line(record: Document) -> bytes:
    """A record as a line of a file. Raises BadLine for a record that cannot be encoded."""
    try:
        return _to_json(record).encode() + b"\n"
    except UnicodeEncodeError:
        raise BadLine("a value or a key holds half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise BadLine("not JSON that can be written again: nested too deep") from None


# ---------------------------------------------------------------------------------------------------- files


PACKERS: dict[str, Callable[[bytes], bytes]] = {  # suffix of a name -> compression of a part of the file
    ".gz": lambda data: gzip.compress(data, compresslevel=6, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstd().ZstdCompressor(level=3).compress(data),
}


def packer(path: str) -> Callable[[bytes], bytes]:
    """The compression for a file name. Raises UsageError for a name of an archive."""
    suffix = Path(path).suffix.lower()
    if suffix in (".tar", ".tgz", ".tzst", ".tbz2", ".txz", ".zip"):
        raise UsageError(f"{path}: archives are not written", do="give a name that ends in .jsonl or .jsonl.zst")
    return PACKERS.get(suffix, bytes)


def clean_files(
    sources: list[Source],
    cleaner: LineCleaner,
    output: str,
    dropped: Optional[str] = None,
    workers: int = 1,
    shard: tuple[int, int] = (0, 1),
    report: Callable[[Counter, float], None] = lambda counts, seconds: None,
    stop_on_bad_line: bool = False,
) -> Counter:
    """Run the filters over all lines of the sources. `report` gets the counts so far after each block.

    output:  file of kept documents, compressed by its suffix (.gz .zst .bz2 .xz), with `<output>.rejected.jsonl`
    dropped: file of dropped documents
    shard:   (number from 0, count): a part of the input; together the parts of all numbers are the whole

    Returns the counts of all blocks. Raises DataError, Locked, StorageError; then no output has changed.
    """
    refuse_overwriting(sources, output, dropped)
    start, totals = time.perf_counter(), Counter()
    cleaner.pack = packer(output)
    cleaner.pack_dropped = packer(dropped) if dropped else bytes
    with _workspace(output) as workspace, contextlib.ExitStack() as stack:
        _require_same_disk(workspace, output, dropped)
        files = [stack.enter_context(open(workspace.path(name), "wb")) for name in ("kept", "dropped", "rejected")]
        do = "if memory ran out, give fewer --workers or a smaller --longest-line"
        killed = Failure("a worker was killed", "nothing was written", do)
        for cleaned in in_order(cleaner, Parts(sources, shard).blocks(cleaner.longest), workers, killed):
            rejected = b""
            if cleaned.rejected:
                rejected = _rejected(sources[cleaned.source], cleaned, shard, stop_on_bad_line)
            with _written(output):
                for file, data in zip(files, (cleaned.kept, cleaned.dropped, rejected)):
                    file.write(data)
            totals += cleaned.counts
            report(totals, time.perf_counter() - start)
        with _written(output):
            for file, pack in zip(files, (cleaner.pack, cleaner.pack_dropped, bytes)):
                if not file.tell():
                    file.write(pack(b""))  # a compressed file without contents is not empty
                file.flush()
                os.fsync(file.fileno())
        _publish(workspace, output, dropped, totals["rejected"])
    return totals


def refuse_overwriting(sources: list[Source], *outputs: Optional[str]) -> None:
    """Raise UsageError where an output is an input or another output."""
    inputs = {os.path.realpath(source.path) for source in sources}
    seen: set[str] = set()
    for output in filter(None, outputs):
        real = os.path.realpath(output)
        if real in inputs:
            raise UsageError(f"{output} is an input too", do="give the output another name")
        if os.path.isdir(real) or real in seen:
            raise UsageError(f"{output} is {'a folder' if os.path.isdir(real) else 'given twice'}", do="name a file")
        seen.add(real)


@contextlib.contextmanager
def _workspace(output: str) -> Iterator[Workspace]:
    try:
        workspace = Workspace(output).__enter__()
    except Locked as error:
        raise Locked(error.what, error.why, "wait for it to end, or give another output") from None
    except StorageError as error:
        raise StorageError(error.what, error.why, "give an output that can be written") from None
    try:
        yield workspace
    finally:
        workspace.__exit__()


def _require_same_disk(workspace: Workspace, output: str, dropped: Optional[str]) -> None:
    """Raise StorageError where the file of dropped documents cannot get its name by a rename."""
    if dropped and os.stat(workspace.folder).st_dev != os.stat(Path(dropped).parent).st_dev:
        raise StorageError(f"{dropped} is on another disk than {output}", do="put both on the same one")


@contextlib.contextmanager
def _written(output: str) -> Iterator[None]:
    """A context that turns an OSError on writing into a StorageError that names the output."""
    try:
        yield
    except OSError as error:
        do = "free some space, or write to another disk"
        raise StorageError(
            f"{output}: cannot be written: {error.strerror or error}", "nothing was written", do
        ) from None


def _publish(workspace: Workspace, output: str, dropped: Optional[str], rejected: int) -> None:
    """Rename the files to their final names, that of the kept documents last."""
    final = f"{output}.rejected.jsonl"
    if rejected:
        os.replace(workspace.path("rejected"), final)
    else:
        Path(final).unlink(missing_ok=True)
    if dropped:
        os.replace(workspace.path("dropped"), dropped)
        sync_folder(Path(dropped).parent)
    os.replace(workspace.path("kept"), output)
    sync_folder(Path(output).parent)


def _rejected(source: Source, cleaned: Cleaned, shard: tuple[int, int], stop: bool) -> bytes:
    """Records of bad lines, or DataError at the first of them."""
    path = "stdin" if source.path == "-" else source.path
    first = cleaned.first + _lines_before(source, shard)
    if stop:
        line, reason = cleaned.rejected[0]
        do = "repair the line, or drop --on-bad-line stop to set bad lines aside"
        raise DataError(f"{path}, line {first + line + 1}: {reason}", "nothing was written", do)
    records = [dict(file=path, line=first + line + 1, reason=reason) for line, reason in cleaned.rejected]
    return "".join(_to_json(record) + "\n" for record in records).encode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------------- parts of the input


def _bounds(source: Source, shard: tuple[int, int]) -> tuple[int, int]:
    number, count = shard
    return source.size * number // count, source.size * (number + 1) // count


def _lines_before(source: Source, shard: tuple[int, int]) -> int:
    """Number of lines of a plain file before those of the shard. Only computed for messages, which are rare."""
    start = 0 if source.whole else _bounds(source, shard)[0]
    if not start:
        return 0
    return sum(data.count(b"\n") for data in read_part(source, 0, start, BLOCK, LONGEST))


@dataclass
class Parts:
    """The blocks of one shard of the input.

    Plain files are cut by bytes, so that the concatenated shards are the whole. Compressed files, which are read from their
    start, are distributed among the shards where there are enough of them; otherwise each shard reads them all, and takes
    every n-th line.
    """

    sources: list[Source]
    shard: tuple[int, int] = (0, 1)
    by_lines: bool = field(init=False)

    def __post_init__(self) -> None:
        self.packed = [index for index, source in enumerate(self.sources) if source.whole]
        self.by_lines = len(self.packed) < self.shard[1]

    def blocks(self, longest: int) -> Iterator[tuple[LineBlock, tuple[int, int]]]:
        """Each block, with (number, count): which of its file's lines to take."""
        number, count = self.shard
        for index, source in enumerate(self.sources):
            lines, taken = 0, self.shard if source.whole and self.by_lines else (0, 1)
            if not source.whole:
                start, stop = _bounds(source, self.shard)
                stream = read_part(source, start, stop, BLOCK, longest)
            elif self.by_lines or self.packed.index(index) % count == number:
                stream = (data for data, _ in read_blocks(source, BLOCK, longest))
            else:
                continue
            for data in stream:
                yield LineBlock(index, lines, data), taken
                lines += data.count(b"\n") + (not data.endswith(b"\n"))
