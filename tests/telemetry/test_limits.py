# SPDX-License-Identifier: Apache-2.0
"""Figures exactly at a threshold, the first of equal ones, and the last of too many."""

import errno
import json
import math
import random
import re
import statistics
import threading
import urllib.error
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.errors import SettingsError
from megatron.settings.schema import Logging
from megatron.telemetry import (
    console,
    curves,
    figures,
    heat_map,
    host_memory,
    lanes_drawing,
    memory,
    metrics,
    notify,
    peak_flops,
    prometheus,
    rank_times,
    report_compare,
    report_facts,
    run_folder,
    stragglers,
    tail,
    timers,
)
from megatron.telemetry import history as history_module
from megatron.telemetry.curves import extremes
from megatron.telemetry.dashboard.runs import Runs, WatchedRun
from megatron.telemetry.directions import LARGER, SMALLER, direction_of
from megatron.telemetry.event_rules import (
    ABOVE,
    DEFAULTS,
    EARLIER,
    ENOUGH,
    INTERVAL,
    EventRule,
    RecordRules,
    read_rules,
    rule_of,
)
from megatron.telemetry.events import KINDS
from megatron.telemetry.history import History
from megatron.telemetry.lanes import COMPUTE, GATHER, RECEIVE, SEND, Bar
from megatron.telemetry.log_lines import _fitted
from megatron.telemetry.memory import MemoryUse, memory_line
from megatron.telemetry.run_folder import last_saved
from megatron.telemetry.step_metrics import Interval, RunSizes, StepMetrics
from megatron.telemetry.stragglers import LEAST, Peers, StragglerDetector, WindowRule, _large, slow_ranks


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


@pytest.mark.parametrize("rate, told", [(141.0, False), (139.0, True)])
def test_the_usual_rate_is_the_median_of_unequal_ones(rate, told):
    rates = [100.0, 900.0, 200.0, 300.0, 150.0]  # the median is 200, the mean 330
    assert len(rates) == EARLIER and DEFAULTS["slow_steps"].threshold == 0.7
    steps = [speed(one) for one in rates for _ in range(INTERVAL)]
    assert events(steps + [speed(rate)] * INTERVAL) == [("slow_steps", len(steps) + INTERVAL)] * told


@pytest.mark.parametrize("name, pause", [("runs", 5.0), ("s3://a/b", 10.0)])
def test_new_runs_are_searched_after_a_pause(name, pause):
    watched, searched = Runs([]), []
    watched.names, watched._search = [name], lambda: bool(searched.append(now))
    for now in (100.0, 99.0 + pause, 100.0 + pause, 100.5 + pause, 100.0 + 2 * pause):
        assert not watched.refresh(now)
    assert searched == [100.0, 100.0 + pause, 100.0 + 2 * pause]


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


# ---- what is measured ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: clock.now)
    return clock


def test_a_stop_counts_in_the_wait_in_which_it_began(clock):
    """Not one that began before, or in another part."""
    times = rank_times.HostTimes(waits=False)
    times.usage.close()
    for part, since, counted in (("waiting", 2.0, True), ("waiting", 0.5, False), ("forward", 2.0, False)):
        clock.now = 1.0
        times.enter(part)
        times.stopped = 0.0
        times.was_stopped(since, 3.0)
        times.leave()
        assert times.stopped == 3.0 * counted, (part, since)


def test_time_of_another_thread_counts_and_that_of_what_does_not_count_does_not(monkeypatch):
    """Seconds (on a core, in the queue): of the thread itself, of a helper, without those of a save inside of another."""
    times = rank_times.HostTimes(waits=False)
    times.usage.close()
    now = SimpleNamespace(at=(10.0, 4.0))
    monkeypatch.setattr(times.usage, "read", lambda: now.at)
    times.host_times()
    now.at = (13.0, 5.0)
    times.add_host_times((2.0, 0.5))
    times.exclude_host_time(True)
    now.at = (14.0, 5.0)
    times.exclude_host_time(True)
    now.at = (20.0, 7.0)
    times.exclude_host_time(False)
    now.at = (21.0, 7.5)
    times.exclude_host_time(False)
    now.at = (22.0, 8.0)
    assert times.host_times() == {"cpu": 2.0 + 3.0 + 1.0, "queue": 0.5 + 1.0 + 0.5}
    assert times.host_times() == {"cpu": 0.0, "queue": 0.0}


@pytest.mark.parametrize("text, queue", [(b"7 2500000000 3", 2.5), (b"7", 0.0), (b"7 x 3", 0.0)])
def test_the_queue_of_a_thread_is_in_seconds(text, queue, monkeypatch):
    """Linux says nanoseconds."""
    usage = rank_times.ThreadUsage()
    usage.close()
    monkeypatch.setattr(rank_times.os, "pread", lambda file, size, at: text)
    usage.file = 99
    assert usage.read()[1] == queue


@pytest.mark.parametrize(
    "now, most, use", [(3, 5, (3, 5)), (0, 5, (5, 5)), (3, 0, (3, 7 * 1024)), (0, 0, (7168, 7168))]
)
def test_memory_where_the_system_does_not_report_it(now, most, use, monkeypatch):
    """The peak for the present use, and that of getrusage, in KiB on Linux, for the peak."""
    monkeypatch.setattr(memory, "resident_memory", lambda: now)
    monkeypatch.setattr(memory, "most_resident_memory", lambda: most)
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=7))
    assert memory.memory_use("cpu") == MemoryUse(*use)


@pytest.mark.parametrize("whole", [None, 900.0])
@pytest.mark.parametrize("limits", [(), (1000.0,), (500.0, 700.0)])
def test_memory_of_a_machine_is_that_of_its_smallest_group(whole, limits, monkeypatch):
    monkeypatch.setattr(host_memory, "_meminfo", lambda name: whole)
    monkeypatch.setattr(host_memory, "_groups", lambda: [(None, limit, None) for limit in limits])
    monkeypatch.setattr(host_memory, "_left_in_groups", lambda: list(limits))
    wanted = None if whole is None else min([whole, *limits])
    assert host_memory.total_memory() == host_memory.available_memory(None) == wanted
    assert host_memory.available_memory() == (8e9 if whole is None else wanted)


@pytest.mark.parametrize("after_end", [False, True])
@pytest.mark.parametrize("fails", [0, 1, 2, 3])
def test_an_event_is_tried_as_often_as_there_are_pauses_and_once_at_the_end(fails, after_end):
    tries = []

    def send(event):
        tries.append(event)
        if len(tries) <= fails:
            raise notify.Undeliverable("busy")

    box = notify.Outbox("b", send, run="r", pauses=(0.0, 0.0))
    if after_end:
        box.hurry.set()
    most = 1 if after_end else 3
    assert (box._deliver({}), len(tries)) == ("" if fails < most else "busy", min(fails + 1, most))


@pytest.mark.parametrize(
    "number, told",
    [
        (errno.EADDRINUSE, "another process listens on this port"),
        (errno.EACCES, "ports below 1024"),
        (99, "0.0.0.0 for"),
    ],
)
def test_why_a_port_cannot_be_listened_on(number, told):
    logging = SimpleNamespace(metrics_port=80, metrics_host="h")
    error = prometheus._cannot_listen(logging, OSError(number, "no"))
    said = f"{error}"
    words = ["another process listens on this port", "ports below 1024", "0.0.0.0 for"]
    assert [word in said for word in words] == [word == told for word in words]


# ---- stages --------------------------------------------------------------------------------------------------------------


def stage_rows(first: float, second: float, more: float = 0.0, ranks: int = 4, waiting: float = 0.0) -> np.ndarray:
    """Seconds of a step of each rank of two stages, in the columns of `COLUMNS`."""
    rows = np.zeros((ranks, len(rank_times.COLUMNS)))
    own = np.repeat([first, second], ranks // 2)
    for column, values in ((rank_times.FORWARD, own), (rank_times.CPU, own), (rank_times.WAITING, waiting)):
        rows[:, rank_times.COLUMNS.index(column)] = values
    rows[:, rank_times.COLUMNS.index(rank_times.BACKWARD)] = more
    rows[:, rank_times.COLUMNS.index(rank_times.CPU)] += more
    return rows


@pytest.mark.parametrize("waiting, told", [(0.0, True), (1.5, False)])
def test_a_stage_is_slow_if_it_costs_a_tenth_of_a_step(waiting, told):
    """By a third more than before; in a step that waits for long it does not matter."""
    detector = StragglerDetector([0, 0, 1, 1])
    usual, slow = stage_rows(0.3, 0.3, waiting=waiting), stage_rows(0.3, 0.4, waiting=waiting)
    found = [finding for rows in [usual] * 12 + [slow] * 6 for finding in detector.observe(rows, 1)]
    assert [finding.kind for finding in found] == ["slow_stage"] * told
    assert all(finding.fields["stage"] == 1 and finding.rank is None for finding in found)


@pytest.mark.parametrize("slower, told", [(1.05, True), (1.15, False)])
def test_a_network_is_slow_if_ranks_compute_as_fast_as_before(slower, told):
    detector = StragglerDetector([0, 0, 1, 1])
    usual, waits = stage_rows(0.3, 0.3, waiting=0.1), stage_rows(0.3 * slower, 0.3 * slower, waiting=0.4)
    found = [finding for rows in [usual] * 12 + [waits] * 6 for finding in detector.observe(rows, 1)]
    assert [finding.kind for finding in found] == ["slow_network"] * told


def test_thresholds_are_those_that_are_documented():
    """The user's page has them in percent."""
    assert (stragglers.SHARE, stragglers.COST, stragglers.DATA_SHARE) == (0.25, 0.10, 0.25)
    assert (DEFAULTS["slow_data"].threshold, DEFAULTS["slow_rank"].threshold) == (0.25, 1.25)


# ---- numbers and lines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [figures.count, figures.size, figures.seconds])
def test_no_number_is_shown_that_is_one_of_a_larger_unit(form):
    """Around each power of ten, and where a number is rounded up to it: at most 4 digits before the unit, none lost."""
    limits = [
        0.999995,
        999.995,
        7200,
        9_999.5,
        999.95e3,
        0.99995e6,
        999.95e6,
        0.99995e9,
        0.999995e12,
        999.95e9,
        360_000,
    ]
    limits += [10.0**power for power in range(-3, 14)]
    units = dict(ms=1e-3, s=1, min=60, h=3600, days=86400, B=1, kB=1e3, MB=1e6, GB=1e9, TB=1e12, k=1e3, M=1e6, T=1e12)
    for x in sorted({limit * factor for limit in limits for factor in (1 - 1e-6, 1, 1 + 1e-6, 2.5)}):
        x = round(x) if form is figures.size and x < 1e4 else x  # bytes are whole
        text, _, unit = form(x).partition(" ")
        value = float(text.replace(",", ""))
        scale = {"B": 1e9, "": 1}.get(unit, units.get(unit)) if form is figures.count else units[unit or "B"]
        assert value * scale == pytest.approx(x, rel=6e-2, abs=0.6)
        if form is not figures.seconds and unit not in ("T", "TB", "") or unit == "ms":
            assert value < 1000, (x, text, unit)


@pytest.mark.parametrize("records, last", [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2)])
def test_loads_of_experts_at_the_end_are_those_of_the_last_tenth(records, last):
    loads = np.ones((3, records))
    loads[:, -last:] = [[0.0], [2.0], [4.0]]
    found = heat_map.imbalance("a", loads)
    assert (found.largest, found.smallest, found.idle) == (2.0, 0.0, [0])


@pytest.mark.parametrize("span", [0.0004, 0.001, 0.0099, 0.01, 0.25, 0.999, 3.0])
def test_marks_of_a_time_axis(span):
    """One to ten, at round numbers of milliseconds, each at its place."""
    scale = 500 / span
    parts = "".join(lanes_drawing._axis(span, scale, 90.0))
    lines = [float(x) for x in re.findall(r'<line x1="([\d.]+)"', parts)]
    labels = [float(x) for x in re.findall(r">([\d.e+]+) ms<", parts)]
    assert 1 <= len(labels) <= 10 and labels[0] == 0
    step = 10.0 ** math.floor(math.log10(max(1, 1000 * span)))
    assert labels == [step * n for n in range(len(labels))] and labels[-1] + step > 1000 * span
    assert lines == pytest.approx([lanes_drawing.LEFT + label / 1000 * scale for label in labels], abs=0.006)


@pytest.mark.parametrize("losses, nan", [([1.0, 2.0], 0), ([math.nan, 1.0], 1), ([math.inf], 1), ([], 0)])
def test_a_skipped_step_is_one_of_nan_if_any_loss_is_no_number(losses, nan):
    interval = Interval()
    step = StepMetrics(1, 8, 8, {}, 1e-3, skipped=True)
    interval.add(step, {str(n): loss for n, loss in enumerate(losses)}, 2.0)
    assert (interval.skipped, interval.nan, interval.advanced, interval.means, interval.seconds) == (1, nan, 0, {}, 2.0)
    interval.add(StepMetrics(2, 16, 8, {}, 1e-3), {"a": 3.0, "b": 1.0}, 1.0)
    interval.add(StepMetrics(3, 24, 8, {}, 1e-3), {"a": 4.0}, 1.0)
    assert interval.means == {"a": 3.5, "b": 1.0} and (interval.steps, interval.samples) == (3, 24)


def test_a_line_leaves_out_its_least_important_parts_one_rank_after_another():
    parts = [(rank, f"part{rank}") for rank in range(10)]
    shown = set()
    for width in range(5, 80):
        line = _fitted(parts, width)
        assert len(line) <= width
        ranks = [int(word[-1]) for word in line.split() if word[-1].isdigit() and len(word) == 5]
        assert ranks == list(range(len(ranks))) or len(ranks) > 6
        shown.add(len(ranks))
    assert {1, 2, 3, 4, 5, 6, 10} <= shown


# ---- reports -------------------------------------------------------------------------------------------------------------


def history_of(*records: dict, **run) -> History:
    history = History()
    history.add(json.dumps(record).encode() for record in (dict(kind="run", iteration=0, time="2026") | run, *records))
    return history


def test_the_peak_of_memory_is_reached_when_all_but_a_hundredth_is_used():
    used = [(1, 50), (2, 98), (3, 99), (4, 100), (5, 60)]
    history = history_of(*(dict(kind="memory", iteration=at, bytes=own * 10**9) for at, own in used), device="cuda")
    rows = dict(report_facts.memory(history))
    assert rows["peak on rank 0"] == "100.00 GB: tensors on cuda" and rows["reached"].endswith("by iteration 3")
    assert report_facts.memory(history_of()) == []


def test_sums_of_a_run_are_those_of_its_steps_and_evaluations():
    steps = [
        {"kind": "step", "iteration": n, "consumed_samples": 8 * n, "seconds": 10.0 * n, "skipped": n == 2}
        for n in (1, 2, 3)
    ]
    evals = [
        {"kind": "eval", "iteration": n, "split": "validation", "lm loss": 3.0 - n, "seconds": 70.0} for n in (1, 2)
    ]
    history = history_of(*(step | {"lm loss": 2.0} for step in steps), *evals, config=dict(model=dict(seq_length=16)))
    saves = [dict(event="save", seconds=2.0), dict(event="save", seconds=4.0), dict(event="save"), dict(event="spike")]
    assert report_facts.totals(history, saves) == {
        "iterations": "3",
        "samples": "24",
        "tokens": "384",
        "time in training steps": "0:01:00",
        "time in evaluation": "0:02:20",
        "median time of a step": "20.00 s",
        "checkpoints saved": "3, 3.00 s each",
        "skipped steps (fp16 overflow)": "1",
        "steps without a finite loss": "0",
        "last validation loss": "1.0000",
    }


def test_accounts_of_supervisors_are_added_and_small_losses_left_out():
    account = dict(wall=100.0, productive=60.0, steps=5, repeated_steps=1, restarts=1, checkpoints=2)
    events = [
        dict(event="end", source="supervisor", account=account | dict(lost=dict(startup=30.0, hang=0.03, save=0.02))),
        dict(event="end", source="supervisor", account=account | dict(lost=dict(hang=0.02, save=0.02, startup=1.0))),
        dict(event="end", source="run", account=account | dict(lost={})),
        dict(event="supervisor_lost", source="supervisor"),
    ]
    assert report_facts.supervision(events) == [
        ("supervised time", "200.00 s, in 2 parts"),
        ("steps that count", "120.00 s, 60.0%"),
        ("startup", "31.00 s, 15.5%"),
        ("hang", "50.00 ms, 0.0%"),
        ("steps", "10"),
        ("repeated steps", "2"),
        ("restarts", "2"),
        ("checkpoints", "4"),
        ("no account", "of 1 supervisor that was killed"),
    ]
    assert report_facts.supervision(events[2:3]) == []


def test_the_line_below_the_title():
    config = dict(model=dict(num_layers=2, hidden_size=8, seq_length=16))
    mesh = dict(tp=2, replicate=2, shard=3, pp=1, ep=2)
    run = dict(parameters=12345, config=config, mesh=mesh, time="2026-01-02T03:04:05")
    line = report_facts.subtitle(history_of(**run))
    words = "12.3 k parameters", "2 layers of width 8, 16 tokens", "tp 2 x dp 6", "ep 2", "2026-01-02 03:04"
    assert line == " \u00b7 ".join(words)
    assert "one process" in report_facts.subtitle(history_of(mesh=dict(tp=1)))


def test_losses_of_runs_are_compared_at_the_last_step_that_all_have():
    step = lambda n, loss: {"kind": "step", "iteration": n, "consumed_samples": 8 * n, "seconds": 1.0, "lm loss": loss}
    short = history_of(*(step(n, float(n)) for n in range(1, 31)))
    long = history_of(*(step(n, 2.0 * n) for n in range(1, 51)))
    found = report_compare.final_losses(dict(a=short, b=long))
    mean = sum(range(15, 31)) / 16
    assert found == {"lm loss, step 1": [1.0, 2.0], "lm loss, mean of 16 steps to 30": [mean, 2 * mean]}
    assert report_compare.figures_of(long)["seconds"] == 50.0 and report_compare.figures_of(long)["samples"] == 400


def test_settings_that_differ_come_ahead_of_places():
    runs = {
        name: history_of(
            commit="c", config=dict(a=dict(seed=1, lr=lr, save=name), given={}, extra=dict(own=dict(x=name)))
        )
        for name, lr in (("one", 0.1), ("other", 0.2))
    }
    assert list(report_compare.differences(runs).items()) == [
        ("code commit", ["c", "c"]),
        ("--seed", ["1", "1"]),
        ("--lr", ["0.1", "0.2"]),
        ("--x", ["one", "other"]),
        ("--save", ["one", "other"]),
    ]


@pytest.mark.parametrize("kind", ["training", "validation"])
def test_runs_that_saw_the_same_samples(kind):
    def run(ledgers=(), places=(), seed=1):
        steps = [
            dict(kind="step", iteration=n, consumed_samples=n) | (dict(ledger=one) if one else {})
            for n, one in enumerate(ledgers, 1)
        ]
        evals = [
            dict(kind="eval", split="validation", iteration=n)
            | ({} if first is None else dict(first_sample=first, samples=4))
            for n, first in enumerate(places, 1)
        ]
        return history_of(*steps, *evals, config=dict(logging=dict(seed=seed)))

    said = lambda *both: report_compare.same_samples(*both)[kind].partition(":")[0]
    if kind == "training":
        cases = [("abc", "ab", "yes"), ("abc", "abd", "no"), ("abc", [None, "b"], "yes"), ("a", [], "unknown")]
        for one, other, wanted in cases:
            assert said(run(one), run(other)) == wanted
        words = report_compare.same_samples(run("abcd"), run("axyd"))["training"]
        assert words == "no: other samples in 2 of 4 steps, first in step 2"
        return
    for one, other, wanted in [
        ([0, 4], [0, 4], "yes"),
        ([0, 4], [0, 8], "no"),
        ([0], [None], "unknown"),
        ([], [0], "unknown"),
    ]:
        assert said(run(places=one), run(places=other)) == wanted
    assert said(run(places=[0]), run(places=[0], seed=2)) == "no"


@pytest.mark.parametrize("missing", [None, 1])
def test_values_are_followed_by_their_difference_from_the_first(missing):
    values = [2.5, 2.5, 2.75]
    wanted = ["2.5000", "2.5000 (the same)", "2.7500 (+0.25)"]
    if missing:
        values[0], wanted = None, ["-", "2.5000", "2.7500"]
    assert report_compare._against_first(values) == wanted


@pytest.mark.parametrize("seed", range(4))
def test_each_line_of_a_file_that_grows_is_read_once(seed, tmp_path, monkeypatch):
    """Read in pieces of any size, while lines are half written; from the start again where the file became another one."""
    draw, path, written, found = random.Random(seed), tmp_path / "a.jsonl", b"", []
    monkeypatch.setattr(tail, "PART", 80)  # more than two lines
    reader = tail.Tail(path)
    assert reader.read() == ([], False)
    for turn in range(60):
        more = b"".join(b"%d" % draw.randrange(10 ** draw.randint(1, 9)) + b"\n" * draw.randint(0, 1) for _ in range(4))
        if turn in (20, 40):
            written = b"anew %d\n" % turn
            path.write_bytes(written)
        written += more if len(written) - written.rfind(b"\n") < 12 else b"\n"
        path.write_bytes(written)
        for _ in range(draw.randint(1, 30)):
            lines, again = reader.read()
            found = lines if again else found + lines
        while lines or again:
            lines, again = reader.read()
            found = lines if again else found + lines
        whole = written[: written.rfind(b"\n") + 1].splitlines(keepends=True)
        assert found == [line for line in whole if line.strip()]


def test_a_file_that_did_not_change_is_not_read_again(tmp_path, monkeypatch):
    path, reads = tmp_path / "a", []
    path.write_bytes(b"one\ntwo\nhal")
    reader = tail.Tail(path)
    read = reader._text_from
    reader._text_from = lambda *where: reads.append(where) or read(*where)
    assert reader.read() == ([b"one\n", b"two\n"], False) and len(reads) == 1
    assert reader.read() == ([], False) and len(reads) == 1
    path.write_bytes(b"one\ntwo\nhalf\n")
    assert reader.read() == ([b"half\n"], False) and reader.read() == ([], False)


# ---- sequences of steps --------------------------------------------------------------------------------------------------


def test_losses_above_a_guess_count_from_the_last_one_below():
    limit = int(DEFAULTS["loss_above_guess"].threshold)
    losses = ([5.0] * (limit - 1) + [3.0]) * 5 + [4.0] * limit + [5.0] * limit  # as large as a guess is none above
    assert events([{"lm loss": loss} for loss in losses]) == [("loss_above_guess", len(losses))]


def test_a_rank_is_calm_again_after_windows_in_a_row():
    calm = iter([True, True, False, True, True, True])
    slow = stragglers._Slow("r", lambda window: next(calm), 3)
    assert [slow.recovered(None) for _ in range(6)] == [False] * 5 + [True]


@pytest.mark.parametrize("queue, told", [(0.0, 1.9), (1.9, None)])
def test_a_pulse_that_comes_late_is_a_stop_unless_it_waited_for_a_core(queue, told, monkeypatch):
    times, stops = SimpleNamespace(was_stopped=lambda since, seconds: stops.append((since, seconds))), []
    pulse = rank_times._Pulse(times)
    now = iter([10.0, 12.0])
    usage = iter([(0.0, 5.0), (0.0, 5.0 + queue)])
    monkeypatch.setattr(
        rank_times, "ThreadUsage", lambda: SimpleNamespace(read=lambda: next(usage), close=lambda: None)
    )
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(rank_times.time, "sleep", lambda seconds: setattr(pulse, "over", True))
    pulse._look()
    assert stops == ([] if told is None else [(10.0 + rank_times.PULSE, pytest.approx(told))])


def test_figures_of_a_task_begin_with_the_one_that_selects_which_says_its_direction():
    evals = [dict(kind="eval", split="validation", iteration=1, accuracy=0.5, f1=0.4, odd=2.0, seconds=1.0)]
    for smaller in (True, False, None):
        history = history_of(*evals, criterion=dict(figure="odd", smaller_is_better=smaller))
        assert history.figures == ["odd", "accuracy", "f1"]
        assert history.direction("odd") == {True: SMALLER, False: LARGER, None: direction_of("odd")}[smaller]
        assert history.direction("accuracy") == LARGER


def test_the_last_of_several_final_evaluations_is_compared():
    final = lambda n, loss, split: {"kind": "eval", "split": split, "iteration": n, "final": True, "lm loss": loss}
    step = {"kind": "step", "iteration": 1, "consumed_samples": 1, "lm loss": 9.0}
    one = history_of(step, final(5, 3.0, "validation"), final(9, 2.0, "validation"), final(9, 4.0, "test"))
    other = history_of(step, final(7, 2.5, "validation"))
    found = report_compare.final_losses(dict(one=one, other=other))
    assert found["lm loss, final validation"] == [2.0, 2.5] and found["lm loss, final test"] == [4.0, None]


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 5, 9, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 20])
def test_a_running_mean_is_that_of_a_plain_loop(count, window):
    """Over so many steps up to each; fewer at the start."""
    values = np.random.default_rng(count).normal(size=count)
    found = curves.smoothed(values, window)
    if window < 2 or count < 2:
        assert found is None
        return
    wanted = [statistics.fmean(values[max(0, place - window + 1) : place + 1].tolist()) for place in range(count)]
    assert found.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("save", [True, False])
def test_progress_and_epochs_are_in_tokens_samples_and_seconds(save, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "now", lambda: "now")
    now = SimpleNamespace(at=0.0)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now.at)
    logging = Logging(log_progress=True, log_interval=100)
    sizes = RunSizes(100, 16, flops_per_token=3.0, ranks=2)
    with metrics.Metrics(logging, sizes, save=str(tmp_path) if save else None) as made:
        written = []
        monkeypatch.setattr(made, "_write", written.append)
        made.start()
        for n, seconds in ((1, 2.0), (2, 6.0)):
            now.at += seconds
            made.record(StepMetrics(n, 8 * n, 8, {"lm loss": 4.0 - n}, 1e-3))
        made.record_epoch(1, 2)
        epoch = next(record for record in written if record["kind"] == "epoch")
        assert (epoch["samples_per_second"], epoch["lm loss"], epoch["steps"]) == (2.0, 2.5, 2)
        saved = []
        if save:
            monkeypatch.setattr(made.progress, "saved", lambda *given: saved.append(given))
        made.record_save(2, 16, False)
        assert saved == [(2, 16 * 16 * 3.0, 16 * 16, False)] * save


PUBLISHED = {  # dense TFLOP/s of the vendors' data sheets: name in the driver's words -> (fp8, bf16, fp32)
    "NVIDIA H100 80GB HBM3": (1978.9, 989.4, 66.9),
    "NVIDIA H200": (1978.9, 989.4, 66.9),
    "NVIDIA GH200 480GB": (1978.9, 989.4, 66.9),
    "NVIDIA H800": (1978.9, 989.4, 66.9),
    "NVIDIA H100 PCIe": (1513, 756.5, 51.2),
    "NVIDIA H100 NVL": (1671, 835.5, 60),
    "NVIDIA H20": (296, 148, 44),
    "NVIDIA B200": (4500, 2250, 75),
    "NVIDIA GB200": (5000, 2500, 80),
    "NVIDIA A100-SXM4-80GB": (None, 312, 19.5),
    "NVIDIA A800-SXM4-80GB": (None, 312, 19.5),
    "NVIDIA A40": (None, 149.7, 37.4),
    "NVIDIA A30": (None, 165, 10.3),
    "NVIDIA A10": (None, 125, 31.2),
    "NVIDIA RTX A6000": (None, 154.8, 38.7),
    "NVIDIA L40S": (733, 362, 91.6),
    "NVIDIA L40": (None, 181, 90.5),
    "NVIDIA L4": (242, 121, 30.3),
    "Tesla V100-SXM2-32GB": (None, None, 15.7),
    "Tesla T4": (None, None, 8.1),
    "NVIDIA GeForce RTX 5090": (None, 209.5, 104.8),
    "NVIDIA GeForce RTX 4090": (330.3, 165.2, 82.6),
    "NVIDIA GeForce RTX 3090": (None, 71, 35.6),
    "AMD Instinct MI300X": (2614.9, 1307.4, 163.4),
}


@pytest.mark.parametrize("device", PUBLISHED)
def test_peaks_are_those_that_vendors_publish(device):
    for precision, peak in zip(("fp8", "bf16", "fp32"), PUBLISHED[device], strict=True):
        assert peak_flops.peak_flops(device, precision) == (peak and pytest.approx(peak * 1e12))
    half = dict(V100=125, T4=65)
    wanted = next((peak for name, peak in half.items() if name in device), PUBLISHED[device][1])
    assert peak_flops.peak_flops(device, "fp16") == pytest.approx(wanted * 1e12)
    assert peak_flops.peak_flops(device, "int3") is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_may_say_what_its_kind_has(kind, tmp_path):
    """A level, and the limits that have a default; what the file does not say is the default."""
    path, default = tmp_path / "rules.yaml", DEFAULTS.get(kind, EventRule())
    assert rule_of({}, kind) == default and rule_of({kind: EventRule(7.0)}, kind) == EventRule(7.0)
    for name in ("threshold", "seconds", "bytes_per_second", "level", "off", "thresholds"):
        value = "error" if name == "level" else 5
        path.write_text(f'{kind}: {{"{name}": {value}}}\n')
        if name == "level" or getattr(default, name, None) is not None and name != "off":
            assert read_rules(str(path)) == {kind: replace(default, **{name: value})}
        else:
            with pytest.raises(SettingsError, match=f"{kind}: it has no {name}"):
                read_rules(str(path))
    for word, off in (("on", False), ("off", True)):
        path.write_text(f"{kind}: {word}\n")
        assert read_rules(str(path)) == {kind: replace(default, off=off)}


def test_a_file_of_rules_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SettingsError, match="--event-rules .*: cannot be read: Is a directory"):
        read_rules(str(tmp_path))
    with pytest.raises(SettingsError, match="--event-rules .*none.yaml: cannot be read: No such file"):
        read_rules(str(tmp_path / "none.yaml"))


# ---- reports and lists of runs -------------------------------------------------------------------------------------------


EVALUATIONS = [
    (0.5, {"result": "0.5"}),
    (1234, {"result": "1,234"}),
    (True, {"result": "True"}),
    ("words", {"result": "words"}),
    ([1, 2.5], {"result": "1 2.5"}),
    ([], {"result": ""}),
    ({}, {}),
    (
        {"a": {"b": 1234, "perplexity": 1234.56}, "c": None},
        {"a / b": "1,234", "a / perplexity": "1,234.6", "c": "None"},
    ),
    ([{"x": 1e-7}, [1, 2], 3], {"1 / x": "1e-07", "2": "1 2", "3": "3"}),
    ({"a": [[1, 2], {"b": "c"}]}, {"a / 1": "1 2", "a / 2 / b": "c"}),
]


@pytest.mark.parametrize("value, rows", EVALUATIONS)
def test_evaluations_of_any_shape_are_rows(value, rows):
    assert report_facts.rows_of(value) == rows
    inside = {f"task / {name}" if name != "result" else "task": row for name, row in rows.items()}
    assert report_facts.rows_of({"task": value}) == inside


def test_settings_of_a_run_are_those_with_a_value_a_recipes_own_first():
    """What is no group of settings is left out, and a group without values."""
    model = dict(num_layers=2, ffn_hidden_size=None, layernorm_epsilon=1e-5, split=[9, 1], swiglu=False)
    config = dict(
        model=model, empty=dict(seed=None), given=dict(model=["num_layers"]), version=3, extra=dict(own=dict(x="y"))
    )
    found = report_facts.settings(history_of(config=config))
    wanted = {"--num-layers": "2", "--layernorm-epsilon": "1e-05", "--split": "9 1", "--swiglu": "False"}
    assert found == {"own": {"--x": "y"}, "model": wanted} and list(found) == ["own", "model"]
    assert report_facts.settings(history_of()) == report_facts.settings(history_of(config=dict(extra=None))) == {}


@pytest.mark.parametrize(
    "losses, first", [({1: 4.0, 2: 3.0}, 4.0), ({2: 3.0}, None), ({1: math.nan, 2: 3.0}, None), ({1: math.inf}, None)]
)
def test_the_loss_of_the_first_step_is_that_of_step_1(losses, first):
    """A run that was resumed has none, and one that failed there no number."""
    steps = (
        {"kind": "step", "iteration": n, "consumed_samples": n, "seconds": 1.0, "lm loss": loss}
        for n, loss in losses.items()
    )
    history = history_of(*steps)
    assert report_compare._at_step_1(history, "lm loss") == first
    for end in range(4):
        until = [loss for n, loss in losses.items() if n <= end and math.isfinite(loss)]
        assert report_compare._mean_until(history, "lm loss", end) == (statistics.fmean(until) if until else None)


@pytest.mark.parametrize("where", ["other/deep/m.jsonl", "runs/m.jsonl", "runs/a/other.jsonl", "runs/a/metrics.jsonl"])
@pytest.mark.parametrize("folder", ["runs/a", "runs/a/b"])
def test_metrics_beside_a_runs_folder_are_found_from_there(where, folder, tmp_path, monkeypatch):
    """By a path from the folder, so that both may be moved together; their usual place needs none."""
    metrics, run = tmp_path / "there" / where, tmp_path / "there" / folder
    metrics.parent.mkdir(parents=True)
    metrics.write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    run_folder.point_to(metrics.relative_to(tmp_path), run.relative_to(tmp_path))
    usual = metrics == run / "metrics.jsonl"
    assert (run / run_folder.POINTER).exists() == (not usual)
    (tmp_path / "there").rename(tmp_path / "moved")
    moved = run_folder.find_metrics(tmp_path / "moved" / folder)
    assert moved.resolve() == tmp_path / "moved" / where
    run_folder.point_to(tmp_path / "moved" / folder / "metrics.jsonl", tmp_path / "moved" / folder)
    assert not (tmp_path / "moved" / folder / run_folder.POINTER).exists()


STEPS = [
    {
        "kind": "step",
        "iteration": n,
        "consumed_samples": n,
        "seconds": 1.0,
        "lm loss": 5.0 - n,
        "tokens_per_second": 10.0 * n,
    }
    for n in (1, 2)
]


@pytest.mark.parametrize(
    "record, words",
    [
        (dict(), ""),
        (dict(parameters=12345), "12.3 k parameters"),
        (dict(mesh=dict(tp=1)), "1 rank"),
        (
            dict(parameters=10**9, config=dict(model=dict(num_layers=2, hidden_size=8)), mesh=dict(tp=2, replicate=3)),
            "1.0 B parameters, 2 layers of width 8, 6 ranks",
        ),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_the_list_of_runs_says_what_a_run_is_and_how_far_it_is(record, words, steps, tmp_path):
    """By its state where that is known, else by its metrics."""
    run = WatchedRun(tmp_path, tmp_path / "metrics.jsonl")
    run.id, run.name, run.error, run.version = "1", "a", "unreadable line", 4
    run.history = history_of(*STEPS[:steps], **record)
    about = run.summary()
    assert about["about"] == words
    same = dict(
        id="1", name="a", place=str(tmp_path), error="unreadable line", version=4, has_ranks=False, has_experts=False
    )
    zero = dict(warnings=0, errors=0, damaged_lines=0, slow=[], iterations=None, seconds_left=None, checkpoint_age=None)
    last = dict(iteration=2, loss=3.0, tokens_per_second=20.0) if steps else dict(loss=None, tokens_per_second=None)
    assert about.items() >= (same | last).items() and {name: about[name] for name in zero} == zero
    known = dict(
        warnings=1, errors=2, slow=[3], iterations=9, seconds_left=8.0, checkpoint_age=7.0, tokens_per_second=55.0
    )
    run.state = known | dict(state="hung", why="no step")
    about = run.summary()
    assert {name: about[name] for name in run.state} == run.state
    run.state = dict(state="unreadable", why="a damaged file")
    about = run.summary()
    assert about["tokens_per_second"] == last["tokens_per_second"] and about["state"] != "unreadable"
    assert about["why"] == ("a damaged file" if about["state"] else "")


@pytest.mark.parametrize("seed", range(6))
def test_columns_are_those_of_a_plain_list_of_records(seed, monkeypatch):
    """While rows are added and taken back: numbers, texts, what some rows lack, and columns that come later. Values that
    are no numbers and no texts, or both, have no column, and a text among numbers of earlier rows is left out.
    """
    monkeypatch.setattr(history_module, "START", 2)
    monkeypatch.setattr(history_module, "BATCH", 3)
    draw, table, plain, at = random.Random(seed), history_module.Columns(), [], 0
    values = dict(x=[1.5, 0, math.nan, None, True], text=["a", "b", None], lists=[[1]], kind=["step"], seen=[3])
    own = {"iteration": int, "x": float, "text": str, "seen": float}
    for turn in range(12):
        if plain and draw.random() < 0.3:
            at = draw.randint(0, len(plain) + 1)
            table.drop_after(at)
            plain = plain[:at]
        else:
            rows = [dict(mixed=1), dict(mixed="a"), *({} for _ in range(draw.randint(0, 3)))]
            for at, row in enumerate(rows, len(plain) + 1):
                names = [name for name in values if draw.random() < 0.7 and (name != "seen" or turn > 3)]
                row |= dict(iteration=at, **{name: draw.choice(values[name]) for name in names})
            table.extend(rows)
            plain += rows
        wanted = [
            {
                name: kind(row[name])
                for name, kind in own.items()
                if row.get(name) is not None and row[name] == row[name]
            }
            for row in plain
        ]
        assert list(table) == wanted and len(table) == len(plain)
        assert [table[n] for n in range(-len(plain), len(plain))] == wanted + wanted
        for name in ("iteration", "x", "seen", "nowhere"):
            column = [row.get(name, math.nan) for row in wanted]
            assert np.array_equal(table[name].astype(float), np.array(column, float), equal_nan=True)
        assert "kind" not in table.names and "mixed" not in table.names and "lists" not in table.names
        finite = [row["x"] for row in wanted if "x" in row]
        assert table.known("x").tolist() == finite and table.known("nowhere").tolist() == []
    table.extend([dict(iteration=len(plain) + 1, x="text", seen=None, late=None, text=1)])
    table.extend([dict(iteration=len(plain) + 2, late="a")])
    assert table[-2] == dict(iteration=len(plain) + 1) and table[-1] == dict(iteration=len(plain) + 2, late="a")


# ---- terminals and pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bar", [False, True])
@pytest.mark.parametrize(
    "parts", [["a"], ["a", "b\n"], ["a\nb"], ["a\n", "\n"], ["", "a\nb\nc", "d\n"], ["a\n\nb", "\n"]]
)
def test_whole_lines_come_above_the_bar_and_halves_wait(parts, bar):
    """The bar is taken away and drawn again around them, and left alone while a line is incomplete."""
    seen = []
    stream = SimpleNamespace(write=lambda text: seen.append(text) or len(text), flush=lambda: seen.append("flush"))
    drawn = SimpleNamespace(clear=lambda: seen.append("clear"), refresh=lambda: seen.append("refresh"))
    made = console._AboveTheBar(SimpleNamespace(_lock=threading.RLock(), _bar=drawn if bar else None), stream)
    wanted, half = [], ""
    for part in parts:
        assert made.write(part) == len(part)
        *lines, half = (half + part).split("\n")
        if lines:
            whole = "".join(f"{line}\n" for line in lines)
            wanted += ["clear"] * bar + [whole, "flush"] + ["refresh"] * bar
        assert seen == wanted
    made.finish()
    made.finish()
    assert [one for one in seen[len(wanted) :] if one] == [half] * bool(half)


def test_rows_of_a_picture_of_lanes_follow_each_other_on_one_axis():
    """Ranks in their order, their lanes below each other without overlap, and all times from the first bar's start."""
    draw = lanes_drawing
    bars = [Bar(COMPUTE, "F0", 0.5, 0.9, 0.9), Bar(GATHER, "gather", 0.6, 0.7, 0.8), Bar(SEND, "send", 0.9, 0.9, 0.9)]
    later = [Bar(COMPUTE, "update", 0.0, 1.0, 1.0), Bar(RECEIVE, "receive", 0.25, 0.5, 0.5)]
    ranks = [draw.RankLanes(0, (3, 4), 10**9, bars), draw.RankLanes(2, (3, 4), 2 * 10**9, later)]
    text = draw.picture(ranks)
    rows = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="(\d+)" class="row"/>', text)
    y, wanted = float(draw.HEAD), []
    for own in ranks:
        lanes = sorted({bar.lane for bar in own.bars}, key=draw.LANES.index)
        for lane in lanes:
            height = draw.TALL if lane == COMPUTE else draw.LOW
            wanted.append((draw.LEFT, y, draw.WIDTH - draw.LEFT - draw.RIGHT, height - 2))
            y += height
        y += draw.GAP
    assert [tuple(map(float, row)) for row in rows] == wanted and f'viewBox="0 0 {draw.WIDTH} {y + 24:g}"' in text
    scale = (draw.WIDTH - draw.LEFT - draw.RIGHT) / 1.5  # from 0.5 to 2.0 seconds
    boxes = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="\d+" (?:fill|class)="[^"]+"[^/]*?><title>', text
    )
    starts = {0: 0.0, 2: 0.5}  # of time 0.5 of rank 0, and time 0 of rank 2
    places = [
        (draw.LEFT + (starts[own.rank] + bar.start - own.bars[0].start) * scale)
        for own in ranks
        for bar in sorted(own.bars, key=lambda bar: draw.LANES.index(bar.lane))
    ]
    found = [float(x) for x, _, _ in boxes]
    waits = [draw.LEFT + 0.2 * scale]  # of the gather, from 0.7
    assert sorted(found) == pytest.approx(sorted(places + waits), abs=0.006)
    named = re.findall(r'y="([\d.]+)" text-anchor="end">([^<]+)<', text)
    heights = [draw.TALL, draw.LOW, draw.LOW, draw.TALL, draw.LOW]
    assert named == [
        (str(row[1] + tall - 5), name) for row, tall, (_, name) in zip(wanted, heights, named, strict=True)
    ]
    assert [name for _, name in named if name.startswith("rank")] == ["rank 0", "rank 2"]
    assert sorted(re.findall(r">waits ([\d.]+) ms", text)) == ["0.0", "0.0", "100.0"] and "iterations 3 to 4:" in text


@pytest.mark.parametrize(
    "data, part", [(0.0, "forward"), (0.05, "backward"), (0.1, "backward"), (0.1001, "data"), (0.2, "data")]
)
def test_a_rank_that_is_alone_waits_for_data_if_that_is_more_than_half(data, part):
    """Else its longest part is named; a rank with peers is slow where it exceeds them most."""
    parts = dict.fromkeys(rank_times.OWN, 0.001) | dict(forward=0.03, backward=0.02 if data == 0 else 0.06)
    others = dict(parts)
    alone = StragglerDetector([0, 1])
    assert alone._part(0, parts | dict(data=others["data"] + data), others, 0.2) == part
    peers = StragglerDetector([0, 0])
    for name in rank_times.OWN:
        assert (
            peers._part(
                0, parts | {name: parts[name] + 0.01, "data": parts["data"] + 0.01 * (name == "data")}, others, 0.2
            )
            == name
        )
