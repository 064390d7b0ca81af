# SPDX-License-Identifier: Apache-2.0
"""Record the times of a step's ops for `python -m megatron.pipeline.check --timeline`."""

import socket
import time
from typing import Optional

import torch.distributed as dist

from megatron.errors import StorageError
from megatron.mpu import collectives
from megatron.mpu.mesh import Mesh
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.timeline import Timeline

STEP = 3  # the first steps are slower: they allocate memory and select kernels


class Recorder:
    """Records the third step of a run and writes it to a file, from the ranks of the first pipeline."""

    def __init__(self, path: str, pipeline: Pipeline, mesh: Mesh):
        self.path, self.pipeline, self.mesh, self.steps = path, pipeline, mesh, 0

    def record(self) -> Optional[list]:
        """The list for `execute` to record the ops of the next step in; None for other steps."""
        self.steps += 1
        if self.steps != STEP:
            return None
        collectives.barrier(self.mesh.pp)
        self.begun = time.perf_counter()
        return []

    def write(self, record: Optional[list]) -> None:
        """Collect the records of all ranks of the pipeline, and write them. All ranks call it together."""
        if not record:
            return
        mesh, rows = self.mesh, [(socket.gethostname(), self.begun, record)]
        if mesh.pp.size > 1:
            rows = [None] * mesh.pp.size
            dist.all_gather_object(rows, (socket.gethostname(), self.begun, record), group=mesh.pp.group)
        if mesh.rank != mesh.pp.ranks[0] or mesh.dp.rank or mesh.tp.rank or mesh.cp.rank:
            return
        # Ranks of one machine share a clock. On several machines, times count from the end of the barrier.
        one = len({host for host, _, _ in rows}) == 1
        ranks = [
            [
                (op, start - (rows[0][1] if one else begun), end - (rows[0][1] if one else begun))
                for op, start, end in noted
            ]
            for _, begun, noted in rows
        ]
        try:
            Timeline(self.pipeline.name, self.pipeline.stages, ranks).write(self.path)
        except OSError as error:
            raise StorageError(f"cannot write --pipeline-timeline {self.path}", error.strerror) from error
