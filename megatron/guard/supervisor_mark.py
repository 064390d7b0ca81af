# SPDX-License-Identifier: Apache-2.0
"""A file that shows whether the supervisor of a job still runs. Needs no torch.

The supervisor writes it to its --log-dir, refreshes it while it works, and records its own end in it. Ranks get its path
in their environment (`SUPERVISOR`).
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from megatron.guard.beat_files import machine
from megatron.storage.processes import process_start_ticks

SUPERVISOR = "MEGATRON_SUPERVISOR"  # in the environment of ranks: path of the mark
NAME = "supervisor.json"
REFRESH = 10.0  # seconds between two refreshes
STALE = 120.0  # seconds without a refresh after which one on another machine is lost


@dataclass(frozen=True)
class Mark:
    """A supervisor's process, and its end."""

    pid: int
    born: int
    machine: str
    host: str
    began: float  # Unix seconds
    ended: Optional[str] = None  # how it ended; None: it still works, or was killed

    @classmethod
    def own(cls) -> "Mark":
        """The mark of this process."""
        return cls(
            os.getpid(), process_start_ticks(os.getpid()), machine(), socket.gethostname(), round(time.time(), 3)
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def write(self, path: Path) -> None:
        """Replace the file in one operation, so that readers never see a part of it."""
        aside = path.with_name(f".{path.name}.{self.pid}")
        aside.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        os.replace(aside, path)

    def is_lost(self, path: Path) -> bool:
        """Whether this supervisor, whose mark is at `path`, was killed."""
        if self.ended is not None:
            return False
        if self.machine == machine():
            return process_start_ticks(self.pid) != self.born
        try:
            return time.time() - path.stat().st_mtime > STALE
        except OSError:
            return False


def read_mark(path: Optional[Path]) -> Optional[Mark]:
    """The mark at a path; None if there is none."""
    try:
        return Mark(**json.loads(path.read_bytes())) if path else None
    except (OSError, ValueError, TypeError):
        return None


def lost_supervisor(path: Optional[Path]) -> Optional[Mark]:
    """The supervisor whose mark is at a path, if it was killed."""
    mark = read_mark(path)
    return mark if mark and mark.is_lost(path) else None


def is_supervised() -> bool:
    """Whether this process belongs to a job whose supervisor works."""
    path = Path(os.environ[SUPERVISOR]) if SUPERVISOR in os.environ else None
    mark = read_mark(path)
    return mark is not None and mark.ended is None and not mark.is_lost(path)
