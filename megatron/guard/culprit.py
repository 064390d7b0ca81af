# SPDX-License-Identifier: Apache-2.0
"""Locate the first non-finite value of a step: the step runs again with hooks on every module.

The step is a function of weights and samples (dropout is drawn by position), so the replay computes the same numbers. If
all values are finite in the replay, the cause is not deterministic: faulty memory, a faulty device, or a kernel that
reads uninitialized memory.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import nn

from megatron.pipeline.schedule import Op

WEIGHT, FORWARD, BACKWARD, ARRIVED = range(4)  # ARRIVED: a gradient received from the next stage


@dataclass(frozen=True, order=True)
class Finding:
    """A non-finite value on one rank. Findings sort by time: the smallest came first."""

    kind: int
    micro: int
    order: int  # number of the module's pass within the micro-batch
    rank: int
    module: str
    samples: tuple[int, ...] = field(compare=False, default=())  # places in the order of training

    def __str__(self) -> str:
        if self.kind == WEIGHT:
            return f"rank {self.rank}: the weights {self.module} are not finite themselves"
        passing = "forward" if self.kind == FORWARD else "backward"
        return f"rank {self.rank}, micro-batch {self.micro}: first in the {passing} pass of {self.module}"


class Observer:
    """Hooks on all modules of a rank, while a step is repeated."""

    def __init__(self, stages: Iterable[nn.Module], batches, rank: int = 0):
        self.stages, self.batches, self.rank = list(stages), batches, rank
        self.findings: list[Finding] = []
        self.micro, self.order = 0, 0
        self.last = ""  # the module whose backward pass is running
        self.arrived = False  # a bad gradient was received, before any module's backward pass
        self.handles: list = []

    def on_op(self, op: Op) -> None:
        """Start of an op of the schedule."""
        self.micro, self.order, self.last, self.arrived = op.micro, 0, "", False

    @contextlib.contextmanager
    def watching(self):
        """A context in which hooks check every pass through the stages."""
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if not _finite(parameter):
                    self.findings.append(Finding(WEIGHT, 0, 0, self.rank, name))
                if parameter.requires_grad:
                    self.handles.append(parameter.register_hook(self._gradient_of(name)))
            for name, module in stage.named_modules():
                self.handles.append(module.register_forward_hook(self._output_of(name or "loss and output layer")))
        eager = getattr(torch.compiler, "set_stance", None)
        try:
            with eager("force_eager") if eager else contextlib.nullcontext():
                yield self
        finally:
            for handle in self.handles:
                handle.remove()

    def _output_of(self, name: str) -> Callable:
        def check(module, inputs, output):
            self.order += 1
            outputs = _tensors(output)
            if all(map(_finite, _tensors(inputs))) and not all(map(_finite, outputs)):
                self._add(FORWARD, name, outputs)
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_at(name))

        return check

    def _gradient_at(self, name: str) -> Callable:
        """A hook that checks the gradient of a module's output. The backward pass of the following module computes it."""

        def check(gradient):
            self.order += 1
            if _finite(gradient):
                self.last = name
            else:
                self.arrived = self.arrived or not self.last
                self._add(ARRIVED if self.arrived else BACKWARD, self.last or f"what follows {name}")

        return check

    def _gradient_of(self, name: str) -> Callable:
        def check(gradient):
            self.order += 1
            if not _finite(gradient):
                self._add(ARRIVED if self.arrived else BACKWARD, name)

        return check

    def _add(self, kind: int, module: str, outputs=()) -> None:
        samples = self.batches[self.micro].samples.tolist()
        for output in outputs:  # [s, b, ...]: perhaps only some samples are not finite
            if output.dim() >= 2 and output.shape[1] == len(samples):
                not_finite = ~torch.isfinite(output).transpose(0, 1).flatten(1).all(1)
                samples = [sample for sample, bad in zip(samples, not_finite.tolist()) if bad]
                break
        samples = tuple(samples)
        self.findings.append(Finding(kind, self.micro, self.order, self.rank, module, samples))

    @property
    def first(self) -> Optional[Finding]:
        """This rank's first finding; None if every value was finite."""
        return min(self.findings, default=None)


def _tensors(values) -> list[torch.Tensor]:
    values = values if isinstance(values, (tuple, list)) else (values,)
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
