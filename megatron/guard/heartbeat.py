# SPDX-License-Identifier: Apache-2.0
"""What each rank is doing right now, in a small file per rank that anybody can read, also when the rank is stuck.

    heartbeat = Heartbeat("/dev/shm/job", rank=3)
    heartbeat.beat("data", step=17)      # about 3 microseconds: one pwrite
    ...
    for beat in read_beats("/dev/shm/job"): print(beat.rank, beat.step, beat.phase, beat.op, beat.group)

The file is one JSON object of a fixed length, rewritten in place, and behind it the name of the group whose collective
the rank has entered last. Without a folder nothing is written; the time of each phase is counted all the same. SIGUSR2
makes a rank with a heartbeat write the stacks of its threads beside it, whatever it hangs in; a supervisor on another
machine, whose signals do not reach, leaves a file in the folder (`ask`) that a thread of the rank looks for.
Needs no torch.
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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Optional

SIZE = 2048  # bytes of a heartbeat file
GROUP = 64  # of them at the end, for the name of a group
LOOK = 2.0  # seconds between two looks for what a supervisor on another machine wants
STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
STACKS, STOP = "stacks.wanted", "stop.wanted"  # files by which such a supervisor asks
STARTUP = dict(start="imports", join="rendezvous", model="model", load="checkpoint", index="data")  # phases -> words


@dataclass(frozen=True)
class Beat:
    """The latest word of a rank."""

    rank: int
    host: str
    pid: int
    born: int  # start of the process in kernel ticks: tells it from a later one with the same pid
    count: int  # beats so far: silence is a count that stands still
    phase: str
    step: int  # being worked on, from 1; 0 before the first
    since: int = 0  # the step that this process began with
    op: str = ""  # of the pipeline's schedule: F3 is the forward pass of micro-batch 3
    usual: float = 0.0  # median seconds between beats of this phase, as far as seen
    seconds: dict = field(default_factory=dict)  # phase -> total, up to the last change of step
    first_step: float = 0.0  # seconds of the first step
    place: str = ""  # on the axes of the grid: "dp 1 pp 0 tp 2"
    machine: str = ""  # whose process numbers are meant: hosts can share a name, and containers a host
    slurm_step: str = ""  # JOB.STEP that the process is a part of
    group: str = ""  # of the collective, or message, that it entered last: "dp group 1"
    ended: Optional[int] = None  # exit code
    why: str = ""  # the first line of what ended it


class Heartbeat:
    """A rank's side. All methods are cheap."""

    def __init__(self, folder: Optional[str] = None, rank: int = 0):
        self.file, self.stacks = None, None
        self.count, self.step, self.since, self.phase, self.group = 0, 0, 0, "start", ""
        self.at = time.monotonic() - age()  # the imports came before this
        self.usual: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self.first_step, self._began = 0.0, 0.0
        self._over = threading.Event()
        if folder is None:
            return
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"rank_{rank:05d}.beat"
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        if STACKS_SIGNAL is not None:
            self.stacks = stacks_path(self.path).open("wb", buffering=0)
            faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)
        who = dict(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            born=process_start_ticks(os.getpid()),
            machine=machine(),
        )
        words = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        if all(words):
            who["slurm_step"] = ".".join(words)
        self.head = json.dumps(who)[:-1]
        self.tail = "{}"
        self.beat("start")

    def listen(self) -> None:
        """From now on a thread does what a supervisor on another machine asks for; `close` ends it."""
        if self.file is not None:
            threading.Thread(target=self._answer, name="heartbeat", daemon=True).start()

    def note_place(self, place: dict[str, int]) -> None:
        """Coordinates of the rank, for whoever reads its heartbeat."""
        if self.file is not None:
            words = " ".join(f"{axis} {place[axis]}" for axis in ("dp", "pp", "cp", "tp") if axis in place)
            self.head += f', "place": "{words}"'

    def beat(self, phase: str, step: Optional[int] = None, op: str = "") -> None:
        """Enter a phase, or the next piece of it."""
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

    def enter_group(self, group: str) -> None:
        """About to wait for the ranks of a group: less than a microsecond."""
        self.group = group
        if self.file is not None:
            self._put(group.encode("ascii", "replace")[:GROUP].ljust(GROUP), SIZE - GROUP)

    @property
    def startup(self) -> dict[str, float]:
        """Seconds that went by before the first step, by what they went into; the present phase up to now."""
        spent = {**self.totals, self.phase: self.totals.get(self.phase, 0.0) + time.monotonic() - self.at}
        return {words: round(spent[phase], 3) for phase, words in STARTUP.items() if phase in spent}

    def watch(self, op) -> None:
        """Beat for an op of the schedule, as the executor comes to it."""
        self.beat(op.kind, op=str(op))

    def close(self, error: Optional[BaseException] = None, code: int = 0) -> None:
        """The last word: how it ended."""
        self._over.set()
        if self.file is None:
            return
        self._account(time.monotonic() - self.at)
        self._sum_up()
        why = (str(error).splitlines() or [type(error).__name__])[0] if error is not None else ""
        why = why[:200].encode("ascii", "replace").decode()
        self._write("", f', "ended": {code}, "why": {json.dumps(why)}')
        os.close(self.file)
        self.file = None
        if self.stacks is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            self.stacks.close()

    def _account(self, seconds: float) -> None:
        """The phase that ends took so long. The median is tracked by steps of a tenth, up or down."""
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
            f'"seconds": {self.tail}{more}, "same": {self.count}}}'
        )
        room = SIZE - GROUP - 1
        self._put(text.encode().ljust(room)[:room] + b"\n", 0)

    def _put(self, text: bytes, at: int) -> None:
        try:
            os.pwrite(self.file, text, at)
        except OSError as error:  # a full disk must not end a training run for the sake of its heartbeat
            print(f"warning: {self.path} is no longer written: {error}", file=sys.stderr, flush=True)
            os.close(self.file)
            self.file = None

    def _answer(self) -> None:
        """Of the thread: let other machines see the heartbeat, and do once what they ask for."""
        done = set()
        while not self._over.wait(LOOK):
            with contextlib.suppress(OSError, ValueError, TypeError):  # closed at this moment
                os.fsync(self.file)
                for wish in (STACKS, STOP):
                    if wish not in done and (self.folder / wish).exists():
                        done.add(wish)
                        self._grant(wish)

    def _grant(self, wish: str) -> None:
        if wish == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.stacks is not None:
            faulthandler.dump_traceback(self.stacks, all_threads=True)
            os.fsync(self.stacks.fileno())


def stacks_path(beat: Path) -> Path:
    """Where the rank of a heartbeat file writes its stacks."""
    return beat.with_suffix(".stacks")


def read_beats(folder: Path) -> list[Beat]:
    """The latest words of all ranks, in rank order. A file in the middle of a change is read again."""
    beats = [read_beat(path) for path in sorted(Path(folder).glob("rank_*.beat"))]
    return [beat for beat in beats if beat is not None]


def ask(folder: Path, wish: str) -> None:
    """Ask all ranks with a heartbeat in this folder for STACKS or STOP; they look every `LOOK` seconds."""
    (Path(folder) / wish).touch()


def clear(folder: Path) -> None:
    """Remove what a job has left in its folder of heartbeats, and what it was asked for."""
    for pattern in ("rank_*.beat", "rank_*.stacks", STACKS, STOP):
        for path in Path(folder).glob(pattern):
            path.unlink(missing_ok=True)


def read_beat(path: Path, tries: int = 50) -> Optional[Beat]:
    """One rank's word; None when it cannot be read."""
    for _ in range(tries):
        try:
            raw = path.read_bytes()
            group = raw[SIZE - GROUP :].decode("ascii", "replace").strip(" \n\0")
            found = json.loads(raw[: SIZE - GROUP])
            if found.pop("same", found["count"]) == found["count"]:  # else its ends are of two beats
                return Beat(**found, group=group)
        except OSError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        time.sleep(0.002)
    return None


def process_start_ticks(pid: int) -> int:
    """When a process started, in ticks since the machine did; 0 when there is no such process (or no /proc)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def age() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    ticks = process_start_ticks(os.getpid())
    if clock is None or not ticks:
        return 0.0
    return max(0.0, time.clock_gettime(clock) - ticks / os.sysconf("SC_CLK_TCK"))


@cache
def machine() -> str:
    """What processes have in common that see each other under the same numbers: a kernel, and a space of numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:13]}/{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"
    except OSError:
        return socket.gethostname()
