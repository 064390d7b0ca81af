# SPDX-License-Identifier: Apache-2.0
"""Where heartbeats lie, and how they are read. Needs no torch.

A rank writes its heartbeat into a file of its node's memory, which it has mapped: no system call. If `--heartbeat-dir`
lies in memory itself (a supervisor on one machine), that is the file. Else the file is in a folder of /dev/shm, and one
rank of each node (the lowest that is well) writes those of all its ranks to one file of `--heartbeat-dir` every `LOOK`
seconds:

    --heartbeat-dir (all nodes see it)       node_n7.4242.beats    stacks.wanted    rank_00003.stacks
    /dev/shm/heartbeats-of-MACHINE-FOLDER.4242.99  (of node n7)    rank_00002.beat  rank_00003.beat ...

Ranks of this machine are read from memory, others from the files of their nodes.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Optional

from megatron.errors import node_name
from megatron.storage.processes import process_start_ticks, shared_memory, state

SIZE = 2048  # bytes of a heartbeat file: the beat, when the thread of the rank was well, and the name of a group
WELL, GROUP = 16, 64  # bytes of these two
BEAT = SIZE - WELL - GROUP
LOOK = 2.0  # seconds between two messages of a node, and between two checks for requests
UNWELL = 3  # times LOOK without a mark: the rank is not well
LEFT = 60.0  # seconds without a message of a node: what lies there is of an earlier attempt
STACKS, STOP, TRACE = REQUESTS = "stacks.wanted", "stop.wanted", "trace.wanted"  # files that a supervisor creates
END = "end"  # last line of a node's file
MEMORY = ("tmpfs", "ramfs", "devtmpfs")  # file systems


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
    memory: str = ""  # folder of its node's memory
    slurm_step: str = ""  # JOB.STEP of the process
    group: str = ""  # of the last collective or message: "dp group 1"
    at: float = 0.0  # Unix seconds, by the clock of its node
    ended: Optional[int] = None  # exit code
    why: str = ""  # the first line of the error that ended it
    records: bool = False  # its collectives, and can dump them
    gone: bool = False  # another rank of its node saw that the process no longer exists

    @property
    def process(self) -> tuple[str, int, int]:
        """Its process, which no other one has: machine, pid, start."""
        return self.machine, self.pid, self.born


# ---- places ----------------------------------------------------------------------------------------------------------


def beat_path(folder: Path, rank: int) -> Path:
    """Path of the heartbeat of a rank."""
    return folder / f"rank_{rank:05d}.beat"


def stacks_path(beat: Path) -> Path:
    """Path of the file to which the rank of a heartbeat file writes its stacks."""
    return beat.with_suffix(".stacks")


@cache
def machine() -> str:
    """An id shared by the processes that see each other under the same pids: kernel boot id and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:13]}/{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"
    except OSError:
        return socket.gethostname()


def in_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether a folder lies in this node's memory, so that its files can be mapped and writing to them never waits."""
    try:
        lines = [line.split(" - ") for line in mounts.read_text().splitlines()]
        kinds = {Path(before.split()[4]): after.split()[0] for before, after in lines}
    except (OSError, ValueError, IndexError):
        return False
    folder = folder.resolve()
    return next((kinds[place] in MEMORY for place in (folder, *folder.parents) if place in kinds), False)


def memory_of(folder: Path, who: Optional[str] = None) -> Path:
    """The folder in this node's memory for the heartbeats of the ranks that this process's parent has started."""
    if in_memory(folder):
        return folder
    parent = os.getppid()
    return shared_memory() / f"{_prefix(folder, who or machine())}.{parent}.{process_start_ticks(parent)}"


def memories_of(folder: Path) -> list[Path]:
    """All folders in this node's memory with heartbeats for a folder that does not lie there."""
    return sorted(shared_memory().glob(f"{_prefix(folder, machine())}.*"))


def remove_left_memories(who: str) -> None:
    """Remove the folders in this node's memory whose launcher has ended."""
    for path in shared_memory().glob(f"{_prefix(None, who)}*"):
        remove_if_left(path, path.name.split(".")[-2:])


def remove_if_left(path: Path, owner: list[str]) -> None:
    """Remove a folder whose name has the pid of its owner and when that started, unless this process still runs."""
    if len(owner) == 2 and all(map(str.isdecimal, owner)) and process_start_ticks(int(owner[0])) != int(owner[1]):
        shutil.rmtree(path, ignore_errors=True)


def _prefix(folder: Optional[Path], who: str) -> str:
    return f"heartbeats-of-{_short(who)}-{_short(os.path.realpath(folder)) if folder else ''}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


# ---- reading ---------------------------------------------------------------------------------------------------------


class BeatReader:
    """Reads the heartbeats of a job again and again. A node's file is parsed only if it has changed.

    earlier: processes (`Beat.process`) whose heartbeats are of an earlier attempt, and are left out
    """

    def __init__(self, folder: Path, earlier: Collection[tuple] = ()):
        self.folder, self.earlier = Path(folder), earlier
        self.known: dict[Path, tuple[bytes, list[Beat]]] = {}  # file of a node -> its content
        self.heard: dict[Path, tuple[int, float]] = {}  # file of a node -> when it was written; when that was seen

    def read(self) -> list[Beat]:
        """The heartbeats of all ranks, in rank order, the later of two of a rank: those of this machine as they are now."""
        found: dict[int, Beat] = {}
        for path in _matching(self.folder, "node_", ".beats"):
            for beat in self._of_node(path):
                if beat.process not in self.earlier and (beat.rank not in found or beat.at > found[beat.rank].at):
                    found[beat.rank] = beat
        for place in (self.folder, *memories_of(self.folder)):
            for beat in filter(None, map(read_beat, _matching(place, "rank_", ".beat"))):
                if beat.process not in self.earlier:
                    found[beat.rank] = beat
        return [found[rank] for rank in sorted(found)]

    def silent_nodes(self, since: float) -> list[tuple[list[Beat], float]]:
        """(ranks, seconds without a message) of each node that was there and has written none since a time (monotonic).

        A node whose last message says that one of its ranks has ended is none of these: its launcher ends the others.
        """
        now, silent = time.monotonic(), []
        for path, (_, at) in self.heard.items():
            beats = [beat for beat in self.known.get(path, (b"", []))[1] if beat.process not in self.earlier]
            alive = beats and all(beat.ended is None and not beat.gone for beat in beats)
            if alive and at < since and beats[0].machine != machine():
                silent.append((beats, now - at))
        return silent

    def _of_node(self, path: Path) -> list[Beat]:
        raw, beats = self.known.get(path, (b"", []))
        try:
            with path.open("rb") as file:
                written, now = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except OSError:
            return beats
        if self.heard.get(path, (None,))[0] != written:
            self.heard[path] = written, time.monotonic()
        text, end, _ = now.partition(f"\n{END}\n".encode())
        if end and text != raw:
            parsed = [_parsed(*line.rsplit(b"\t", 1)) for line in text.splitlines() if b"\t" in line]
            self.known[path] = text, [beat for beat in parsed if beat is not None]
        return self.known.get(path, (raw, beats))[1]


def read_beats(folder: Path) -> list[Beat]:
    """The heartbeats of all ranks, in rank order. A file in the middle of a change is read again."""
    return BeatReader(folder).read()


def read_beat(path: Path, tries: int = 50) -> Optional[Beat]:
    """One rank's heartbeat; None when it cannot be read."""
    for _ in range(tries):
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        if (beat := _parsed(raw[:BEAT], raw[SIZE - GROUP :])) is not None:
            return beat
        time.sleep(0.002)
    return None


def _parsed(raw: bytes, group: bytes) -> Optional[Beat]:
    try:
        record = json.loads(raw)
        if record.pop("same", record["count"]) == record["count"]:  # else it was read during a change
            return Beat(**record, group=group.decode("ascii", "replace").strip(" \n\0"))
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    return None


def _matching(folder: Path, start: str, end: str) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.startswith(start) and name.endswith(end))
    except OSError:
        return []


# ---- messages of a node, and requests --------------------------------------------------------------------------------


def is_node_writer(memory: Path, rank: int) -> bool:
    """Whether no lower rank of this node is well, by the marks that their threads leave: then this one writes."""
    for path in _matching(memory, "rank_", ".beat"):
        if path.name >= beat_path(memory, rank).name:
            return True
        try:
            well = float(path.read_bytes()[BEAT : BEAT + WELL])
        except (OSError, ValueError):
            continue
        if abs(time.monotonic() - well) < UNWELL * LOOK:  # a mark is rounded, and may be ahead
            return False
    return True


def write_node(memory: Path, folder: Path, name: str) -> None:
    """Write the heartbeats of this node's ranks to its file in the shared folder, in one piece, one rank at a time.

    A rank that is stopped while it writes does not keep the others from it: they wait as long as for one that is not well.
    """
    with (memory / "writing").open("w") as lock:
        deadline = time.monotonic() + UNWELL * LOOK
        while not _locked(lock) and time.monotonic() < deadline:
            time.sleep(LOOK / 20)
        _write_node(memory, folder / f"node_{name}.beats")


def _locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _write_node(memory: Path, to: Path) -> None:
    lines = []
    for path in _matching(memory, "rank_", ".beat"):
        raw = path.read_bytes()
        beat = _parsed(raw[:BEAT], b"")
        if beat is None:  # in the middle of a change: the next message has it
            continue
        text = raw[:BEAT].strip(b" \n\0")
        if beat.ended is None and (state(beat.pid) == "Z" or process_start_ticks(beat.pid) != beat.born):
            text = text[:-1] + b', "gone": true}'
        lines.append(text + b"\t" + raw[SIZE - GROUP :].strip(b" \n\0"))
    file = os.open(to, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(file, b"\n".join([*lines, END.encode(), b""]))
    finally:
        os.close(file)  # network file systems send it now


def ask(folder: Path, request: str) -> None:
    """Request STACKS, STOP or TRACE from all ranks with a heartbeat in this folder; they check every `LOOK` seconds."""
    (Path(folder) / request).touch()


def clear(folder: Path) -> None:
    """Remove heartbeats, stacks and requests of earlier attempts from a job's folder, and from this node's memory.

    Messages of other nodes stay, unless they are old: those may have a supervisor of their own, which has not ended.
    """
    folder = Path(folder)
    for pattern in ("rank_*.beat", "rank_*.stacks", *REQUESTS):
        remove(folder.glob(pattern))
    for path in _matching(folder, "node_", ".beats"):
        beats = BeatReader(folder)._of_node(path)
        if not beats or beats[0].machine == machine() or seconds_since_written(path) > LEFT:
            remove([path])
    for place in memories_of(folder):
        shutil.rmtree(place, ignore_errors=True)


def seconds_since_written(path: Path) -> float:
    """Seconds since a file was written, by the clock of the machine that keeps it."""
    now = path.with_name(f".now.{os.getpid()}.{node_name()}.{threading.get_ident()}")
    try:
        now.touch()
        return now.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        now.unlink(missing_ok=True)


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
