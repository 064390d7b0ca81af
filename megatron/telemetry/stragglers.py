# SPDX-License-Identifier: Apache-2.0
"""Finds the rank that others wait for, steps that wait for data, and a stage or a network that has become slow.

    detector = StragglerDetector(stages=[0, 0], device="cpu")
    for finding in detector.observe(rows, steps=5):         # seconds of each rank: [ranks, COLUMNS]
        print(finding.message)

`rank_times.py` measures the rows. A *window* is the steps of one call; decisions look at the last windows
(`WindowRule`). The *excess* of a rank is its own time minus the median of its *peers*, the other ranks of its pipeline
stage, which do the same work. A rank is slow if its excess is large in the sum of the windows, and in several of them:
one pause is not enough. Excess has a sign, so ranks that are slow in turns, as on a busy machine, are not named. Time
in the queue for a core counts only if it stays on one rank for long.

A rank that is alone on its stage has no peers, because stages may differ on purpose. It is compared with all ranks,
but only by its waits for data and by the time in which its process did not run. A stage is compared with its own past.
Pure: equal rows give equal findings. Needs no torch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple, Optional

import numpy as np

from megatron.telemetry.rank_times import (
    BACKWARD,
    COLUMNS,
    CPU,
    DATA,
    FORWARD,
    OTHER,
    OWN,
    PARTS,
    QUEUE,
    STOPPED,
    UPDATE,
    WAITING,
)

SHARE = 0.25  # excess over the peers' own time from which a rank is slow, or a stage against its past
COST = 0.10  # part of a step that a slow rank or stage costs at least
LEAST = 0.002  # seconds of a step; smaller differences are noise
DATA_SHARE, LEAST_DATA = 0.25, 0.01  # part of a step, and seconds, from which waits of all ranks for data are reported
CALM = 4  # windows without excess until a rank has recovered; twice as many each time that it is slow again
MOST_CALM = 64
ENOUGH, REFERENCE = 8, 64  # windows of the past for comparisons: at least, at most
UNEQUAL = 1.5  # ratio of the times of stages from which a note is logged


class WindowRule(NamedTuple):
    """A difference must be large in at least `over` of the last `windows` windows."""

    windows: int
    over: int


RANK = WindowRule(windows=4, over=2)
PAUSES = WindowRule(windows=8, over=2)  # a rank that stops now and then
# In windows of `LONG`, if other programs use the cores: the load stays on one rank.
BUSY = WindowRule(windows=24, over=16)
LONG = 2.5  # seconds
STEADY = WindowRule(windows=4, over=3)  # for conditions of all ranks together

WORDS = {
    DATA: "waiting for data takes",
    FORWARD: "forward passes take",
    BACKWARD: "backward passes take",
    UPDATE: "the update takes",
    OTHER: "work between passes and steps takes",
    STOPPED: "pauses of its process take",
}


class StragglerFinding(NamedTuple):
    """A detected problem: an event (`events.py`) and its fields, or with `unequal_stages` a note for the log."""

    kind: str
    message: str
    rank: Optional[int] = None
    fields: dict[str, Any] = {}


class _Slow:
    """A rank, stage, network or loader that is slow at present. calm: whether it is not slow in a window."""

    def __init__(self, what: str, calm: Callable[["_Window"], bool], needed: int):
        self.what, self.calm, self.needed, self.windows = what, calm, needed, 0

    def recovered(self, window: "_Window") -> bool:
        self.windows = self.windows + 1 if self.calm(window) else 0
        return self.windows >= self.needed


class StragglerDetector:
    """Compares the times of all ranks, window by window.

    stages: pipeline stage of each rank
    names:  names of the ranks in messages, such as "rank 3 (node7)"
    device: on "cpu", rows have the CPU time of the ranks
    share:  excess over the peers from which a rank is slow. data_share: part of a step in which all wait for data
    """

    def __init__(
        self,
        stages: Sequence[int],
        names: Optional[Sequence[str]] = None,
        device: str = "cpu",
        share: float = SHARE,
        data_share: float = DATA_SHARE,
    ):
        self.stages, self.device, self.share, self.data_share = np.asarray(stages), device, share, data_share
        self.names = names or [f"rank {rank}" for rank in range(len(self.stages))]
        self.peers = Peers(self.stages)
        self.windows: deque[_Window] = deque(maxlen=PAUSES.windows)
        self.long_windows: deque[_Window] = deque(maxlen=BUSY.windows)
        self.unfinished = 0.0, 0, 0.0  # rows, steps and seconds of the next long window
        self.past: deque[_Window] = deque(maxlen=REFERENCE)  # windows in which nothing was slow
        self.slow: dict[tuple[str, Optional[int]], _Slow] = {}  # (kind of event, rank or stage)
        self.times: dict[tuple[str, Optional[int]], int] = {}  # how often it was slow
        self.noted_stages = False
        self.count = 0  # number of windows so far
        self.recovered_at = np.zeros(len(self.stages), dtype=int)  # the window in which each rank recovered

    def observe(self, rows: np.ndarray, steps: int) -> list[StragglerFinding]:
        """Add a window. rows: seconds of each rank in its steps, [ranks, COLUMNS]. Returns all changes."""
        rows, self.count = np.asarray(rows, dtype=float), self.count + 1
        window = self._window(rows, steps)
        self.windows.append(window)
        self._add_to_long(window, rows)
        findings = [*self._recovered(window), *self._ranks(), *self._data_of_all(), *self._stages(), *self._network()]
        if not self.slow:
            self.past.append(window)
        return findings

    def _window(self, rows: np.ndarray, steps: int) -> "_Window":
        return _Window(rows / steps, steps, self.count, self.peers, self.share, self.device == "cpu")

    def _add_to_long(self, window: "_Window", rows: np.ndarray) -> None:
        sums, steps, seconds = self.unfinished
        sums, steps, seconds = sums + rows, steps + window.steps, seconds + window.steps * window.step
        if seconds >= LONG:
            self.long_windows.append(self._window(sums, steps))
            sums, steps, seconds = 0.0, 0, 0.0
        self.unfinished = sums, steps, seconds

    # ---- ranks -----------------------------------------------------------------------------------------------------

    def _ranks(self) -> Iterable[StragglerFinding]:
        """The rank with the largest excess, if it is slow."""
        for rule, windows, which in (
            (RANK, self.windows, ""),
            (PAUSES, self.windows, ""),
            (BUSY, self.long_windows, "_with_queue"),
        ):
            last = list(windows)[-rule.windows :]
            if sum(getattr(window, f"any_slow{which}") for window in last) < rule.over:
                continue
            excess, reference = (
                np.array([getattr(w, f"{name}{which}") for w in last]) for name in ("excess", "reference")
            )
            excess[np.array([[window.number] for window in last]) <= self.recovered_at] = 0.0
            slow, cost = slow_ranks(rule, self.share, excess, reference, sum(window.step for window in last))
            slow[[rank for kind, rank in self.slow if kind in ("slow_rank", "slow_data") and rank is not None]] = False
            if slow.any():
                rank = int(np.argmax(np.where(slow, cost, -np.inf)))
                yield self._name(rank, last, float(cost[rank]))

    def _name(self, rank: int, last: list["_Window"], cost: float) -> StragglerFinding:
        mine, others, steps = {}, {}, _steps(last)
        for part in PARTS:
            values = np.mean([window[part] for window in last], 0)
            mine[part], others[part] = float(values[rank]), float(self.peers.medians(values)[rank])
        whole = float(np.mean([window.excess_with_queue[rank] for window in last]))
        part, name = self._part(rank, mine, others, whole), self.names[rank]
        kind = "slow_data" if part == DATA else "slow_rank"
        self._add(
            kind,
            rank,
            name,
            lambda window: window.excess_with_queue[rank] < self.share / 2 * window.reference_with_queue[rank],
        )
        costs = f"this costs {cost:.0%} of each step (last {steps} steps)"
        if part == DATA:
            step = sum(mine.values())
            message = (
                f"{name} waits for its data, {_ms(mine[DATA])} a step, the others {_ms(others[DATA])}; {costs}: check the "
                "disk of its files, or raise --num-workers"
            )
            return StragglerFinding(kind, message, rank, dict(seconds=mine[DATA], step_seconds=step, steps=steps))
        alone = self.peers.alone[rank]
        where = f", alone on stage {self.stages[rank]} of the pipeline," if alone else ""
        compared = "" if alone else f", those of its peers {_ms(others[part])}"
        message = (
            f"{name}{where} is slow, and the others wait for it: {WORDS[part]} {_ms(mine[part])} a step{compared}; {costs}"
            f"{self._cause(rank, last)}"
        )
        median = None if alone else others[part]
        return StragglerFinding(kind, message, rank, dict(phase=part, seconds=mine[part], median=median, steps=steps))

    def _part(self, rank: int, mine: dict[str, float], others: dict[str, float], whole: float) -> str:
        """The part in which a rank is slow. For a rank without peers: data, or else its longest part."""
        excess = {part: mine[part] - others[part] for part in OWN}
        if not self.peers.alone[rank]:
            return max(excess, key=excess.get)
        compute = [part for part in OWN if part != DATA]
        return DATA if excess[DATA] > whole / 2 else max(compute, key=mine.get)

    def _cause(self, rank: int, last: list["_Window"]) -> str:
        """The reason why a rank is slow, as far as the CPU time of its process shows it."""
        if self.device != "cpu":
            return ""
        excess, stalled, queue = (
            float(np.mean([values(window)[rank] for window in last]))
            for values in (
                lambda window: window.excess_with_queue,
                lambda window: window.stalled - self.peers.medians(window.stalled),
                lambda window: window[QUEUE] - self.peers.medians(window[QUEUE]),
            )
        )
        if queue >= excess / 2:
            return f"; it waits {_ms(queue)} a step for a core: other programs use its machine"
        if stalled >= excess / 2:
            return (
                f"; its process does not run for {_ms(stalled)} a step: it is stopped, swapped out, or waits for a disk"
            )
        return "; it computes, but slower: check the clock and the load of its machine"

    # ---- all ranks -------------------------------------------------------------------------------------------------

    def _data_of_all(self) -> Iterable[StragglerFinding]:
        """Report if all ranks wait for data."""
        last, key = self._last(), ("slow_data", None)
        over = [window.data_of_all > max(self.data_share * window.step, LEAST_DATA) for window in last]
        if sum(over) < STEADY.over or key in self.slow:
            return
        self._add(*key, "loading data", lambda window: window.data_of_all < self.data_share / 2 * window.step)
        wait, step = (float(np.mean(values)) for values in zip(*((w.data_of_all, w.step) for w in last), strict=True))
        who = "all ranks wait" if len(self.stages) > 1 else "steps wait"
        message = (
            f"{who} for data, {_ms(wait)} of {_ms(step)} a step (last {_steps(last)} steps): raise --num-workers, or "
            "use a faster disk"
        )
        yield StragglerFinding(*key[:1], message, None, dict(seconds=wait, step_seconds=step, steps=_steps(last)))

    def _stages(self) -> Iterable[StragglerFinding]:
        """Report a stage that takes longer than before while others do not, and once that stages are unequal."""
        last = self._last()
        if len(self.peers.groups) == 1 or len(last) < STEADY.windows or len(self.past) < ENOUGH:
            return
        usual = np.median([window.stage_times for window in self.past], 0)
        now = np.mean([window.stage_times for window in last], 0)
        over = np.sum([_grown(window.stage_times, usual, SHARE) for window in last], 0) >= STEADY.over
        over &= now - usual >= max(LEAST, COST * last[-1].step)
        over[[int(self.stages[rank]) for kind, rank in self.slow if kind == "slow_rank"]] = False
        over[[stage for kind, stage in self.slow if kind == "slow_stage"]] = False
        for stage in np.flatnonzero(over):
            yield self._name_stage(int(stage), float(now[stage]), usual, _steps(last))
        ratios = usual / np.maximum(median_of_others(usual), 1e-9)
        if ratios.max() >= UNEQUAL and not self.noted_stages:
            self.noted_stages, stage = True, int(ratios.argmax())
            yield StragglerFinding(
                "unequal_stages",
                f"stage {stage} of the pipeline computes for {_ms(usual[stage])} a step, {ratios[stage]:.1f} times as long "
                "as the other stages, which wait for it: stages are unequal by the plan (--pipeline-stage-layers, "
                "tools.plan), or its machines are slow",
            )

    def _name_stage(self, stage: int, now: float, usual: np.ndarray, steps: int) -> StragglerFinding:
        ranks = np.flatnonzero(self.stages == stage)
        before, compared = float(usual[stage]), f"{_ms(now)} of own time a step, {_ms(usual[stage])} before"
        calm = lambda window: not _grown(window.stage_times, usual, SHARE / 2)[stage]
        if len(ranks) == 1:
            rank = int(ranks[0])
            self._add("slow_rank", rank, self.names[rank], calm)
            message = (
                f"{self.names[rank]}, alone on stage {stage} of the pipeline, has become slow: it takes {compared}"
            )
            return StragglerFinding(
                "slow_rank", message, rank, dict(phase="own time", seconds=now, median=before, steps=steps)
            )
        self._add("slow_stage", stage, f"stage {stage} of the pipeline", calm)
        message = f"stage {stage} of the pipeline has become slow: its {len(ranks)} ranks take {compared}"
        return StragglerFinding("slow_stage", message, None, dict(stage=stage, seconds=now, median=before, steps=steps))

    def _network(self) -> Iterable[StragglerFinding]:
        """Report if all ranks wait longer for messages than before, but compute as fast as before."""
        last, key = self._last(), ("slow_network", None)
        if len(self.stages) == 1 or len(self.past) < ENOUGH or self.slow:
            return
        wait, own = (median(values) for values in zip(*((w.wait_of_all, w.own_of_all) for w in self.past), strict=True))
        more = max(wait, SHARE * (wait + own), LEAST)
        over = [w.wait_of_all > wait + more and w.own_of_all < 1.1 * own and w.calm_cores for w in last]
        if sum(over) < STEADY.over:
            return
        self._add(*key, "the network", lambda window: window.wait_of_all < wait + more / 2)
        now, steps = float(np.mean([window.wait_of_all for window in last])), _steps(last)
        message = (
            f"all ranks wait {_ms(now)} a step for messages, {_ms(wait)} before, and compute as fast as before: the "
            f"network is slow (last {steps} steps)"
        )
        yield StragglerFinding(*key[:1], message, None, dict(seconds=now, median=wait, steps=steps))

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _last(self) -> list["_Window"]:
        return list(self.windows)[-STEADY.windows :]

    def _add(self, kind: str, number: Optional[int], what: str, calm: Callable[["_Window"], bool]) -> None:
        key = kind, number
        self.times[key] = self.times.get(key, 0) + 1
        self.slow[key] = _Slow(what, calm, min(MOST_CALM, CALM * 2 ** (self.times[key] - 1)))

    def _recovered(self, window: "_Window") -> Iterable[StragglerFinding]:
        for kind, number in [key for key, slow in self.slow.items() if slow.recovered(window)]:
            what = self.slow.pop((kind, number)).what
            rank = None if kind == "slow_stage" else number
            if rank is not None:
                self.recovered_at[rank] = self.count
            fields = dict(what=kind) | (dict(stage=number) if kind == "slow_stage" else {})
            yield StragglerFinding("recovered", f"{what} is no longer slow", rank, fields)


class Peers:
    """The ranks with which each rank is compared: the others of its stage, or all other ranks if it has none there."""

    def __init__(self, stages: np.ndarray):
        self.groups = [np.flatnonzero(stages == stage) for stage in np.unique(stages)]
        self.alone = np.zeros(len(stages), dtype=bool)
        for group in self.groups:
            self.alone[group] = len(group) == 1 < len(stages)

    def medians(self, values: np.ndarray) -> np.ndarray:
        """For each rank, the median of its peers' values."""
        result = median_of_others(values) if self.alone.any() else np.empty(len(values))
        for group in self.groups:
            if not self.alone[group[0]]:
                result[group] = median_of_others(values[group])
        return result


class _Window:
    """The times of all ranks in a window: seconds of a step, [ranks]. `window[part]`: of a part."""

    def __init__(self, rows: np.ndarray, steps: int, number: int, peers: Peers, share: float, on_cpu: bool):
        self.columns, self.steps, self.number = dict(zip(COLUMNS, rows.T, strict=True)), steps, number
        queue, cpu, data = self[QUEUE], self[CPU], self[DATA]
        own = sum(self[part] for part in OWN)
        compute = own - data
        self.own, self.step = own, _median(own + self[WAITING])
        self.stalled = (compute - cpu - queue).clip(min=0.0) if on_cpu else np.zeros_like(own)
        without_queue = np.maximum(own - queue, data + np.minimum(cpu, compute))
        alone = data + self.stalled  # the time by which ranks without peers are compared
        self.excess, self.reference = _excess(without_queue, alone, peers)
        self.excess_with_queue, self.reference_with_queue = _excess(own, alone + queue, peers)
        self.any_slow = bool(_large(self.excess, self.reference, share).any())
        self.any_slow_with_queue = bool(_large(self.excess_with_queue, self.reference_with_queue, share).any())
        self.stage_times = np.array([_median(without_queue[group]) for group in peers.groups])
        self.data_of_all, self.wait_of_all, self.own_of_all = _low(data), _low(self[WAITING]), _median(own)
        self.calm_cores = _median(queue) < 0.05 * self.step

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]


def slow_ranks(
    rule: WindowRule, share: float, excess: np.ndarray, reference: np.ndarray, whole: float
) -> tuple[np.ndarray, np.ndarray]:
    """Determine which ranks are slow, and the part of the steps that each costs.

    excess, reference: of each rank in the last windows, [windows, ranks]; whole: sum of their steps
    """
    cost = excess.sum(0) / whole
    over = _large(excess, reference, share).sum(0)
    return (over >= rule.over) & (excess.sum(0) >= share * reference.sum(0)) & (cost >= COST), cost


def median_of_others(values: np.ndarray) -> np.ndarray:
    """For each value the median of all others; for a single one itself.

    >>> median_of_others(np.array([1.0, 5.0, 2.0])).tolist()
    [3.5, 1.5, 3.0]
    """
    count = len(values)
    if count == 1:
        return values.copy()
    order = np.argsort(values)
    ordered, places = values[order], np.empty(count, dtype=int)
    places[order] = np.arange(count)
    # Without the value itself, the others at or after its place move down by one.
    low, high = (count - 2) // 2, (count - 1) // 2
    return (ordered[low + (places <= low)] + ordered[high + (places <= high)]) / 2


def _excess(own: np.ndarray, alone: np.ndarray, peers: Peers) -> tuple[np.ndarray, np.ndarray]:
    """(excess over the peers, own time without that excess), from own times, or from `alone` for ranks without peers."""
    excess = np.where(peers.alone, alone - peers.medians(alone), own - peers.medians(own))
    return excess, np.where(peers.alone, own - excess.clip(min=0.0), own - excess)


def _grown(now: np.ndarray, usual: np.ndarray, share: float) -> np.ndarray:
    """Which stages have slowed down against their usual times, and more than the others."""
    ratios = now / np.maximum(usual, 1e-9)
    return ratios > (1 + share) * np.maximum(median_of_others(ratios), 1.0)


def _large(excess: np.ndarray, reference: np.ndarray, share: float) -> np.ndarray:
    return excess > np.maximum(share * reference, LEAST)


def _median(values: np.ndarray) -> float:
    """The median. For a few values numpy's own takes ten times as long."""
    ordered, count = np.sort(values), len(values)
    return float(ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def _low(values: np.ndarray) -> float:
    """A value that most ranks reach: the lowest of four, the tenth of forty."""
    return float(np.sort(values)[(len(values) - 1) // 4])


def _steps(windows: Iterable[_Window]) -> int:
    return sum(window.steps for window in windows)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
