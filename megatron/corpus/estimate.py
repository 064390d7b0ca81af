# SPDX-License-Identifier: Apache-2.0
"""What a recipe takes on machines that are not there yet: its real plan over made-up input, rates from the receipts of real
runs on a sample, and the real agenda with a made-up clock.

    rates = rates_of([Path("runs/sample")])
    rows, facts = estimate(recipe, rates, CorpusNodes(nodes=64), text=10e12, file_bytes=1e9)

A phase's work grows with the text, evenly over its tasks, and with the number of paths that each of its tasks reads.
Nothing is known of what a sample does not show: a corpus with more duplicates, longer documents or another language has
other rates. Core seconds are those of the machine that the sample ran on.
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
from megatron.corpus.commit import read_receipt
from megatron.corpus.digests import Digests
from megatron.corpus.plan import LIST, TASKS, CorpusPlan, CorpusTask, load_plan, plan_of
from megatron.corpus.recipe import CorpusRecipe
from megatron.corpus.registry import load
from megatron.data.json_input import Source
from megatron.errors import DataError, SettingsError

PATH_BYTES = 2000  # of memory that a path takes in a task that reads something of it
MOST_SHARDS = 1_000_000  # of a plan: 15 GB of memory for each million
RECEIPT_FILES = 1  # files of a task beside those that its receipt names


@dataclass(frozen=True)
class CorpusNodes:
    """Machines, and the file system that they share. Rates are of all machines together."""

    nodes: int = 1
    cores: int = 64  # of a node
    memory: float = 256e9  # bytes of a node
    bandwidth: float = 50e9  # bytes a second, read and written
    opens: float = 50_000.0  # files opened a second
    open_seconds: float = 0.5e-3  # that a task waits for a file to be opened
    hand_out_seconds: float = 1e-3  # of the driver a task
    link: float = 5e9  # bytes a second between a node and the file system
    stream: float = 1e9  # of that, what a single task gets at most

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
    """The tasks of a phase in one run, on average. text: MB of input; paths: that it was called with."""

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
    """What something of a task comes to: fixed + by_text * MB + by_path * paths."""

    fixed: float = 0.0
    by_text: float = 0.0
    by_path: float = 0.0

    def at(self, text: float, paths: float) -> float:
        return self.fixed + self.by_text * text + self.by_path * paths


@dataclass(frozen=True)
class PhaseRates:
    """How a phase grows; written: bytes a MB of input."""

    seconds: Growth
    files: Growth
    opened: Growth
    memory: Growth
    written: float


@dataclass(frozen=True)
class CorpusRates:
    """Of all phases of a recipe. documents: a MB of input."""

    phases: dict[str, PhaseRates]
    documents: float
    runs: list[dict[str, Any]]


def rates_of(outputs: Sequence[Path]) -> CorpusRates:
    """The rates of one finished run of a recipe, or of several that cut their text into other shards.

    Several tell what grows with the text from what grows with the number of shards. Raises DataError.
    """
    samples: dict[str, list[PhaseSample]] = {}
    runs, documents, text = [], 0, 0.0
    for output in outputs:
        plan = load_plan(output)
        if plan is None:
            raise DataError(f"{output}: no run was started there", do="give the output folder of a finished run")
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
    for phase, found in samples.items():
        if len(found) != len(outputs):
            raise DataError(f"{outputs[0]}: not all of the runs have a phase {phase}", do="give runs of one recipe")
    return CorpusRates({phase: _rates(found) for phase, found in samples.items()}, documents / text, runs)


def input_mb(plan: CorpusPlan) -> float:
    """MB of JSON lines that a plan reads: of a compressed file, what its shards are taken to hold."""
    [folders] = plan.stages[0].phases.values()
    pieces = [piece for folder in folders for piece in plan.tasks[folder].options["pieces"]]
    plain = [stop - start for _, start, stop, _ in pieces if start is not None]
    if len(plain) < len(pieces):
        raise DataError(
            "rates are taken from a run over plain files: of compressed ones nobody knows how much text they hold",
            do="unpack the sample",
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
        float(np.median([attempt["opened"] for attempt in attempts])),  # the first task of a process opens modules, too
        float(max(attempt["memory"] for attempt in attempts)),
        len(tasks),
    )


def _paths(plan: CorpusPlan, task: CorpusTask) -> int:
    return sum(len(plan.lists[name]) if name in plan.lists else 1 for name in task.inputs)


def _rates(samples: list[PhaseSample]) -> PhaseRates:
    """By what each thing grows, as far as the runs differ; a single run says of time that it grows with the text."""
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
    """Least squares of relative errors with no negative factor: of all sets of columns, the best that has none.

    columns: names of fields of PhaseSample, "" for what is fixed
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
    found = best[1]
    return Growth(found.get("", 0.0), found.get("text", 0.0), found.get("paths", 0.0))


# ---------------------------------------------------------------------------------------------------- a plan


class MadeUp(Digests):
    """Digests of files that are not there: their paths."""

    def of(self, path: str) -> str:
        return path


def made_up_plan(recipe: CorpusRecipe, text: float, file_bytes: float) -> CorpusPlan:
    """The plan of a recipe over so many bytes of JSON lines in plain files of a size."""
    files = max(1, round(text / file_bytes))
    sources = [Source(f"/made-up/{number:07}.jsonl", int(text / files), None) for number in range(files)]
    return plan_of(recipe, sources, MadeUp(Path(os.devnull)))


# ---------------------------------------------------------------------------------------------------- the clock


@dataclass(frozen=True)
class TaskCost:
    """seconds: of a core; opened: files; moved: bytes read and written."""

    seconds: float
    opened: float = 0.0
    moved: float = 0.0


@dataclass
class PhaseTime:
    """When the first task of a phase began and the last ended; busy: seconds of workers; longest: of one task."""

    first: float = float("inf")
    last: float = 0.0
    busy: float = 0.0
    longest: float = 0.0


class _Queue:
    """Something that serves everybody one after the other."""

    def __init__(self, rate: float):
        self.rate, self.free = rate, 0.0

    def served(self, now: float, amount: float) -> float:
        """When so much that is asked for now is there."""
        self.free = max(self.free, now) + amount / self.rate
        return self.free


def simulate(
    agenda: Agenda, cost: Callable[[CorpusTask], TaskCost], cluster: CorpusNodes, workers: int
) -> tuple[float, dict[str, PhaseTime]]:
    """(seconds until everything is done, times by phase) of an agenda, whose tasks are given out as a run gives them out.

    A task has a core for its seconds, waits for each file that it opens, and moves its bytes at the rate of one stream;
    it ends no earlier than the file system has served what it and all tasks before it asked for.
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
            told = times.setdefault(task.phase, PhaseTime())
            told.first, told.last = min(told.first, start), max(told.last, end)
            told.busy += end - start
            told.longest = max(told.longest, end - start)
        if not running:
            return now, times
        now, _, folder = heapq.heappop(running)
        agenda.finish(TaskOutcome(folder))


# ---------------------------------------------------------------------------------------------------- the estimate


@dataclass
class PhaseRow:
    """A phase of the estimate. paths: of a task; sizes in bytes, of all tasks together but for memory, of one."""

    name: str
    tasks: int
    paths: int
    files: int
    opened: float
    read: float
    shuffled: float  # of that, through lists: from every task of another phase
    written: float
    core_seconds: float
    memory: float
    growing: float  # of that memory, what grows with the corpus: documents and paths
    first: float = 0.0
    last: float = 0.0
    longest: float = 0.0


@dataclass
class EstimateFacts:
    """Of the whole run. driver_*: of this process, measured: seconds to make the plan and the agenda, bytes it held."""

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
    breaks: list[tuple[float, str]] = field(default_factory=list)  # (TB of input, what)


def estimate(
    recipe: CorpusRecipe, rates: CorpusRates, cluster: CorpusNodes, text: float, file_bytes: float
) -> tuple[list[PhaseRow], EstimateFacts]:
    """A row a phase, and facts of the whole. text: bytes of JSON lines."""
    task_memory = recipe.task_memory_gb * 1e9
    workers = cluster.workers(task_memory)
    few = min(text, 256 * recipe.shard_mb * 1e6)
    _check_same(made_up_plan(recipe, few, few), rates)
    shards = text / 1e6 / recipe.shard_mb
    if shards > MOST_SHARDS:
        raise SettingsError(
            f"{text / 1e12:g} TB in shards of {recipe.shard_mb:g} MB are {shards:,.0f} shards: no driver holds such a plan",
            do=f"raise shard-mb in the recipe: up to {MOST_SHARDS:,} shards can be planned",
        )
    started = time.perf_counter()
    plan = made_up_plan(recipe, text, file_bytes)
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
    facts.breaks = what_breaks(rows, facts, cluster, task_memory)
    return rows, facts


def _check_same(plan: CorpusPlan, rates: CorpusRates) -> None:
    if plan.phases.keys() != rates.phases.keys():
        lacking = ", ".join([*plan.phases.keys() - rates.phases.keys()] or [*rates.phases.keys() - plan.phases.keys()])
        raise DataError(
            f"the runs that rates are taken from are of another recipe: they differ in {lacking}",
            do="run this recipe on a sample first",
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
    if "memory" in one.options:  # the stage cuts its work to it
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
    """(bytes that the tasks of a phase read, those of lists): each byte of what they name once."""
    if phase == next(iter(plan.phases)):
        return text, 0.0
    named = {name for folder in plan.phases[phase] for name in plan.tasks[folder].needs}
    direct = {name.partition("/")[0] for name in named if not name.startswith(LIST)}
    lists = {need.partition("/")[0] for name in named if name.startswith(LIST) for need in plan.needs_of(name)[:1]}
    sizes = {maker: rates.phases[maker].written * text / 1e6 for maker in direct | lists}
    return sum(sizes.values()), sum(sizes[maker] for maker in lists)


def _document_bytes(plan: CorpusPlan, phase: str) -> int:
    """Bytes of memory that a task of the phase takes for each document of the corpus, as its stage says."""
    for stage in plan.stages:
        if phase in stage.phases and stage.address:
            made = load(stage.address)(dict(stage.options), len(stage.reads), 1 << 30)
            return made[[*stage.phases].index(phase)].document_bytes
    return 0


# ---------------------------------------------------------------------------------------------------- what breaks next


def what_breaks(
    rows: Sequence[PhaseRow], facts: EstimateFacts, cluster: CorpusNodes, task_memory: float
) -> list[tuple[float, str]]:
    """(TB of input, what happens there), the nearest first; shards stay as large as they are."""
    found: list[tuple[float, str]] = []
    tb = facts.text / 1e12

    def add(share: float, words: str, power: float = 1.0) -> None:
        """share: of what there is that is used now; it grows with this power of the input."""
        if share > 0:
            found.append((tb / share ** (1 / power), words))

    add(facts.driver_memory / cluster.memory, "the driver's plan and agenda fill the memory of a node")
    own = [row for row in rows if row.tasks == 1]
    for row in own:
        add(row.growing / cluster.memory, f"{row.name}, one task, takes the memory of a whole node")
        share = (row.last - row.first) / facts.seconds
        if share > 0.1:
            found.append((tb, f"{row.name}, one task, is {share:.0%} of the time: no node makes it faster"))
    longest = max(rows, key=lambda row: row.paths * (row.tasks > 1))
    add(
        longest.paths * PATH_BYTES / task_memory,
        f"{longest.name}: the names of what a task reads ({longest.paths:,} now) fill task-memory-gb",
    )
    lists = [row for row in rows if row.paths > 1 and row.tasks > 1]
    if lists:
        most = max(lists, key=lambda row: row.opened)
        add(
            sum(row.opened for row in lists) / cluster.opens / facts.seconds,
            f"opening files alone takes as long as everything now: {most.name} has {most.tasks:,} tasks that open "
            f"{most.opened / most.tasks:,.0f} each, and both numbers grow",
            2.0,
        )
    add(facts.plan_bytes / (1 << 31), "plan.json has 2 GiB")
    return sorted(found)
