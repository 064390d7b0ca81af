# SPDX-License-Identifier: Apache-2.0
"""Messages between neighbouring stages: activations one way (F), their gradients the other (B).

Every message of a wire has the same shape. Sends do not wait; a receive is posted before it is needed. Between two
chunks of one rank a message is passed on as it is.

On NCCL each channel is a process group with a stream of its own. A send or receive starts there after the work that was
queued before the call; later work, such as the next pass, overlaps it. `wait` makes the compute stream wait, not the host.
A sent tensor is kept until the send has completed: its memory must not be reused before.
"""

from itertools import chain
from typing import Optional

import torch
import torch.distributed as dist

from megatron.errors import SettingsError
from megatron.mpu.collectives import RECEIVED, SENT, Traffic
from megatron.mpu.groups import GroupListener, new_group
from megatron.mpu.mesh import Axis, Mesh
from megatron.pipeline.channels import opening_rounds
from megatron.pipeline.schedule import StageMap
from megatron.telemetry import lanes

KINDS = "FB"


class P2PCommunicator:
    """The messages of one rank.

    axis:           the pipeline's ranks
    shape, dtype:   of every message
    stages:         map of stages, stage -> (rank, chunk); None: round the ranks
    groups:         (kind, from, to) -> the process group of that channel (`open_channels`); None: all in the axis' own
    """

    def __init__(
        self,
        axis: Axis,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        stages: Optional[StageMap] = None,
        groups: Optional[dict] = None,
    ):
        self.axis, self.shape, self.dtype, self.device, self.stages = axis, shape, dtype, device, stages
        self._groups = groups or {}
        self._local: dict[tuple[str, int, int], torch.Tensor] = {}  # (kind, micro, stage that reads) -> message
        self._sent: dict[tuple[str, int, int], tuple] = {}  # the same -> (work, tensor), kept until it is sent

    def send(self, x: torch.Tensor, to: int, kind: str, micro: int, stage: int) -> None:
        """Send to rank `to` of the axis, for the F or B of a micro-batch on `stage`."""
        if to == self.axis.rank:
            self._local[kind, micro, stage] = x
            return
        if tuple(x.shape) != self.shape or x.dtype != self.dtype:
            raise SettingsError(
                f"a stage returned {list(x.shape)} {x.dtype}, and messages are {list(self.shape)} {self.dtype}",
                do="return an output of the shape and dtype of the input: docs/extending.md#a-model",
            )
        self._forget_sent()
        x = x.contiguous()
        Traffic.report(SENT, kind, x, self.axis)
        group = self._groups.get((kind, self.axis.rank, to), self.axis.group)
        work = dist.isend(x, self.axis.ranks[to], group=group, tag=KINDS.index(kind))
        self._sent[kind, micro, stage] = lanes.note(lanes.SEND, f"{kind}{micro} to rank {self.axis.ranks[to]}", work), x

    def receive(self, source: int, kind: str, micro: int, stage: int) -> "PendingReceive":
        """Post the receive of the next message of a kind from a rank. `wait` on the result returns the message."""
        if source == self.axis.rank:
            return PendingReceive(None, self._local, (kind, micro, stage))
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        group = self._groups.get((kind, source, self.axis.rank), self.axis.group)
        work = dist.irecv(x, self.axis.ranks[source], group=group, tag=KINDS.index(kind))
        whence = f"from rank {self.axis.ranks[source]}"
        work = lanes.note(lanes.RECEIVE, f"{kind}{micro} {whence}", work)
        return PendingReceive(work, x, label=f"{self.axis.label} {whence}", message=(kind, x, self.axis))

    def arrived(self, kind: str, micro: int, stage: int) -> None:
        """Release a message that the other side is known to have received (gloo does not report completed sends)."""
        sent = self._sent.pop((kind, micro, stage), None)
        if sent:
            sent[0].wait()

    def finish(self) -> None:
        """End a step. On a CPU, wait for all sends. On a GPU unfinished sends are kept, and checked in the next step."""
        if self.device.type == "cuda":
            self._forget_sent()
            return
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()

    def _forget_sent(self) -> None:
        """Release the messages that are sent, without waiting."""
        self._sent = {key: entry for key, entry in self._sent.items() if not entry[0].is_completed()}


class PendingReceive:
    """An upcoming message."""

    def __init__(self, work, x, key=None, label: str = "", message=None):
        self._work, self._x, self._key, self._label, self._message = work, x, key, label, message

    @property
    def remote(self) -> bool:
        """Whether it comes from another rank."""
        return self._work is not None

    def wait(self) -> torch.Tensor:
        if self._work is None:
            return self._x.pop(self._key)
        GroupListener.notify(self._label)
        self._work.wait()
        Traffic.report(RECEIVED, *self._message)
        return self._x


def open_channels(mesh: Mesh, stages: StageMap) -> dict[tuple[str, int, int], dist.ProcessGroup]:
    """A process group for each channel of this rank. Pipelines do not wait for each other.

    NCCL processes the messages of a communicator in one order. A receive is posted before it is needed, so a send after it
    would wait for it, and two such ranks would deadlock. So F and B of a pair are two groups, and so are both directions of
    F between two ranks (with two model chunks each). gloo does not need this.
    """
    groups = {}
    for kind, source, target in chain.from_iterable(opening_rounds(stages)):
        ends = mesh.pp.ranks[source], mesh.pp.ranks[target]
        if mesh.rank not in ends:
            continue
        group = new_group(sorted(ends), f"channel {kind} from {ends[0]} to {ends[1]}", mesh.timeout, connect=False)
        groups[kind, source, target] = group
        # The first message connects both sides, which must not happen in a step.
        hello = torch.zeros(1, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
        if mesh.rank == ends[0]:
            dist.send(hello, ends[1], group=group)
        else:
            dist.recv(hello, ends[0], group=group)
    return groups
