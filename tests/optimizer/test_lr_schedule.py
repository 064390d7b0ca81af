# SPDX-License-Identifier: Apache-2.0
"""Golden values were made with megatron-core 0.16.1's OptimizerParamScheduler."""

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.optimizer.lr_schedule import Lengths, learning_rate, problems, weight_decay
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Batch, Optimizer
from megatron.training.rules import check

AT = (0, 10, 20, 21, 30, 60, 61, 80, 100, 101)  # samples: warm-up ends at 20, WSD anneals from 60, decay ends at 100
GOLDEN = {
    "constant": (0.05, 0.525, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "linear": (0.05, 0.525, 1.0, 0.98875, 0.8875, 0.55, 0.53875, 0.325, 0.1, 0.1),
    "cosine": (0.05, 0.525, 1.0, 0.9996530663, 0.9657457896, 0.55, 0.5323330829, 0.2318019485, 0.1, 0.1),
    "inverse-square-root": (
        0.05,
        0.525,
        1.0,
        0.9759000729,
        0.8164965809,
        0.5773502692,
        0.5725983343,
        0.5,
        0.4472135955,
        0.1,
    ),
    "WSD exponential": (0.05, 0.525, 1.0, 1.0, 1.0, 1.0, 0.9690770774, 0.4727922061, 0.1, 0.1),
    "WSD linear": (0.05, 0.525, 1.0, 1.0, 1.0, 1.0, 0.9775, 0.55, 0.1, 0.1),
    "WSD cosine": (0.05, 0.525, 1.0, 1.0, 1.0, 1.0, 0.9986128002, 0.55, 0.1, 0.1),
    "WSD minus_sqrt": (0.05, 0.525, 1.0, 1.0, 1.0, 1.0, 0.8576975053, 0.3636038969, 0.1, 0.1),
}
GOLDEN_DECAY = {
    "linear": (0.01, 0.019, 0.028, 0.0289, 0.037, 0.064, 0.0649, 0.082, 0.1, 0.1),
    "cosine": (
        0.01,
        0.01220245677,
        0.01859423525,
        0.01944302444,
        0.02854966365,
        0.06890576475,
        0.07024320641,
        0.09140576475,
        0.1,
        0.1,
    ),
}
BY_STEPS = Batch(global_batch_size=1, train_iters=100)


def settings(style: str = "linear", **changes) -> Optimizer:
    style, _, anneal = style.partition(" ")
    given = dict(
        lr=1.0,
        min_lr=0.1,
        lr_decay_style=style,
        lr_warmup_iters=20,
        lr_warmup_init=0.05,
        lr_wsd_decay_style=anneal or "exponential",
        lr_wsd_decay_iters=40,
    )
    return Optimizer(**{**given, **changes})


@pytest.mark.parametrize("style", GOLDEN)
def test_learning_rate_equals_megatrons(style):
    chosen = settings(style)
    lengths = Lengths.of(chosen, BY_STEPS)
    assert [learning_rate(chosen, lengths, n) for n in AT] == pytest.approx(GOLDEN[style], rel=1e-9)


@pytest.mark.parametrize("style", GOLDEN_DECAY)
def test_weight_decay_equals_megatrons(style):
    chosen = settings(weight_decay_incr_style=style, start_weight_decay=0.01, end_weight_decay=0.1)
    lengths = Lengths.of(chosen, BY_STEPS)
    assert [weight_decay(chosen, lengths, n) for n in AT] == pytest.approx(GOLDEN_DECAY[style], rel=1e-9)


def test_weight_decay_is_constant_unless_asked():
    chosen = settings(weight_decay=0.3)
    assert {weight_decay(chosen, Lengths.of(chosen, BY_STEPS), n) for n in AT} == {0.3}


def test_first_step_of_a_warmup_has_rate_zero():
    chosen = Optimizer(lr=1.0, lr_warmup_iters=5)
    assert learning_rate(chosen, Lengths.of(chosen, BY_STEPS), 0) == 0.0


def test_without_warmup_the_first_step_has_the_highest_rate():
    chosen = Optimizer(lr=1.0)
    assert learning_rate(chosen, Lengths.of(chosen, BY_STEPS), 0) == 1.0


def test_steps_samples_and_fraction_give_the_same_curve():
    by_steps = Batch(global_batch_size=8, train_iters=50)
    by_samples = Batch(global_batch_size=8, train_samples=400)
    ways = [
        (Optimizer(lr=1.0, lr_warmup_iters=10, lr_decay_iters=40), by_steps),
        (Optimizer(lr=1.0, lr_warmup_samples=80, lr_decay_samples=320), by_samples),
        (Optimizer(lr=1.0, lr_warmup_fraction=0.25, lr_decay_iters=40), by_steps),
        (Optimizer(lr=1.0, lr_warmup_fraction=0.25, lr_decay_samples=320), by_samples),
    ]
    curves = [[learning_rate(o, Lengths.of(o, b), n) for n in range(0, 410, 8)] for o, b in ways]
    assert curves[0] == curves[1] == curves[2] == curves[3]
    assert curves[0][10] == 1.0 and curves[0][41] == 0.0


def test_of_epochs_lengths_are_in_steps_of_the_batch_or_in_samples():
    """What a run of epochs is told in steps is what one of as many steps is told."""
    by_steps = Batch(global_batch_size=8, train_iters=100)
    by_epochs = Batch(global_batch_size=8, train_samples=800, train_epochs=3)
    steps = Optimizer(lr=1.0, min_lr=0.1, lr_decay_style="cosine", lr_decay_iters=60, lr_warmup_iters=10)
    samples = dataclasses.replace(
        steps, lr_decay_iters=None, lr_warmup_iters=0, lr_decay_samples=480, lr_warmup_samples=80
    )
    curve = [learning_rate(steps, Lengths.of(steps, by_steps), at) for at in range(0, 800, 8)]
    assert not problems(steps, by_epochs) and not problems(samples, by_epochs)
    for settings in (steps, samples):
        assert [learning_rate(settings, Lengths.of(settings, by_epochs), at) for at in range(0, 800, 8)] == curve
    [said] = problems(dataclasses.replace(steps, lr_decay_samples=480), by_epochs)
    assert said == "--lr-decay-iters and --lr-decay-samples: give one"


def test_decay_lasts_the_whole_run_by_default():
    lengths = Lengths.of(Optimizer(lr=1.0), Batch(micro_batch_size=4, train_iters=10), dp=2)
    assert (lengths.decay, lengths.total, lengths.anneal) == (80, 80, None)


@given(
    style=st.sampled_from(list(GOLDEN)),
    warmup=st.integers(0, 50),
    decay=st.integers(51, 300),
    anneal=st.integers(1, 50),
    samples=st.integers(0, 1000),
)
def test_rate_stays_between_lowest_and_highest_and_never_rises_after_warmup(style, warmup, decay, anneal, samples):
    chosen = settings(style, lr_warmup_iters=warmup, lr_decay_iters=decay, lr_wsd_decay_iters=anneal)
    lengths = Lengths.of(chosen, BY_STEPS)
    rate = learning_rate(chosen, lengths, samples)
    assert 0.05 - 1e-12 <= rate <= 1.0 + 1e-12
    if samples > warmup:
        assert learning_rate(chosen, lengths, samples + 1) <= rate + 1e-12


@pytest.mark.parametrize(
    "changes, batch, words",
    [
        (dict(lr=None), BY_STEPS, "--lr is missing"),
        (dict(min_lr=2.0), BY_STEPS, "--min-lr 2 must lie between 0 and --lr 1"),
        (dict(lr_warmup_init=2.0), BY_STEPS, "--lr-warmup-init"),
        (dict(lr_warmup_iters=100), BY_STEPS, "warm-up of 100 iters is not shorter than the decay length of 100 iters"),
        (dict(lr_warmup_iters=0, lr_warmup_samples=5), BY_STEPS, "use --lr-warmup-iters"),
        (dict(), Batch(train_samples=100), "use --lr-warmup-samples"),
        (
            dict(lr_warmup_samples=5),
            Batch(train_samples=100, train_epochs=2),
            "--lr-warmup-iters and --lr-warmup-samples: give one",
        ),
        (dict(lr_warmup_fraction=0.1), BY_STEPS, "give one"),
        (dict(lr_decay_style="WSD", lr_wsd_decay_iters=None), BY_STEPS, "--lr-wsd-decay-iters"),
        (dict(weight_decay_incr_style="linear"), BY_STEPS, "needs both"),
        (dict(start_weight_decay=0.1), BY_STEPS, "use --weight-decay"),
        (dict(weight_decay_incr_style="cosine", start_weight_decay=0.2, end_weight_decay=0.1), BY_STEPS, "between"),
    ],
)
def test_problems_are_named_in_flags(changes, batch, words):
    found = problems(dataclasses.replace(settings(), **changes), batch)
    assert any(words in line for line in found), found


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(lr_decay_style="quadratic"), "--lr-decay-style quadratic has no curve"),
        (dict(lr_decay_style="WSD", lr_wsd_decay_style="quadratic"), "--lr-wsd-decay-style quadratic has no curve"),
        (
            dict(weight_decay_incr_style="quadratic", start_weight_decay=0.0, end_weight_decay=0.1),
            "--weight-decay-incr-style quadratic has no curve",
        ),
    ],
)
def test_a_schedule_that_is_registered_without_a_curve_is_refused_at_the_start(changes, words):
    config = parse_pretrain("--num-layers 1 --hidden-size 8 --num-attention-heads 1 --mock-data --vocab-size 9".split())
    optimizer = dataclasses.replace(settings(), **changes)
    batch = dataclasses.replace(config.batch, micro_batch_size=1, train_iters=100)
    [found] = check(dataclasses.replace(config, optimizer=optimizer, batch=batch), 1)
    assert words in found and "CURVES in megatron/optimizer/lr_schedule.py" in found


def test_every_name_that_a_setting_allows_has_a_curve():
    hints = typing.get_type_hints(Optimizer)
    for name, also in (
        ("lr_decay_style", {}),
        ("lr_wsd_decay_style", {}),
        ("weight_decay_incr_style", dict(start_weight_decay=0.0, end_weight_decay=0.1)),
    ):
        for style in typing.get_args(hints[name]):
            more = also if style != "constant" else {}
            assert problems(dataclasses.replace(settings(), **{name: style}, **more), BY_STEPS) == []


@pytest.mark.parametrize("style", GOLDEN)
def test_good_settings_have_no_problems(style):
    assert problems(settings(style), BY_STEPS) == []
    assert problems(settings(style), Batch()) == []
