# SPDX-License-Identifier: Apache-2.0
"""Notes about problems that show in the steps of a run, each logged once per launch, also in metrics.jsonl."""

import contextlib
import math
import time
from collections import Counter
from typing import Optional

from megatron.optimizer.lr_schedule import zero_to_the_end
from megatron.telemetry.step_metrics import StepMetrics
from megatron.training.expert_loads import expert_loads, idle_experts
from megatron.training.pace import Pace


class StepNotes:
    """Watches the steps of one launch."""

    def __init__(self):
        self._logged: set[str] = set()
        self._pace: Optional[Pace] = None
        self._steps = 0
        self._unchanged: Counter[str] = Counter()  # why steps changed no weight -> their number

    def after(self, run, step: StepMetrics) -> None:
        """Check a recorded step. run: `training.state.Run`."""
        self._steps += 1
        if why := why_unchanged(run, step):
            self._unchanged[why] += 1
        self._log_once(run, step.iteration, "no learning rate", no_rate(run, step))
        interval = run.config.logging.log_interval
        if interval and step.iteration % interval == 0 and (loads := expert_loads(run)):
            run.metrics.record_experts(step.iteration, step.consumed_samples, loads)
            for layer, own in loads.items():
                self._note_idle(run, step.iteration, layer, own)

    def finish(self, run) -> None:
        """Warn at the end of training if no step of this launch changed a weight."""
        if not self._steps or self._unchanged.total() < self._steps:
            return
        shares = [f"{count} {'was' if count == 1 else 'were'} {why}" for why, count in self._unchanged.items()]
        counts = f"all {shares[0]}" if len(shares) == 1 else f"of {self._steps}, {'; '.join(shares)}"
        counts = counts.replace("all 1 was", "the only one was")
        words = f"no step of this launch changed a weight: {counts}"
        run.metrics.log(f"warning: {words}")
        run.metrics.note("note", run.state.iteration, what="unchanged weights", words=words)

    def _note_idle(self, run, iteration: int, layer: str, loads: list[int]) -> None:
        what, words = f"idle experts of {layer}", idle_experts(layer, loads, iteration)
        if words and what not in self._logged:
            idle = [number for number, load in enumerate(loads) if load == 0]
            facts = dict(layer=layer, experts=idle, mean=sum(loads) / len(loads))
            run.events.record("idle_experts", words, iteration=iteration, **facts)
        self._log_once(run, iteration, what, words)

    @contextlib.contextmanager
    def timed(self, run):
        """Measure the duration of a step, which runs inside the context."""
        self._pace, begun = self._pace or Pace.of(run.context), time.monotonic()
        yield
        now = time.monotonic()
        self._log_once(run, run.state.iteration, "busy machine", self._pace.after(now - begun, now))

    def _log_once(self, run, iteration: int, what: str, words: str) -> None:
        if words and what not in self._logged:
            self._logged.add(what)
            run.metrics.log(f"note: {words}")
            run.metrics.note("note", iteration, what=what, words=words)


def why_unchanged(run, step: StepMetrics) -> str:
    """Why a step changed no weight, as the predicate of a sentence about it; "" if it changed them."""
    if step.skipped:
        finite = all(map(math.isfinite, step.losses.values()))
        if not (run.state.scaler.dynamic and finite and not math.isfinite(step.grad_norm or 0.0)):
            return "skipped"
        start = run.config.precision.initial_loss_scale
        return f"skipped (gradients overflow; the loss scale starts at --initial-loss-scale {start:g}: lower it)"
    if step.learning_rate or step.extra.get("decoupled_learning_rate", 0):
        return ""
    return f"at learning rate 0 ({why_zero(run, step)})"


def why_zero(run, step: StepMetrics) -> str:
    """Why the learning rate of a recorded step was 0, and what to do."""
    iters = run.config.batch.train_iters is not None
    size, unit, name = (run.config.batch.global_batch_size, "steps", "iters") if iters else (1, "samples", "samples")
    if in_warmup(run, step):
        warmup = f"warm-up of {run.lengths.warmup / size:g} {unit}"
        return f"{warmup} begins at --lr-warmup-init 0; train more steps, or leave the warm-up out"
    decay = f"its curve ended after {run.lengths.decay / size:g} {unit} (--lr-decay-{name}) at --min-lr 0"
    return f"{decay}; raise one of the two to continue learning"


def in_warmup(run, step: StepMetrics) -> bool:
    """Whether a recorded step began within the warm-up."""
    began = run.state.scheduled_samples - (0 if step.skipped else step.batch_size)
    return began <= run.lengths.warmup > 0


def no_rate(run, step: StepMetrics) -> str:
    """A note if the learning rate is 0 after the warm-up and up to the last step; otherwise ""."""
    optimizer, decoupled = run.config.optimizer, step.extra.get("decoupled_learning_rate", 0)
    if step.learning_rate or decoupled or in_warmup(run, step):
        return ""
    if not zero_to_the_end(optimizer, run.lengths, run.state.scheduled_samples):
        return ""
    return (
        f"the learning rate is 0 from iteration {step.iteration} to the last one, {run.train_iters}: the weights do not "
        f"change; {why_zero(run, step)}"
    )
