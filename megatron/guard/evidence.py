# SPDX-License-Identifier: Apache-2.0
"""Collect the stacks of a job's ranks. Needs no torch.

On this machine, py-spy reads them if it is installed and permitted (also from a stopped process). Otherwise a signal makes
the rank write them itself (faulthandler). On another machine, a file in the heartbeat folder requests them, so this folder
has to be on a file system that both machines share.
"""

import shutil
import subprocess
import time
from pathlib import Path

from megatron.guard import processes
from megatron.guard.beat_files import LOOK, STACKS, TRACE, Beat, ask, beat_path, stacks_path
from megatron.guard.flight_recorder import PREFIX, Dump, read_dumps
from megatron.guard.heartbeat import STACKS_SIGNAL
from megatron.guard.stacks import Frame, Standstill, parse, parse_spied
from megatron.storage.processes import state

Stacks = tuple[tuple[Frame, ...], ...]
SPY = ("py-spy", "dump", "--json", "--nonblocking", "--pid")
SPYING = 20.0  # seconds that py-spy may take for all ranks of the machine together
WRITING = 10.0  # seconds that ranks have to start writing their stacks


def standstills(beats: list[Beat], folder: Path, silent: dict[int, float]) -> list[Standstill]:
    """The state of every rank: its stacks, or only the state of its process if no stack can be read.

    silent: rank -> seconds since the last change of its heartbeat
    """
    states = {beat.rank: state_of(beat) for beat in beats}
    spied = spy([beat for beat in beats if processes.alive_here(beat)])
    rest = [beat for beat in beats if beat.rank not in spied and states[beat.rank] not in ("T", "t", "Z", "")]
    dumped = request_stacks(rest, folder)
    result = []
    for beat in beats:
        stacks, state = spied.get(beat.rank) or dumped.get(beat.rank, ()), states[beat.rank]
        unseen = state == "S" and not stacks and not processes.alive_here(beat)
        result.append(Standstill(beat, silent.get(beat.rank, 0.0), "?" if unseen else state, stacks))
    return result


def state_of(beat: Beat) -> str:
    """The state of a rank's process as in /proc; "S" for a process of another machine."""
    if processes.alive_here(beat):
        return state(beat.pid)
    return "" if beat.ended is not None or processes.is_gone(beat) else "S"


def spy(beats: list[Beat]) -> dict[int, Stacks]:
    """Rank -> stacks as py-spy reads them; empty if it is not installed or not permitted."""
    if shutil.which(SPY[0]) is None:
        return {}
    spies = {
        beat.rank: subprocess.Popen([*SPY, str(beat.pid)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for beat in beats
    }
    deadline, stacks = time.monotonic() + SPYING, {}
    for rank, process in spies.items():
        try:
            text, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            stacks[rank] = parse_spied(text.decode("utf-8", "replace"))
        except (subprocess.TimeoutExpired, ValueError):
            process.kill()
            process.wait()
    return {rank: own for rank, own in stacks.items() if own}


def request_traces(beats: list[Beat], folder: Path, traces: Path) -> dict[int, Dump]:
    """Rank -> its last collectives, which the ranks write on request to the folder `traces`."""
    asked = {beat.rank for beat in beats if beat.records and state_of(beat) not in ("T", "t", "Z", "")}
    if not asked:
        return {}
    for path in traces.glob(f"{PREFIX}*"):  # of a hang before
        path.unlink(missing_ok=True)
    ask(folder, TRACE)
    deadline = time.monotonic() + 4 * LOOK
    while time.monotonic() < deadline and not asked <= (found := read_dumps(traces)).keys():
        time.sleep(0.1)
    return found


def request_stacks(beats: list[Beat], folder: Path) -> dict[int, Stacks]:
    """Rank -> stacks that it wrote on request: by a signal, or by a file for ranks of another machine."""
    paths = {beat.rank: _path(beat, folder) for beat in beats}
    sizes = {rank: _size(path) for rank, path in paths.items()}
    near = [beat for beat in beats if processes.alive_here(beat)]
    for beat in near if STACKS_SIGNAL else ():
        processes.send(beat.pid, STACKS_SIGNAL)
    if len(near) < len(beats):
        ask(folder, STACKS)

    deadline = time.monotonic() + WRITING + (0 if len(near) == len(beats) else 3 * LOOK)
    before: dict[int, int] = {}
    while beats and time.monotonic() < deadline:
        now = {rank: _size(path) for rank, path in paths.items()}
        gone = {beat.rank for beat in near if processes.is_gone(beat)}  # killed a moment ago: it will not write
        if now == before and all(now[rank] > size or rank in gone for rank, size in sizes.items()):
            break  # all have written, and no file grows any more
        before = now
        time.sleep(0.1)
    return {
        rank: parse(paths[rank].read_bytes()[size:].decode("utf-8", "replace"))
        for rank, size in sizes.items()
        if _size(paths[rank]) > size
    }


def _path(beat: Beat, folder: Path) -> Path:
    """Where a rank's stacks are: in memory, if it is of this machine."""
    here = beat.memory and processes.alive_here(beat)
    return stacks_path(beat_path(Path(beat.memory) if here else folder, beat.rank))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
