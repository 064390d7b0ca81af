# SPDX-License-Identifier: Apache-2.0
"""Rules over recorded sequences of metrics: what is an event, at which record, and what is none."""

import itertools
import math
import random

import pytest

from megatron.errors import SettingsError
from megatron.telemetry.directions import direction_of
from megatron.telemetry.event_rules import DEFAULTS, EventRule, RecordRules, read_rules
from megatron.telemetry.events import KINDS, LEVELS, EventLog, read_events


def judged(records, rules=None, **more):
    """(kind, number of the record) of each event."""
    found, new = [], []
    judge = RecordRules(rules or {}, lambda kind, message, **facts: new.append(kind), **more)
    for number, record in enumerate(records, 1):
        judge(record)
        found += [(kind, number) for kind in new]
        new.clear()
    return found


def steps(*, seconds=1.0, norm=1.0, loss=2.0, count=100, **changed):
    """Records of steps. changed: at{number} = values of that step"""
    noise = random.Random(1)
    rows = []
    for number in range(1, count + 1):
        row = dict(seconds=seconds * noise.uniform(0.8, 1.25), grad_norm=norm * noise.uniform(0.5, 2.0))
        row |= {"kind": "step", "iteration": number, "consumed_samples": 8 * number, "lm loss": loss}
        row |= changed.get(f"at{number}", {})
        rows.append(row | {"tokens_per_second": 1000 / row["seconds"]})
    return rows


def validations(*losses, name="lm loss"):
    return [{"kind": "eval", "split": "validation", "iteration": at, name: one} for at, one in enumerate(losses)]


def test_a_quiet_run_has_no_events():
    assert judged(steps(count=600, guess=4.0)) == judged(steps(seconds=0.01, count=600)) == []


def test_a_gradient_norm_of_many_times_its_median():
    assert judged(steps(at40=dict(grad_norm=30.0), at41=dict(grad_norm=40.0), at60=dict(grad_norm=30.0))) == [
        ("high_grad_norm", 40),
        ("high_grad_norm", 60),  # in between it was as usual
    ]
    assert judged(steps(at20=dict(grad_norm=30.0))) == []  # too few steps to judge by
    assert judged(steps(at40=dict(grad_norm=30.0, skipped=True), at41=dict(grad_norm=None))) == []
    assert judged(steps(at40=dict(grad_norm=30.0)), {"high_grad_norm": EventRule(100)}) == []
    assert judged(steps(at40=dict(grad_norm=30.0)), {"high_grad_norm": EventRule(10, off=True)}) == []
    assert judged(steps(norm=0.0, at40=dict(grad_norm=30.0))) == []  # frozen until now


def test_slow_steps_are_told_once_until_they_are_over():
    slow = {f"at{number}": dict(seconds=2.0) for number in [*range(200, 300), *range(400, 420)]}
    # Intervals have 30 s: steps 1 to 30, ... The first one of slow steps only ends with their 15th, or earlier.
    found = judged(steps(count=500, **slow))
    assert [kind for kind, _ in found] == ["slow_steps"] * 2
    assert 200 <= found[0][1] <= 230 and 400 <= found[1][1] <= 430
    few = {f"at{number}": dict(seconds=2.0) for number in range(200, 203)}
    assert judged(steps(count=500, **few)) == []
    # 20 % slower is no event, and becomes none by lasting
    assert judged(steps(count=900, **{f"at{number}": dict(seconds=1.25) for number in range(200, 900)})) == []


def test_slow_steps_do_not_become_the_usual_ones():
    """Also not after more intervals than are remembered."""
    slow = {f"at{number}": dict(seconds=20.0) for number in [*range(300, 3000), *range(3300, 3400)]}
    assert [kind for kind, _ in judged(steps(seconds=5.0, count=3400, **slow))] == ["slow_steps"] * 2


@pytest.mark.sampled(2)
def test_a_hiccup_of_tiny_steps_is_no_event():
    slow = {f"at{number}": dict(seconds=0.5) for number in range(2000, 2010)}
    assert judged(steps(seconds=0.01, count=4000, **slow)) == []
    slow = {f"at{number}": dict(seconds=0.02) for number in range(20_000, 26_000)}
    ((kind, at),) = judged(steps(seconds=0.01, count=26_000, **slow))
    assert kind == "slow_steps" and at < 20_000 + 2 * 30 / 0.02


def test_steps_that_were_left_out_have_no_speed():
    out = {f"at{number}": dict(seconds=1e-4, skipped=True, grad_norm=None) for number in range(100, 200)}
    assert judged(steps(count=400, **out)) == []


def test_validations_that_get_worse():
    assert judged(validations(4, 3, 3.1, 3.2, 3.3, 3.4)) == [("validation_worse", 5)]
    assert judged(validations(4, 3, 3.1, 3.2, 3.1, 3.2, 3.3)) == []  # better in between
    assert judged(validations(4, 3, 3.1, 3.1, 3.2, None, 3.3)) == [("validation_worse", 7)]  # equal: neither
    assert judged(validations(3, 3.1, 3.0, 3.1, 3.2, 3.3, 2, 2.1, 2.2, 2.3)) == [
        ("validation_worse", 6),
        ("validation_worse", 10),
    ]
    assert judged(validations(3, 3.1), {"validation_worse": EventRule(1)}) == [("validation_worse", 2)]
    for name, worse in (("accuracy", (0.9, 0.8, 0.7, 0.6)), ("mse", (0.6, 0.7, 0.8, 0.9))):
        figure = dict(figure=(name, direction_of(name)))
        assert judged(validations(*worse, name=name), **figure) == [("validation_worse", 4)]
        assert judged(validations(*reversed(worse), name=name), **figure) == []


def told(records, rules=None, **more) -> list[tuple]:
    """(kind, facts) of each event."""
    found = []
    judge = RecordRules(rules or {}, lambda kind, message, **facts: found.append((kind, facts)), **more)
    for record in records:
        judge(record)
    return found


def even(count, **more):
    """Steps of a second each."""
    return [
        {"kind": "step", "iteration": n, "consumed_samples": n, "seconds": 1.0, **more} for n in range(1, count + 1)
    ]


def test_events_have_the_numbers_that_they_were_found_by():
    """Of a norm, a loss, a speed and a validation; exactly at its threshold only a count is an event."""
    norms = [one | dict(grad_norm=0.5) for one in even(41)]
    norms[40]["grad_norm"] = 6.0
    assert told(norms) == [("high_grad_norm", dict(iteration=41, value=6.0, median=0.5, times=12.0))]
    norms[40] |= dict(spike=1)
    assert told(norms) == [("high_grad_norm", dict(iteration=41, value=6.0, median=0.5, times=12.0, logged=False))]
    norms[40]["grad_norm"] = 5.0
    assert told(norms) == []
    for norm in (math.inf, math.nan):  # another event tells these
        assert told([*norms[:40], norms[40] | dict(grad_norm=norm)] + norms[:9]) == []
    losses = [{**one, "lm loss": 5.0 if 3 <= one["iteration"] else 4.0} for one in even(14)]
    facts = dict(iteration=12, loss=5.0, limit=4.0, steps=10)
    assert told(losses, guess=4.0) == [("loss_above_guess", facts)]
    assert told(losses, guess=4.0, warmup=2) == told(losses, guess=4.0) and told(losses, guess=4.0, warmup=5) == []
    assert told(losses, guess=5.0) == told(losses, {"loss_above_guess": EventRule(off=True)}, guess=4.0) == []
    losses[5]["skipped"] = True
    assert told(losses, guess=4.0) == [("loss_above_guess", facts | dict(iteration=13))]
    ours = dict(values=[1.0, 2.0, 3.0, 4.0], times=3, iteration=3, figure="mse")
    worse = validations(1.0, 2.0, 3.0, 4.0, name="mse")
    figure = dict(figure=("mse", direction_of("mse")))
    assert told(worse, **figure) == [("validation_worse", ours)]
    assert told([one | dict(split="test") for one in worse], **figure) == []
    assert told([one | dict(kind="eval_begin") for one in worse], **figure) == []
    assert told(worse, {"validation_worse": EventRule(off=True)}, **figure) == told(worse) == []
    assert told(validations(1.0, 2.0, math.nan, 3.0, 4.0, name="mse"), **figure) == [
        ("validation_worse", ours | dict(iteration=4))
    ]


@pytest.mark.parametrize("seconds, a_window", [(1.0, 30), (3.0, 10), (2.9, 11), (30.0, 10), (60.0, 10)])
def test_speeds_are_of_ten_steps_and_half_a_minute_at_least(seconds, a_window):
    """The fifth window is the first that the next one is compared with; a window at just the threshold is not slow."""
    of = lambda rate, windows=1: even(windows * a_window, seconds=seconds, tokens_per_second=rate)
    usual = of(100.0, 5)
    [(kind, facts)] = told(usual + of(50.0))
    assert kind == "slow_steps"
    wanted = dict(iteration=a_window, tokens_per_second=50.0, median=100.0, share=0.5, steps=a_window)
    assert facts == pytest.approx(wanted)
    assert told(of(100.0, 4) + of(50.0)) == told(usual + of(50.0)[:-1]) == told(usual + of(71.0)) == []
    assert told(usual + of(50.0), {"slow_steps": EventRule(0.7, seconds=30, off=True)}) == []
    left_out = [one | dict(skipped=True) for one in of(1.0, 9)]
    assert told(usual + left_out) == told(usual + [one | dict(tokens_per_second=None) for one in left_out]) == []
    halves = [
        dict(one, seconds=seconds * (1 + n % 2), tokens_per_second=100.0 / (1 + n % 2)) for n, one in enumerate(of(1.0))
    ]
    if a_window == 10:  # the rate of a window is its tokens by its seconds, not the mean of its rates
        assert told(usual + halves, {"slow_steps": EventRule(0.66, seconds=30)}) == []
        assert [one for one, _ in told(usual + halves, {"slow_steps": EventRule(0.67, seconds=30)})] == ["slow_steps"]


def test_the_message_has_the_figures(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    rules = RecordRules({}, log.record, guess=math.log(64))
    for record in [*steps(count=39), *steps(count=60, loss=5.0)[39:], *validations(1, 2, 3, 4)]:
        rules(record)
    loss, worse = read_events(tmp_path)
    assert loss["message"].startswith("the lm loss of each of the last 10 steps was above 4.159, which is ln(64)")
    assert (loss["iteration"], loss["loss"], loss["steps"]) == (49, 5.0, 10)
    assert worse["values"] == [1, 2, 3, 4] and "3 times in a row, up to iteration 3: 1, 2, 3, 4" in worse["message"]


def test_a_file_of_rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("slow_steps: {threshold: 0.5, level: error}\nhigh_grad_norm: 20\nsave: off\nno_step: on\n")
    rules = read_rules(str(path))
    assert rules == {
        "slow_steps": EventRule(0.5, seconds=30, level="error"),
        "high_grad_norm": EventRule(20),
        "save": EventRule(off=True),
        "no_step": DEFAULTS["no_step"],
    }
    log = EventLog(tmp_path / "events.jsonl")
    log.rules = rules
    log.record("save", "not wanted")
    log.record("slow_steps", "urgent")
    assert [(event["event"], event["level"]) for event in read_events(tmp_path)] == [("slow_steps", "error")]
    path.write_text("")
    assert read_rules(str(path)) == read_rules(None) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_the_level_of_the_users_rule_counts_before_that_of_the_call_and_of_the_kind(kind):
    heard = []
    log = EventLog(listeners=[lambda event: heard.append(event["level"])])
    for rule, call in itertools.product((None, *LEVELS), (None, *LEVELS)):
        log.rules = {kind: EventRule(level=rule)}
        log.record(kind, "something", level=call)
        assert heard[-1] == (rule or call or KINDS[kind].level)
    log.rules = {}
    log.record(kind, "something", level="error")
    assert heard[-1] == "error"


@pytest.mark.parametrize(
    "text, words",
    [
        ("slow_step: 0.5", "slow_step: there is no such kind of event; did you mean slow_steps?"),
        ("slow_steps: {treshold: 0.5}", "slow_steps: it has no treshold; did you mean threshold?"),
        ("slow_steps: fast", "slow_steps: threshold 'fast' must be a number above 0"),
        ("slow_steps: -1", "slow_steps: threshold -1 must be a number above 0"),
        ("slow_steps: {level: fatal}", "slow_steps: level 'fatal' must be one of info, warning, error"),
        ("save: 3", "save: it has no threshold: on, off, or {level: error}"),
        ("high_grad_norm: {seconds: 3}", "high_grad_norm: it has no seconds"),
        ("- slow_steps", "it must be a table"),
        ("a: b: c", "not valid YAML"),
    ],
)
def test_a_wrong_rule_is_named(text, words, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as error:
        read_rules(str(path))
    assert words in str(error.value) and str(path) in str(error.value)


def test_defaults_are_of_known_kinds():
    assert DEFAULTS.keys() <= KINDS.keys()
