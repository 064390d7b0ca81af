# SPDX-License-Identifier: Apache-2.0
"""The runs of a dashboard, and the values for its page as JSON types.

runs = Runs(["runs", "s3://bucket/team/a"])
while True:
    if runs.refresh():              # reads the new lines of the files
        runs.summaries(), runs.charts(runs.ids, View(axis="tokens")), runs.events(runs.ids)
Runs.of({"a": whole_run(Path("runs/a"), Path("runs/a/metrics.jsonl"))}).kept()      # of a page without a server
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from megatron.errors import Failure
from megatron.storage.urls import UrlPath, location
from megatron.telemetry import heat_map
from megatron.telemetry.curves import Curve
from megatron.telemetry.events import count_restarts, parse_events, read_events
from megatron.telemetry.figures import count
from megatron.telemetry.history import AXES, OWN_TIME, HeatTable, History, read_history
from megatron.telemetry.run_events import run_events
from megatron.telemetry.run_folder import Place, events_path, nothing_at, runs_at, unique_names
from megatron.telemetry.run_record import LOSS, OF_EVERY_STEP, ranks_of
from megatron.telemetry.tail import Tail

LOOK, SEARCH, REMOTE = 5.0, 5.0, 10.0  # seconds between checks of a run's state, for new runs, of an object store
MOST_EVENTS = 500  # maximal number of a run's events on the page
PARTS = 200  # columns of a heat map
# Of a page without a server: half of the points of a curve, columns of a heat map, steps of the running means.
KEPT, KEPT_PARTS, WINDOWS = 1000, 64, (4, 16, 64, 256, 1024, 4096)


class Chart(NamedTuple):
    """A chart of one column of the steps. unit: how the page writes its values; noisy: whether a running mean helps."""

    title: str
    column: str
    unit: str = ""
    noisy: bool = True


CHARTS = (  # after the losses
    Chart("Throughput of all ranks", "tokens_per_second", "tokens/s"),
    Chart("Gradient norm before clipping", "grad_norm"),
    Chart("Learning rate", "learning_rate", noisy=False),
    Chart("Time of a step", "seconds", "s"),
    Chart("MFU", "mfu", "%"),
)


@dataclass(frozen=True)
class View:
    """How curves are drawn. between: the part of the axis; width: pixels; window: steps of the running mean."""

    axis: str = "iteration"
    between: Optional[tuple[float, float]] = None
    width: int = 600
    window: int = 1


class News(NamedTuple):
    """New lines of a run's files, each with whether the file was replaced by another one, and the state of the run."""

    lines: list[bytes]
    again: bool
    events: list[bytes]
    events_again: bool
    state: dict[str, Any]


class WatchedRun:
    """A run whose files are read while they grow."""

    def __init__(self, place: Place, metrics: Place):
        self.place, self.metrics = place, metrics
        self.name, self.id = "", ""
        self.history, self.tail = History(), Tail(metrics)
        self.events: list[dict] = []
        self._events_tail = Tail(events_path(metrics))
        self.state: dict[str, Any] = {}
        self.error = ""
        self.version = 0  # grows with every change
        self._next_read, self._next_look = 0.0, 0.0

    def refresh(self, look: Optional[Callable[[Path], Any]], now: float, lock: threading.Lock) -> bool:
        """Read new lines, and return whether there were any. lock: held while values change, not during reading."""
        if now < self._next_read:
            return False
        if isinstance(self.place, UrlPath):
            self._next_read = now + REMOTE
        try:
            news, error = self._read(look, now), ""
        except Exception as failure:  # an error in its files does not affect other runs
            has_message = isinstance(failure, (OSError, Failure))
            news, error = None, str(failure) if has_message else f"{type(failure).__name__}: {failure}"
        if not news and error == self.error:
            return False
        with lock:
            self.error = error
            self.version += 1
            if news:
                self._take(news)
        return True

    def _read(self, look: Optional[Callable[[Path], Any]], now: float) -> Optional["News"]:
        """The new lines and state; None if nothing is new."""
        news = News(*self.tail.read(), *self._events_tail.read(), self.state)
        whole = self.tail.share >= 1
        if not whole:
            self._next_read = 0.0
        if look and whole and isinstance(self.place, Path) and now >= self._next_look:
            began = time.monotonic()
            try:
                state = dataclasses.asdict(look(self.place))
            except Exception as failure:  # the lines that were read must not be lost
                state = dict(state="unreadable", why=str(failure))
            news = news._replace(state=state)
            self._next_look = now + max(LOOK, 20 * (time.monotonic() - began))
        moved = any(news.state.get(name) != self.state.get(name) for name in ("state", "why"))
        return news if news.lines or news.again or news.events or news.events_again or moved else None

    def _take(self, news: "News") -> None:
        if news.again:
            self.history = History()
        self.history.add(news.lines)
        if news.events_again:
            self.events = []
        self.events.extend(parse_events(b"".join(news.events)))
        self.state = news.state

    def summary(self) -> dict[str, Any]:
        """The values for the list of runs."""
        run, history = self.history.run, self.history
        model, mesh = (run.get("config") or {}).get("model") or {}, run.get("mesh") or {}
        words = []
        if run.get("parameters"):
            words.append(f"{count(run['parameters'])} parameters")
        if model.get("num_layers"):
            words.append(f"{model['num_layers']} layers of width {model.get('hidden_size')}")
        if mesh:
            ranks = ranks_of(mesh)
            words.append(f"{ranks} rank{'s' * (ranks > 1)}")
        last_step = history.steps[-1] if history.steps.rows else {}
        state = self.state.get("state")
        if state in (None, "unreadable"):  # its metrics may be readable
            state = _state_of(history)
        return dict(
            id=self.id,
            name=self.name,
            place=str(self.place),
            about=", ".join(words),
            read=round(self.tail.share, 3),
            written=self.tail.written,
            error=self.error,
            version=self.version,
            iteration=history.iteration,
            loss=last_step.get(history.loss),
            restarts=self.restarts,
            warnings=self.state.get("warnings") or 0,
            errors=self.state.get("errors") or 0,
            damaged_lines=history.damaged_lines,
            state=state,
            why=self.state.get("why") or "" if state else "",
            slow=list(self.state.get("slow") or ()),
            iterations=self.state.get("iterations"),
            tokens_per_second=self.state.get("tokens_per_second") or last_step.get("tokens_per_second"),
            seconds_left=self.state.get("seconds_left"),
            checkpoint_age=self.state.get("checkpoint_age"),
            has_ranks=any(table.rows for table in history.ranks.values()),
            has_experts=any(table.rows for table in history.experts.values()),
        )

    @property
    def restarts(self) -> int:
        """Restarts after a failure, by its events; launches but the first if there are no events."""
        return count_restarts(self.events) if self.events else max(0, len(self.history.starts) - 1)

    def all_events(self) -> list[dict]:
        """The last events of the run."""
        return run_events(self.history, self.events)[-MOST_EVENTS:]


def whole_run(place: Path, metrics: Path) -> WatchedRun:
    """A run whose files are read once."""
    run = WatchedRun(place, metrics)
    run.history, run.events = read_history(metrics), read_events(metrics)
    return run


def _state_of(history: History) -> str:
    last = history.events[-1] if history.events else {}
    if last.get("kind") == "end":
        return "done" if last.get("code") == 0 else "failed"
    return ""


@dataclass
class Runs:
    """The runs in some folders or at any depth below them. New runs are added while the dashboard is open.

    look: folder -> state of its run, a dataclass (`guard.run_state.look_at`). pictures: (caption, data URL) of a run's
          pipeline. lock: hold it while reading values if another thread calls `refresh`.
    """

    names: list[str]
    look: Optional[Callable[[Path], Any]] = None
    pictures: Optional[Callable[[History, Path], list[tuple[str, str]]]] = None
    runs: dict[str, WatchedRun] = field(default_factory=dict)  # by id, in the order of the page
    version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    _next_search: float = 0.0

    def __post_init__(self):
        """Find the runs. Raises DataError for a name without runs."""
        for name in self.names:
            place = location(name)
            if not runs_at(place):
                raise nothing_at(name, place)
        self._search()

    @classmethod
    def of(cls, runs: Mapping[str, WatchedRun], pictures=None) -> "Runs":
        """Runs that were read, by name."""
        found = cls([], pictures=pictures)
        for number, (name, run) in enumerate(runs.items()):
            run.name, run.id = name, str(number)
            found.runs[run.id] = run
        return found

    @property
    def ids(self) -> list[str]:
        return list(self.runs)

    def refresh(self, now: Optional[float] = None) -> bool:
        """Read the new lines of all files, and find new runs. Returns whether anything changed."""
        now = time.monotonic() if now is None else now
        changed = False
        if now >= self._next_search:
            changed = self._search()
            self._next_search = now + (REMOTE if any("://" in name for name in self.names) else SEARCH)
        for run in self.runs.values():
            changed |= run.refresh(self.look, now, self.lock)
        self.version += changed
        return changed

    def _search(self) -> bool:
        found: dict[str, tuple[Place, Place]] = {}
        for name in self.names:
            try:
                found |= {str(metrics.resolve()): (place, metrics) for place, metrics in runs_at(location(name))}
            except (OSError, Failure):  # an object store may fail for a while: try again in the next search
                continue
        known = {str(run.metrics.resolve()): run for run in self.runs.values()}
        new = found.keys() - known.keys()
        if not new:
            return False
        everything = [*known.values(), *(WatchedRun(*found[key]) for key in found if key in new)]
        names = unique_names([str(run.place.resolve()) for run in everything])
        with self.lock:
            for number, (run, name) in enumerate(zip(everything, names, strict=True)):
                run.name, run.id = name, run.id or str(number)
            self.runs = {run.id: run for run in everything}
        return True

    # -- values for the page -------------------------------------------------------------------------------------------

    def summaries(self) -> list[dict[str, Any]]:
        return [run.summary() for run in self.runs.values()]

    def chosen(self, ids: Iterable[str]) -> list[WatchedRun]:
        """The runs of these ids, without unknown ones."""
        return [self.runs[id] for id in ids if id in self.runs]

    def charts(self, ids: Iterable[str], view: View) -> list[dict[str, Any]]:
        """The charts that these runs have data for, each with the curves of all of them."""
        runs = self.chosen(ids)
        drawn = []
        for chart in _charts_of(runs):
            curves = [curve for run in runs for curve in _curves(run, chart, view)]
            if any(len(curve["x"]) for curve in curves):
                drawn.append(dict(id=chart.column, title=chart.title, unit=chart.unit, curves=curves))
        return drawn

    def events(self, ids: Iterable[str], axis: str = "iteration") -> list[dict[str, Any]]:
        """The events of these runs, the last ones first, with their place on the axis."""
        events = []
        for run in self.chosen(ids):
            own = run.all_events()
            at = run.history.place(np.array([_number(event.get("iteration")) for event in own]), axis)
            events += [event | dict(run=run.id, at=place) for event, place in zip(own, at.tolist(), strict=True)]
        return sorted(events, key=lambda event: -event["time"])

    def ranks(self, id: str, what: str = "", axis: str = "iteration", parts: int = PARTS) -> dict[str, Any]:
        """The time of each rank in a part of the steps, for a heat map: [ranks][parts of the axis].

        rows: the ranks, of many only those that differ most; values: seconds of a step; excess: time above that of the
              peers, as a share of the peers' time
        """
        [run] = self.chosen([id]) or [None]
        stages = lambda number: heat_map.stages_of(run.history.run, number)
        peers = lambda values: heat_map.against_peers(values, stages(len(values)))
        tables = run.history.ranks if run else {}
        return _heat(run, tables, what if what in tables else OWN_TIME, axis, parts, peers, heat_map.shown_ranks)

    def experts(self, id: str, layer: str = "", axis: str = "iteration", parts: int = PARTS) -> dict[str, Any]:
        """The tokens of each expert of a layer, as `ranks` has seconds; excess: above the mean over the experts."""
        [run] = self.chosen([id]) or [None]
        tables = run.history.experts if run else {}
        return _heat(run, tables, layer, axis, parts, lambda values: heat_map.relative(values) - 1)

    def pictures_of(self, id: str) -> list[dict[str, str]]:
        """The pictures of a run's pipeline."""
        found = self.chosen([id])
        if not (found and self.pictures and found[0].history.run):
            return []
        [run] = found
        local = run.place if isinstance(run.place, Path) else Path()
        return [dict(caption=caption, url=url) for caption, url in self.pictures(run.history, local)]

    # -- a page without a server ---------------------------------------------------------------------------------------

    def kept(self) -> dict[str, Any]:
        """All values of the page across iterations; axes: the places of iterations on the other axes."""
        charts = self.charts(self.ids, View(width=KEPT))
        longest = max(run.history.steps.rows for run in self.runs.values())
        for window in (window for less, window in zip((1, *WINDOWS), WINDOWS) if less < longest):
            for chart, other in zip(charts, self.charts(self.ids, View(width=KEPT, window=window))):
                for curve, smooth in zip(chart["curves"], other["curves"]):
                    if "smooth" in smooth:
                        curve.setdefault("means", {})[str(window)] = _short(smooth["smooth"])
        for curve in (curve for chart in charts for curve in chart["curves"]):
            curve["y"] = _short(curve["y"])
        return dict(
            runs=self.summaries(),
            charts=charts,
            events=self.events(self.ids),
            axes={id: _kept_axes(run.history) for id, run in self.runs.items()},
            ranks={id: self._kept_heats(self.ranks, id, lambda names: names) for id in self.ids},
            experts={id: self._kept_heats(self.experts, id, self._unequal(id)) for id in self.ids},
            pictures={id: self.pictures_of(id) for id in self.ids},
        )

    def _unequal(self, id: str) -> Callable[[list[str]], list[str]]:
        tables = self.runs[id].history.experts
        return lambda names: heat_map.shown_layers({name: tables[name].values.T for name in names if tables[name].rows})

    def _kept_heats(self, ask, id: str, chosen: Callable[[list[str]], list[str]]) -> list[dict[str, Any]]:
        """The heat maps of the chosen tables of a run, first the one that is shown first."""
        names = chosen(ask(id)["names"])
        heats = [ask(id, name, parts=KEPT_PARTS) | dict(names=names) for name in names]
        return [heat | {what: _short(heat[what]) for what in ("values", "excess")} for heat in heats]


def _heat(
    run: Optional[WatchedRun],
    tables: dict[str, HeatTable],
    name: str,
    axis: str,
    parts: int,
    excess_of: Callable[[np.ndarray], np.ndarray],
    shown_of: Callable[[np.ndarray], list[int]] = lambda excess: list(range(len(excess))),
) -> dict[str, Any]:
    """The heat map of a table, by default of the first one: means over parts of the axis."""
    if not tables:
        return dict(names=[], name="", x=[], rows=[], all_rows=0, values=[], excess=[])
    name = name if name in tables else next(iter(tables))
    x, table = run.history.place(tables[name].iterations, axis), tables[name].values
    if len(x) > parts:
        first = np.unique(np.linspace(0, len(x), parts, endpoint=False).astype(int))
        lengths = np.diff(np.append(first, len(x)))
        x, table = x[np.append(first[1:], len(x)) - 1], np.add.reduceat(table, first, axis=0) / lengths[:, None]
    values = table.T
    excess = excess_of(values)
    shown = shown_of(excess)
    return dict(
        names=list(tables),
        name=name,
        x=_places(x),
        rows=shown,
        all_rows=len(values),
        values=values[shown].astype(np.float32, order="C"),
        excess=excess[shown].astype(np.float32, order="C"),
    )


def _charts_of(runs: list[WatchedRun]) -> list[Chart]:
    """Losses and figures of evaluations first, then the charts of every run, then other sums that models log."""
    losses = dict.fromkeys(run.history.loss for run in runs)
    charts = [Chart("Loss" if name == LOSS else name, name, "nats a token" * (name == LOSS)) for name in losses]
    charts += CHARTS
    charts.append(Chart("Peak memory of rank 0", MEMORY, "bytes"))
    figures = dict.fromkeys(name for run in runs for name in run.history.figures)
    sums = dict.fromkeys(name for run in runs for name in run.history.steps.names if name not in OF_EVERY_STEP)
    charts += [Chart(name, name) for name in {**figures, **sums} if name not in losses]
    scales = [run.history.steps["loss_scale"] for run in runs if run.history.steps.has("loss_scale")]
    moves = any(np.nanmin(scale) < np.nanmax(scale) for scale in scales)
    return charts + [Chart("Loss scale", "loss_scale", noisy=False)] * moves


MEMORY = "memory"


def _curves(run: WatchedRun, chart: Chart, view: View) -> list[dict[str, Any]]:
    history = run.history
    if chart.column == MEMORY:
        return [_as_json(run.id, "steps", history.memory_curve(view.axis, view.between, view.width))]
    curves = []
    if history.steps.has(chart.column):
        window = view.window if chart.noisy else 1
        curve = history.curve(chart.column, view.axis, view.between, view.width, window)
        curves.append(_as_json(run.id, "steps", curve))
    points = history.evaluation(chart.column, view.axis, view.between)
    if len(points.x) and chart.column not in OF_EVERY_STEP:
        curves.append(_as_json(run.id, "validation", points))
    return curves


def _as_json(run: str, kind: str, curve: Curve) -> dict[str, Any]:
    return dict(run=run, kind=kind, steps=curve.steps, x=_places(curve.x), y=curve.y.astype(np.float32)) | (
        {} if curve.smooth is None else dict(smooth=curve.smooth.astype(np.float32))
    )


def _places(x: np.ndarray) -> np.ndarray:
    """Places on an axis, as short as they can be written: whole numbers, or milliseconds."""
    return x.astype(np.int64) if np.array_equal(x, np.rint(x)) else np.round(x, 3)


def _short(values: np.ndarray) -> np.ndarray:
    """Numbers with five digits, which are short as JSON."""
    values = np.asarray(values, dtype=float)
    digits = 4 - np.floor(np.log10(np.where(values == 0, 1.0, np.abs(values))))
    scale, step = 10.0 ** np.maximum(digits, 0), 10.0 ** np.maximum(-digits, 0)
    return np.ascontiguousarray(np.round(values * scale / step) / scale * step)


def _kept_axes(history: History) -> dict[str, np.ndarray]:
    """The places of up to 2 x KEPT steps on each axis."""
    steps = np.unique(np.linspace(0, history.steps.rows - 1, 2 * KEPT).astype(int))
    return {axis: _places(history.axis(axis)[steps]) for axis in AXES}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
