# SPDX-License-Identifier: Apache-2.0
"""Phases of a step: one context announces a phase to the profiler, the timers, the timeline and the times of the rank.

    with phase("reduce"):
        ...

A phase is a part of a step, or of the work between steps. Some are also written to the heartbeat (`Run.phase`, and the
executor's `on_op`).
"""

import contextlib
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Optional

import torch

from megatron.telemetry import lanes, rank_times
from megatron.telemetry.timers import Timed, Timers


class Phase(NamedTuple):
    """The names of a phase."""

    words: str  # in the trace of a profiler
    timed: Timed


PHASES = {
    # Level 1: the parts of a step, one after the other.
    "data": Phase("data", Timed("batch-generator", 1)),
    "passes": Phase("forward and backward passes", Timed("forward-backward", 1)),
    "reduce": Phase("reduce gradients", Timed("all-grads-sync", 1)),
    "update": Phase("update weights", Timed("optimizer", 1)),
    "gather": Phase("gather weights", Timed("params-all-gather", 1)),
    # Between steps, or apart from them.
    "evaluate": Phase("evaluate", Timed("evaluate", 1, apart=True)),
    "save": Phase("save", Timed("save-checkpoint", 1, apart=True)),
    "rerun": Phase("compute a step again", Timed("rerun", 1, apart=True)),
    # Level 2: of the passes, then of the optimizer.
    "F": Phase("forward", Timed("forward-compute", 2)),
    "B": Phase("backward", Timed("backward-compute", 2)),
    "FB": Phase("forward and backward in turns", Timed("forward-backward-in-turns", 2)),
    "I": Phase("gradients of activations", Timed("backward-input-compute", 2)),
    "W": Phase("gradients of weights", Timed("backward-weight-compute", 2)),
    "receive F": Phase("receive activations", Timed("forward-recv", 2)),
    "receive B": Phase("receive gradients", Timed("backward-recv", 2)),
    "receive I": Phase("receive gradients", Timed("backward-recv", 2)),
    "send F": Phase("send activations", Timed("forward-send", 2)),
    "send B": Phase("send gradients", Timed("backward-send", 2)),
    "partial": Phase("sum partial gradients", Timed("partial-grads-all-reduce", 2)),
    "norm": Phase("gradient norm", Timed("optimizer-grad-norm", 2)),
    "scale": Phase("scale gradients", Timed("optimizer-unscale-and-clip", 2)),
    "inner": Phase("update rule", Timed("optimizer-inner-step", 2)),
    "copy": Phase("copy weights", Timed("optimizer-copy-main-to-model-params", 2)),
}


class ActiveTimers:
    """The timers of this process that measure phases. Output only: training never depends on them."""

    timers: Optional[Timers] = None

    @classmethod
    @contextlib.contextmanager
    def with_timers(cls, timers: Optional[Timers]):
        """A context in which `timers` measure phases."""
        before, cls.timers = cls.timers, timers
        try:
            yield
        finally:
            cls.timers = before


DRAWN = ("data", "F", "B", "FB", "I", "W", "reduce", "update")  # bars of the compute lane, one after the other


def phase(name: str, which: object = "") -> AbstractContextManager:
    """A context that announces a phase: `with phase("update"):`. Almost free while nothing measures.

    which: one of several passes, for the timeline
    """
    timer = ActiveTimers.timers and ActiveTimers.timers.timer_of(name)
    part = rank_times.span_of(name)
    # A profile of all threads is not one of this thread.
    profiled = torch.autograd._profiler_enabled() or lanes.Recording.active is not None
    if not profiled and not (timer and part):
        return timer or part or nullcontext()
    bar = lanes.span(lanes.COMPUTE, str(which) or name) if name in DRAWN else None
    span = torch.profiler.record_function(PHASES[name].words) if profiled else None
    return _all([listener for listener in (timer, part, bar, span) if listener])


@contextlib.contextmanager
def _all(listeners: list[AbstractContextManager]):
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        yield
