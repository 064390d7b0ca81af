# SPDX-License-Identifier: Apache-2.0
"""Metrics of tasks against scikit-learn and scipy, and where they are not defined."""

import numpy as np
import pytest

from megatron.tasks.metrics import confusion, figures, ranks

CLASSES = [2, 2, 3, 7]


@pytest.mark.parametrize("seed, classes", list(enumerate(CLASSES)))
def test_metrics_of_classes_are_scikit_learns(seed, classes):
    sklearn = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(seed)
    gold = draw.integers(classes, size=50)
    predicted = np.where(draw.random(50) < 0.6, gold, draw.integers(classes, size=50))
    found = figures(("accuracy", "macro_f1", "matthews"), predicted, gold, classes)
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(gold, predicted))
    assert found["macro_f1"] == pytest.approx(sklearn.f1_score(gold, predicted, average="macro"))
    assert found["matthews"] == pytest.approx(sklearn.matthews_corrcoef(gold, predicted))
    assert (confusion(predicted, gold, classes) == sklearn.confusion_matrix(gold, predicted)).all()
    if classes == 2:
        both = figures(("accuracy", "f1"), predicted, gold, 2)
        assert both["f1"] == pytest.approx(sklearn.f1_score(gold, predicted))
        assert both["accuracy and f1"] == pytest.approx((both["accuracy"] + both["f1"]) / 2)


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_correlations_are_scipys_with_ties_too(decimals):
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(decimals)
    gold = np.round(draw.uniform(0, 5, 80), decimals)  # whole numbers: many are equal
    predicted = np.round(gold + draw.normal(0, 1.5, 80), decimals)
    found = figures(("pearson", "spearman", "mse"), predicted, gold)
    assert found["pearson"] == pytest.approx(stats.pearsonr(predicted, gold).statistic)
    assert found["spearman"] == pytest.approx(stats.spearmanr(predicted, gold).statistic)
    assert found["mse"] == pytest.approx(np.mean((predicted - gold) ** 2))
    assert (ranks(gold) == stats.rankdata(gold)).all()


def test_what_is_not_defined_is_zero():
    ones = [1, 1, 1]
    assert figures(("matthews",), ones, [0, 1, 1], 2) == {"matthews": 0.0}
    assert figures(("f1",), [0, 0, 0], [0, 0, 0], 2) == {"f1": 0.0}
    assert figures(("pearson",), [0.5, 0.5, 0.5], [1.0, 2.0, 3.0]) == {"pearson": 0.0}
    assert figures(("macro_f1",), [0, 0], [0, 0], 3) == {"macro_f1": 1.0}  # of classes that are there


@pytest.mark.parametrize("seed", range(12))
def test_metrics_of_classes_are_those_of_plain_loops(seed):
    """Also with classes that are never right, never predicted, or nowhere."""
    draw, classes = np.random.default_rng(seed), 2 + seed % 3
    gold, predicted = (draw.integers(1 + draw.integers(classes), size=7).tolist() for _ in range(2))
    pairs = list(zip(predicted, gold, strict=True))
    counts = [[sum(pair == (p, g) for pair in pairs) for p in range(classes)] for g in range(classes)]
    assert confusion(predicted, gold, classes).tolist() == counts
    each = {}
    for one in {*predicted, *gold}:
        hits = sum(p == g == one for p, g in pairs)
        precision, recall = hits / max(1, predicted.count(one)), hits / max(1, gold.count(one))
        each[one] = 2 * precision * recall / (precision + recall) if hits else 0.0
    centred = [  # as vectors with a 1 for the class: the correlation of predictions and labels over all classes
        [[(one == k) - values.count(k) / 7 for one in values] for k in range(classes)] for values in (predicted, gold)
    ]
    product = lambda x, y: sum(a * b for u, v in zip(x, y, strict=True) for a, b in zip(u, v, strict=True))
    spread = product(centred[0], centred[0]) * product(centred[1], centred[1])
    wanted = dict(
        accuracy=sum(p == g for p, g in pairs) / 7,
        f1=each.get(1, 0.0),
        macro_f1=sum(each.values()) / len(each),
        matthews=product(*centred) / spread**0.5 if spread > 1e-9 else 0.0,
        mse=sum((p - g) ** 2 for p, g in pairs) / 7,
    )
    found = figures(tuple(wanted), predicted, gold, classes)
    mean = sum(wanted.values()) / len(wanted)
    assert found == pytest.approx(wanted | {"accuracy and f1 and macro_f1 and matthews and mse": mean})
