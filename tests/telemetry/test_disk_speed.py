# SPDX-License-Identifier: Apache-2.0
"""Writing of checkpoints that becomes slow: sequences of saves, and a real save whose writes are delayed."""

import random
import time

import pytest

from megatron.checkpoint import store
from megatron.checkpoint.manager import CheckpointManager
from megatron.telemetry.disk_speed import ENOUGH, DiskSpeed
from megatron.telemetry.event_rules import EventRule
from megatron.telemetry.events import EventLog, read_events, slow_now
from tests.checkpoint.test_manager import pieces_of, settings


def judged(saves, rule=None):
    """(kind, number of the save) of each event. saves: (folder, bytes, seconds)"""
    events = []
    log = EventLog(listeners=[events.append])
    log.rules = {"slow_disk": rule} if rule else {}
    speed = DiskSpeed(log)
    for number, (folder, size, seconds) in enumerate(saves, 1):
        speed.judge(folder, number, size, seconds)
    return [(one["event"], one["iteration"]) for one in events], events


def saves(*seconds, folder="runs/a", size=10**10):
    return [(folder, size, one) for one in seconds]


def test_saves_that_become_slow_are_one_event_until_they_are_over():
    noise = random.Random(1)
    usual = lambda count: [60 * noise.uniform(0.5, 2.0) for _ in range(count)]
    assert judged(saves(*usual(200)))[0] == []
    found, events = judged(saves(*usual(10), 600, 900, 600, *usual(5), 600))
    assert found == [("slow_disk", 11), ("recovered", 14), ("slow_disk", 19)]
    slow, recovered, _ = events
    assert (slow["folder"], slow["seconds"], slow["bytes"], slow["bytes_per_second"]) == (
        "runs/a",
        600,
        10**10,
        round(10**10 / 600),
    )
    assert slow["level"] == "warning" and slow["median"] > 3 * slow["bytes_per_second"]
    for words in ("iteration 11", "runs/a", "600.0 s", "10.00 GB", "16.7 MB per second"):
        assert words in slow["message"]
    assert slow_now([slow]) == ["the disk of runs/a is slow"] and slow_now([slow, recovered]) == []


def test_a_slow_disk_does_not_become_the_usual_one():
    assert judged(saves(*[60] * 10, *[600] * 100, 60))[0] == [("slow_disk", 11), ("recovered", 111)]


def test_too_few_and_short_saves_are_not_judged():
    assert judged(saves(*[60] * (ENOUGH - 1), 6000))[0] == []
    assert judged(saves(*[60] * ENOUGH, 6000))[0] == [("slow_disk", ENOUGH + 1)]
    assert judged(saves(*[0.5] * 10, 9.9))[0] == []  # below `seconds`
    assert judged(saves(*[60] * 5) + saves(600, size=10**11))[0] == []  # a larger checkpoint, as fast


def test_folders_are_judged_apart():
    mirror = saves(*[600] * 5, folder="mirror")  # always slower
    assert judged(saves(*[60] * 5) + mirror + saves(60))[0] == []
    found, events = judged(saves(*[60] * 5) + mirror + saves(600) + saves(6000, folder="mirror") + saves(60))
    assert found == [("slow_disk", 11), ("slow_disk", 12), ("recovered", 13)]
    assert slow_now(events) == ["the disk of mirror is slow"]


def test_the_rule_can_be_set():
    sequence = saves(*[60] * 5, 600)
    assert judged(sequence, EventRule(0.3, seconds=10, bytes_per_second=0, off=True))[0] == []
    assert judged(sequence, EventRule(0.05, seconds=10, bytes_per_second=0))[0] == []
    assert judged(sequence, EventRule(0.3, seconds=700, bytes_per_second=0))[0] == []
    found, (first, _) = judged(saves(60, 40), EventRule(0.3, seconds=10, bytes_per_second=200_000_000))
    assert found == [("slow_disk", 1), ("recovered", 2)] and first["median"] is None  # from the first save on


@pytest.mark.sampled(2)
@pytest.mark.parametrize("background", [False, True])
def test_a_save_whose_writes_are_slow(tmp_path, monkeypatch, background):
    log = EventLog(tmp_path / "events.jsonl")
    log.rules = {"slow_disk": EventRule(0.8, seconds=0.8, bytes_per_second=0)}
    manager = CheckpointManager(settings(tmp_path, async_save=background, keep_last=2), events=log)
    for iteration in range(1, 7):
        if iteration == 5:
            monkeypatch.setattr(
                store, "_write_all", lambda file, data, write=store._write_all: (time.sleep(0.6), write(file, data))
            )
        if iteration == 6:
            monkeypatch.undo()
        manager.save(iteration, pieces_of(iteration), {})
        manager.wait()
    manager.close()
    events = read_events(tmp_path)
    assert [(one["event"], one["iteration"]) for one in events if one["event"] != "save"] == [
        ("slow_disk", 5),
        ("recovered", 6),
    ]
    (slow,) = (one for one in events if one["event"] == "slow_disk")
    saved = [one for one in events if one["event"] == "save"]
    folder = tmp_path / "iter_0000006"
    assert slow["folder"] == str(tmp_path) and slow["bytes"] == saved[4]["bytes"] and 1.2 <= slow["seconds"] < 60
    assert saved[5]["bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
