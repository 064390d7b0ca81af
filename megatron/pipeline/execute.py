# SPDX-License-Identifier: Apache-2.0
"""Run a pipeline schedule: one loop for training and evaluation, with one stage or many.

A schedule is a list of `Op`s per rank (pipeline/schedule.py); the verifier has proved that each directed channel is
first in, first out, so messages need no tags. Without a pipeline the list is F0 B0 F1 B1 ... and nothing is sent.

Between the passes of a micro-batch a rank holds its input x, and the *edge* of the autograd graph that produced the
output. The output itself belongs to the message that carries it, and is freed with that.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from torch.autograd.graph import get_gradient_edge

from megatron.mpu.deferred_wgrad import attach_weight_grad_store, run_deferred_wgrads
from megatron.mpu.random import seed_torch
from megatron.mpu.two_passes import TwoPasses
from megatron.pipeline.data_parallel_messages import MESSAGES, Step, passes_of, steps_of
from megatron.pipeline.schedule import BESIDE, Op, StageMap, looped
from megatron.pipeline.stage_outputs import StageOutputs
from megatron.pipeline.wire import P2PCommunicator, PendingReceive
from megatron.telemetry.phases import phase

__all__ = ["P2PCommunicator", "execute"]


class _Neighbours(NamedTuple):
    """A chunk's stage number, and the ranks of the stages before and after it (None: there is none)."""

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
    returned: Optional[StageOutputs] = None,
    seed: Optional[int] = None,
    needs_gradient: Optional[Sequence[bool]] = None,
    messages: Optional[Any] = None,
) -> torch.Tensor:
    """Run one rank's ops. Returns the sums of `names` over its micro-batches, in fp64.

    A stage returns its output for the next stage, or (output, {name: sum}) with sums to add up: the last stage its loss
    and the number of tokens, any stage values to log, or to minimize in addition to the loss.

    stages:     this rank's model chunks; `wire.stages` maps them to stages
    batches:    micro-batches by number; every stage has them (positions, masks, sample numbers)
    loss_func:  ({name: sum} of a stage, its micro-batch) -> the scalar to differentiate, or None if the sums have none;
                without a loss_func no gradients at all
    timeline:   gets (op, start, end) of each op in seconds of `time.perf_counter`, without waits for messages. Two passes
                that take turns (`mpu/two_passes.py`) have the same times
    on_op:      called with each op before the wait for its message
    needs_gradient: for each chunk, whether anything before it is trained: else the gradient of its input is not needed, and
                zeros are sent; default: all
    returned:   collects the outputs of stages for a later `check`; without it a wrong output raises SettingsError here
    seed:       seeds torch's generators before a forward pass, together with micro-batch and stage; None: they are not
    messages:   `optimizer.messages.Messages`, which run the messages of data parallelism in `ops` (`sharding.py`)
    """
    passes = passes_of(ops)
    split = any(op.kind == "W" for op in passes)
    runner = _OpRunner(
        stages,
        batches,
        wire,
        loss_func,
        names,
        split=split,
        returned=returned,
        seed=seed,
        needs_gradient=needs_gradient,
    )

    def run(op: Op, inside: Sequence[Op], arrived: Optional[torch.Tensor]) -> None:
        with messages.passing(op, inside) if messages else nullcontext():
            runner.do(op, arrived)

    prefetcher = RecvPrefetcher(passes, runner.post_receive)
    with TwoPasses() if BESIDE in ops else nullcontext() as turns:
        for step in steps_of(ops):
            if step[0][0].kind in MESSAGES:
                messages.run(step[0][0])
                continue
            arrived = []
            for op, _ in step:
                if on_op is not None:
                    on_op(op)
                message = prefetcher.message_of(op)
                arrived.append(message and runner.receive(op, message))
            start = runner.now() if timeline is not None else 0.0
            with _phase(step):
                work = [partial(run, op, inside, x) for (op, inside), x in zip(step, arrived)]
                turns.run(*work) if len(work) > 1 else work[0]()
            if timeline is not None:
                end = runner.now()
                timeline += [(op, start, end) for op, _ in step]
    return runner.finish()


def _phase(step: Step) -> AbstractContextManager:
    (op, _), *others = step
    return phase("FB", " & ".join(str(op) for op, _ in step)) if others else phase(op.kind, op)


class RecvPrefetcher:
    """Posts the next receive of a rank's ops before the present op computes, so that the message overlaps computation.

    Never more than one: a posted receive of NCCL occupies a part of the device until its message arrives.
    """

    def __init__(self, ops: Sequence[Op], post: Callable[[Op], Optional[PendingReceive]]):
        self.rest, self.post = iter(ops), post
        self.posted: dict[Op, PendingReceive] = {}
        self.advance()

    def advance(self) -> None:
        """Post receives up to and including the next one from another rank."""
        for op in self.rest:
            message = self.post(op)
            if message is not None:
                self.posted[op] = message
                if message.remote:
                    return

    def message_of(self, op: Op) -> Optional[PendingReceive]:
        """The receive posted for this op; None if it needs none."""
        message = self.posted.pop(op, None)
        if message is not None and message.remote:
            self.advance()
        return message


class _OpRunner:
    """Runs single ops of one rank, and holds their activations."""

    def __init__(
        self,
        stages,
        batches,
        wire: P2PCommunicator,
        loss_func,
        names: Sequence[str],
        split: bool,
        returned: Optional[StageOutputs],
        seed: Optional[int],
        needs_gradient: Optional[Sequence[bool]],
    ):
        self.seed, self.needs_gradient = seed, needs_gradient or [True] * len(stages)
        self.returned, self.compared_later = returned or StageOutputs(names), returned is not None
        self.chunks, self.batches, self.wire, self.loss_func, self.names = stages, batches, wire, loss_func, names
        self.places = [
            _neighbours(wire.stages or looped(wire.axis.size, len(stages)), wire.axis.rank, chunk)
            for chunk in range(len(stages))
        ]
        self.live: dict[tuple[int, int], tuple] = {}  # (micro, chunk) -> input, edge of the output
        self.deferred = attach_weight_grad_store(stages) if split else None
        self.products: dict[tuple[int, int], list] = {}  # (micro, chunk) -> products that I defers to W
        self.sums: list[torch.Tensor] = []  # of stages and micro-batches

    def now(self) -> float:
        if self.wire.device.type == "cuda":
            torch.cuda.synchronize(self.wire.device)
        return time.perf_counter()

    def post_receive(self, op: Op) -> Optional[PendingReceive]:
        """Post the receive of an op's message from another stage; None if it needs none."""
        place = self.places[op.chunk]
        if op.kind == "W":
            return None
        source, kind = (place.before, "F") if op.kind == "F" else (place.after, "B")
        return None if source is None else self.wire.receive(source, kind, op.micro, place.stage)

    def receive(self, op: Op, message: PendingReceive) -> torch.Tensor:
        """Wait for an op's message."""
        with phase(f"receive {op.kind}"):
            return message.wait()

    def do(self, op: Op, arrived: Optional[torch.Tensor]) -> None:
        if op.kind == "F":
            self.forward(op, arrived)
        elif op.kind == "W":
            run_deferred_wgrads(self.products.pop((op.micro, op.chunk)))
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
            # Keep only the graph of an output that is sent: the backward pass does not need its data. There is no graph
            # where everything before is frozen.
            graph = place.after is not None and y.requires_grad
            if own is not None and place.after is not None and not own.requires_grad:
                own = None
            self.live[op.micro, op.chunk] = x, get_gradient_edge(y) if graph else None, own

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Add a stage's sums of a micro-batch."""
        some = next(iter(sums.values()))
        zero = torch.zeros((), dtype=torch.float64, device=some.device)
        self.sums.append(torch.stack([sums[name].detach().double() if name in sums else zero for name in self.names]))

    def backward(self, op: Op, gradient: Optional[torch.Tensor]) -> None:
        """Run B, or I: the same, but with the products for gradients of weights deferred to W."""
        place, (x, y, own) = self.places[op.chunk], self.live.pop((op.micro, op.chunk))
        if place.after is not None:
            self.wire.arrived("F", op.micro, place.stage + 1)  # a gradient proves that the output was received
        roots, gradients = ([], []) if y is None else ([y], [gradient])
        if own is not None:
            roots, gradients = [*roots, own], [*gradients, None]
        with self.deferred.collect() if op.kind == "I" else nullcontext() as products:
            if roots:
                torch.autograd.backward(roots, gradients)
        if op.kind == "I":
            self.products[op.micro, op.chunk] = products
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
