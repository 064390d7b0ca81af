# SPDX-License-Identifier: Apache-2.0
"""Run tasks on this machine: in this process for one worker, else in worker processes that may be killed at any time.

The driver sends each process one task at a time over a pipe. When a process dies, its attempt has failed and the process is
replaced; when the driver dies, its processes end.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Optional

from megatron.corpus.agenda import Agenda, TaskOutcome, child_threads, execute
from megatron.corpus.plan import CorpusTask
from megatron.errors import SettingsError
from megatron.mpu.cpu_threads import cores
from megatron.mpu.forked import die_with

WATCH = 0.5  # seconds between checks of the workers' memory


def run_local(agenda: Agenda, output: Path, workers: int, memory: Optional[int] = None) -> None:
    """Run all tasks of an agenda that can run. memory: limit of all workers together, in bytes; None: no limit"""
    if workers == 1:
        while task := agenda.take():
            agenda.finish(execute(task, output))
        return
    with _Team(agenda, output, workers, memory) as team:
        while not agenda.over:
            team.hand_out()
            team.collect()


def workers_for(workers: Optional[int], memory_gb: Optional[float], task_gb: float) -> int:
    """Number of tasks at a time: as requested, or the number of cores, limited by the memory.

    >>> workers_for(8, 4.0, 1.5), workers_for(2, None, 1.0)
    (2, 2)
    """
    asked = workers or cores()
    if memory_gb is None:
        return asked
    if memory_gb < task_gb:
        raise SettingsError(
            f"--memory-gb {memory_gb:g}: a task of this recipe may take {task_gb:g} GB",
            do=f"give more, or put task-memory-gb: {memory_gb:g} into the recipe (stages then have smaller tasks)",
        )
    return max(1, min(asked, int(memory_gb / task_gb)))


@dataclass
class _Member:
    """A process and its task, if any."""

    process: multiprocessing.Process
    pipe: Connection
    task: Optional[CorpusTask] = None
    killed_for: str = ""


class _Team:
    """The worker processes. They are killed at the end of the `with` block."""

    def __init__(self, agenda: Agenda, output: Path, workers: int, memory: Optional[int]):
        self.agenda, self.output, self.size, self.memory = agenda, output, workers, memory
        self.context = multiprocessing.get_context("fork")
        self.members: list[_Member] = []
        self.looked = time.monotonic()

    def __enter__(self) -> "_Team":
        return self

    def __exit__(self, *_) -> None:
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.join()
            member.pipe.close()

    def hand_out(self) -> None:
        """Start missing processes, and give a task to each idle one."""
        while len(self.members) < self.size and len(self.members) < len(self.agenda.running) + len(self.agenda.ready):
            self.members.append(self._start())
        for member in self.members:
            if member.task is None and (task := self.agenda.take()):
                member.task = task
                with contextlib.suppress(OSError):  # it has just died: `collect` notices
                    member.pipe.send(task)

    def _start(self) -> _Member:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_work, args=(theirs, self.output, os.getpid()))
        sys.stdout.flush()
        sys.stderr.flush()
        process.start()
        theirs.close()
        return _Member(process, ours)

    def collect(self) -> None:
        """Wait for outcomes or deaths, and record them."""
        handles = {member.process.sentinel: member for member in self.members} | {m.pipe: m for m in self.members}
        ready = wait(list(handles), timeout=WATCH)
        for member in {id(handles[one]): handles[one] for one in ready}.values():
            outcome = self._outcome(member)
            if outcome:
                member.task = None
                self.agenda.finish(outcome)
        self._watch_memory()

    def _outcome(self, member: _Member) -> Optional[TaskOutcome]:
        """The outcome that a member has sent, or that follows from its death."""
        try:
            if member.pipe.poll():
                return member.pipe.recv()
        except (EOFError, OSError):
            pass
        if member.process.is_alive():
            return None
        member.process.join()
        member.pipe.close()
        self.members.remove(member)
        if member.task is None:
            return None
        return TaskOutcome(member.task.folder, member.killed_for or _death(member.process.exitcode))

    def _watch_memory(self) -> None:
        """Kill the largest task where all together exceed the memory limit: it fails, and is tried again."""
        if not self.memory or time.monotonic() - self.looked < WATCH:
            return
        self.looked = time.monotonic()
        held = [(_resident(member.process.pid), number) for number, member in enumerate(self.members) if member.task]
        if held and sum(size for size, _ in held) > self.memory:
            size, number = max(held)
            together = sum(size for size, _ in held) / 1e9
            self.members[
                number
            ].killed_for = (
                f"it held {size / 1e9:.2f} GB when all tasks held {together:.2f} of --memory-gb {self.memory / 1e9:g}"
            )
            self.members[number].process.kill()


def _death(code: Optional[int]) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"its process was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"its process ended with code {code}"


def _resident(process: Optional[int]) -> int:
    """Bytes of unshared memory of a process."""
    try:
        fields = Path(f"/proc/{process}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _work(pipe: Connection, output: Path, driver: int) -> None:
    """Body of a worker process: receive tasks, send outcomes. Ignores Ctrl-C, which the driver handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(driver)
    child_threads()
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        pipe.send(execute(task, output))
