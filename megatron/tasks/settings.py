# SPDX-License-Identifier: Apache-2.0
"""Settings of fine-tuning, and the task, files and examples that they specify. Needs no torch."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Optional

from megatron.errors import DataError, SettingsError
from megatron.settings.schema import Config, setting
from megatron.tasks.backbones import DEFAULT
from megatron.tasks.description import IN_FILES, Task, find_task, with_labels
from megatron.tasks.examples import Examples, few, file_of, labels_in, read_examples, refuse_one_class
from megatron.tasks.soft_labels import labels_of, with_soft_labels

GROUP = "task"  # name of the group in a recipe
LOSS, LM_LOSS = "loss", "lm loss"  # for classes or a number, and for words


@dataclass(frozen=True)
class TaskSettings:
    """Settings of fine-tuning: the task, its files, the model, and the outputs."""

    task: str = setting("a task of GLUE or CLUE (SST2, MNLI, TNEWS ...), RACE, or a YAML file that describes one")
    task_data: Optional[str] = setting(
        "folder with the task's files (finetune.py takes --data-path for it)", None, on_resume="logged"
    )
    train_data: Optional[list[str]] = setting(
        "training file, instead of the task's in --task-data", None, on_resume="refused in training"
    )
    valid_data: Optional[list[str]] = setting(
        "files that are evaluated, one for each set (MNLI: matched, mismatched)", None, on_resume="logged"
    )
    test_data: Optional[list[str]] = setting(
        "files whose labels are predicted after training", None, on_resume="logged"
    )
    backbone: str = setting(
        "what kind of model is below the head (default: that of the checkpoint)", DEFAULT, on_resume="another model"
    )
    pooling: Optional[Literal["first", "last", "mean"]] = setting(
        "what the head sees: the state of the first token, of the last one of the text, or the mean over all of its "
        "tokens, of a T5 those of its encoder, without a decoder (default: last for what looks back alone, first for "
        "others)",
        None,
        on_resume="another model",
    )
    word_dropout: float = setting(
        "share of the tokens of a training text that are hidden, drawn again each time: in their place is a mask (BERT), "
        "a sentinel (T5) or an end of document",
        0.0,
        on_resume="refused in training",
    )
    labels: Optional[list[str]] = setting(
        "the task's labels, in order (default: as the task says, or the checkpoint of the run that is resumed, or those of "
        "the training files, sorted)",
        None,
        on_resume="refused",  # with --finetune the head is new
    )
    examples_per_class: Optional[int] = setting(
        "train on the first so many examples of each class", None, on_resume="refused in training"
    )
    soft_labels: Optional[list[str]] = setting(
        "files of probabilities of the training examples (NAME.probabilities.tsv of other models), whose mean is learned "
        "instead of labels",
        None,
        on_resume="refused in training",
    )
    patience: Optional[int] = setting(
        "training ends when so many evaluations in a row were no better than the best one", None, on_resume="logged"
    )
    best_checkpoint: bool = setting(
        "keep the weights of the best evaluation in a folder best below --save, and predict with them",
        True,
        on_resume="irrelevant",
    )
    predictions: Optional[str] = setting(
        "folder for predictions, as the leaderboards take them, and for the confusion matrix (default: below --save)",
        None,
        on_resume="irrelevant",
    )
    pet_pattern: Optional[str] = setting(
        "a sentence with {label} and {text} (and {pair}): the model itself scores what stands for each label in it, and "
        "there is no head",
        None,
        on_resume="another model",
    )
    pet_verbalizer: Optional[str] = setting(
        "JSON file of what stands for each label in --pet-pattern: {label: words}", None
    )
    pet_loss: Literal["labels", "words"] = setting(
        "what --pet-pattern learns: which of the labels it is, all of equally many tokens; or the words of the right one "
        "among all words",
        "labels",
        on_resume="refused in training",
    )


@dataclass(frozen=True)
class OpenTask:
    """A task with its labels, and its files: split -> ((set, file), ...)."""

    task: Task
    files: dict[str, tuple[tuple[str, Path], ...]]


def task_settings(config: Config) -> TaskSettings:
    return config.extra[GROUP]


def open_task(settings: TaskSettings) -> OpenTask:
    """The task of a run. Raises UsageError, DataError and SettingsError for an invalid one."""
    return _open(_key(settings))


def examples_of(settings: TaskSettings, split: str) -> Optional[Examples]:
    """The examples of "train", "valid" or "test"; None without files."""
    return _examples(_key(settings), split)


def said_in_full(config: Config, pooled: str) -> Config:
    """Complete the settings for checkpoints, with which a resumed run is compared.

    They get the labels, in the order of the head's outputs; the pooling (default: pooled); and the canonical name of the
    task.
    """
    settings = task_settings(config)
    task = open_task(settings).task
    in_file = settings.task.endswith(IN_FILES)
    return replace(
        config,
        extra={
            **config.extra,
            GROUP: replace(
                settings,
                task=os.path.abspath(settings.task) if in_file else task.name,
                labels=list(task.labels) if task.labels else None,
                pooling=settings.pooling or (None if settings.pet_pattern else pooled),
            ),
        },
    )


def learned_labels(record: Mapping[str, Any], task: Optional[str]) -> dict[str, list[str]]:
    """The labels in the checkpoint of fine-tuning, as a default for a resumed run whose task specifies none."""
    labels = record["config"].get("extra", {}).get(GROUP, {}).get("labels")
    return dict(labels=labels) if labels and task and find_task(str(task)).labels is None else {}


def predictions_folder(predictions: Optional[str], save: Optional[str]) -> Optional[str]:
    """The folder of a run's predictions and pictures; None: they are not written."""
    return predictions or (f"{save}/predictions" if save and "://" not in save else None)


def confusion_pictures(run: Mapping[str, Any], place: Path) -> list[Path]:
    """The pictures of confusion matrices of a run. run: its record; place: its current folder."""
    config = run.get("config") or {}
    task = (config.get("extra") or {}).get(GROUP)
    if task is None:
        return []
    folder = predictions_folder(task.get("predictions"), (config.get("checkpoint") or {}).get("save"))
    places = [Path(run.get("folder") or "", folder)] if folder else []
    return next(filter(None, (sorted(one.glob("confusion-*.png")) for one in [*places, place / "predictions"])), [])


def _key(settings: TaskSettings) -> str:
    """The settings that examples depend on, as a string, because lists cannot be hashed."""
    names = (
        "task",
        "task_data",
        "train_data",
        "valid_data",
        "test_data",
        "labels",
        "examples_per_class",
        "soft_labels",
    )
    record = asdict(settings)
    return json.dumps({name: record[name] for name in names})


@lru_cache(maxsize=8)
def _open(key: str) -> OpenTask:
    settings = TaskSettings(**json.loads(key))
    task = find_task(settings.task)
    if settings.labels and task.regression:
        raise SettingsError(f"--labels: those of {task.name} are numbers, not classes", do="leave it out")
    labels = task.labels if settings.labels is None else settings.labels
    if labels is None and settings.soft_labels and not task.regression:
        labels = labels_of(settings.soft_labels[0])
    if labels:
        task = with_labels(task, labels)
    files = {split: _files(task, settings, split) for split in ("train", "valid", "test")}
    if task.labels is None:
        if not files["train"]:
            raise SettingsError(
                f"--task {settings.task} does not say its labels, and there is no training file to take them from",
                do="labels: [...] in the YAML file, --labels, --train-data FILE, or --load of a run that learned them",
            )
        task = replace(task, labels=labels_in(task, [file for _, file in files["train"]]))
    return OpenTask(task, files)


def _files(task: Task, settings: TaskSettings, split: str) -> tuple[tuple[str, Path], ...]:
    """(set, file) of a split, in order."""
    given, sets = getattr(settings, f"{split}_data"), getattr(task, split)
    if given:
        if split == "train" and len(given) > 1:
            raise SettingsError(f"--train-data: {len(given)} files, and training takes one", do="join them")
        files_of_sets = [file_of(task, settings.task_data, (), file) for file in given]
        names = list(sets) if len(sets) == len(given) else _names(files_of_sets, split) if len(given) > 1 else [""]
        return tuple(zip(names, files_of_sets, strict=True))
    files_of_sets = [(name, file_of(task, settings.task_data, files)) for name, files in sets.items()]
    missing = [" or ".join(sets[name]) for name, file in files_of_sets if file is None]
    # Test sets are optional; without any data, a checkpoint is evaluated.
    home = task.home if split == "valid" and not settings.train_data and _files(task, settings, "train") else None
    where = f"--data-path {settings.task_data}" if settings.task_data else home
    if missing and where and split != "test":
        raise DataError(
            f"{where} has no {', '.join(missing)}",
            f"--task {settings.task} takes its {split} examples from there",
            f"or say where they are: --{split}-data FILE",
        )
    return tuple((name, file) for name, file in files_of_sets if file is not None)


def _names(files: Sequence[Path], split: str) -> list[str]:
    """A unique name for each of several files: its own, with as many parent folders as necessary."""
    parts = [Path(os.path.abspath(file)).with_suffix("").parts[1:] for file in files]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["-".join(of_file[-count:]) for of_file in parts]
        if len(set(names)) == len(names):
            return names
    raise SettingsError(
        f"--{split}-data names one file twice, or files that differ by their ending alone: {', '.join(map(str, files))}",
        "figures and predictions are named after the file",
        "give each file once, or rename one",
    )


@lru_cache(maxsize=8)
def _examples(key: str, split: str) -> Optional[Examples]:
    opened, settings = _open(key), TaskSettings(**json.loads(key))
    files = dict(opened.files[split])
    if not files:
        return None
    if opened.task.spans:
        from megatron.tasks.spans import read_spans

        return read_spans(opened.task, files, labelled=split != "test")
    soft = split == "train" and settings.soft_labels
    examples = read_examples(opened.task, files, labelled=split != "test" and not soft)
    if split != "train":
        return examples
    if soft:
        return with_soft_labels(examples, soft, opened.task)
    if settings.examples_per_class is not None:
        examples = few(examples, opened.task, settings.examples_per_class)
    notes = refuse_one_class(opened.task, examples, ", ".join(map(str, files.values())))
    return replace(examples, notes=(*examples.notes, *notes))
