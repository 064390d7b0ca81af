# SPDX-License-Identifier: Apache-2.0
"""The number of threads of a rank on a CPU, and whether they spin or sleep while they wait for each other.

    OMP_NUM_THREADS=$(python -m megatron.mpu.cpu_threads 2)     for each of two ranks of this machine

The count is the rank's share of the cores that its processes may use: those of the affinity mask, or of a container's
quota. OMP_NUM_THREADS overrides it. The load of other programs does not change the count: rounding depends on it, and next
to two busy processes two threads that sleep while they wait were faster than one (docs/proof/benchmarks.md).

The load of other programs decides how threads wait for each other, hundreds of times a step, which does not change
results. By default libgomp lets them spin for some milliseconds. That is faster by 2 % if each has its own core. Next to
other programs a spinning thread keeps the thread it waits for from its core, and a step takes 20 times as long: then
threads sleep, from the start (`choose_waiting`) or once steps become slow (`training.pace`).
"""

import ctypes
import math
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple, Optional

PRESSURE = 20.0  # percent of the time in which something waits for a core, from which the machine counts as shared


class Threads(NamedTuple):
    """The number of threads of a rank, and its source in words."""

    count: int
    why: str
    given: bool = False  # by OMP_NUM_THREADS

    def __str__(self) -> str:
        return f"{self.count} {'thread' if self.count == 1 else 'threads'} a rank: {self.why}"


def choose_threads(ranks_here: int = 1, env: Mapping[str, str] = os.environ) -> Threads:
    """The threads of each rank, if this machine has `ranks_here` ranks.

    >>> choose_threads(env=dict(OMP_NUM_THREADS="3"))
    Threads(count=3, why='OMP_NUM_THREADS', given=True)
    """
    given = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    if given.isdecimal() and int(given):
        return Threads(int(given), "OMP_NUM_THREADS", given=True)
    return share(len(affinity()), quota(), ranks_here)


def share(cores: int, quota: Optional[float], ranks_here: int) -> Threads:
    """The share of each rank in a machine's cores; quota: CPUs that a container may use, None: all.

    >>> share(16, 6.5, 2)
    Threads(count=3, why='16 cores, a quota of 6.5 of them, 2 ranks', given=False)
    """
    words, usable = [f"{cores} {'core' if cores == 1 else 'cores'}"], _within(cores, quota)
    if usable < cores:
        words.append(f"a quota of {quota:g} of them")
    words.append(f"{ranks_here} {'rank' if ranks_here == 1 else 'ranks'}")
    return Threads(max(1, usable // ranks_here), ", ".join(words))


def _within(cores: int, quota: Optional[float]) -> int:
    return cores if quota is None else max(1, min(cores, int(quota)))


SPINNING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}  # variables that set how threads wait


def choose_waiting(ranks_here: int = 1, env: MutableMapping[str, str] = os.environ, modules=sys.modules) -> None:
    """Set OMP_WAIT_POLICY=PASSIVE if threads and other programs together need more than the cores.

    It has no effect after torch is loaded: libgomp reads the environment once. The user's own variables are kept.
    """
    threads = choose_threads(ranks_here, env).count
    if not may_spin(threads, env) or "torch" in modules or not crowded(threads * ranks_here):
        return
    # The load average still counts programs that have ended, such as the previous run: they take no cores from this one.
    if runnable() - ranks_here + threads * ranks_here > cores():
        env["OMP_WAIT_POLICY"] = "PASSIVE"


def may_spin(threads: int, env: Mapping[str, str] = os.environ) -> bool:
    """Whether threads wait for each other, and the environment does not set how."""
    return threads > 1 and not SPINNING & env.keys()


def crowded(wanted: int, own: float = 0.0) -> bool:
    """Whether other programs leave fewer than `wanted` cores.

    By the CPU pressure of the last ten seconds, or the load average of the last minute, of which `own` is this job's.
    """
    others = round(load() - own)
    return pressure() >= PRESSURE or others >= 1 and others + wanted > cores()


def pressure(path: Path = Path("/proc/pressure/cpu")) -> float:
    """Percent of the last ten seconds in which something waited for a core; 0 if the kernel does not report it."""
    match = re.match(r"some avg10=([\d.]+)", _read(path))
    return float(match[1]) if match else 0.0


def load() -> float:
    """The load average of the last minute, scaled to the share of the machine that this process may use."""
    return os.getloadavg()[0] * cores() / (os.cpu_count() or 1)


def runnable(path: Path = Path("/proc/loadavg")) -> float:
    """The number of threads that run or wait for a core at this moment, this one included, scaled as `load`."""
    match = re.match(r"[\d.]+ [\d.]+ [\d.]+ (\d+)/", _read(path))
    return int(match[1]) * cores() / (os.cpu_count() or 1) if match else math.inf


def sleep_from_now_on(threads: int) -> bool:
    """Make waiting threads of this process sleep, as OMP_WAIT_POLICY=PASSIVE does; False if torch does not use libgomp.

    libgomp lets no thread spin for longer than a microsecond while it has more threads than there are cores
    (`gomp_throttled_spin_count_var`). So an extra thread starts a team of the missing number, which sleeps forever. The
    size of other teams does not change, and so neither does the rounding of sums.
    """
    places = [line.split()[-1] for line in _read(Path("/proc/self/maps")).splitlines() if "libgomp" in line]
    if not places:
        return False
    made = threading.Event()

    def hold() -> None:
        run, nothing = ctypes.CDLL(places[0]).GOMP_parallel, ctypes.CDLL(None).getpid
        run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        run(ctypes.cast(nothing, ctypes.c_void_p), None, max(2, len(affinity()) - threads + 2), 0)
        made.set()
        threading.Event().wait()  # a team ends with the thread that started it

    threading.Thread(target=hold, name="idle team", daemon=True).start()
    return made.wait(10)


def waiting(env: Mapping[str, str] = os.environ) -> str:
    """Describe how threads wait, according to the environment."""
    if env.get("GOMP_SPINCOUNT"):
        return f"GOMP_SPINCOUNT {env['GOMP_SPINCOUNT']}"
    return f"waiting threads {'sleep' if env.get('OMP_WAIT_POLICY', '').lower() == 'passive' else 'spin'}"


def cores() -> int:
    """The number of cores that this process may use: those of its affinity mask, within a container's quota."""
    return _within(len(affinity()), quota())


def busy_cores(seconds: float = 0.5, path: Path = Path("/proc/stat")) -> float:
    """How many of this process's cores other programs use, measured while it sleeps; 0 if the kernel does not report it."""
    before = _ticks(path)
    time.sleep(seconds)
    passed = [(total - before[core][0], idle - before[core][1]) for core, (total, idle) in _ticks(path).items()]
    return sum(1 - idle / total for total, idle in passed if total)


def _ticks(path: Path) -> dict[int, tuple[int, int]]:
    """(all, idle) clock ticks of each of this process's cores, since the machine was started."""
    lines = re.findall(r"^cpu(\d+) (.+)$", _read(path), re.MULTILINE)
    counts = {int(core): [*map(int, words.split()[:8])] for core, words in lines if int(core) in affinity()}
    return {core: (sum(ticks), ticks[3] + ticks[4]) for core, ticks in counts.items()}  # idle, waiting for a disk


def affinity() -> set[int]:
    """The ids of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def quota(member: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Optional[float]:
    """The CPU limit of this process, the lowest of its control groups; None: no limit."""
    limits = []
    for line in _read(member).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":  # version 2: one tree
            tree, files = root, ("cpu.max",)
        elif "cpu" in controllers.split(","):
            tree, files = root / controllers, ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        # Inside a container the path may be the host's, and the container's own group is mounted as the tree's root.
        group = tree / path.strip("/")
        for folder in {tree, *(one for one in (group, *group.parents) if tree in one.parents)}:
            words = " ".join(_read(folder / name) for name in files).split()
            if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):  # no limit: max, or -1
                limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def main(argv: list[str]) -> None:
    """Print the number of threads per rank, for the given number of ranks of this machine (default: 1)."""
    print(choose_threads(int(argv[0]) if argv else 1).count)


if __name__ == "__main__":
    main(sys.argv[1:])
