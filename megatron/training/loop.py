# SPDX-License-Identifier: Apache-2.0
"""The pretraining loop: `pretrain` builds a run and trains it; `train` is the loop; `train_step` is a step.

A run is a `Recipe` (what to train) and a `Config` (how). A step depends only on `State`, which checkpoints contain: data
order, batch size, learning rate and dropout are computed from the number of consumed samples.
"""

import time
from collections.abc import Callable, Sequence
from typing import Optional

from megatron.checkpoint.first_launch import same_place
from megatron.errors import Failure, SettingsError, is_out_of_memory
from megatron.guard.endings import guarded
from megatron.guard.replicas import check_replicas
from megatron.guard.stopping import Stop
from megatron.model.recipe import Recipe
from megatron.settings import rank_env, schema
from megatron.telemetry.memory import MemoryInUse, memory_line, memory_use
from megatron.telemetry.notify import open_events
from megatron.telemetry.phases import ActiveTimers
from megatron.training.build import build_run
from megatron.training.evaluation import (
    ends_with_validation,
    evaluate,
    evaluate_if_due,
    evaluate_if_missed,
    evaluate_requests,
)
from megatron.training.events import record_start, recorded_drift, recorded_end
from megatron.training.garbage import GarbageCollection
from megatron.training.hooks import hook_makers, make_hooks
from megatron.training.measures import copy_best, early_end_reason, restore_best
from megatron.training.recovery import interrupted, interruptible, stop_early
from megatron.training.state import Run, due
from megatron.training.step import record_step, train_step


def pretrain(
    config: schema.Config,
    recipe: Recipe,
    planned_memory: Sequence[int] = (),
    refusal: Optional[SettingsError] = None,
    explain_memory: Optional[Callable[[BaseException, schema.Config, MemoryInUse], Failure]] = None,
) -> None:
    """Train `recipe` with the settings `config` on all ranks of this job, from a checkpoint if there is one to load.

    planned_memory: predicted bytes on the device of each pipeline rank, to log next to the memory in use
    refusal: the reason why this rank cannot train, which all ranks then raise
    explain_memory: makes the failure for an error of memory during training
    """
    events = open_events(config.logging, config.checkpoint.save, active=rank_env.ranks().rank == 0)
    # The heartbeat reports the end before the last events are sent, so a supervisor does not wait for them.
    resumes = same_place(config.checkpoint.load, config.checkpoint.save)
    with recorded_end(events, resumes), guarded(config.guard, config) as heartbeat:
        makers = hook_makers(config, recipe.hooks)  # report unknown names first
        run = build_run(config, recipe, heartbeat, refusal, events)
        try:
            run.hooks = make_hooks(makers, run.config)
            restore_hooks(run)
            with ActiveTimers.with_timers(run.metrics.timers), run.ranks.measuring(), run.compiling.running(run):
                train(run, planned_memory)
            run.hooks.end(run)
        except BaseException as raised:
            error = raised
            if explain_memory and is_out_of_memory(raised):
                error = explain_memory(raised, run.config, run.memory_in_use())
            run.hooks.end(run, error)
            run.close(error)
            if isinstance(error, KeyboardInterrupt):
                raise interrupted(run) from None
            if error is raised:
                raise
            raise error from raised
        run.close()


def restore_hooks(run: Run) -> None:
    """Load the state of hooks from the checkpoint."""
    for notice in run.hooks.load(run.saved_hooks) if run.saved_hooks is not None else ():
        run.metrics.log(f"note: {notice}")


def train(run: Run, planned_memory: Sequence[int] = ()) -> None:
    """Train from `run.state` to the end of the run, or until it has to stop."""
    first = saved_at = run.state.iteration
    for stage in run.stages:
        stage.train()
    run.hooks.call("before_training", run)
    record_start(run)
    if run.alarm:
        run.alarm.start()
    run.metrics.start(run.watch.heartbeat.startup)
    copy_best(run)
    run.note_memory()
    with interruptible(run), GarbageCollection(run.config.kernels.manual_gc_interval) as garbage:
        missed = evaluate_if_missed(run, garbage)
        while run.state.iteration < run.train_iters and not run.config.batch.skip_train and not early_end_reason(run):
            before, consumed = run.state.iteration, run.state.consumed_samples
            run.profiler.before(before + 1)
            run.hooks.call("before_step", run)
            with run.notes.timed(run), run.compiling.timed(run):
                step = train_step(run)
            garbage.after_step()
            run.note_memory()
            if run.profiler.ends(run.state.iteration):
                with run.metrics.paused():
                    run.profiler.end(run.state.iteration)
            record_step(run, step)
            run.ranks.after_step(run)
            if run.state.iteration <= before:  # after a spike: rolled back, or the step is repeated
                continue
            epoch = run.ended_epoch(run.state.iteration, consumed, run.state.consumed_samples)
            run_periodic_checks(run, epoch, planned_memory)
            saved = evaluate_if_due(run, garbage, epoch)
            stop = reason_to_stop(run)
            saved = saved or save_if_due(run, garbage, epoch, stop)
            saved_at = run.state.iteration if saved else saved_at
            if stop:
                run.watch.stop = stop
                return stop_early(run, stop)
        if run.checkpoints.manager and saved_at < run.state.iteration:
            run.save()
    log_end_of_training(run)
    weights_of = restore_best(run)
    ended = (missed or first < run.train_iters) and run.train_iters <= run.state.iteration
    validated = ended and ends_with_validation(run) and not run.checkpoints.best
    for batches, split in ((run.loaders.valid, "validation"), (run.loaders.test, "test")):
        if batches and not (validated and split == "validation"):
            evaluate(run, batches, split, final=True, weights_of=weights_of)
    evaluate_requests(run, final=True)
    if run.losses.measures and run.losses.measures.folder and not run.config.data.mock_data:
        run.metrics.log(f" > predictions: {run.losses.measures.folder}")


def save_if_due(run: Run, garbage: GarbageCollection, epoch: int, stop: Optional[Stop]) -> bool:
    """Save a checkpoint if one is due after a step, else keep a snapshot in memory if that is due. Whether it saved one"""
    snapshots = run.checkpoints.snapshots
    if run.checkpoints.manager and (stop or run.save_is_due(run.state.iteration, epoch)):
        with run.metrics.paused("saving"):
            run.save()
            garbage.collect()
        return True
    if snapshots and snapshots.due(run.state.iteration):
        with run.metrics.paused("saving"):
            run.save_snapshot()
    return False


def run_periodic_checks(run: Run, epoch: int, planned_memory: Sequence[int]) -> None:
    """Run the periodic checks and log lines that are due after a step. epoch: number of the epoch that it ended, or 0."""
    config, iteration = run.config, run.state.iteration
    if due(config.guard.check_replicas_interval, iteration):
        with recorded_drift(run.events, iteration):
            check_replicas(run.optimizer, iteration)
    if due(config.logging.log_memory_interval, iteration):
        log_memory(run, planned_memory)
    if epoch and config.logging.log_epoch:
        run.metrics.record_epoch(epoch, iteration)


def log_memory(run: Run, planned: Sequence[int]) -> None:
    """Log the rank with the most memory in use. All ranks call it. planned: predicted bytes of each pipeline rank."""
    pairs = run.context.all_gather_object((memory_use(run.context.device.type), run.context.mesh.pp.rank))
    uses, stages = zip(*pairs, strict=True)
    run.metrics.log(memory_line(uses, [planned[stage] for stage in stages] if planned else (), run.state.iteration))


def log_end_of_training(run: Run) -> None:
    """Log Megatron-LM's line, the reason of an early end, and the mean throughput if requested."""
    if (why := early_end_reason(run)) and run.state.iteration < run.train_iters:
        run.metrics.log(f" > training ends at iteration {run.state.iteration} of {run.train_iters}: {why}")
    run.notes.finish(run)
    if not run.config.batch.skip_train:
        run.metrics.log_mean_throughput(run.state.iteration)
        run.metrics.log(f"[after training is done] datetime: {time.strftime('%Y-%m-%d %H:%M:%S')}")


def reason_to_stop(run: Run) -> Optional[Stop]:
    """The reason to stop before the last iteration, the same on all ranks; None: continue."""
    interval = run.config.batch.exit_interval
    return Stop(f"--exit-interval {interval}", False) if due(interval, run.state.iteration) else run.watch.stop
