# SPDX-License-Identifier: Apache-2.0
"""Files of the three commands for duplicates: written completely or not at all; read by line, with messages on bad ones."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.corpus.duplicates.shards import blocks_of_lines
from megatron.errors import missing_file


class LeftOut:
    """Skipped lines by reason, with the first of each; every reason is reported."""

    def __init__(self, path: str | Path):
        self.path = path
        self.counts: Counter[str] = Counter()
        self._first: dict[str, int] = {}

    def add(self, number: int, reason: str) -> None:
        self.counts[reason] += 1
        self._first.setdefault(reason, number)

    def tell(self) -> None:
        """One line on stderr for each reason."""
        for reason, count in self.counts.items():
            lines = "line" if count == 1 else "lines"
            print(
                f"{self.path}: {count:,} {lines} left out: {reason} (first: document {self._first[reason]:,})",
                file=sys.stderr,
            )


def documents(path: str | Path, left_out: LeftOut) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """(number from 1, line, JSON object) of each line of a file, packed or not; blank lines are not counted.

    Raises DataError if the file is not there.
    """
    if not Path(path).exists():
        raise missing_file(path)
    number = 0
    for lines in blocks_of_lines(Path(path)):
        for line in lines:
            number += 1
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                left_out.add(number, "no JSON")
                continue
            if isinstance(found, dict):
                yield number, line.rstrip(b"\r"), found
            else:
                left_out.add(number, "no JSON object")


def json_line(content: Any) -> bytes:
    """A line of JSON with letters of all scripts as they are."""
    try:
        return json.dumps(content, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8
        return json.dumps(content).encode() + b"\n"
