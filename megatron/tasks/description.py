# SPDX-License-Identifier: Apache-2.0
"""The description of a task: files, columns of text and label, labels, metrics, format of predictions. Needs no torch.

GLUE's and CLUE's tasks are in tables; any other task is a YAML file with the same fields:

    name: reviews
    train: train.tsv                # in --data-path, or here, or next to this file; also valid, test; .tsv, .csv, .jsonl
    valid: dev.tsv
    text: review                    # a column, or a key of JSON lines
    text_pair: title                # for tasks on pairs
    options: choices                # a list of texts, one of them right: the label is its index, from 0, or the text
    label: stars
    labels: ["1", "2", "3"]         # default: labels of the training files, sorted; [] or regression: true for numbers
    metrics: [accuracy, macro_f1]
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Optional

import yaml

from megatron.data.labelled import LabelledTask
from megatron.data.published import PUBLISHED, c3, chid, plain_name, race
from megatron.data.tables import refuse_half_letters, refuse_many_lines
from megatron.errors import DataError, SettingsError, UsageError, did_you_mean
from megatron.tasks.chat_settings import TASKS as CHAT_TASKS
from megatron.tasks.metrics import METRICS, combined
from megatron.telemetry.directions import direction_of

Split = Callable[[Mapping[Any, Any], Path, bool], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Task(LabelledTask):
    """A task for fine-tuning: a `LabelledTask` with files, metrics and predictions.

    train, valid, test: name of a set ("" if there is only one) -> possible file names; the first existing one is read
    options:    column of a list of options, one of them right: the label is its index, or the option
    split:      (row of a file, its file, whether it has labels) -> a row for each of its questions
    spans:      answers are pieces of the second text, in SQuAD's files (spans.py)
    one_answer: the file of predictions is one JSON object, id -> label
    id:         column of a row's id in a file of predictions (default: its index in the file, from 0)
    folder:     folder of its files below --data-path
    answers:    name of a set -> file of predictions, whose ending decides the format
    settings:   defaults for training; override FLEETX
    home:       folder of its YAML file
    """

    train: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    valid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    test: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: Optional[str] = None
    split: Optional[Split] = None
    spans: bool = False
    one_answer: bool = False
    metrics: tuple[str, ...] = ("accuracy",)
    id: Optional[str] = None
    folder: str = ""
    answers: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    home: Optional[Path] = None

    @property
    def outputs(self) -> int:
        """Number of outputs per sample: a score for each class or option, or 1."""
        return 1 if self.regression else len(self.labels)

    @property
    def judged_by(self) -> str:
        """The name of the figure that selects the best checkpoint."""
        return combined(self.metrics)


IN_FILES = (".yaml", ".yml")  # endings of task descriptions


def one(*names: str) -> dict[str, tuple[str, ...]]:
    """A set of one file with these possible names."""
    return {"": names}


# PaddleFleetX's settings for GLUE (single_finetune.md): AdamW with epsilon 1e-6, learning rate 2e-5 with linear decay after
# 10% warm-up, batches of 32, 128 tokens, 3 epochs.
FLEETX = dict(
    lr=2e-5,
    min_lr=0.0,
    lr_decay_style="linear",
    lr_warmup_fraction=0.1,
    adam_eps=1e-6,
    weight_decay=0.0,
    seq_length=128,
    global_batch_size=32,
    train_epochs=3,
)
FIVE_EPOCHS, LONG, LONGEST = dict(train_epochs=5), dict(seq_length=256), dict(seq_length=512)


def _glue(name: str, folder: str = "", metrics: str = "accuracy", **more) -> Task:
    folder = folder or name
    sets = dict(train=one("train.tsv"), valid=one("dev.tsv"), test=one("test.tsv"), answers={"": f"{folder}.tsv"})
    common = dict(folder=folder, metrics=tuple(metrics.split()), id="index")
    return Task(**vars(PUBLISHED[name]), **{**sets, **common, **more})


def _published(first: str, folder: str, name: str) -> tuple[str, ...]:
    """GLUE's name of a file, and the one that the data set itself publishes, in its folder or in the parent."""
    return first, name, f"{folder}/{name}"


def _mnli(name: str) -> tuple[str, ...]:
    return _published(f"{name}.tsv", "multinli_1.0", f"multinli_1.0_{name}.txt")


def _cola(name: str, theirs: str) -> tuple[str, ...]:
    return _published(f"{name}.tsv", "cola_public", f"raw/{theirs}.tsv")


GLUE = (
    _glue(
        "CoLA",
        metrics="matthews",
        train=one(*_cola("train", "in_domain_train")),
        valid=one(*_cola("dev", "in_domain_dev")),
        test=one(*_cola("test", "out_of_domain_dev")),
    ),
    _glue("SST2", "SST-2"),
    _glue(
        "MRPC",
        metrics="accuracy f1",
        train=one("train.tsv", "msr_paraphrase_train.txt"),
        valid=one("dev.tsv", "msr_paraphrase_test.txt"),
        settings=FIVE_EPOCHS,
    ),
    _glue("QQP", metrics="accuracy f1", id="id"),
    _glue("STSB", "STS-B", "pearson spearman"),
    _glue(
        "MNLI",
        train=one(*_mnli("train")),
        valid={"matched": _mnli("dev_matched"), "mismatched": _mnli("dev_mismatched")},
        test={"matched": ("test_matched.tsv",), "mismatched": ("test_mismatched.tsv",)},
        answers={"matched": "MNLI-m.tsv", "mismatched": "MNLI-mm.tsv"},
    ),
    _glue("QNLI"),
    _glue("RTE"),
    _glue("WNLI", settings=FIVE_EPOCHS),
)


def _versions(name: str) -> dict[str, Any]:
    """The two test sets of a CLUE task, and the names of their files of predictions."""
    answers = {version: f"{name}{version.replace('.', '')}_predict.json" for version in ("1.1", "1.0")}
    test = {"1.1": ("test1.1.json",), "1.0": ("test1.0.json", "test.json")}
    return dict(test=test, answers={"": answers["1.1"], **answers})


def _clue(name: str, **more) -> Task:
    low = name.lower()
    sets = dict(train=one("train.json"), valid=one("dev.json"), test=one("test.json"))
    common = dict(folder=low, answers={"": f"{low}_predict.json"}, id="id")
    return Task(**vars(PUBLISHED[name]), **{**sets, **common, **more})


CLUE = (
    _clue("AFQMC"),
    _clue("TNEWS", **_versions("tnews")),
    _clue("IFLYTEK", settings=LONG),
    _clue("CMNLI"),
    _clue("CLUEWSC", folder="cluewsc2020", **_versions("cluewsc")),
    _clue("CSL", settings=LONG),
    _clue("OCNLI", train=one("train.json", "train.50k.json"), answers={"": "ocnli_50k_predict.json"}),
)


def _questions(name: str, split: Split, labels: str, **more) -> Task:
    common = dict(text="question", options="options", label="answer", labels=tuple(labels.split()), id="id")
    return Task(name, split=split, **{**common, **more})


QUESTIONS = (
    _questions(
        "RACE",
        race,
        "A B C D",
        text_pair="passage",
        train=one("train"),
        valid={"middle": ("dev/middle",), "high": ("dev/high",)},
        test={"middle": ("test/middle",), "high": ("test/high",)},
        folder="RACE",
        settings=LONGEST,
    ),
    _questions(
        "C3",
        c3,
        "0 1 2 3",
        text_pair="passage",
        train={"m": ("m-train.json", "c3-m-train.json"), "d": ("d-train.json", "c3-d-train.json")},
        valid={"m": ("m-dev.json", "c3-m-dev.json"), "d": ("d-dev.json", "c3-d-dev.json")},
        folder="c3",
        settings=LONGEST,
        **_versions("c3"),
    ),
    _questions(
        "CHID",
        chid,
        "0 1 2 3 4 5 6 7 8 9",
        train=one("train.json"),
        valid=one("dev.json"),
        folder="chid",
        one_answer=True,
        **_versions("chid"),
    ),
)


def _spans(name: str, **more) -> Task:
    common = dict(text="question", text_pair="context", labels=("first", "last"), spans=True, settings=LONGEST)
    answers = {"": f"{name.lower()}_predict.json"}
    return Task(name, metrics=("f1", "em"), answers=answers, id="id", **{**common, **more})


SPANS = (
    _spans(
        "CMRC2018",
        folder="cmrc2018",
        train=one("train.json", "cmrc2018_train.json"),
        valid=one("dev.json", "cmrc2018_dev.json"),
        test=one("test.json", "cmrc2018_test.json", "trial.json", "cmrc2018_trial.json"),
    ),
    _spans(
        "DRCD",
        folder="drcd",
        train=one("train.json", "DRCD_training.json"),
        valid=one("dev.json", "DRCD_dev.json"),
        test=one("test.json", "DRCD_test.json"),
    ),
)
TASKS = {task.name: task for task in (*GLUE, *CLUE, *QUESTIONS, *SPANS)}
WITHOUT_TRAINING = ("LAMBADA", "WIKITEXT103", "WIKITEXT2")  # tasks of `megatron.tools.evaluate`
_NOT_HERE = {
    **dict.fromkeys(
        map(str.lower, WITHOUT_TRAINING), "it is evaluated without training: python -m megatron.tools.evaluate"
    ),
    **dict.fromkeys(("sft", "instruct"), "conversations are learned by --task chat, pairs of answers by --task dpo"),
    "multitask": "several tasks are trained together by --task-mixture, of pretrain_bert.py and pretrain_t5.py",
}


def find_task(name: str, said: str = "") -> Task:
    """Find a task by name (SST-2 and sst2 are SST2, CLUE-TNEWS is TNEWS), or read a YAML file. Raises UsageError.

    said: the argument that gave the name, for messages
    """
    if name.endswith(IN_FILES):
        return read_task(Path(name))
    plain = plain_name(name)
    for known, task in TASKS.items():
        if plain == known.lower():
            return task
    if plain in _NOT_HERE:
        raise UsageError(
            f"--task {name}: {_NOT_HERE[plain]}", do="see docs/finetuning.md, docs/chat.md and docs/masked_data.md"
        )
    known = (*TASKS, *CHAT_TASKS, *WITHOUT_TRAINING)
    raise UsageError(
        f"{said or f'--task {name}'}: there is no such task{did_you_mean(name, known)}",
        f"there are {', '.join((*TASKS, *CHAT_TASKS))}; and, evaluated without training, {', '.join(WITHOUT_TRAINING)}",
        "or describe one of your own in a YAML file: docs/finetuning.md",
    )


NAME_FILES = (
    "load",
    "pretrained_checkpoint",
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "soft_labels",
    "pet_verbalizer",
)
NAME_FILES += ("task_data", "train_data", "valid_data", "test_data", "soft_labels", "pet_verbalizer")
_KEYS = {f.name for f in fields(Task)} - {"prepare", "split", "spans", "answers", "one_answer", "home"} | {
    "regression",
    "metric",
}


def read_task(path: Path) -> Task:
    """Read a task from a YAML file. Raises DataError for an invalid one."""
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(f"--task {path}: {reason}", do="a YAML file is wanted: docs/finetuning.md#tasks") from None
    if not isinstance(given, dict):
        raise DataError(f"--task {path} is no mapping of names to values", do="see docs/finetuning.md")
    for key in given:
        if key not in _KEYS:
            raise DataError(
                f"--task {path}: unknown key {key}{did_you_mean(str(key), _KEYS)}", f"keys: {', '.join(sorted(_KEYS))}"
            )
    if missing := [key for key in ("train", "text", "label") if not given.get(key)]:
        raise DataError(f"--task {path} says nothing of {', '.join(missing)}", do="see docs/finetuning.md")
    words = {
        key: given[key]
        for key in ("text", "text_pair", "options", "label", "id", "folder")
        if given.get(key) is not None
    }
    lists = {key: _words(given[key], key, path) for key in ("columns", "skip", "metrics", "labels") if key in given}
    if "metric" in given:
        lists["metrics"] = _words(given["metric"], "metric", path)
    if given.get("regression"):
        lists["labels"] = ()
    sets = {key: _sets(given[key], key, path) for key in ("train", "valid", "test") if given.get(key)}
    sets.setdefault("valid", {})
    regression = lists.get("labels") == ()
    lists.setdefault("metrics", ("pearson", "spearman") if regression else ("accuracy",))
    words = {key: str(value) for key, value in words.items()}
    name = str(given.get("name", path.stem))
    settings = given.get("settings") or {}
    if not isinstance(settings, dict):
        raise DataError(f"--task {path}: settings is no mapping of names to values", do="settings: {lr: 1.0e-4}")
    settings = {
        key: _relative_to(value, path.parent) if key in NAME_FILES else value for key, value in settings.items()
    }
    answers = {key: f"{name}{f'-{key}' if key else ''}.tsv" for key in sets.get("test", {})}
    if "options" in words and lists.get("labels") == ():
        raise DataError(
            f"--task {path}: options are chosen among, and the labels are numbers", do="leave one of them out"
        )
    task = Task(name, **{**sets, **lists, **words}, answers=answers, settings=settings, home=path.parent)
    refuse_metrics(task, str(path))
    return task


def _relative_to(value: Any, home: Path) -> Any:
    """Resolve paths of a setting in a YAML file: relative to the working directory, else to the folder of that file."""
    if isinstance(value, list):
        return [_relative_to(one, home) for one in value]
    there = home / str(value)
    return str(there) if not Path(str(value)).exists() and there.exists() else value


def _words(value: Any, key: str, path: Path) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, (dict, list)) or one is None for one in values):
        raise DataError(f"--task {path}: {key} is no list of words", do=f"{key}: [one, two]")
    # YAML reads yes, no, on and off as booleans; labels are text.
    if any(isinstance(one, bool) for one in values):
        raise DataError(f"--task {path}: {key} holds yes, no, true or false without quotes", do=f'{key}: ["yes", "no"]')
    return tuple(str(one) for one in values)


def _sets(value: Any, key: str, path: Path) -> dict[str, tuple[str, ...]]:
    """A file, or {name of a set: its file}."""
    sets = value if isinstance(value, dict) else {"": value}
    if not all(isinstance(file, str) for file in sets.values()):
        raise DataError(
            f"--task {path}: {key} is neither a file nor names of sets with a file each",
            do=f"{key}: FILE, or {key}: {{one: FILE, two: FILE}}",
        )
    if len(set(map(str, sets))) < len(sets):
        raise DataError(f"--task {path}: {key} has two sets of one name", do="give each another one")
    return {str(name): (file,) for name, file in sets.items()}


def refuse_metrics(task: Task, where: str) -> None:
    """Raise DataError for metrics that do not exist or do not suit the task's labels."""
    if task.spans:
        return
    for name in task.metrics:
        if name not in METRICS:
            raise DataError(
                f"{where}: there is no metric {name}{did_you_mean(name, METRICS)}", f"there are {', '.join(METRICS)}"
            )
        needs = METRICS[name].needs
        if (needs == "numbers") != task.regression:
            what = "numbers" if task.regression else "classes"
            raise DataError(f"{where}: the metric {name} is for {needs}, and the labels are {what}")
        if task.options and name != "accuracy":
            raise DataError(
                f"{where}: the metric {name} is for classes, and {task.options} are options", do="use accuracy"
            )
        if needs == "two classes" and task.labels is not None and len(task.labels) != 2:
            raise DataError(
                f"{where}: the metric {name} is for two classes, and there are {len(task.labels)}", do="use macro_f1"
            )
    if len({direction_of(name) for name in task.metrics}) > 1:
        raise DataError(
            f"{where}: of {', '.join(task.metrics)} some are better the smaller, others the larger they are"
        )
    if not task.metrics:
        raise DataError(f"{where}: there is no metric", do="metrics: [accuracy]")


def with_labels(task: Task, labels) -> Task:
    """The task with these labels. Raises SettingsError for fewer than two or duplicates, DataError for invalid text."""
    labels = tuple(labels)
    if len(labels) < 2:
        given = f"one, {labels[0]!r}" if labels else "none"
        raise SettingsError(f"{task.name} needs labels of at least two classes, and there is {given}")
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise SettingsError(f"{task.name}: the label {twice!r} is there twice")
    for label in labels:
        refuse_half_letters(label, f"{task.name}: labels")
        refuse_many_lines(label, f"{task.name}: labels")
    labelled = replace(task, labels=labels)
    refuse_metrics(labelled, task.name)
    return labelled
