# SPDX-License-Identifier: Apache-2.0
"""Start a job, and signal, find and end all its processes, also those in sessions of their own. Linux; needs no torch.

Launchers start workers in new sessions, so a signal to the job's process group does not reach them, and a stopped
process does not receive SIGTERM. The supervisor therefore adopts orphans (`adopt_orphans`): every process that a job
started stays its descendant, is listed from /proc, and is ended one by one.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import BinaryIO

from megatron.guard.beat_files import Beat, machine
from megatron.storage.processes import die_with_parent, process_start_ticks, stat_of, state


def start_job(words: list[str], output: BinaryIO) -> subprocess.Popen:
    """Start a command in a session of its own, which Ctrl-C does not reach. output: for all that it and its ranks print

    Its first process ends with this one, and ignores SIGUSR1: SLURM may send that to every process of a step, and it would
    end torchrun before its ranks have saved. Ranks set their own handler.
    """

    def as_launcher() -> None:
        die_with_parent()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    streams = dict(stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    return subprocess.Popen(words, start_new_session=True, preexec_fn=as_launcher, **streams)


def no_processes() -> Collection[int]:
    """No processes."""
    return ()


def descendants(pid: int, spared: Callable[[], Collection[int]] = no_processes) -> list[int]:
    """All descendants of a process, parents before children, without zombies.

    spared: returns the processes to leave out, with their descendants. It is called after all were listed
    """
    children = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        fields = stat_of(int(entry.name))
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
    stats = [(int(entry.name), stat_of(int(entry.name))) for entry in Path("/proc").glob("[0-9]*")]
    return sorted(child for child, fields in stats if fields and fields[0] != "Z" and int(fields[1]) == pid)


def send(pid: int, number: int) -> bool:
    """Send a signal to a process; False if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        return True
    return False


def signal_groups(pids: Iterable[int], number: int) -> None:
    """Send a signal to the process groups of processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def is_gone(beat: Beat) -> bool:
    """Whether a rank's process no longer exists: it ran on this machine, or another rank of its node says so."""
    return (
        beat.gone
        or beat.machine == machine()
        and (process_start_ticks(beat.pid) != beat.born or state(beat.pid) == "Z")
    )


def signal_of_zombie(pid: int) -> int:
    """The signal that killed a process whose parent has not read its exit code yet; 0: none, or unknown."""
    fields = stat_of(pid)
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
        fields = stat_of(int(entry.name))
        if fields and fields[0] == "Z" and int(fields[1]) == of == os.getpid() and int(entry.name) not in but():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(entry.name), os.WNOHANG)
