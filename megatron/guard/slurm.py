# SPDX-License-Identifier: Apache-2.0
"""The supervisor's calls to SLURM: requeue the job, and end processes on other machines."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Optional

TRIES = 20


def job() -> Optional[str]:
    """The id of the SLURM job that this process belongs to."""
    return os.environ.get("SLURM_JOB_ID")


def nodes() -> list[str]:
    """Names of the nodes of this job's allocation."""
    try:
        words = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
        return subprocess.run(words, check=False, timeout=30, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def requeue(number: str, excluded: Sequence[str] = ()) -> bool:
    """Put a job back into the queue, which starts it again. excluded: names of nodes that it must not get

    SLURM sends SIGTERM to this process, too.
    """
    if not excluded:
        return _done("scontrol", "requeue", number)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not _done("scontrol", "requeuehold", number):
        return False
    for _ in range(TRIES):  # a job can be changed as soon as it is back in the queue
        time.sleep(0.5)
        if _done("scontrol", "update", f"JobId={number}", f"ExcNodeList={','.join(excluded)}"):
            break
    return _done("scontrol", "release", number)


def kill_step(step: str) -> bool:
    """End all processes of a step (JOB.STEP) on all its machines immediately, stopped ones too."""
    return _done("scancel", "--signal=KILL", step)


def _done(*words: str) -> bool:
    try:
        return subprocess.run(words, check=False, timeout=30).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
