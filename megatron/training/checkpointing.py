# SPDX-License-Identifier: Apache-2.0
"""Loads the checkpoint from which a run resumes, and opens the folder for its checkpoints."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

from megatron.checkpoint.base_checkpoint import BASE, base_names, base_record, open_checkpoint
from megatron.checkpoint.choose import checkpoints, passed_over, rebuilt
from megatron.checkpoint.first_launch import may_begin, same_place
from megatron.checkpoint.folder import Restored, restore
from megatron.checkpoint.manager import CheckpointManager, store_all_gather_object
from megatron.checkpoint.memory_snapshots import MemorySnapshots, forget_snapshots
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.reshard import copy_companions
from megatron.checkpoint.store import Piece
from megatron.data.epochs import same_order
from megatron.data.loader import MicroBatchLoader
from megatron.errors import CheckpointError, SettingsError
from megatron.guard import changes
from megatron.guard.resume_command import resuming_words
from megatron.model.hybrid_names import fresh_layers, seen_as
from megatron.model.kinds.experts.upcycling import (
    EXPERTS,
    ROUTER,
    experts_of,
    refuse_unequal,
    router_of,
    source_of,
    upcycled_settings,
)
from megatron.model.lora import OWN, PAIR, scale_of
from megatron.model.recipe import config_of, recipe_of
from megatron.mpu.initialize import RankContext
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings import schema
from megatron.settings.batch import total_samples
from megatron.storage.urls import UrlPath, local_folder, location
from megatron.telemetry.events import EventLog
from megatron.telemetry.metrics import metrics_path
from megatron.telemetry.trackers import WANDB_RUN, kept_wandb_run
from megatron.training.state import State

LISTED = 8  # new weights in a notice
IN_BASE = "in base"  # entry of a loaded record: the names of the tensors that the base of adapters has
SLOWEST_WRITER = 3600.0  # seconds that ranks wait for each other's files; a dead rank ends the job earlier


def open_checkpoint_manager(
    settings: schema.Checkpoint, context: RankContext, log, events: EventLog
) -> Optional[CheckpointManager]:
    """Open `--save` for writing checkpoints; None without it."""
    if settings.save is None:
        return None
    mesh = context.mesh
    all_gather_object = context.all_gather_object
    if settings.async_save and mesh.world_size > 1:
        store = dist.PrefixStore("checkpoints", dist.distributed_c10d._get_default_store())
        all_gather_object = store_all_gather_object(store, mesh.rank, mesh.world_size, timeout=SLOWEST_WRITER)
    return CheckpointManager(settings, rank=mesh.rank, all_gather_object=all_gather_object, log=log, events=events)


def open_memory_snapshots(
    config: schema.Config, context: RankContext, log, events: EventLog
) -> Optional[MemorySnapshots]:
    """Open the snapshots in memory; None without --non-persistent-save-interval. All ranks call it."""
    settings = config.checkpoint
    if settings.non_persistent_save_interval is None or config.batch.skip_train:
        if settings.save and context.is_rank_zero and not config.batch.skip_train:
            forget_snapshots(location(settings.save))
        return None
    return MemorySnapshots(
        settings,
        world=context.mesh.world,
        device=context.device,
        all_gather_object=context.all_gather_object,
        resumes=_resumes_from_memory(settings),
        log=log,
        events=events,
    )


def _resumes_from_memory(settings: schema.Checkpoint) -> bool:
    """Whether a run goes on from the newest state in --save, as after a failure, and not from one that its user chose."""
    chosen = settings.finetune or settings.no_load_optim or settings.ckpt_step is not None
    return same_place(settings.load, settings.save) and not chosen


def load_folder(settings: schema.Checkpoint, all_gather_object) -> Path | UrlPath:
    """The folder with the newest checkpoint: `--load`, --save-mirror or --save-copy. Rank 0 decides."""
    folders = [location(folder) for folder in (settings.load, settings.save_mirror, settings.save_copy) if folder]
    this_one = settings.ckpt_step is not None or (folders[0] / "index.json").exists()
    newest = folders[0] if this_one else max(folders, key=lambda folder: max(checkpoints(folder), default=-1))
    return all_gather_object(newest)[0]


def keeps_initial_values(settings: schema.Checkpoint) -> bool:
    """Whether weights that a checkpoint lacks keep their initial values; otherwise it has to have all of them."""
    return settings.finetune or settings.load_strictness in ("warn-missing", "warn-all")


def load(
    config: schema.Config,
    context: RankContext,
    optimizer: DistributedOptimizer,
    fresh: State,
    vocabulary: Sequence[str] = (),
    vocab_size: Optional[int] = None,
    events: Optional[EventLog] = None,
    snapshots: Optional[MemorySnapshots] = None,
) -> tuple[State, Optional[dict[str, Any]], list[str]]:
    """Fill the optimizer's state from `--load`. Records an event for each damaged checkpoint that is passed over.

    vocabulary: fingerprints of this run's vocabulary, in this version and in earlier ones; none: tokens are plain numbers
    vocab_size: tokens of this run, without padding; None: not checked, for a checkpoint that this run wrote
    snapshots: in memory, which may be newer
    Returns the state from which to resume, the checkpoint's record (None without a checkpoint), and notices for the user.
    """
    settings = config.checkpoint
    if settings.load is None:
        return fresh, None, []
    all_gather_object, weights_only = context.all_gather_object, _loads_weights_only(config)
    pieces = optimizer.pieces(moments=not weights_only)

    names = (
        None
        if weights_only
        else {name for names in all_gather_object({piece.name for piece in pieces}) for name in names}
    )
    found = snapshots.find() if snapshots and _resumes_from_memory(settings) else None
    restored = restore(
        load_folder(settings, all_gather_object),
        pieces,
        names=names,
        cast=optimizer.of_any_format(),
        step=settings.ckpt_step,
        allow_empty=partial(may_begin, settings, metrics_path(config.logging, settings.save)),
        check=partial(_refuse_unfit, config, vocabulary, vocab_size),
        view=partial(_with_layers_of, config),
        rank=context.mesh.rank,
        all_gather_object=all_gather_object,
        strictness=settings.load_strictness,
        reinitialize=_reinitialize(config) if settings.finetune else lambda name, stored: False,
        snapshot=found,
    )
    if snapshots:
        snapshots.record_start(found, restored)
    if restored is None:
        if not optimizer.drawn:  # a checkpoint that was there when the model was built is gone
            optimizer.draw()
        return fresh, None, [f"no checkpoint in {settings.load} yet: starting from iteration 0"]
    record = all_gather_object(restored.state)[0]
    upcycled = _upcycle(config, restored, pieces)
    optimizer.copy_main_params_to_model_params()
    if events is not None:
        record_damage(events, restored, record["state"]["iteration"])
    notices = _notices(restored, record, vocabulary)
    record |= _base(config, context, restored.path, record)
    if settings.finetune:
        if settings.save and context.is_rank_zero and record.get("vocabulary") in (None, *vocabulary):
            copy_companions(restored.path.parent, location(settings.save))
        notices += [*_other_kinds(config, record), *_other_scale(config, record)]
        saved = recipe_of(config).part(config, _with_experts(config, record["config"]))
        notices += changes.other_arithmetic(config, saved)
        return fresh, record, notices + upcycled + new_weights(() if upcycled else restored.reinitialized)
    if not weights_only:
        optimizer.step_count = record["optimizer_steps"]
    return fresh.restored(record["state"]), record, notices


def _with_layers_of(config: schema.Config, reader: Reader) -> None:
    """Read layers of attention and MLP as those of this run's pattern, and the other way round."""
    if seen := seen_as(config, reader.state):
        rename, reader.state = seen
        reader.rename(rename)


def _loads_weights_only(config: schema.Config) -> bool:
    """Whether the run leaves out the checkpoint's optimizer state; an evaluation updates nothing."""
    return config.checkpoint.finetune or config.checkpoint.no_load_optim or config.batch.skip_train


def _refuse_unfit(
    config: schema.Config, vocabulary: Sequence[str], vocab_size: Optional[int], record: dict[str, Any]
) -> None:
    """Raise SettingsError or CheckpointError if this run cannot go on from the checkpoint. Arguments: those of `load`."""
    settings, weights_only = config.checkpoint, _loads_weights_only(config)
    kinds = (config.model.model_type, *recipe_of(config).starts_from)
    if vocab_size is not None and record["config"].get("model", {}).get("model_type") in kinds:
        changes.refuse_other_rows(config, record.get("vocab_size"), vocab_size)
    if settings.finetune:
        _refuse_another_trunk(config, _with_experts(config, record["config"]))
        _refuse_lost_adapters(config, record["config"])
    else:
        changes.refuse_another_run(config, record["config"], changes.same_vocabulary(record, vocabulary))
    if not weights_only and record["optimizer_steps"] is None:
        raise CheckpointError(f"{settings.load} holds no optimizer state", do="add --no-load-optim or --finetune")
    if not weights_only:
        changes.refuse_another_optimizer(config, record["config"])


def _notices(restored: Restored, record: dict[str, Any], vocabulary: Sequence[str]) -> list[str]:
    """What the user should know about the checkpoint; events tell about damaged ones."""
    notices = [*restored.notices, f"loaded checkpoint {restored}"]
    if vocabulary and record.get("vocabulary") and not changes.same_vocabulary(record, vocabulary):
        notices.append(
            "the checkpoint was trained with another vocabulary than this run's: the same ids stand for other tokens"
        )
    return notices


def _base(config: schema.Config, context: RankContext, path: Path | UrlPath, record: dict[str, Any]) -> dict[str, Any]:
    """The entries of the record about the base of a run with adapters; empty if its checkpoints have all weights."""
    if config.model.lora_rank is None or not (config.checkpoint.finetune or record.get(BASE)):
        return {}
    found = (base_record(path, config.checkpoint.save), base_names(path)) if context.is_rank_zero else None
    return dict(zip((BASE, IN_BASE), context.all_gather_object(found)[0]))


def new_weights(names: tuple[str, ...]) -> list[str]:
    """Notices about the weights that keep their initial values, if there are any. Those of LoRA are only counted."""
    pairs = [name for name in names if name.rpartition(".")[2] == PAIR[0]]
    names = tuple(name for name in names if name.rpartition(".")[2] not in OWN)
    lora = [f"new: {len(pairs)} pair{'s' * (len(pairs) != 1)} of LoRA weights"] * bool(pairs)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return lora + [f"new, and not out of the checkpoint: {', '.join(names[:LISTED])}{more}"] * bool(names)


def record_damage(events: EventLog, restored: Restored, iteration: int) -> None:
    """Record the damaged checkpoints that were passed over or repaired, if any. iteration: of the one that was loaded."""
    for path, files in restored.repaired:
        events.record(
            "repaired_checkpoint", rebuilt(path, files), iteration=iteration, checkpoint=str(path), files=files
        )
    for path, notice in restored.damaged:
        events.record(
            "damaged_checkpoint",
            passed_over(path, notice, iteration),
            iteration=iteration,
            checkpoint=str(path),
            why=notice,
            loaded=iteration,
        )


def _other_kinds(config: schema.Config, record: dict[str, Any]) -> list[str]:
    """A notice if linear layers were of other kinds than they are in this run."""
    before, now = record["config"]["model"].get("linear"), config.model.linear
    if before in (None, now):
        return []
    return [f"the checkpoint was trained with --linear {before}; this run has {now or 'plain layers'}"]


def _other_scale(config: schema.Config, record: dict[str, Any]) -> list[str]:
    """A notice if the checkpoint's adapters counted more, or less, than they do in this run."""
    if None in (record["config"]["model"].get("lora_rank"), config.model.lora_rank):
        return []
    before, now = scale_of(config_of(record["config"]).model), scale_of(config.model)
    said = f"products of adapters are multiplied by {now:g} (--lora-alpha), in the checkpoint by {before:g}"
    return [said] * (before != now)


def _reinitialize(config: schema.Config) -> Callable[[str, bool], bool]:
    """`Recipe.reinitialize`, extended by weights of linear kinds that the checkpoint does not have."""
    recipe = recipe_of(config)
    brought = recipe.facts(config, 1).brought if config.model.linear or config.model.kd_hidden_projections else ()
    fresh = tuple(f"blocks.{n}." for n in fresh_layers(config)) if config.checkpoint.finetune else ()
    made = lambda name: (
        name.startswith(fresh) or config.checkpoint.moe_use_upcycling and (EXPERTS in name or ROUTER in name)
    )
    return lambda name, stored: recipe.reinitialize(name, stored) or not stored and (name in brought or made(name))


def _with_experts(config: schema.Config, saved: dict[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint; with --moe-use-upcycling those of a dense one with the experts of this run."""
    model = saved.get("model", {})
    if not config.checkpoint.moe_use_upcycling or (model.get("num_experts") or 0) > 1:
        return saved
    refuse_unequal(config.model)
    return saved | dict(model=upcycled_settings(model, config.model))


def _upcycle(config: schema.Config, restored: Restored, pieces: list[Piece]) -> list[str]:
    """Fill the pieces of experts and routers that a dense checkpoint does not have; returns a notice if it is one."""
    if not config.checkpoint.moe_use_upcycling or not restored.reinitialized:
        return []
    new = [piece for piece in pieces if piece.name in restored.reinitialized]
    weights = recipe_of(config).facts(config, 1).weights
    with open_checkpoint(restored.path) as reader:
        for name, _, box, tensor in new:
            if source := source_of(name):
                mlp = reader.read(source, dtype=torch.float32)
                own = experts_of(name, mlp, config.model, box.offset[0], box.extent[0])
                tensor.copy_(own[(slice(None), *box.slices()[1:])])
            elif ROUTER in name:
                tensor.copy_(router_of(name, weights[name], config.model, config.logging.seed)[box.slices()])
    return [f"{config.model.num_experts} experts of each layer are copies of the dense model's MLP"]


def _refuse_another_trunk(config: schema.Config, saved: dict[str, Any]) -> None:
    """Raise SettingsError if the weights belong to another model, unless the recipe lists it in `starts_from`."""
    recipe, shape = recipe_of(config), saved.get("model", {})
    if shape.get("model_type") in recipe.starts_from:
        saved = {**saved, "model": {**shape, "model_type": config.model.model_type}}
    changes.refuse_another_model(config, recipe.part(config, saved))


def _refuse_lost_adapters(config: schema.Config, saved: dict[str, Any]) -> None:
    """Raise SettingsError if the checkpoint has adapters and this run does not, or computes with them otherwise."""
    before, now = saved.get("model", {}), config.model
    rank, merge = before.get("lora_rank"), "merge them first: python -m megatron.tools.checkpoint merge-lora"
    if rank is not None and now.lora_rank is None:
        raise SettingsError(
            f"{config.checkpoint.load} has adapters (--lora-rank {rank}), which this run would drop",
            do=f"add --lora-rank and the other flags of its adapters to train them; or {merge}",
        )
    if rank is not None and (dora := bool(before.get("use_dora"))) != now.use_dora:
        raise SettingsError(
            f"the adapters of {config.checkpoint.load} were trained with{'out' * now.use_dora} --use-dora, this run is "
            f"with{'out' * dora} it",
            "the same pairs would give other outputs",
            f"{'give' if dora else 'leave out'} --use-dora; or {merge}",
        )


def check_later_checkpoints(config: schema.Config, iteration: int, all_gather_object) -> list[str]:
    """Raise CheckpointError if `--save` holds later checkpoints of a run from which this one does not resume.

    Both would be in one folder, and the next load would choose the one with the higher number. The same holds for mirror
    and copies. Returns a warning if this run starts from an earlier checkpoint of that folder.
    """
    settings = config.checkpoint
    if settings.save is None:
        return []
    if same_place(settings.load, settings.save):
        later = all_gather_object([step for step in checkpoints(location(settings.save)) if step > iteration])[0]
        if later and settings.finetune and not config.batch.skip_train:
            raise CheckpointError(
                f"--save {settings.save} holds checkpoints, up to iteration {max(later)}, and --finetune starts anew",
                f"this run starts at iteration {iteration}: its checkpoints would be mixed with them",
                f"{_resuming(settings, settings.save)} resumes that run; otherwise give another --save",
            )
        listed = ", ".join(map(str, later[:8])) + ", ..." * (len(later) > 8)
        return [
            f"--save {settings.save} holds later checkpoints, which this run does not continue (iterations {listed}): it "
            f"starts at iteration {iteration} and replaces those whose iterations it saves; another --save keeps them"
        ] * bool(later and not config.batch.skip_train)
    flags = {"--save": settings.save}
    if settings.load is None:
        flags.update({"--save-mirror": settings.save_mirror, "--save-copy": settings.save_copy})
    for flag, folder in flags.items():
        newest = all_gather_object(max(checkpoints(location(folder)), default=0) if folder else 0)[0]
        if newest > iteration:
            raise CheckpointError(
                f"{flag} {folder} holds checkpoints of another run, up to iteration {newest}",
                f"this run starts at iteration {iteration}: its checkpoints would be mixed with them",
                f"{_resuming(settings, folder)} resumes that run; otherwise give another {flag}, or move them away",
            )
    return []


def _resuming(settings: schema.Checkpoint, folder: str) -> str:
    """The words with which the same command resumes the run of a folder. Its shape may come from where it began."""
    words = " ".join(["--load", folder, *(begun := resuming_words(settings))])
    return f"{words}, after the words of this command," if begun else words


def earlier_wandb_run(settings: schema.Checkpoint, record: dict[str, Any]) -> Optional[str]:
    """The id that an earlier launch of this training has at Weights & Biases, of --save or the loaded checkpoint.

    Another training starts in a new --save folder, by --finetune, and from a model that a tool made, which has no
    optimizer state. record: of the loaded checkpoint
    """
    own = any(same_place(settings.load, place) for place in (settings.save, settings.save_mirror, settings.save_copy))
    if own and settings.finetune:
        return None
    kept = kept_wandb_run(local_folder(settings.save)) if settings.save else None
    resumes = own and record.get("optimizer_steps") is not None
    return kept or (record.get(WANDB_RUN) if resumes else None)


def check_samples(
    config: schema.Config, record: dict[str, Any], batches: Optional[MicroBatchLoader], context: RankContext
) -> list[str]:
    """Compare samples with those of the checkpoint's run, and return notices for the user.

    batches: the training data; None with --skip-train
    """
    wrong = [
        int(place)
        for place, halves in (record.get("samples") or {}).items()
        if batches is not None and context.is_rank_zero and list(batches.sample_hash(int(place))) != halves
    ]
    lengths = lengths_of_order(config, record, batches) if wrong else ""
    return list(changes.refuse_other_samples(config, *context.all_gather_object((wrong, lengths))[0]))


def lengths_of_order(config: schema.Config, record: dict[str, Any], batches: MicroBatchLoader) -> str:
    """The lengths of training, as a flag, that give the samples of the checkpoint's run.

    Empty if this length is one of them, or if they are unknown.
    """
    batch, size = config.batch, config.batch.global_batch_size
    then, now = total_samples(config_of(record["config"]).batch, 1), total_samples(batch, 1)
    lengths = same_order(batches.dataset, config.data, then)
    if lengths is None or now in lengths:
        return ""
    least, most = max(lengths.start, record["state"]["consumed_samples"]), lengths.stop - 1
    if batch.train_iters is None:
        return f"--train-samples {least} to {most}"
    return f"--train-iters {-(-least // size)} to {most // size}"
