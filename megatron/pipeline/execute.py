# SPDX-License-Identifier: Apache-2.0
"""The one loop that runs any schedule: training and evaluation, one stage or many.

A schedule is a list of `Op`s per rank (pipeline/schedule.py); the verifier has proved that each directed channel is
first in, first out, so the wire needs no tags beyond the kind. Without a pipeline the list is F0 B0 F1 B1 ... and nothing
is sent.
"""

from typing import Sequence

import torch
import torch.distributed as dist

from megatron.data.loader import MicroBatch
from megatron.mpu.mesh import Axis
from megatron.pipeline.schedule import Op


class Wire:
    """Point-to-point messages between neighbouring stages; within a rank a queue."""

    def __init__(self, axis: Axis, shape: tuple[int, ...], dtype, device):
        self.axis, self.shape, self.dtype, self.device = axis, shape, dtype, device
        self.queues: dict[str, list] = {}
        self.pending: list = []  # (work, tensor): a tensor must outlive its asynchronous send

    def send(self, x: torch.Tensor, to: int, kind: str) -> None:
        if to == self.axis.rank:
            self.queues.setdefault(kind, []).append(x)
            return
        assert tuple(x.shape) == self.shape and x.dtype == self.dtype, f"{tuple(x.shape)} {x.dtype} on the wire"
        work = dist.isend(x.contiguous(), self.axis.ranks[to], group=self.axis.group, tag="FB".index(kind))
        self.pending.append((work, x))

    def receive(self, source: int, kind: str) -> torch.Tensor:
        if source == self.axis.rank:
            return self.queues[kind].pop(0)
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        dist.recv(x, self.axis.ranks[source], group=self.axis.group, tag="FB".index(kind))
        return x

    def wait(self) -> None:
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


def execute(
    ops: Sequence[Op],
    stages: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    wire: Wire,
    objective=None,
) -> torch.Tensor:
    """Run one rank's ops. Returns [loss sum, counted tokens] over its micro-batches in fp64 (zeros off the last stage).

    stages:     this rank's model chunks; chunk c is stage c * axis.size + axis.rank
    batches:    micro-batches by number; every stage has them (positions, masks, sample numbers)
    objective:  (loss sum, tokens) of a micro-batch -> the scalar whose gradient is taken; None: no gradients at all
    """
    axis = wire.axis
    live: dict[tuple, tuple] = {}
    sums, last = [], len(stages) * axis.size - 1
    for op in ops:
        stage, key = op.chunk * axis.size + axis.rank, (op.micro, op.chunk)
        if op.kind == "F":
            x = None if stage == 0 else wire.receive((stage - 1) % axis.size, "F")
            if x is not None and objective is not None:
                x.requires_grad_()
            y = stages[op.chunk](x, batches[op.micro])
            if stage == last:
                loss, tokens = y
                sums.append(torch.stack([loss.detach().double(), torch.as_tensor(tokens).to(loss.device).double()]))
                y = None if objective is None else objective(loss, tokens)
            else:
                wire.send(y.detach(), (stage + 1) % axis.size, "F")
            if objective is not None:
                live[key] = x, y
        else:
            x, y = live.pop(key)
            gradient = None if stage == last else wire.receive((stage + 1) % axis.size, "B")
            torch.autograd.backward(y, gradient)
            if stage > 0:
                wire.send(x.grad, (stage - 1) % axis.size, "B")
    wire.wait()
    assert not live, f"activations left over: {sorted(live)}"
    return torch.stack(sums).sum(0) if sums else torch.zeros(2, dtype=torch.float64, device=wire.device)
