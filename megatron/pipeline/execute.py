# SPDX-License-Identifier: Apache-2.0
"""The one loop that runs any schedule: training and evaluation, one stage or many.

A schedule is a list of `Op`s per rank (pipeline/schedule.py); the verifier has proved that each directed channel is
first in, first out, so messages need no names. Without a pipeline the list is F0 B0 F1 B1 ... and nothing is sent.

What a rank holds of a micro-batch between its passes: the input x, and the *edge* of the graph where the output was
made. The output itself belongs to the message that carries it, and is freed with that.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Optional

import torch
from torch.autograd.graph import get_gradient_edge

from megatron.mpu.deferred_wgrad import attach_weight_grad_store, run_deferred_wgrads
from megatron.mpu.random import seed_torch
from megatron.pipeline.returned import Returned
from megatron.pipeline.schedule import Op, StageMap, looped
from megatron.pipeline.wire import P2PCommunicator, PendingReceive
from megatron.telemetry.phases import phase

__all__ = ["P2PCommunicator", "execute"]


class _Neighbours(NamedTuple):
    """Of a chunk: its stage number, and the ranks that hold the stages before and after (None: there is none)."""

    stage: int
    before: Optional[int]
    after: Optional[int]


def execute(
    ops: Sequence[Op],
    stages: Sequence[torch.nn.Module],
    batches: Sequence,
    wire: P2PCommunicator,
    loss_func: Optional[Callable] = None,
    *,
    names: Sequence[str] = ("lm loss", "tokens"),
    timeline: Optional[list] = None,
    on_op: Optional[Callable[[Op], Any]] = None,
    returned: Optional[Returned] = None,
    seed: Optional[int] = None,
    needs_gradient: Optional[Sequence[bool]] = None,
) -> torch.Tensor:
    """Run one rank's ops. Returns its sums over its micro-batches, those of `names`, in fp64.

    A stage returns what goes to the next one; or (that, {name: sum}), where it has sums of its own to contribute: the
    last stage its loss and the tokens that count, any stage what it wants to have logged, or minimised beside the loss.

    stages:     this rank's model chunks; which stage chunk c is says `wire.stages`
    batches:    micro-batches by number; every stage has them (positions, masks, sample numbers)
    loss_func:  ({name: sum} of a stage, its micro-batch) -> the scalar whose gradient is taken, or None where the sums have
                none; without an loss_func no gradients at all
    timeline:   gets (op, start, end) of each op in seconds of `time.perf_counter`, waiting for messages left out
    on_op:      called with each op before its message is waited for
    returned:   takes note of what stages return, for its `check`; without it what cannot be raises SettingsError here
    needs_gradient: of each chunk, whether anything before it is trained: else nobody needs the gradient of its input, and
                zeros are sent; default: all
    seed:       with micro-batch and stage what torch's generators are seeded by before a forward pass; None: they are not
    """
    split = any(op.kind == "W" for op in ops)
    work = _Work(stages, batches, wire, loss_func, names, split=split, returned=returned, seed=seed)
    work.needs_gradient = needs_gradient or work.needs_gradient
    ahead = _Ahead(ops, work.post_receive)
    for op in ops:
        if on_op is not None:
            on_op(op)
        message = ahead.message_of(op)
        arrived = message and work.receive(op, message)
        start = work.now() if timeline is not None else 0.0
        with phase(op.kind, op):
            work.do(op, arrived)
        if timeline is not None:
            timeline.append((op, start, work.now()))
    return work.finish()


class _Ahead:
    """Posts the receives of a rank's ops in their order: that of the next op that needs a message of another rank, whatever
    lies between, before the op at hand computes. So the message arrives beside all of that, and one buffer lies ready, no
    more: a posted receive of NCCL occupies a part of the device until its message comes.
    """

    def __init__(self, ops: Sequence[Op], post: Callable[[Op], Optional[PendingReceive]]):
        self.rest, self.post = iter(ops), post
        self.posted: dict[Op, PendingReceive] = {}
        self.advance()

    def advance(self) -> None:
        """Post receives up to the next one from another rank."""
        for op in self.rest:
            message = self.post(op)
            if message is not None:
                self.posted[op] = message
                if message.remote:
                    return

    def message_of(self, op: Op) -> Optional[PendingReceive]:
        """What was posted for this op; None if it needs nothing."""
        message = self.posted.pop(op, None)
        if message is not None and message.remote:
            self.advance()
        return message


class _Work:
    """What one rank holds while it works through its ops."""

    def __init__(
        self,
        stages,
        batches,
        wire: P2PCommunicator,
        loss_func,
        names: Sequence[str],
        split: bool,
        returned: Optional[Returned],
        seed: Optional[int],
    ):
        self.seed, self.needs_gradient = seed, [True] * len(stages)
        self.returned, self.compared_later = returned or Returned(names), returned is not None
        self.chunks, self.batches, self.wire, self.loss_func, self.names = stages, batches, wire, loss_func, names
        self.places = [
            _neighbours(wire.stages or looped(wire.axis.size, len(stages)), wire.axis.rank, chunk)
            for chunk in range(len(stages))
        ]
        self.live: dict[tuple[int, int], tuple] = {}  # (micro, chunk) -> input, edge of the output
        self.deferred = attach_weight_grad_store(stages) if split else None
        self.products: dict[tuple[int, int], list] = {}  # (micro, chunk) -> what I has left for W
        self.sums: list[torch.Tensor] = []  # of stages and micro-batches

    def now(self) -> float:
        if self.wire.device.type == "cuda":
            torch.cuda.synchronize(self.wire.device)
        return time.perf_counter()

    def post_receive(self, op: Op) -> Optional[PendingReceive]:
        """Post the receive of what an op needs from another rank; None if it needs nothing."""
        place = self.places[op.chunk]
        if op.kind == "W":
            return None
        source, kind = (place.before, "F") if op.kind == "F" else (place.after, "B")
        return None if source is None else self.wire.receive(source, kind, op.micro, place.stage)

    def receive(self, op: Op, message: PendingReceive) -> torch.Tensor:
        """Wait for what an op needs from another rank."""
        with phase(f"receive {op.kind}"):
            return message.wait()

    def do(self, op: Op, arrived: Optional[torch.Tensor]) -> None:
        if op.kind == "F":
            self.forward(op, arrived)
        elif op.kind == "W":
            run_deferred_wgrads(self.products.pop(op[1:]))
        else:
            self.backward(op, arrived)

    def forward(self, op: Op, x: Optional[torch.Tensor]) -> None:
        place, training = self.places[op.chunk], self.loss_func is not None
        if x is not None and training and self.needs_gradient[op.chunk]:
            x.requires_grad_()
        if self.seed is not None:
            first = self.batches[op.micro].samples[0].item()
            seed_torch(self.wire.device, self.seed, "training" if training else "evaluation", first, place.stage)
        y, sums = self.returned.take(self.chunks[op.chunk](x, self.batches[op.micro]))
        if not self.compared_later:
            self.returned.raise_fault()
        if sums:
            self.add(sums)
        if place.after is not None:
            with phase("send F"):
                self.wire.send(y.detach(), place.after, "F", op.micro, place.stage + 1)
        if training:
            own = self.loss_func(sums, self.batches[op.micro]) if sums else None
            # Of an output that is sent only the graph is kept: its data is no part of the backward pass. There is none
            # where all that it was made of is frozen.
            graph = place.after is not None and y.requires_grad
            if own is not None and place.after is not None and not own.requires_grad:
                own = None
            self.live[op[1:]] = x, get_gradient_edge(y) if graph else None, own

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Note a stage's sums of a micro-batch."""
        some = next(iter(sums.values()))
        zero = torch.zeros((), dtype=torch.float64, device=some.device)
        self.sums.append(torch.stack([sums[name].detach().double() if name in sums else zero for name in self.names]))

    def backward(self, op: Op, gradient: Optional[torch.Tensor]) -> None:
        """B, or I: the same, but products for gradients of weights are kept for W."""
        place, (x, y, own) = self.places[op.chunk], self.live.pop(op[1:])
        if place.after is not None:
            self.wire.arrived("F", op.micro, place.stage + 1)  # a gradient proves that the output was received
        roots, gradients = ([], []) if y is None else ([y], [gradient])
        if own is not None:
            roots, gradients = [*roots, own], [*gradients, None]
        with self.deferred.collect() if op.kind == "I" else nullcontext() as products:
            if roots:
                torch.autograd.backward(roots, gradients)
        if op.kind == "I":
            self.products[op[1:]] = products
        if place.before is not None:
            with phase("send B"):
                gradient = torch.zeros_like(x) if x.grad is None else x.grad  # None: nothing depends on x
                self.wire.send(gradient, place.before, "B", op.micro, place.stage - 1)

    def finish(self) -> torch.Tensor:
        if self.wire.axis.size > 1:
            with phase("send B"):  # the last messages of a step are gradients
                self.wire.finish()
        assert not self.live and not self.products, f"left over: {sorted(self.live)} {sorted(self.products)}"
        if self.sums:
            return torch.stack(self.sums).sum(0)
        return torch.zeros(len(self.names), dtype=torch.float64, device=self.wire.device)


def _neighbours(stages: StageMap, rank: int, chunk: int) -> _Neighbours:
    stage = stages.index((rank, chunk))
    before = stages[stage - 1][0] if stage > 0 else None
    after = stages[stage + 1][0] if stage + 1 < len(stages) else None
    return _Neighbours(stage, before, after)
