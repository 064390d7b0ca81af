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
from megatron.optimizer.update import choose
from megatron.pipeline.execute import execute
from megatron.pipeline.returned import Returned
from megatron.settings import schema
from megatron.settings.batch import batch_size
from megatron.telemetry.memory import peak_bytes
from megatron.telemetry.metrics import StepMetrics
from megatron.telemetry.phases import Listening, phase
from megatron.training.build import build_run
from megatron.training.garbage import GarbageCollection
from megatron.training.outcome import Figures, Outcome
from megatron.training.recovery import interrupted, interruptible, rollback, skip_batch, stop_early
from megatron.training.state import Run


def pretrain(config: schema.Config, recipe: Recipe) -> None:
    """Train `recipe` as `config` says, on all ranks of this job, from a checkpoint if there is one to load."""
    with guarded(config.guard, config) as heartbeat:
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
    first = saved_at = run.state.iteration
    for stage in run.stages:
        stage.train()
    run.metrics.start(run.watch.heartbeat.startup)
    with interruptible(run), GarbageCollection(run.config.kernels.manual_gc_interval) as garbage:
        while run.state.iteration < run.train_iters and not run.config.batch.skip_train:
            before = run.state.iteration
            run.profiler.before(before + 1)
            step = train_step(run)
            garbage.after_step()
            if run.profiler.ends(run.state.iteration):
                with run.metrics.paused():
                    run.profiler.end(run.state.iteration)
            record_step(run, step)
            if run.state.iteration <= before:  # a spike: back at an earlier step, or this one is to be repeated
                continue
            if due(run.config.guard.check_replicas_interval, run.state.iteration):
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
    tell_end_of_training(run)
    validated = first < run.train_iters and ends_with_validation(run)
    for batches, split in ((run.valid_loader, "validation"), (run.test_loader, "test")):
        if batches and not (validated and split == "validation"):
            evaluate(run, batches, split, final=True)


def tell_end_of_training(run: Run) -> None:
    """Megatron-LM's line."""
    if not run.config.batch.skip_train:
        run.metrics.log(f"[after training is done] datetime: {time.strftime('%Y-%m-%d %H:%M:%S')}")


def evaluate_if_due(run: Run, garbage: GarbageCollection) -> bool:
    """Evaluate where --eval-interval asks for it. Behind the last step the run is saved before: an evaluation that fails
    must not cost it. Returns whether it was.
    """
    if not (run.valid_loader and due(run.config.batch.eval_interval, run.state.iteration)):
        return False
    last = run.state.iteration >= run.train_iters
    saves = last and run.checkpoint_manager is not None
    if saves:
        with run.metrics.paused("saving"):
            save_ahead(run)
    with run.metrics.paused("evaluating"):
        evaluate(run, run.valid_loader, "validation", final=last and ends_with_validation(run))
        garbage.collect()
    return saves


def save_ahead(run: Run) -> None:
    """Save the state as the evaluation that comes will leave it."""
    now, batch = run.state, run.config.batch
    more = 0 if validates_same_samples(run.config) else batch.eval_iters * batch.global_batch_size
    run.state = replace(now, consumed_valid_samples=now.consumed_valid_samples + more)
    try:
        run.save()
    finally:
        run.state = now


def record_step(run: Run, step: Optional[StepMetrics]) -> None:
    """The log and the files take in a step that was done."""
    if step is None:
        return
    run.metrics.record(step)
    if due(run.config.logging.log_interval, step.iteration):
        run.metrics.note("memory", step.iteration, bytes=peak_bytes(run.context.device.type))


def train_step(run: Run) -> Optional[StepMetrics]:
    """One optimizer step over one global batch. Advances `run.state` and says what happened.

    None where that is not read yet (`reads_late`), but for the step before, which is recorded; and where the run went
    back, or has to repeat this step: `run.state.iteration` has not become greater then.
    """
    config, watch = run.config, run.watch
    consumed, iteration = run.state.consumed_samples, run.state.iteration + 1
    size, num_microbatches = batch_size(config.batch, run.dp, consumed)
    if iteration in run.state.left_out:
        return skip_batch(run, size) if take_in_unread(run) else None
    loss_func, unscale = make_loss_func(config, run.sums, loss_scale(run), size, num_microbatches * run.dp)
    with run.phase("data", step=iteration):
        batches = micro_batches(run, run.train_loader, consumed, num_microbatches)
    with phase("passes"):
        sums = forward_backward(run, batches, loss_func, watch.heartbeat.watch, run.returned)
    with run.phase("reduce"):
        totals = run.optimizer.reduce_grads(watch.with_votes(zero_unless_first_tp_rank(run, sums), batches))
    if run.returned is not None:  # the first step of this start
        run.returned.check(watch.all_gather_object)
        run.returned = None
    if not take_in_unread(run):
        return None
    state, late = run.state, not reads_at_once(run, iteration)
    figures = Figures(totals, len(run.names), unscale, config.optimizer.clip_grad)
    outcome = Outcome(
        iteration,
        consumed + size,
        size,
        batches,
        loss_func,
        learning_rate(config.optimizer, run.lengths, state.scheduled_samples),
        decoupled_learning_rate(config.optimizer, run.lengths, state.scheduled_samples),
        figures,
        skip=watch.refuses(state.recent, figures.judged) if late else None,
        num_zeros=run.num_zeros_in_grad(iteration),
    )
    verdict = None if late else judge(run, outcome)
    if verdict is StepVerdict.ROLLBACK:
        return rollback(run, iteration)
    if verdict is not StepVerdict.SKIP:
        decay = weight_decay(config.optimizer, run.lengths, state.scheduled_samples)
        with run.phase("update"):
            run.optimizer.step(outcome.rate, decay, outcome.factor, outcome.decoupled, outcome.skip)
    run.state = state.behind(size)
    if late:
        run.unread = outcome
        return None
    return take_in(run, outcome, verdict)


def reads_at_once(run: Run, iteration: int) -> bool:
    """Whether the host waits for the numbers of a step before its update: always where that costs nothing, else where
    something that comes behind the step needs to know, or was asked for by somebody.
    """
    if not run.reads_late or iteration >= run.train_iters or run.watch.stop:
        return True
    batch, manager, logging = run.config.batch, run.checkpoint_manager, run.config.logging
    intervals = [logging.log_interval] if logging.log_params_norm or logging.log_num_zeros_in_grad else []
    intervals += [run.config.guard.check_replicas_interval, batch.exit_interval]
    intervals += [batch.eval_interval] if run.valid_loader else []
    return any(due(interval, iteration) for interval in intervals) or bool(manager and manager.due(iteration))


def loss_scale(run: Run) -> float | torch.Tensor:
    """The loss scale of the next step; on the device, an fp64 scalar, where that alone knows if the last one overflowed."""
    scaler, last = run.state.scaler, run.unread
    if last is None:
        return scaler.scale
    good, bad = scaler.update(False).scale, scaler.update(True).scale
    return good if good == bad else choose(last.overflow, bad, good)


def judge(run: Run, outcome: Outcome) -> StepVerdict:
    """What the guards say of a step, whose numbers are read for that."""
    outcome.read(run.sums, run.watch.count)
    return run.watch.judge(
        outcome.iteration,
        run.state.recent,
        next(iter(outcome.means.values())),
        outcome.norm,
        partial(find_cause, run, outcome),
        scaling=run.state.scaler.dynamic,
        rollbacks=run.state.rollbacks,
    )


def take_in_unread(run: Run) -> bool:
    """Read what came of the step before, if that was put off, and record it. False where the step at hand ends here:
    the run has gone back, or the gradients of this step are lost.
    """
    outcome = run.unread
    if outcome is None:
        return True
    verdict, run.unread = judge(run, outcome), None
    assert outcome.made == (verdict is StepVerdict.UPDATE), f"the device and the host disagree: {verdict}"
    if verdict is StepVerdict.ROLLBACK:
        rollback(run, outcome.iteration)
        return False
    if verdict is StepVerdict.SKIP:
        run.optimizer.take_back_step()
    record_step(run, take_in(run, outcome, verdict))
    return not outcome.repeated


def take_in(run: Run, outcome: Outcome, verdict: StepVerdict) -> StepMetrics:
    """Bring `run.state` up to date with what came of the last step, and say it."""
    loss, spike = next(iter(outcome.means.values())), run.watch.spike
    run.state = run.state.judged(outcome.size, verdict, loss, outcome.norm, window=run.config.guard.spike_window)
    return StepMetrics(
        outcome.iteration,
        outcome.consumed,
        outcome.size,
        outcome.means,
        learning_rate=outcome.rate,
        grad_norm=outcome.norm,
        loss_scale=run.state.scaler.scale,
        skipped=verdict is StepVerdict.SKIP,
        ledger=run.watch.ledger,
        num_zeros=outcome.num_zeros,
        params_norm=run.params_norm(outcome.iteration),
        extra=({"spike": spike.score} if spike else {})
        | ({} if outcome.decoupled is None else {"decoupled_learning_rate": outcome.decoupled}),
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


def find_cause(run: Run, outcome: Outcome) -> str:
    """Where the first value of a step that is not finite was made, in words; all ranks together."""

    def replay(on_op):
        return run.optimizer.finalize_grads(forward_backward(run, outcome.batches, outcome.loss_func, on_op))

    outcome.repeated = True
    with run.optimizer.gathered_parameters():
        return run.watch.find_culprit(run.stages, outcome.batches, replay, run.train_loader.describe)


def micro_batches(run: Run, batches: MicroBatchLoader, consumed: int, num_microbatches: int) -> list[MicroBatch]:
    """This rank's micro-batches of a step, on its device."""
    return [batch.to(run.context.device) for batch in batches.step(consumed, num_microbatches)]


def zero_unless_first_tp_rank(run: Run, sums: torch.Tensor) -> torch.Tensor:
    """A rank's sums, as its part of those over all ranks: tensor-parallel ranks have seen the same tokens."""
    return sums if run.context.mesh.tp.rank == 0 else torch.zeros_like(sums)


def make_loss_func(
    config: schema.Config,
    weights: Mapping[str, float],
    loss_scale: float | torch.Tensor,
    size: int,
    num_microbatches: int,
):
    """({name: sum} of a stage, its micro-batch) -> scalar for backward; and (all tokens, or 1, fp64) -> factor that takes
    the loss scale and the averaging out of gradients, fp64.

    weights: name of a sum -> its weight; the scalar is None where a stage has none of weight.
    loss_scale: or an fp64 scalar on the device.

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
            return None if whole is None else whole * like(factor_of(batch), whole)

        return loss_func

    if config.optimizer.loss_averaging == "micro-batch":
        scale = loss_scale / num_microbatches

        def of_batch(batch):
            tokens = torch.clamp(batch.num_sample_tokens, min=1)
            return like(scale, tokens) / tokens

        return scaled(of_batch), lambda tokens: torch.ones_like(tokens) / loss_scale
    nominal = size * config.model.seq_length
    return (
        scaled(lambda batch: loss_scale / nominal),
        lambda tokens: torch.full_like(tokens, nominal) / tokens / loss_scale,
    )


def like(factor: float | torch.Tensor, x: torch.Tensor) -> float | torch.Tensor:
    """A factor that a product with the scalar `x` leaves in the format of `x`."""
    return factor.to(x.dtype) if isinstance(factor, torch.Tensor) else factor


@torch.no_grad()
def evaluate(run: Run, batches, split: str, final: bool = False) -> dict[str, float]:
    """Mean losses over `--eval-iters` global batches of a split, or over all of it; all ranks get them.

    Each validation goes on behind the one before, unless the settings say that all have the same samples.
    """
    started = time.perf_counter()
    size = run.config.batch.global_batch_size
    num_microbatches = size // run.config.batch.micro_batch_size // run.dp
    for stage in run.stages:
        stage.eval()
    sums = torch.zeros(len(run.names), dtype=torch.float64, device=run.context.device)
    goes_on = split == "validation" and not validates_same_samples(run.config)
    start = consumed = run.state.consumed_valid_samples if goes_on else 0
    with phase("evaluate"):
        for _ in range(-(-len(batches.dataset) // size) if batches.whole else run.config.batch.eval_iters):
            run.watch.heartbeat.beat("evaluate")
            ops = run.pipeline.ops(run.wire.axis.rank, num_microbatches, training=False)
            found = micro_batches(run, batches, consumed, num_microbatches)
            sums += execute(ops, run.stages, found, run.wire, names=run.names, seed=run.config.logging.seed)
            consumed += size
        *values, tokens = collectives.all_reduce(zero_unless_first_tp_rank(run, sums), run.context.mesh.world).tolist()
    for stage in run.stages:
        stage.train()
    if goes_on:
        run.state = replace(run.state, consumed_valid_samples=consumed)
    means = {name: value / max(tokens, 1) for name, value in zip(run.sums, values, strict=True)}
    run.metrics.record_eval(
        run.state.iteration,
        run.state.consumed_samples,
        means,
        split=split,
        final=final,
        samples=range(start, min(consumed, len(batches.dataset)) if batches.whole else consumed),
        seconds=time.perf_counter() - started,
    )
    run.metrics.record_event("evaluate", run.state.iteration, run.state.consumed_samples)
    return means


def ends_with_validation(run: Run) -> bool:
    """Whether the validation behind the last step is over the samples that the one at the end would be over."""
    return validates_same_samples(run.config) and due(run.config.batch.eval_interval, run.train_iters)


def validates_same_samples(config: schema.Config) -> bool:
    """Whether all validations of a run are over the same samples."""
    return config.batch.eval_same_samples or config.data.full_validation


def due(interval: Optional[int], iteration: int) -> bool:
    """Whether something that happens every `interval` steps happens behind this one."""
    return bool(interval) and iteration % interval == 0


def reason_to_stop(run: Run) -> Optional[Stop]:
    """Why training ends before its last iteration; all ranks agree."""
    interval = run.config.batch.exit_interval
    return Stop(f"--exit-interval {interval}", False) if due(interval, run.state.iteration) else run.watch.stop
