# SPDX-License-Identifier: Apache-2.0
"""Tasks with options instead of classes. Needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.data.labelled import column, unlike_published
from megatron.data.tables import Row, text_in
from megatron.errors import DataError
from megatron.tasks.description import Task


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
