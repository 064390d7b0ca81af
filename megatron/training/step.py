# SPDX-License-Identifier: Apache-2.0
"""`train_step`: forward and backward passes of one global batch, their outcome, and the update."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Optional

import torch

from megatron.data.loader import MicroBatch, MicroBatchLoader
from megatron.guard.rerun import LOSSES
from megatron.guard.watch import StepVerdict
from megatron.model.recipe import logged_means
from megatron.mpu.collectives import COMPUTED, Traffic
from megatron.mpu.transfer import Arriving
from megatron.optimizer.lr_schedule import decoupled_learning_rate, learning_rate, weight_decay
from megatron.optimizer.update import choose
from megatron.pipeline.data_parallel_messages import passes_of
from megatron.pipeline.execute import execute
from megatron.pipeline.schedule import Op
from megatron.pipeline.stage_outputs import StageOutputs
from megatron.settings.batch import batch_size
from megatron.telemetry.memory import peak_bytes
from megatron.telemetry.phases import phase
from megatron.telemetry.progress import ProgressLines
from megatron.telemetry.step_metrics import StepMetrics
from megatron.training.hooks import step_facts, update_facts
from megatron.training.loss import make_loss_func
from megatron.training.outcome import Figures, Outcome
from megatron.training.recovery import rollback, skip_batch
from megatron.training.state import Run, due


def train_step(run: Run) -> Optional[StepMetrics]:
    """Run one optimizer step over one global batch. Advances `run.state` and returns the step's metrics.

    Returns None if the host has not read them yet (`defers_host_sync`), in which case the last step's metrics are recorded.
    Also returns None after a rollback, or if the step must be repeated: then `run.state.iteration` does not increase.
    """
    config, watch = run.config, run.watch
    consumed, iteration = run.state.consumed_samples, run.state.iteration + 1
    size, num_microbatches = batch_size(config.batch, run.dp, consumed)
    if iteration in run.state.left_out:
        return skip_batch(run, size) if record_unread_outcome(run) else None
    loss_func, unscale = make_loss_func(config, run.losses.sums, loss_scale(run), size, num_microbatches * run.dp)
    with run.phase("data", step=iteration):
        batches = micro_batches(run, run.loaders.train, consumed, num_microbatches)
    on_op = watch.heartbeat.watch
    if run.passes.returned is not None:  # the first step of this launch
        on_op = with_progress(run, iteration, num_microbatches, on_op)
    computed = PassesOfStep(run, batches, loss_func)
    with run.rerun.first(run, iteration) if run.rerun else nullcontext():
        totals = computed(on_op=on_op, returned=run.passes.returned)
    if run.passes.returned is not None:
        run.passes.returned.check(watch.all_gather_object)
        run.passes.returned = None
    if not record_unread_outcome(run):
        return None
    if run.rerun:
        totals = run.rerun.validated(
            run,
            iteration,
            totals,
            computed,
            lambda totals: Figures(totals, len(run.losses.names), unscale, 0.0).judged.tolist(),
            partial(run.loaders.train.of_rank, consumed=consumed, num_microbatches=num_microbatches),
        )
    state, late = run.state, not needs_host_sync(run, iteration)
    figures = Figures(totals, len(run.losses.names), unscale, config.optimizer.clip_grad)
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
    if verdict is StepVerdict.SKIP:
        run.optimizer.buffers.rollback()
    else:
        run.optimizer.buffers.combine()
        run.hooks.call("before_update", run, lambda: update_facts(run, outcome.rate))
        decay = weight_decay(config.optimizer, run.lengths, state.scheduled_samples)
        with run.phase("update"):
            run.optimizer.step(outcome.rate, decay, outcome.factor, outcome.decoupled, outcome.skip)
        largest = run.optimizer.max_attention_logit()
        outcome.max_logit = None if largest is None else Arriving(largest)
    if run.rerun:
        run.rerun.after_update(run, iteration)
    run.state = state.advanced(size)
    if late:
        run.pending.outcome = outcome
        return None
    return record_outcome(run, outcome, verdict)


class PassesOfStep:
    """The passes of a step and the reduction of its gradients, which may be computed several times.

    A call returns the totals of `reduce_grads`, those of the guards included. These are the same in each: another answer
    to whether to stop would be a difference.
    """

    def __init__(self, run: Run, batches: Sequence[MicroBatch], loss_func: Callable):
        self.run, self.batches, self.loss_func = run, batches, loss_func
        self.votes: Optional[torch.Tensor] = None

    def __call__(
        self,
        batches: Optional[Sequence[MicroBatch]] = None,
        on_op: Optional[Callable[[Op], None]] = None,
        returned: Optional[StageOutputs] = None,
    ) -> torch.Tensor:
        """batches: those of another rank, on the host (default: the step's own)"""
        run, alone = self.run, self.run.context.mesh.alone
        batches = self.batches if batches is None else [batch.to(run.context.device) for batch in batches]
        for batch in batches:
            Traffic.report(COMPUTED, "samples", batch.tokens, alone)
        with phase("passes"):
            sums = forward_backward(run, batches, self.loss_func, on_op or run.watch.heartbeat.watch, returned)
        Traffic.report(COMPUTED, LOSSES, sums, alone)
        with run.phase("reduce"):
            if self.votes is None:
                self.votes = run.watch.with_votes(sums[:0], self.batches)
            return run.optimizer.reduce_grads(torch.cat([zero_unless_first_tp_rank(run, sums), self.votes]))


def needs_host_sync(run: Run, iteration: int) -> bool:
    """Whether the host waits for the numbers of a step before its update.

    It always does if waiting costs nothing; otherwise only if something after the step (a save, an evaluation, a stop)
    depends on them.
    """
    if not run.pending.defers_host_sync or iteration >= run.train_iters or run.watch.stop:
        return True
    batch, logging, consumed = run.config.batch, run.config.logging, run.state.consumed_samples
    epoch = run.ended_epoch(iteration, consumed, consumed + batch_size(batch, run.dp, consumed)[0])
    intervals = [logging.log_interval] if logging.log_params_norm or logging.log_num_zeros_in_grad else []
    intervals += [run.config.guard.check_replicas_interval, batch.exit_interval]
    intervals += [batch.eval_interval] if run.loaders.valid else []
    return bool(epoch) or any(due(interval, iteration) for interval in intervals) or run.save_is_due(iteration, epoch)


def loss_scale(run: Run) -> float | torch.Tensor:
    """The loss scale of the next step. It is an fp64 scalar on the device if the host has not read the last outcome."""
    scaler, last = run.state.scaler, run.pending.outcome
    if last is None:
        return scaler.scale
    good, bad = scaler.update(False).scale, scaler.update(True).scale
    return good if good == bad else choose(last.overflow, bad, good)


def judge(run: Run, outcome: Outcome) -> StepVerdict:
    """Read the numbers of a step and return the verdict of the guards."""
    outcome.read(run.losses.sums, run.watch.count)
    outcome.means = logged_means(outcome.means, run.losses.counts)
    return run.watch.judge(
        outcome.iteration,
        run.state.recent,
        next(iter(outcome.means.values())),
        outcome.norm,
        partial(find_cause, run, outcome),
        scaling=run.state.scaler.dynamic,
        rollbacks=run.state.rollbacks,
    )


def record_unread_outcome(run: Run) -> bool:
    """Read and record the outcome of the last step, if that was deferred.

    Returns False if the present step ends here: after a rollback, or if its gradients are lost.
    """
    outcome = run.pending.outcome
    if outcome is None:
        return True
    verdict, run.pending.outcome = judge(run, outcome), None
    assert outcome.made == (verdict is StepVerdict.UPDATE), f"the device and the host disagree: {verdict}"
    if verdict is StepVerdict.ROLLBACK:
        rollback(run, outcome.iteration)
        return False
    if verdict is StepVerdict.SKIP:
        run.optimizer.undo_step_count()
    record_step(run, record_outcome(run, outcome, verdict))
    if outcome.repeated:
        run.optimizer.buffers.rollback()
    return not outcome.repeated


def record_outcome(run: Run, outcome: Outcome, verdict: StepVerdict) -> StepMetrics:
    """Update `run.state` with the outcome of the last step, and return the step's metrics."""
    loss, spike = next(iter(outcome.means.values())), run.watch.spike
    updated = verdict is not StepVerdict.SKIP
    run.state = run.state.judged(outcome.size, verdict, loss, outcome.norm, window=run.config.guard.spike_window)
    return StepMetrics(
        outcome.iteration,
        outcome.consumed,
        outcome.size,
        outcome.means,
        learning_rate=outcome.rate,
        grad_norm=outcome.norm,
        loss_scale=run.state.scaler.scale,
        skipped=not updated,
        ledger=run.watch.ledger,
        num_zeros=outcome.num_zeros,
        params_norm=run.params_norm(outcome.iteration),
        max_attention_logit=outcome.max_logit.read()[0] if updated and outcome.max_logit else None,
        extra=({"spike": spike.score} if spike else {})
        | ({} if outcome.decoupled is None else {"decoupled_learning_rate": outcome.decoupled}),
    )


def record_step(run: Run, step: Optional[StepMetrics]) -> None:
    """Write a step to the log and the files, and call the hooks."""
    if step is None:
        return
    run.metrics.record(step)
    run.notes.after(run, step)
    if due(run.config.logging.log_interval, step.iteration):
        run.metrics.note("memory", step.iteration, bytes=peak_bytes(run.context.device.type))
        run.ranks.log(run)
        if run.rerun:
            run.rerun.log(run, step.iteration)
    run.hooks.call("after_step", run, lambda: step_facts(step))


def forward_backward(
    run: Run,
    batches: Sequence[MicroBatch],
    loss_func,
    on_op,
    returned: Optional[StageOutputs] = None,
    turns: bool = True,
) -> torch.Tensor:
    """Run the forward and backward passes of a step in the order of the schedule. Returns this rank's sums.

    turns: False: all passes one after the other, also those of the schedule that take turns
    """
    passes = run.passes
    ops = passes.pipeline.ops(passes.wire.axis.rank, len(batches))
    ops = run.optimizer.messages.plan(ops if turns else passes_of(ops), passes.needs_gradient)
    record = passes.recorder.record() if passes.recorder else None
    more = dict(timeline=record, on_op=on_op, returned=returned, seed=run.config.logging.seed)
    more |= dict(needs_gradient=passes.needs_gradient, messages=run.optimizer.messages)
    sums = execute(ops, run.stages, batches, passes.wire, loss_func, names=run.losses.names, **more)
    if record is not None:
        passes.recorder.write(record)
    return sums


WEIGHTS = dict(F=1, B=2, I=1, W=1)  # passes by the time that they take, in forward passes


def with_progress(run: Run, iteration: int, num_microbatches: int, on_op: Callable[[Op], None]) -> Callable[[Op], None]:
    """`on_op`, and log lines of how far a long step is: no line of a step says so before its end."""
    lines, done, total = ProgressLines(run.metrics.log), 0, 3 * num_microbatches * len(run.stages)

    def watch(op: Op) -> None:
        nonlocal done
        on_op(op)
        number = done * num_microbatches // total + 1
        lines(f"step {iteration}: micro-batch {number} of {num_microbatches}", done, total)
        done = min(done + WEIGHTS.get(op.kind, 0), total - 1)

    return watch


def find_cause(run: Run, outcome: Outcome) -> str:
    """Find where the first non-finite value of a step was computed, in words. All ranks call it."""

    def replay(on_op):  # hooks have to know which pass they are in
        sums = forward_backward(run, outcome.batches, outcome.loss_func, on_op, turns=False)
        return run.optimizer.finalize_grads(sums)

    outcome.repeated = True
    with run.optimizer.gathered_parameters():
        found = run.watch.find_culprit(run.stages, outcome.batches, replay, run.loaders.train.describe)
    return f"{found}\n    {run.rerun.said}" if run.rerun and run.rerun.said else found


def micro_batches(run: Run, batches: MicroBatchLoader, consumed: int, num_microbatches: int) -> list[MicroBatch]:
    """This rank's micro-batches of a step, on its device."""
    return [batch.to(run.context.device) for batch in batches.step(consumed, num_microbatches)]


def zero_unless_first_tp_rank(run: Run, sums: torch.Tensor) -> torch.Tensor:
    """A rank's part of the sums over all ranks. Tensor parallel ranks have the same tokens, so the first one counts."""
    return sums if run.context.mesh.tp.rank == 0 else torch.zeros_like(sums)
