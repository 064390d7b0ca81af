# SPDX-License-Identifier: Apache-2.0
"""Check whether the disk has room for the next checkpoints. Needs no torch."""

import shutil
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.storage.urls import location
from megatron.telemetry.run_folder import newest_checkpoint


class Shortage(NamedTuple):
    """Too little room in a folder, in bytes."""

    folder: str
    free: int
    needed: int
    checkpoints: int


def shortage(folder: Optional[str], checkpoints: float) -> Optional[Shortage]:
    """Check whether a folder has room for more checkpoints of the size of its newest one; None if they fit.

    Also None for an object store, and for a folder without a checkpoint.
    """
    place, newest = location(folder or "."), newest_checkpoint(folder)
    if newest is None or not isinstance(place, Path):
        return None
    try:
        files = [path.stat().st_size for path in (place / f"iter_{newest:07d}").rglob("*") if path.is_file()]
        free = shutil.disk_usage(place).free
    except OSError:  # it was just deleted, to make room for a newer one
        return None
    needed = round(checkpoints * sum(files))
    return Shortage(str(place), free, needed, checkpoints) if free < needed else None
