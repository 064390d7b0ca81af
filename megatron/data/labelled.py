# SPDX-License-Identifier: Apache-2.0
"""Labelled texts: their files, .jsonl with an object a line, .tsv or .csv with a head line; and what of a long pair stays.

{"text": "A fine film.", "label": "positive"}
{"sentence1": "It rains.", "sentence2": "It is wet.", "label": 1}
"""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.data.tables import ENDINGS, Row, label_in, read_table, text_in
from megatron.errors import DataError

# Names of columns, of GLUE's and CLUE's files and others: the text, one that belongs to it, and the label.
FIRST = ("text", "sentence", "sentence1", "text_a", "premise", "question1", "question")
SECOND = ("sentence2", "text_b", "hypothesis", "question2", "text_pair")
LABEL = ("label",)


class Labelled(NamedTuple):
    """A text, or a pair of texts, and its label."""

    first: str
    second: Optional[str]
    label: str


class LabelledFile(NamedTuple):
    """notes: what the user should hear of rows that are left out."""

    rows: tuple[Labelled, ...]
    notes: tuple[str, ...]


def is_labelled(path: str) -> bool:
    """Whether the name of a file is one of labelled texts."""
    return path.lower().endswith(ENDINGS)


@lru_cache(maxsize=16)
def read_labelled(path: str) -> LabelledFile:
    """The rows of a file. Raises DataError that names the line of what is none, or for a file without two labels."""
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file", do=f"labelled texts are in files {', '.join(ENDINGS)}")
    table, notes = read_table(Path(path))
    rows = tuple(_labelled(row, f"{path}, line {row.line}") for row in table)
    if not rows:
        raise DataError(f"{path} has no rows", do="give labelled texts, or leave the task out")
    if len(labels := labels_of(rows)) < 2:
        raise DataError(
            f"{path}: all {len(rows):,} rows have the label {labels[0]!r}", do="give texts of two labels or more"
        )
    return LabelledFile(rows, tuple(notes))


def labels_of(rows: tuple[Labelled, ...]) -> list[str]:
    """The labels that rows have, in the order of text: the number of a class is its place here."""
    return sorted({row.label for row in rows})


def _labelled(row: Row, where: str) -> Labelled:
    columns = row.columns
    first, second, label = (
        next((columns[name] for name in names if columns.get(name) is not None), None)
        for names in (FIRST, SECOND, LABEL)
    )
    if first is None or label is None:
        wanted = f"a text ({', '.join(FIRST)}) and a label" if first is None else "a label"
        raise DataError(
            f"{where} lacks {wanted}",
            f"it has {', '.join(columns) or 'no columns'}",
            "name the columns so; a second text of a pair is one of " + ", ".join(SECOND),
        )
    if not (word := label_in(label, where)):
        raise DataError(f"{where}: the label is empty", do="give it one, or leave the row out")
    return Labelled(text_in(first, where), None if second is None else text_in(second, where), word)


def pair_lengths(first: int, second: int, length: int) -> tuple[int, int]:
    """How many tokens of each text stay, of `length` together: the longer one is cut, the second where both are alike, as
    Megatron-LM cuts its pairs of sentences.

    >>> pair_lengths(10, 3, 8), pair_lengths(10, 9, 8), pair_lengths(2, 3, 8), pair_lengths(5, 5, 7)
    ((5, 3), (4, 4), (2, 3), (4, 3))
    """
    half = length // 2
    if first + second <= length:
        return first, second
    if second <= half:
        return length - second, second
    return (first, length - first) if first <= length - half else (length - half, half)
