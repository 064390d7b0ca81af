# SPDX-License-Identifier: Apache-2.0
"""The one reader of metrics.jsonl: the records of a run that count, from a file that grows or is whole.

    history = read_history(path)           # the whole file
    history = read_end(path)               # its newest launch, from the end of a file of any length
    history.add(lines)                     # the next lines of a file that grows (telemetry/tail.py)
    history.steps["lm loss"], history.steps[-1]["seconds"]          # a column of the steps, a row
    history.curve("lm loss", axis="tokens", width=800, window=64)

A resumed run repeats steps, a rewind takes some back: the later records count. Steps are columns of numbers, so that memory
holds millions of them.
"""

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megatron.telemetry.curves import Curve, known_places, smoothed, thinned
from megatron.telemetry.directions import LARGER, SMALLER, direction_of
from megatron.telemetry.rank_times import WAITING
from megatron.telemetry.run_record import (
    EVENTS,
    LAUNCH,
    LOSS,
    OF_EVERY_EVALUATION,
    RATES,
    TASK_LOSS,
    count_launches,
    own_sums,
    parse_record,
)

AXES = ("iteration", "samples", "tokens", "time")
OWN_TIME = "own time"  # of a rank in a step, without waiting for others
START = 1024  # rows that a table begins with
BATCH = 4096  # steps that are added to the columns at once
TAIL = 1 << 16  # bytes at the end of a metrics file that `read_end` reads
WHOLE = ("iteration", "consumed_samples", "batch_size", "bytes")  # columns of whole numbers


class Columns:
    """A table that grows at its end: columns by name, rows by number. Missing numbers are NaN, missing texts ""."""

    def __init__(self):
        self.rows = 0
        self.names: dict[str, np.ndarray] = {}  # each with room for more rows

    def extend(self, records: list[dict[str, Any]]) -> None:
        """Append a row for each record, of its numbers and texts; a column has the one or the other."""
        end = self.rows + len(records)
        for name in dict.fromkeys(name for record in records for name in record):
            values = [record.get(name) for record in records]
            known = [value for value in values if value is not None]
            if name in RATES or name == "kind" or not known:
                continue
            texts = self._is_text(name, known[0])
            if all(isinstance(value, str if texts else (int, float)) for value in known):
                values = [value or "" for value in values] if texts else np.array(values, dtype=float)
                self._room(name, end, "" if texts else np.nan)[self.rows : end] = values
        self.rows = end

    def _is_text(self, name: str, first: Any) -> bool:
        """Whether a column has texts: by its earlier rows, or by the first of its values."""
        column = self.names.get(name)
        return isinstance(first, str) if column is None else column.dtype == object

    def _room(self, name: str, rows: int, missing: Any = np.nan) -> np.ndarray:
        """The column with room for so many rows. missing: the value of empty rows of a new column"""
        column = self.names.get(name)
        if column is None or len(column) < rows:
            missing = missing if column is None else _missing(column)
            larger = np.full(max(START, 2 * rows), missing, object if missing == "" else float)
            if column is not None:
                larger[: len(column)] = column
            column = self.names[name] = larger
        return column

    def drop_after(self, iteration: int) -> None:
        """Remove the rows of later iterations from the end."""
        iterations = self["iteration"]
        kept = np.flatnonzero(iterations <= iteration)
        rows = int(kept[-1]) + 1 if len(kept) else 0
        for column in self.names.values():
            column[rows : self.rows] = _missing(column)
        self.rows = rows

    def __getitem__(self, place):
        """The values of a column, NaN in all rows if there is none; or a row: name -> value, without missing ones."""
        if isinstance(place, str):
            column = self.names.get(place)
            if column is None:
                return np.full(self.rows, np.nan)
            return (column if len(column) >= self.rows else self._room(place, self.rows))[: self.rows]
        place = range(self.rows)[place]
        return next(self._records(place, place + 1))

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for first in range(0, self.rows, BATCH):
            yield from self._records(first, min(first + BATCH, self.rows))

    def _records(self, first: int, end: int) -> Iterator[dict[str, Any]]:
        columns = {name: self[name][first:end].tolist() for name in self.names}
        for values in zip(*columns.values()):
            row = {name: value for name, value in zip(columns, values) if value == value and value != ""}
            yield {name: int(value) if name in WHOLE else value for name, value in row.items()}

    def known(self, name: str) -> np.ndarray:
        """The finite numbers of a column."""
        column = self.names.get(name)
        column = np.empty(0) if column is None or column.dtype == object else self[name]
        return column[np.isfinite(column)]

    def has(self, name: str) -> bool:
        """Whether a column has a finite number."""
        return len(self.known(name)) > 0


def _missing(column: np.ndarray) -> Any:
    return "" if column.dtype == object else np.nan


class HeatTable:
    """A number of each rank, or of each expert, a row for each record: seconds in a part of the steps, or tokens."""

    def __init__(self, width: int):
        self.rows = 0
        self._iterations, self._values = np.empty(START), np.empty((START, width), np.float32)

    @property
    def width(self) -> int:
        return self._values.shape[1]

    @property
    def iterations(self) -> np.ndarray:
        return self._iterations[: self.rows]

    @property
    def values(self) -> np.ndarray:
        return self._values[: self.rows]

    def append(self, iteration: int, values: list[float]) -> None:
        if self.rows == len(self._iterations):
            self._iterations = np.concatenate([self._iterations, np.empty_like(self._iterations)])
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
        self._iterations[self.rows], self._values[self.rows] = iteration, values
        self.rows += 1

    def drop_after(self, iteration: int) -> None:
        while self.rows and self._iterations[self.rows - 1] > iteration:
            self.rows -= 1


@dataclass
class History:
    """The records of a run that count. Steps and evaluations are in the order of iterations."""

    run: dict[str, Any] = field(default_factory=dict)  # the newest run record
    steps: Columns = field(default_factory=Columns)
    evals: list[dict] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # iteration that each launch started from
    launches: int = 0
    events: list[dict] = field(default_factory=list)  # records of the kinds of EVENTS, in order of time
    memory: Columns = field(default_factory=Columns)  # of the first rank
    ranks: dict[str, HeatTable] = field(default_factory=dict)  # part of a step -> seconds of each rank
    experts: dict[str, HeatTable] = field(default_factory=dict)  # layer -> tokens of each expert
    last: dict[str, Any] = field(default_factory=dict)  # the last record of the file
    damaged_lines: int = 0
    interleaved: int = 0  # steps that do not follow the one before: several runs wrote to this file at the same time
    _axes: dict[str, np.ndarray] = field(default_factory=dict)

    # -- reading -------------------------------------------------------------------------------------------------------

    def add(self, lines: Iterable[bytes]) -> None:
        """Add the next lines of the file. Damaged lines are counted in `damaged_lines`."""
        steps: list[dict] = []
        for line in filter(bytes.strip, lines):
            record = parse_record(line)
            if record is None:
                self.damaged_lines += 1
                continue
            self.last = record
            if record["kind"] == "step":
                steps.append(record)
            if record["kind"] in ("run", "rewind") or len(steps) == BATCH:  # the first two undo steps
                self._take_steps(steps)
                steps = []
            if record["kind"] != "step":
                self._take(record["kind"], int(record["iteration"]), record)
        self._take_steps(steps)

    def _take_steps(self, records: list[dict]) -> None:
        if records:
            before = self.steps["iteration"][-1:].tolist()
            self.steps.extend(records)
            order = self.steps["iteration"][self.steps.rows - len(records) - len(before) :]
            self.interleaved += int((np.diff(order) <= 0).sum())
            self._axes.clear()

    def _take(self, kind: str, iteration: int, record: dict) -> None:
        if kind in EVENTS:
            self.events.append(record)
        if kind in ("run", "rewind"):
            self._undo_after(iteration)
        if kind == "run":
            self.run = record
            self.starts.append(iteration)
            self.launches += 1
        elif kind == "eval":
            self.evals.append(record)
        elif kind == "memory":
            self.memory.extend([record])
        elif kind in ("ranks", "timers"):
            _add_rows(self.ranks, iteration, rank_seconds(record))
        elif kind == "experts":
            _add_rows(self.experts, iteration, record.get("loads") or {})

    def _undo_after(self, iteration: int) -> None:
        for table in (self.steps, self.memory, *self.ranks.values(), *self.experts.values()):
            table.drop_after(iteration)
        while self.evals and self.evals[-1]["iteration"] > iteration:
            self.evals.pop()
        self._axes.clear()

    # -- what is in the records ----------------------------------------------------------------------------------------

    @property
    def loss(self) -> str:
        """The name of the training loss: of the language model, or of a task."""
        return LOSS if LOSS in self.steps.names else TASK_LOSS

    @property
    def iteration(self) -> int:
        """The last step, or the one before the first."""
        return int(self.steps["iteration"][-1]) if self.steps.rows else (self.starts or [0])[-1]

    @property
    def sums(self) -> list[str]:
        """Names of the sums that the steps log in addition to the language-model loss."""
        return [name for name in own_sums(self.steps.names) if self.steps.names[name].dtype == float]

    @property
    def figures(self) -> list[str]:
        """Names of a validation's values other than losses and their perplexities, such as a task's metrics; first the
        selection criterion.
        """
        logged = dict.fromkeys(name for e in self.evals if e.get("split") == "validation" for name in e)
        sums = {*self.steps.names, *(f"{name} ppl" for name in logged)}
        names = [name for name in logged if name not in OF_EVERY_EVALUATION | sums]
        first = (self.run.get("criterion") or {}).get("figure")
        return sorted(names, key=lambda name: name != first)

    def direction(self, figure: str) -> Optional[str]:
        """Whether a smaller or a larger value of a figure is better; None: not known. The run says it of its criterion."""
        criterion = self.run.get("criterion") or {}
        if criterion.get("figure") == figure and criterion.get("smaller_is_better") is not None:
            return SMALLER if criterion["smaller_is_better"] else LARGER
        return direction_of(figure)

    def group(self, name: str) -> dict[str, Any]:
        """A group of the settings of the newest launch; empty if there is none."""
        found = (self.run.get("config") or {}).get(name)
        return found if isinstance(found, dict) else {}

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample; 0 if the run's record does not contain it."""
        return int(self.group("model").get("seq_length") or 0)

    # -- places on the axes --------------------------------------------------------------------------------------------

    def axis(self, name: str) -> np.ndarray:
        """The place of each step on an axis: iteration, samples, tokens, or time (seconds in steps)."""
        if name not in self._axes:
            if name == "time":
                places = np.cumsum(np.nan_to_num(self.steps["seconds"]))
            elif name == "iteration":
                places = self.steps["iteration"]
            else:
                places = self.steps["consumed_samples"] * ((self.sample_tokens or 1) if name == "tokens" else 1)
            self._axes[name] = places
        return self._axes[name]

    def place(self, iterations: Any, axis: str) -> np.ndarray:
        """The places of iterations on an axis."""
        if axis == "iteration" or not self.steps.rows:
            return np.asarray(iterations, dtype=float)
        return np.interp(iterations, self.steps["iteration"], self.axis(axis))

    # -- curves --------------------------------------------------------------------------------------------------------

    def curve(
        self,
        name: str,
        axis: str = "iteration",
        between: Optional[tuple[float, float]] = None,
        width: int = 800,
        window: int = 1,
    ) -> Curve:
        """A column of the steps over an axis, with at most two points for each of `width` pixels: its lowest and highest.

        between: the part of the axis to draw. window: steps of the running mean, computed before points are left out.
        """
        return _drawn(self.axis(axis), self.steps[name], between, width, window)

    def memory_curve(self, axis: str, between: Optional[tuple[float, float]] = None, width: int = 800) -> Curve:
        """Peak memory of the first rank in bytes."""
        places = self.place(self.memory["iteration"], axis) if self.memory.rows else np.empty(0)
        return _drawn(places, self.memory["bytes"], between, width, 1)

    def evaluation(self, name: str, axis: str = "iteration", between: Optional[tuple[float, float]] = None) -> Curve:
        """The values of validations, the first of each iteration: the final one is over other samples."""
        first: dict[int, float] = {}
        for record in self.evals:
            value = record.get(name)
            if record.get("split") == "validation" and isinstance(value, (int, float)):
                first.setdefault(record["iteration"], value)
        x, y = self.place(list(first), axis), np.array(list(first.values()), dtype=float)
        if between is not None:
            inside = (x >= between[0]) & (x <= between[1])
            x, y = x[inside], y[inside]
        return Curve(x, y)


def _drawn(x: np.ndarray, y: np.ndarray, between, width: int, window: int) -> Curve:
    places = known_places(x, y)
    x, y = x[places], y[places]
    smooth, steps = smoothed(y, window), len(y)
    if between is not None:  # with one point outside on each side, so that lines reach the edges
        low = max(0, int(np.searchsorted(x, between[0])) - 1)
        high = int(np.searchsorted(x, between[1], side="right")) + 1
        x, y, smooth = x[low:high], y[low:high], None if smooth is None else smooth[low:high]
    return thinned(Curve(x, y, smooth, steps), width)


def _add_rows(tables: dict[str, HeatTable], iteration: int, rows: dict[str, list[float]]) -> None:
    for name, values in rows.items():
        table = tables.get(name)
        if table is None or table.width != len(values):  # a resumed run may have another number of ranks
            table = tables[name] = HeatTable(len(values))
        table.append(iteration, values)


def rank_seconds(record: dict) -> dict[str, list[float]]:
    """Part of a step -> seconds of each rank, of a record of several ranks: `ranks`, or `timers` of all ranks.

    A record of ranks begins with their own time, the sum of all parts but waiting for others.

    >>> rank_seconds(dict(kind="ranks", seconds={"forward": [1.0, 2.0], "update": [0.5, 0.5], "waiting": [1.0, 0.0]}))
    {'own time': [1.5, 2.5], 'forward': [1.0, 2.0], 'update': [0.5, 0.5], 'waiting': [1.0, 0.0]}
    >>> rank_seconds(dict(kind="timers", seconds={"optimizer": dict(min=1.0, max=2.0, ranks=[1.0, 2.0])}))
    {'optimizer': [1.0, 2.0]}
    """
    found = record.get("seconds") or {}
    if record["kind"] == "timers":
        found = {name: both.get("ranks") or [] for name, both in found.items()}
    elif found:
        own = [seconds for part, seconds in found.items() if part != WAITING]
        found = {OWN_TIME: [sum(rank) for rank in zip(*own, strict=True)]} | found
    return {name: seconds for name, seconds in found.items() if len(seconds) > 1}


def read_history(path: Path) -> History:
    """Read a metrics file."""
    history = History()
    with Path(path).open("rb") as lines:
        history.add(lines)
    return history


def read_end(path: Path, before: int = 0) -> History:
    """The newest launch of a metrics file of any length: its record, and the records near the end of the file.

    before: 1 for the launch before the newest one. An empty history if there is none, or the file is missing or empty.
    """
    history = History()
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            launch, end = text.rfind(LAUNCH), len(text)
            for _ in range(before if launch >= 0 else 0):
                launch, end = text.rfind(LAUNCH, 0, launch), launch
            start = max(launch, end - TAIL, 0)
            head = text[launch : text.find(b"\n", launch) + 1] if 0 <= launch < start else b""
            launches, tail = count_launches(text), text[start:end]
    except (OSError, ValueError):
        return history
    history.add([head, *tail.splitlines()])
    history.launches = launches
    return history
