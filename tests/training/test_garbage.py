# SPDX-License-Identifier: Apache-2.0
"""Reference cycles are collected at intervals of steps, and by Python again when training is over, however it ends."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.training import loop
from megatron.training.garbage import GarbageCollection

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4 --mock-data --vocab-size 100 --lr 1e-2 "
    "--device cpu --num-workers 0 --micro-batch-size 1 --global-batch-size 1 --eval-iters 1"
)


class Cycle:
    """Refers to itself, so that reference counts never free it."""

    def __init__(self):
        self.itself, self.ballast = self, [[] for _ in range(1000)]  # enough for Python to collect by itself


class Collections:
    """Counts Python's collections since it was made; `with` it listens."""

    def __init__(self):
        self.count = 0

    def __call__(self, what, details):
        self.count += what == "start"

    def __enter__(self):
        gc.callbacks.append(self)
        return self

    def __exit__(self, *exception):
        gc.callbacks.remove(self)


def plant(alive: weakref.WeakSet) -> None:
    alive.add(Cycle())


def test_500_steps_with_a_cycle_each_never_hold_more_than_an_interval():
    alive, held, collected = weakref.WeakSet(), [], []
    with GarbageCollection(20) as garbage, Collections() as collections:
        for _ in range(500):
            plant(alive)
            before = collections.count
            garbage.after_step()
            held.append(len(alive))
            collected.append(collections.count - before)
    # Behind the first step, and behind every 20th; between them a cycle a step.
    assert held == [*range(19), *(step % 20 for step in range(20, 501))]
    assert [number for number, count in enumerate(collected, 1) if count] == [1, *range(20, 501, 20)]


@pytest.mark.sampled(2)
def test_nothing_is_collected_between():
    """Python itself would have, with these many allocations."""
    with Collections() as by_itself:
        [Cycle() for _ in range(200)]
    with GarbageCollection(1000) as garbage:
        garbage.after_step()
        with Collections() as collections:
            [Cycle() for _ in range(200)]
    assert by_itself.count > 0 and collections.count == 0


def test_what_was_built_before_is_not_looked_at_again_until_the_end():
    frozen = gc.get_freeze_count()
    built = [[] for _ in range(10_000)]
    with GarbageCollection(5) as garbage:
        garbage.after_step()
        assert gc.get_freeze_count() >= frozen + len(built)
    assert gc.get_freeze_count() == 0


def test_interval_0_leaves_it_to_python():
    alive, frozen = weakref.WeakSet(), gc.get_freeze_count()
    with GarbageCollection(0) as garbage:
        for _ in range(3):
            plant(alive)
            garbage.after_step()
            assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_who_had_switched_it_off_finds_it_off():
    gc.disable()
    try:
        with GarbageCollection(2) as garbage:
            garbage.after_step()
            garbage.after_step()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def steps(monkeypatch):
    """Runs whose every step leaves a cycle: of each step, how many were alive behind it, and whether Python collects."""
    alive, seen, train_step = weakref.WeakSet(), [], loop.train_step

    def planting(run):
        seen.append((len(alive), gc.isenabled()))
        plant(alive)
        return train_step(run)

    monkeypatch.setattr(loop, "train_step", planting)
    return seen


def run(flags: str) -> None:
    torch.set_num_threads(1)
    pretrain_gpt.main(f"{TINY} {flags}".split())


def test_a_run_collects_at_its_interval(steps):
    run("--train-iters 13 --manual-gc-interval 4 --eval-interval 100")
    held, automatic = zip(*steps, strict=True)
    # Found when steps 2 to 13 begin: collections came behind the steps 1, 4, 8 and 12.
    assert held[1:] == (0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0)
    assert automatic == (True, *[False] * 12) and gc.isenabled()


def test_a_run_collects_at_evaluations_and_saves(steps, tmp_path):
    run(f"--train-iters 9 --eval-interval 3 --save {tmp_path} --save-interval 5")
    held, _ = zip(*steps, strict=True)
    assert held[1:] == (0, 1, 0, 1, 0, 0, 1, 2)  # behind 3 and 6 an evaluation, behind 5 a save


def test_python_collects_again_behind_an_error(steps, monkeypatch):
    def fail(run, step=loop.train_step):
        if run.state.iteration == 3:
            raise RuntimeError("planted")
        return step(run)

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(RuntimeError, match="planted"):
        run("--train-iters 9 --manual-gc-interval 100")
    assert [automatic for _, automatic in steps] == [True, False, False]
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize("ends", ["", "raise ImportError('a library is missing')"])
def test_a_command_loads_torch_without_collections(ends, tmp_path):
    """And collects again afterwards, also if torch cannot be loaded."""
    (tmp_path / "torch.py").write_text(
        f"import gc\nstate, objects = gc.isenabled(), [[] for _ in range(9000)]\n{ends}\n"
    )
    code = """
import gc, sys
from megatron.errors import run_main

def main(argv):
    assert gc.isenabled()
    try:
        import torch
        assert not torch.state and gc.get_freeze_count() > 9000
    finally:
        print("collects again:", gc.isenabled())

run_main(main, [])
"""
    environment = dict(os.environ, PYTHONPATH=f"{tmp_path}:{ROOT}")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, bool(done.returncode)) == ("collects again: True\n", bool(ends)), done.stderr
