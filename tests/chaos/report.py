# SPDX-License-Identifier: Apache-2.0
"""What many cases come to: a summary for the terminal and a table for docs/proof/reliability.md. Needs no torch.

>>> line = dict(id="kill/a", group="kills", good=True, faults=2, seconds=1.5, commit="abc", date="2026-01-31")
>>> print(table([line]))
| faults | cases | injected | as expected | seconds | commit, date |
|---|---:|---:|---:|---:|---|
| kills | 1 | 2 | 1 of 1 | 2 | abc, 2026-01-31 |
| all | 1 | 2 | 1 of 1 | 2 | |
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.errors import DataError

Line = dict[str, Any]


def read_lines(paths: Iterable[str]) -> list[Line]:
    """The lines of several reports. Raises DataError for a file that is none."""
    lines = []
    for path in paths:
        try:
            lines += [json.loads(text) for text in Path(path).read_text(encoding="utf-8").splitlines() if text]
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise DataError(f"{path} is not a report of this tool: {error}") from None
    return lines


def table(lines: list[Line]) -> str:
    """Markdown: a row for each group of cases, and below it the cases that failed."""
    rows = ["| faults | cases | injected | as expected | seconds | commit, date |", "|---|---:|---:|---:|---:|---|"]
    for group in dict.fromkeys(line["group"] for line in lines):
        own = [line for line in lines if line["group"] == group]
        origins = sorted({f"{line.get('commit')}, {line.get('date')}" for line in own})
        rows.append(f"| {group} | {_counts(own)} | {'; '.join(origins)} |")
    rows.append(f"| all | {_counts(lines)} | |")
    failed = [
        f"- `{line['id']}`, seed {line['seed']}: {line['got'].splitlines()[0]}" for line in lines if not line["good"]
    ]
    return "\n".join([*rows, *(["", "Not as expected:", "", *failed] if failed else [])])


def _counts(lines: list[Line]) -> str:
    good = sum(line["good"] for line in lines)
    return (
        f"{len(lines):,} | {sum(line['faults'] for line in lines):,} | {good:,} of {len(lines):,} | "
        f"{sum(line['seconds'] for line in lines):,.0f}"
    )


def summary(lines: list[Line]) -> str:
    """For the terminal."""
    bad = [line for line in lines if not line["good"]]
    text = [
        f"{len(lines)} cases, {sum(line['faults'] for line in lines)} faults, {len(bad)} not as expected, "
        f"{sum(line['seconds'] for line in lines):.0f} s"
    ]
    return "\n".join([*text, *(f"  {line['id']} (--seed {line['seed']}): {line['got']}" for line in bad)])
