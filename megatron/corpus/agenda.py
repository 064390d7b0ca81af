# SPDX-License-Identifier: Apache-2.0
"""The state of a plan's tasks: ready, running, done, failed, or quarantined. Independent of the runner.

    agenda = Agenda(plan, output)
    while not agenda.over:
        task = agenda.take()              # None: wait for one that runs
        agenda.finish(execute(task, output))

A failed task is tried again after the others. After MOST_ATTEMPTS it is quarantined with its last reason, and tasks that
need it are not done; all others are. A full disk is no task's fault and ends the run immediately.
"""

import errno
import json
import os
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megatron.corpus.commit import commit, discard, read_receipt
from megatron.corpus.documents import join_shards
from megatron.corpus.plan import TASKS, CorpusPlan, CorpusTask, paths_of
from megatron.corpus.registry import load
from megatron.errors import StorageError, explain
from megatron.storage.durable import replace_file

MOST_ATTEMPTS = 4
QUARANTINE = "quarantine"
MANY = 2000  # receipts: more are read by several threads, because of the latency of network file systems
READERS = 16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class TaskOutcome:
    """The outcome of an attempt, which may come from another machine. reason: why it failed, or None; storage: the disk
    failed."""

    folder: str
    reason: Optional[str] = None
    storage: bool = False
    counts: Optional[dict[str, Any]] = None
    seconds: float = 0.0


def execute(task: CorpusTask, output: Path) -> TaskOutcome:
    """Run a task in this process, to its commit. Errors of the task are returned, not raised."""
    base = output / TASKS

    def fill(work: Path) -> dict[str, Any]:
        counts = load(task.function)(paths_of(task, output), work, dict(task.options)) or {}
        if task.joins:
            join_shards(work)
        return dict(counts)

    about = dict(task=task.folder, function=task.function, options=task.options, needs=list(task.needs))
    try:
        receipt = commit(base / task.folder, fill, about)
    except OSError as error:
        return TaskOutcome(task.folder, reason_of(error), storage=error.errno in _FULL)
    except StorageError as error:
        return TaskOutcome(task.folder, str(error), storage=True)
    except Exception as error:
        return TaskOutcome(task.folder, reason_of(error))
    return TaskOutcome(task.folder, counts=receipt["counts"], seconds=receipt["attempt"]["seconds"])


def reason_of(error: BaseException) -> str:
    """The reason why an attempt failed: its message, and the line of code for an unexpected error."""
    if failure := explain(error):
        return " ".join(filter(None, (failure.what, failure.why)))
    calls = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(calls[-1].filename).name}:{calls[-1].lineno})" if calls else ""
    return f"{type(error).__name__}: {error}{where}"


class Agenda:
    """The state of a run in its driver's memory. Finished tasks are known from the disk, also after a kill."""

    def __init__(
        self, plan: CorpusPlan, output: Path, only: Optional[Iterable[str]] = None, whole: bool = False
    ) -> None:
        """only: folders of the tasks to do; default: all. whole: verify the bytes of finished tasks, not only sizes"""
        self.plan, self.output = plan, output
        wanted = set(plan.tasks if only is None else only)
        lists = {name for folder in wanted for name in plan.tasks[folder].needs if name in plan.lists}
        needed = {need for name in (wanted | lists) for need in plan.needs_of(name)} - lists
        self.done = folders_done(wanted | needed, output, whole)
        self.done_by_phase = Counter(map(_phase, self.done))
        for folder in wanted - self.done if whole else ():
            discard(output / TASKS / folder)  # by its sizes it would pass later
        self.running: set[str] = set()
        self.failures: dict[str, list[str]] = {}
        self.quarantined: dict[str, str] = {}
        self.wanted = wanted
        available = self.done | {name for name in lists if self.done.issuperset(plan.needs_of(name))}
        self.waits = {name: set(plan.needs_of(name)) - available for name in (wanted | lists) - available}
        self.feeds: dict[str, list[str]] = {}
        for folder in sorted(self.waits):
            for need in self.waits[folder]:
                self.feeds.setdefault(need, []).append(folder)
        self.ready = deque(f for f in plan.tasks if f in self.waits and not self.waits[f])
        self.on_change: Callable[[Agenda], None] = lambda agenda: None
        for path in (output / QUARANTINE).glob("*.json") if (output / QUARANTINE).is_dir() else ():
            phase, _, name = path.stem.rpartition("-")
            if f"{phase}/{name}" in self.waits:
                path.unlink(missing_ok=True)  # it will be tried again

    @property
    def over(self) -> bool:
        return not self.ready and not self.running

    @property
    def left(self) -> int:
        """Tasks that are not done: running, waiting or blocked."""
        return len(self.wanted - self.done)

    def take(self) -> Optional[CorpusTask]:
        """The next task to run; None while all ready tasks are running."""
        if not self.ready:
            return None
        folder = self.ready.popleft()
        self.running.add(folder)
        return self.plan.tasks[folder]

    def finish(self, outcome: TaskOutcome) -> None:
        """Record the end of an attempt. Raises StorageError for a disk that is full or gone."""
        self.running.discard(outcome.folder)
        if outcome.storage:
            raise StorageError(
                f"{self.output}: cannot be written: {outcome.reason}",
                "finished tasks stay finished",
                "free some space, then run the same command again",
            )
        if outcome.reason is None:
            if outcome.folder not in self.done:
                self.done_by_phase[_phase(outcome.folder)] += 1
            self.done.add(outcome.folder)
            self._release(outcome.folder)
        else:
            reasons = self.failures.setdefault(outcome.folder, [])
            reasons.append(outcome.reason)
            if len(reasons) < MOST_ATTEMPTS:
                self.ready.append(outcome.folder)
            else:
                self.quarantined[outcome.folder] = outcome.reason
                write_quarantine(self.output, self.plan.tasks[outcome.folder], reasons)
        self.on_change(self)

    def _release(self, name: str) -> None:
        """Make tasks ready that only waited for this task, or for this list of tasks."""
        for waiting in self.feeds.get(name, ()):
            self.waits[waiting].discard(name)
            if self.waits[waiting] or waiting in self.done:
                continue
            if waiting in self.plan.lists:
                self._release(waiting)
            else:
                self.ready.append(waiting)

    def blocked(self) -> list[str]:
        """Tasks that cannot run because a task that they need is not done."""
        return sorted(self.wanted - self.done - self.quarantined.keys() - self.running - set(self.ready))


def folders_done(folders: Collection[str], output: Path, whole: bool = False) -> set[str]:
    """The finished tasks among these. Each phase is listed once, and existing receipts are read several at a time."""
    listed = {phase: _names_in(output / TASKS / phase) for phase in set(map(_phase, folders))}
    existing = [folder for folder in folders if folder.partition("/")[2] in listed[_phase(folder)]]
    is_done = lambda folder: read_receipt(output / TASKS / folder, whole) is not None
    if len(existing) < MANY:
        return {folder for folder in existing if is_done(folder)}
    with ThreadPoolExecutor(READERS) as pool:
        answers = pool.map(is_done, existing, chunksize=64)
        return {folder for folder, done in zip(existing, answers, strict=True) if done}


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _phase(folder: str) -> str:
    return folder.partition("/")[0]


# ---------------------------------------------------------------------------------------------------- quarantine


def write_quarantine(output: Path, task: CorpusTask, reasons: list[str]) -> None:
    """Write a file for a quarantined task, which other processes read."""
    path = _quarantine_file(output, task.folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = dict(task=task.folder, about=task.about, inputs=list(task.inputs), reasons=reasons)
    replace_file(path, json.dumps(content, indent=1).encode())


def read_quarantine(output: Path, plan: CorpusPlan) -> dict[str, str]:
    """Folder -> reason of the plan's quarantined tasks that are not done."""
    reasons = {}
    folder = output / QUARANTINE
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        with suppress(OSError, ValueError, KeyError):
            content = json.loads(path.read_text())
            if content["task"] in plan.tasks and not read_receipt(output / TASKS / content["task"]):
                reasons[content["task"]] = content["reasons"][-1]
    return reasons


def _quarantine_file(output: Path, folder: str) -> Path:
    return output / QUARANTINE / f"{folder.replace('/', '-')}.json"


def child_threads() -> None:
    """Limit libraries to one thread per task: the runner has as many tasks as there are cores."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, "1")
