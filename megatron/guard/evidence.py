# SPDX-License-Identifier: Apache-2.0
"""The stacks of a job's ranks, however they can be had. Needs no torch.

On this machine: py-spy where it is installed and allowed to look (it also sees a process that is stopped), else a signal
that makes the rank write them itself (faulthandler). On another machine: a file in the folder of heartbeats asks for them,
so that folder has to be on a file system that both see.
"""

import shutil
import subprocess
import time
from pathlib import Path

from megatron.guard import processes
from megatron.guard.heartbeat import LOOK, STACKS, STACKS_SIGNAL, Beat, ask
from megatron.guard.stacks import Frame, Standstill, parse, parse_spied

Stacks = tuple[tuple[Frame, ...], ...]
SPY = ("py-spy", "dump", "--json", "--nonblocking", "--pid")
SPYING = 20.0  # seconds that py-spy may take, all ranks of the machine together
WRITING = 10.0  # seconds that ranks have to begin to write their stacks; one that cannot write lets the others wait


def standstills(beats: list[Beat], folder: Path, silent: dict[int, float]) -> list[Standstill]:
    """What every rank of a job does; those that say nothing are described by the state of their process.

    silent: rank -> seconds since its heartbeat moved
    """
    states = {beat.rank: state_of(beat) for beat in beats}
    spied = spy([beat for beat in beats if processes.alive_here(beat)])
    rest = [beat for beat in beats if beat.rank not in spied and states[beat.rank] not in ("T", "t", "Z", "")]
    told = written(rest, folder)
    found = []
    for beat in beats:
        stacks, state = spied.get(beat.rank) or told.get(beat.rank, ()), states[beat.rank]
        unseen = state == "S" and not stacks and not processes.alive_here(beat)
        found.append(Standstill(beat, silent.get(beat.rank, 0.0), "?" if unseen else state, stacks))
    return found


def state_of(beat: Beat) -> str:
    """Of a rank's process, as /proc has it; "S" where that cannot be seen from here."""
    if processes.alive_here(beat):
        return processes.state(beat.pid)
    return "" if beat.ended is not None or processes.is_gone(beat) else "S"


def spy(beats: list[Beat]) -> dict[int, Stacks]:
    """Rank -> stacks that py-spy reads from outside; nothing where it is not installed, or not allowed to."""
    if shutil.which(SPY[0]) is None:
        return {}
    spies = {
        beat.rank: subprocess.Popen([*SPY, str(beat.pid)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for beat in beats
    }
    deadline, found = time.monotonic() + SPYING, {}
    for rank, process in spies.items():
        try:
            text, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            found[rank] = parse_spied(text.decode("utf-8", "replace"))
        except (subprocess.TimeoutExpired, ValueError):
            process.kill()
            process.wait()
    return {rank: stacks for rank, stacks in found.items() if stacks}


def written(beats: list[Beat], folder: Path) -> dict[int, Stacks]:
    """Rank -> stacks that it has written when asked to: by a signal, or from another machine by a file."""
    sizes = {beat.rank: _size(folder, beat.rank) for beat in beats}
    near = [beat for beat in beats if processes.alive_here(beat)]
    for beat in near if STACKS_SIGNAL else ():
        processes.send(beat.pid, STACKS_SIGNAL)
    if len(near) < len(beats):
        ask(folder, STACKS)

    deadline = time.monotonic() + WRITING + (0 if len(near) == len(beats) else 2 * LOOK)
    before: dict[int, int] = {}
    while beats and time.monotonic() < deadline:
        now = {rank: _size(folder, rank) for rank in sizes}
        if now == before and all(now[rank] > size for rank, size in sizes.items()):
            break  # all have written, and what was begun has ended
        before = now
        time.sleep(0.1)
    return {
        rank: parse(_path(folder, rank).read_bytes()[size:].decode("utf-8", "replace"))
        for rank, size in sizes.items()
        if _size(folder, rank) > size
    }


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.stacks"


def _size(folder: Path, rank: int) -> int:
    try:
        return _path(folder, rank).stat().st_size
    except OSError:
        return 0
