# SPDX-License-Identifier: Apache-2.0
"""How many threads a rank on a CPU computes with, and what a thread does while it waits for the others.

    OMP_NUM_THREADS=$(python -m megatron.mpu.cpu_threads 2)     for each of two ranks of this machine

The count is the rank's share of the cores that its processes may use: those of the affinity mask, or of a container's
quota. A user's own OMP_NUM_THREADS wins. What other programs use at the moment takes nothing away: rounding depends on the
count, and beside two busy processes two threads that sleep while they wait were faster than one (docs/benchmarks.md).

What other programs use decides how threads wait for each other, which they do hundreds of times a step and which changes no
result. By default libgomp lets them spin for some milliseconds. That is best where each has a core to itself. Beside other
programs they keep the very thread that they wait for from its core, and a step takes 20 times as long: there they sleep.
"""

import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple, Optional


class Threads(NamedTuple):
    """Threads of a rank, and where the number comes from, in words."""

    count: int
    why: str
    given: bool = False  # by OMP_NUM_THREADS

    def __str__(self) -> str:
        return f"{self.count} {'thread' if self.count == 1 else 'threads'} a rank: {self.why}"


def choose_threads(ranks_here: int = 1, env: Mapping[str, str] = os.environ) -> Threads:
    """Threads of one of so many ranks of this machine.

    >>> choose_threads(env=dict(OMP_NUM_THREADS="3"))
    Threads(count=3, why='OMP_NUM_THREADS', given=True)
    """
    given = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    if given.isdecimal() and int(given):
        return Threads(int(given), "OMP_NUM_THREADS", given=True)
    return share(cores(), quota(), ranks_here)


def share(cores: int, quota: Optional[float], ranks_here: int) -> Threads:
    """What of a machine belongs to one of its ranks; quota: CPUs that a container may use, None: all.

    >>> share(16, 6.5, 2)
    Threads(count=3, why='16 cores, a quota of 6.5 of them, 2 ranks', given=False)
    """
    words, usable = [f"{cores} {'core' if cores == 1 else 'cores'}"], cores
    if quota is not None and int(quota) < cores:
        usable = max(1, int(quota))
        words.append(f"a quota of {quota:g} of them")
    words.append(f"{ranks_here} {'rank' if ranks_here == 1 else 'ranks'}")
    return Threads(max(1, usable // ranks_here), ", ".join(words))


def choose_waiting(
    ranks_here: int = 1, env: MutableMapping[str, str] = os.environ, busy: Optional[float] = None, modules=sys.modules
) -> None:
    """Say in the environment that threads sleep while they wait, where threads and other programs do not fit on the cores.

    Before torch is loaded, or it is too late: libgomp reads the environment once. A user's own wish counts.
    busy: cores that other programs use; default: it is measured, in a tenth of a second
    """
    threads = choose_threads(ranks_here, env).count
    if threads == 1 or "torch" in modules or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & env.keys():
        return
    if busy is None:
        busy = busy_cores()
    others = round(max(0.0, busy - (ranks_here - 1)))  # the other ranks of this machine are starting, too
    if others and others + threads * ranks_here > cores():
        env["OMP_WAIT_POLICY"] = "PASSIVE"


def waiting(env: Mapping[str, str] = os.environ) -> str:
    """What the environment asks of threads that wait, in words."""
    if env.get("GOMP_SPINCOUNT"):
        return f"GOMP_SPINCOUNT {env['GOMP_SPINCOUNT']}"
    return f"waiting threads {'sleep' if env.get('OMP_WAIT_POLICY', '').lower() == 'passive' else 'spin'}"


def cores() -> int:
    """Cores that this process may use."""
    return len(affinity())


def affinity() -> set[int]:
    """The numbers of these."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def quota(member: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Optional[float]:
    """CPUs that the control groups of this process leave to it, the tightest of them; None: no limit."""
    limits = []
    for line in _read(member).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":  # version 2: one tree
            tree, files = root, ("cpu.max",)
        elif "cpu" in controllers.split(","):
            tree, files = root / controllers, ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        # Inside of a container the path may be the host's, where the container's own group is mounted as the tree's root.
        group = tree / path.strip("/")
        for folder in {tree, *(one for one in (group, *group.parents) if tree in one.parents)}:
            words = " ".join(_read(folder / name) for name in files).split()
            if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):  # without a limit: max, or -1
                limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def busy_cores(stat: Path = Path("/proc/stat"), seconds: float = 0.05, looks: int = 2) -> float:
    """Cores of the affinity mask that are busy while this process sleeps: the least of some looks; 0: nothing says so."""
    seen = [_ticks(stat)]
    for _ in range(looks):
        time.sleep(seconds)
        seen.append(_ticks(stat))
    return min(used(before, after) for before, after in zip(seen, seen[1:]))


def used(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> float:
    """Cores that were busy between two looks, core -> (ticks in use, all ticks).

    >>> used({"cpu0": (10, 20), "cpu1": (5, 20)}, {"cpu0": (20, 30), "cpu1": (10, 30)})
    1.5
    """
    shares = [
        (after[core][0] - before[core][0]) / (after[core][1] - before[core][1])
        for core in before.keys() & after.keys()
        if after[core][1] > before[core][1]
    ]
    return sum(shares)


def _ticks(stat: Path) -> dict[str, tuple[int, int]]:
    """Core -> (ticks that it was in use, all ticks) since the machine was started."""
    mine = {f"cpu{core}" for core in affinity()}
    found = {}
    for line in _read(stat).splitlines():
        name, *words = line.split()
        if name in mine and len(words) >= 8:
            ticks = [int(word) for word in words[:8]]  # what follows, guests' time, is a part of these
            found[name] = sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # without idle, and waiting for a disk
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def main(argv: list[str]) -> None:
    """Print how many threads each of so many ranks of this machine should have (default: of one)."""
    print(choose_threads(int(argv[0]) if argv else 1).count)


if __name__ == "__main__":
    main(sys.argv[1:])
