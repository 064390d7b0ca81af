# SPDX-License-Identifier: Apache-2.0
"""Read the examples of a task from its files, also of tasks with options instead of classes. Needs no torch."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from megatron.data.labelled import column, skipped, task_row, task_table, unlike_published
from megatron.data.published import plain_name
from megatron.data.tables import Row, is_number, label_in, refuse_half_letters, refuse_many_lines, text_in
from megatron.errors import DataError, SettingsError, did_you_mean, missing_file, no_such_file
from megatron.tasks.description import TASKS, Task, with_labels


class TaskExample(NamedTuple):
    """An example: a text or a pair.

    label: index of its class, or a number; None: unknown. id: its name in predictions. shares: probabilities of classes as
    the target (soft_labels.py). options: the options of a question; the label is the index of the right one.
    answers: where in the pair an answer is: (first character, the one after the last); gold: their texts (spans.py).
    """

    text: str
    pair: Optional[str]
    label: Optional[float]
    id: str
    shares: Optional[tuple[float, ...]] = None
    options: tuple[str, ...] = ()
    answers: tuple[tuple[int, int], ...] = ()
    gold: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examples:
    """The examples of a split. sets: name -> range of indices in `rows`; notes: messages for the user."""

    rows: tuple[TaskExample, ...]
    sets: Mapping[str, range]
    notes: tuple[str, ...] = ()


def file_of(task: Task, folder: Optional[str], names: Sequence[str], given: Optional[str] = None) -> Optional[Path]:
    """Find the file of a set: `given` (a path, or a name in the folder, of which the task may know others), or the first of
    `names` in the folder or in the task's folder below it. Without a folder, files of a YAML task are searched for here,
    then next to the YAML file.
    """
    if given is not None:
        if Path(given).exists():
            return Path(given)
        known = [names for sets in (task.train, task.valid, task.test) for names in sets.values() if given in names]
        path = file_of(task, folder, known[0] if known else (given,))
        if path is None:
            raise missing_file(given, what=f"file (nor one in {folder})" if folder else "file")
        return path
    if folder is not None and not Path(folder).is_dir():
        raise DataError(
            f"--data-path {folder}: {no_such_file(folder, 'folder')}", do=f"give the folder with {names[0]}"
        )
    folders = [Path(folder)] if folder is not None else [Path(), task.home] if task.home is not None else []
    places = [place for folder in folders for place in (folder, *_own_folders(task, folder))]
    return next((place / name for place in places for name in names if (place / name).exists()), None)


def _own_folders(task: Task, folder: Path) -> list[Path]:
    """Folders of the task in any spelling, the published one first: cluewsc2020, CLUEWSC2020 and cluewsc for CLUEWSC."""
    if not task.folder:
        return []
    wanted = plain_name(task.folder)
    matches = [path for path in sorted(folder.iterdir()) if plain_name(path.name) == wanted and path.is_dir()]
    return sorted(matches, key=lambda path: path.name != task.folder)


def read_examples(task: Task, files: Mapping[str, Path], *, labelled: bool = True) -> Examples:
    """Read the examples of a split. labelled: False for test data, where labels are optional.

    Raises DataError for missing columns, unknown labels, invalid numbers, and empty files.
    """

    def read(path: Path) -> tuple[list[TaskExample], list[str]]:
        table, notes = task_table(task, path)
        if task.split:
            table = questions_in(task, path, table, labelled)
        rows = list(_examples(task, path, table, labelled))
        if not rows:
            raise DataError(f"{path} holds no examples")
        notes += skipped(task, path, len(table), len(rows))
        return rows, [*notes, *_notes_of_ids(task, path, table, rows, labelled)]

    return of_files(files, read)


def of_files(files: Mapping[str, Path], read: Callable[[Path], tuple[list[TaskExample], list[str]]]) -> Examples:
    """The examples of all files of a split. read: a file -> (its examples, notes on it)."""
    rows, sets, notes = [], {}, []
    for name, path in files.items():
        own, of_file = read(path)
        sets[name] = range(len(rows), len(rows) + len(own))
        rows += own
        notes += of_file
    return Examples(tuple(rows), sets, tuple(notes))


def _examples(task: Task, path: Path, rows: Sequence[Row], labelled: bool) -> Iterator[TaskExample]:
    numbers = {label: number for number, label in enumerate(task.labels or ())}
    for row in rows:
        texts = task_row(task, row, path, labelled)
        if texts is None:
            continue
        where = f"{path}, {row.where}"
        options = options_in(task, row.columns, where) if task.options else ()
        word = place_of(task, texts.label, options, where, strict=labelled) if options else texts.label
        label = _label(task, word, numbers, where, strict=labelled) if word else None
        yield TaskExample(texts.first, texts.second, label, _id(task, row, where), options=options)


def _id(task: Task, row: Row, where: str) -> str:
    """The id of an example in predictions: its index if it has none."""
    given = row.columns.get(task.id) if task.id else None
    if isinstance(given, (list, dict)):
        raise DataError(f"{where}: the id is a list or an object", do="give a word or number")
    id = str(row.place if given is None else given)
    refuse_half_letters(id, f"{where}, {task.id}")
    refuse_many_lines(id, f"{where}, {task.id}")
    return id


def _notes_of_ids(
    task: Task, path: Path, table: Sequence[Row], rows: Sequence[TaskExample], labelled: bool
) -> Iterator[str]:
    """Notes on missing and duplicate ids.

    Raises DataError if a test set lacks the id column of a user's own description; published files may lack it.
    """
    if task.id and task.name not in TASKS and not any(task.id in row.columns for row in table):
        names = [str(name) for name in table[0].columns]
        missing = f"{path} has no column {task.id!r}{did_you_mean(task.id, names)}"
        if not labelled:
            raise DataError(
                missing, f"it has {', '.join(names)}", "the task's id names examples in predictions; correct it"
            )
        yield f"{missing}; predictions name its examples by their places"
    twice = {id: count for id, count in Counter(row.id for row in rows).items() if count > 1}
    if twice:
        first = next(iter(twice))
        yield (
            f"{path}: {len(twice):,} ids stand for several examples each, whose predictions cannot be told apart (first: "
            f"{first!r}, {twice[first]} times)"
        )


def _label(task: Task, label: str, numbers: Mapping[str, int], where: str, strict: bool) -> Optional[float]:
    """The index of a label, or its number; if not strict, as for test files, None for an invalid label."""
    if task.regression:
        try:
            value = float(label)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            if not strict:
                return None
            raise DataError(f"{where}: the label {label!r} is no number", do="labels: [...] if these are classes")
        return value
    if label not in numbers:
        if not strict:
            return None
        raise DataError(
            f"{where}: the label {label!r} is none of the task's{did_you_mean(label, numbers)}",
            f"{task.name} has {', '.join(list(numbers)[:20])}{', ...' * (len(numbers) > 20)}",
            "labels are those of --labels, or of the task, or of the checkpoint that is resumed, or of the training files",
        )
    return numbers[label]


def labels_in(task: Task, paths: Sequence[Path]) -> tuple[str, ...]:
    """The labels of files, sorted, numbers by value; for options, their indices.

    Raises DataError or SettingsError for fewer than two.
    """
    rows = [(f"{path}, {row.where}", row.columns) for path in paths for row in task_table(task, path)[0]]
    if task.options:
        most = max((len(options_in(task, row, where)) for where, row in rows), default=0)
        return with_labels(task, map(str, range(most))).labels
    words = {where: label_in(column(row, task.label, where, "label"), where) for where, row in rows}
    labels = set(words.values()) - set(task.skip) - {""}
    plain = sorted(labels, key=lambda word: (0, float(word), word) if is_number(word) else (1, 0.0, word))
    if len(plain) < 2:
        if empty := next((where for where, word in words.items() if not word), None):
            raise DataError(f"{empty}: the label is empty", do="give it one, or leave the row out")
        count = sum(word in plain for word in words.values())
        what = f"all {count:,} examples have the label {plain[0]!r}" if plain else "there are no labelled examples"
        raise DataError(f"{', '.join(map(str, paths))}: {what}", do="give examples of two classes or more")
    for where, word in words.items():
        refuse_many_lines(word, where)
    return with_labels(task, plain).labels


def refuse_one_class(task: Task, examples: Examples, path: object) -> list[str]:
    """Raise DataError if all training examples have the same label. Returns notes on classes without examples."""
    if task.options or task.spans:
        return []
    if task.regression:
        if len({example.label for example in examples.rows}) == 1:
            raise DataError(f"{path}: all {len(examples.rows)} examples have the same number: nothing can be learned")
        return []
    counts = Counter(example.label for example in examples.rows)
    if len(counts) == 1:
        only = task.labels[next(iter(counts))]
        raise DataError(f"{path}: all {len(examples.rows)} examples have the label {only!r}: nothing can be learned")
    empty = [label for number, label in enumerate(task.labels) if not counts[number]]
    note = f"{path} has no example of {len(empty)} of {len(task.labels)} classes: {', '.join(empty[:10])}"
    return [note + ", ..." * (len(empty) > 10)] if empty else []


def few(examples: Examples, task: Task, count: int) -> Examples:
    """The first `count` examples of each class. Raises SettingsError for tasks without classes."""
    if task.regression or task.options or task.spans:
        what = "pieces of texts" if task.spans else "options" if task.options else "numbers"
        raise SettingsError(f"--examples-per-class {count}: the labels of {task.name} are {what}, not classes")
    seen, kept = Counter(), []
    for example in examples.rows:
        seen[example.label] += 1
        if seen[example.label] <= count:
            kept.append(example)
    return Examples(tuple(kept), {"": range(len(kept))}, examples.notes)


def options_in(task: Task, row: Mapping[Any, Any], where: str) -> tuple[str, ...]:
    """The options of a row. Raises DataError for fewer than two texts, or more than the task's labels."""
    given = column(row, task.options, where, "options")
    if not isinstance(given, list) or len(given) < 2:
        raise DataError(f"{where}, {task.options}: at least two options are wanted, as a list of texts")
    options = tuple(text_in(one, f"{where}, {task.options}") for one in given)
    if task.labels is not None and len(options) > task.outputs:
        raise DataError(
            f"{where}: there are {len(options)} options, and {task.name} has at most {task.outputs}",
            do="give --labels as many words, one for each place",
        )
    return options


def place_of(task: Task, label: str, options: Sequence[str], where: str, strict: bool) -> str:
    """The name of the right option's position. The label is this name, or, in a user's own files, the option itself.

    not strict: "" for other labels, which are an error otherwise
    """
    names = task.labels[: len(options)]
    matches = {known.index(label) for known in (names, () if task.split else options) if label in known}
    if len(matches) == 1:
        return names[matches.pop()]
    if not strict:
        return ""
    if matches:
        raise DataError(
            f"{where}: the label {label!r} is the name of a place, and the option in another place",
            do="write places in all rows, with --labels that are no options, as A B C D",
        )
    raise DataError(
        f"{where}: the label {label!r} is none of {len(options)} options, nor the name of a place",
        f"these are {', '.join(names)}",
    )


def questions_in(task: Task, path: Path, rows: Sequence[Row], labelled: bool) -> list[Row]:
    """A row for each question in the rows of a published file. Raises DataError for a row in another format."""
    result = []
    for row in rows:
        where = f"{path}, {row.where}"
        try:
            questions = list(task.split(row.columns, path, labelled))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise unlike_published(where, task.name, error) from None
        result += [Row(len(result) + number, row.where, question) for number, question in enumerate(questions)]
    return result
