# SPDX-License-Identifier: Apache-2.0
"""Figures exactly at a threshold, the first of equal ones, and the last of too many."""

import json
import math
import urllib.error
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.errors import SettingsError
from megatron.telemetry import notify, rank_times, timers
from megatron.telemetry.curves import extremes
from megatron.telemetry.event_rules import (
    ABOVE,
    DEFAULTS,
    EARLIER,
    ENOUGH,
    INTERVAL,
    EventRule,
    RecordRules,
    read_rules,
)
from megatron.telemetry.history import History
from megatron.telemetry.memory import MemoryUse, memory_line
from megatron.telemetry.run_folder import last_saved
from megatron.telemetry.stragglers import LEAST, Peers, WindowRule, _large, slow_ranks


def events(records, **rules) -> list[tuple[str, int]]:
    """(kind, number of the record) of each event."""
    found, at = [], 0
    judge = RecordRules(rules, lambda kind, message, **facts: found.append((kind, at)), guess=4.0)
    for at, record in enumerate(records, 1):
        judge({"kind": "step", "iteration": at, "consumed_samples": at, **record})
    return found


@pytest.mark.parametrize("norm, told", [(10.0, False), (math.nextafter(10.0, 11), True)])
def test_a_gradient_norm_of_exactly_the_threshold_is_no_event(norm, told):
    steps = [dict(grad_norm=1.0)] * ENOUGH + [dict(grad_norm=norm)]
    assert events(steps) == [("high_grad_norm", ENOUGH + 1)] * told


def test_the_first_norm_that_is_judged():
    assert events([dict(grad_norm=1.0)] * (ENOUGH - 1) + [dict(grad_norm=99.0)]) == []
    assert events([dict(grad_norm=1.0)] * ENOUGH + [dict(grad_norm=99.0)]) == [("high_grad_norm", ENOUGH + 1)]


@pytest.mark.parametrize("warmup", [0, 3, 4])
def test_the_step_that_ends_the_warm_up_does_not_count(warmup):
    found, limit = [], int(DEFAULTS["loss_above_guess"].threshold)
    judge = RecordRules({}, lambda kind, message, **facts: found.append(facts["iteration"]), guess=4.0, warmup=warmup)
    for at in range(1, 30):
        judge(dict(kind="step", iteration=at, consumed_samples=at, **{"lm loss": 5.0}))
    assert found == [warmup + limit]


def test_steps_of_two_runs_in_one_file_are_counted():
    history = History()
    lines = [json.dumps(dict(kind="step", iteration=at, time=0.0, consumed_samples=at)) for at in (1, 1, 2, 2, 3, 3, 4)]
    history.add(line.encode() for line in lines)
    assert history.interleaved == 3


def speed(rate: float) -> dict:
    """A tenth of an interval's shortest time."""
    return dict(seconds=DEFAULTS["slow_steps"].seconds / INTERVAL, tokens_per_second=rate)


@pytest.mark.parametrize("rate, told", [(70.0, False), (69.9, True)])
def test_the_first_interval_that_is_judged_and_its_threshold(rate, told):
    usual = [speed(100.0)] * INTERVAL * EARLIER
    assert events(usual + [speed(rate)] * INTERVAL) == [("slow_steps", (EARLIER + 1) * INTERVAL)] * told
    assert events(usual[INTERVAL:] + [speed(rate)] * INTERVAL) == []
    many = usual + [speed(rate)] * 40 * INTERVAL  # slow ones do not become the usual ones
    assert len(events(many + [speed(100.0)] * INTERVAL + [speed(rate)] * INTERVAL)) == 2 * told


@pytest.mark.parametrize("kind", [kind for kind, rule in DEFAULTS.items() if rule.threshold is not None])
def test_thresholds_are_above_their_least(kind, tmp_path):
    path, least = tmp_path / "rules.yaml", ABOVE.get(kind, 0)
    path.write_text(f"{kind}: {least}\n")
    with pytest.raises(SettingsError, match=f"must be a number above {least}"):
        read_rules(str(path))
    path.write_text(f"{kind}: {least + 0.001}\n")
    assert read_rules(str(path))[kind].threshold == least + 0.001 and isinstance(read_rules(str(path))[kind], EventRule)


def test_ranks_that_are_alone_on_a_stage():
    """One of several is; the only one of a run has nobody to be compared with."""
    for stages, alone in {(0,): [0], (0, 0): [0, 0], (0, 1): [1, 1], (0, 0, 1): [0, 0, 1]}.items():
        assert Peers(np.array(stages)).alone.tolist() == list(map(bool, alone))


def test_an_excess_of_exactly_its_limits():
    assert _large(np.array([LEAST, 2 * LEAST]), np.array([0.0, 0.0]), 0.25).tolist() == [False, True]
    assert _large(np.array([0.25, 0.2500001]), np.array([1.0, 1.0]), 0.25).tolist() == [False, True]
    excess, reference = np.array([[0.5, 0.5], [0.5, 0.0]]), np.ones((2, 2))
    slow, cost = slow_ranks(WindowRule(2, 2), 0.25, excess, reference, 2.0)
    assert slow.tolist() == [True, False] and cost.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("waited", [0.0, 1.0, 5.0])
def test_a_process_was_not_stopped_for_longer_than_it_waited(waited):
    times = rank_times.HostTimes(waits=False)
    times.take()
    times.sums[rank_times.WAITING], times.stopped = waited, 3.0
    taken = times.take()
    assert taken[rank_times.STOPPED] == pytest.approx(min(3.0, waited), abs=1e-3)
    assert taken[rank_times.WAITING] == pytest.approx(max(0.0, waited - 3.0), abs=1e-3)
    times.usage.close()


class Event:
    """Of a device: the time at which it was recorded. read: those that the host has waited for"""

    now, read = 0.0, []

    def record(self):
        Event.now += 1.0
        self.at = Event.now

    def synchronize(self):
        Event.read.append(self.at)

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


def test_times_of_a_device_are_in_seconds_and_read_two_steps_later():
    Event.now, Event.read = 0.0, []
    times, waits = rank_times.DeviceTimes(Event), []
    for _ in range(5):
        times.enter(rank_times.FORWARD)
        times.leave()
        times.enter(rank_times.APART)
        times.enter(rank_times.UPDATE)  # inside of what does not count
        times.leave()
        times.leave()
        times.end_step()
        waits.append(len(Event.read))
    assert waits == [0, 0, 1, 2, 3]
    taken = times.take()
    assert (taken[rank_times.FORWARD], taken[rank_times.UPDATE]) == (3.0, 0.0)


def test_parts_inside_of_what_does_not_count_do_not_count(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: clock.now)
    times = rank_times.RankTimes()
    for part in (rank_times.FORWARD, rank_times.APART, rank_times.UPDATE):
        clock.now += 1.0
        times.enter(part)
    for _ in range(3):
        clock.now += 1.0
        times.leave()
    taken = times.take()
    assert (taken[rank_times.OTHER], taken[rank_times.FORWARD], taken[rank_times.UPDATE]) == (1.0, 2.0, 0.0)


@pytest.mark.parametrize("skip", range(7))
def test_the_mean_of_a_timer_leaves_out_the_first_of_all_uses(skip, monkeypatch):
    """Also of those that it no longer remembers."""
    monkeypatch.setattr(timers, "HISTORY", 3)
    timer = timers.Timers(1)("a")
    for seconds in (9.0, 8.0, 3.0, 4.0, 5.0):
        timer.history.append(seconds)
        timer.uses += 1
    kept = [9.0, 8.0, 3.0, 4.0, 5.0][max(2, skip) :]
    assert timer.mean(skip) == pytest.approx(sum(kept) / len(kept) if kept else 0.0)


@pytest.mark.parametrize("code, again", {400: 0, 404: 0, 408: 1, 429: 1, 499: 0, 500: 1, 503: 1}.items())
def test_answers_after_which_a_webhook_is_asked_again(code, again, monkeypatch):
    def refused(request, timeout):
        raise urllib.error.HTTPError("u", code, "no", {}, None)

    monkeypatch.setattr(notify.urllib.request, "urlopen", refused)
    with pytest.raises(notify.Undeliverable) as error:
        notify.post("http://a", {})
    assert error.value.again == bool(again)


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_events_of_a_level_and_the_end_are_sent_and_all_that_were_not_are_counted(level):
    sent, lost, levels = [], [], ["info", "warning", "error"]

    def send(event):
        sent.append((event["event"], event["level"]))
        if event["event"] == "spike":
            box.dropped += 2  # as if the queue were full meanwhile
            raise notify.Undeliverable("no", again=False)

    box = notify.Outbox("b", send, run="r", level=level, lost=lambda count, why: lost.append(count), pauses=())
    for kind, own in (*(("save", own) for own in levels), ("end", "info"), ("spike", "error")):
        box(dict(event=kind, level=own, message="m"))
    box.close(60)
    assert sent == [*(("save", own) for own in levels[levels.index(level) :]), ("end", "info"), ("spike", "error")]
    assert lost == [3]


@pytest.mark.parametrize("count", [1, 2, 199, 200, 201, 400, 401])
def test_curves_are_thinned_from_too_many_points_on_and_keep_their_ends(count):
    places, values = extremes(np.arange(float(count)), np.arange(float(count)), 100)
    assert places[0] == 0 and places[-1] == count - 1 and values.tolist() == places.tolist()
    assert len(places) <= 200 and (count > 200 or len(places) == count)


def test_the_first_validation_of_an_iteration_counts():
    record = lambda value, split="validation": {"split": split, "iteration": 5, "a": value}
    curve = History(evals=[record(9.0, "test"), record(1.0), record(2.0)]).evaluation("a")
    assert (curve.x.tolist(), curve.y.tolist()) == ([5], [1.0])


def test_the_line_of_memory_is_of_the_rank_with_the_highest_peak():
    line = memory_line([MemoryUse(9 << 20, 10 << 20), MemoryUse(1 << 20, 11 << 20), MemoryUse(0, 11 << 20)], [], 5)
    assert line.startswith("[Rank 1] ") and "resident: 1.0 | max resident: 11.0" in line


def test_the_newest_checkpoint_is_the_one_of_the_highest_number(tmp_path):
    for number, whole in ((2, True), (10, True), (9, True), (11, False)):
        folder = tmp_path / f"iter_{number:07d}"
        folder.mkdir()
        if whole:
            (folder / "index.json").touch()
    assert last_saved(str(tmp_path)).iteration == 10
