# SPDX-License-Identifier: Apache-2.0
"""Which way is better: of two values of each figure, the one that training keeps, and the sign of each metric."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Optional

import numpy as np
import pytest

from megatron.data.requests import RequestSamples, ScoringRequest, request_figures
from megatron.errors import SettingsError
from megatron.tasks.description import CLUE, GLUE
from megatron.tasks.metrics import METRICS, figures
from megatron.telemetry.directions import DIRECTIONS, LARGER, SMALLER, best_of, direction_of, is_better
from megatron.telemetry.history import History
from megatron.telemetry.report_facts import judged
from megatron.training import measures
from megatron.training.instruments import record_rules
from megatron.training.state import Losses

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


def test_every_figure_has_its_direction():
    """Also those that no metric of fine-tuning computes, such as exact match; of equal values the first is the best."""
    smaller = {name for name in DIRECTIONS if direction_of(name) == SMALLER}
    assert smaller == {"loss", "ppl", "perplexity", "mse"} and set(DIRECTIONS.values()) == {SMALLER, LARGER}
    assert {"em", "acc", "accuracy", "f1", "mcc"} <= DIRECTIONS.keys() - smaller
    for way, best in ((SMALLER, (3, 1.0)), (LARGER, (2, 4.0))):
        assert best_of([(1, 2.0), (2, 4.0), (3, 1.0), (4, 1.0), (5, 4.0)], way) == best
        assert not is_better(2.0, 2.0, way) and not is_better(float("nan"), None, way) and is_better(2.0, None, way)


def test_correlations_of_numbers_have_the_sign_of_their_slope():
    x = np.array([0.5, 1.0, 4.0, 2.0])
    for name in ("pearson", "spearman"):
        assert figures((name,), 3 * x + 1, x)[name] == pytest.approx(1.0)
        assert figures((name,), 1 - 3 * x, x)[name] == pytest.approx(-1.0)
    bent = {name: figures((name,), np.exp(x), x)[name] for name in ("pearson", "spearman")}
    assert bent["spearman"] == pytest.approx(1.0) and 0.8 < bent["pearson"] < 0.95


def test_every_metric_is_better_for_the_better_predictions():
    for name in METRICS:
        best, worse, worst = (figures((name,), predicted, GOLD, 2)[name] for predicted in (GOLD, WORSE, WORST))
        order = [(best, worse), (worse, worst), (best, worst)]
        assert all(is_better(one, other, direction_of(name)) for one, other in order), name
        assert not any(is_better(other, one, direction_of(name)) for one, other in order), name


def test_losses_fall_and_figures_that_nobody_knows_have_no_direction():
    loss = np.log([0.9, 0.1])  # of the right answer, from a good model and from a bad one
    for name, values in (
        ("lm loss", -loss),
        ("loss", -loss),
        ("lm loss ppl", np.exp(-loss)),
        ("perplexity", np.exp(-loss)),
    ):
        assert is_better(values[0], values[1], direction_of(name)), name
    assert direction_of("mse dev") == direction_of("mse") == SMALLER != direction_of("accuracy and f1 dev")
    assert direction_of("acc") == direction_of("mcc") == direction_of("normalised accuracy first") == LARGER
    for name in ("figure", "mse and accuracy", "chosen reward", "length", "", "lossless"):
        assert direction_of(name) is None, name


def test_each_published_task_is_judged_by_a_figure_that_grows():
    """GLUE's STS-B by correlations, CoLA by Matthews', all others by accuracies or F1: none by an error."""
    tasks = [*GLUE, *CLUE]
    assert len(tasks) > 12 and {direction_of(task.judged_by) for task in tasks} == {LARGER}
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


def judging(figure, patience=None, better=None):
    """The measures of a recipe that chooses weights by this figure."""
    own = type("Own", (measures.Measures,), dict(best_by=figure, patience=patience, better=better))
    return measures.measures_of(SimpleNamespace(measures=own), None)


def walk(values, figure, patience=2):
    """(iterations whose weights were saved, the state, the iteration that training ends at, or None)."""
    saved = []
    run = SimpleNamespace(
        losses=SimpleNamespace(measures=judging(figure, patience)),
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
        measures.judge(run, {"loss": 9.0, figure: value})
        if measures.early_end_reason(run):
            return saved, run.state, iteration
    return saved, run.state, None


@pytest.mark.parametrize(
    "figure, values, saved, best, since, end",
    [
        ("accuracy", (0.5, 0.7, 0.6, 0.8), [1, 2, 4], 0.8, 0, None),
        ("mse", (0.5, 0.7, 0.6, 0.4), [1, 4], 0.4, 0, 3),
        ("mse dev", (0.5, 0.4, 0.6, 0.3), [1, 2, 4], 0.3, 0, None),
        ("f1", (0.5, 0.5, 0.5), [1], 0.5, 2, 3),  # as good is not better
        ("lm loss", (0.5, 0.5, 0.5), [1], 0.5, 2, 3),
        ("pearson and spearman", (math.nan, 0.2, math.nan, 0.1), [2], 0.2, 2, 4),
        ("mse", (math.nan, 0.2, -math.inf, 0.3), [2], 0.2, 2, 4),
        ("accuracy", (math.inf, math.nan), [], None, 2, 2),
        ("matthews", (-0.9, -0.5, -0.7), [1, 2], -0.5, 1, None),  # it may be below 0
    ],
)
def test_the_best_evaluation_and_patience(figure, values, saved, best, since, end):
    """It ends after two evaluations in a row that are no better; without that, the walk goes on to its end."""
    found = walk(values, figure, patience=None)
    assert found[0] == saved and found[1].best == best and found[2] is None
    assert walk(values, figure)[2] == end
    if end in (None, len(values)):
        assert found[1].evaluations_since_best == since
        assert found[1].best_iteration == (saved[-1] if saved else 0)


@pytest.mark.parametrize("criterion", [False, True])
@pytest.mark.parametrize(
    "figure, shown",
    [
        ("accuracy", ("0.9000", "best of 4 validations, at iteration 20")),
        ("mse", ("0.2000", "best of 4 validations, at iteration 10")),
        ("figure", ("0.4000", "last of 4 validations, at iteration 30")),
    ],
)
def test_the_report_shows_the_best_evaluation(figure, shown, criterion):
    """As the run's record says of what it was judged by, and of other figures that are known."""
    points = [(5, 0.5), (10, 0.2), (20, 0.9), (30, 0.4)]
    evals = [dict(kind="eval", split="validation", iteration=n, loss=1.0) | {figure: f} for n, f in points]
    measured = type("Own", (measures.Measures,), dict(best_by=figure))(None)
    history = History(run=dict(criterion=measured.criterion if criterion else None), evals=evals)
    history.steps.extend([dict(iteration=1, loss=1.0)])
    value, remark = shown
    assert judged(history) == (value, figure, remark)


def test_a_figure_of_a_recipe_of_its_own():
    with pytest.raises(SettingsError, match="bleu chooses the best weights(.|\\n)*Own.better = SMALLER or LARGER"):
        judging("bleu")
    own = judging("bleu", better=LARGER)
    assert own.direction == LARGER and History(run=dict(criterion=own.criterion)).direction("bleu") == LARGER
    assert judging(None).direction is None


@pytest.mark.parametrize("figure, direction", [("mse dev", SMALLER), ("accuracy", LARGER), (None, SMALLER)])
def test_events_are_judged_by_the_same_figure(figure, direction):
    """Without a figure, the minimized loss, whatever its name."""
    losses = Losses({"energy": 1.0}, measures=judging(figure))
    start = SimpleNamespace(lengths=SimpleNamespace(warmup=0))
    rules = record_rules(
        None, SimpleNamespace(perplexities=()), SimpleNamespace(rules={}, record=None), losses, start, 9
    )
    assert (rules.figure, rules.direction) == (figure or "energy", direction)


def test_the_likeliest_continuation_is_the_answer():
    """Log-likelihoods: the greatest; per character, a long text may win with a smaller sum."""
    requests = [ScoringRequest("c", ["ab", "a" * 8], 0, "first"), ScoringRequest("c", ["ab", "a" * 8], 1, "second")]
    dataset = RequestSamples([], [2, 2], 8, 0, requests)
    found = request_figures(dataset, np.array([-4.0, -8.0, -4.0, -8.0]))
    assert found["accuracy first"] == 1.0 and found["normalised accuracy first"] == 0.0
    assert found["accuracy second"] == 0.0 and found["normalised accuracy second"] == 1.0
    assert found["accuracy"] == found["normalised accuracy"] == 0.5
