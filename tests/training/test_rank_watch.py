# SPDX-License-Identifier: Apache-2.0
"""Slow ranks and slow data of real runs: processes that are stopped, datasets that sleep, passes that compute longer."""

import dataclasses
import json
import os
import re
import select
import signal
import time
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.settings.parse import parse_pretrain
from megatron.telemetry.rank_times import OWN, PARTS, RankTimes
from megatron.training import loop
from megatron.training.rank_watch import RANKS_A_RECORD, WINDOW
from megatron.training.rules import resolve

pytestmark = pytest.mark.sampled(10)

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --device cpu --num-workers 0 --log-interval 1000 "
)
FIRST = 12  # the step from which something is wrong: the first window does not count, one is quiet


class Disturbance:
    """Something that goes wrong on some ranks from a step on."""

    def __init__(self, ranks, first=FIRST, last=10**6):
        self.ranks, self.first, self.last = ranks, first, last

    def begins(self, run) -> None:
        """Called before each disturbed step."""

    def ends(self) -> None:
        """Called once after the last step of the run."""


class Stops(Disturbance):
    """The process is stopped and continued in a loop, by another one."""

    child = 0

    def begins(self, run):
        if self.child:
            return
        ended, self.end = os.pipe()
        victim, self.child = os.getpid(), os.fork()
        if self.child == 0:
            os.close(self.end)
            try:
                for _ in range(200):
                    os.kill(victim, signal.SIGSTOP)
                    time.sleep(0.25)
                    os.kill(victim, signal.SIGCONT)
                    if select.select([ended], [], [], 0.05)[0]:  # never ends with the victim stopped
                        break
            finally:
                os._exit(0)
        os.close(ended)

    def ends(self):
        if self.child:
            os.close(self.end)
            os.waitpid(self.child, 0)


class SlowPasses(Disturbance):
    """Forward passes compute for longer."""

    begun = False

    def begins(self, run):
        if self.begun:
            return
        self.begun = True

        def compute(*_):
            end = time.thread_time() + 0.04  # in each of two micro-batches
            while time.thread_time() < end:
                pass

        for stage in run.stages:
            stage.register_forward_pre_hook(compute)


class SlowData(Disturbance):
    """The dataset sleeps."""

    def begins(self, run):
        dataset = run.loaders.train.dataset
        if not isinstance(dataset, Sleepy):
            run.loaders.train.dataset = Sleepy(dataset)


class Sleepy:
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        time.sleep(0.02)
        return self.dataset[index]


def train(rank, folder, world, steps, flags, what=None):
    """Train on one rank, disturbed. Returns the times that were measured at the end, or None."""
    train_step = loop.train_step

    def disturbed(run):
        if what and rank in what.ranks and what.first <= run.state.iteration + 1 <= what.last:
            what.begins(run)
        return train_step(run)

    loop.train_step = disturbed
    try:
        words = f"{TINY} --metrics-file {folder}/metrics.jsonl --train-iters {steps} {flags}".split()
        loop.pretrain(resolve(parse_pretrain(words), world), dataclasses.replace(pretrain_gpt.recipe()))
    finally:
        loop.train_step = train_step
        if what:
            what.ends()


def events(folder):
    """The events of a run about its speed."""
    lines = map(json.loads, (Path(folder) / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] not in ("start", "save", "end")]


def records(folder, kind):
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


# ---- a slow rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "world, flags, victim",
    [
        (2, "", 1),
        pytest.param(2, "--tp 2", 0, marks=pytest.mark.full),
        pytest.param(2, "--pp 2", 1, marks=pytest.mark.full),
        pytest.param(4, "--tp 2", 2, marks=pytest.mark.full),
        pytest.param(4, "--pp 2", 3, marks=pytest.mark.full),
        pytest.param(2, "--use-distributed-optimizer --overlap-grad-reduce", 1, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_stopped_in_a_loop_is_named_within_twenty_steps(world, flags, victim, tmp_path, run_ranks):
    run_ranks(world, train, tmp_path, world, FIRST + 24, flags, Stops([victim]))
    [event] = events(tmp_path)
    assert (event["event"], event["rank"], event["level"]) == ("slow_rank", victim, "warning")
    assert event["iteration"] <= FIRST + 20 and event["phase"] in OWN and event["phase"] != "data"
    assert event["message"].startswith(f"rank {victim} (")


@pytest.mark.sampled(10)
def test_slow_passes_are_named_in_the_log_and_the_events(tmp_path, run_ranks, capfd):
    run_ranks(2, train, tmp_path, 2, 30, "--log-interval 10", SlowPasses([0]))
    [event] = events(tmp_path)
    assert (event["event"], event["rank"], event["phase"]) == ("slow_rank", 0, "forward")
    assert event["iteration"] <= FIRST + 20 and event["seconds"] > event["median"] + 0.02
    log = capfd.readouterr().out
    assert f"warning: {event['message']}" in log and log.count("is slow") == 1


# ---- data ----------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_slow_data_are_told_from_slow_ranks(ranks, tmp_path, run_ranks):
    run_ranks(2, train, tmp_path, 2, 32, "", SlowData(ranks))
    [event] = events(tmp_path)
    assert event["event"] == "slow_data" and event["rank"] == (1 if ranks == [1] else None)
    assert event["iteration"] <= FIRST + 20 and 0.03 < event["seconds"] < event["step_seconds"]


@pytest.mark.sampled(10)
def test_one_process_waits_for_its_data(tmp_path):
    train(0, tmp_path, 1, 22, "", SlowData([0], first=1))
    [event] = events(tmp_path)
    assert (event["event"], event["rank"]) == ("slow_data", None) and event["message"].startswith("steps wait for data")


# ---- nobody --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world, flags, steps",
    [
        (2, "", 40),
        pytest.param(2, "", 500, marks=pytest.mark.full),
        pytest.param(2, "--tp 2", 500, marks=pytest.mark.full),
        pytest.param(2, "--pp 2", 500, marks=pytest.mark.full),
        pytest.param(4, "--pp 2 --num-layers 4", 200, marks=pytest.mark.full),
    ],
)
def test_a_quiet_run_names_nobody(world, flags, steps, tmp_path, run_ranks):
    run_ranks(world, train, tmp_path, world, steps, flags)
    assert events(tmp_path) == []
    found = records(tmp_path, "ranks")
    assert [record["iteration"] for record in found] == list(range(2 * WINDOW, steps, WINDOW))
    seconds = {step["iteration"]: step["seconds"] for step in records(tmp_path, "step")}
    for record in found:
        assert list(record["seconds"]) == list(PARTS) and record["steps"] == WINDOW
        assert all(len(ranks) == world for ranks in record["seconds"].values())
        whole = sum(ranks[0] for ranks in record["seconds"].values())
        steps_of_it = [seconds[record["iteration"] - n] for n in range(WINDOW)]
        assert whole == pytest.approx(sum(steps_of_it) / WINDOW, rel=0.1, abs=0.003)  # the parts are the whole step


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", "--pp 2"])
def test_other_programs_on_the_machine_make_no_rank_slow(flags, tmp_path, run_ranks):
    """Three programs on the cores of two ranks: both are slower alike."""
    others = []
    try:
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                while True:
                    pass
            others.append(pid)
        run_ranks(2, train, tmp_path, 2, 300, flags)
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert [event["message"] for event in events(tmp_path)] == []


# ---- stages, pauses of the run, settings ---------------------------------------------------------------------------------


@pytest.mark.full
def test_a_stage_that_becomes_slow_is_told_from_a_slow_rank(tmp_path, run_ranks):
    run_ranks(4, train, tmp_path, 4, 110, "--pp 2 --num-layers 4", SlowPasses([2, 3], first=71))
    [event] = events(tmp_path)
    assert (event["event"], event["stage"], event["rank"]) == ("slow_stage", 1, None)
    assert 71 < event["iteration"] <= 91


def test_evaluations_and_saves_are_not_part_of_a_rank(tmp_path, run_ranks):
    """Long ones of rank 0 alone: the other one waits, and nobody is slow."""

    def body(rank):
        from megatron.training.state import Run

        saving = Run._save
        Run._save = lambda run: (time.sleep(0.1 * (rank == 0)), saving(run))
        train(rank, tmp_path, 2, 30, f"--save {tmp_path} --save-interval 3 --eval-interval 5 --eval-iters 1")

    run_ranks(2, body)
    assert events(tmp_path) == []
    assert max(max(record["seconds"]["other"]) for record in records(tmp_path, "ranks")) < 0.02


def test_the_slowest_and_fastest_ranks_are_logged(tmp_path, run_ranks, capfd):
    flags = "--log-straggler --straggler-minmax-count 2 --log-interval 10"
    run_ranks(2, train, tmp_path, 2, 21, flags)
    log = capfd.readouterr().out
    # At step 20: the first window is left out
    assert log.count("own time of a step by rank, mean of 10 steps (ms):") == 1
    rows = re.findall(r"    (slowest|fastest): rank (\d) ([\d.]+) \([\d.]+ TFLOP/s\): data .*forward .*; waiting", log)
    assert [which for which, *_ in rows[:4]] == ["slowest"] * 2 + ["fastest"] * 2
    first, second, third, fourth = (float(ms) for *_, ms in rows[:4])
    assert first >= second and third <= fourth and {rank for _, rank, _ in rows[:2]} == {"0", "1"}


def test_without_detection_nothing_is_measured(tmp_path, run_ranks):
    def body(rank):
        found = []
        measuring = RankTimes.measuring
        RankTimes.measuring = classmethod(lambda cls, times: found.append(times) or measuring(times))
        train(rank, tmp_path, 2, 21, "--no-straggler-detection", SlowData([1], first=1))
        return found

    assert run_ranks(2, body) == [[None], [None]]
    assert events(tmp_path) == [] and records(tmp_path, "ranks") == []


def test_a_large_job_writes_fewer_records():
    from megatron.training.rank_watch import _Sums

    rows = torch.ones(64, 9).numpy()
    records = _Sums(-(-64 // RANKS_A_RECORD))
    assert [records.add(rows) for _ in range(4)] == [False, False, False, True]
    steps, means = records.take(WINDOW)
    assert steps == 4 * WINDOW and means.tolist() == (rows / WINDOW).tolist()


@pytest.mark.sampled(10)
def test_results_are_the_same_to_the_bit(tmp_path, run_ranks):
    for name, flags in (("on", ""), ("off", "--no-straggler-detection")):
        (tmp_path / name).mkdir()
        run_ranks(2, train, tmp_path / name, 2, 12, flags)
    on, off = ([(step["lm loss"], step["grad_norm"]) for step in records(tmp_path / n, "step")] for n in ("on", "off"))
    assert on == off and len(on) == 12
