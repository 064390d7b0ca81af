# SPDX-License-Identifier: Apache-2.0
"""Measure the seconds that a rank spends in each part of a step, and the seconds in which it waits for other ranks.

    times = HostTimes()             # DeviceTimes on a GPU
    with RankTimes.measuring(times):
        ...                         # phases (phases.py), collectives and pipeline messages report to it
        times.end_step()
    times.take()                    # seconds by part, of the steps since the last call

Each moment counts in one part only, the innermost: a collective inside a forward pass counts as waiting. The sum of the
other parts is the rank's *own time*. Ranks leave a collective together, so the slow rank is the one that waits least.

On a CPU a part is measured by the clock of the host. A process that is stopped during a wait keeps other ranks waiting; a
thread (`_Pulse`) detects this, because it wakes up late. On CUDA it is the time between two events on the compute stream,
which also covers an idle device. Events are read two steps later, so the host never waits for them. Evaluations and saves
do not count. Output only: training never depends on these values. Needs no torch.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Optional

DATA, FORWARD, BACKWARD, UPDATE, OTHER, STOPPED, WAITING = PARTS = (
    "data",  # waiting for the loader; copying micro-batches to the device
    "forward",
    "backward",
    "update",  # own work in the reduction of gradients, and the update
    "other",  # between the other parts, and between steps: log, hooks, garbage collection
    "stopped",  # the process did not run during a wait (on a CPU)
    "waiting",  # for other ranks: collectives and pipeline messages
)
OWN = PARTS[:-1]
CPU, QUEUE = "cpu", "queue"  # of the main thread, without data: on a core, and waiting for a core that others use
COLUMNS = (*PARTS, CPU, QUEUE)
APART = "apart"  # not part of a step

PART_OF = {  # phase -> part; the other phases are inside one of these
    "data": DATA,
    "F": FORWARD,
    "B": BACKWARD,
    "FB": BACKWARD,  # and a forward pass, in turns
    "I": BACKWARD,
    "W": BACKWARD,
    "reduce": UPDATE,
    "update": UPDATE,
    "evaluate": APART,
    "save": APART,
    "rerun": APART,
    "receive F": WAITING,
    "receive B": WAITING,
    "receive I": WAITING,
    "send F": WAITING,
    "send B": WAITING,
}
READ_AFTER = 2  # steps after which the events of a step are read
PULSE = 0.1  # seconds between two checks that the process runs
LATE = 0.025  # seconds: if a check is later than this, the process did not run


class RankTimes:
    """The times of this rank, by the clock of the host. Everything is reported to the `active` one; None costs nothing."""

    active: Optional["RankTimes"] = None

    def __init__(self):
        self.stack, self.sums = [OTHER], dict.fromkeys((*PARTS, APART), 0.0)
        self.spans = {
            phase: (_Uncounted if part in (DATA, APART) else _Span)(self, part) for phase, part in PART_OF.items()
        }
        self.waiting = _Span(self, WAITING)
        self.mark = time.perf_counter()

    @classmethod
    @contextlib.contextmanager
    def measuring(cls, times: Optional["RankTimes"]):
        """A context in which `times` is active."""
        before, cls.active = cls.active, times
        try:
            with contextlib.nullcontext() if times is None else times.watched():
                yield
        finally:
            cls.active = before

    def watched(self) -> contextlib.AbstractContextManager:
        """A context in which pauses of this process are detected, if necessary."""
        return contextlib.nullcontext()

    def enter(self, part: str) -> None:
        """Begin a part, inside of the present one."""
        now = time.perf_counter()
        outer = self.stack[-1]
        self.sums[outer] += now - self.mark
        self.mark = now
        self.stack.append(APART if outer == APART else part)

    def leave(self) -> None:
        """End the innermost part."""
        now = time.perf_counter()
        self.sums[self.stack.pop()] += now - self.mark
        self.mark = now

    def end_step(self) -> None:
        """End a step; time from here on belongs to the next one."""

    def take(self) -> dict[str, float]:
        """Seconds in each of COLUMNS since the last call."""
        self.enter(OTHER)
        self.leave()
        taken = {part: self.sums[part] for part in PARTS} | self.host_times()
        self.sums = dict.fromkeys(self.sums, 0.0)
        return taken

    def host_times(self) -> dict[str, float]:
        """Seconds of the main thread on a core and in the queue for one since the last call; 0 if they are not measured."""
        return {CPU: 0.0, QUEUE: 0.0}

    def exclude_host_time(self, begins: bool) -> None:
        """Begin or end a part whose CPU time does not count."""

    def add_host_times(self, times: tuple[float, float]) -> None:
        """Add seconds (on a core, in the queue) of another thread."""


class HostTimes(RankTimes):
    """The times of a rank on a CPU, with the CPU time of the main thread, which computes.

    waits: whether there are other ranks
    """

    def __init__(self, waits: bool = True):
        super().__init__()
        self.waits, self.usage = waits, ThreadUsage()
        self.counted = self.usage.read()  # the start of counting
        self.left, self.depth = self.counted, 0  # the start of the outermost part that does not count
        self.stopped = 0.0  # seconds of waits in which the process did not run

    @contextlib.contextmanager
    def watched(self):
        with _Pulse(self) if self.waits else contextlib.nullcontext():
            yield
        self.usage.close()

    def was_stopped(self, since: float, seconds: float) -> None:
        """Note that the process did not run for some seconds, if it was waiting. Called by the thread of `_Pulse`."""
        if self.stack[-1] == WAITING and self.mark <= since:
            self.stopped += seconds

    def take(self) -> dict[str, float]:
        taken = super().take()
        stopped = min(self.stopped, taken[WAITING])
        self.stopped = 0.0
        return taken | {STOPPED: stopped, WAITING: taken[WAITING] - stopped}

    def host_times(self) -> dict[str, float]:
        now = self.usage.read()
        (cpu, queue), self.counted = (after - before for after, before in zip(now, self.counted)), now
        return {CPU: cpu, QUEUE: queue}

    def exclude_host_time(self, begins: bool) -> None:
        self.depth += 1 if begins else -1
        if begins and self.depth == 1:
            self.left = self.usage.read()
        elif self.depth == 0:
            now = self.usage.read()
            self.counted = tuple(mark + end - start for mark, end, start in zip(self.counted, now, self.left))

    def add_host_times(self, times: tuple[float, float]) -> None:
        self.counted = tuple(mark - more for mark, more in zip(self.counted, times))


class DeviceTimes(RankTimes):
    """The times of a rank on CUDA: events on the compute stream, read `READ_AFTER` steps later.

    new_event: creates an event that measures time, as `torch.cuda.Event(enable_timing=True)`
    """

    def __init__(self, new_event: Callable[[], Any]):
        super().__init__()
        self.new_event = new_event
        self.unused: list[Any] = []  # events to record again
        self.marks: list[tuple[str, Any]] = []  # of this step: a part, and the event that ends it
        self.steps: deque[list] = deque()  # of earlier steps, not read yet
        self.last = self._record()  # the event that ended the last part that was read

    def _record(self):
        event = self.unused.pop() if self.unused else self.new_event()
        event.record()
        return event

    def enter(self, part: str) -> None:
        outer = self.stack[-1]
        self.marks.append((outer, self._record()))
        self.stack.append(APART if outer == APART else part)

    def leave(self) -> None:
        self.marks.append((self.stack.pop(), self._record()))

    def end_step(self) -> None:
        self.enter(OTHER)
        self.stack.pop()
        self.steps.append(self.marks)
        self.marks = []
        while len(self.steps) > READ_AFTER:
            self._read(self.steps.popleft())

    def _read(self, marks: list[tuple[str, Any]]) -> None:
        marks[-1][1].synchronize()  # it has passed: the host has read numbers of a later step
        for part, event in marks:
            self.sums[part] += self.last.elapsed_time(event) / 1000
            self.unused.append(self.last)
            self.last = event

    def take(self) -> dict[str, float]:
        taken = {part: self.sums[part] for part in PARTS} | self.host_times()
        self.sums = dict.fromkeys(self.sums, 0.0)
        return taken


class ThreadUsage:
    """Seconds that this thread was on a core, and seconds that it waited for one (0 if Linux does not report them)."""

    def __init__(self):
        try:
            self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self.file = None

    def read(self) -> tuple[float, float]:
        """Read the seconds (on a core, in the queue)."""
        cpu = time.thread_time()
        if self.file is None:
            return cpu, 0.0
        try:
            return cpu, int(os.pread(self.file, 80, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return cpu, 0.0

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class _Pulse:
    """A context with a thread that sleeps. If it wakes up late, the process was stopped or frozen."""

    def __init__(self, times: HostTimes):
        self.times, self.over = times, False

    def __enter__(self) -> None:
        threading.Thread(target=self._look, name="rank-times", daemon=True).start()

    def __exit__(self, *_) -> None:
        self.over = True  # the thread ends when it wakes up

    def _look(self) -> None:
        usage = ThreadUsage()
        (_, queued), began = usage.read(), time.perf_counter()
        while not self.over:
            time.sleep(PULSE)  # an Event would take several times as long to wake up from
            (_, queue), now = usage.read(), time.perf_counter()
            late = now - began - PULSE - (queue - queued)  # time in the queue for a core does not count
            if late > LATE:
                self.times.was_stopped(began + PULSE, late)
            queued, began = queue, now
        usage.close()


class _Span:
    """A context around a part."""

    __slots__ = ("part", "times")

    def __init__(self, times: RankTimes, part: str):
        self.times, self.part = times, part

    def __enter__(self) -> None:
        self.times.enter(self.part)

    def __exit__(self, *_) -> None:
        self.times.leave()


class _Uncounted(_Span):
    """A context around a part in which the main thread does not compute: its CPU time does not count."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.times.exclude_host_time(begins=True)
        self.times.enter(self.part)

    def __exit__(self, *_) -> None:
        self.times.leave()
        self.times.exclude_host_time(begins=False)


class _MeasuredWork:
    """A message in flight whose wait is measured."""

    __slots__ = ("times", "work")

    def __init__(self, work, times: RankTimes):
        self.work, self.times = work, times

    def wait(self) -> None:
        self.times.enter(WAITING)
        self.work.wait()
        self.times.leave()

    def is_completed(self) -> bool:
        return self.work.is_completed()


def measured(work: Any) -> Any:
    """The handle of a message that was launched: its `wait` counts as waiting."""
    times = RankTimes.active
    return work if times is None else _MeasuredWork(work, times)


def waiting() -> contextlib.AbstractContextManager:
    """A context around a call that waits for other ranks."""
    times = RankTimes.active
    return contextlib.nullcontext() if times is None else times.waiting


def span_of(phase: str) -> Optional[_Span]:
    """The context of a phase that begins now; None if nothing is measured."""
    times = RankTimes.active
    return None if times is None else times.spans.get(phase)


def counted_as_main_thread(work: Callable[[], Any]) -> Callable[[], None]:
    """`work` for another thread, which computes while the main thread waits for it: its CPU time counts as that one's."""

    def counted() -> None:
        times = RankTimes.active
        if times is None:
            work()
            return
        usage = ThreadUsage()
        before = usage.read()
        try:
            work()
        finally:
            times.add_host_times(tuple(after - start for after, start in zip(usage.read(), before)))
            usage.close()

    return counted
