# SPDX-License-Identifier: Apache-2.0
"""The curves of a run as arrays that grow with its metrics file, also for millions of steps.

    series = Series()
    series.add(lines)                      # lines of metrics.jsonl, as they come
    curve = series.curve("lm loss", axis="tokens", width=800, window=64)

A resumed run repeats steps, a rewind takes some back: the later records count, as in `run_record.read_history`.
"""

from typing import Any, NamedTuple, Optional

import numpy as np
import orjson

from megatron.telemetry.curves import running_mean
from megatron.telemetry.rank_times import WAITING
from megatron.telemetry.run_record import EVENTS, LOSS, RATES, TASK_LOSS, History, parse_record

AXES = ("iteration", "samples", "tokens", "time")
OWN_TIME = "own time"  # of a rank in a step, without waiting for others
START = 1024  # rows that a table begins with


class Curve(NamedTuple):
    """Points to draw. y: the values, smooth: their running mean at the same places, None without smoothing."""

    x: np.ndarray
    y: np.ndarray
    smooth: Optional[np.ndarray] = None


class Columns:
    """A table of numbers that grows at its end. Missing values are NaN."""

    def __init__(self):
        self.rows = 0
        self.names: dict[str, np.ndarray] = {}  # each with room for more rows

    def extend(self, records: list[dict[str, Any]]) -> None:
        """Append a row for each record, of its numbers."""
        end = self.rows + len(records)
        for name in dict.fromkeys(name for record in records for name in record):
            values = [record.get(name) for record in records]
            if name not in RATES and all(value is None or isinstance(value, (int, float)) for value in values):
                column = self._room(name, end)
                column[self.rows : end] = np.array(values, dtype=float)
        self.rows = end

    def _room(self, name: str, rows: int) -> np.ndarray:
        column = self.names.get(name)
        if column is None or len(column) < rows:
            larger = np.full(max(START, 2 * rows), np.nan)
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
            column[rows : self.rows] = np.nan
        self.rows = rows

    def __getitem__(self, name: str) -> np.ndarray:
        """The values of a column; NaN in all rows if there is none."""
        column = self.names.get(name)
        if column is None:
            return np.full(self.rows, np.nan)
        if len(column) < self.rows:
            column = self._room(name, self.rows)
        return column[: self.rows]

    def has(self, name: str) -> bool:
        return name in self.names and bool(np.isfinite(self[name]).any())


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


class Series:
    """The records of a run that count, from its metrics file."""

    def __init__(self):
        self.run: dict[str, Any] = {}  # the newest run record
        self.steps, self.evals, self.memory = Columns(), [], Columns()
        self.ranks: dict[str, HeatTable] = {}  # by the part of a step
        self.experts: dict[str, HeatTable] = {}  # by layer
        self.events: list[dict] = []  # records of the kinds of EVENTS
        self.starts: list[int] = []  # the iteration that each launch started from
        self.damaged_lines = 0
        self.last_step: dict[str, Any] = {}
        self._axes: dict[str, np.ndarray] = {}

    def add(self, lines: list[bytes]) -> None:
        """Add the next lines of the file."""
        steps: list[dict] = []
        for line in lines:
            record = parse_record(line, orjson.loads)
            if record is None:
                self.damaged_lines += 1
            elif record["kind"] == "step":
                steps.append(record)
            else:
                if record["kind"] in ("run", "rewind"):  # these records undo steps
                    self._take_steps(steps)
                    steps = []
                self._take(record["kind"], int(record["iteration"]), record)
        self._take_steps(steps)

    def _take_steps(self, steps: list[dict]) -> None:
        if steps:
            self.steps.extend(steps)
            self.last_step = steps[-1]
            self._axes.clear()

    def _take(self, kind: str, iteration: int, record: dict) -> None:
        if kind in EVENTS:
            self.events.append(record)
        if kind in ("run", "rewind"):
            self.steps.drop_after(iteration)
            self.memory.drop_after(iteration)
            self._axes.clear()
            for table in (*self.ranks.values(), *self.experts.values()):
                table.drop_after(iteration)
            while self.evals and self.evals[-1]["iteration"] > iteration:
                self.evals.pop()
        if kind == "run":
            self.run = record
            self.starts.append(iteration)
        elif kind == "eval":
            self.evals.append(record)
        elif kind == "memory":
            self.memory.extend([record])
        elif kind in ("ranks", "timers"):
            _add_rows(self.ranks, iteration, rank_seconds(record))
        elif kind == "experts":
            _add_rows(self.experts, iteration, record.get("loads") or {})

    @property
    def history(self) -> History:
        """The run without its curves: it contains only the last step."""
        steps = [self.last_step] if self.last_step else []
        return History(run=self.run, steps=steps, evals=self.evals, starts=self.starts, events=self.events)

    @property
    def loss(self) -> str:
        """The name of the training loss: of the language model, or of a task."""
        return LOSS if LOSS in self.steps.names else TASK_LOSS

    @property
    def iteration(self) -> int:
        return int(self.steps["iteration"][-1]) if self.steps.rows else (self.starts or [0])[-1]

    # -- places on the axes --------------------------------------------------------------------------------------------

    def axis(self, name: str) -> np.ndarray:
        """The place of each step on an axis: iteration, samples, tokens, or time (seconds in steps)."""
        if name not in self._axes:
            if name == "time":
                places = np.cumsum(np.nan_to_num(self.steps["seconds"]))
            elif name == "iteration":
                places = self.steps["iteration"]
            else:
                places = self.steps["consumed_samples"] * (self.sample_tokens if name == "tokens" else 1)
            self._axes[name] = places
        return self._axes[name]

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample; 1 if the run's record does not contain it."""
        model = (self.run.get("config") or {}).get("model") or {}
        return int(model.get("seq_length") or 0) or 1

    def place(self, iterations: np.ndarray, axis: str) -> np.ndarray:
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
        x, y = self.axis(axis), self.steps[name]
        return self._drawn(x, y, between, width, window)

    def memory_curve(self, axis: str, between: Optional[tuple[float, float]] = None, width: int = 800) -> Curve:
        """Peak memory of the first rank in bytes."""
        places = self.place(self.memory["iteration"], axis) if self.memory.rows else np.empty(0)
        return self._drawn(places, self.memory["bytes"], between, width, 1)

    def evaluation(self, name: str, axis: str, between: Optional[tuple[float, float]] = None) -> Curve:
        """The values of validations, the first of each iteration: the final one is over other samples."""
        first: dict[int, float] = {}
        for record in self.evals:
            value = record.get(name)
            if record.get("split") == "validation" and isinstance(value, (int, float)):
                first.setdefault(record["iteration"], value)
        x, y = self.place(np.array(list(first)), axis), np.array(list(first.values()), dtype=float)
        if between is not None:
            inside = (x >= between[0]) & (x <= between[1])
            x, y = x[inside], y[inside]
        return Curve(x, y)

    def _drawn(self, x: np.ndarray, y: np.ndarray, between, width: int, window: int) -> Curve:
        known = np.isfinite(y) & np.isfinite(x)
        if not known.all():
            x, y = x[known], y[known]
        if len(x) > 1 and (np.diff(x) < 0).any():  # two runs wrote to one file
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        smooth = running_mean(y, min(window // 2, (len(y) - 1) // 2)) if window > 1 and len(y) > 2 else None
        if between is not None:  # with one point outside on each side, so that lines reach the edges
            low = max(0, int(np.searchsorted(x, between[0])) - 1)
            high = int(np.searchsorted(x, between[1], side="right")) + 1
            x, y, smooth = x[low:high], y[low:high], None if smooth is None else smooth[low:high]
        return thinned(Curve(x, y, smooth), width)


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


def thinned(curve: Curve, width: int) -> Curve:
    """The curve with two points for each of `width` equal parts of its axis: the lowest and the highest value there.

    They are drawn at the first and the last place of the part, in their order. The running mean is read at the same places.
    """
    x, y, smooth = curve
    if len(x) <= 2 * width or x[-1] <= x[0]:
        return curve
    edges = np.searchsorted(x, np.linspace(x[0], x[-1], width + 1)[:-1])
    first = np.unique(edges)  # without empty parts
    last = np.append(first[1:], len(x)) - 1
    low, high = np.minimum.reduceat(y, first), np.maximum.reduceat(y, first)
    falls = y[first] > y[last]
    values = np.stack([np.where(falls, high, low), np.where(falls, low, high)], axis=1).ravel()
    places = np.stack([first, last], axis=1).ravel()
    once = np.append(True, places[1:] != places[:-1])  # a part with one point
    return Curve(x[places][once], values[once], None if smooth is None else smooth[places][once])
