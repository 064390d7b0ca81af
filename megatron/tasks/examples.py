# SPDX-License-Identifier: Apache-2.0
"""The examples of a task out of its files: TSV as GLUE has it (no quotes), quoted CSV, JSON lines. Needs no torch."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from megatron.errors import DataError, SettingsError, did_you_mean
from megatron.tasks.description import Task, with_labels

SPOILT = 0.01  # of the rows that may have another number of columns than the header


class TaskExample(NamedTuple):
    """A text, or two. label: number of its class, or a number; None: not known. id: what predictions name it by. shares:
    how likely each class is, where that is learned (soft_labels.py).
    """

    text: str
    pair: Optional[str]
    label: Optional[float]
    id: str
    shares: Optional[tuple[float, ...]] = None


@dataclass(frozen=True)
class Examples:
    """Of a split. sets: name -> range of places in `rows`. notes: what the user should hear."""

    rows: tuple[TaskExample, ...]
    sets: Mapping[str, range]
    notes: tuple[str, ...] = ()


def file_of(task: Task, folder: Optional[str], names: Sequence[str], given: Optional[str] = None) -> Optional[Path]:
    """The file of a set: the one that was given (a path, or a name in the folder); or the first of these names there
    or in the task's own folder below it.
    """
    if given is not None:
        if Path(given).is_file():
            return Path(given)
        found = file_of(task, folder, (given,))
        if found is None:
            raise DataError(f"{given}: no such file{f', nor one in {folder}' if folder else ''}")
        return found
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise DataError(f"--data-path {folder}: no such folder", do=f"give the folder with {names[0]}")
    places = [Path(folder), Path(folder) / (task.folder or "."), Path(folder) / (task.folder or ".").lower()]
    return next((place / name for place in places for name in names if (place / name).is_file()), None)


def rows_of(
    path: Path, columns: Sequence[str] = (), wanted: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """(the rows of a file by column, notes).

    columns: of a file whose first line does not name `wanted`, and is a row then.
    Raises DataError for what cannot be read, naming the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from None
    if path.suffix in (".json", ".jsonl"):
        return list(_json_rows(path, text)), []
    if path.suffix == ".csv":
        table = [
            (reader.line_num, row) for reader in [csv.reader(io.StringIO(text, newline=""))] for row in reader if row
        ]
    else:  # no quotes: in GLUE a quotation mark is text
        table = [(n, line.rstrip("\r").split("\t")) for n, line in enumerate(text.split("\n"), 1) if line.strip("\r")]
    if not table:
        raise DataError(f"{path} is empty")
    header = [name.strip() for name in table[0][1]]
    if columns and not set(wanted) <= set(header):
        header = list(columns)
    else:
        table = table[1:]
    good = [dict(zip(header, row)) for _, row in table if len(row) == len(header)]
    bad = [(number, len(row)) for number, row in table if len(row) != len(header)]
    if len(bad) > SPOILT * len(table) + 1:
        number, count = bad[0]
        raise DataError(
            f"{path}, line {number}: {count} columns, where the header names {len(header)}",
            f"so it is with {len(bad)} of {len(table)} lines",
            "is it separated by tabs? A file with quotes is read as .csv",
        )
    told = f"{path}: {len(bad)} lines with another number of columns than the header are left out (first: line "
    return good, [f"{told}{bad[0][0]})"] if bad else []


def _json_rows(path: Path, text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}", do="one JSON object a line") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: {type(row).__name__}, no object", do="one JSON object a line")
        yield row


def read_examples(task: Task, files: Mapping[str, Path], *, labelled: bool = True) -> Examples:
    """The examples of a split. labelled: False for test data, whose labels are taken where they are there.

    Raises DataError for missing columns, labels that the task does not have, numbers that are none, empty files.
    """
    rows, sets, notes = [], {}, []
    for name, path in files.items():
        start = len(rows)
        found, told = rows_of(path, task.columns, (task.text,))
        rows += _examples(task, path, found, labelled)
        if len(rows) == start:
            raise DataError(f"{path} holds no examples")
        if skipped := len(found) - (len(rows) - start):
            told.append(f"{path}: {skipped} of {len(found)} rows are left out, whose label is {' or '.join(task.skip)}")
        sets[name] = range(start, len(rows))
        notes += told
    return Examples(tuple(rows), sets, tuple(notes))


def _examples(task: Task, path: Path, rows: Sequence[Mapping[str, Any]], labelled: bool) -> Iterator[TaskExample]:
    numbers = {label: number for number, label in enumerate(task.labels or ())}
    for place, row in enumerate(rows):
        where = f"{path}, example {place + 1}"
        if task.prepare is not None:
            try:
                row = task.prepare(row)
            except (LookupError, TypeError) as error:
                raise DataError(f"{where} is not as {task.name} has them: {error!r}") from None
        text = _column(row, task.text, where, "text")
        pair = None if task.text_pair is None else _column(row, task.text_pair, where, "text_pair")
        label = _word(row[task.label]) if row.get(task.label) not in (None, "") else None
        if label in task.skip and label is not None:
            continue
        if label is None and labelled:
            _column(row, task.label, where, "label")
            raise DataError(f"{where}: the label is empty")
        if label is not None:
            label = _label(task, label, numbers, where, strict=labelled)
        id = row.get(task.id) if task.id else None
        yield TaskExample(text, pair, label, str(place if id is None else id))


def _word(value: Any) -> str:
    """A label as a word: JSON has true and 1 where others have "true" and "1"."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def _column(row: Mapping[str, Any], name: str, where: str, what: str) -> str:
    if name not in row:
        raise DataError(
            f"{where} has no column {name!r}{did_you_mean(name, map(str, row))}",
            f"it has {', '.join(map(str, row))}",
            f"the task takes its {what} from there",
        )
    return str(row[name])


def _label(task: Task, label: str, numbers: Mapping[str, int], where: str, strict: bool) -> Optional[float]:
    if task.regression:
        try:
            value = float(label)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise DataError(f"{where}: the label {label!r} is no number", do="labels: [...] if these are classes")
        return value
    if label not in numbers:
        if not strict:  # test files hold anything in the place of labels
            return None
        raise DataError(
            f"{where}: the label {label!r} is none of the task's{did_you_mean(label, numbers)}",
            f"{task.name} has {', '.join(list(numbers)[:20])}{', ...' * (len(numbers) > 20)}",
        )
    return numbers[label]


def labels_in(task: Task, path: Path) -> tuple[str, ...]:
    """The labels of a file, sorted: numbers by value. Raises DataError, SettingsError where there are no two."""
    rows, _ = rows_of(path, task.columns, (task.text,))
    found = {_word(_column(row, task.label, str(path), "label")) for row in rows} - set(task.skip) - {""}
    plain = sorted(found, key=lambda word: (0, float(word), word) if _is_number(word) else (1, 0.0, word))
    if len(plain) < 2:
        told = f"all {len(rows):,} examples have the label {plain[0]!r}" if plain else "there are no labelled examples"
        raise DataError(f"{path}: {told}", do="give examples of two classes or more")
    return with_labels(task, plain).labels


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def refuse_one_class(task: Task, examples: Examples, path: object) -> list[str]:
    """Raise DataError where all training examples have one label: nothing could be learned. Returns notes of classes
    without any.
    """
    if task.regression:
        if len({example.label for example in examples.rows}) == 1:
            raise DataError(f"{path}: all {len(examples.rows)} examples have the same number: nothing can be learned")
        return []
    counts = Counter(example.label for example in examples.rows)
    if len(counts) == 1:
        only = task.labels[next(iter(counts))]
        raise DataError(f"{path}: all {len(examples.rows)} examples have the label {only!r}: nothing can be learned")
    empty = [label for number, label in enumerate(task.labels) if not counts[number]]
    told = f"{path} has no example of {len(empty)} of {len(task.labels)} classes: {', '.join(empty[:10])}"
    return [told + ", ..." * (len(empty) > 10)] if empty else []


def few(examples: Examples, task: Task, count: int) -> Examples:
    """The first `count` examples of each class. Raises SettingsError for numbers, which are no classes."""
    if task.regression:
        raise SettingsError(f"--examples-per-class {count}: the labels of {task.name} are numbers, not classes")
    seen, kept = Counter(), []
    for example in examples.rows:
        seen[example.label] += 1
        if seen[example.label] <= count:
            kept.append(example)
    return Examples(tuple(kept), {"": range(len(kept))}, examples.notes)
