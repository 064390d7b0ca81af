# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: whether they live, when they began, that they end with their parent, and the memory that they
share. Needs no torch.
"""

import ctypes
import os
import signal
import tempfile
from pathlib import Path

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # prctl(PR_SET_PDEATHSIG, ...), prctl(PR_SET_CHILD_SUBREAPER, ...)


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def state(pid: int) -> str:
    """State of a process: R running, S sleeping, D in the kernel, T stopped, Z zombie, "" gone."""
    return next(iter(stat_of(pid)), "")


def process_start_ticks(pid: int) -> int:
    """Start of a process in ticks since boot, which tells it from a later one with the same pid; 0 if there is none."""
    fields = stat_of(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def exists(pid: int) -> bool:
    """Whether a process of this number exists. True if the system does not say."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed to free memory: in this control group, or else on this machine."""
    group = ""
    try:
        group = next(line[3:] for line in (root / "proc/self/cgroup").read_text().split("\n") if line.startswith("0::"))
    except (OSError, StopIteration):
        pass
    for path in (root / f"sys/fs/cgroup{group}/memory.events", root / "proc/vmstat"):
        try:
            return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill "))
        except (OSError, StopIteration, ValueError, IndexError):
            continue
    return 0


def shared_memory() -> Path:
    """A folder in this node's memory; of temporary files, if there is none that can be written to."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


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
