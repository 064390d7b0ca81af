# SPDX-License-Identifier: Apache-2.0
"""Builds a `Run` from resolved settings, ready for its first step or for the step after a checkpoint."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist

from megatron import __version__, fused_kernels
from megatron.checkpoint.base_checkpoint import BASE
from megatron.checkpoint.lineage import lineage
from megatron.checkpoint.memory_snapshots import MemorySnapshots
from megatron.data.loader import MicroBatchLoader
from megatron.data.remote import all_paths
from megatron.data.vocabulary import learned_vocabulary, other_ids, refuse_other_vocabulary
from megatron.errors import SettingsError
from megatron.guard.alarm import Alarm
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.supervisor_mark import SUPERVISOR
from megatron.model.facts import Facts
from megatron.model.fp8 import tables_of
from megatron.model.fp8_product import attach_fp8
from megatron.model.kinds.attention.module import describe_kernel
from megatron.model.kinds.experts.libraries import library_refusal
from megatron.model.max_logits import watch_heads
from megatron.model.ordered import attach_ordered
from megatron.model.recipe import Recipe, module_of, sums_of
from megatron.mpu import initialize
from megatron.mpu.axis_sizes import ep_library
from megatron.mpu.cpu_memory import keep_memory
from megatron.mpu.initialize import RankContext, weight_format
from megatron.mpu.placement import placed_buffers
from megatron.mpu.selection import Selection
from megatron.optimizer.kinds import knows_matrices
from megatron.optimizer.lr_schedule import Lengths
from megatron.optimizer.scaler import LossScaler
from megatron.optimizer.zero import DistributedOptimizer
from megatron.pipeline.build import build_stages, check_model_complete, needs_gradient
from megatron.pipeline.custom_schedule import DO
from megatron.pipeline.schedule import BrokenSchedule
from megatron.pipeline.stage_outputs import StageOutputs
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.wire import P2PCommunicator, open_channels
from megatron.settings import schema
from megatron.settings.from_checkpoint import found_record
from megatron.telemetry.console import Console
from megatron.telemetry.events import EventLog
from megatron.telemetry.own_code import code_notes, code_record
from megatron.telemetry.run_record import library_versions, now, source_commit
from megatron.telemetry.trackers import WANDB_RUN
from megatron.tokenizer import resolved
from megatron.training.checkpointing import (
    IN_BASE,
    check_later_checkpoints,
    check_samples,
    keeps_initial_values,
    load,
    load_folder,
    open_checkpoint_manager,
    open_memory_snapshots,
)
from megatron.training.compile_trial import CompileTrial
from megatron.training.datasets import (
    build_batches,
    build_datasets,
    build_requests,
    build_vocabulary,
    dataset_sizes,
    verify_data,
)
from megatron.training.distillation import attach_teacher
from megatron.training.frozen_model import attach_frozen
from megatron.training.instruments import build_console, build_metrics, build_profiler, build_watch, recorder_of
from megatron.training.measures import best_manager, measures_of
from megatron.training.rank_watch import RankWatch
from megatron.training.rerun import build_rerun
from megatron.training.resume import resume
from megatron.training.rules import idle, remarks
from megatron.training.shared_maps import build_once, is_of_suite
from megatron.training.start_log import (
    crowded,
    end_of_document,
    left_out,
    log_notices,
    nothing_left,
    random_weights,
    resumed,
    summary,
)
from megatron.training.state import BuiltModel, Checkpoints, Loaders, Losses, Passes, Pending, Run, Start, State


def build_run(
    config: schema.Config,
    recipe: Recipe,
    heartbeat: Optional[Heartbeat] = None,
    refusal: Optional[SettingsError] = None,
    events: Optional[EventLog] = None,
) -> Run:
    """Join the job, build model, optimizer and data, and load the checkpoint if there is one. All ranks call it.

    refusal: the reason why this rank cannot train
    """
    heartbeat, events = heartbeat or Heartbeat(), events or EventLog(active=False)
    context, console = join(config, heartbeat, refusal)
    events.log = log = console.log
    watch = build_watch(config, context, heartbeat, events)
    heartbeat.beat("model")
    config = pick_vocabulary(pick_precision(config, context))
    record = record_to_load(config, context)
    tokenizer, vocab_size = build_vocabulary(config, log, record)
    if config.tokenizer.vocab_size is None and vocab_size != tokenizer.whole.vocab_size:
        config = config.derive("--load", vocab_size=vocab_size)  # written, so that later runs have the same rows
    # Open it first: a locked or read-only folder is reported before the slow work.
    checkpoint_manager = open_checkpoint_manager(config.checkpoint, context, log, events)
    snapshots = open_memory_snapshots(config, context, log, events)
    for note in refuse_other_vocabulary(all_paths(config.data, log), tokenizer):
        log(f"note: {note}")
    draws = record is None or keeps_initial_values(config.checkpoint)
    if config.checkpoint.save_hf:
        from megatron.convert.families import exported

        exported(config, vocab_size)  # raises for a model that transformers does not have
    model = build_model(config, recipe, context, tokenizer, vocab_size, draws)
    heartbeat.beat("load")
    start = load_start(config, recipe, context, model, events, snapshots)
    heartbeat.beat("index")
    datasets, batches = build_data(config, recipe, context, model, start.state, log)
    heartbeat.beat("load")
    start.notices.extend(
        attach_teacher(config, context, model.stages, vocab_size, model.vocabulary, batches[0], events)
    )
    start.notices.extend(attach_frozen(config, context, model.stages, vocab_size, model.vocabulary, events))
    config, start = follow_checkpoint(config, context, model, start)
    log_start(config, recipe, context, model, start, datasets, batches[0], log)
    losses = Losses(sums_of(recipe, config), recipe.counts(config), measures_of(recipe, config))
    alarm = Alarm(events, heartbeat, os.environ.get(SUPERVISOR)) if context.is_rank_zero else None
    passes = build_passes(config, context, model, losses, start.state, log)
    metrics = build_metrics(config, recipe, context, model, start, console, events, losses, alarm)
    requests = build_requests(config, recipe, context, tokenizer, vocab_size, log)
    return Run(
        config=config,
        context=context,
        vocab_size=vocab_size,
        stages=model.stages,
        losses=losses,
        passes=passes,
        optimizer=model.optimizer,
        lengths=start.lengths,
        loaders=Loaders(*batches, requests),
        checkpoints=Checkpoints(checkpoint_manager, best_manager(config, losses.measures, context, log), snapshots),
        metrics=metrics,
        events=events,
        alarm=alarm,
        watch=watch,
        ranks=RankWatch(context, config.logging, events.rules if events else {}),
        state=start.state,
        profiler=build_profiler(config, context, model.pipeline, log),
        origin=origin_of(
            start,
            tokenizer,
            untrained(model.selection, model.facts, model.stages),
            config.checkpoint,
            metrics.wandb_run,
        ),
        in_base=frozenset((start.record or {}).get(IN_BASE, ())),
        pending=Pending(defers_host_sync(config, context, model.optimizer)),
        rerun=build_rerun(config, context.mesh, context.device),
        compiling=CompileTrial(active=config.kernels.torch_compile == "auto"),
        saved_hooks=(start.record.get("hooks") or {}) if start.changed else None,
    )


def join(config: schema.Config, heartbeat: Heartbeat, refusal: Optional[SettingsError]) -> tuple[RankContext, Console]:
    """Join the job, and open this rank's console. Raises SettingsError if any rank has a refusal."""
    heartbeat.beat("join")
    context = initialize.join_job(config.parallel, config.kernels)
    lacking = library_refusal(ep_library(config.parallel), context.device)
    raise_on_all_ranks(refusal or lacking, context)
    console = build_console(config.logging, context)
    console.keep_only(f"[{now()}] {shlex.join(sys.argv)}")
    return context, console


def record_to_load(config: schema.Config, context: RankContext) -> Optional[Mapping[str, Any]]:
    """state.json of the checkpoint that the run begins with or goes on from; None without one. All ranks call it."""
    if config.checkpoint.load is None:
        return None
    folder = load_folder(config.checkpoint, context.all_gather_object)
    return context.from_rank_zero(lambda: found_record(str(folder), config.checkpoint.ckpt_step))


def pick_precision(config: schema.Config, context: RankContext) -> schema.Config:
    """The settings with the number format that `--precision auto` stands for on this device."""
    precision = initialize.pick_precision(config.precision.precision, context)
    config = config.derive("--precision auto", precision=precision)
    if context.device.type == "cpu":
        keep_memory()
    return config


def pick_vocabulary(config: schema.Config) -> schema.Config:
    """The settings with the type and files of the vocabulary, which a folder or a name implies.

    Checkpoints record these, so that what reads them opens the same.
    """
    return config.derive("the vocabulary's files", **asdict(resolved(config.tokenizer)))


def build_model(
    config: schema.Config, recipe: Recipe, context: RankContext, tokenizer, vocab_size: int, draws: bool = True
) -> BuiltModel:
    """Build this rank's stages without memory for weights, then the optimizer, which allocates them.

    draws: weights get initial values; a run that resumes has all of them in its checkpoint
    """
    dtype = weight_format(config.precision)
    facts, selection = recipe.facts(config, vocab_size), Selection.of(config.optimizer)
    selection.check(facts.weights)
    pipeline = build_pipeline(config, context)
    build = partial(recipe.build_model, config, context.mesh, vocab_size, dtype=dtype, device="meta")
    stages = build_stages(build, pipeline, context.mesh, selection)
    if config.parallel.batch_invariant_mode:
        attach_ordered(stages, config.model)
    if config.precision.fp8_format:
        attach_fp8(stages, config, tables_of(facts))
    refuse_idle(config.optimizer, facts)
    check_model_complete(stages, context.mesh, context.all_gather_object, facts.weights)
    optimizer = build_optimizer(config, context, stages, dtype, draws)
    return BuiltModel(tokenizer, vocab_size, dtype, facts, selection, pipeline, stages, optimizer)


def load_start(
    config: schema.Config,
    recipe: Recipe,
    context: RankContext,
    model: BuiltModel,
    events: EventLog,
    snapshots: Optional[MemorySnapshots] = None,
) -> Start:
    """Load the checkpoint of `--load`, if there is one, into the optimizer. All ranks call it."""
    fresh = State(LossScaler.of(config.precision), left_out=tuple(config.guard.iterations_to_skip or ()))
    state, record, notices = load(
        config, context, model.optimizer, fresh, model.fingerprints, model.vocab_size, events, snapshots
    )
    if record and model.tokenizer:
        notices += other_ids(model.tokenizer, str(config.checkpoint.load), record.get("vocabulary"))
    if not state.valid_order:
        needed = dataset_sizes(config.batch, context.mesh.dp.size, config.data.full_validation)[1]
        state = replace(state, valid_order=needed)
    code = code_record(module_of(recipe.model_type)) if context.is_rank_zero else {}
    warnings = check_later_checkpoints(config, state.iteration, context.all_gather_object)
    lengths = Lengths.of(config.optimizer, config.batch, context.mesh.dp.size)
    return Start(state, record, code, lengths, notices, warnings)


def build_data(config: schema.Config, recipe: Recipe, context: RankContext, model: BuiltModel, state: State, log):
    """Build the datasets of the splits, and a loader for each: (datasets, loaders)."""
    if config.data.verify_data:
        verify_data(config.data, context, log)
    build = partial(build_datasets, config, recipe, model.tokenizer, model.vocab_size, context, log, state)
    if is_of_suite(recipe.build_datasets):
        cache = config.data.data_cache_path or config.data.object_storage_cache_path
        datasets = build_once(context, build, cache, log, 60 * config.parallel.distributed_timeout_minutes)
    else:  # a user's function may wait for other ranks
        datasets = build()
    return datasets, build_batches(config, recipe, context, datasets, model.tokenizer, model.vocab_size)


def follow_checkpoint(
    config: schema.Config, context: RankContext, model: BuiltModel, start: Start
) -> tuple[schema.Config, Start]:
    """The settings and the start of a run that resumes: the schedule may be the checkpoint's (--resume-schedule)."""
    if not start.record or config.checkpoint.finetune:
        return config, start
    config, lengths, changed = resume(config, start.record, context.mesh.dp.size, model.fingerprints)
    notices, warnings = start.notices + changed.notes, changed.warnings + start.warnings
    return config, replace(start, lengths=lengths, changed=changed, notices=notices, warnings=warnings)


def log_start(
    config: schema.Config,
    recipe: Recipe,
    context: RankContext,
    model: BuiltModel,
    start: Start,
    datasets,
    train: Optional[MicroBatchLoader],
    log,
) -> None:
    """Log the sizes of the run, the point from which it resumes, and all notices and warnings. All ranks call it."""
    state, record, mesh, notices = start.state, start.record, context.mesh, list(start.notices)
    log(summary(config, context, model.facts, state, model.stages, model.pipeline, loaded=bool(record)))
    if start.changed:
        notices += [*check_samples(config, record, train, context), *code_notes(record.get("code"), start.code)]
        log(resumed(config, record, state, start.lengths, mesh.logged_sizes))
        notices += nothing_left(config.batch, state, mesh.dp.size)
    notices += left_out(config.batch, state, mesh.dp.size)
    fp8_recipe = config.precision.fp8_format and config.precision.fp8_recipe
    notices += fused_kernels.describe_kernels(context.device.type, model.dtype, fp8_recipe)
    notices += describe_kernel(config, model.facts, context.device.type)
    notices += crowded(context) + end_of_document(config, recipe, model.tokenizer, model.vocab_size)
    warnings = [*idle(config, mesh.world_size, datasets).values(), *start.warnings]
    if not record:
        random_notes, random_warnings = random_weights(config, recipe)
        notices, warnings = notices + random_notes, warnings + random_warnings
    log_notices(log, [*remarks(config, mesh.world_size), *notices], warnings)


def build_passes(
    config: schema.Config, context: RankContext, model: BuiltModel, losses: Losses, state: State, log
) -> Passes:
    """Build the schedule's messages between stages. Raises SettingsError if a rank cannot run a schedule file."""
    pipeline = model.pipeline
    learns = needs_gradient(model.stages, pipeline, context.mesh, context.all_gather_object)
    raise_on_all_ranks(refusal_of_schedule(pipeline, model.optimizer, learns), context)
    return Passes(
        pipeline,
        build_p2p_communicator(config, context, model.dtype, pipeline, model.facts),
        learns,
        recorder_of(config, context, pipeline, state, log),
        StageOutputs(losses.names),
    )


def raise_on_all_ranks(refusal: Optional[SettingsError], context: RankContext) -> None:
    """Raise SettingsError on all ranks if one of them has a refusal. Otherwise the others would wait for it."""
    reasons = context.all_gather_object(refusal)
    if refusal:
        raise refusal
    for rank, reason in enumerate(reasons):
        if reason:
            error = SettingsError(f"rank {rank}, on its machine: {reason.what}", reason.why, reason.do)
            error.about = reason.about
            raise error


def origin_of(
    start: Start, tokenizer, untrained: dict[str, Any], settings: schema.Checkpoint, wandb_run: Optional[str]
) -> dict[str, Any]:
    """Code, libraries, vocabulary, folder, untrained tensors, base, lineage and W&B's id of a run, for its checkpoints."""
    more = {BASE: start.record[BASE]} if start.record and IN_BASE in start.record else {}
    more |= {WANDB_RUN: wandb_run} if wandb_run else {}
    return more | dict(
        version=__version__,
        commit=source_commit(),
        code=start.code,
        libraries=library_versions(),
        **learned_vocabulary(tokenizer, None if settings.finetune else (start.record or {}).get("vocabulary")),
        untrained=untrained,
        folder=os.getcwd(),
        **lineage(start.record, settings.load if settings.finetune else None),
    )


def untrained(selection: Selection, facts: Facts, stages: list[torch.nn.Module]) -> dict[str, Any]:
    """The frozen parameters and the buffers (name -> rule) of a run, for its checkpoints."""
    own = {name: held.placement for name, held in placed_buffers(stages).items() if held.placement.buffer.saved}
    buffers = {name: placed.buffer.combine for name, placed in {**facts.weights, **own}.items() if placed.buffer}
    return dict(frozen=sorted(selection.frozen(facts.weights)), buffers=buffers)


def build_optimizer(
    config: schema.Config, context: RankContext, stages: list[torch.nn.Module], dtype: torch.dtype, draws: bool = True
) -> DistributedOptimizer:
    """Build the optimizer, which owns the weights of this rank's stages."""
    heads = None
    if config.optimizer.qk_clip or config.logging.log_max_attention_logit:
        heads = watch_heads(stages, bool(config.kernels.torch_compile))
    return DistributedOptimizer(
        stages,
        context.mesh,
        config.optimizer,
        config.parallel,
        dtype=dtype,
        device=context.device,
        seed=config.logging.seed,
        stable=config.checkpoint.async_save,
        heads=heads,
        draws=draws,
    )


def defers_host_sync(config: schema.Config, context: RankContext, optimizer: DistributedOptimizer) -> bool:
    """Whether the host can read the numbers of a step during the next one: on a GPU, if nothing else makes it wait."""
    wanted = config.logging.timing_log_level == 0 and config.guard.rerun_mode == "disabled"
    return context.device.type == "cuda" and optimizer.skips_on_device and wanted


def refuse_idle(settings: schema.Optimizer, facts: Facts) -> None:
    """Raise SettingsError for settings about a kind of weights that the model does not have."""
    if knows_matrices(settings) and not any(w.matrices for w in facts.weights.values()):
        raise SettingsError(
            f"--optimizer {settings.rule}: no weight of this model is marked as a matrix of a linear layer",
            do="set matrices in their placements (docs/optimizers.md), or choose another optimizer",
        )
    if settings.decoupled_lr is not None and not any(w.embedding_or_output for w in facts.weights.values()):
        raise SettingsError(
            f"--decoupled-lr {settings.decoupled_lr:g}: no weight of this model is marked as an embedding",
            do="set embedding_or_output in its placements (docs/optimizers.md), or leave the flag out",
        )


def build_pipeline(config: schema.Config, context: RankContext) -> Pipeline:
    """Build the pipeline: the layers of each stage, and the order of passes."""
    num_microbatches = config.batch.global_batch_size // config.batch.micro_batch_size // context.mesh.dp.size
    return Pipeline.of(config.parallel, config.model.num_layers, num_microbatches)


def refusal_of_schedule(pipeline: Pipeline, optimizer: DistributedOptimizer, learns) -> Optional[SettingsError]:
    """The error if this rank cannot run the messages of a schedule file; None otherwise."""
    rank = optimizer.mesh.pp.rank
    try:
        if pipeline.custom:
            optimizer.messages.plan(pipeline.ops(rank, pipeline.custom.num_microbatches), learns)
    except BrokenSchedule as error:
        what = f"--pipeline-schedule {pipeline.name}: rank {rank} of the pipeline cannot run its list"
        return SettingsError(what, str(error), DO)
    return None


def build_p2p_communicator(
    config: schema.Config, context: RankContext, dtype: torch.dtype, pipeline: Pipeline, facts: Facts
) -> P2PCommunicator:
    """Build the communicator between pipeline stages, for messages of the model's shape."""
    mesh, groups = context.mesh, None
    shape = facts.message_of(config.parallel, config.batch.micro_batch_size)
    if mesh.pp.size > 1 and dist.get_backend() == "nccl":
        groups = open_channels(mesh, pipeline.stages)
    return P2PCommunicator(mesh.pp, shape, dtype, context.device, stages=pipeline.stages, groups=groups)
