# SPDX-License-Identifier: Apache-2.0
"""The messages between ranks that share a model in the generation engine, beside those of its layers (`stages`).

    stage 0, tp 0  --pass-->  stage 0, tp 1 ...                    a broadcast in the stage's tensor parallel group
         |                        |
        pass                     pass                              from each rank to its neighbour in the pipeline
         v                        v
    stage 1, tp 0             stage 1, tp 1
         |
      answer, from the last stage to the first

Each message is sent for one that is received: no rank waits for a message that does not come. Sends do not wait. What a
rank has sent for a pass is kept until the passes after it have been answered. Over NCCL, messages between two ranks are one
queue, in which an answer would wait for the next pass, and that for the answer; so there only one pass is under way.
"""

from collections import deque
from collections.abc import Sequence
from typing import Optional

import torch
import torch.distributed as dist

from megatron.mpu import collectives
from megatron.mpu.groups import GroupListener
from megatron.mpu.mesh import Axis

PLAN, ANSWER = 2, 4  # tags of messages


class Link:
    """The messages of one rank. tp, pp: the ranks that share a stage, and the stages."""

    def __init__(self, tp: Axis, pp: Axis, device: torch.device):
        self.tp, self.pp, self.device = tp, pp, device
        self.is_first, self.answers = tp.rank == pp.rank == 0, tp.rank == 0 and pp.rank == pp.size - 1
        self.under_way = pp.size
        if pp.size > 1 and dist.get_backend(pp.group) == "nccl":
            self.under_way = 1
        self._sent: deque[tuple] = deque()  # (work, tensor)

    @property
    def alone(self) -> bool:
        return self.tp.size == self.pp.size == 1

    def tell(self, kind: int, numbers: Sequence[int] = (), more: bytes = b"") -> None:
        """Pass a message on to the ranks after this one."""
        if self.alone:
            return
        self._forward(
            torch.tensor([kind, len(numbers), len(more)], dtype=torch.int64),
            torch.tensor(numbers, dtype=torch.int64),
            torch.frombuffer(bytearray(more), dtype=torch.uint8) if more else torch.empty(0, dtype=torch.uint8),
        )

    def received(self) -> tuple[int, list[int], bytes]:
        """The next message of the first rank, which is passed on."""
        head = self._received(torch.empty(3, dtype=torch.int64))
        kind, count, more = head.tolist()
        numbers = self._received(torch.empty(count, dtype=torch.int64))
        extra = self._received(torch.empty(more, dtype=torch.uint8))
        self._forward(head, numbers, extra, broadcast=False)
        return kind, numbers.tolist(), bytes(extra.tolist())

    def _forward(self, *parts: torch.Tensor, broadcast: bool = True) -> None:
        for part in parts:
            if not part.numel():
                continue
            part = part.to(self.device)
            if broadcast and self.tp.size > 1:
                collectives.broadcast(part, self.tp, 0)
            if self.pp.rank + 1 < self.pp.size:
                self._send(part, self.pp.rank + 1, PLAN)

    def _received(self, part: torch.Tensor) -> torch.Tensor:
        """A part of the first rank's message: from the stage before, or in the first stage from its first rank."""
        if not part.numel():
            return part
        part = part.to(self.device)
        if self.pp.rank == 0:
            return collectives.broadcast(part, self.tp, 0)
        return self._receive(part, self.pp.rank - 1, PLAN)

    def send_answer(self, numbers: Sequence[float]) -> None:
        """The last stage's answer to a pass, and a 0, so that each pass has one."""
        self._send(torch.tensor([*numbers, 0.0], dtype=torch.float64, device=self.device), 0, ANSWER)

    def receive_answer(self, count: int) -> list[float]:
        empty = torch.empty(count + 1, dtype=torch.float64, device=self.device)
        return self._receive(empty, self.pp.size - 1, ANSWER).tolist()[:-1]

    def _send(self, x: torch.Tensor, to: int, tag: int) -> None:
        self._sent.append((dist.isend(x, self.pp.ranks[to], group=self.pp.group, tag=tag), x))
        while len(self._sent) > 8 * (self.under_way + 1):  # a pass has at most 5: these belong to answered ones
            self._sent.popleft()[0].wait()

    def _receive(self, x: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        GroupListener.notify(f"{self.pp.label} from rank {self.pp.ranks[source]}")
        dist.recv(x, self.pp.ranks[source], group=self.pp.group, tag=tag)
        return x

    def finish(self) -> None:
        """Wait until all messages are sent."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def shared(self, lists: Optional[Sequence[Sequence[int]]]) -> list[list[int]]:
        """Lists of numbers, from the first rank to all."""
        if self.is_first:
            self.tell(0, [number for one in lists for number in (len(one), *one)])
        else:
            each, lists = iter(self.received()[1]), []
            for count in each:
                lists.append([next(each) for _ in range(count)])
        self.finish()
        return lists
