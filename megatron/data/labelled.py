# SPDX-License-Identifier: Apache-2.0
"""Files of labelled texts: .jsonl with an object a line, .tsv or .csv with a head line.

{"text": "A fine film.", "label": "positive"}
{"sentence1": "It rains.", "sentence2": "It is wet.", "label": 1}
"""

import csv
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.errors import DataError

ENDINGS = (".jsonl", ".json", ".tsv", ".csv")
# Names of columns, of GLUE's and CLUE's files and others: the text, one that belongs to it, and the label.
FIRST = ("text", "sentence", "sentence1", "text_a", "premise", "question1", "question")
SECOND = ("sentence2", "text_b", "hypothesis", "question2", "text_pair")
LABEL = ("label",)


class Labelled(NamedTuple):
    """A text, or a pair of texts, and its label."""

    first: str
    second: Optional[str]
    label: str


@lru_cache(maxsize=16)
def read_labelled(path: str) -> tuple[Labelled, ...]:
    """All rows of a file. Raises DataError that names the line of what is none, or for a file without two labels."""
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file", do=f"labelled texts are in files {', '.join(ENDINGS)}")
    try:
        rows = tuple(_row(fields, path, number) for number, fields in _records(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8", str(error)) from None
    if not rows:
        raise DataError(f"{path} has no rows", do="give labelled texts, or leave the task out")
    if len(labels := labels_of(rows)) < 2:
        raise DataError(
            f"{path}: all {len(rows):,} rows have the label {labels[0]!r}", do="give texts of two labels or more"
        )
    return rows


def labels_of(rows: tuple[Labelled, ...]) -> list[str]:
    """The labels that rows have, in the order of text: the number of a class is its place here."""
    return sorted({row.label for row in rows})


def _records(path: str) -> Iterator[tuple[int, dict]]:
    """(line, columns) of each row."""
    with open(path, encoding="utf-8", newline="") as file:
        if path.endswith((".tsv", ".csv")):
            plain = dict(delimiter="\t", quoting=csv.QUOTE_NONE) if path.endswith(".tsv") else {}
            reader = csv.DictReader(file, **plain)
            for row in reader:
                yield reader.line_num, row
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON", str(error), "give one object a line") from None
            yield number, row if isinstance(row, dict) else {}


def _row(columns: dict, path: str, number: int) -> Labelled:
    found = [next((columns[name] for name in names if columns.get(name) is not None), None) for names in COLUMNS]
    first, second, label = found
    if first is None or label is None:
        wanted = f"a text ({', '.join(FIRST)}) and a label" if first is None else "a label"
        known = [name for name in columns if name is not None]
        raise DataError(
            f"{path}, line {number} lacks {wanted}",
            f"it has {', '.join(known) or 'no columns'}",
            "name the columns so; a second text of a pair is one of " + ", ".join(SECOND),
        )
    if isinstance(label, (list, dict)) or not isinstance(first, str):
        raise DataError(f"{path}, line {number}: a text is a string and a label one word or number", f"{columns}"[:100])
    return Labelled(first, None if second is None else str(second), str(label))


COLUMNS = (FIRST, SECOND, LABEL)
