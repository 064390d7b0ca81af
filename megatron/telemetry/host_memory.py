# SPDX-License-Identifier: Apache-2.0
"""Memory of this machine and of this process, as the system counts it. Needs no torch."""

import contextlib
import os
from pathlib import Path
from typing import Optional


def available_memory(otherwise: Optional[float] = 8e9) -> Optional[float]:
    """Bytes of memory that processes of this one's group could take now; otherwise: where the system does not say.

    Files that are cached count as free, swap does not.
    """
    free = _meminfo("MemAvailable")
    return min(free, *_left_in_groups(), free) if free is not None else otherwise


def total_memory() -> Optional[float]:
    """Bytes of memory that this machine has, or that the group of this process may take; None where nobody says."""
    whole = _meminfo("MemTotal")
    return None if whole is None else min(whole, *(limit for _, limit, _ in _groups()), whole)


def _meminfo(name: str) -> Optional[float]:
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
    return None


def _left_in_groups() -> list[float]:
    """Bytes that are left of each limit: those of containers and of batch systems."""
    found = []
    for folder, limit, (used, cached) in _groups():
        with contextlib.suppress(OSError, ValueError, StopIteration):
            stat = (folder / "memory.stat").read_text().splitlines()
            files = next(int(line.split()[1]) for line in stat if line.split()[0] == cached)
            found.append(limit - int((folder / used).read_text()) + files)
    return found


def _groups(
    mine: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[Path, float, tuple[str, str]]]:
    """(folder, limit, names of its files of use and cached files) of each control group with a limit that this process is
    in, of both versions of Linux's control groups.
    """
    kinds = {
        "": (root, "memory.max", ("memory.current", "inactive_file")),
        "memory": (root / "memory", "memory.limit_in_bytes", ("memory.usage_in_bytes", "total_inactive_file")),
    }
    found = []
    with contextlib.suppress(OSError):
        for line in mine.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            kind = "memory" if "memory" in controllers.split(",") else controllers
            top, limit, names = kinds.get(kind, (None, "", ("", "")))
            place = Path(path.lstrip("/"))
            for folder in [top / part for part in (place, *place.parents)] if top else []:
                with contextlib.suppress(OSError, ValueError):  # "max" is no number
                    found.append((folder, float(int((folder / limit).read_text())), names))
    return found


def resident_memory() -> int:
    """Bytes of memory this process holds; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def most_resident_memory() -> int:
    """The most that it has held since its program began; 0 where the system does not say. getrusage's figure is at least
    what its parent held when it was forked.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
