# SPDX-License-Identifier: Apache-2.0
"""From resolved settings to a `Run` that is ready for its first step, or for the step after a checkpoint's."""

import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

from megatron import __version__, fused_kernels
from megatron.checkpoint.folder import checkpoints, restore
from megatron.checkpoint.manager import CheckpointManager, store_all_gather_object
from megatron.checkpoint.traces import may_begin, same_place
from megatron.data import gpt_dataset, manifest
from megatron.data.blend import parse_blend
from megatron.data.indexed import bare_prefix
from megatron.data.loader import MicroBatchLoader
from megatron.data.remote import nearby
from megatron.data.vocabulary import refuse_other_vocabulary
from megatron.errors import CheckpointError, DataError, SettingsError, StorageError
from megatron.fused_kernels.cpu import keep_memory
from megatron.guard import changes
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.watch import Watch
from megatron.model.attention import told_of_kernel
from megatron.model.facts import Facts, RankSetup
from megatron.model.recipe import Recipe, module_of, sums_of
from megatron.mpu import collectives, initialize
from megatron.mpu.initialize import RankContext, weight_format
from megatron.optimizer.kinds import knows_matrices
from megatron.optimizer.lr_schedule import Lengths, learning_rate
from megatron.optimizer.resumed_schedule import drift, follow, sentence
from megatron.optimizer.scaler import LossScaler
from megatron.optimizer.zero import DistributedOptimizer
from megatron.pipeline.build import build_stages, check_model_complete
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.timeline_recorder import STEP, Recorder
from megatron.pipeline.wire import P2PCommunicator, open_channels
from megatron.settings import schema
from megatron.settings.batch import batch_size, total_iterations, total_samples
from megatron.storage.urls import UrlPath, location
from megatron.telemetry.console import Console
from megatron.telemetry.metrics import Metrics, RunSizes, metrics_path
from megatron.telemetry.own_code import code_notes, code_record
from megatron.telemetry.peak_flops import peak_flops
from megatron.telemetry.phases import PHASES
from megatron.telemetry.profiler import Profiler
from megatron.telemetry.run_record import library_versions, now, run_record, source_commit
from megatron.telemetry.timers import Timers
from megatron.tokenizer import build_tokenizer, unused_rows
from megatron.training.rules import idle, remarks
from megatron.training.state import Run, State


def build_run(config: schema.Config, recipe: Recipe, heartbeat: Optional[Heartbeat] = None) -> Run:
    """Join the job, build model, optimizer and data, load the checkpoint if there is one. All ranks together."""
    heartbeat = heartbeat or Heartbeat()
    heartbeat.beat("join")
    context = initialize.join_job(config.parallel, config.kernels)
    console = Console(config.logging.console, bar=config.logging.progress_bar, active=context.is_rank_zero)
    console.keep_only(f"[{now()}] {shlex.join(sys.argv)}")
    log = console.log
    watch = build_watch(config, context, heartbeat, log)
    heartbeat.beat("model")
    precision = initialize.pick_precision(config.precision.precision, context)
    config = replace(config, precision=replace(config.precision, precision=precision))
    if context.device.type == "cpu":
        keep_memory()
    tokenizer, vocab_size = build_vocabulary(config, log)
    checkpoint_manager = open_checkpoint_manager(
        config.checkpoint, context, log
    )  # before the work: a locked or read-only folder is told at once
    refuse_other_vocabulary(all_paths(config.data, log), tokenizer)
    dtype = weight_format(config.precision)
    pipeline = build_pipeline(config, context)
    build = partial(recipe.build_model, config, context.mesh, vocab_size, dtype=dtype, device="meta")
    stages = build_stages(build, pipeline, context.mesh)
    facts = recipe.facts(config, vocab_size)
    refuse_idle(config.optimizer, facts)
    check_model_complete(stages, context.mesh, all_gather_object_over(context), facts.weights)
    optimizer = DistributedOptimizer(
        stages,
        context.mesh,
        config.optimizer,
        config.parallel,
        dtype=dtype,
        device=context.device,
        seed=config.logging.seed,
        stable=config.checkpoint.async_save,
    )
    heartbeat.beat("load")
    state = State(LossScaler.of(config.precision), left_out=tuple(config.guard.iterations_to_skip or ()))
    state, record, notices = load(config, context, optimizer, state)
    code = code_record(module_of(recipe.model_type)) if context.is_rank_zero else {}
    refuse_to_mix(config.checkpoint, state.iteration, all_gather_object_over(context))
    heartbeat.beat("index")
    if config.data.verify_data:
        verify_data(config.data, context, log)
    datasets = build_datasets(config, recipe, tokenizer, vocab_size, context, log)
    train, valid, test = build_batches(config, context, datasets, tokenizer, vocab_size)
    lengths, warnings = Lengths.of(config.optimizer, config.batch, context.mesh.dp.size), []
    if record and not config.checkpoint.finetune:
        said, warnings = drift_told(config, record, context.mesh.dp.size)
        notices += said
        config, lengths = follow(config, record, context.mesh.dp.size)
    log(summary(config, context, facts, state, stages, record))
    if len(pipeline.stages) > 1 and context.is_rank_zero:
        log(f" > {pipeline.describe(num_microbatches_of(config, context))}")
    if record and not config.checkpoint.finetune:
        notices += check_samples(config, record, train, context)
        notices += code_notes(record.get("code"), code)
        log(resumed(config, record, state, lengths, context.mesh.sizes))
        notices += nothing_left(config.batch, state, context.mesh.dp.size)
    notices += fused_kernels.told(context.device.type, dtype) + told_of_kernel(config, facts, context.device.type)
    notices += end_of_document(config, recipe, tokenizer, vocab_size)
    tell(
        log,
        [*remarks(config, context.mesh.world_size), *notices],
        [*idle(config, context.mesh.world_size).values(), *warnings],
    )
    return Run(
        config=config,
        context=context,
        vocab_size=vocab_size,
        sums=sums_of(recipe, config),
        stages=stages,
        pipeline=pipeline,
        wire=build_p2p_communicator(config, context, dtype, pipeline, facts),
        optimizer=optimizer,
        lengths=lengths,
        train_loader=train,
        valid_loader=valid,
        test_loader=test,
        checkpoint_manager=checkpoint_manager,
        metrics=build_metrics(config, context, facts, state, console, code, recipe.perplexities),
        watch=watch,
        state=state,
        recorder=recorder_of(config, context, pipeline, state.iteration, log),
        profiler=Profiler(config, context.mesh.rank, context.device, log),
        origin=dict(version=__version__, commit=source_commit(), code=code, libraries=library_versions()),
        reads_late=reads_late(config, context, optimizer),
    )


def reads_late(config: schema.Config, context: RankContext, optimizer: DistributedOptimizer) -> bool:
    """Whether the host need not wait for the device once a step: there is one, and nothing else makes it wait."""
    return context.device.type == "cuda" and optimizer.skips_on_device and config.logging.timing_log_level == 0


def build_watch(config: schema.Config, context: RankContext, heartbeat: Heartbeat, log) -> Watch:
    """This rank's guards."""
    mesh = context.mesh
    heartbeat.note_place(mesh.coordinates)
    return Watch(
        config.guard,
        minutes=config.batch.exit_duration_in_mins,
        heartbeat=heartbeat,
        rank=mesh.rank,
        log=log,
        all_gather_object=all_gather_object_over(context),
        counts=mesh.tp.rank == mesh.pp.rank == mesh.cp.rank == 0,
    )


def all_gather_object_over(context: RankContext):
    """`all_gather_object(value) -> [value of every rank]`, what checkpoints need to know of process groups."""
    return partial(collectives.all_gather_object, axis=context.mesh.world)


# ---- data ----------------------------------------------------------------------------------------------------------


def tell(log, notices: list[str], warnings: list[str]) -> None:
    """Lines of the log for what somebody should know."""
    for notice in notices:
        log(f"note: {notice}")
    for warning in warnings:
        log(f"warning: {warning}")


def end_of_document(config: schema.Config, recipe: Recipe, tokenizer, vocab_size: int) -> list[str]:
    """What to say of the token that a vocabulary of numbers has beside --vocab-size, where samples are numbers."""
    if not (recipe.own_data and tokenizer and vocab_size == (config.tokenizer.vocab_size or 0) + 1):
        return []
    return [f"the vocabulary has {vocab_size} tokens: {vocab_size - 1} is the end of a document, beside --vocab-size"]


def nothing_left(batch: schema.Batch, state: State, dp: int) -> list[str]:
    """What to say of a run that goes on from where it ends."""
    end = total_iterations(batch, dp)
    done = state.iteration >= end and not batch.skip_train
    return [f"training ends at iteration {end}: nothing is left to train"] if done else []


def build_vocabulary(config: schema.Config, log) -> tuple[Optional[Any], int]:
    """(tokenizer or None, size of the vocabulary without padding)."""
    settings = config.tokenizer
    if settings.tokenizer_type is None and not config.data.files and settings.vocab_size:
        return None, settings.vocab_size
    tokenizer = build_tokenizer(settings, log)
    if (
        settings.vocab_size
        and settings.vocab_size < tokenizer.vocab_size
        and settings.tokenizer_type != "NullTokenizer"
    ):
        raise SettingsError(
            f"--vocab-size {settings.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}",
            do="leave --vocab-size out, or give at least the tokenizer's size",
        )
    if remark := unused_rows(settings.vocab_size, tokenizer.vocab_size):
        log(f"note: {remark}")
    return tokenizer, max(settings.vocab_size or 0, tokenizer.vocab_size)


def all_paths(data: schema.Data, log) -> list[str]:
    """Every prefix that is read, on this machine, weights between them."""
    lists = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    return [nearby(word, data.data_cache_path, log) for words in lists for word in words or ()]


def verify_data(data: schema.Data, context: RankContext, log) -> None:
    """Compare all token files with their checksums, every rank a share. All ranks raise DataError together."""
    given = {
        f"--{name.replace('_', '-')}": getattr(data, name)
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    }
    blends = [parse_blend(words, flag) for flag, words in given.items() if words]
    prefixes = sorted({bare_prefix(prefix) for blend in blends for prefix in blend.prefixes})
    started, problems = time.perf_counter(), []
    try:
        for prefix in prefixes:
            problems += manifest.verify(
                nearby(prefix, data.data_cache_path, log), context.mesh.rank, context.mesh.world_size
            )
    except DataError as missing:
        problems.append(str(missing))
    problems = sorted({problem for found in all_gather_object_over(context)(problems) for problem in found})
    if problems:
        raise DataError(
            "token files are not what was written", "\n  ".join(problems[:8]), "copy or preprocess them again"
        )
    log(f" > verified {len(prefixes)} dataset{'s' * (len(prefixes) > 1)} in {time.perf_counter() - started:.1f} s")


def dataset_sizes(batch: schema.Batch, dp: int, full_validation: bool = False) -> tuple[int, int, int]:
    """Samples that training, validation and testing ask for, as Megatron-LM counts them.

    full_validation: a dataset decides itself how many it has; this is how many are made up where it has none.
    """
    iterations = total_iterations(batch, dp)
    evaluations = iterations // batch.eval_interval + 1 if batch.eval_interval else 1
    each = batch.eval_iters * batch.global_batch_size
    if full_validation:
        return total_samples(batch, dp), each or batch.global_batch_size, each
    return total_samples(batch, dp), each if batch.eval_same_samples else evaluations * each, each


def build_datasets(config: schema.Config, recipe: Recipe, tokenizer, vocab_size: int, context: RankContext, log):
    """(train, valid, test) of the recipe; synthetic ones where `--mock-data` stands in for samples of its own."""
    sizes = dataset_sizes(config.batch, context.mesh.dp.size, config.data.full_validation)
    if recipe.own_data and config.data.mock_data:
        eod = tokenizer.eod if tokenizer else None
        length, seed = config.model.seq_length, config.logging.seed
        return gpt_dataset.build_datasets(config.data, length, sizes, seed, eod=eod, vocab_size=vocab_size, log=log)
    datasets = recipe.build_datasets(config, tokenizer, vocab_size, sizes, log)
    check_datasets(config, recipe, datasets, sizes)
    if datasets[0] is None and total_iterations(config.batch, context.mesh.dp.size):
        if recipe.own_data:
            raise SettingsError("there is no training data", f"{recipe.model_type} gives none for {sizes[0]:,} samples")
        raise SettingsError("there is no training data", f"--split {config.data.split}", "give training a share")
    return datasets


def check_datasets(config: schema.Config, recipe: Recipe, datasets, sizes: tuple[int, int, int]) -> None:
    """Raise DataError unless a recipe's datasets are three, each None or long enough: not when a run comes to their end."""
    if not isinstance(datasets, (tuple, list)) or len(datasets) != 3:
        told = f"{len(datasets)} of them" if isinstance(datasets, (tuple, list)) else type(datasets).__name__
        raise DataError(
            f"build_datasets of {recipe.model_type} returned {told}",
            "(train, valid, test) are wanted, each a dataset or None",
            "return None for what there is none of: docs/extending.md#a-dataset",
        )
    batch, cyclic = config.batch, config.data.dataloader_type == "cyclic"
    size = batch.global_batch_size
    count = f"--train-samples {batch.train_samples}" if batch.train_samples else f"--train-iters {batch.train_iters}"
    if not batch.train_samples and not batch.rampup_batch_size:
        count += f" x --global-batch-size {size}"
    once = f"--eval-iters {batch.eval_iters} x --global-batch-size {size}"
    evaluations = sizes[1] // max(sizes[2], 1)
    needs = count, f"{evaluations} evaluations x {once}" if evaluations > 1 else once, once
    fewer = "a shorter run", "--eval-same-samples or fewer of --eval-iters", "fewer of --eval-iters"
    for dataset, split, wanted, need, do in zip(datasets, ("training", "validation", "testing"), sizes, needs, fewer):
        if dataset is None or wanted == 0 or (split == "validation" and config.data.full_validation):
            continue
        name = type(dataset).__name__
        if not hasattr(dataset, "__len__"):
            raise DataError(f"{name}, the dataset for {split}, has no length", do="give it a __len__")
        if len(dataset) < (1 if cyclic else wanted):
            raise DataError(
                f"{name} has {len(dataset):,} samples for {split}, {wanted:,} are needed ({need})",
                do=f"give it more samples, ask for {do}, or go through them again and again: --dataloader-type cyclic",
            )


def build_batches(
    config: schema.Config, context: RankContext, datasets, tokenizer, vocab_size: int
) -> list[Optional[MicroBatchLoader]]:
    """A loader for each dataset that exists. Every rank of a tensor or pipeline group gets the same micro-batches, and
    ranks of context parallelism get rows of the same samples.
    """
    dp, cp = context.mesh.dp, context.mesh.cp
    batch = config.batch

    def constant(consumed: int) -> tuple[int, int]:
        return batch.global_batch_size, batch.global_batch_size // batch.micro_batch_size // dp.size

    def ramped(consumed: int) -> tuple[int, int]:
        return batch_size(batch, dp.size, consumed)

    return [
        dataset
        and MicroBatchLoader(
            dataset,
            config.data,
            micro_batch_size=batch.micro_batch_size,
            eod=tokenizer.eod if tokenizer else None,
            dp_rank=dp.rank,
            dp_size=dp.size,
            cp_rank=cp.rank,
            cp_size=cp.size,
            next_step=sizes,
            seq_length=config.model.seq_length,
            vocab_size=vocab_size,
            pin_memory=context.device.type == "cuda",
            whole=whole,
        )
        for dataset, sizes, whole in zip(
            datasets, (ramped, constant, constant), (False, config.data.full_validation, False), strict=True
        )
    ]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def open_checkpoint_manager(settings: schema.Checkpoint, context: RankContext, log) -> Optional[CheckpointManager]:
    """The right to write into `--save`; None without it."""
    if settings.save is None:
        return None
    mesh = context.mesh
    all_gather_object = all_gather_object_over(context)
    if settings.async_save and mesh.world_size > 1:
        store = dist.PrefixStore("checkpoints", dist.distributed_c10d._get_default_store())
        all_gather_object = store_all_gather_object(store, mesh.rank, mesh.world_size, timeout=SLOWEST_WRITER)
    return CheckpointManager(settings, rank=mesh.rank, all_gather_object=all_gather_object, log=log)


SLOWEST_WRITER = 3600.0  # seconds that ranks wait for each other's files; a rank that dies ends the job anyway


def load_folder(settings: schema.Checkpoint, all_gather_object) -> Path | UrlPath:
    """`--load`, or the mirror of failed saves or the copies where they hold a newer checkpoint. The first rank decides."""
    folders = [location(folder) for folder in (settings.load, settings.save_mirror, settings.save_copy) if folder]
    this_one = settings.ckpt_step is not None or (folders[0] / "index.json").exists()
    newest = folders[0] if this_one else max(folders, key=lambda folder: max(checkpoints(folder), default=-1))
    return all_gather_object(newest)[0]


def load(
    config: schema.Config, context: RankContext, optimizer: DistributedOptimizer, fresh: State
) -> tuple[State, Optional[dict[str, Any]], list[str]]:
    """Fill the optimizer's state from `--load`.

    Returns the state to go on from, what the checkpoint says of its run (None without one), and what the user should hear.
    """
    settings = config.checkpoint
    if settings.load is None:
        return fresh, None, []
    all_gather_object = all_gather_object_over(context)
    weights_only = settings.finetune or settings.no_load_optim
    compare = changes.refuse_another_model if settings.finetune else changes.refuse_another_run
    pieces = optimizer.pieces(moments=not weights_only)

    def fits(record: dict[str, Any]) -> None:
        compare(config, record["config"])
        if not weights_only and record["optimizer_steps"] is None:
            raise CheckpointError(f"{settings.load} holds no optimizer state", do="add --no-load-optim or --finetune")
        if not weights_only:
            changes.refuse_another_optimizer(config, record["config"])

    names = (
        None
        if weights_only
        else {name for names in all_gather_object({piece.name for piece in pieces}) for name in names}
    )
    restored = restore(
        load_folder(settings, all_gather_object),
        pieces,
        names=names,
        step=settings.ckpt_step,
        allow_empty=partial(may_begin, settings, metrics_path(config.logging, settings.save)),
        check=fits,
        rank=context.mesh.rank,
        all_gather_object=all_gather_object,
        strictness=settings.load_strictness,
    )
    if restored is None:
        return fresh, None, [f"no checkpoint in {settings.load} yet: starting from iteration 0"]
    record = all_gather_object(restored.state)[0]
    optimizer.copy_main_params_to_model_params()
    notices = [*restored.notices, f"loaded checkpoint {restored}"]
    if settings.finetune:
        return fresh, record, notices
    if not weights_only:
        optimizer.step_count = record["optimizer_steps"]
    return fresh.restored(record["state"]), record, notices + changes.told(config, record["config"])


def refuse_idle(settings: schema.Optimizer, facts: Facts) -> None:
    """Raise SettingsError for settings that treat weights in their own way of which the model has none."""
    if knows_matrices(settings) and not any(w.matrices for w in facts.weights.values()):
        raise SettingsError(
            f"--optimizer {settings.rule}: no weight of this model says that it is a matrix of a linear layer",
            do="set matrices in their placements (docs/optimizers.md), or choose another optimizer",
        )
    if settings.decoupled_lr is not None and not any(w.embedding_or_output for w in facts.weights.values()):
        raise SettingsError(
            f"--decoupled-lr {settings.decoupled_lr:g}: no weight of this model says that it is an embedding",
            do="set embedding_or_output in its placements (docs/optimizers.md), or leave the flag out",
        )


def refuse_to_mix(settings: schema.Checkpoint, iteration: int, all_gather_object) -> None:
    """Raise CheckpointError where `--save` holds later checkpoints of a run that this one does not go on from.

    The two would lie in one folder, and whoever loads from it next would get whichever has the higher number. So they
    would in the mirror and among the copies, where a run with `--load` looks for later ones and finds its own.
    """
    if settings.save is None or same_place(settings.load, settings.save):
        return
    flags = {"--save": settings.save}
    if settings.load is None:
        flags.update({"--save-mirror": settings.save_mirror, "--save-copy": settings.save_copy})
    for flag, folder in flags.items():
        newest = all_gather_object(max(checkpoints(location(folder)), default=0) if folder else 0)[0]
        if newest > iteration:
            raise CheckpointError(
                f"{flag} {folder} holds checkpoints of another run, up to iteration {newest}",
                f"this run starts at iteration {iteration}: its own would lie between them",
                f"--load {folder} goes on from there; otherwise give another {flag}, or move them away",
            )


def drift_told(config: schema.Config, record: dict[str, Any], dp: int) -> tuple[list[str], list[str]]:
    """(notes, warnings) about a schedule that has changed by itself: a note where --resume-schedule decides about it."""
    found, chosen = drift(config, record, dp), config.checkpoint.resume_schedule
    if chosen == "checkpoint":
        found = [one for one in found if not one.of_schedule]
    words = [sentence(found, chosen)] if found else []
    return (words, []) if chosen == "command" else ([], words)


def resumed(config: schema.Config, record: dict[str, Any], state: State, lengths: Lengths, now: dict[str, int]) -> str:
    """Where a run goes on, in a line; `now`: axis -> size of this job."""
    rate = learning_rate(config.optimizer, lengths, state.scheduled_samples)
    then = record.get("mesh") or {}
    layouts = " and ".join(dict.fromkeys(f"{_layout(sizes)} {word}" for sizes, word in ((then, "then"), (now, "now"))))
    if then == now:
        layouts = f"{_layout(now)} then and now"
    return (
        f" > resuming at iteration {state.iteration}, {state.consumed_samples:,} samples consumed, "
        f"learning rate {rate:.6E}; layout {layouts}"
    )


def _layout(sizes: dict[str, int]) -> str:
    dp = sizes.get("replicate", 1) * sizes.get("shard", 1)
    return f"tp {sizes.get('tp', 1)} pp {sizes.get('pp', 1)} cp {sizes.get('cp', 1)} dp {dp}"


def check_samples(
    config: schema.Config, record: dict[str, Any], batches: MicroBatchLoader, context: RankContext
) -> list[str]:
    """Compare samples of the order of training with those of the checkpoint's run: what the user should hear."""
    wrong = [
        int(place)
        for place, halves in (record.get("samples") or {}).items()
        if context.is_rank_zero and list(batches.sample_hash(int(place))) != halves
    ]
    return list(changes.refuse_other_samples(config, all_gather_object_over(context)(wrong)[0]))


# ---- the rest --------------------------------------------------------------------------------------------------------


def build_pipeline(config: schema.Config, context: RankContext) -> Pipeline:
    """Which layers lie where, and the order of passes."""
    return Pipeline.of(config.parallel, config.model.num_layers, num_microbatches_of(config, context))


def num_microbatches_of(config: schema.Config, context: RankContext) -> int:
    """Micro-batches of a step at the full batch size."""
    return config.batch.global_batch_size // config.batch.micro_batch_size // context.mesh.dp.size


def build_p2p_communicator(
    config: schema.Config, context: RankContext, dtype: torch.dtype, pipeline: Pipeline, facts: Facts
) -> P2PCommunicator:
    """The wire between pipeline stages, for messages of the model's shape."""
    mesh, groups = context.mesh, None
    shape = facts.message(
        RankSetup(
            tp=mesh.tp.size,
            cp=mesh.cp.size,
            sp=config.parallel.sequence_parallel,
            micro_batch_size=config.batch.micro_batch_size,
        )
    )
    if mesh.pp.size > 1 and dist.get_backend() == "nccl":
        groups = open_channels(mesh, pipeline.stages)
    return P2PCommunicator(mesh.pp, shape, dtype, context.device, stages=pipeline.stages, groups=groups)


def recorder_of(config: schema.Config, context: RankContext, pipeline: Pipeline, done: int, log) -> Optional[Recorder]:
    """What records a step for `--pipeline-timeline`; None without it. done: steps before this start."""
    path = config.parallel.pipeline_timeline
    if path is None:
        return None
    if context.is_rank_zero and not Path(path).absolute().parent.is_dir():
        raise StorageError(f"cannot write --pipeline-timeline {path}", "there is no such folder")
    if total_iterations(config.batch, context.mesh.dp.size) - done < STEP:
        log(f"note: --pipeline-timeline records step {STEP} of a start, and fewer are left: {path} will not be written")
    return Recorder(path, pipeline, context.mesh)


def build_metrics(
    config: schema.Config,
    context: RankContext,
    facts: Facts,
    state: State,
    console: Console,
    code: dict[str, Any],
    perplexities: tuple[str, ...] = ("lm loss",),
) -> Metrics:
    """The log of a run, opened on the first rank. code: `telemetry.own_code.code_record`; perplexities: as in `Recipe`."""
    name = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
    rates = RunSizes(
        total_iterations(config.batch, context.mesh.dp.size),
        config.model.seq_length,
        ranks=context.mesh.world_size,
        flops_per_token=facts.flops(),
        peak_flops=peak_of(config, context, name),
        device=context.device.type,
        perplexities=perplexities,
    )
    peak = dict(flops=rates.peak_flops, of=peak_source(config, context, name))
    header = run_record(
        config, context.mesh.sizes, state.iteration, device=name, parameters=facts.parameters, peak=peak, code=code
    )
    return Metrics(
        config.logging,
        rates,
        header=header,
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        save=config.checkpoint.save,
        active=context.is_rank_zero,
        timers=build_timers(config.logging, context),
        console=console,
    )


def build_timers(settings: schema.Logging, context: RankContext) -> Optional[Timers]:
    """The timers of `--timing-log-level`; None where it asks for none."""
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
    """FLOP/s that MFU compares with: given, or from the vendor's data sheet; None of a CPU, which has no such sheet.

    What a CPU was measured to reach at the start depends on what else ran then: shares of it compare no two runs.
    """
    if config.logging.peak_tflops:
        return config.logging.peak_tflops * 1e12
    return None if context.device.type == "cpu" else peak_flops(name, config.precision.precision)


def peak_source(config: schema.Config, context: RankContext, name: str) -> str:
    """What `peak_of` is the peak of, in words."""
    if config.logging.peak_tflops:
        return "as --peak-tflops says"
    return "unknown" if context.device.type == "cpu" else f"the data sheet of {name} in {config.precision.precision}"


def kernel_instead(config: schema.Config, context: RankContext, facts: Facts) -> list[str]:
    """That the kernel which was asked for is none of this device's, and which one is taken."""
    if context.device.type == "cuda" or config.kernels.attention_backend != "flash":
        return []
    kernel = getattr(facts, "attention_kernel", None)
    setup = RankSetup(device="cpu", precision=config.precision.precision, backend="flash")
    names = {"flash": "torch's scaled_dot_product_attention", "reference": "the reference kernel"}
    name = kernel and names.get(kernel(setup), f"the {kernel(setup)} kernel")
    return [f"note: --attention-backend flash is for CUDA: {name or 'another kernel'} computes attention on this CPU"]


def loaded_line(config: schema.Config, mesh, state: State) -> str:
    """Megatron-LM's line."""
    place = f"[ t {mesh.tp.rank + 1}/{mesh.tp.size}, p {mesh.pp.rank + 1}/{mesh.pp.size} ]"
    return f"  successfully loaded checkpoint from {config.checkpoint.load} {place} at iteration {state.iteration}"


def model_parallel_sizes(context: RankContext, stages: list[torch.nn.Module]) -> list[str]:
    """Megatron-LM's lines about the parameters of each model parallel rank. All ranks together."""
    mesh, parameters = context.mesh, {p for stage in stages for p in stage.parameters()}
    first_copy = mesh.dp.rank == mesh.cp.rank == 0
    own = (mesh.pp.rank, mesh.tp.rank, sum(parameter.numel() for parameter in parameters)) if first_copy else None
    return [
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tp}, {pp}): {count}"
        for pp, tp, count in sorted(found for found in all_gather_object_over(context)(own) if found)
    ]


def summary(
    config: schema.Config,
    context: RankContext,
    facts: Facts,
    state: State,
    stages: list[torch.nn.Module],
    record: Optional[dict[str, Any]] = None,
) -> str:
    """What is about to happen, in a few lines. record: of the checkpoint that was loaded."""
    mesh, batch = context.mesh, config.batch
    size, num_microbatches = batch_size(batch, mesh.dp.size, state.consumed_samples)
    return "\n".join(
        [
            f"using world size: {mesh.world_size}, data-parallel size: {mesh.dp.size}, "
            f"{f'context-parallel size: {mesh.cp.size}, ' * (mesh.cp.size > 1)}"
            f"tensor-model-parallel size: {mesh.tp.size}, pipeline-model-parallel size: {mesh.pp.size}",
            f" > {facts.describe(f'{facts.parameters:,}')}",
            *model_parallel_sizes(context, stages),
            f" > {config.precision.precision} on {context.device.type}, torch {torch.__version__}, "
            f"Python {sys.version.split()[0]}",
            *([f" > {context.threads}"] if context.threads else []),
            *kernel_instead(config, context, facts),
            f" > global batch {size} = micro batch {batch.micro_batch_size} x data parallel {mesh.dp.size} x "
            f"{num_microbatches} micro-batches; iterations {state.iteration} to {total_iterations(batch, mesh.dp.size)}",
            *([loaded_line(config, mesh, state)] if record else []),
        ]
    )
