# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: a small file per rank with its present step and phase, readable at any time, also when the rank hangs.

    heartbeat = Heartbeat("/dev/shm/job", rank=3)
    heartbeat.beat("data", step=17)      # about 3 microseconds: one pwrite
    ...
    for beat in read_beats("/dev/shm/job"): print(beat.rank, beat.step, beat.phase, beat.op, beat.group)

The file is one JSON object of a fixed length, rewritten in place, followed by the name of the process group of the last
collective. Without a folder nothing is written, but the time of each phase is still counted. SIGUSR2 makes a rank write
the stacks of its threads to a file next to the heartbeat, even when it hangs. A supervisor on another machine cannot send
signals: it creates a file in the folder (`ask`), and a thread of the rank checks for this file. Needs no torch.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Optional

from megatron.errors import in_a_line, node_name
from megatron.storage.processes import process_start_ticks

SIZE = 2048  # bytes of a heartbeat file
GROUP = 64  # bytes at its end, for the name of a group
LOOK = 2.0  # seconds between two checks for requests of a supervisor on another machine
STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
STACKS, STOP = "stacks.wanted", "stop.wanted"  # files that such a supervisor creates
STARTUP = dict(start="imports", join="rendezvous", model="model", load="checkpoint", index="data")  # phases -> words


@dataclass(frozen=True)
class Beat:
    """The content of a heartbeat file."""

    rank: int
    host: str
    pid: int
    born: int  # start of the process in kernel ticks: distinguishes it from a later one with the same pid
    count: int  # beats so far: a rank is silent while this does not change
    phase: str
    step: int  # the present one, from 1; 0 before the first
    since: int = 0  # the step that this process began with
    op: str = ""  # of the pipeline's schedule: F3 is the forward pass of micro-batch 3
    usual: float = 0.0  # median seconds between beats of this phase so far
    seconds: dict = field(default_factory=dict)  # phase -> total, up to the last change of step
    first_step: float = 0.0  # seconds of the first step
    place: str = ""  # on the axes of the grid: "dp 1 pp 0 tp 2"
    machine: str = ""  # for `pid`: hosts can share a name, and containers a host
    slurm_step: str = ""  # JOB.STEP of the process
    group: str = ""  # of the last collective or message: "dp group 1"
    at: float = 0.0  # Unix seconds, by the clock of its node
    ended: Optional[int] = None  # exit code
    why: str = ""  # the first line of the error that ended it


class Heartbeat:
    """A rank's heartbeat. All methods are cheap."""

    def __init__(self, folder: Optional[str] = None, rank: int = 0):
        self.file, self.stacks = None, None
        self.count, self.step, self.since, self.phase, self.group = 0, 0, 0, "start", ""
        self.at = time.monotonic() - age()  # counts the imports
        self.usual: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self.first_step, self._began = 0.0, 0.0
        self._over = threading.Event()
        if folder is None:
            return
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = beat_path(self.folder, rank)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        if STACKS_SIGNAL is not None:
            self.stacks = stacks_path(self.path).open("wb", buffering=0)
            if (
                signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL
                and threading.current_thread() is threading.main_thread()
            ):
                signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # one that comes after `close` does not end the rank
            faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)
        who = dict(
            rank=rank, host=node_name(), pid=os.getpid(), born=process_start_ticks(os.getpid()), machine=machine()
        )
        words = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        if all(words):
            who["slurm_step"] = ".".join(words)
        self.head = json.dumps(who)[:-1]
        self.tail = "{}"
        self.beat("start")

    def listen(self) -> None:
        """Start a thread that serves requests of a supervisor on another machine; `close` ends it."""
        if self.file is not None:
            threading.Thread(target=self._serve_requests, name="heartbeat", daemon=True).start()

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
        os.close(self.file)
        self.file = None
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
        room = SIZE - GROUP - 1
        self._put(text.encode().ljust(room)[:room] + b"\n", 0)

    def _put(self, text: bytes, at: int) -> None:
        try:
            os.pwrite(self.file, text, at)
        except OSError as error:  # training continues without a heartbeat when the disk is full
            print(f"warning: {self.path} is no longer written: {error}", file=sys.stderr, flush=True)
            os.close(self.file)
            self.file = None

    def _serve_requests(self) -> None:
        """The thread: sync the heartbeat for other machines, and serve each of their requests once."""
        done = set()
        while not self._over.wait(LOOK):
            with contextlib.suppress(OSError, ValueError, TypeError):  # closed at this moment
                os.fsync(self.file)
                for request in (STACKS, STOP):
                    if request not in done and (self.folder / request).exists():
                        done.add(request)
                        self._serve(request)

    def _serve(self, request: str) -> None:
        if request == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.stacks is not None:
            faulthandler.dump_traceback(self.stacks, all_threads=True)
            os.fsync(self.stacks.fileno())


def beat_path(folder: Path, rank: int) -> Path:
    """Path of the heartbeat of a rank."""
    return folder / f"rank_{rank:05d}.beat"


def stacks_path(beat: Path) -> Path:
    """Path of the file to which the rank of a heartbeat file writes its stacks."""
    return beat.with_suffix(".stacks")


def read_beats(folder: Path) -> list[Beat]:
    """The heartbeats of all ranks, in rank order. A file in the middle of a change is read again."""
    beats = [read_beat(path) for path in sorted(Path(folder).glob("rank_*.beat"))]
    return [beat for beat in beats if beat is not None]


def ask(folder: Path, request: str) -> None:
    """Request STACKS or STOP from all ranks with a heartbeat in this folder; they check every `LOOK` seconds."""
    (Path(folder) / request).touch()


def clear(folder: Path) -> None:
    """Remove a job's heartbeats, stacks and requests from its folder."""
    for pattern in ("rank_*.beat", "rank_*.stacks", STACKS, STOP):
        for path in Path(folder).glob(pattern):
            path.unlink(missing_ok=True)


def read_beat(path: Path, tries: int = 50) -> Optional[Beat]:
    """One rank's heartbeat; None when it cannot be read."""
    for _ in range(tries):
        try:
            raw = path.read_bytes()
            group = raw[SIZE - GROUP :].decode("ascii", "replace").strip(" \n\0")
            record = json.loads(raw[: SIZE - GROUP])
            if record.pop("same", record["count"]) == record["count"]:  # else it was read during a change
                return Beat(**record, group=group)
        except OSError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        time.sleep(0.002)
    return None


def age() -> float:
    """Seconds since this process was started; 0 if the system does not report it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    ticks = process_start_ticks(os.getpid())
    if clock is None or not ticks:
        return 0.0
    return max(0.0, time.clock_gettime(clock) - ticks / os.sysconf("SC_CLK_TCK"))


@cache
def machine() -> str:
    """An id shared by the processes that see each other under the same pids: kernel boot id and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:13]}/{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"
    except OSError:
        return socket.gethostname()
