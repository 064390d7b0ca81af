# SPDX-License-Identifier: Apache-2.0
"""Soft labels: probabilities from other models, used as targets instead of labels.

The other models may be several fine-tunings of the task (distillation, arXiv:1503.02531), or models trained on a few
examples with a pattern that label many for a head (the last step of PET, arXiv:2001.07676). The files are those that an
evaluation writes next to its predictions (NAME.probabilities.tsv).
"""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from megatron.data.tables import text_of_file
from megatron.errors import DataError, SettingsError
from megatron.tasks.description import Task
from megatron.tasks.examples import Examples

INDEX = "index"  # the first column of a file of probabilities: the example's id
NEAR = 1e-3  # tolerance for the sum of probabilities


def with_soft_labels(examples: Examples, paths: Sequence[str], task: Task) -> Examples:
    """Add the mean of the files' probabilities to the examples, in the order of the task's labels.

    Raises DataError for a file of other examples or labels, SettingsError for a regression.
    """
    if task.regression:
        raise SettingsError(f"--soft-labels: the labels of {task.name} are numbers, not classes")
    tables = [_read(Path(path), task.labels) for path in paths]
    for path, (ids, _) in zip(paths, tables, strict=True):
        if len(ids) != len(examples.rows):
            raise DataError(
                f"--soft-labels {path} has {len(ids):,} examples, and the training file {len(examples.rows):,}",
                do="predict the training file: --test-data FILE writes its probabilities",
            )
        for number, (id, row) in enumerate(zip(ids, examples.rows, strict=True)):
            if id != row.id:
                raise DataError(f"--soft-labels {path}, line {number + 2}: example {id}, where training has {row.id}")
    means = zip(*(shares for _, shares in tables), strict=True)
    rows = [
        row._replace(shares=tuple(sum(column) / len(paths) for column in zip(*of_row, strict=True)))
        for row, of_row in zip(examples.rows, means, strict=True)
    ]
    return replace(examples, rows=tuple(rows))


def labels_of(path: str) -> tuple[str, ...]:
    """The labels in a file of probabilities. Raises DataError."""
    return tuple(_lines(Path(path))[0].split("\t")[1:])


def _read(path: Path, labels: Sequence[str]) -> tuple[list[str], list[tuple[float, ...]]]:
    """(ids, probabilities in the order of `labels`)."""
    header, *lines = _lines(path)
    names = header.split("\t")[1:]
    if sorted(names) != sorted(labels):
        raise DataError(
            f"--soft-labels {path} has probabilities of {', '.join(names[:20])}",
            f"the task's labels are {', '.join(labels[:20])}",
        )
    order = [names.index(label) for label in labels]
    rows = [_shares(path, number, line, len(names)) for number, line in enumerate(lines, 2)]
    totals = [sum(shares) for shares in rows]
    misses = [abs(total - 1) for total in totals]
    if misses and max(misses) > NEAR and max(misses) > (allowed := max(NEAR, _rounding(lines))):
        number = next(number for number, miss in enumerate(misses) if miss > allowed)
        raise DataError(
            f"--soft-labels {path}, line {number + 2}: the probabilities add up to {totals[number]:.4f}, not to 1"
        )
    normalized = [tuple(shares[place] / total for place in order) for shares, total in zip(rows, totals, strict=True)]
    return [line.split("\t", 1)[0] for line in lines], normalized


def _shares(path: Path, number: int, line: str, count: int) -> list[float]:
    """The probabilities in a line."""
    try:
        shares = [float(word) for word in line.split("\t")[1:]]
    except ValueError:
        shares = []
    if len(shares) != count or not all(0 <= share <= 1 for share in shares):
        raise DataError(f"--soft-labels {path}, line {number}: no {count} probabilities: {line[:60]!r}")
    return shares


def _rounding(lines: Sequence[str]) -> float:
    """The rounding error of a sum of probabilities, each rounded to as many decimals as the file has; at most 0.5."""
    words = [line.split("\t")[1:] for line in lines]
    last = min(Decimal(word).as_tuple().exponent for row in words for word in row)
    return min(0.5, len(words[0]) * 0.5 * 10.0**last)


def _lines(path: Path) -> list[str]:
    text = text_of_file(path, f"--soft-labels {path}")
    lines = text.removesuffix("\n").split("\n")  # ids may contain other line separators
    if lines[0].split("\t")[0] != INDEX or len(lines[0].split("\t")) < 3:
        raise DataError(
            f"--soft-labels {path} is no table of probabilities",
            f"its first line is {lines[0][:60]!r}",
            f"a line '{INDEX}', then the labels, separated by tabs; then a line of each example: NAME.probabilities.tsv",
        )
    return lines
