# SPDX-License-Identifier: Apache-2.0
"""Evaluation: mean losses over held-out samples."""

import time
from dataclasses import replace
from typing import Optional

import torch

from megatron.model.recipe import logged_means
from megatron.mpu import collectives
from megatron.pipeline.execute import execute
from megatron.settings import schema
from megatron.telemetry.phases import phase
from megatron.telemetry.progress import ProgressLines
from megatron.training.garbage import GarbageCollection
from megatron.training.hooks import evaluation_facts
from megatron.training.measures import Measures, RequestMeasures, judge, judges
from megatron.training.state import Run, due
from megatron.training.step import micro_batches, zero_unless_first_tp_rank

REQUESTS = "requests"  # the name of the split


def evaluate_if_due(run: Run, garbage: GarbageCollection, epoch: int = 0) -> bool:
    """Evaluate after a step if --eval-interval or --eval-epoch requires it, or to compare the last weights with the best.

    After the last step the run is saved first, so that a failing evaluation does not lose it. epoch: number of the epoch
    that the step ended, or 0. Returns whether there is nothing new to save.
    """
    batch, last = run.config.batch, run.state.iteration >= run.train_iters
    wanted = due(batch.eval_interval, run.state.iteration) or (epoch and due(batch.eval_epoch, epoch))
    wanted = wanted or (last and run.checkpoints.best is not None)
    if not ((run.loaders.valid or run.loaders.requests) and wanted):
        return False
    saves = last and run.checkpoints.manager is not None
    if saves:
        with run.metrics.paused("saving"):
            save_before_evaluation(run)
    evaluate_and_judge(run, garbage)
    return saves and not judges(run)  # the result of a validation changes the state then


def evaluate_if_missed(run: Run, garbage: GarbageCollection) -> bool:
    """Evaluate now if the saved run ended during the evaluation after its last step. Returns whether it did.

    The result may end training, or select the best weights.
    """
    if not (run.state.evaluation_due and run.loaders.valid) or run.config.batch.skip_train:
        return False
    run.metrics.log(f" > the evaluation after iteration {run.state.iteration} was not finished: repeating it now")
    run.state = replace(run.state, evaluation_due=0)
    evaluate_and_judge(run, garbage)
    if run.checkpoints.manager and not run.config.checkpoint.no_load_optim:  # the existing checkpoint has moments
        with run.metrics.paused("saving"):
            run.save()
    return True


def evaluate_and_judge(run: Run, garbage: GarbageCollection) -> None:
    """Evaluate after the present step."""
    last = run.state.iteration >= run.train_iters
    with run.metrics.paused("evaluating"):
        if run.loaders.valid:
            # with a best checkpoint, its validation is the final one
            final = last and ends_with_validation(run) and run.checkpoints.best is None
            judge(run, evaluate(run, run.loaders.valid, "validation", final=final))
        evaluate_requests(run, final=last)
        garbage.collect()


def save_before_evaluation(run: Run) -> None:
    """Save the state as if the upcoming evaluation were done; mark it as due if its result changes the state."""
    now, batch = run.state, run.config.batch
    more = 0 if validates_same_samples(run.config) else batch.eval_iters * batch.global_batch_size
    if run.loaders.valid and judges(run):
        run.state = replace(now, evaluation_due=1)
    else:
        run.state = replace(now, consumed_valid_samples=now.consumed_valid_samples + more)
    try:
        run.save()
    finally:
        run.state = now


@torch.no_grad()
def evaluate(
    run: Run,
    batches,
    split: str,
    final: bool = False,
    measures: Optional[Measures] = None,
    weights_of: Optional[int] = None,
) -> dict[str, float]:
    """Mean losses over `--eval-iters` (`--test-iters`) global batches of a split, or over all of it, on all ranks.

    weights_of: the iteration whose weights they are, if these are not the present ones

    Each validation continues after the samples of the last one, unless all have the same samples (--eval-same-samples).
    """
    started, measures, messages = time.perf_counter(), measures or run.losses.measures, run.optimizer.messages
    size = run.config.batch.global_batch_size
    num_microbatches = size // run.config.batch.micro_batch_size // run.dp
    for stage in run.stages:
        stage.eval()
    names = run.losses.evaluated
    sums = torch.zeros(len(names), dtype=torch.float64, device=run.context.device)
    continues = split == "validation" and not validates_same_samples(run.config)
    start = consumed = run.state.consumed_valid_samples if continues else 0
    if measures:
        measures.begin(run.stages)
    with phase("evaluate"):
        lines, total = ProgressLines(run.metrics.log), num_batches(run, batches, split)
        for number in range(total):
            run.watch.heartbeat.beat("evaluate")
            lines(f"{split}: batch {number + 1} of {total}", number, total)
            ops = messages.plan(run.passes.pipeline.ops(run.passes.wire.axis.rank, num_microbatches, training=False))
            more = dict(names=names, seed=run.config.logging.seed, messages=messages)
            micros = micro_batches(run, batches, consumed, num_microbatches)
            sums += execute(ops, run.stages, micros, run.passes.wire, **more)
            consumed += size
        *values, tokens = collectives.all_reduce(zero_unless_first_tp_rank(run, sums), run.context.mesh.world).tolist()
    for stage in run.stages:
        stage.train()
    run.optimizer.buffers.rollback()
    if continues:
        run.state = replace(run.state, consumed_valid_samples=consumed)
    means = logged_means(
        {name: value / max(tokens, 1) for name, value in zip(names[:-1], values, strict=True)}, run.losses.counts
    )
    if measures:
        measures.end(run.stages)
        values = measures.collected.whole(run.context, len(batches.dataset))
        means = means if tokens and not measures.of_choices else {}  # without labels there is no loss
        means |= measures.figures(values, batches.dataset, split, final, run.context.mesh.rank)
    samples = range(start, min(consumed, len(batches.dataset)) if batches.whole else consumed)
    run.metrics.record_eval(
        run.state.iteration,
        run.state.consumed_samples,
        means,
        split=split,
        final=final,
        samples=samples,
        seconds=time.perf_counter() - started,
        weights_of=weights_of,
    )
    if split == "validation":
        log_changed_samples(run, samples, final)
    run.metrics.record_event("evaluate", run.state.iteration, run.state.consumed_samples)
    run.hooks.call("after_evaluation", run, lambda: evaluation_facts(split, means, final))
    return means


def log_changed_samples(run: Run, samples: range, final: bool) -> None:
    """Log why the final validation has another loss than the last one, although the weights may be the same."""
    (iteration, before), run.evaluated.validation = run.evaluated.validation, (run.state.iteration, samples)
    if final and before and before != samples:
        run.metrics.log(
            f" > the final validation is over samples {samples.start} to {samples.stop - 1} of the validation data, that "
            f"of iteration {iteration} over {before.start} to {before.stop - 1}: use --eval-same-samples to compare them"
        )


def evaluate_requests(run: Run, final: bool = False) -> None:
    """Compute the accuracy over --eval-requests, unless it is known for this step."""
    if run.loaders.requests and run.evaluated.requests_at != run.state.iteration:
        run.evaluated.requests_at = run.state.iteration
        evaluate(run, run.loaders.requests, REQUESTS, final, RequestMeasures(run.config))


def num_batches(run: Run, batches, split: str) -> int:
    """The number of global batches of an evaluation."""
    batch = run.config.batch
    if batches.whole:
        return -(-len(batches.dataset) // batch.global_batch_size)
    return batch.tested_batches if split == "test" else batch.eval_iters


def ends_with_validation(run: Run) -> bool:
    """Whether the validation after the last step serves as the final one, because it has the same samples."""
    batch = run.config.batch
    last = due(batch.eval_interval, run.train_iters) or (
        batch.train_epochs and due(batch.eval_epoch, batch.train_epochs)
    )
    return bool(validates_same_samples(run.config) and last)


def validates_same_samples(config: schema.Config) -> bool:
    """Whether all validations of a run are over the same samples."""
    return config.batch.eval_same_samples or config.data.full_validation
