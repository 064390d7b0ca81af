# SPDX-License-Identifier: Apache-2.0
"""What a supervisor asks of SLURM: to put its job back into the queue, and to end processes on other machines."""

import os
import subprocess
from typing import Optional


def job() -> Optional[str]:
    """The number of the SLURM job that this process is a part of."""
    return os.environ.get("SLURM_JOB_ID")


def requeue(number: str) -> bool:
    """Put a job back into the queue, from where it starts anew."""
    return _done("scontrol", "requeue", number)


def kill_step(step: str) -> bool:
    """End all processes of a step (JOB.STEP) on all its machines at once, stopped ones too."""
    return _done("scancel", "--signal=KILL", step)


def _done(*words: str) -> bool:
    try:
        return subprocess.run(words, check=False, timeout=30).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
