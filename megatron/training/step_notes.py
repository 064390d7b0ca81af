# SPDX-License-Identifier: Apache-2.0
"""Notes about problems that show in the steps of a run, each logged once per launch, also in metrics.jsonl."""

import contextlib
import math
import time
from collections import Counter
from typing import Optional

import torch

from megatron.mpu import collectives
from megatron.mpu.placement import DATA_PARALLEL
from megatron.optimizer.lr_schedule import zero_to_the_end
from megatron.telemetry.step_metrics import StepMetrics
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


ENOUGH = 20  # tokens of an expert on average: with fewer, one without tokens may be chance


def expert_loads(run) -> dict[str, list[int]]:
    """Layer -> tokens of each expert in the last step, over all ranks: {"blocks.1": [12, 9, ...]}, and "mtp.0.layers.0" of
    a depth of multi-token prediction. {} without experts.

    All ranks call it. run: `training.state.Run`
    """
    model, mesh = run.config.model, run.context.mesh
    if not model.mixture:
        return {}
    names = {layer: f"blocks.{layer}" for layer in model.expert_layers}
    ahead = [model.has_experts(layer) for layer in model.layers_ahead]
    for depth in range(model.own_depths):
        first = model.num_layers + depth * len(ahead)
        names |= {first + number: f"mtp.{depth}.layers.{number}" for number, has in enumerate(ahead) if has}
    layers = list(names)
    loads = torch.zeros((len(layers), model.num_experts), dtype=torch.int64, device=run.context.device)
    if all(mesh.coordinates[axis] == 0 for axis in (*DATA_PARALLEL, "cp", "tp")):  # others of the stage have the same
        for module in run.optimizer.buffers.updating:
            if getattr(module, "last_load", None) is not None:
                loads[layers.index(module.layer)] = module.last_load
    total = collectives.all_reduce(loads, mesh.world)
    return dict(zip(names.values(), total.tolist()))


def idle_experts(layer: str, loads: list[int], iteration: int) -> str:
    """A note about experts of a layer that got no token in a step; "" if all have some, or few tokens are expected.

    >>> idle_experts("blocks.1", [50, 0, 70, 40], 7)[:50]
    'blocks.1: 1 of 4 experts got no token in step 7 (1'
    """
    idle = [number for number, load in enumerate(loads) if load == 0]
    mean = sum(loads) / len(loads)
    if not idle or mean < ENOUGH:
        return ""
    shown = ", ".join(map(str, idle[:8])) + ", ..." * (len(idle) > 8)
    return (
        f"{layer}: {len(idle)} of {len(loads)} experts got no token in step {iteration} ({shown}; the mean is {mean:.0f} "
        "tokens), and do not learn; raise --moe-aux-loss-coeff, or use --moe-router-enable-expert-bias"
    )
