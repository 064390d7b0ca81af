# SPDX-License-Identifier: Apache-2.0
"""The record of a download: finished addresses and written pages, so that it resumes after a kill at any moment.

Pages are appended to the output in batches; after each batch a line is appended to the record (`<output>.ckpt`):
the length of the output, and the result for each address. The output is on the disk before the line. So a page counts
as soon as its line is complete. When a download resumes, output after the last complete line is removed, and its pages
are fetched again: no page is lost, and none is stored twice.
"""

import bz2
import contextlib
import fcntl
import gzip
import io
import json
import lzma
import os
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import xxhash

from megatron.errors import DataError, Locked
from megatron.storage.durable import storage_errors, sync_folder, whole_file


def _zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


PACKERS = dict(xz=lzma.compress, gz=lambda data: gzip.compress(data, mtime=0), bz2=bz2.compress, zst=_zstd)


@dataclass(frozen=True)
class PageOutcome:
    """The result for an address. reason: "ok", or a word that says why there is no text."""

    number: int  # its index in the list, from 0
    url: str
    reason: str
    text: str = ""
    status: int = 0
    bytes: int = 0  # of the page, unpacked
    seconds: float = 0.0
    tries: int = 1
    passing: bool = False  # another try may succeed


COLUMNS = ("number", "url", "reason", "status", "bytes", "seconds", "tries", "passing")


class DownloadRecord:
    """The output and its record. Only one process at a time writes them."""

    def __init__(
        self,
        output: Path,
        source: dict[str, Any],
        packing: Optional[str] = None,
        keep_pages: Optional[Path] = None,
        failed_again: bool = False,
    ):
        """Open an existing record, or create one. source: the inputs of the output; another source is refused.

        packing: a name in PACKERS. keep_pages: a folder for a text file of each page. failed_again: repeat
        addresses that failed for a temporary reason.
        Raises DataError if the record belongs to something else, Locked if another process writes.
        """
        self.output, self.path = output, output.with_name(f"{output.name}.ckpt")
        self.counts: Counter[str] = Counter()
        self._done, self._end = bytearray(), 0
        self._pack: Callable[[bytes], bytes] = PACKERS[packing] if packing else bytes
        self._held: list[PageOutcome] = []
        self._keep_pages, self._failed_again = keep_pages, failed_again
        self._passing: dict[int, str] = {}  # addresses that failed for a temporary reason
        with storage_errors(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            self._journal = open(self.path, "a+b", buffering=0)
            self._lock()
            if not self._read(source):
                if output.exists() and output.stat().st_size:  # before opening a record empties it
                    self.path.unlink()
                    do = f"give another --output, or remove it; a download goes on where {self.path} is beside it"
                    raise DataError(f"{output} is there, and no record of how it came", do=do)
                self._journal.truncate(0)
                self._append(source)
            self._out = open(output, "ab", buffering=0)
            size = self._out.seek(0, os.SEEK_END)
            if size < self._end:
                why = f"it has {size:,} bytes, and {self._end:,} were written"
                raise DataError(f"{output} is shorter than its record says", why, f"remove it and {self.path}")
            self._out.truncate(self._end)
            sync_folder(output.parent)

    def _lock(self) -> None:
        try:
            fcntl.lockf(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Locked(f"{self.output} is being written by another download", do="give another --output") from None

    def _read(self, source: dict[str, Any]) -> bool:
        """Read the record up to its last complete line. Returns False if it is empty."""
        self._journal.seek(0)
        lines = io.BufferedReader(self._journal)  # not another handle: closing one would drop the lock
        whole = 0
        for line in lines:
            if not line.endswith(b"\n"):
                break  # truncated by a kill
            try:
                entry = json.loads(line)
                if whole == 0:
                    self._compare(entry, source)
                else:
                    self._take(entry)
            except (ValueError, KeyError, TypeError):
                do = f"remove it and {self.output} to begin again"
                raise DataError(f"{self.path} is damaged at byte {whole:,}", do=do) from None
            whole += len(line)
        lines.detach()
        self._journal.truncate(whole)
        if self._failed_again:
            for number, reason in self._passing.items():
                self._done[number // 8] &= ~(1 << number % 8)
                self.counts[reason] -= 1
        return whole > 0

    def _compare(self, entry: dict[str, Any], source: dict[str, Any]) -> None:
        for name, value in source.items():
            if entry[name] != value:
                why = f"it was begun with {name} {entry[name]}; now that is {value}"
                raise DataError(f"{self.path} belongs to another download", why, "give another --output, or remove it")

    def _take(self, entry: dict[str, Any]) -> None:
        self._end = entry["end"]
        for row in entry["pages"]:
            page = dict(zip(COLUMNS, row, strict=True))
            number = page["number"]
            if earlier := self._passing.pop(number, None):
                self.counts[earlier] -= 1
            if page["passing"]:
                self._passing[number] = page["reason"]
            self.counts[page["reason"]] += 1
            self._mark(number)

    def _mark(self, number: int) -> None:
        byte, bit = divmod(number, 8)
        if byte >= len(self._done):
            self._done.extend(bytes(byte + 1 - len(self._done) + (1 << 12)))
        self._done[byte] |= 1 << bit

    def __contains__(self, number: int) -> bool:
        """Whether the result for an address is recorded."""
        byte, bit = divmod(number, 8)
        return byte < len(self._done) and bool(self._done[byte] >> bit & 1)

    def add(self, page: PageOutcome, batch: int) -> bool:
        """Add the result for an address. Writes them if there are `batch`, and returns whether it did."""
        assert page.number not in self, "an address is done once"
        self._held.append(page)
        self._mark(page.number)
        self.counts[page.reason] += 1
        if len(self._held) < batch:
            return False
        self.commit()
        return True

    def commit(self) -> None:
        """Write the collected results: first the pages, and after they are on the disk the line about them."""
        if not self._held:
            return
        good = [page for page in self._held if page.reason == "ok"]
        lines = (json.dumps(dict(text=page.text, url=page.url), ensure_ascii=False) for page in good)
        data = "".join(f"{line}\n" for line in lines).encode()
        with storage_errors(self.output, len(data)):
            self._write_pages(good)
            if data:
                _write_all(self._out, self._pack(data))
                os.fsync(self._out.fileno())
            rows = [[asdict(page)[name] for name in COLUMNS] for page in self._held]
            self._append(dict(end=self._out.tell(), pages=rows))
        self._held = []

    def _append(self, entry: dict[str, Any]) -> None:
        _write_all(self._journal, json.dumps(entry).encode() + b"\n")
        os.fsync(self._journal.fileno())

    def _write_pages(self, pages: list[PageOutcome]) -> None:
        """Write a text file for each page, and one with its description, in a folder per thousand addresses."""
        if self._keep_pages is None:
            return
        for page in pages:
            name = f"{page.number // 1000:06}/{page.number:09}-{xxhash.xxh3_64_hexdigest(page.url.encode())}"
            meta = dict(url=page.url, status=page.status, bytes=page.bytes, seconds=page.seconds)
            for kind, content in ((f"data/{name}.txt", page.text), (f"meta/{name}.json", json.dumps(meta))):
                path = self._keep_pages / kind
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")

    def close(self) -> None:
        """Close the files. Results that are not committed are discarded."""
        self._out.close()
        self._journal.close()


def _write_all(file, data: bytes) -> None:
    """Write all bytes to an unbuffered file, whose `write` may accept only some of them."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def write_sqlite(record: Path, target: Path) -> int:
    """Write the result for each address to a table `pages` of an SQLite file. Returns the number of rows."""
    with (
        whole_file(target) as file,
        contextlib.closing(sqlite3.connect(file.name)) as base,
        base,
        open(record, "rb") as journal,
    ):
        base.execute(f"CREATE TABLE pages ({', '.join(COLUMNS)}, PRIMARY KEY (number))")
        next(journal)
        for line in journal:
            base.executemany(
                f"INSERT OR REPLACE INTO pages VALUES ({', '.join('?' * len(COLUMNS))})", json.loads(line)["pages"]
            )
        [rows] = base.execute("SELECT count(*) FROM pages").fetchone()
    return rows
