# SPDX-License-Identifier: Apache-2.0
"""Find and end all processes of a job, also those in sessions of their own. Linux; needs no torch.

Launchers start workers in new sessions, so a signal to the job's process group does not reach them, and a stopped
process does not receive SIGTERM. The supervisor therefore adopts orphans (`adopt_orphans`): every process that a job
started stays its descendant, is listed from /proc, and is ended one by one.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

from megatron.guard.heartbeat import Beat, machine, process_start_ticks

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # prctl(PR_SET_PDEATHSIG, ...), prctl(PR_SET_CHILD_SUBREAPER, ...)


def adopt_orphans() -> bool:
    """Make this process the parent of descendants whose own parent ends. False if the system cannot."""
    return _prctl(_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGTERM) -> bool:
    """Let the kernel signal this process when its parent ends: no job outlives its launcher. False if the system cannot."""
    return _prctl(_DEATH_SIGNAL, number)


def _prctl(what: int, value: int) -> bool:
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def no_processes() -> Collection[int]:
    """No processes."""
    return ()


def descendants(pid: int, spared: Callable[[], Collection[int]] = no_processes) -> list[int]:
    """All descendants of a process, parents before children, without zombies.

    spared: returns the processes to leave out, with their descendants. It is called after all were listed
    """
    children = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields and fields[0] != "Z":
            children[int(fields[1])].append(int(entry.name))
    result, todo, out = [], [pid], spared()
    while todo:
        below = sorted(set(children[todo.pop(0)]).difference(out))
        result += below
        todo += below
    return result


def children(pid: int) -> list[int]:
    """The direct children of a process, without zombies."""
    stats = [(int(entry.name), _stat(int(entry.name))) for entry in Path("/proc").glob("[0-9]*")]
    return sorted(child for child, fields in stats if fields and fields[0] != "Z" and int(fields[1]) == pid)


def state(pid: int) -> str:
    """State of a process: R running, S sleeping, D in the kernel, T stopped, Z zombie, "" gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def send(pid: int, number: int) -> bool:
    """Send a signal to a process; False if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        return True
    return False


def is_gone(beat: Beat) -> bool:
    """Whether a rank's process ran on this machine and no longer exists."""
    return beat.machine == machine() and (process_start_ticks(beat.pid) != beat.born or state(beat.pid) == "Z")


def signal_of_zombie(pid: int) -> int:
    """The signal that killed a process whose parent has not read its exit code yet; 0: none, or unknown."""
    fields = _stat(pid)
    return int(fields[49]) & 0x7F if len(fields) > 49 and fields[0] == "Z" else 0


def alive_here(beat: Beat) -> bool:
    """Whether a rank's process runs on this machine."""
    return beat.ended is None and beat.machine == machine() and not is_gone(beat)


def end_descendants(
    of: int,
    waited_for: int = 0,
    spared: Callable[[], Collection[int]] = no_processes,
    grace: float = 3.0,
    deadline: float = 10.0,
) -> list[int]:
    """End all descendants of a process but the `spared`; return those that still run.

    waited_for: a child whose exit code is read later
    Sends SIGTERM first, so that processes can clean up, and after `grace` seconds SIGKILL, which also ends stopped
    processes. The list is read again each time, because ended processes leave orphans.
    """
    start = time.monotonic()
    asked: set[int] = set()
    while True:
        reap(of, lambda: {waited_for, *spared()})
        left = descendants(of, spared)
        passed = time.monotonic() - start
        if not left or passed > grace + deadline:
            return left
        for pid in left:
            if passed >= grace:
                send(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                send(pid, signal.SIGTERM)
        time.sleep(0.05)


def reap(of: int, but: Callable[[], Collection[int]]) -> None:
    """Reap adopted zombies, except those that `but` returns: children whose exit codes are read later."""
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields and fields[0] == "Z" and int(fields[1]) == of == os.getpid() and int(entry.name) not in but():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(entry.name), os.WNOHANG)
