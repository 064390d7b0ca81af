# SPDX-License-Identifier: Apache-2.0
"""The times of a rank: each moment counts in one part, waits are separate, and a device is never waited for."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from megatron.mpu import collectives
from megatron.mpu.mesh import Mesh
from megatron.telemetry import rank_times
from megatron.telemetry.phases import PHASES, phase
from megatron.telemetry.rank_times import COLUMNS, PART_OF, PARTS, DeviceTimes, HostTimes, RankTimes

INNER = {"passes", "gather", "partial", "norm", "scale", "inner", "copy"}  # around or inside of other phases


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` passes time, which otherwise stands still."""
    now = [100.0]
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def own(times: RankTimes) -> dict[str, float]:
    """The parts that took time."""
    return {part: seconds for part, seconds in times.take().items() if seconds and part in PARTS}


def test_every_phase_has_a_part():
    assert PART_OF.keys() | INNER == PHASES.keys() and not PART_OF.keys() & INNER


def test_a_moment_counts_in_the_innermost_part(clock):
    times = HostTimes(waits=False)
    arrives = SimpleNamespace(wait=lambda: clock(32), is_completed=lambda: True)
    with RankTimes.measuring(times):
        clock(1)
        with phase("data"):
            clock(2)
        with phase("F"):
            clock(4)
            with rank_times.waiting():
                clock(8)
            clock(16)
            rank_times.measured(arrives).wait()
        with phase("receive B"):
            clock(64)
        with phase("reduce"), phase("norm"):
            clock(128)
        clock(256)
        assert own(times) == dict(data=2, forward=20, update=128, other=257, waiting=104)
        clock(1)
        assert own(times) == dict(other=1)
    assert rank_times.measured(arrives) is arrives and rank_times.span_of("F") is None


def test_evaluations_and_saves_do_not_count(clock):
    times = HostTimes(waits=False)
    with RankTimes.measuring(times):
        for name in ("evaluate", "save"):
            with phase(name):
                clock(5)
                with phase("F"), rank_times.waiting():
                    clock(7)
                with phase("save"):
                    clock(9)
            clock(1)
        with phase("F"):
            clock(3)
        assert own(times) == dict(other=2, forward=3)


def test_cpu_time_is_that_of_computing(monkeypatch):
    usage = [0.0, 0.0]
    monkeypatch.setattr(rank_times.ThreadUsage, "read", lambda self: tuple(usage))

    def use(cpu, queue):
        usage[0] += cpu
        usage[1] += queue

    times = HostTimes(waits=False)
    with RankTimes.measuring(times):
        with phase("F"):
            use(1, 10)
        with phase("data"):
            use(2, 20)
        with phase("evaluate"):
            use(4, 40)
            with phase("data"):
                use(8, 80)
            use(16, 160)
        with phase("B"):
            use(32, 320)
        taken = times.take()
        assert (taken["cpu"], taken["queue"]) == (33, 330)
        use(64, 640)
        taken = times.take()
        assert (taken["cpu"], taken["queue"]) == (64, 640)


def test_the_real_clocks(monkeypatch):
    """Computing takes CPU time, sleeping does not."""
    times = HostTimes(waits=False)
    with RankTimes.measuring(times):
        with phase("F"):
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                pass
        with phase("B"):
            time.sleep(0.05)
        taken = times.take()
    assert list(taken) == list(COLUMNS)
    assert taken["forward"] >= 0.05 and taken["backward"] >= 0.05 and 0.05 <= taken["cpu"] < 0.09
    assert taken["queue"] >= 0.0


class Event:
    """An event of a device whose time passes as the test says; reading one that has not passed is a mistake."""

    now, made = 0.0, 0

    def __init__(self):
        Event.made += 1

    def record(self):
        self.at = Event.now

    def synchronize(self):
        assert self.at <= Event.passed, "the host would wait for the device"

    def elapsed_time(self, end):
        assert max(self.at, end.at) <= Event.passed, "an event was read that has not passed"
        return 1000 * (end.at - self.at)


def test_a_device_is_measured_by_events_that_are_read_two_steps_later():
    Event.now, Event.made, Event.passed = 0.0, 0, -1.0
    times, taken = DeviceTimes(Event), []
    with RankTimes.measuring(times):
        for step in range(1, 21):
            Event.passed = 100.0 * (step - 2)  # all of the steps but the last one have passed on the device
            for name, seconds in (("data", 1), ("F", 2), ("receive B", 3), ("B", 4 * step)):
                with phase(name):
                    Event.now += seconds
            with phase("update"):
                Event.now += 5
                with rank_times.waiting():
                    Event.now += 6
            Event.now = 100.0 * step
            times.end_step()
            if step == 10:
                taken.append(own(times))
                made = Event.made
        taken.append(own(times))
    assert Event.made == made  # events are used again
    first, second = taken
    for sums, steps in ((first, range(1, 9)), (second, range(9, 19))):
        count = len(steps)
        rest = sum(100 - 17 - 4 * step for step in steps)
        expected = dict(data=count, forward=2 * count, waiting=9 * count, backward=4 * sum(steps), update=5 * count)
        assert sums == pytest.approx(expected | dict(other=rest))


def test_a_stop_in_a_wait_is_noticed_and_one_elsewhere_is_not_counted_twice():
    """A process is stopped by another one, once as it waits and once as it computes."""
    body = """
import os, sys, time
from megatron.telemetry.rank_times import HostTimes, RankTimes, span_of, waiting
times = HostTimes()
with RankTimes.measuring(times):
    for part in (waiting, lambda: span_of("F")):
        times.take()
        with waiting():
            time.sleep(0.5)
        began = time.perf_counter()
        with part():
            print(os.getpid(), flush=True)
            sys.stdin.readline()
        taken = times.take()
        print(taken["stopped"], taken["waiting"], taken["forward"], time.perf_counter() - began, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    seconds = []
    try:
        for _ in range(2):
            pid = int(child.stdout.readline())
            time.sleep(0.1)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.4)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
            child.stdin.write("\n")
            child.stdin.flush()
            seconds.append([*map(float, child.stdout.readline().split())])
    finally:
        child.kill()
        child.wait()
    (stopped, waited, _, whole), computing = seconds
    assert stopped > 0.25 and stopped + waited == pytest.approx(whole + 0.5, abs=0.05)
    assert computing[0] == 0.0 and computing[2] == pytest.approx(computing[3], abs=0.03)


def test_collectives_are_waits(run_ranks):
    def body(rank):
        mesh, times = Mesh(rank, tp=2), HostTimes()
        x = torch.ones(4)
        calls = dict(
            reduced=lambda: collectives.all_reduce(x, mesh.tp),
            gathered=lambda: collectives.all_gather(x, mesh.tp),
            scattered=lambda: collectives.reduce_scatter(x, mesh.tp),
            exchanged=lambda: collectives.all_to_all(x, mesh.tp),
            started=lambda: collectives.start_all_reduce(x, mesh.tp).wait(),
            sent=lambda: collectives.broadcast(x, mesh.tp),
            object=lambda: collectives.broadcast_object(1, mesh.tp),
            objects=lambda: collectives.all_gather_object(1, mesh.tp),
            met=lambda: collectives.barrier(mesh.tp),
        )
        seconds = {}
        with RankTimes.measuring(times):
            for name, call in calls.items():
                collectives.barrier(mesh.tp)
                times.take()
                with phase("F"):
                    if rank == 1 and name not in ("sent", "object") or rank == 0 and name in ("sent", "object"):
                        time.sleep(0.05)
                    call()
                taken = times.take()
                seconds[name] = taken["waiting"] + taken["stopped"], taken["forward"]
        return seconds

    results = run_ranks(2, body)
    for name in results[0]:
        early, late = sorted((result[name] for result in results), key=lambda seconds: seconds[1])
        assert early[0] > 0.04 and late[1] > 0.04, name  # who comes early waits, who comes late has worked
        assert early[1] < 0.04, name
