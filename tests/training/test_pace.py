# SPDX-License-Identifier: Apache-2.0
"""When steps that crawl let waiting threads sleep: clocks and the machine are played; that it works, tests/mpu shows."""

import json

import pytest

import pretrain_gpt
from megatron.mpu import cpu_threads
from megatron.training import pace
from megatron.training.pace import Pace

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 64 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 4 --device cpu --num-workers 0 --eval-iters 0 --train-iters 6"
).split()


@pytest.fixture
def machine(monkeypatch):
    """`machine(busy, can)`: whether other programs are there, and whether the library can let threads sleep."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    looks = []

    def made(busy, can=True):
        monkeypatch.setattr(cpu_threads, "crowded", lambda wanted, own: looks.append((wanted, own)) or busy)
        monkeypatch.setattr(cpu_threads, "sleep_from_now_on", lambda threads: can)
        return looks

    return made


def walk(own, steps):
    """(number of the step, words) of all that is said; steps of so many seconds, one after the other."""
    now, said = 0.0, []
    for number, seconds in enumerate(steps, 1):
        now += seconds
        if words := own.after(seconds, now):
            said.append((number, words))
    return said


def test_three_steps_that_crawl_beside_other_programs(machine):
    looks = machine(busy=True)
    [(number, words)] = walk(Pace(2, ranks_here=3), [0.1] * 12 + [0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.1])
    assert number == 17 and looks == [(6, 6)]  # one slow step, or two, are no reason to look
    assert "steps take 0.9 s, 0.1 s before" in words and "sleep from now on" in words


def test_steps_that_are_slow_from_the_start_are_looked_at_once(machine):
    looks = machine(busy=True)
    [(number, words)] = walk(Pace(2), [2.0] * 6)
    assert number == 4 and "2 s a step" in words  # 5 seconds behind the first one
    looks.clear()
    machine(busy=False)
    assert walk(Pace(2), [2.0] * 30) == [] and len(looks) == 1


def test_a_quiet_machine_and_threads_that_do_not_spin(machine, monkeypatch):
    looks = machine(busy=False)
    assert walk(Pace(2), [0.1] * 12 + [0.9] * 5) == [] and len(looks) >= 3
    looks.clear()
    machine(busy=True)
    assert walk(Pace(1), [0.1] * 12 + [0.9] * 5) == []
    for name, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "300000")):  # what somebody has asked for
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert walk(Pace(2), [0.1] * 12 + [0.9] * 5) == []
    assert looks == []


def test_a_library_that_cannot_is_told_what_can(machine):
    machine(busy=True, can=False)
    [(_, words)] = walk(Pace(2), [0.1] * 12 + [0.9] * 9)
    assert (
        "resume from the last checkpoint with OMP_WAIT_POLICY=PASSIVE" in words and "2.1 s a step became 0.3" in words
    )


def test_the_log_says_it_once_and_training_is_the_same(machine, monkeypatch, tmp_path, capsys):
    losses = []
    for name, busy in (("quiet", False), ("busy", True)):
        machine(busy)
        monkeypatch.setattr(pace, "FIRST_LOOK", 0.0)
        monkeypatch.setattr(Pace, "of", lambda context: Pace(2))
        pretrain_gpt.main([*FLAGS, "--save", str(tmp_path / name)])
        said = capsys.readouterr().out.count("note: other programs use the cores")
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert said == sum(one.get("what") == "busy machine" for one in records) == busy
        losses.append([one["lm loss"] for one in records if one["kind"] == "step"])
    assert losses[0] == losses[1] and len(losses[0]) == 6
