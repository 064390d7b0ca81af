# SPDX-License-Identifier: Apache-2.0
"""Mixtures of tasks in a fixed ratio: masked language modelling on several corpora, and classification of labelled texts.

    --data-path wiki_text_sentence --task-mixture masked=8 clue=4:clue_text_sentence tnews=4:tnews.jsonl

The task of a sample depends only on its position in the order of training and the weights: 16 samples have 8, 4 and 4 of
the tasks above, spread evenly. After any n samples, a task of weight w out of W has had n x w / W of them, rounded up or
down. So no state is stored, and the order is the same after a resume and in every parallel layout.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional
from zlib import crc32

import numpy as np

from megatron.data.index_maps import parse_split, sequences_of
from megatron.data.labelled import Labelled, LabelledFile, is_labelled, labels_of, read_labelled
from megatron.data.masked_dataset import MaskedSamples, build_masked_datasets, masked_settings
from megatron.data.masked_settings import parsed_tasks, whole_weights
from megatron.data.published import published_task
from megatron.data.vocabulary import refuse_other_vocabulary
from megatron.errors import DataError, SettingsError
from megatron.settings.schema import Config, Data

TASK, CLASS_LABEL = "task", "class_label"  # additional arrays of a sample


@dataclass(frozen=True)
class MixtureTask:
    """One task of a mixture.

    weight: samples per period; path: None for --data-path; labels: names of its classes, () for masked language modelling
    """

    name: str
    weight: int
    path: Optional[str] = None
    labels: tuple[str, ...] = ()

    def read(self) -> LabelledFile:
        """Read the labelled texts: tasks of GLUE and CLUE as published, others by the names of their columns."""
        return read_labelled(self.path, published_task(self.name))


def tasks_of(words: Sequence[str]) -> list[MixtureTask]:
    """The tasks of --task-mixture; the index in this list is `task` of a sample.

    Raises SettingsError for invalid arguments, DataError for an invalid file of labelled texts.
    """
    parsed = parsed_tasks(words)
    weights = whole_weights([weight for _, weight, _ in parsed])
    tasks = [MixtureTask(name, weight, path) for (name, _, path), weight in zip(parsed, weights)]
    return [replace(task, labels=task.read().labels) if _is_labelled(task) else task for task in tasks]


def _is_labelled(task: MixtureTask) -> bool:
    """Whether the file has labelled texts. Raises DataError for a regression task."""
    known = published_task(task.name)
    # Some of the published files end in .txt; token files are given by their prefix.
    labelled = task.path and (is_labelled(task.path) or known and Path(task.path).is_file())
    if labelled and known and known.regression:
        raise DataError(
            f"--task-mixture: {task.name} has numbers for labels, and a mixture tells classes apart",
            do=f"finetune.py --task {known.name} learns them; with another name its columns are read by their names",
        )
    return bool(labelled)


class MixtureOrder:
    """The task and the sample of the task at each position."""

    def __init__(self, weights: Sequence[int]):
        """weights: samples of each task per period."""
        self.weights, self.period = list(weights), sum(weights)
        self.tasks = spread(self.weights)
        before = np.zeros((len(weights), self.period + 1), np.int64)
        for task in range(len(weights)):
            np.cumsum(self.tasks == task, out=before[task, 1:])
        self.before = before  # [tasks, period + 1]: samples of a task before each position of a period

    def place(self, index: int) -> tuple[int, int]:
        """(task, index of the task's sample) at position `index`."""
        rounds, at = divmod(index, self.period)
        task = int(self.tasks[at])
        return task, rounds * self.weights[task] + int(self.before[task, at])

    def counts(self, size: int) -> list[int]:
        """Number of samples of each task among the first `size`."""
        rounds, at = divmod(size, self.period)
        return [rounds * weight + int(before) for weight, before in zip(self.weights, self.before[:, at])]


def spread(weights: Sequence[int]) -> np.ndarray:
    """Tasks of one period, int64 [sum of weights]: after n positions each has had n x weight / sum, rounded up or down.

    The k-th sample of a task may come from position floor(k x sum / weight) on and must come before
    ceil((k + 1) x sum / weight). The order is earliest deadline first, and ties go to the sample that has been ready
    longest. This satisfies all bounds (Baruah et al., "Proportionate progress", 1996).

    >>> spread([2, 1, 1]).tolist()
    [0, 1, 2, 0]
    """
    total, ready = sum(weights), []
    waiting = [(0, task, 0) for task in range(len(weights))]  # (first position, task, k)
    heapq.heapify(waiting)
    order = np.empty(total, np.int64)
    for place in range(total):
        while waiting and waiting[0][0] <= place:
            since, task, k = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(k + 1) * total // weights[task]), since, task, k))
        _, _, task, k = heapq.heappop(ready)
        order[place] = task
        heapq.heappush(waiting, ((k + 1) * total // weights[task], task, k + 1))
    return order


class MixtureDataset:
    """`size` samples from the datasets of several tasks, each with the index of its task (`task`)."""

    def __init__(self, tasks: Sequence[MixtureTask], datasets: Sequence[Any], order: MixtureOrder, size: int):
        self.tasks, self.datasets, self.order, self.size = tasks, datasets, order, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """The task's sample; `class_label` is 0 for tasks without labels."""
        task, number = self.order.place(index)
        return {CLASS_LABEL: np.array(0), **self.datasets[task][number], TASK: np.array(task)}


class LabelledDataset:
    """Endless samples of labelled texts, reshuffled in each epoch or in the order of the file."""

    def __init__(self, task: MixtureTask, rows: Sequence[Labelled], make: Callable, seed: int, shuffled: bool):
        """make: (row, index of its class) -> sample."""
        self.rows, self.make = rows, make
        self.classes = {label: number for number, label in enumerate(task.labels)}
        self.entropy, self.shuffled = [seed % 2**32, crc32(task.name.encode())], shuffled
        self.order = lru_cache(maxsize=2)(self._order)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, at = divmod(index, len(self.rows))
        row = self.rows[int(self.order(epoch)[at]) if self.shuffled else at]
        return self.make(row, self.classes[row.label])

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.RandomState([*self.entropy, epoch]).permutation(len(self.rows))


def build_mixture(
    config: Config,
    tokenizer: Any,
    vocab_size: int,
    sizes: Sequence[int],
    log: Callable[[str], None],
    samples: MaskedSamples,
    text: int,
    heads: bool,
) -> tuple:
    """(train, valid, test) of --task-mixture, each None or with `sizes` samples.

    samples: makes masked samples, and samples of labelled texts with the same arrays (`MaskedSamples.labelled`)
    heads: whether the model learns from labels
    """
    tasks = tasks_of(masked_settings(config).task_mixture)
    if not heads and (named := [task.name for task in tasks if task.labels]):
        raise SettingsError(
            f"--task-mixture: this model has no heads for labelled texts ({', '.join(named)})",
            do="give token files, or train an encoder-decoder (pretrain_t5.py), which writes labels as text",
        )
    if tokenizer is None and any(task.labels for task in tasks):
        raise SettingsError("--task-mixture: labelled texts need a tokenizer", do="--tokenizer-type with its files")
    refuse_other_vocabulary([task.path for task in tasks if task.path and not task.labels], tokenizer)
    order = MixtureOrder([task.weight for task in tasks])
    shares = ", ".join(f"{task.name} {task.weight}" for task in tasks)
    log(f" > mixture of tasks: of {order.period:,} samples {shares}")
    counts = [order.counts(size) for size in sizes]  # [split][task]
    by_task = []
    for number, task in enumerate(tasks):
        wanted = [count[number] for count in counts]
        if task.labels:
            by_task.append(_build_labelled(config, task, tokenizer, wanted, log, samples))
            continue
        own = config.data if task.path is None else _only(config.data, task.path)
        by_task.append(build_masked_datasets(config, vocab_size, wanted, log, samples, text, own))
    return tuple(
        _mixed(tasks, [built[split] for built in by_task], order, size, counts[split], name, log)
        for split, (size, name) in enumerate(zip(sizes, ("train", "valid", "test")))
    )


def _only(data: Data, path: str) -> Data:
    """The data settings for a task with its own token files."""
    files = dict(data_path=[path], train_data_path=None, valid_data_path=None, test_data_path=None)
    return replace(data, mock_data=False, **files)


def _build_labelled(
    config: Config, task: MixtureTask, tokenizer, wanted: Sequence[int], log, samples: MaskedSamples
) -> list:
    """The datasets of a labelled task; --split divides its rows. None for a split that is empty or not needed."""
    (rows, _, notes), built = task.read(), []

    @lru_cache(maxsize=1 << 16)
    def encoded(text: str) -> np.ndarray:
        return np.asarray(tokenizer.encode(text), np.int64)

    def make(row: Labelled, number: int) -> dict[str, np.ndarray]:
        second = None if row.second is None else encoded(row.second)
        return {**samples.labelled(encoded(row.first), second, encoded(row.label)), CLASS_LABEL: np.array(number)}

    samples.check_labels(task.path, {label: encoded(label) for label in task.labels})
    log(f" > {task.name}: {len(rows):,} labelled texts, {len(task.labels)} classes")
    for note in notes:
        log(f"note: {note}")
    for split, (share, count) in enumerate(zip(parse_split(config.data.split), wanted)):
        part = sequences_of(share, len(rows)) if share else range(0)
        if not (count and len(part)):
            built.append(None)
            continue
        mine = rows[part.start : part.stop]
        built.append(LabelledDataset(task, mine, make, config.logging.seed, shuffled=split == 0))
    if built[0] and built[1]:
        for problem in _one_sided(built[0].rows, built[1].rows):
            log(
                f"note: {task.path}: {problem}; --split divides the rows as they stand, so shuffle those of a sorted file"
            )
    return built


def _one_sided(train: Sequence[Labelled], valid: Sequence[Labelled]) -> Iterator[str]:
    """Describe labels that only one of training and validation has, as in a sorted file."""
    learned, asked = set(labels_of(train)), set(labels_of(valid))
    for labels, side in ((learned - asked, "training"), (asked - learned, "validation")):
        if labels:
            named = ", ".join(sorted(labels)[:10]) + ", ..." * (len(labels) > 10)
            yield f"of {len(learned | asked)} labels {len(labels)} are in the part for {side} alone: {named}"


def _mixed(tasks, datasets, order: MixtureOrder, size: int, counts: Sequence[int], split: str, log):
    """The dataset of one split. Raises DataError if a task has no samples for training or validation."""
    if not size or all(dataset is None for dataset in datasets):
        return None
    lacking = [task.name for task, dataset, count in zip(tasks, datasets, counts) if dataset is None and count]
    if lacking and split == "test":
        log(f"note: --split leaves nothing of {', '.join(lacking)} for test: there is no evaluation on test data")
        return None
    if lacking:
        raise DataError(
            f"--task-mixture: --split leaves nothing of {', '.join(lacking)} for {split}",
            do="--split 90,5,5 gives each a larger part; or --eval-iters 0 for no evaluation",
        )
    return MixtureDataset(tasks, datasets, order, size)
