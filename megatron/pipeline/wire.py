# SPDX-License-Identifier: Apache-2.0
"""Messages between neighbouring stages: activations one way (F), their gradients the other (B).

Every message of a wire has the same shape. Sends do not wait; a receive is posted before it is needed. Between two
chunks of one rank a message is handed over as it is.

On NCCL each channel is a group with a stream of its own. A send or a receive begins there once the device has done what
it had been given before the call; what comes later, as the next pass, neither delays it nor is delayed by it. `wait` makes
the stream of the passes wait, not the host. What is sent is kept until it is known to have been: its memory must not be
given to others before.
"""

from typing import Optional

import torch
import torch.distributed as dist

from megatron.errors import SettingsError
from megatron.mpu.collectives import GroupListener
from megatron.mpu.mesh import Axis, Mesh, ranks_along
from megatron.pipeline.schedule import StageMap
from megatron.telemetry import lanes

KINDS = "FB"


class P2PCommunicator:
    """The messages of one rank.

    axis:           the pipeline's ranks
    shape, dtype:   of every message
    stages:         where each stage lies, stage -> (rank, chunk); None: round the ranks
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
        self._sent: dict[tuple[str, int, int], tuple] = {}  # the same -> (work, tensor): it must outlive its sending

    def send(self, x: torch.Tensor, to: int, kind: str, micro: int, stage: int) -> None:
        """To rank `to` of the axis, for the F or B of a micro-batch on `stage`."""
        if to == self.axis.rank:
            self._local[kind, micro, stage] = x
            return
        if tuple(x.shape) != self.shape or x.dtype != self.dtype:
            raise SettingsError(
                f"a stage returned {list(x.shape)} {x.dtype}, and between stages goes {list(self.shape)} {self.dtype}",
                do="what a stage returns has the shape and format of what it was given: docs/extending.md#a-model",
            )
        self._forget_sent()
        x = x.contiguous()
        group = self._groups.get((kind, self.axis.rank, to), self.axis.group)
        work = dist.isend(x, self.axis.ranks[to], group=group, tag=KINDS.index(kind))
        self._sent[kind, micro, stage] = lanes.note(lanes.SEND, f"{kind}{micro} to rank {self.axis.ranks[to]}", work), x

    def receive(self, source: int, kind: str, micro: int, stage: int) -> "PendingReceive":
        """Post the receive of the next message of a kind from a rank. `wait` on what it returns gives the message."""
        if source == self.axis.rank:
            return PendingReceive(None, self._local, (kind, micro, stage))
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        group = self._groups.get((kind, source, self.axis.rank), self.axis.group)
        work = dist.irecv(x, self.axis.ranks[source], group=group, tag=KINDS.index(kind))
        whence = f"from rank {self.axis.ranks[source]}"
        work = lanes.note(lanes.RECEIVE, f"{kind}{micro} {whence}", work)
        return PendingReceive(work, x, label=f"{self.axis.label} {whence}")

    def arrived(self, kind: str, micro: int, stage: int) -> None:
        """The other side is known to have read this message: let go of it (gloo never says that a send is done)."""
        sent = self._sent.pop((kind, micro, stage), None)
        if sent:
            sent[0].wait()

    def finish(self) -> None:
        """The end of a step. A host waits until everything is sent. A device need not: what is still on its way is kept,
        and looked at again by the sends of the next step.
        """
        if self.device.type == "cuda":
            self._forget_sent()
            return
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()

    def _forget_sent(self) -> None:
        """Let go of what is known to be sent; to ask does not wait."""
        self._sent = {key: entry for key, entry in self._sent.items() if not entry[0].is_completed()}


class PendingReceive:
    """A message that is to come."""

    def __init__(self, work, x, key=None, label: str = ""):
        self._work, self._x, self._key, self._label = work, x, key, label

    @property
    def remote(self) -> bool:
        """Whether it comes from another rank."""
        return self._work is not None

    def wait(self) -> torch.Tensor:
        if self._work is None:
            return self._x.pop(self._key)
        GroupListener.notify(self._label)
        self._work.wait()
        return self._x


def channels(stages: StageMap) -> list[tuple[str, int, int]]:
    """Every (kind, from, to) between different ranks that these stages use, in an order that all ranks know.

    >>> channels(((0, 0), (1, 0)))
    [('B', 1, 0), ('F', 0, 1)]
    """
    hops = {(a, b) for (a, _), (b, _) in zip(stages, stages[1:]) if a != b}
    return sorted({("F", a, b) for a, b in hops} | {("B", b, a) for a, b in hops})


def open_channels(mesh: Mesh, stages: StageMap) -> dict[tuple[str, int, int], dist.ProcessGroup]:
    """A process group for each channel of this rank's pipeline. All ranks of the job together.

    NCCL works through the messages of a group in one order: with one group for all, two ranks that send to each other
    at the same time would wait for ever. gloo can do without.
    """
    groups = {}
    for ranks in ranks_along(mesh.sizes, ["pp"]):
        for kind, source, target in channels(stages):
            group = dist.new_group([ranks[source], ranks[target]], timeout=mesh.timeout)
            if mesh.rank not in (ranks[source], ranks[target]):
                continue
            groups[kind, source, target] = group
            # The first message makes the connection, for which both sides have to be there: here, not in a step.
            hello = torch.zeros(1, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
            if mesh.rank == ranks[source]:
                dist.send(hello, ranks[target], group=group)
            else:
                dist.recv(hello, ranks[source], group=group)
    return groups
