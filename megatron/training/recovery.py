# SPDX-License-Identifier: Apache-2.0
"""Exceptions to the loop: skipped steps, the rewind to a checkpoint after a spike, an end before the last step."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Optional

from megatron.checkpoint.folder import checkpoints
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
    """A step whose samples are not trained on."""
    state = run.state
    run.metrics.log(
        f"iteration {state.iteration + 1} is left out: samples {state.consumed_samples} to "
        f"{state.consumed_samples + size - 1}"
    )
    # Nothing was computed, so for the loss scale it is neither a good step nor an overflow.
    run.state = replace(state.behind(size).judged(size, StepVerdict.SKIP), scaler=state.scaler)
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
    """Go back to a checkpoint from well before the step `spike`, and leave out the steps that led to it."""
    state, guard = run.state, run.config.guard
    first = max(1, spike + 1 - guard.spike_skip_steps)
    run.checkpoint_manager.wait()
    target = run.watch.all_gather_object(checkpoint_before(run.config.checkpoint.save, first, spike))[0]
    checkpoint = replace(
        run.config.checkpoint, load=run.config.checkpoint.save, ckpt_step=target, finetune=False, no_load_optim=False
    )
    back, record, _ = load(replace(run.config, checkpoint=checkpoint), run.context, run.optimizer, state)
    left_out = tuple(sorted({*state.left_out, *range(max(first, target + 1), spike + 1)}))
    run.state = replace(back, left_out=left_out, rollbacks=state.rollbacks + 1)
    run.hooks.load(record.get("hooks") or {})
    run.metrics.note("spike", spike, why=str(run.watch.spike))
    run.metrics.rollback(back.iteration)
    run.metrics.log(
        f"rollback {run.state.rollbacks} of {guard.max_rollbacks} because of iteration {spike}: "
        f"{run.watch.spike}; back to iteration {back.iteration}, and iterations "
        f"{max(first, target + 1)} to {spike} will be left out"
    )


def checkpoint_before(folder: str, first: int, spike: int) -> int:
    """The iteration of the newest checkpoint before step `first`, where the trouble is taken to begin; else of the oldest
    one before the spike. Raises NumericsError when there is none.
    """
    found = [iteration for iteration in checkpoints(location(folder)) if iteration < spike]
    if not found:
        raise NumericsError(
            f"iteration {spike} is a spike, and there is no checkpoint before it to go back to",
            f"looked in {folder}",
            "save more often (--save-interval)",
        )
    return max([iteration for iteration in found if iteration < first], default=min(found))


def stop_early(run: Run, stop: Stop) -> None:
    """Say why training ends before its last step. Raises Preempted where somebody else wanted it to."""
    if run.checkpoint_manager:
        run.checkpoint_manager.wait()  # until the checkpoint is durable
    run.metrics.log_rest()
    run.metrics.log_mean_throughput(run.state.iteration)
    run.metrics.log(f"stopping at iteration {run.state.iteration}: {stop.why}")
    if stop.preempted:
        kind = Interrupted if stop.interrupted else Preempted
        raise kind(f"stopped at iteration {run.state.iteration}: {stop.why}", *_what_remains(run))


def interrupted(run: Run) -> Interrupted:
    """What is said of a run that Ctrl-C has ended at once."""
    done = f"interrupted behind iteration {run.done} of {run.train_iters}"
    return Interrupted(done, *_what_remains(run))


def _what_remains(run: Run) -> tuple[str, Optional[str]]:
    """(the last checkpoint, the command that goes on from it) of a run that was stopped."""
    checkpoint = run.config.checkpoint
    if not run.checkpoint_manager:
        return "nothing is saved: there is no --save", None
    last = last_checkpoint(checkpoint)
    if last is None:
        return f"no checkpoint was saved in {checkpoint.save} yet", None
    return f"the last checkpoint: {last}", f"to go on: {resume_command(checkpoint)}"


def interruptible(run: Run) -> AbstractContextManager:
    """Inside, Ctrl-C stops training behind the present step; it is said at once what comes of it."""
    save = run.config.checkpoint.save
    saves = f"saving in {save}" if run.checkpoint_manager else "nothing is saved, for there is no --save"
    notice = f"\nCtrl-C: stopping behind this step, {saves}; once more ends at once\n"
    return run.watch.requests.interruptible(notice if run.context.is_rank_zero else "")
