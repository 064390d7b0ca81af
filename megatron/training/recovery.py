# SPDX-License-Identifier: Apache-2.0
"""Exceptional steps of the loop: skipped batches, the rollback to a checkpoint after a spike, an early stop."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Optional

from megatron.checkpoint.choose import checkpoints
from megatron.errors import Interrupted, NumericsError, Preempted
from megatron.guard.resume_command import last_checkpoint, resume_command
from megatron.guard.stopping import Stop
from megatron.guard.watch import StepVerdict
from megatron.optimizer.lr_schedule import learning_rate
from megatron.storage.urls import location
from megatron.telemetry.step_metrics import StepMetrics
from megatron.training.checkpointing import load
from megatron.training.state import Run


def skip_batch(run: Run, size: int) -> StepMetrics:
    """Take a step without training on its samples."""
    state = run.state
    run.metrics.log(
        f"iteration {state.iteration + 1} is left out: samples {state.consumed_samples} to "
        f"{state.consumed_samples + size - 1}"
    )
    # Nothing was computed, so the loss scale counts neither a good step nor an overflow.
    run.state = replace(state.advanced(size).judged(size, StepVerdict.SKIP), scaler=state.scaler)
    rate = learning_rate(run.config.optimizer, run.lengths, state.scheduled_samples)
    return StepMetrics(
        run.state.iteration,
        run.state.consumed_samples,
        size,
        {},
        learning_rate=rate,
        loss_scale=run.state.scaler.scale,
        skipped=True,
    )


def rollback(run: Run, spike: int) -> None:
    """Go back to a checkpoint from well before the step `spike`, and leave out the steps that led to the spike."""
    state, guard = run.state, run.config.guard
    first = max(1, spike + 1 - guard.spike_skip_steps)
    run.checkpoints.manager.wait()
    target = run.watch.all_gather_object(checkpoint_before(run.config.checkpoint.save, first, spike))[0]
    checkpoint = replace(
        run.config.checkpoint, load=run.config.checkpoint.save, ckpt_step=target, finetune=False, no_load_optim=False
    )
    back, record, _ = load(
        replace(run.config, checkpoint=checkpoint), run.context, run.optimizer, state, events=run.events
    )
    left_out = tuple(sorted({*state.left_out, *range(max(first, target + 1), spike + 1)}))
    run.state = replace(back, left_out=left_out, rollbacks=state.rollbacks + 1)
    if run.checkpoints.snapshots:  # they are of the steps that are left out from now on
        run.checkpoints.snapshots.drop()
    run.hooks.load(record.get("hooks") or {})
    run.metrics.note("spike", spike, why=str(run.watch.spike))
    run.metrics.rollback(back.iteration)
    message = (
        f"rollback {run.state.rollbacks} of {guard.max_rollbacks} because of iteration {spike}: "
        f"{run.watch.spike}; back to iteration {back.iteration}, and iterations "
        f"{max(first, target + 1)} to {spike} will be left out"
    )
    run.metrics.log(message)
    run.events.record("rollback", message, iteration=spike, to=back.iteration)


def checkpoint_before(folder: str, first: int, spike: int) -> int:
    """The iteration of the newest checkpoint before step `first`, the first one to leave out.

    Without such a checkpoint, it is the oldest one before the spike. Raises NumericsError if there is none.
    """
    iterations = [iteration for iteration in checkpoints(location(folder)) if iteration < spike]
    if not iterations:
        raise NumericsError(
            f"iteration {spike} is a spike, and there is no checkpoint before it to go back to",
            f"looked in {folder}",
            "save more often (--save-interval)",
        )
    return max([iteration for iteration in iterations if iteration < first], default=min(iterations))


def stop_early(run: Run, stop: Stop) -> None:
    """Log why training stops before its last step. Raises Preempted if a signal or a time limit stopped it."""
    if run.checkpoints.manager:
        run.checkpoints.manager.wait()  # until the checkpoint is durable
    run.metrics.log_rest()
    run.metrics.log_mean_throughput(run.state.iteration)
    run.metrics.log(f"stopping at iteration {run.state.iteration}: {stop.why}")
    if stop.preempted:
        kind = Interrupted if stop.interrupted else Preempted
        raise kind(f"stopped at iteration {run.state.iteration}: {stop.why}", *_resume_hint(run))


def interrupted(run: Run) -> Interrupted:
    """The error for a run that a second Ctrl-C ended immediately."""
    done = f"interrupted after iteration {run.done} of {run.train_iters}"
    return Interrupted(done, *_resume_hint(run))


def _resume_hint(run: Run) -> tuple[str, Optional[str]]:
    """(the last checkpoint, the command that resumes from it) of a run that was stopped."""
    checkpoint = run.config.checkpoint
    if not run.checkpoints.manager:
        return "nothing is saved: there is no --save", None
    last = last_checkpoint(checkpoint)
    if last is None:
        return f"no checkpoint was saved in {checkpoint.save} yet", None
    return f"the last checkpoint: {last}", f"to resume: {resume_command(checkpoint)}"


def interruptible(run: Run) -> AbstractContextManager:
    """Inside the context, Ctrl-C stops training after the present step, and prints that immediately."""
    save = run.config.checkpoint.save
    saves = f"saving in {save}" if run.checkpoints.manager else "nothing is saved, because there is no --save"
    notice = f"\nCtrl-C: stopping after this step, {saves}; press it again to end immediately\n"
    return run.watch.requests.interruptible(notice if run.context.is_rank_zero else "")
