# SPDX-License-Identifier: Apache-2.0
"""Settings of fine-tuning that follow from the task, and from the checkpoint that a run resumes or starts from."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

from megatron.errors import CheckpointError, DataError, SettingsError, StorageError, UsageError, did_you_mean
from megatron.model.recipe import SCRIPTS
from megatron.settings.from_checkpoint import checkpoint_record, pretrained_record, refuse_same, shape_of
from megatron.settings.schema import GROUPS
from megatron.settings.spelling import BadValue, settings_of
from megatron.settings.statements import Statement
from megatron.tasks.backbones import BACKBONES, DEFAULT, find_backbone, half_of, saved_shape, shape_groups
from megatron.tasks.description import FLEETX, find_task
from megatron.tasks.finetune_rules import LENGTHS
from megatron.tasks.settings import GROUP, TaskSettings, learned_labels

MODEL_TYPE = "finetune"
DEFAULTS = dict(dataloader_type="cyclic", full_validation=True, eval_interval=0, num_workers=1)
# default -> settings that specify the same in another way
SAID_OTHERWISE = dict(
    global_batch_size=("local_batch_size", "gradient_accumulation_steps"),
    lr_warmup_fraction=("lr_warmup_iters", "lr_warmup_samples"),
)


def groups() -> dict[str, type]:
    """Settings of the task, and of the shapes of all trunks."""
    return {GROUP: TaskSettings, **shape_groups()}


def defaults(statements: Mapping[str, Statement]) -> dict[str, Any]:
    """`Recipe.defaults`: defaults from the task, and from the checkpoint that a run resumes or starts from."""
    values = {name: one.value for name, one in statements.items()}
    task = values.get("task")
    of_task = _settings_of(str(task), statements["task"].words) if task is not None else {}
    said = {**of_task, **values}.get
    chosen = {**DEFAULTS, **FLEETX, **of_task} if task is not None else dict(DEFAULTS)
    if said("predictions") and Path(str(said("predictions"))).is_file():
        raise StorageError(f"--predictions {said('predictions')} is a file, not a folder", do="give another path")
    record, more = beginning(said, _is_finetuned)
    chosen |= more
    if record is not None:
        chosen |= _from_checkpoint(record, said, chosen.get("seq_length"))
        if not (said("finetune") or chosen.get("finetune")):
            chosen |= learned_labels(record, said("task"))
    kind = chosen.get("backbone") or said("backbone")
    if kind in BACKBONES:
        chosen = {**BACKBONES[str(kind)].recipe.defaults, **chosen}
    asked = [name for name in LENGTHS if name in values] or [name for name in LENGTHS if name in of_task]
    asked = asked or ["train_epochs"]
    chosen = {name: value for name, value in chosen.items() if name not in LENGTHS or name in asked}
    drop_said_otherwise(chosen, values)
    if "train_epochs" in asked:
        chosen.setdefault("eval_epoch", 1)
    return chosen


def drop_said_otherwise(chosen: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Remove the defaults of what other settings specify. values: those that are given"""
    for name, others in SAID_OTHERWISE.items():
        if set(others) & set(values):
            chosen.pop(name, None)


def _settings_of(name: str, said: str) -> dict[str, Any]:
    """The settings in a task's description. Raises DataError for an unknown or invalid one."""
    known, checked = {one.name: one for one in settings_of({**GROUPS, **groups()})}, {}
    for setting, value in find_task(name, said).settings.items():
        if setting not in known:
            raise DataError(f"--task {name}: settings: there is no setting {setting}{did_you_mean(setting, known)}")
        if setting == "task":
            raise DataError(f"--task {name}: settings: a task cannot give another one", do="leave task out of them")
        try:
            checked[setting] = known[setting].checked(value)
        except BadValue as bad:
            raise DataError(f"--task {name}: settings: {setting} {bad}") from None
    return checked


def beginning(
    said: Callable[[str], Any], resumes: Callable[[dict[str, Any]], bool]
) -> tuple[Optional[dict[str, Any]], dict[str, Any]]:
    """(record of the checkpoint that a run resumes or starts from, the defaults for that).

    resumes: the record of --load -> whether it is of a run like this one, which goes on
    """
    load, start = said("load"), said("pretrained_checkpoint")
    record = checkpoint_record(load, said("ckpt_step"))
    if record is not None and resumes(record):
        return record, {}
    if record is not None:
        if start is not None:
            raise CheckpointError(
                f"--load {load} holds a model of type {_type(record)}: there is no run of fine-tuning to resume",
                do=f"leave --load out (--pretrained-checkpoint {start} is what the run begins with)",
            )
        refuse_same(load, said("save"))
        return record, dict(finetune=True)
    if start is not None:
        return pretrained_record(start, said("save")), dict(load=start, finetune=True)
    shapes = ("num_layers", "encoder_num_layers", "model_name_or_path")
    if all(said(name) is None for name in shapes):
        do = "--load CHECKPOINTS, or the shape of a model that begins with random weights"
        if load is not None:
            step = said("ckpt_step")
            raise CheckpointError(
                f"--load {load} holds no checkpoint" + (f" of iteration {step}" if step else ""), do=do
            )
        raise UsageError("there is no model to fine-tune", do=do)
    return None, {}


def _type(record: dict[str, Any]) -> str:
    kind = record["config"]["model"].get("model_type", DEFAULT)
    return DEFAULT if kind in SCRIPTS else kind


def _is_finetuned(record: dict[str, Any]) -> bool:
    return _type(record) == MODEL_TYPE


def _from_checkpoint(record: dict[str, Any], said: Callable[[str], Any], seq_length: Optional[int]) -> dict[str, Any]:
    """Defaults from a checkpoint: shape, tokenizer, kind of trunk, and a sequence length within its position table."""
    tokenizer = {name for name in record["config"].get("tokenizer", {}) if said(name) is not None}
    task = record["config"].get("extra", {}).get(GROUP, {})
    backbone = task.get("backbone", _type(record))
    find_backbone(backbone)
    if said("backbone") in BACKBONES and said("backbone") != backbone:
        raise SettingsError(
            f"--backbone {said('backbone')}: the checkpoint is of a {backbone}",
            do="leave it out, or give another --load",
        )
    shape = {**shape_of(record, saved_shape(backbone), tokenizer), "backbone": backbone}
    if _is_finetuned(record):
        pooling = None if said("pet_pattern") else said("pooling") or task.get("pooling")
        if (half := half_of(backbone, task.get("pooling"))) and not half_of(backbone, pooling):
            raise CheckpointError(
                f"{'--pet-pattern' if said('pet_pattern') else '--pooling ' + pooling} needs all of a {backbone}",
                f"the checkpoint is of a run with --pooling {task['pooling']}, and holds the {half.name} alone",
                "start from another --load, or keep that pooling",
            )
        return {**shape, "pooling": pooling} if pooling else shape
    table = shape.get("max_position_embeddings")
    if seq_length and table and shape.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        seq_length = min(seq_length, table)
    return {**shape, **({"seq_length": seq_length} if seq_length else {})}
