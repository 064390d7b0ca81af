# SPDX-License-Identifier: Apache-2.0
"""The supervisor's calls to SLURM: requeue the job, and end processes on other machines."""

import os
import subprocess
from typing import Optional


def job() -> Optional[str]:
    """The id of the SLURM job that this process belongs to."""
    return os.environ.get("SLURM_JOB_ID")


def requeue(number: str) -> bool:
    """Put a job back into the queue, which starts it again."""
    return _done("scontrol", "requeue", number)


def kill_step(step: str) -> bool:
    """End all processes of a step (JOB.STEP) on all its machines immediately, stopped ones too."""
    return _done("scancel", "--signal=KILL", step)


def _done(*words: str) -> bool:
    try:
        return subprocess.run(words, check=False, timeout=30).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
