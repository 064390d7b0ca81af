# SPDX-License-Identifier: Apache-2.0
"""Pretraining, top to bottom: `pretrain` builds a run and trains it; `train` is the loop; `train_step` is a step.

A run is a `Recipe` (what to train) and a `Config` (how). Whatever a step depends on is a function of `State`, which a
checkpoint keeps: data order, batch size, learning rate and dropout are all computed from the samples consumed so far.
"""

import math
import time
from dataclasses import replace
from typing import Optional

import torch

from megatron import config as schema
from megatron.batch import batch_size
from megatron.data.loader import Batches, MicroBatch
from megatron.errors import NumericsError
from megatron.metrics import Step
from megatron.mpu import collectives
from megatron.optimizer.schedule import learning_rate, weight_decay
from megatron.pipeline.execute import execute
from megatron.run import Recipe, Run, State
from megatron.startup import build_run


def pretrain(config: schema.Config, recipe: Recipe) -> None:
    """Train `recipe` as `config` says, on all ranks of this job, from a checkpoint if there is one to load."""
    run = build_run(config, recipe)
    try:
        train(run)
    finally:
        run.close()


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
                run.save()
            saved_at = run.state.iteration
        if stop:
            run.metrics.say(f"stopping at iteration {run.state.iteration}: {stop}")
            return
    if run.saver and saved_at < run.state.iteration:
        run.save()
    for batches, split in ((run.valid_batches, "validation"), (run.test_batches, "test")):
        if batches:
            evaluate(run, batches, split, final=True)


def train_step(run: Run) -> Step:
    """One optimizer step over one global batch. Advances `run.state` and says what happened."""
    state, config = run.state, run.config
    size, num_micros = batch_size(config.batch, run.dp, state.consumed_samples)
    loss_of, unscale = objective(config, state.scaler.scale, size, num_micros * run.dp)
    record = run.recorder.record() if run.recorder else None
    sums = execute(
        run.pipeline.ops(run.wire.axis.rank, num_micros),
        run.stages,
        micro_batches(run, run.train_batches, state.consumed_samples, num_micros),
        run.wire,
        loss_of,
        timeline=record,
    )
    if record is not None:
        run.recorder.write(record)
    (loss, tokens), norm = run.optimizer.totals(counted_once(run, sums))
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
        loss_scale=run.state.scaler.scale,
        skipped=not finite,
    )


def micro_batches(run: Run, batches: Batches, consumed: int, num_micros: int) -> list[MicroBatch]:
    """This rank's micro-batches of a step, on its device."""
    return [batch.to(run.context.device) for batch in batches.step(consumed, num_micros)]


def counted_once(run: Run, sums: torch.Tensor) -> torch.Tensor:
    """A rank's loss and tokens, as its part of the sum over all ranks: tensor-parallel ranks have seen the same ones."""
    return sums if run.context.mesh.tp.rank == 0 else torch.zeros_like(sums)


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
        ops = run.pipeline.ops(run.wire.axis.rank, num_micros, training=False)
        sums += execute(ops, run.stages, micro_batches(run, batches, consumed, num_micros), run.wire)
        consumed += size
    for stage in run.stages:
        stage.train()
    if split == "validation":
        run.state = replace(run.state, consumed_valid_samples=consumed)
    loss, tokens = collectives.all_reduce(counted_once(run, sums), run.context.mesh.world).tolist()
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
