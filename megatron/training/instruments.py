# SPDX-License-Identifier: Apache-2.0
"""Build what watches a run: its console, guards, metrics, timers and profiler."""

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Optional

import torch

from megatron.errors import StorageError
from megatron.guard.alarm import Alarm
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.supervisor_mark import SUPERVISOR
from megatron.guard.watch import Watch
from megatron.model.facts import Facts
from megatron.model.fp8 import layers_in_fp8
from megatron.model.recipe import Recipe
from megatron.mpu import collectives
from megatron.mpu.initialize import RankContext
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.timeline_recorder import STEP, Recorder
from megatron.settings import schema
from megatron.telemetry.console import Console
from megatron.telemetry.event_rules import RecordRules
from megatron.telemetry.events import EventLog
from megatron.telemetry.metrics import Metrics
from megatron.telemetry.peak_flops import fp8_peak, joint_peak, peak_flops
from megatron.telemetry.phases import PHASES
from megatron.telemetry.profiler import Profiler
from megatron.telemetry.run_record import run_record
from megatron.telemetry.step_metrics import RunSizes
from megatron.telemetry.timers import Timers
from megatron.training.checkpointing import earlier_wandb_run
from megatron.training.state import BuiltModel, Losses, Start, State


def build_console(logging: schema.Logging, context: RankContext) -> Console:
    """The console of this rank. Rank 0 prints, or the ranks of --log-ranks with their rank in each line."""
    rank, asked = context.mesh.rank, logging.log_ranks
    prints = context.is_rank_zero if asked is None else rank in asked
    return Console(
        logging.console,
        bar=logging.progress_bar and not asked,
        active=context.is_rank_zero or prints,
        prints=prints,
        prefix=f"[rank {rank}] " if asked else "",
    )


def build_watch(config: schema.Config, context: RankContext, heartbeat: Heartbeat, events: EventLog) -> Watch:
    """Build this rank's guards."""
    mesh = context.mesh
    heartbeat.note_place(mesh.coordinates)
    return Watch(
        config.guard,
        minutes=config.batch.exit_duration_in_mins,
        heartbeat=heartbeat,
        rank=mesh.rank,
        events=events,
        all_gather_object=context.all_gather_object,
        counts=mesh.tp.rank == mesh.pp.rank == mesh.cp.rank == 0,
    )


def recorder_of(
    config: schema.Config, context: RankContext, pipeline: Pipeline, state: State, log
) -> Optional[Recorder]:
    """The recorder of a step for `--pipeline-timeline`; None without it. state: at the start of this launch."""
    path = config.parallel.pipeline_timeline
    if path is None:
        return None
    if context.is_rank_zero and not Path(path).absolute().parent.is_dir():
        raise StorageError(f"cannot write --pipeline-timeline {path}", "there is no such folder")
    if state.train_iters(config.batch, context.mesh.dp.size) - state.iteration < STEP:
        log(f"note: --pipeline-timeline records step {STEP} of a launch, and fewer remain: {path} will not be written")
    return Recorder(path, pipeline, context.mesh)


def build_metrics(
    config: schema.Config,
    recipe: Recipe,
    context: RankContext,
    model: BuiltModel,
    start: Start,
    console: Console,
    events: EventLog,
    losses: Losses,
    alarm: Optional[Alarm],
) -> Metrics:
    """Open the log of a run, on rank 0. It counts the events."""
    state, facts, mesh = start.state, model.facts, context.mesh
    name = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
    rates = RunSizes(
        state.train_iters(config.batch, mesh.dp.size),
        facts.sample_tokens,
        ranks=mesh.world_size,
        data_ranks=mesh.dp.size,
        flops_per_token=facts.trained_flops(model.selection),
        seen_flops_per_token=facts.trained_flops(model.selection, seen=True),
        peak_flops=joint_peak_of(config, facts, context, name),
        plain_peak_flops=peak_of(config, context, name),
        device=context.device.type,
        perplexities=recipe.perplexities,
        epoch_samples=config.batch.train_samples / config.batch.train_epochs if config.batch.train_epochs else None,
    )
    header = run_record(
        config,
        mesh.logged_sizes,
        state.iteration,
        device=name,
        parameters=facts.parameters,
        peak=dict(flops=rates.peak_flops, of=peak_source(config, context, name)),
        code=start.code,
        **(dict(resumed=start.changed.to_record()) if start.changed else {}),
        criterion=losses.measures and losses.measures.criterion,
        valid_order=state.valid_order,
        **({"supervisor": os.environ[SUPERVISOR]} if SUPERVISOR in os.environ else {}),
    )
    metrics = Metrics(
        config.logging,
        rates,
        header=header,
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        save=config.checkpoint.save,
        wandb_run=earlier_wandb_run(config.checkpoint, start.record or {}),
        active=console.active,
        files=context.is_rank_zero,
        timers=build_timers(config.logging, context),
        console=console,
        listeners=[alarm, record_rules(config, recipe, events, losses, start, model.vocab_size)] if alarm else (),
    )
    events.listeners.append(metrics.count_event)
    return metrics


def record_rules(
    config: schema.Config, recipe: Recipe, events: EventLog, losses: Losses, start: Start, vocab_size: int
) -> RecordRules:
    """The rules that judge the records of a run."""
    loss, measures = next(iter(losses.sums)), losses.measures
    return RecordRules(
        events.rules,
        events.record,
        loss=loss,
        guess=math.log(vocab_size) if loss in recipe.perplexities else math.inf,
        warmup=start.lengths.warmup,
        figure=(measures.best_by, measures.direction) if measures and measures.best_by else None,
    )


def build_profiler(config: schema.Config, context: RankContext, pipeline: Pipeline, log) -> Profiler:
    """Build the profiler of `--profile`."""
    barrier = partial(collectives.barrier, context.mesh.world)
    return Profiler(config, context.mesh.rank, context.device, log, barrier, all_threads=pipeline.turns)


def build_timers(settings: schema.Logging, context: RankContext) -> Optional[Timers]:
    """Build the timers of `--timing-log-level`; None at level 0."""
    if settings.timing_log_level == 0:
        return None
    world, device, more = context.mesh.world, context.device, {}
    if device.type == "cuda":
        more["synchronize"] = partial(torch.cuda.synchronize, device)
    if settings.barrier_with_level_1_timing and world.size > 1:
        more["barrier"] = partial(collectives.barrier, world)

    def gather(seconds: list[float]) -> list[list[float]]:
        mine = torch.tensor(seconds, dtype=torch.float64, device=device)
        return collectives.all_gather(mine, world).view(-1, len(seconds)).tolist()

    parts = {name: phase.timed for name, phase in PHASES.items()}
    return Timers(settings.timing_log_level, parts, gather=gather, **more)


def peak_of(config: schema.Config, context: RankContext, name: str) -> Optional[float]:
    """The peak FLOP/s for MFU: from --peak-tflops or the vendor's data sheet; None for a CPU.

    A measurement of a CPU would depend on other programs, so shares of it would not be comparable between runs.
    """
    if config.logging.peak_tflops:
        return config.logging.peak_tflops * 1e12
    return None if context.device.type == "cpu" else peak_flops(name, config.precision.precision)


def joint_peak_of(config: schema.Config, facts: Facts, context: RankContext, name: str) -> Optional[float]:
    """`peak_of`, of a run with products in fp8 that of both formats together."""
    plain, layers = peak_of(config, context, name), layers_in_fp8(config, facts)
    if not layers or config.logging.peak_tflops:
        return plain
    recipe, wgrad = config.precision.fp8_recipe, config.precision.fp8_wgrad
    return joint_peak(plain, fp8_peak(name, recipe), replace(facts, in_fp8=layers).fp8_share(recipe, wgrad))


def peak_source(config: schema.Config, context: RankContext, name: str) -> str:
    """The source of `peak_of`, in words."""
    if config.logging.peak_tflops:
        return "as --peak-tflops says"
    return "unknown" if context.device.type == "cpu" else f"the data sheet of {name} in {config.precision.precision}"
