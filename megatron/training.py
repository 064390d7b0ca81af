# SPDX-License-Identifier: Apache-2.0
"""Pretraining, top to bottom: `pretrain` builds a run and trains it; `train` is the loop; `train_step` is a step.

A run is a `Recipe` (what to train) and a `Config` (how). Whatever a step depends on is a function of `State`, which a
checkpoint keeps: data order, batch size, learning rate and dropout are all computed from the samples consumed so far.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Optional

import torch

from megatron import config as schema
from megatron.batch import batch_size, total_iterations
from megatron.errors import NumericsError
from megatron.metrics import Metrics, Step
from megatron.mpu import collectives
from megatron.mpu.context import Context
from megatron.optimizer.scaler import LossScaler
from megatron.optimizer.schedule import Lengths, learning_rate, weight_decay
from megatron.optimizer.zero import ShardedAdamW
from megatron.pipeline.execute import Wire, execute
from megatron.pipeline.schedule import make_schedule


@dataclass(frozen=True)
class Recipe:
    """What is trained; how it is trained is the same for every recipe.

    build_model:     (config, mesh, vocab_size, dtype=, device=) -> module whose forward takes (hidden, MicroBatch)
    build_datasets:  (config, tokenizer, vocab_size, sizes) -> (train, valid, test), each a dataset or None
    """

    name: str
    build_model: Callable
    build_datasets: Callable


@dataclass(frozen=True)
class State:
    """Where a run is. Everything a step depends on besides settings and weights; saved in every checkpoint."""

    scaler: LossScaler
    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0  # those whose step was not skipped: what learning rate and weight decay count
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0

    def after(self, samples: int, skipped: bool) -> "State":
        """The state after a step of this many samples."""
        return replace(
            self,
            scaler=self.scaler.update(skipped),
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + samples,
            scheduled_samples=self.scheduled_samples + (0 if skipped else samples),
            skipped_iterations=self.skipped_iterations + skipped,
        )

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**asdict(self), "scaler": self.scaler.state()}

    def restored(self, record: dict[str, Any]) -> "State":
        """This state's settings with a checkpoint's counts."""
        return replace(self, **{**record, "scaler": self.scaler.restored(record["scaler"])})


@dataclass
class Run:
    """A job in progress: what was built once, and `state`, which moves."""

    config: schema.Config
    context: Context
    stages: list[torch.nn.Module]
    wire: Wire
    optimizer: ShardedAdamW
    lengths: Lengths
    train_batches: Any
    valid_batches: Optional[Any]
    test_batches: Optional[Any]
    saver: Optional[Any]
    metrics: Metrics
    state: State
    started: float

    @property
    def dp(self) -> int:
        return self.context.mesh.dp.size

    @property
    def train_iters(self) -> int:
        return total_iterations(self.config.batch, self.dp)


def train(run: Run) -> None:
    """Train from `run.state` to the end of the run, or to where the settings say to stop."""
    batch, saved_at = run.config.batch, run.state.iteration
    for stage in run.stages:
        stage.train()
    run.metrics.start()
    while run.state.iteration < run.train_iters:
        run.metrics.record(train_step(run))
        if run.valid_batches and due(batch.eval_interval, run.state):
            with run.metrics.paused():
                evaluate(run, run.valid_batches, "validation")
        stop = reason_to_stop(run)
        if run.saver and (stop or due(run.config.checkpoint.save_interval, run.state)):
            with run.metrics.paused():
                run.saver.save(run)
            saved_at = run.state.iteration
        if stop:
            run.metrics.say(f"stopping at iteration {run.state.iteration}: {stop}")
            return
    if run.saver and saved_at < run.state.iteration:
        run.saver.save(run)
    for batches, split in ((run.valid_batches, "validation"), (run.test_batches, "test")):
        if batches:
            evaluate(run, batches, split, final=True)


def train_step(run: Run) -> Step:
    """One optimizer step over one global batch. Advances `run.state` and says what happened."""
    state, config = run.state, run.config
    size, num_micros = batch_size(config.batch, run.dp, state.consumed_samples)
    loss_of, unscale = objective(config, state.scaler.scale, size, num_micros * run.dp)
    sums = execute(
        make_schedule(config.parallel.pipeline_schedule, run.wire.axis.rank, run.wire.axis.size, num_micros),
        run.stages,
        run.train_batches.step(state.consumed_samples, num_micros),
        run.wire,
        loss_of,
    )
    (loss, tokens), norm = run.optimizer.totals(sums)
    factor = unscale(tokens.item())
    loss, norm = (loss / tokens).item(), norm * factor
    finite = math.isfinite(norm)
    if not state.scaler.dynamic and not (finite and math.isfinite(loss)):
        raise NumericsError(f"iteration {state.iteration + 1}: loss {loss}, gradient norm {norm}: not finite",
                            "no update was made", "lower --lr, raise --lr-warmup-iters, or use --bf16 instead of "
                            "--fp16; the last checkpoint is untouched")  # fmt: skip
    rate = learning_rate(config.optimizer, run.lengths, state.scheduled_samples)
    if finite:
        decay = weight_decay(config.optimizer, run.lengths, state.scheduled_samples)
        run.optimizer.step(rate, decay, factor * clip_coefficient(norm, config.optimizer.clip_grad))
    run.state = state.after(size, skipped=not finite)
    return Step(
        run.state.iteration,
        run.state.consumed_samples,
        size,
        {"lm loss": loss},
        learning_rate=rate,
        grad_norm=norm,
        loss_scale=state.scaler.scale,
        skipped=not finite,
    )


def objective(config: schema.Config, loss_scale: float, size: int, micro_batches: int):
    """(micro-batch's loss sum, tokens) -> scalar to differentiate; and what undoes its scale, given all tokens.

    `--loss-averaging token`: the mean over the unmasked tokens of the global batch. Their number is known only at the
    end of the step, so the loss is divided by the number without masks and corrected with the gradients; without masks
    the correction is exactly 1. `micro-batch`: the mean over micro-batches of the mean over their tokens.
    """
    if config.optimizer.loss_averaging == "micro-batch":
        scale = loss_scale / micro_batches
        return lambda loss, tokens: loss * (scale / torch.clamp(tokens, min=1)), lambda tokens: 1.0 / loss_scale
    nominal = size * config.model.seq_length
    return lambda loss, tokens: loss * (loss_scale / nominal), lambda tokens: nominal / max(tokens, 1) / loss_scale


def clip_coefficient(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their norm is at most `limit` (0: no limit), as in Megatron-LM."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


@torch.no_grad()
def evaluate(run: Run, batches, split: str, final: bool = False) -> float:
    """Mean loss over `--eval-iters` global batches of a split that were not seen before; all ranks get it."""
    started = time.perf_counter()
    size = run.config.batch.global_batch_size
    num_micros = size // run.config.batch.micro_batch_size // run.dp
    for stage in run.stages:
        stage.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=run.context.device)
    consumed = run.state.consumed_valid_samples if split == "validation" else 0
    for _ in range(run.config.batch.eval_iters):
        ops = make_schedule("forward-only", run.wire.axis.rank, run.wire.axis.size, num_micros)
        sums += execute(ops, run.stages, batches.step(consumed, num_micros), run.wire)
        consumed += size
    for stage in run.stages:
        stage.train()
    if split == "validation":
        run.state = replace(run.state, consumed_valid_samples=consumed)
    loss, tokens = collectives.all_reduce(sums, run.context.mesh.world).tolist()
    mean = loss / max(tokens, 1)
    run.metrics.record_eval(run.state.iteration, run.state.consumed_samples, {"lm loss": mean}, split=split,
                            label=f" on {split} set" if final else "", seconds=time.perf_counter() - started)  # fmt: skip
    return mean


def due(interval: Optional[int], state: State) -> bool:
    """Whether something that happens every `interval` steps happens now."""
    return bool(interval) and state.iteration % interval == 0


def reason_to_stop(run: Run) -> Optional[str]:
    """Why training ends before its last iteration, in words; all ranks agree."""
    batch = run.config.batch
    if due(batch.exit_interval, run.state):
        return f"--exit-interval {batch.exit_interval}"
    if batch.exit_duration_in_mins is None:
        return None
    over = torch.tensor([float((time.time() - run.started) / 60 > batch.exit_duration_in_mins)])
    over = collectives.all_reduce(over.to(run.context.device), run.context.mesh.world, "max").item()
    return f"--exit-duration-in-mins {batch.exit_duration_in_mins:g}" if over else None
