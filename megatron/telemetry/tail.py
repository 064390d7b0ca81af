# SPDX-License-Identifier: Apache-2.0
"""Read a file that grows, part by part: on a disk, or as an object that is replaced by a longer one.

tail = Tail(Path("runs/a/metrics.jsonl"))
lines, again = tail.read()     # the lines so far
lines, again = tail.read()     # the lines added since; `again`: the file was replaced, and they are from its start
"""

import os
from pathlib import Path
from typing import Optional, Union

from megatron.storage.urls import UrlPath

PART = 8 << 20  # bytes that one call reads at most


class Tail:
    """Returns the complete lines of a file as they appear. A last line without a newline is kept until it is complete."""

    def __init__(self, path: Union[Path, UrlPath]):
        self.path = path
        self.offset = 0  # bytes returned so far; the file's next line begins here
        self.size, self.written = 0, 0.0  # of the file, when last looked at: bytes, and Unix time of its last change
        self._last = b""  # the last line before the offset: if the file has another one there, it was replaced
        self._mark: object = None  # changes with the file

    @property
    def share(self) -> float:
        """The share of the file that was read."""
        return self.offset / self.size if self.size else 1.0

    def read(self) -> tuple[list[bytes], bool]:
        """Read the new complete lines, and whether they are from the start of another file. No lines without the file."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return [], False
        self.size, self.written = stat.st_size, stat.st_mtime
        mark = stat.st_size, getattr(stat, "mark", None) or stat.st_mtime_ns
        if mark == self._mark:
            return [], False
        text = self._text_from(self.offset - len(self._last), PART + len(self._last))
        again = text is None or not text.startswith(self._last)
        if again:
            self.offset, self._last = 0, b""
            text = self._text_from(0, PART) or b""
        text = text[len(self._last) :]
        end = text.rfind(b"\n") + 1
        if not end and len(text) == PART:
            end = len(text)  # no record is so long: the reader skips the pieces of such a line
        lines = text[:end].splitlines(keepends=True)
        if lines:
            self.offset, self._last = self.offset + end, lines[-1]
        if self.offset + len(text) - end >= self.size:  # nothing left until the file changes
            self._mark = mark
        return [line for line in lines if line.strip()], again

    def _text_from(self, start: int, most: int) -> Optional[bytes]:
        """Up to `most` bytes of the file; None if the file is shorter."""
        if start > self.size:
            return None
        size = min(self.size - start, most)
        if isinstance(self.path, UrlPath):
            return self.path.read_range(start, size) if size else b""
        with open(self.path, "rb") as file:
            file.seek(start, os.SEEK_SET)
            return file.read(size)
