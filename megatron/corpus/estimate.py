# SPDX-License-Identifier: Apache-2.0
"""Estimate the time, memory and files of a recipe on a cluster, by simulation.

It uses the real plan over fictitious input, rates from the receipts of runs on a sample, and the real agenda with a
simulated clock.

    rates = rates_of([Path("runs/sample")])
    rows, facts = estimate(recipe, rates, CorpusNodes(nodes=64), text=10e12, file_bytes=1e9)

A phase's work grows with the text, evenly over its tasks, and with the number of paths that each of its tasks reads. The
sample has to be representative: a corpus with more duplicates, longer documents or another language has other rates. Core
seconds are those of the sample's machine.
"""

import heapq
import itertools
import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.corpus.agenda import Agenda, TaskOutcome
from megatron.corpus.commit import Digests, read_receipt
from megatron.corpus.plan import LIST, TASKS, CorpusPlan, CorpusTask, load_plan, plan_of
from megatron.corpus.recipe import CorpusRecipe
from megatron.corpus.registry import load
from megatron.data.json_input import Source
from megatron.errors import DataError, SettingsError

PATH_BYTES = 2000  # of a task's memory per input path
MOST_SHARDS = 1_000_000  # of a plan: 15 GB of memory per million
RECEIPT_FILES = 1  # files of a task in addition to those in its receipt


@dataclass(frozen=True)
class CorpusNodes:
    """A cluster of machines and their shared file system. Rates are for all machines together."""

    nodes: int = 1
    cores: int = 64  # of a node
    memory: float = 256e9  # bytes of a node
    bandwidth: float = 50e9  # bytes a second, read and written
    opens: float = 50_000.0  # files opened a second
    open_seconds: float = 0.5e-3  # latency of opening a file
    hand_out_seconds: float = 1e-3  # of the driver per task
    link: float = 5e9  # bytes per second between a node and the file system
    stream: float = 1e9  # bytes per second of a single task at most

    def workers(self, task_memory: float) -> int:
        """Tasks at a time on all nodes."""
        each = min(self.cores, int(self.memory / task_memory))
        if each < 1:
            raise SettingsError(
                f"a task of this recipe may take {task_memory / 1e9:g} GB, and a node has {self.memory / 1e9:g}",
                do="lower task-memory-gb, or give nodes with more memory",
            )
        return each * self.nodes


# ---------------------------------------------------------------------------------------------------- rates


@dataclass(frozen=True)
class PhaseSample:
    """Averages over the tasks of a phase in one run. text: MB of input; paths: number of input paths"""

    text: float
    paths: float
    seconds: float
    written: float
    files: float
    opened: float
    memory: float
    tasks: int = 1


@dataclass(frozen=True)
class Growth:
    """A linear model of a task's value: fixed + by_text * MB + by_path * paths."""

    fixed: float = 0.0
    by_text: float = 0.0
    by_path: float = 0.0

    def at(self, text: float, paths: float) -> float:
        return self.fixed + self.by_text * text + self.by_path * paths


@dataclass(frozen=True)
class PhaseRates:
    """The growth of a phase's values. written: bytes per MB of input"""

    seconds: Growth
    files: Growth
    opened: Growth
    memory: Growth
    written: float


@dataclass(frozen=True)
class CorpusRates:
    """The rates of all phases of a recipe. documents: per MB of input"""

    phases: dict[str, PhaseRates]
    documents: float
    runs: list[dict[str, Any]]


def rates_of(outputs: Sequence[Path]) -> CorpusRates:
    """The rates from one finished run of a recipe, or from several with different shards.

    Several runs separate growth with the text from growth with the number of shards. Raises DataError.
    """
    samples: dict[str, list[PhaseSample]] = {}
    runs, documents, text = [], 0, 0.0
    for output in outputs:
        plan = load_plan(output)
        if plan is None:
            raise DataError(f"{output}: contains no run", do="give the output folder of a finished run")
        rows = {folder: read_receipt(output / TASKS / folder) for folder in plan.tasks}
        if missing := [folder for folder, row in rows.items() if row is None]:
            raise DataError(
                f"{output}: {len(missing)} of {len(rows)} tasks are not done",
                do="finish the run first: the same command",
            )
        read = input_mb(plan)
        for phase, folders in plan.phases.items():
            tasks = list(dict.fromkeys(folders))
            samples.setdefault(phase, []).append(_sample(plan, [rows[folder] for folder in tasks], tasks, read))
        first = plan.phases[next(iter(plan.phases))]
        documents += sum(rows[folder]["counts"]["documents"] for folder in first)
        text += read
        runs.append(dict(output=str(output), text_mb=round(read, 1), tasks=len(rows)))
    for phase, rows in samples.items():
        if len(rows) != len(outputs):
            raise DataError(f"{outputs[0]}: not all of the runs have a phase {phase}", do="give runs of one recipe")
    return CorpusRates({phase: _rates(rows) for phase, rows in samples.items()}, documents / text, runs)


def input_mb(plan: CorpusPlan) -> float:
    """MB of JSON lines that a plan reads. Raises DataError for compressed files, whose text size is unknown."""
    [folders] = plan.stages[0].phases.values()
    pieces = [piece for folder in folders for piece in plan.tasks[folder].options["pieces"]]
    plain = [stop - start for _, start, stop, _ in pieces if start is not None]
    if len(plain) < len(pieces):
        raise DataError(
            "rates need a run over plain files: the size of the text in compressed ones is not known",
            do="decompress the sample",
        )
    return sum(plain) / 1e6


def _sample(plan: CorpusPlan, rows: list[dict], tasks: list[str], read: float) -> PhaseSample:
    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    attempts = [row["attempt"] for row in rows]
    if "opened" not in attempts[0]:
        raise DataError(
            "the receipts of this run are of an earlier version, without memory and files", do="run it again"
        )
    return PhaseSample(
        read / len(tasks),
        mean(_paths(plan, plan.tasks[folder]) for folder in tasks),
        mean(attempt["core_seconds"] for attempt in attempts),
        mean(sum(size for size, _ in row["files"].values()) for row in rows),
        mean(len(row["files"]) for row in rows),
        float(np.median([attempt["opened"] for attempt in attempts])),  # the first task of a process also opens modules
        float(max(attempt["memory"] for attempt in attempts)),
        len(tasks),
    )


def _paths(plan: CorpusPlan, task: CorpusTask) -> int:
    return sum(len(plan.lists[name]) if name in plan.lists else 1 for name in task.inputs)


def _rates(samples: list[PhaseSample]) -> PhaseRates:
    """The growth of each value, as far as the runs differ. From a single run, time grows with the text."""
    texts, paths = ({getattr(one, name) for one in samples} for name in ("text", "paths"))
    by_path = len(paths) > 1
    return PhaseRates(
        seconds=fitted(
            samples, "seconds", ("text", "paths") if by_path else ("text", "") if len(texts) > 1 else ("text",)
        ),
        files=fitted(samples, "files", ("", "paths") if by_path else ("",)),
        opened=fitted(samples, "opened", ("", "paths") if by_path else ("paths",) if max(paths) > 1 else ("",)),
        memory=fitted(samples, "memory", ("", "text") if len(texts) > 1 < max(one.tasks for one in samples) else ("",)),
        written=sum(one.written for one in samples) / sum(one.text for one in samples),
    )


def fitted(samples: Sequence[PhaseSample], what: str, columns: Sequence[str]) -> Growth:
    """Least squares of relative errors without negative coefficients: the best subset of columns that has none.

    columns: names of fields of PhaseSample, "" for the constant
    """
    value = np.array([getattr(one, what) for one in samples], float)
    scale = np.where(value > 0, value, 1.0)
    best: tuple[float, dict[str, float]] = (float(np.sum((value / scale) ** 2)), {})
    for number in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, number):
            rows = np.array([[getattr(one, name) if name else 1.0 for name in chosen] for one in samples])
            factors = np.linalg.lstsq(rows / scale[:, None], value / scale, rcond=None)[0]
            error = float(np.sum(((rows @ factors - value) / scale) ** 2))
            if (factors >= 0).all() and error < best[0] - 1e-12:
                best = error, dict(zip(chosen, map(float, factors), strict=True))
    factors = best[1]
    return Growth(factors.get("", 0.0), factors.get("text", 0.0), factors.get("paths", 0.0))


# ---------------------------------------------------------------------------------------------------- a plan


class FictitiousDigests(Digests):
    """Digests of files that do not exist: their paths."""

    def of(self, path: str) -> str:
        return path


def fictitious_plan(recipe: CorpusRecipe, text: float, file_bytes: float) -> CorpusPlan:
    """The plan of a recipe over `text` bytes of JSON lines in plain files of `file_bytes`."""
    files = max(1, round(text / file_bytes))
    sources = [Source(f"/made-up/{number:07}.jsonl", int(text / files), None) for number in range(files)]
    return plan_of(recipe, sources, FictitiousDigests(Path(os.devnull)))


# ---------------------------------------------------------------------------------------------------- the clock


@dataclass(frozen=True)
class TaskCost:
    """The cost of a task. seconds: of a core; opened: files; moved: bytes read and written"""

    seconds: float
    opened: float = 0.0
    moved: float = 0.0


@dataclass
class PhaseTime:
    """Start of a phase's first task and end of its last. busy: seconds of workers; longest: of one task"""

    first: float = float("inf")
    last: float = 0.0
    busy: float = 0.0
    longest: float = 0.0


class _Queue:
    """A shared resource that serves requests one after the other."""

    def __init__(self, rate: float):
        self.rate, self.free = rate, 0.0

    def served(self, now: float, amount: float) -> float:
        """The time at which a request made now is served."""
        self.free = max(self.free, now) + amount / self.rate
        return self.free


def simulate(
    agenda: Agenda, cost: Callable[[CorpusTask], TaskCost], cluster: CorpusNodes, workers: int
) -> tuple[float, dict[str, PhaseTime]]:
    """(total seconds, times by phase) of an agenda, with tasks started as in a run.

    A task has a core for its seconds, waits for each file that it opens, and moves its bytes at the rate of one stream. It
    ends no earlier than the file system has served the requests of this task and of all tasks before it.
    """
    disk = _Queue(min(cluster.bandwidth, cluster.link * cluster.nodes))
    names, driver = _Queue(cluster.opens), _Queue(1.0)
    times: dict[str, PhaseTime] = {}
    running: list[tuple[float, int, str]] = []
    now, number = 0.0, 0
    while True:
        while len(running) < workers and (task := agenda.take()):
            one = cost(task)
            start = driver.served(now, cluster.hand_out_seconds)
            end = start + one.seconds + one.opened * cluster.open_seconds + one.moved / cluster.stream
            end = max(end, disk.served(start, one.moved), names.served(start, one.opened))
            number += 1
            heapq.heappush(running, (end, number, task.folder))
            phase = times.setdefault(task.phase, PhaseTime())
            phase.first, phase.last = min(phase.first, start), max(phase.last, end)
            phase.busy += end - start
            phase.longest = max(phase.longest, end - start)
        if not running:
            return now, times
        now, _, folder = heapq.heappop(running)
        agenda.finish(TaskOutcome(folder))


# ---------------------------------------------------------------------------------------------------- the estimate


@dataclass
class PhaseRow:
    """A phase of the estimate. paths: of a task; sizes in bytes for all tasks together, memory for one task"""

    name: str
    tasks: int
    paths: int
    files: int
    opened: float
    read: float
    shuffled: float  # part of it through lists: from every task of another phase
    written: float
    core_seconds: float
    memory: float
    growing: float  # part of the memory that grows with the corpus: documents and paths
    first: float = 0.0
    last: float = 0.0
    longest: float = 0.0


@dataclass
class EstimateFacts:
    """Totals of the run. plan_seconds and driver_memory are measured in this process, for the plan and the agenda."""

    seconds: float
    workers: int
    text: float
    shards: int
    tasks: int
    documents: float
    plan_seconds: float
    plan_bytes: int
    driver_memory: int
    digest_seconds: float  # of the input, read once by the driver
    breaks: list[tuple[float, str]] = field(default_factory=list)  # (TB of input, limit reached there)


def estimate(
    recipe: CorpusRecipe, rates: CorpusRates, cluster: CorpusNodes, text: float, file_bytes: float
) -> tuple[list[PhaseRow], EstimateFacts]:
    """A row for each phase, and totals. text: bytes of JSON lines"""
    task_memory = recipe.task_memory_gb * 1e9
    workers = cluster.workers(task_memory)
    few = min(text, 256 * recipe.shard_mb * 1e6)
    _check_same(fictitious_plan(recipe, few, few), rates)
    shards = text / 1e6 / recipe.shard_mb
    if shards > MOST_SHARDS:
        raise SettingsError(
            f"{text / 1e12:g} TB in shards of {recipe.shard_mb:g} MB are {shards:,.0f} shards: no driver holds such a plan",
            do=f"raise shard-mb in the recipe: up to {MOST_SHARDS:,} shards can be planned",
        )
    started = time.perf_counter()
    plan = fictitious_plan(recipe, text, file_bytes)
    took = time.perf_counter() - started
    costs = {}
    rows = []
    for phase in plan.phases:
        row, costs[phase] = _row_of(plan, phase, rates, text, task_memory)
        rows.append(row)
    plan_bytes = len(plan.to_json())
    started = time.perf_counter()
    agenda = Agenda(plan, Path(os.devnull))
    took += time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds, times = simulate(agenda, lambda task: costs[task.phase], cluster, workers)
    for row in rows:
        row.first, row.last, row.longest = (getattr(times[row.name], name) for name in ("first", "last", "longest"))
    shards = len(plan.stages[0].makes)
    digest = text / min(cluster.link, cluster.bandwidth)
    documents = rates.documents * text / 1e6
    facts = EstimateFacts(seconds, workers, text, shards, len(plan.tasks), documents, took, plan_bytes, memory, digest)
    facts.breaks = limits_of(rows, facts, cluster, task_memory)
    return rows, facts


def _check_same(plan: CorpusPlan, rates: CorpusRates) -> None:
    if plan.phases.keys() != rates.phases.keys():
        lacking = ", ".join([*plan.phases.keys() - rates.phases.keys()] or [*rates.phases.keys() - plan.phases.keys()])
        raise DataError(
            f"the sample runs are of another recipe: they differ in {lacking}", do="run this recipe on a sample first"
        )


def _row_of(
    plan: CorpusPlan, phase: str, rates: CorpusRates, text: float, task_memory: float
) -> tuple[PhaseRow, TaskCost]:
    folders = list(dict.fromkeys(plan.phases[phase]))
    tasks, one, rate = len(folders), plan.tasks[folders[0]], rates.phases[phase]
    share, paths = text / 1e6 / tasks, _paths(plan, one)
    written = rate.written * text / 1e6
    read, shuffled = _read(plan, phase, rates, text)
    seconds, opened = rate.seconds.at(share, paths), rate.opened.at(share, paths)
    files = int(tasks * (rate.files.at(share, paths) + RECEIPT_FILES))
    memory = rate.memory.at(share, paths)
    if "memory" in one.options:  # the stage respects this limit
        memory = min(memory, max(task_memory, rate.memory.at(0, paths)))
    growing = PATH_BYTES * paths + _document_bytes(plan, phase) * rates.documents * text / 1e6
    row = PhaseRow(
        phase,
        tasks,
        paths,
        files,
        opened * tasks,
        read,
        shuffled,
        written,
        seconds * tasks,
        memory=memory + growing,
        growing=growing,
    )
    return row, TaskCost(seconds, opened, (read + written) / tasks)


def _read(plan: CorpusPlan, phase: str, rates: CorpusRates, text: float) -> tuple[float, float]:
    """(bytes that the tasks of a phase read, part of it through lists), each byte counted once."""
    if phase == next(iter(plan.phases)):
        return text, 0.0
    named = {name for folder in plan.phases[phase] for name in plan.tasks[folder].needs}
    direct = {name.partition("/")[0] for name in named if not name.startswith(LIST)}
    lists = {need.partition("/")[0] for name in named if name.startswith(LIST) for need in plan.needs_of(name)[:1]}
    sizes = {maker: rates.phases[maker].written * text / 1e6 for maker in direct | lists}
    return sum(sizes.values()), sum(sizes[maker] for maker in lists)


def _document_bytes(plan: CorpusPlan, phase: str) -> int:
    """Bytes of a task's memory per document of the corpus, from `StagePhase.document_bytes`."""
    for stage in plan.stages:
        if phase in stage.phases and stage.address:
            made = load(stage.address)(dict(stage.options), len(stage.reads), 1 << 30)
            return made[[*stage.phases].index(phase)].document_bytes
    return 0


# ---------------------------------------------------------------------------------------------------- limits


def limits_of(
    rows: Sequence[PhaseRow], facts: EstimateFacts, cluster: CorpusNodes, task_memory: float
) -> list[tuple[float, str]]:
    """(TB of input, limit reached there), the nearest first, with shards of the same size."""
    limits: list[tuple[float, str]] = []
    tb = facts.text / 1e12

    def add(share: float, words: str, power: float = 1.0) -> None:
        """share: the used part of the capacity, which grows with this power of the input"""
        if share > 0:
            limits.append((tb / share ** (1 / power), words))

    add(facts.driver_memory / cluster.memory, "the driver's plan and agenda fill the memory of a node")
    own = [row for row in rows if row.tasks == 1]
    for row in own:
        add(row.growing / cluster.memory, f"{row.name}, one task, takes the memory of a whole node")
        share = (row.last - row.first) / facts.seconds
        if share > 0.1:
            limits.append((tb, f"{row.name}, one task, is {share:.0%} of the time: more nodes do not speed it up"))
    longest = max(rows, key=lambda row: row.paths * (row.tasks > 1))
    add(
        longest.paths * PATH_BYTES / task_memory,
        f"{longest.name}: the input paths of a task ({longest.paths:,} now) fill task-memory-gb",
    )
    lists = [row for row in rows if row.paths > 1 and row.tasks > 1]
    if lists:
        most = max(lists, key=lambda row: row.opened)
        add(
            sum(row.opened for row in lists) / cluster.opens / facts.seconds,
            f"opening files takes as long as the whole run now: {most.name} has {most.tasks:,} tasks that open "
            f"{most.opened / most.tasks:,.0f} each, and both numbers grow",
            2.0,
        )
    add(facts.plan_bytes / (1 << 31), "plan.json has 2 GiB")
    return sorted(limits)
