# SPDX-License-Identifier: Apache-2.0
"""The evaluation of a fine-tuned model: a task's metrics over all examples, predictions, a confusion matrix."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Optional

import numpy as np
import torch

from megatron.errors import StorageError
from megatron.storage.durable import replace_file
from megatron.tasks.description import Task
from megatron.tasks.examples import Examples
from megatron.tasks.metrics import confusion, figures
from megatron.tasks.settings import open_task, predictions_folder, task_settings
from megatron.tasks.soft_labels import INDEX
from megatron.tasks.spans import span_figures
from megatron.training.measures import Measures


class TaskMeasures(Measures):
    """The metrics of a task with a head; values are the head's outputs [b, c]."""

    def __init__(self, config):
        super().__init__(config)
        settings = task_settings(config)
        self.task = open_task(settings).task
        self.patience = settings.patience
        sets = open_task(settings).files["valid"]
        self.keeps_best = settings.best_checkpoint
        if sets and not config.data.mock_data:
            self.best_by = f"{self.task.judged_by} {sets[0][0]}".strip()
        self.folder = predictions_folder(settings.predictions, config.checkpoint.save)

    def values(self, batch, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def figures(self, values: np.ndarray, dataset, split: str, final: bool, rank: int) -> dict[str, float]:
        if not hasattr(dataset, "examples"):
            return {}  # mock data
        return self.judged(values, dataset.examples, split, final, rank)

    def judged(self, scores: np.ndarray, examples: Examples, split: str, final: bool, rank: int) -> dict[str, float]:
        """The metrics of each set of examples, from logits of classes [n, c] or numbers [n, 1].

        At the end of training, rank 0 writes predictions, and probabilities of classes.
        """
        results, predicted = {}, predicted_of(self.task, scores)
        for name, places in examples.sets.items():
            rows, own = examples.rows[places.start : places.stop], predicted[places.start : places.stop]
            if all(row.label is not None for row in rows):
                of_set = figures(self.task.metrics, own, [row.label for row in rows], self.classes)
                results |= {f"{figure} {name}".strip(): value for figure, value in of_set.items()}
            if final and rank == 0 and self.folder:
                self._write(rows, scores[places.start : places.stop], own, split, name)
        return results

    def _write(self, rows: Sequence, scores: np.ndarray, predicted: np.ndarray, split: str, name: str) -> None:
        """Write the predictions for a set of examples; for classes also probabilities and the confusion matrix."""
        ids, path = [row.id for row in rows], self.path(split, name)
        write_predictions(self.task, predicted, ids, path)
        if self.task.regression:
            return
        write_probabilities(self.task, scores, ids, path)
        if not self.task.options and all(row.label is not None for row in rows):
            counts = confusion(predicted, [row.label for row in rows], self.classes)
            draw_confusion(counts, self.task.labels, Path(self.folder) / f"confusion-{split}{_suffix(name)}.png")

    @property
    def classes(self) -> int:
        return 0 if self.task.regression else len(self.task.labels)

    def path(self, split: str, name: str) -> Path:
        """The file of a set's predictions, with the leaderboard's name for the test set."""
        answer = self.task.answers.get(name) or f"{self.task.name}{_suffix(name)}.tsv"
        return Path(self.folder) / (answer if split == "test" else f"{split}-{answer}")


class SpanMeasures(TaskMeasures):
    """The figures of a task whose answers are pieces of a text; values are scores of rows [b, 2 s]."""

    def figures(self, values: np.ndarray, dataset, split: str, final: bool, rank: int) -> dict[str, float]:
        if not hasattr(dataset, "examples"):
            return {}  # mock data
        results, answers = {}, dataset.answers(values)
        for name, places in dataset.examples.sets.items():
            rows, own = dataset.examples.rows[places.start : places.stop], answers[places.start : places.stop]
            if all(row.gold for row in rows):
                of_set = span_figures(own, [row.gold for row in rows])
                results |= {f"{figure} {name}".strip(): value for figure, value in of_set.items()}
            if final and rank == 0 and self.folder:
                content = dict(zip([row.id for row in rows], own, strict=True))
                _write_lines(self.path(split, name), [json.dumps(content, ensure_ascii=False, indent=1)])
        return results


def _suffix(name: str) -> str:
    return f"-{name}" if name else ""


def predicted_of(task: Task, values: np.ndarray) -> np.ndarray:
    """The predicted classes or numbers [n], from the head's outputs [n, c]."""
    return values[:, 0] if task.regression else values.argmax(1)


def write_predictions(task: Task, predicted: Sequence[float], ids: Sequence[str], path: Path) -> None:
    """Write predictions in the format of the leaderboard, by the ending of the file.

    GLUE: lines "index<TAB>prediction". CLUE: lines {"id": 0, "label": "1"}, with indices for options; for some tasks one
    object.
    """
    words = [f"{value:.6g}" if task.regression else task.labels[int(value)] for value in predicted]
    if path.suffix == ".json" and task.options:
        words = [int(value) for value in predicted]
    if path.suffix == ".json" and task.one_answer:
        lines = [json.dumps(dict(zip(ids, words, strict=True)), indent=1)]
    elif path.suffix == ".json":
        lines = [json.dumps(dict(id=int(id) if id.isdecimal() else id, label=word)) for id, word in zip(ids, words)]
    else:
        lines = ["index\tprediction", *(f"{id}\t{word}" for id, word in zip(ids, words))]
    _write_lines(path, lines)


def write_probabilities(task: Task, logits: np.ndarray, ids: Sequence[str], path: Path) -> None:
    """Write the probabilities of classes next to a file of predictions: a line of labels, then a line for each example.

    They serve to average several models, or to choose another threshold.
    """
    shares = torch.from_numpy(logits).double().softmax(1).tolist()
    lines = ["\t".join((INDEX, *task.labels))]
    lines += ["\t".join((id, *(f"{share:.6f}" for share in row))) for id, row in zip(ids, shares)]
    _write_lines(path.with_suffix(".probabilities.tsv"), lines)


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise _not_written(error) from None


def refuse_folder(folder: Optional[str]) -> None:
    """Create the folder of --predictions on rank 0; raises StorageError before training if it cannot be written."""
    if folder is None or (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _not_written(error) from None


def _not_written(error: OSError) -> StorageError:
    return StorageError(f"predictions cannot be written: {error}", do="give another folder: --predictions")


def draw_confusion(counts: np.ndarray, labels: Sequence[str], path: Path) -> Optional[Path]:
    """Draw the confusion matrix to a file; returns None if matplotlib (extra `log`) is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    size = min(14.0, 3.0 + 0.45 * len(labels))
    figure = Figure(figsize=(size, size), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", vmin=0.0, vmax=1.0)
    # Labels may contain dollar signs, which are not formulas.
    axes.set_xticks(range(len(labels)), labels, rotation=90 if len(labels) > 4 else 0, parse_math=False)
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("gold")
    if len(labels) <= 20:
        for row, column in np.ndindex(*counts.shape):
            color = "white" if share[row, column] > 0.5 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=color, fontsize=8)
    axes.set_title(f"{counts.trace()} of {counts.sum()} right")
    figure.savefig(path, dpi=100)
    return path
