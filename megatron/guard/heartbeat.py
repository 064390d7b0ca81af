# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: a rank's present step and phase in its node's memory, readable at any time, also when the rank hangs.

    heartbeat = Heartbeat("/shared/job/beats", rank=3)
    heartbeat.beat("data", step=17)      # about 3 microseconds, and no system call
    ...
    for beat in read_beats("/shared/job/beats"): print(beat.rank, beat.step, beat.phase, beat.op, beat.group)

The file is one JSON object of a fixed length, rewritten in place, followed by the name of the process group of the last
collective; `beat_files` says where it lies. Without a folder nothing is written, but the time of each phase is still
counted. SIGUSR2 makes a rank write the stacks of its threads to a file next to the heartbeat, even when it hangs. A thread
tells the supervisor on another machine how the ranks of this node are, and serves its requests. Needs no torch.
"""

import contextlib
import faulthandler
import json
import mmap
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

from megatron.errors import in_a_line, node_name
from megatron.guard import beat_files
from megatron.guard.beat_files import BEAT, GROUP, REQUESTS, SIZE, STOP, TRACE, WELL, beat_path, memory_of, stacks_path
from megatron.storage.processes import process_start_ticks

STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
STARTUP = dict(start="imports", join="rendezvous", model="model", load="checkpoint", index="data")  # phases -> words


class Heartbeat:
    """A rank's heartbeat. All methods are cheap."""

    def __init__(self, folder: Optional[str] = None, rank: int = 0):
        self.file: Optional[mmap.mmap] = None
        self.stacks = None
        self.count, self.step, self.since, self.phase, self.group = 0, 0, 0, "start", ""
        self.at = time.monotonic() - age()  # counts the imports
        self.usual: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self.first_step, self._began = 0.0, 0.0
        self._over = threading.Event()
        self.dump_trace: Optional[Callable[[], object]] = None
        self._thread: Optional[threading.Thread] = None
        if folder is None:
            return
        self.folder, self.rank, who = Path(folder), rank, beat_files.machine()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.memory = memory_of(self.folder, who)
        if self.memory != self.folder:
            beat_files.remove_left_memories(who)
            self.memory.mkdir(exist_ok=True)
        self.path = beat_path(self.memory, rank)
        if not self._map():
            return
        if STACKS_SIGNAL is not None:
            self.stacks = stacks_path(self.path).open("wb", buffering=0)
            if (
                signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL
                and threading.current_thread() is threading.main_thread()
            ):
                signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # one that comes after `close` does not end the rank
            faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)
        who = dict(rank=rank, host=node_name(), machine=who, memory=str(self.memory))
        who |= dict(pid=os.getpid(), born=process_start_ticks(os.getpid()))
        words = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        if all(words):
            who["slurm_step"] = ".".join(words)
        self.head = json.dumps(who)[:-1]
        self.tail = "{}"
        self.beat("start")

    def _map(self) -> bool:
        """Map the file; a note instead if there is no room for it."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.posix_fallocate(file, 0, SIZE)  # else a write to the mapped file ends the process if memory is full
                self.file = mmap.mmap(file, SIZE)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            print(f"warning: no heartbeat of rank {self.rank}: {self.path}: {error}", file=sys.stderr, flush=True)
        return self.file is not None

    def listen(self) -> None:
        """Start the thread that speaks with a supervisor on another machine; `close` ends it."""
        if self.file is not None:
            self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
            self._thread.start()

    def record_trace(self, dump: Callable[[], object]) -> None:
        """Note that this rank can dump its last collectives, on request."""
        self.dump_trace = dump
        if self.file is not None:
            self.head += ', "records": true'
            self.beat(self.phase)

    def note_place(self, place: dict[str, int]) -> None:
        """Add the rank's coordinates to its heartbeat."""
        if self.file is not None:
            words = " ".join(f"{axis} {place[axis]}" for axis in ("dp", "pp", "cp", "tp") if axis in place)
            self.head += f', "place": "{words}"'

    def beat(self, phase: str, step: Optional[int] = None, op: str = "") -> None:
        """Enter a phase, or its next part."""
        now = time.monotonic()
        self._account(now - self.at)
        self.at, self.phase = now, phase
        if step is not None and step != self.step:
            if self.since and not self.first_step:
                self.first_step = now - self._began
            self._began = self._began or now
            self.step, self.since = step, self.since or step
            self._sum_up()
        elif not self.step:
            self._sum_up()
        if self.file is not None:
            self._write(op)

    @contextlib.contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """A context in which each phase may usually take so long, for example because the compiler runs in it."""
        usual, self.usual = self.usual, dict.fromkeys(self.usual, seconds)
        try:
            yield
        finally:
            self.usual = usual

    def enter_group(self, group: str) -> None:
        """Record the group whose ranks this one is about to wait for. Takes less than a microsecond."""
        self.group = group
        if self.file is not None:
            self._put(group.encode("ascii", "replace")[:GROUP].ljust(GROUP), SIZE - GROUP)

    @property
    def startup(self) -> dict[str, float]:
        """Seconds before the first step, by phase; the present phase up to now."""
        spent = {**self.totals, self.phase: self.totals.get(self.phase, 0.0) + time.monotonic() - self.at}
        return {words: round(spent[phase], 3) for phase, words in STARTUP.items() if phase in spent}

    def watch(self, op) -> None:
        """Beat for the op of the schedule that the executor starts."""
        self.beat(op.kind, op=str(op))

    def close(self, error: Optional[BaseException] = None, code: int = 0) -> None:
        """Write the last beat, with the exit code and the error."""
        self._over.set()
        if self.file is None:
            return
        self._account(time.monotonic() - self.at)
        self._sum_up()
        why = "" if error is None else in_a_line(str(error)) or type(error).__name__
        why = why.encode("ascii", "replace").decode()
        self._write("", f', "ended": {code}, "why": {json.dumps(why)}')
        if self._thread is not None:
            self._thread.join(beat_files.LOOK)
            self._tell(last=True)
        self.file = None  # unmapped with its last reader: the thread may still look at it
        if self.stacks is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            self.stacks.close()

    def _account(self, seconds: float) -> None:
        """Add the duration of the phase that ends. The median is tracked by steps of a tenth, up or down."""
        name = self.phase
        self.totals[name] = self.totals.get(name, 0.0) + seconds
        usual = self.usual.get(name)
        self.usual[name] = seconds if usual is None else usual * 1.1 if seconds > usual else usual / 1.1

    def _sum_up(self) -> None:
        self.tail = json.dumps({name: round(total, 3) for name, total in self.totals.items()})

    def _write(self, op: str, more: str = "") -> None:
        self.count += 1
        text = (
            f'{self.head}, "count": {self.count}, "phase": "{self.phase}", "step": {self.step}, "since": {self.since}, '
            f'"op": "{op}", "usual": {self.usual.get(self.phase, 0.0):.4g}, "first_step": {self.first_step:.4g}, '
            f'"at": {time.time():.3f}, "seconds": {self.tail}{more}, "same": {self.count}}}'
        )
        self._put(text.encode().ljust(BEAT - 1)[: BEAT - 1] + b"\n", 0)

    def _put(self, text: bytes, at: int) -> None:
        self.file[at : at + len(text)] = text

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Mark that this rank is well, tell the supervisor how the node is, and serve each of its requests once."""
        done: set[str] = set()
        while not self._over.wait(beat_files.LOOK):
            self._mark_well()
            self._tell()
            for request in REQUESTS:
                if request not in done and (self.memory / request).exists():
                    done.add(request)
                    self._serve(request)

    def _mark_well(self) -> None:
        if (file := self.file) is not None:
            file[BEAT : BEAT + WELL] = f"{time.monotonic():{WELL}.3f}".encode()

    def _tell(self, last: bool = False) -> None:
        """Write the node's file and fetch requests, if this rank is the one that does so for its node. last: at its end"""
        with contextlib.suppress(OSError):  # the shared folder does not answer: the next message says more
            if self.memory == self.folder or not (last or beat_files.is_node_writer(self.memory, self.rank)):
                return
            for request in REQUESTS:
                if (self.folder / request).exists():
                    (self.memory / request).touch()
            beat_files.write_node(self.memory, self.folder, f"{node_name()}.{os.getppid()}")

    def _serve(self, request: str) -> None:
        if request == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        elif request == TRACE:
            if self.dump_trace is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    self.dump_trace()
        elif self.stacks is not None:
            faulthandler.dump_traceback(self.stacks, all_threads=True)
            if self.memory != self.folder:
                with contextlib.suppress(OSError):
                    shutil.copyfile(stacks_path(self.path), stacks_path(beat_path(self.folder, self.rank)))


def age() -> float:
    """Seconds since this process was started; 0 if the system does not report it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    ticks = process_start_ticks(os.getpid())
    if clock is None or not ticks:
        return 0.0
    return max(0.0, time.clock_gettime(clock) - ticks / os.sysconf("SC_CLK_TCK"))
