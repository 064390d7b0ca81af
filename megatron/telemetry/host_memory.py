# SPDX-License-Identifier: Apache-2.0
"""Memory of this machine and of this process, as the operating system counts it. Needs no torch."""

import contextlib
import os
from pathlib import Path
from typing import Optional


def available_memory(otherwise: Optional[float] = 8e9) -> Optional[float]:
    """Bytes of memory that this process can still allocate; `otherwise` if the system does not report them.

    Cached files count as free, swap does not.
    """
    free = _meminfo("MemAvailable")
    return min(free, *_left_in_groups(), free) if free is not None else otherwise


def total_memory() -> Optional[float]:
    """Bytes of memory of this machine, or the limit of this process's control group; None if it is unknown."""
    whole = _meminfo("MemTotal")
    return None if whole is None else min(whole, *(limit for _, limit, _ in _groups()), whole)


def _meminfo(name: str) -> Optional[float]:
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
    return None


def _left_in_groups() -> list[float]:
    """Bytes left below each limit that a container or a batch system sets."""
    left = []
    for folder, limit, (used, cached) in _groups():
        with contextlib.suppress(OSError, ValueError, StopIteration):
            stat = (folder / "memory.stat").read_text().splitlines()
            files = next(int(line.split()[1]) for line in stat if line.split()[0] == cached)
            left.append(limit - int((folder / used).read_text()) + files)
    return left


def _groups(
    mine: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[Path, float, tuple[str, str]]]:
    """(folder, limit, names of the files of use and cached files) of each control group of this process with a limit.

    Reads both versions of Linux's control groups.
    """
    kinds = {
        "": (root, "memory.max", ("memory.current", "inactive_file")),
        "memory": (root / "memory", "memory.limit_in_bytes", ("memory.usage_in_bytes", "total_inactive_file")),
    }
    groups = []
    with contextlib.suppress(OSError):
        for line in mine.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            kind = "memory" if "memory" in controllers.split(",") else controllers
            top, limit, names = kinds.get(kind, (None, "", ("", "")))
            place = Path(path.lstrip("/"))
            for folder in [top / part for part in (place, *place.parents)] if top else []:
                with contextlib.suppress(OSError, ValueError):  # "max" is no number
                    groups.append((folder, float(int((folder / limit).read_text())), names))
    return groups


def resident_memory() -> int:
    """Bytes of resident memory of this process; 0 if the system does not report them."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def most_resident_memory() -> int:
    """Peak bytes of resident memory of this process; 0 if the system does not report them.

    Not getrusage, whose value is at least the memory of the parent at the time of the fork. `corpus.commit.forget_peak`
    begins anew.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
