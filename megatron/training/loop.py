# SPDX-License-Identifier: Apache-2.0
"""Pretraining, top to bottom: `pretrain` builds a run and trains it; `train` is the loop; `train_step` is a step.

A run is a `Recipe` (what to train) and a `Config` (how). Whatever a step depends on is a function of `State`, which a
checkpoint keeps: data order, batch size, learning rate and dropout are all computed from the samples consumed so far.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Optional

import torch

from megatron.data.loader import MicroBatch, MicroBatchLoader
from megatron.guard.endings import guarded
from megatron.guard.replicas import check_replicas
from megatron.guard.stopping import Stop
from megatron.guard.watch import StepVerdict
from megatron.model.recipe import Recipe
from megatron.mpu import collectives
from megatron.optimizer.lr_schedule import decoupled_learning_rate, learning_rate, weight_decay
from megatron.pipeline.execute import execute
from megatron.pipeline.returned import Returned
from megatron.settings import schema
from megatron.settings.batch import batch_size
from megatron.telemetry.memory import peak_bytes
from megatron.telemetry.metrics import StepMetrics
from megatron.telemetry.phases import Listening, phase
from megatron.training.build import build_run
from megatron.training.garbage import GarbageCollection
from megatron.training.recovery import interrupted, interruptible, rollback, skip_batch, stop_early
from megatron.training.state import Run, State


def pretrain(config: schema.Config, recipe: Recipe) -> None:
    """Train `recipe` as `config` says, on all ranks of this job, from a checkpoint if there is one to load."""
    with guarded(config.guard) as heartbeat:
        run = build_run(config, recipe, heartbeat)
        try:
            with Listening.with_timers(run.metrics.timers):
                train(run)
        except BaseException as error:
            run.close(error)
            if isinstance(error, KeyboardInterrupt):
                raise interrupted(run) from None
            raise
        run.close()


def train(run: Run) -> None:
    """Train from `run.state` to the end of the run, or to where the settings say to stop."""
    saved_at = run.state.iteration
    for stage in run.stages:
        stage.train()
    run.metrics.start(run.watch.heartbeat.startup)
    with interruptible(run), GarbageCollection(run.config.kernels.manual_gc_interval) as garbage:
        while run.state.iteration < run.train_iters:
            run.profiler.before(run.state.iteration + 1)
            step = train_step(run)
            garbage.after_step()
            if run.profiler.ends(run.state.iteration):
                with run.metrics.paused():
                    run.profiler.end(run.state.iteration)
            if step is None:  # a spike: the run is back at an earlier step
                continue
            record_step(run, step)
            if due(run.config.guard.check_replicas_interval, run.state):
                check_replicas(run.optimizer, run.state.iteration)
            saved = evaluate_if_due(run, garbage)
            stop = reason_to_stop(run)
            if run.checkpoint_manager and not saved and (stop or run.checkpoint_manager.due(run.state.iteration)):
                with run.metrics.paused("saving"):
                    run.save()
                    garbage.collect()
                saved = True
            saved_at = run.state.iteration if saved else saved_at
            if stop:
                return stop_early(run, stop)
        if run.checkpoint_manager and saved_at < run.state.iteration:
            run.save()
    for batches, split in ((run.valid_loader, "validation"), (run.test_loader, "test")):
        if batches:
            evaluate(run, batches, split, final=True)


def evaluate_if_due(run: Run, garbage: GarbageCollection) -> bool:
    """Evaluate where --eval-interval asks for it. Behind the last step the run is saved before: an evaluation that fails
    must not cost it. Returns whether it was.
    """
    if not (run.valid_loader and due(run.config.batch.eval_interval, run.state)):
        return False
    last = run.checkpoint_manager is not None and run.state.iteration >= run.train_iters
    if last:
        with run.metrics.paused("saving"):
            save_ahead(run)
    with run.metrics.paused("evaluating"):
        evaluate(run, run.valid_loader, "validation")
        garbage.collect()
    return last


def save_ahead(run: Run) -> None:
    """Save the state as the evaluation that comes will leave it."""
    now, batch = run.state, run.config.batch
    more = batch.eval_iters * batch.global_batch_size
    run.state = replace(now, consumed_valid_samples=now.consumed_valid_samples + more)
    try:
        run.save()
    finally:
        run.state = now


def record_step(run: Run, step: StepMetrics) -> None:
    """The log and the files take in a step that was done."""
    run.metrics.record(step)
    if due(run.config.logging.log_interval, run.state):
        run.metrics.note("memory", run.state.iteration, bytes=peak_bytes(run.context.device.type))


def train_step(run: Run) -> Optional[StepMetrics]:
    """One optimizer step over one global batch. Advances `run.state` and says what happened; None where it went back."""
    state, config, watch = run.state, run.config, run.watch
    size, num_microbatches = batch_size(config.batch, run.dp, state.consumed_samples)
    if state.iteration + 1 in state.left_out:
        return skip_batch(run, size)
    loss_func, unscale = make_loss_func(config, run.sums, state.scaler.scale, size, num_microbatches * run.dp)
    with run.phase("data", step=state.iteration + 1):
        batches = micro_batches(run, run.train_loader, state.consumed_samples, num_microbatches)
    with phase("passes"):
        sums = forward_backward(run, batches, loss_func, watch.heartbeat.watch, run.returned)
    with run.phase("reduce"):
        totals, norm = run.optimizer.finalize_grads(watch.with_votes(zero_unless_first_tp_rank(run, sums), batches))
    if run.returned is not None:  # the first step of this start
        run.returned.check(watch.all_gather_object)
        run.returned = None
    *values, tokens = watch.count(totals)
    factor = unscale(tokens)
    means, norm = {name: value / max(tokens, 1) for name, value in zip(run.sums, values, strict=True)}, norm * factor
    loss = next(iter(means.values()))
    verdict = watch.judge(
        state.iteration + 1,
        state.recent,
        loss,
        norm,
        partial(find_cause, run, batches, loss_func),
        scaling=state.scaler.dynamic,
        rollbacks=state.rollbacks,
    )
    if verdict is StepVerdict.ROLLBACK:
        return rollback(run)
    rate = learning_rate(config.optimizer, run.lengths, state.scheduled_samples)
    decoupled = decoupled_learning_rate(config.optimizer, run.lengths, state.scheduled_samples)
    if verdict is StepVerdict.UPDATE:
        decay = weight_decay(config.optimizer, run.lengths, state.scheduled_samples)
        with run.phase("update"):
            run.optimizer.step(rate, decay, factor * clip_coefficient(norm, config.optimizer.clip_grad), decoupled)
    run.state = state.after(size, verdict, loss, norm, window=config.guard.spike_window)
    return StepMetrics(
        run.state.iteration,
        run.state.consumed_samples,
        size,
        means,
        learning_rate=rate,
        grad_norm=norm,
        loss_scale=run.state.scaler.scale,
        skipped=verdict is StepVerdict.SKIP,
        ledger=watch.ledger,
        extra=({"spike": watch.spike.score} if watch.spike else {})
        | ({} if decoupled is None else {"decoupled_learning_rate": decoupled}),
    )


def forward_backward(
    run: Run, batches: Sequence[MicroBatch], loss_func, on_op, returned: Optional[Returned] = None
) -> torch.Tensor:
    """Forward and backward passes of a step, in the order of the schedule; this rank's sums."""
    ops = run.pipeline.ops(run.wire.axis.rank, len(batches))
    record = run.recorder.record() if run.recorder else None
    run.optimizer.set_num_microbatches(len(batches))
    more = dict(timeline=record, on_op=on_op, returned=returned, seed=run.config.logging.seed)
    sums = execute(ops, run.stages, batches, run.wire, loss_func, names=run.names, **more)
    if record is not None:
        run.recorder.write(record)
    return sums


def find_cause(run: Run, batches: Sequence[MicroBatch], loss_func) -> str:
    """Where the first value of this step that is not finite was made, in words; all ranks together."""

    def replay(on_op):
        return run.optimizer.finalize_grads(forward_backward(run, batches, loss_func, on_op))

    with run.optimizer.gathered_parameters():
        return run.watch.find_culprit(run.stages, batches, replay, run.train_loader.describe)


def micro_batches(run: Run, batches: MicroBatchLoader, consumed: int, num_microbatches: int) -> list[MicroBatch]:
    """This rank's micro-batches of a step, on its device."""
    return [batch.to(run.context.device) for batch in batches.step(consumed, num_microbatches)]


def zero_unless_first_tp_rank(run: Run, sums: torch.Tensor) -> torch.Tensor:
    """A rank's sums, as its part of those over all ranks: tensor-parallel ranks have seen the same tokens."""
    return sums if run.context.mesh.tp.rank == 0 else torch.zeros_like(sums)


def make_loss_func(
    config: schema.Config, weights: Mapping[str, float], loss_scale: float, size: int, num_microbatches: int
):
    """({name: sum} of a stage, its micro-batch) -> scalar for backward; and (all tokens) -> factor that takes
    the loss scale and the averaging out of gradients.

    weights: name of a sum -> its weight; the scalar is None where a stage has none of weight.

    `--loss-averaging token`: the mean over the unmasked tokens of the global batch. Their number is known only at the
    end of the step, so the loss is divided by the number without masks and corrected with the gradients; without masks
    the correction is exactly 1. `micro-batch`: the mean over micro-batches of the mean over their tokens.
    """

    def total(sums):
        parts = [
            sums[name] if weight == 1.0 else sums[name] * weight
            for name, weight in weights.items()
            if weight and name in sums
        ]
        return sum(parts[1:], parts[0]) if parts else None

    def scaled(factor_of):
        def loss_func(sums, batch):
            whole = total(sums)
            return None if whole is None else whole * factor_of(batch)

        return loss_func

    if config.optimizer.loss_averaging == "micro-batch":
        scale = loss_scale / num_microbatches
        return scaled(lambda batch: scale / torch.clamp(batch.num_tokens, min=1)), lambda tokens: 1.0 / loss_scale
    nominal = size * config.model.seq_length
    return scaled(lambda batch: loss_scale / nominal), lambda tokens: nominal / max(tokens, 1) / loss_scale


def clip_coefficient(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their norm is at most `limit` (0: no limit), as in Megatron-LM."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


@torch.no_grad()
def evaluate(run: Run, batches, split: str, final: bool = False) -> dict[str, float]:
    """Mean losses over `--eval-iters` global batches of a split that were not seen before; all ranks get them."""
    started = time.perf_counter()
    size = run.config.batch.global_batch_size
    num_microbatches = size // run.config.batch.micro_batch_size // run.dp
    for stage in run.stages:
        stage.eval()
    sums = torch.zeros(len(run.names), dtype=torch.float64, device=run.context.device)
    consumed = run.state.consumed_valid_samples if split == "validation" else 0
    with phase("evaluate"):
        for _ in range(run.config.batch.eval_iters):
            run.watch.heartbeat.beat("evaluate")
            ops = run.pipeline.ops(run.wire.axis.rank, num_microbatches, training=False)
            found = micro_batches(run, batches, consumed, num_microbatches)
            sums += execute(ops, run.stages, found, run.wire, names=run.names, seed=run.config.logging.seed)
            consumed += size
        *values, tokens = collectives.all_reduce(zero_unless_first_tp_rank(run, sums), run.context.mesh.world).tolist()
    for stage in run.stages:
        stage.train()
    if split == "validation":
        run.state = replace(run.state, consumed_valid_samples=consumed)
    means = {name: value / max(tokens, 1) for name, value in zip(run.sums, values, strict=True)}
    run.metrics.record_eval(
        run.state.iteration,
        run.state.consumed_samples,
        means,
        split=split,
        label=f" on {split} set" if final else "",
        seconds=time.perf_counter() - started,
    )
    run.metrics.record_event("evaluate", run.state.iteration, run.state.consumed_samples)
    return means


def due(interval: Optional[int], state: State) -> bool:
    """Whether something that happens every `interval` steps happens now."""
    return bool(interval) and state.iteration % interval == 0


def reason_to_stop(run: Run) -> Optional[Stop]:
    """Why training ends before its last iteration; all ranks agree."""
    interval = run.config.batch.exit_interval
    return Stop(f"--exit-interval {interval}", False) if due(interval, run.state) else run.watch.stop
