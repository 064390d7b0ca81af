# SPDX-License-Identifier: Apache-2.0
"""`--torch-compile auto`: tries compiled layers in the first steps of a launch, and keeps them if they pay.

    steps 1 to 4    eager; they give the time that is left
    steps 5, 6      compiled, if that time is long enough to pay for the compiler; the first of them waits for it
    steps 7 to 26   eager and compiled in turn: so a machine that becomes slower or faster meanwhile changes both
    then            the faster of the two, to the end of the launch

All of them are ordinary steps of the training.
"""

import contextlib
import time
from collections.abc import Iterator
from statistics import median

import torch

from megatron.model.language_model import LanguageModel
from megatron.mpu import collectives
from megatron.telemetry import figures

EAGER, COMPILING, PAIRS = 4, 2, 10  # steps of the three parts; a pair is two steps
LARGEST_GAIN = 0.06  # share of a step that compiled layers save at most (docs/proof)
COMPILER = 60.0  # seconds that the compiler is assumed to take
LEAST_GAIN = 0.01  # share of a step that has to be saved: less is noise


class CompileTrial:
    """The trial of one launch. active: whether there is one; otherwise nothing is measured or changed."""

    def __init__(self, active: bool):
        self.active = active
        self.seconds: list[float] = []  # of each step so far

    @property
    def compiles(self) -> bool:
        """Whether the next step runs compiled layers."""
        done = len(self.seconds) - EAGER
        return 0 <= done < COMPILING or done >= COMPILING and done % 2 == 1

    @contextlib.contextmanager
    def running(self, run) -> Iterator[None]:
        """Around all steps of a launch. run: `training.state.Run`"""
        if not self.active:
            yield
            return
        self._deferring = run.pending.defers_host_sync
        run.pending.defers_host_sync = False  # a step ends before the next
        try:
            yield
        finally:
            if len(self.seconds) > EAGER:
                torch.compiler.set_stance("default")

    @contextlib.contextmanager
    def timed(self, run) -> Iterator[None]:
        """Around a step."""
        if not self.active:
            yield
            return
        if len(self.seconds) == EAGER:
            self._begin(run)
        if len(self.seconds) >= EAGER:
            torch.compiler.set_stance("default" if self.compiles else "force_eager")
        compiling = EAGER <= len(self.seconds) < EAGER + COMPILING
        patience = run.watch.heartbeat.patient(10 * COMPILER) if compiling else contextlib.nullcontext()
        begun = time.perf_counter()
        with patience:
            yield
        self.seconds.append(time.perf_counter() - begun)
        if len(self.seconds) in (EAGER, EAGER + COMPILING + 2 * PAIRS):
            seconds = collectives.broadcast_object(self.seconds, run.context.mesh.world)
            verdict = judge(seconds, run.train_iters - run.state.iteration)
            if verdict is not None:
                self._end(run, *verdict)

    def _begin(self, run) -> None:
        for model in run.stages:
            if isinstance(model, LanguageModel):
                model.compile_layers()
        if run.alarm:
            run.alarm.durations.clear()  # the compiler takes longer than a step

    def _end(self, run, compiled: bool, words: str) -> None:
        self.active = False
        run.pending.defers_host_sync = self._deferring
        if len(self.seconds) > EAGER:
            torch.compiler.set_stance("default" if compiled else "force_eager")
        words = f"--torch-compile auto: layers are {'' if compiled else 'not '}compiled: {words}"
        run.metrics.log(f"note: {words}")
        run.metrics.note("note", run.state.iteration, what="torch compile", words=words)


def judge(seconds: list[float], left: int) -> tuple[bool, str] | None:
    """Whether to compile the layers for the `left` steps, and why; None: the trial goes on.

    seconds: of all steps of the trial so far, with the first part or all parts of it

    >>> judge([3.0, 0.5, 0.5, 0.5], 1000)
    (False, 'the 1,000 steps left take about 500.00 s; that would save at most 6% of it, and compiling takes about 60.00 s')
    >>> judge([3.0, 0.5, 0.5, 0.5], 10_000) is None
    True
    >>> judge([3.0, 0.5, 0.5, 0.5] + [40.0, 0.5] + [0.5, 0.48] * 10, 10_000)[0]
    True
    """
    if len(seconds) == EAGER:
        rest = left * median(seconds[1:])
        if rest * LARGEST_GAIN > COMPILER and left > 4 * PAIRS:
            return None
        return False, (
            f"the {left:,} steps left take about {figures.seconds(rest)}; that would save at most {LARGEST_GAIN:.0%} of "
            f"it, and compiling takes about {figures.seconds(COMPILER)}"
        )
    pairs = seconds[EAGER + COMPILING :]
    eager, compiled = pairs[::2], pairs[1::2]
    gain = 1 - median(one / other for one, other in zip(compiled, eager, strict=True))
    times = (
        f"a step takes {figures.seconds(median(compiled))} with compiled layers and {figures.seconds(median(eager))} "
        f"without (median of {len(eager)} pairs: {abs(gain):.1%} {'less' if gain >= 0 else 'more'})"
    )
    if gain < LEAST_GAIN:
        return False, times
    saved, spent = left * gain * median(eager), sum(seconds[EAGER : EAGER + COMPILING])
    return True, f"{times}, which saves about {figures.seconds(saved)}; compiling took {figures.seconds(spent)}"
