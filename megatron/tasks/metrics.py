# SPDX-License-Identifier: Apache-2.0
"""Metrics of tasks: predictions [n] and gold labels [n] of a whole set -> a number. Needs no torch.

Classes are given by their indices from 0. An undefined metric, because one side is constant or the divisor is 0, is 0.

    >>> figures(("accuracy", "f1"), [1, 0, 1, 1], [1, 0, 0, 1], classes=2)
    {'accuracy': 0.75, 'f1': 0.8, 'accuracy and f1': 0.775}
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Metric(NamedTuple):
    """A metric. of: (predictions, gold, classes) -> value; needs: classes, two classes, or numbers.

    `telemetry.directions` says whether a smaller or a larger value is better.
    """

    of: Callable[[np.ndarray, np.ndarray, int], float]
    needs: str = "classes"


def confusion(predicted: np.ndarray, gold: np.ndarray, classes: int) -> np.ndarray:
    """The confusion matrix of counts [gold class, predicted class]."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (np.asarray(gold, np.int64), np.asarray(predicted, np.int64)), 1)
    return counts


def accuracy(predicted, gold, classes: int) -> float:
    return float(np.mean(np.asarray(predicted) == np.asarray(gold))) if len(gold) else 0.0


def f1(predicted, gold, classes: int) -> float:
    """F1 of class 1: harmonic mean of precision and recall."""
    return float(_f1_of_each(predicted, gold, classes)[1])


def macro_f1(predicted, gold, classes: int) -> float:
    """Mean F1 over all classes that occur among gold labels or predictions."""
    counts = confusion(predicted, gold, classes)
    there = (counts.sum(0) + counts.sum(1)) > 0
    return float(_f1_of_each(predicted, gold, classes)[there].mean()) if there.any() else 0.0


def _f1_of_each(predicted, gold, classes: int) -> np.ndarray:
    counts = confusion(predicted, gold, classes)
    both = counts.sum(0) + counts.sum(1)
    return np.divide(2.0 * counts.diagonal(), both, out=np.zeros(classes), where=both > 0)


def matthews(predicted, gold, classes: int) -> float:
    """Matthews correlation; for more than two classes, Gorodkin's R_K (doi:10.1016/j.compbiolchem.2004.09.006)."""
    counts = confusion(predicted, gold, classes).astype(np.float64)
    total, right = counts.sum(), counts.trace()
    of_gold, of_predicted = counts.sum(1), counts.sum(0)
    covariance = right * total - of_gold @ of_predicted
    spread = (total**2 - of_predicted @ of_predicted) * (total**2 - of_gold @ of_gold)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(predicted, gold, classes: int = 0) -> float:
    x, y = (np.asarray(values, np.float64) for values in (predicted, gold))
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearman(predicted, gold, classes: int = 0) -> float:
    """Pearson correlation of the ranks; equal values share the mean of their ranks."""
    return pearson(ranks(predicted), ranks(gold))


def ranks(values: Sequence[float]) -> np.ndarray:
    """Rank of each value from 1, ties with their mean.

    >>> ranks([3.0, 1.0, 3.0, 2.0])
    array([3.5, 1. , 3.5, 2. ])
    """
    _, place, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[place]


def mse(predicted, gold, classes: int = 0) -> float:
    """Mean squared error."""
    return float(np.mean((np.asarray(predicted, np.float64) - np.asarray(gold, np.float64)) ** 2)) if len(gold) else 0.0


METRICS = {
    "accuracy": Metric(accuracy),
    "f1": Metric(f1, "two classes"),
    "macro_f1": Metric(macro_f1),
    "matthews": Metric(matthews),
    "pearson": Metric(pearson, "numbers"),
    "spearman": Metric(spearman, "numbers"),
    "mse": Metric(mse, "numbers"),
}


def figures(names: Sequence[str], predicted, gold, classes: int = 0) -> dict[str, float]:
    """Name -> value of each metric. Several metrics also have a mean, "a and b", as PaddleNLP's AccuracyAndF1 and
    PearsonAndSpearman.
    """
    values = {name: METRICS[name].of(predicted, gold, classes) for name in names}
    if len(names) > 1:
        values[combined(names)] = sum(values.values()) / len(values)
    return values


def combined(names: Sequence[str]) -> str:
    """The name of the figure that selects the best checkpoint of a task."""
    return " and ".join(names)
