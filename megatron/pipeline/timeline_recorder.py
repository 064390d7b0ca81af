# SPDX-License-Identifier: Apache-2.0
"""Recording a step of a run, op by op, for `python -m megatron.pipeline.check --timeline`."""

import socket
import time
from typing import Optional

import torch.distributed as dist

from megatron.errors import StorageError
from megatron.mpu import collectives
from megatron.mpu.mesh import Mesh
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.timeline import Timeline

STEP = 3  # the first steps are slower: memory is asked for, kernels are chosen


class Recorder:
    """Records the third step of a run and writes it to a file, from the ranks of the first pipeline."""

    def __init__(self, path: str, pipeline: Pipeline, mesh: Mesh):
        self.path, self.pipeline, self.mesh, self.steps = path, pipeline, mesh, 0

    def record(self) -> Optional[list]:
        """Where `execute` should note the ops of the step that begins; None if it should not."""
        self.steps += 1
        if self.steps != STEP:
            return None
        collectives.barrier(self.mesh.pp)
        self.begun = time.perf_counter()
        return []

    def write(self, record: Optional[list]) -> None:
        """Collect what all ranks of the pipeline noted, and write it. All ranks together."""
        if not record:
            return
        mesh, rows = self.mesh, [(socket.gethostname(), self.begun, record)]
        if mesh.pp.size > 1:
            rows = [None] * mesh.pp.size
            dist.all_gather_object(rows, (socket.gethostname(), self.begun, record), group=mesh.pp.group)
        if mesh.rank != mesh.pp.ranks[0] or mesh.dp.rank or mesh.tp.rank or mesh.cp.rank:
            return
        # Ranks of one machine share a clock. Those of several only know that they left the barrier together.
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
