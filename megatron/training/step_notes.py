# SPDX-License-Identifier: Apache-2.0
"""Notes about problems that show in the steps of a run, each logged once per launch, also in metrics.jsonl."""

import contextlib
import time
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

    def after(self, run, step: StepMetrics) -> None:
        """Check a recorded step. run: `training.state.Run`."""
        self._log_once(run, step.iteration, "no learning rate", no_rate(run, step))
        interval = run.config.logging.log_interval
        if interval and step.iteration % interval == 0 and (loads := expert_loads(run)):
            run.metrics.record_experts(step.iteration, step.consumed_samples, loads)
            for layer, own in loads.items():
                self._note_idle(run, step.iteration, layer, own)

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


def no_rate(run, step: StepMetrics) -> str:
    """A note if the learning rate is 0 up to the last step; otherwise ""."""
    optimizer, decoupled = run.config.optimizer, step.extra.get("decoupled_learning_rate", 0)
    if step.learning_rate or decoupled or not zero_to_the_end(optimizer, run.lengths, run.state.scheduled_samples):
        return ""
    iters = run.config.batch.train_iters is not None
    size, unit = (run.config.batch.global_batch_size, "iters") if iters else (1, "samples")
    return (
        f"the learning rate is 0 from iteration {step.iteration} to the last one, {run.train_iters}: the weights do not "
        f"change. Its curve ended after {run.lengths.decay / size:g} {'steps' if iters else 'samples'} (--lr-decay-"
        f"{unit}) at --min-lr 0; raise one of the two to continue learning"
    )
