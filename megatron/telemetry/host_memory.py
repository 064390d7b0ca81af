# SPDX-License-Identifier: Apache-2.0
"""Memory of this machine and of this process, as the system counts it. Needs no torch."""

import os
from pathlib import Path


def available_memory() -> float:
    """Bytes of memory that processes could take now."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 8e9
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 8e9)


def resident_memory() -> int:
    """Bytes of memory this process holds; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
