# SPDX-License-Identifier: Apache-2.0
"""Runs whose host reads the numbers of a step in the next one, as on a GPU: the same steps, decisions, logs and files.

On a CPU, where it is never needed: the device's flags have values there. What they are compared with is what runs that
read at once are compared with. That no host waits is for tests/fake_cuda to show.
"""

import math
import os
import signal

import pytest
import torch

import pretrain_gpt
from megatron.errors import Preempted
from megatron.mpu.forked import RankFailed
from megatron.settings.parse import parse_pretrain
from megatron.training import build
from megatron.training import step as training_step
from megatron.training.rules import resolve
from tests.guard import test_guarded_runs as guarded
from tests.training import test_plain_loop as plain

GROWING = "fp16, growing scale"  # overflows at first, then grows: skipped steps between others
MEANS = "fp16, a mean of means, less patience, steps that are left out"
NOT_FINITE = "fp16, constant scale that is too large"  # steps in a row are skipped, and explained by repeating them


@pytest.fixture(autouse=True)
def late(monkeypatch):
    monkeypatch.setattr(build, "defers_host_sync", lambda config, context, optimizer: optimizer.skips_on_device)


def test_a_step_is_read_in_the_next_one(monkeypatch):
    recorded = []
    monkeypatch.setattr(training_step, "record_step", lambda run, step: recorded.append(step))
    flags = f"{plain.FLAGS} {plain.SIX} {plain.ADAM} --check-replicas-interval 4"
    run = build.build_run(resolve(parse_pretrain(flags.split()), 1), pretrain_gpt.recipe())
    for iteration in range(1, 7):
        step = training_step.train_step(run)
        assert run.state.iteration == iteration and run.state.consumed_samples == 8 * iteration
        at_once = iteration in (4, 6)  # replicas are compared; the last one
        assert (run.pending.outcome is None) is at_once and (step is not None) is at_once
        recorded += [step] * at_once
        assert [step.iteration for step in recorded] == [*range(1, iteration + at_once)]
        assert run.done == len(recorded) and run.optimizer.step_count == iteration
    run.close()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "case, world, stops",
    [(GROWING, 1, [3, 4]), (GROWING, 2, []), (MEANS, 1, []), (NOT_FINITE, 2, []), ("batches that grow", 1, [])],
)
def test_a_run_equals_the_plain_loop(case, world, stops, run_ranks, tmp_path):
    plain.test_a_run_equals_the_plain_loop(case, world, stops, run_ranks, tmp_path)


@pytest.mark.sampled(2)
def test_console_lines_and_skipped_spikes_are_those_of_the_plain_loop(tmp_path, capsys):
    plain.test_console_lines_say_what_the_plain_loop_does(tmp_path / "lines", capsys)
    plain.test_steps_that_stand_out_are_skipped(tmp_path / "spikes")


def test_what_is_not_finite_is_traced_with_the_weights_of_its_step(run_ranks, tmp_path):
    """Sample 20 is of step 3, which is read in step 4."""
    fault = guarded._poisoned("blocks.1.attention", [20], forward=math.nan)
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, guarded._pretrain, f"--train-iters 8 --save {tmp_path} --save-interval 4 --pp 2", 2, fault)
    where = "rank 1, micro-batch 2: first in the forward pass of blocks.1.attention\n    sample 20"
    text = str(failed.value)
    assert "iteration 3: loss" in text and "not finite" in text and where in text, text
    assert not [*tmp_path.glob("iter_*")]
    assert [end["iteration"] for end in guarded._records(tmp_path, "end")] == [2]


@pytest.mark.sampled(10)
def test_steps_that_are_not_finite_are_skipped(tmp_path, capsys):
    guarded.test_steps_that_are_not_finite_can_be_skipped_and_are_counted(tmp_path, capsys)


@pytest.mark.sampled(10)
def test_a_spike_rolls_back(run_ranks, tmp_path):
    """In step 40, which is read in step 41: that is dropped. The end is that of a run told to leave those steps out."""
    flags = f"{guarded.SPIKY} --save-interval 13 --on-spike rollback --spike-skip-steps 3 --sharding-stage 2"
    run_ranks(2, guarded._pretrain, f"{flags} --save {tmp_path / 'a'}", 2, guarded._spike())
    [spike], [back] = (guarded._records(tmp_path / "a", kind) for kind in ("spike", "rewind"))
    assert (spike["iteration"], back["iteration"]) == (40, 26)
    flags = f"{guarded.SPIKY} --iterations-to-skip 38 39 40 --sharding-stage 2"
    run_ranks(2, guarded._pretrain, f"{flags} --save {tmp_path / 'b'}", 2)
    found, expected = (guarded._tensors(tmp_path / run / "iter_0000044") for run in "ab")
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_a_wish_to_stop_is_heard_a_step_later(tmp_path):
    """In step 3; the checkpoint is that of a run which ends behind step 4."""
    flags = f"--train-iters 9 --save {tmp_path / 'a'} --exit-signal-handler"
    recipe = guarded._with_event(lambda: os.kill(os.getpid(), signal.SIGTERM), at_sample=18)
    with pytest.raises(Preempted, match="stopped at iteration 4: signal caught"):
        guarded._pretrain(0, flags, recipe=recipe)
    guarded._pretrain(0, f"--train-iters 9 --save {tmp_path / 'b'} --exit-interval 4")
    found, expected = (guarded._tensors(tmp_path / run / "iter_0000004") for run in "ab")
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert guarded._ledger(tmp_path / "a") == guarded._ledger(tmp_path / "b")
