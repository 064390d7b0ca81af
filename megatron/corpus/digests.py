# SPDX-License-Identifier: Apache-2.0
"""Digests of a plan's input files, cached by size, modification time and inode.

A file that changed less than two seconds before it was read is not cached: its time might not show a later change.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.corpus.commit import digest
from megatron.errors import DataError
from megatron.storage.durable import replace_file

RACY = 2_000_000_000  # nanoseconds: the coarsest time of a file system that is in use (FAT)
FILE = "digests.json"


class Digests:
    """Digests by path, cached in the output folder."""

    def __init__(self, output: Path, log: Callable[[str], None] = lambda line: None):
        self.output, self.log = output, log
        self.known: dict[str, list] = {}
        self.changed = False
        self._named: dict[str, list[str]] = {}  # text of an option -> the digest of the file that it names, if any

    def __enter__(self) -> "Digests":
        try:
            self.known = json.loads((self.output / FILE).read_text())
        except (OSError, ValueError):
            self.known = {}
        return self

    def __exit__(self, *_) -> None:
        if self.changed and self.output.is_dir():
            replace_file(self.output / FILE, json.dumps(self.known).encode())

    def ahead(self, paths: list[str]) -> None:
        """Compute missing digests, several at a time."""
        missing = [path for path in dict.fromkeys(map(os.path.abspath, paths)) if self._cached(path) is None]
        size = sum(os.stat(path).st_size for path in missing)
        if size > 1 << 30:
            self.log(f"reading {size / 1e9:.1f} GB of input once for its digests")
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(self.of, missing))

    def of(self, path: str) -> str:
        """The digest of a file, or of all files of a folder with their names. Raises DataError if there is none."""
        path = os.path.abspath(path)
        if os.path.isdir(path):
            inside = sorted(file for file in Path(path).rglob("*") if file.is_file())
            return "/".join(f"{file.relative_to(path)}={self.of(str(file))}" for file in inside)
        if cached := self._cached(path):
            return cached
        try:
            status, now = os.stat(path), time.time_ns()
            mark = digest(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None
        if now - status.st_mtime_ns > RACY:
            self.known[path] = [status.st_size, status.st_mtime_ns, status.st_ino, mark]
            self.changed = True
        return mark

    def _cached(self, path: str) -> str | None:
        known = self.known.get(path)
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None
        return known[3] if known and known[:3] == [status.st_size, status.st_mtime_ns, status.st_ino] else None

    def of_option_files(self, options: Any) -> list[str]:
        """Digests of the files named in options, such as word lists and vocabularies. Other texts have none."""
        if isinstance(options, Mapping):
            return [mark for name in sorted(options) for mark in self.of_option_files(options[name])]
        if isinstance(options, (list, tuple)):
            return [mark for one in options for mark in self.of_option_files(one)]
        if not isinstance(options, str):
            return []
        if options not in self._named:  # tasks of a phase have the same options: check their files once
            self._named[options] = [self.of(options)] if _is_path(options) else []
        return self._named[options]


def _is_path(word: str) -> bool:
    """Whether a text is the path of a file, or of a folder with several parts; "." and "/" are punctuation."""
    if not 0 < len(word) < 4096 or "\0" in word:
        return False
    return os.path.isfile(word) or os.sep in word.strip("./") and os.path.isdir(word)
