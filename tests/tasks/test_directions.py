# SPDX-License-Identifier: Apache-2.0
"""Which way is better: of two values of each figure, the one that training keeps, and the sign of each metric."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Optional

import numpy as np
import pytest

from megatron.data.requests import RequestSamples, ScoringRequest, request_figures
from megatron.tasks.description import CLUE, GLUE
from megatron.tasks.metrics import METRICS, figures
from megatron.telemetry.run_record import History
from megatron.training import measures
from megatron.training.report_facts import judged

GOLD = [0, 1, 1, 0, 1, 1]
WORSE = [0, 1, 1, 0, 1, 0]  # one mistake
WORST = [1, 0, 0, 1, 0, 0]  # the other class each time
SIGNED = {  # metric -> its values for GOLD, WORSE and WORST, worked out by hand
    "accuracy": (1.0, 5 / 6, 0.0),
    "f1": (1.0, 6 / 7, 0.0),
    "macro_f1": (1.0, (6 / 7 + 4 / 5) / 2, 0.0),
    "matthews": (1.0, math.sqrt(1 / 2), -1.0),
    "pearson": (1.0, math.sqrt(1 / 2), -1.0),
    "spearman": (1.0, math.sqrt(1 / 2), -1.0),
    "mse": (0.0, 1 / 6, 1.0),
}


def test_every_metric_has_the_sign_of_its_definition():
    assert SIGNED.keys() == METRICS.keys()
    for name, wanted in SIGNED.items():
        found = [figures((name,), predicted, GOLD, 2)[name] for predicted in (GOLD, WORSE, WORST)]
        assert found == pytest.approx(wanted), name


def test_correlations_of_numbers_have_the_sign_of_their_slope():
    x = np.array([0.5, 1.0, 4.0, 2.0])
    for name in ("pearson", "spearman"):
        assert figures((name,), 3 * x + 1, x)[name] == pytest.approx(1.0)
        assert figures((name,), 1 - 3 * x, x)[name] == pytest.approx(-1.0)
    bent = {name: figures((name,), np.exp(x), x)[name] for name in ("pearson", "spearman")}
    assert bent["spearman"] == pytest.approx(1.0) and 0.8 < bent["pearson"] < 0.95


def test_each_published_task_is_judged_by_a_figure_that_grows():
    """GLUE's STS-B by correlations, CoLA by Matthews', all others by accuracies or F1: none by an error."""
    tasks = [*GLUE, *CLUE]
    assert len(tasks) > 12 and not any(task.smaller_is_better for task in tasks)
    by = {task.name: task.metrics for task in tasks}
    assert by["CoLA"] == ("matthews",) and by["MRPC"] == ("accuracy", "f1")
    assert set(next(metrics for name, metrics in by.items() if name.upper().startswith("STS"))) == {
        "pearson",
        "spearman",
    }


# ---- the best of the evaluations -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    iteration: int
    valid_loss: Optional[float] = None
    best: Optional[float] = None
    best_iteration: int = 0
    evaluations_since_best: int = 0


def walk(values, smaller, patience=2):
    """(iterations whose weights were saved, the state, the iteration that training ends at, or None)."""
    saved = []
    run = SimpleNamespace(
        losses=SimpleNamespace(
            measures=SimpleNamespace(best_by="figure", smaller_is_better=smaller, patience=patience)
        ),
        config=SimpleNamespace(
            batch=SimpleNamespace(stop_at_loss=None), checkpoint=SimpleNamespace(save="folder", load=None)
        ),
        metrics=SimpleNamespace(log=lambda line: None),
        checkpoints=SimpleNamespace(best=object()),
        state=State(0),
    )
    run.save_best = lambda: saved.append(run.state.iteration)
    for iteration, value in enumerate(values, 1):
        run.state = State(iteration, *list(vars(run.state).values())[1:])
        measures.judge(run, {"loss": 9.0, "figure": value})
        if measures.early_end_reason(run):
            return saved, run.state, iteration
    return saved, run.state, None


@pytest.mark.parametrize(
    "smaller, values, saved, best, since, end",
    [
        (False, (0.5, 0.7, 0.6, 0.8), [1, 2, 4], 0.8, 0, None),
        (True, (0.5, 0.7, 0.6, 0.4), [1, 4], 0.4, 0, 3),
        (True, (0.5, 0.4, 0.6, 0.3), [1, 2, 4], 0.3, 0, None),
        (False, (0.5, 0.5, 0.5), [1], 0.5, 2, 3),  # as good is not better
        (True, (0.5, 0.5, 0.5), [1], 0.5, 2, 3),
        (False, (math.nan, 0.2, math.nan, 0.1), [2], 0.2, 2, 4),
        (True, (math.nan, 0.2, -math.inf, 0.3), [2], 0.2, 2, 4),
        (False, (math.inf, math.nan), [], None, 2, 2),
        (False, (-0.9, -0.5, -0.7), [1, 2], -0.5, 1, None),  # Matthews' may be below 0
    ],
)
def test_the_best_evaluation_and_patience(smaller, values, saved, best, since, end):
    """It ends after two evaluations in a row that are no better; without that, the walk goes on to its end."""
    found = walk(values, smaller, patience=None)
    assert found[0] == saved and found[1].best == best and found[2] is None
    assert walk(values, smaller)[2] == end
    if end in (None, len(values)):
        assert found[1].evaluations_since_best == since
        assert found[1].best_iteration == (saved[-1] if saved else 0)


@pytest.mark.parametrize("smaller, value, at", [(False, "0.9000", 20), (True, "0.2000", 10)])
def test_the_report_shows_the_best_evaluation(smaller, value, at):
    points = [(5, 0.5), (10, 0.2), (20, 0.9), (30, 0.4)]
    evals = [dict(kind="eval", split="validation", iteration=n, loss=1.0, figure=f) for n, f in points]
    steps = [dict(iteration=1, loss=1.0)]
    run = dict(criterion=dict(figure="figure", smaller_is_better=smaller))
    found = judged(History(run=run, steps=steps, evals=evals))
    assert found == (value, "figure", f"best of 4 validations, at iteration {at}")


def test_the_likeliest_continuation_is_the_answer():
    """Log-likelihoods: the greatest; per character, a long text may win with a smaller sum."""
    requests = [ScoringRequest("c", ["ab", "a" * 8], 0, "first"), ScoringRequest("c", ["ab", "a" * 8], 1, "second")]
    dataset = RequestSamples([], [2, 2], 8, 0, requests)
    found = request_figures(dataset, np.array([-4.0, -8.0, -4.0, -8.0]))
    assert found["accuracy first"] == 1.0 and found["normalised accuracy first"] == 0.0
    assert found["accuracy second"] == 0.0 and found["normalised accuracy second"] == 1.0
    assert found["accuracy"] == found["normalised accuracy"] == 0.5
