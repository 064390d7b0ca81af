# SPDX-License-Identifier: Apache-2.0
"""The processes of a job: all of them, also those in sessions of their own, and their end. Linux; needs no torch.

Launchers start workers in new sessions, so a signal to the job's process group does not reach them, and a stopped
process does not hear SIGTERM. The supervisor therefore adopts orphans (`adopt_orphans`): whatever a job ever started
stays its descendant, is found under /proc, and is ended one by one.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

from megatron.guard.heartbeat import Beat, machine, process_start_ticks

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # prctl(PR_SET_PDEATHSIG, ...), prctl(PR_SET_CHILD_SUBREAPER, ...)


def adopt_orphans() -> bool:
    """From now on this process becomes the parent of descendants whose parent ends. False where the system cannot."""
    return _prctl(_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGTERM) -> bool:
    """From now on this process gets a signal when its parent ends, however that happens: no job outlives its launcher.

    False where the system cannot.
    """
    return _prctl(_DEATH_SIGNAL, number)


def _prctl(what: int, value: int) -> bool:
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def descendants(pid: int) -> list[int]:
    """All processes below one, parents before children; dead ones that wait to be collected are left out."""
    children = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields and fields[0] != "Z":
            children[int(fields[1])].append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = sorted(children[todo.pop(0)])
        found += below
        todo += below
    return found


def children(pid: int) -> list[int]:
    """The processes directly below one; dead ones that wait to be collected are left out."""
    found = [(int(entry.name), _stat(int(entry.name))) for entry in Path("/proc").glob("[0-9]*")]
    return sorted(child for child, fields in found if fields and fields[0] != "Z" and int(fields[1]) == pid)


def state(pid: int) -> str:
    """R running, S sleeping, D in the kernel, T stopped, Z dead and not collected, "" gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def send(pid: int, number: int) -> bool:
    """Signal a process; False if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        return True
    return False


def is_gone(beat: Beat) -> bool:
    """Whether a rank's process was one of this machine, and is no longer there."""
    return beat.machine == machine() and (process_start_ticks(beat.pid) != beat.born or state(beat.pid) == "Z")


def alive_here(beat: Beat) -> bool:
    """Whether a rank's process is one of this machine, and has not ended."""
    return beat.ended is None and beat.machine == machine() and not is_gone(beat)


def end_descendants(of: int, waited_for: int = 0, grace: float = 3.0, deadline: float = 10.0) -> list[int]:
    """End all processes below one; returns those that would not go. `waited_for`: a child whose exit code is wanted.

    SIGTERM first, for those that clean up; after `grace` seconds SIGKILL, which reaches stopped ones as well. Children
    that a dying process leaves behind are found again.
    """
    start = time.monotonic()
    asked: set[int] = set()
    while True:
        collect(of, waited_for)
        left = descendants(of)
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


def collect(of: int, but: int) -> None:
    """Take note of the death of adopted children, whose exit codes nobody waits for; `but`: one that somebody does."""
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields and fields[0] == "Z" and int(fields[1]) == of == os.getpid() and int(entry.name) != but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(entry.name), os.WNOHANG)
