# SPDX-License-Identifier: Apache-2.0
"""--auto-parallel and --micro-batch-size auto on running ranks: the first rank searches, and all use its result. With
--tune-steps the best three layouts are timed on the machine.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron.model.recipe import Recipe
from megatron.mpu import collectives, initialize
from megatron.planner.choose import automatic, chosen_flags, in_layout
from megatron.planner.layout import Layout
from megatron.settings import schema
from megatron.telemetry import figures
from megatron.training.build import build_run
from megatron.training.rules import resolve
from megatron.training.step import train_step

TRIED = 3  # number of layouts that --tune-steps times


@contextlib.contextmanager
def tuned(config: schema.Config, recipe: Recipe) -> Iterator[schema.Config]:
    """Choose the open ones among unresolved settings. All ranks call it together.

    The ranks join here and leave after the training: a second process group could connect to addresses of the first.
    """
    asked = config.parallel
    context = initialize.join_job(
        schema.Parallel(
            distributed_backend=asked.distributed_backend, distributed_timeout_minutes=asked.distributed_timeout_minutes
        ),
        config.kernels,
    )

    def log(words: str) -> None:
        if context.is_rank_zero:
            print(words, flush=True)

    # Only one rank searches, because ranks can see different amounts of node memory.
    layouts = _broadcast(_search(config, log) if context.is_rank_zero else None, context)
    if isinstance(layouts, Exception):
        initialize.leave_job(context)
        raise layouts
    if config.planner.tune_steps and len(layouts) > 1:
        layouts = _timed(config, recipe, layouts, context, log)
    layout, batch = layouts[0]
    yield in_layout(config, layout, batch)
    initialize.leave_job(context)


def _search(config: schema.Config, log):
    """The best layouts with their global batches; or the error, for all ranks to raise."""
    try:
        _, plans, _ = automatic(config, log)
    except Exception as error:
        return error
    return [(replace(plan.layout, parallel=None), plan.job.global_batch) for plan in plans[:TRIED]]


def _broadcast(answer, context: initialize.RankContext):
    return collectives.broadcast_object(answer, context.mesh.world)


def _timed(
    config: schema.Config, recipe: Recipe, layouts: list[tuple[Layout, int]], context: initialize.RankContext, log
):
    """The layouts, sorted by their measured time per sample."""
    log(f"--tune-steps {config.planner.tune_steps}: measuring the best {len(layouts)}")
    timed, world_size = [], context.mesh.world_size
    for layout, batch in layouts:
        settings = _lasting(resolve(_quiet(in_layout(config, layout, batch)), world_size))
        seconds = _seconds_of_a_step(settings, recipe, config.planner.tune_steps)
        log(
            f"  {layout.short()}, micro-batch {layout.micro_batch_size}, recompute "
            f"{layout.recompute.words or 'nothing'}: {figures.seconds(seconds)} a step, "
            f"{figures.seconds(seconds / batch)} a sample"
        )
        timed.append((seconds / batch, len(timed), (layout, batch)))
    timed.sort(key=lambda entry: entry[:2])
    layout, batch = timed[0][-1]
    log(f"chosen on {world_size} ranks: {chosen_flags(config, layout, batch)}")
    return [entry[-1] for entry in timed]


def _quiet(config: schema.Config) -> schema.Config:
    """The same training without side effects: nothing is saved, loaded or logged."""
    logging = replace(
        config.logging,
        log_interval=10**9,
        log_file=None,
        log_progress=False,
        progress_bar=False,
        metrics_file=None,
        metrics_port=None,
        tensorboard_dir=None,
        visualdl_dir=None,
        wandb_project=None,
        wandb_exp_name=None,
    )
    kernels = replace(config.kernels, dump_graph=None, torch_compile=config.kernels.torch_compile is True)
    return replace(config, checkpoint=schema.Checkpoint(), logging=logging, guard=schema.Guard(), kernels=kernels)


def _lasting(config: schema.Config) -> schema.Config:
    """The same training with at least as many steps as are timed, because it has samples only for its own steps."""
    batch, steps = config.batch, config.planner.tune_steps + 1
    if batch.train_iters is not None:
        return replace(config, batch=replace(batch, train_iters=max(batch.train_iters, steps)))
    return replace(
        config, batch=replace(batch, train_samples=max(batch.train_samples, steps * batch.global_batch_size))
    )


def _seconds_of_a_step(config: schema.Config, recipe: Recipe, steps: int) -> float:
    """The fastest of some steps after a first one, measured on the first rank."""
    times = []
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run = build_run(config, recipe)
        run.pending.defers_host_sync = False  # each step ends before the next
        for stage in run.stages:
            stage.train()
        for _ in range(steps + 1):
            start = time.perf_counter()
            train_step(run)  # ends with a reduction over all ranks
            times.append(time.perf_counter() - start)
        seconds = _broadcast(min(times[1:]), run.context)
        run.close()
        run.context.mesh.release()
    del run
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return seconds
