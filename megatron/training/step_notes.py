# SPDX-License-Identifier: Apache-2.0
"""What steps show and no figure of the log says in words: each is said once a start, in the log and in metrics.jsonl."""

import contextlib
import math
import time
from collections import deque
from typing import Optional

from megatron.optimizer.lr_schedule import zero_to_the_end
from megatron.telemetry.step_metrics import StepMetrics
from megatron.training.pace import Pace

IN_A_ROW = 10  # steps after the warm-up whose losses are all above that of a guess


class StepNotes:
    """Listens to the steps of one start."""

    def __init__(self):
        self._told: set[str] = set()
        self._pace: Optional[Pace] = None
        self._losses: deque[float] = deque(maxlen=IN_A_ROW)

    def after(self, run, step: StepMetrics) -> None:
        """Take in a step that was recorded. run: `training.state.Run`."""
        self._tell(run, step.iteration, "no learning rate", no_rate(run, step))
        self._tell(run, step.iteration, "loss above a guess", self._worse_than_a_guess(run, step))

    @contextlib.contextmanager
    def timed(self, run):
        """Inside is a step."""
        self._pace, begun = self._pace or Pace.of(run.context), time.monotonic()
        yield
        now = time.monotonic()
        self._tell(run, run.state.iteration, "busy machine", self._pace.after(now - begun, now))

    def _tell(self, run, iteration: int, what: str, words: str) -> None:
        if words and what not in self._told:
            self._told.add(what)
            run.metrics.log(f"note: {words}")
            run.metrics.note("note", iteration, what=what, words=words)

    def _worse_than_a_guess(self, run, step: StepMetrics) -> str:
        name, loss = next(iter(step.losses.items()), ("", math.nan))
        if (
            name not in run.metrics.run.perplexities
            or step.skipped
            or run.state.scheduled_samples <= run.lengths.warmup
        ):
            return ""
        self._losses.append(float(loss))
        guess = math.log(run.vocab_size)
        if len(self._losses) < IN_A_ROW or min(self._losses) <= guess:
            return ""
        return (
            f"the {name} of each of the last {IN_A_ROW} steps was above {guess:.3f}, which is ln({run.vocab_size}): to "
            f"guess all tokens alike is better (iteration {step.iteration}: {self._losses[-1]:.3f}); lower --lr, or warm "
            "up for longer, where this does not end soon"
        )


def no_rate(run, step: StepMetrics) -> str:
    """That the weights no longer change, where that is so up to the last step."""
    optimizer, decoupled = run.config.optimizer, step.extra.get("decoupled_learning_rate", 0)
    if step.learning_rate or decoupled or not zero_to_the_end(optimizer, run.lengths, run.state.scheduled_samples):
        return ""
    iters = run.config.batch.train_iters is not None
    size, unit = (run.config.batch.global_batch_size, "iters") if iters else (1, "samples")
    return (
        f"the learning rate is 0 from iteration {step.iteration} to the last one, {run.train_iters}: the weights stay as "
        f"they are. Its curve ended after {run.lengths.decay / size:g} {'steps' if iters else 'samples'} (--lr-decay-"
        f"{unit}) at --min-lr 0; raise one of the two to go on learning"
    )
