# SPDX-License-Identifier: Apache-2.0
"""Whoever leaves a job leaves no thread behind that could wake up when Python is gone."""

import contextlib
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.mpu import collectives
from megatron.mpu.initialize import RankContext, leave_job
from megatron.mpu.mesh import Mesh

TASKS = Path("/proc/self/task")


def _threads() -> list[str]:
    names = []
    for task in TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def _body(rank):
    mesh = Mesh(rank, pp=2, tp=2)
    held = mesh.tied, mesh.tp  # by layers and wires, which outlive the job
    for axis in held:
        collectives.all_reduce(torch.ones(4), axis)
    before = len(_threads())
    leave_job(RankContext(mesh, torch.device("cpu"), joined=True))
    deadline = time.monotonic() + 60
    while _threads() and time.monotonic() < deadline:  # one that was joined may still be on its way out of the kernel
        time.sleep(0.01)
    return before, _threads(), dist.is_initialized(), [axis.group for axis in held]


@pytest.mark.skipif(not TASKS.exists(), reason="threads are listed in /proc on Linux alone")
def test_leaving_ends_all_threads_of_gloo(run_ranks):
    for before, after, initialized, groups in run_ranks(4, _body):
        assert before > 0 and after == [] and not initialized and groups == [None, None]
