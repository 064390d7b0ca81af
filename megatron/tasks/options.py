# SPDX-License-Identifier: Apache-2.0
"""The options of a task that has some in place of classes. Needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.data.labelled import column, unlike_published
from megatron.data.tables import Row, text_in
from megatron.errors import DataError
from megatron.tasks.description import Task


def options_in(task: Task, row: Mapping[Any, Any], where: str) -> tuple[str, ...]:
    """What is chosen among. Raises DataError for what are no two texts, or more than the task's labels name."""
    found = column(row, task.options, where, "options")
    if not isinstance(found, list) or len(found) < 2:
        raise DataError(f"{where}, {task.options}: at least two options are wanted, as a list of texts")
    options = tuple(text_in(one, f"{where}, {task.options}") for one in found)
    if task.labels is not None and len(options) > task.outputs:
        raise DataError(
            f"{where}: there are {len(options)} options, and {task.name} has at most {task.outputs}",
            do="give --labels as many words, one for each place",
        )
    return options


def place_of(task: Task, label: str, options: Sequence[str], where: str, strict: bool) -> str:
    """The name of the right option's place, of a label that is this name, or in files of one's own the option itself. Where
    anything may stand for a label (not strict), "" for what is neither.
    """
    names = task.labels[: len(options)]
    found = {known.index(label) for known in (names, () if task.split else options) if label in known}
    if len(found) == 1:
        return names[found.pop()]
    if not strict:
        return ""
    if found:
        raise DataError(
            f"{where}: the label {label!r} is the name of a place, and the option in another place",
            do="write places in all rows, with --labels that are no options, as A B C D",
        )
    raise DataError(
        f"{where}: the label {label!r} is none of {len(options)} options, nor the name of a place",
        f"these are {', '.join(names)}",
    )


def questions_in(task: Task, path: Path, rows: Sequence[Row], labelled: bool) -> list[Row]:
    """A row for each question of the rows of a published file. Raises DataError for what is not as the task has them."""
    found = []
    for row in rows:
        where = f"{path}, {row.where}"
        try:
            questions = list(task.split(row.columns, path, labelled))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise unlike_published(where, task.name, error) from None
        found += [Row(len(found) + number, row.where, question) for number, question in enumerate(questions)]
    return found
