# SPDX-License-Identifier: Apache-2.0
"""What each rank is doing right now, in a small file per rank that anybody can read, also when the rank is stuck.

    heart = Heartbeat("/dev/shm/job", rank=3)
    heart.beat("data", step=17)          # about 3 microseconds: one pwrite
    ...
    for beat in read_beats("/dev/shm/job"): print(beat.rank, beat.step, beat.phase, beat.op)

The file is one JSON object of a fixed length, rewritten in place. Without a folder nothing is written. SIGUSR2 makes a
rank with a heartbeat write the stacks of its threads beside it, whatever it hangs in. Needs no torch.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

SIZE = 1024  # bytes of a heartbeat file
STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)


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
    place: str = ""  # on the axes of the grid: "dp 1 pp 0 tp 2"
    ended: Optional[int] = None  # exit code
    why: str = ""  # the first line of what ended it


class Heartbeat:
    """A rank's side. All methods are cheap, and do nothing without a folder."""

    def __init__(self, folder: Optional[str] = None, rank: int = 0):
        self.file, self.stacks = None, None
        if folder is None:
            return
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        self.path = where / f"rank_{rank:05d}.beat"
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        if STACKS_SIGNAL is not None:
            self.stacks = stacks_path(self.path).open("wb", buffering=0)
            faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)
        self.head = json.dumps(dict(rank=rank, host=socket.gethostname(), pid=os.getpid(), born=born(os.getpid())))[:-1]
        self.count, self.step, self.since, self.phase, self.at = 0, 0, 0, "start", time.monotonic()
        self.usual: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self.tail = "{}"
        self.beat("start")

    def say_place(self, place: dict[str, int]) -> None:
        """Coordinates of the rank, for whoever reads its heartbeat."""
        if self.file is not None:
            words = " ".join(f"{axis} {place[axis]}" for axis in ("dp", "pp", "cp", "tp") if axis in place)
            self.head += f', "place": "{words}"'

    def beat(self, phase: str, step: Optional[int] = None, op: str = "") -> None:
        """Enter a phase, or the next piece of it."""
        if self.file is None:
            return
        now = time.monotonic()
        self._account(now - self.at)
        self.at, self.phase = now, phase
        if step is not None and step != self.step:
            self.step, self.since = step, self.since or step
            self.tail = json.dumps({name: round(total, 3) for name, total in self.totals.items()})
        self._write(op)

    def watch(self, op) -> None:
        """Beat for an op of the schedule, as the executor comes to it."""
        self.beat(op.kind, op=str(op))

    def close(self, error: Optional[BaseException] = None, code: int = 0) -> None:
        """The last word: how it ended."""
        if self.file is None:
            return
        self._account(time.monotonic() - self.at)
        self.tail = json.dumps({name: round(total, 3) for name, total in self.totals.items()})
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

    def _write(self, op: str, more: str = "") -> None:
        self.count += 1
        text = (
            f'{self.head}, "count": {self.count}, "phase": "{self.phase}", "step": {self.step}, "since": {self.since}, '
            f'"op": "{op}", "usual": {self.usual.get(self.phase, 0.0):.4g}, "seconds": {self.tail}{more}}}'
        )
        try:
            os.pwrite(self.file, text.encode().ljust(SIZE - 1)[: SIZE - 1] + b"\n", 0)
        except OSError as error:  # a full disk must not end a training run for the sake of its heartbeat
            print(f"warning: {self.path} is no longer written: {error}", file=sys.stderr, flush=True)
            os.close(self.file)
            self.file = None


def stacks_path(beat: Path) -> Path:
    """Where the rank of a heartbeat file writes its stacks."""
    return beat.with_suffix(".stacks")


def read_beats(folder: Path) -> list[Beat]:
    """The latest words of all ranks, in rank order. A file in the middle of a change is read again."""
    beats = [read_beat(path) for path in sorted(Path(folder).glob("rank_*.beat"))]
    return [beat for beat in beats if beat is not None]


def read_beat(path: Path, tries: int = 5) -> Optional[Beat]:
    """One rank's word; None when it cannot be read."""
    for _ in range(tries):
        try:
            return Beat(**json.loads(path.read_bytes()))
        except OSError:
            return None
        except (ValueError, TypeError):
            time.sleep(0.001)
    return None


def born(pid: int) -> int:
    """When a process started, in ticks since the machine did; 0 when there is no such process (or no /proc)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
