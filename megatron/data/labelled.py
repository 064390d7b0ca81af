# SPDX-License-Identifier: Apache-2.0
"""Read files of labelled texts: .jsonl with an object per line, or .tsv or .csv with a header line.

{"text": "A fine film.", "label": "positive"}
{"sentence1": "It rains.", "sentence2": "It is wet.", "label": 1}
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

from megatron.data.tables import ENDINGS, Row, label_in, read_table, refuse_half_letters, text_in
from megatron.errors import DataError, did_you_mean, no_such_file

# Names of columns in GLUE's and CLUE's files and others: the first text, the second text, the label.
FIRST = ("text", "sentence", "sentence1", "text_a", "premise", "question1", "question")
SECOND = ("sentence2", "text_b", "hypothesis", "question2", "text_pair")
LABEL = ("label",)


@dataclass(frozen=True)
class LabelledTask:
    """A task on labelled texts, and how to read its files.

    text, text_pair, label: names of columns, or keys of JSON lines; text_pair only for tasks on pairs
    labels:     None: the labels of the training files; (): numbers (a regression)
    columns:    names of columns, for files without a header line
    skip:       labels of rows to leave out ("-": annotators did not agree)
    prepare:    converts a row of the file to one with the task's columns
    """

    name: str
    text: str = "sentence"
    text_pair: Optional[str] = None
    label: str = "label"
    labels: Optional[tuple[str, ...]] = None
    columns: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    prepare: Optional[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = None

    @property
    def regression(self) -> bool:
        return self.labels == ()


class Labelled(NamedTuple):
    """A text, or a pair of texts, and its label; "" without a label."""

    first: str
    second: Optional[str]
    label: str


class LabelledFile(NamedTuple):
    """The content of a file. labels: of the classes, in the order of their indices; notes: on rows that are left out."""

    rows: tuple[Labelled, ...]
    labels: tuple[str, ...]
    notes: tuple[str, ...]


def is_labelled(path: str) -> bool:
    """Whether a file name is one of a file of labelled texts."""
    return path.lower().endswith(ENDINGS)


def task_table(task: LabelledTask, path: Path) -> tuple[list[Row], list[str]]:
    """`read_table` of a task's file."""
    return read_table(path, task.columns, (task.text,))


def task_row(task: LabelledTask, row: Row, path: Path, labelled: bool = True) -> Optional[Labelled]:
    """The labelled text of a row; None if the task skips it. labelled: False accepts any label, or none.

    Raises DataError for missing columns and labels, and for values that are not text.
    """
    where, columns = f"{path}, {row.where}", row.columns
    if task.prepare is not None:
        try:
            columns = task.prepare(columns)
        except (LookupError, TypeError, ValueError) as error:
            raise unlike_published(where, task.name, error) from None
    text = text_in(column(columns, task.text, where, "text"), f"{where}, {task.text}")
    pair = task.text_pair and text_in(column(columns, task.text_pair, where, "text_pair"), f"{where}, {task.text_pair}")
    cell = column(columns, task.label, where, "label") if labelled else columns.get(task.label)
    try:
        label = label_in(cell, where)
    except DataError:
        if labelled:
            raise
        label = ""
    if label in task.skip:
        return None
    if labelled and not label:
        raise DataError(f"{where}: the label is empty", do="give it one, or leave the row out")
    return Labelled(text, pair, label)


def unlike_published(where: str, name: str, error: Exception) -> DataError:
    """The error for a row that does not have the format of a published task."""
    reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return DataError(f"{where} is not as {name} has them: {reason}")


def column(row: Mapping[str, Any], name: str, where: str, what: str) -> Any:
    """A cell of a row. Raises DataError if there is no such column."""
    if name not in row:
        raise DataError(
            f"{where} has no column {name!r}{did_you_mean(name, map(str, row))}",
            f"it has {', '.join(map(str, row))}",
            f"the task takes its {what} from there",
        )
    return row[name]


def skipped(task: LabelledTask, path: Path, rows: int, kept: int) -> list[str]:
    """A note on the rows that the task skips, if any."""
    if kept == rows:
        return []
    return [f"{path}: {rows - kept} of {rows} rows are left out, whose label is {' or '.join(task.skip)}"]


@lru_cache(maxsize=16)
def read_labelled(path: str, task: Optional[LabelledTask] = None) -> LabelledFile:
    """Read the rows of a file, with the columns of `task`, or else by known names of columns.

    Raises DataError for an invalid row, and names its line, or for a file with fewer than two labels.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: {no_such_file(path)}", do=f"labelled texts are in files {', '.join(ENDINGS)}")
    rows, notes = _as_named(Path(path)) if task is None else _as_published(Path(path), task)
    if not rows:
        raise DataError(f"{path} has no rows", do="give labelled texts, or leave the task out")
    if len(labels := labels_of(rows)) < 2:
        raise DataError(
            f"{path}: all {len(rows):,} rows have the label {labels[0]!r}", do="give texts of two labels or more"
        )
    return LabelledFile(tuple(rows), tuple(task.labels if task else labels), tuple(notes))


def labels_of(rows: Sequence[Labelled]) -> list[str]:
    """The labels of rows, sorted as text."""
    return sorted({row.label for row in rows})


def _as_published(path: Path, task: LabelledTask) -> tuple[list[Labelled], list[str]]:
    """(rows, notes) of a file of a task with known labels."""
    table, notes = task_table(task, path)
    rows = []
    try:
        for row in table:
            if (labelled := task_row(task, row, path)) is None:
                continue
            if labelled.label not in task.labels:
                raise DataError(
                    f"{path}, {row.where}: the label {labelled.label!r} is none of {task.name}'s",
                    f"it has {', '.join(task.labels[:20])}{', ...' * (len(task.labels) > 20)}",
                    "correct it, or leave the row out",
                )
            rows.append(labelled)
    except DataError as error:
        other = f"a file that is not {task.name} as it is published needs another name for its task"
        raise DataError(error.what, error.why, f"{error.do}; {other}" if error.do else other) from None
    return rows, notes + skipped(task, path, len(table), len(rows))


def _as_named(path: Path) -> tuple[list[Labelled], list[str]]:
    """(rows, notes) of a file with known names of columns."""
    table, notes = read_table(path)
    rows, unread = [], {}
    for row in table:
        task = _named(row, f"{path}, {row.where}")
        rows.append(task_row(task, row, path))
        used = (task.text, task.text_pair, task.label)
        unread |= {name: None for name, value in row.columns.items() if name not in used and value is not None}
    for name in unread:
        refuse_half_letters(name, f"{path}: the name of a column")
    return rows, notes + [f"{path}: not read: {', '.join(unread)}"] * bool(unread)


def _named(row: Row, where: str) -> LabelledTask:
    """The task of a row: its columns of texts and label, by their names."""
    matches = [[name for name in names if row.columns.get(name) is not None] for names in (FIRST, SECOND, LABEL)]
    first, second, label = matches
    if not (first and label):
        wanted = f"a text ({', '.join(FIRST)}) and a label" if not first else "a label"
        raise DataError(
            f"{where} lacks {wanted}",
            f"it has {', '.join(row.columns) or 'no columns'}",
            "name the columns so; a second text of a pair is one of " + ", ".join(SECOND),
        )
    for names in matches:
        if len(names) > 1:
            raise DataError(
                f"{where} has {' and '.join(names)}, and one of them would not be read",
                do="leave out what is not to be read; the texts of a pair are sentence1 and sentence2",
            )
    return LabelledTask("", first[0], second[0] if second else None, label[0])


def pair_lengths(first: int, second: int, length: int) -> tuple[int, int]:
    """Lengths of a pair of texts truncated to `length` tokens in total. The longer one is cut, and the second one on a tie,
    as Megatron-LM does.

    >>> pair_lengths(10, 3, 8), pair_lengths(10, 9, 8), pair_lengths(2, 3, 8), pair_lengths(5, 5, 7)
    ((5, 3), (4, 4), (2, 3), (4, 3))
    """
    half = length // 2
    if first + second <= length:
        return first, second
    if second <= half:
        return length - second, second
    return (first, length - first) if first <= length - half else (length - half, half)
