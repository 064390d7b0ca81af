# SPDX-License-Identifier: Apache-2.0
"""Whole runs of pretrain_gpt.py: resuming is exact, layouts agree, settings do what they say."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError, NumericsError, SettingsError
from megatron.guard import processes
from megatron.optimizer.zero import DistributedOptimizer
from megatron.storage.processes import state
from megatron.telemetry.events import read_events
from megatron.training import build as training_build
from tests.chaos.victim import Fault

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-interval 100 --eval-iters 1 --device cpu --num-workers 0"
)


def _pretrain(rank, flags):
    pretrain_gpt.main(f"{TINY} {flags}".split())


def _tensors(path):
    with Reader(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


def _steps(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_resume_is_bit_identical(world, precision, run_ranks, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    flags = f"--train-iters 8 --precision {precision} --save-interval 4"
    run_ranks(world, _pretrain, f"{flags} --save {whole}")
    run_ranks(world, _pretrain, f"{flags} --save {halves} --exit-interval 4")
    run_ranks(world, _pretrain, f"{flags} --save {halves} --load {halves}")
    expected, found = _tensors(whole / "iter_0000008"), _tensors(halves / "iter_0000008")
    assert len(expected) == 3 * 28 and set(expected) == set(found)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert [s["lm loss"] for s in _steps(whole)] == [s["lm loss"] for s in _steps(halves)]


@pytest.mark.full
def test_kill_9_loses_only_what_was_not_saved(root, tmp_path):
    """A real job under torchrun, killed without warning, goes on to the same bits as one that was left alone."""
    flags = f"{TINY} --train-iters 60 --save-interval 5 --bf16".split()
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    command = [*torchrun, "pretrain_gpt.py", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = dict(cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    stop = Fault("forward", str(tmp_path / "marker"), rank=1, step=13, action="SIGSTOP")  # where it is killed
    job = subprocess.Popen(
        [*torchrun, "-m", "tests.chaos.victim", stop.text(), *command[-len(flags) - 1 :], "--save", str(killed)],
        start_new_session=True,
        **quiet,
    )
    while not (tmp_path / "marker").exists():
        assert job.poll() is None, "ended before it could be killed"
        time.sleep(0.01)
    below = processes.descendants(job.pid)
    assert len(below) >= 2 and (killed / "iter_0000010").exists()
    for process in [job.pid, *below]:
        processes.send(process, signal.SIGKILL)
    job.wait()
    while any(state(process) not in ("", "Z") for process in below):
        time.sleep(0.01)
    assert not (killed / "iter_0000060").exists()
    resumed = subprocess.run([*command, "--save", str(killed), "--load", str(killed)], **quiet)
    assert resumed.returncode == 0
    assert subprocess.run([*command, "--save", str(whole)], **quiet).returncode == 0
    expected, found = _tensors(whole / "iter_0000060"), _tensors(killed / "iter_0000060")
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_data_parallel_and_accumulation_give_the_same_training(run_ranks, tmp_path):
    """With dropout on: masks belong to samples, not to ranks or micro-batches."""
    flags = "--train-iters 5 --save-interval 5 --precision fp32"
    run_ranks(1, _pretrain, f"{flags} --save {tmp_path / 'one'} --micro-batch-size 8")
    run_ranks(2, _pretrain, f"{flags} --save {tmp_path / 'two'} --micro-batch-size 2")
    steps = [_steps(tmp_path / name) for name in ("one", "two")]
    assert len(steps[0]) == 5
    for one, two in zip(*steps, strict=True):
        assert two["lm loss"] == pytest.approx(one["lm loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    expected, found = _tensors(tmp_path / "one" / "iter_0000005"), _tensors(tmp_path / "two" / "iter_0000005")
    assert expected.keys() == found.keys() and expected
    for name in expected:  # softmax ignores a key's bias, so its gradient is rounding, which Adam makes steps of
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4 if name.endswith("bias") else 1e-5)


@pytest.mark.sampled(10)
def test_the_loss_falls(tmp_path):
    _pretrain(0, f"--train-iters 60 --precision auto --save {tmp_path} --lr-decay-style cosine --hidden-dropout 0")
    steps = _steps(tmp_path)
    assert steps[0]["lm loss"] == pytest.approx(4.6, abs=0.2)  # ln 100
    assert steps[-1]["lm loss"] < 3.5


@pytest.mark.sampled(2)
def test_fp16_skips_overflowing_steps_and_goes_on(tmp_path):
    _pretrain(0, f"--train-iters 30 --fp16 --save {tmp_path} --initial-loss-scale 4294967296 --hysteresis 1")
    steps = _steps(tmp_path)
    skipped = [step["skipped"] for step in steps]
    assert skipped[0] and not skipped[-1]
    assert steps[-1]["loss_scale"] < 2**32
    assert steps[-1]["lm loss"] < steps[0]["lm loss"]
    with Reader(tmp_path / "iter_0000030") as reader:
        state = reader.state["state"]
    assert state["skipped_iterations"] == sum(skipped) and state["consumed_samples"] == 30 * 8
    assert state["scheduled_samples"] == (30 - sum(skipped)) * 8


def test_nothing_is_updated_when_the_loss_is_not_finite(tmp_path):
    with pytest.raises(NumericsError, match="iteration 2: .*not finite"):
        _pretrain(0, f"--train-iters 5 --save {tmp_path} --save-interval 1 --lr 1e38 --clip-grad 0 --precision fp32")
    assert not (tmp_path / "iter_0000002").exists()


def test_a_resumed_run_draws_no_weights(tmp_path, monkeypatch):
    run = f"--train-iters 4 --precision bf16 --save {tmp_path}"
    _pretrain(0, f"{run} --save-interval 2")
    whole = _tensors(tmp_path / "iter_0000004")
    shutil.rmtree(tmp_path / "iter_0000004")

    def refuse(*_):
        raise AssertionError("initial weights were drawn")

    with monkeypatch.context() as patch:
        patch.setattr(DistributedOptimizer, "draw", refuse)
        _pretrain(0, f"{run} --load {tmp_path}")
        for words in ("--finetune", "--load-strictness warn-missing"):  # which may need initial values
            with pytest.raises(AssertionError, match="were drawn"):
                _pretrain(0, f"{run} --load {tmp_path} {words}")
    again = _tensors(tmp_path / "iter_0000004")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_checkpoint_that_goes_away_while_the_model_is_built_leaves_initial_weights(tmp_path, monkeypatch):
    """All weights are those of a run that found none."""
    _pretrain(0, f"--train-iters 1 --save {tmp_path / 'a'}")
    _pretrain(0, f"--train-iters 1 --save {tmp_path / 'b'}")
    build = training_build.build_model

    def removing(*args):
        shutil.rmtree(tmp_path / "b")
        return build(*args)

    monkeypatch.setattr(training_build, "build_model", removing)
    _pretrain(0, f"--train-iters 1 --save {tmp_path / 'c'} --load {tmp_path / 'b'} --auto-resume")
    first, second = (_tensors(tmp_path / name / "iter_0000001") for name in "ac")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_ramp_up_of_the_batch_size(tmp_path):
    _pretrain(0, f"--train-samples 64 --rampup-batch-size 2 2 24 --save {tmp_path} --save-interval 3")
    sizes = [step["batch_size"] for step in _steps(tmp_path)]
    assert sizes[0] == 2 and sizes[-1] == 8 and sizes == sorted(sizes)
    whole = [step["lm loss"] for step in _steps(tmp_path)]
    _pretrain(0, f"--train-samples 64 --rampup-batch-size 2 2 24 --save {tmp_path} --load {tmp_path} --ckpt-step 3")
    assert [step["lm loss"] for step in _steps(tmp_path)][len(whole) :] == whole[3:]


def test_micro_batch_averaging_is_megatrons_mean_of_means(tmp_path):
    """Without masks the two ways of averaging are the same; gradients agree up to rounding."""
    for way in ("token", "micro-batch"):
        _pretrain(0, f"--train-iters 3 --save {tmp_path / way} --loss-averaging {way} --precision fp32")
    steps = [_steps(tmp_path / way) for way in ("token", "micro-batch")]
    assert len(steps[0]) == 3
    for token, micro in zip(*steps, strict=True):
        assert micro["lm loss"] == pytest.approx(token["lm loss"], rel=1e-5)
        assert micro["grad_norm"] == pytest.approx(token["grad_norm"], rel=1e-4)


def test_another_model_than_the_checkpoints_is_refused(tmp_path):
    _pretrain(0, f"--train-iters 1 --save {tmp_path}")
    with pytest.raises(SettingsError, match="another model") as refused:
        _pretrain(0, f"--train-iters 2 --load {tmp_path} --hidden-size 64")
    assert "--hidden-size: 32 in the checkpoint, 64 now" in str(refused.value)


def test_load_needs_a_checkpoint_unless_told_otherwise(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint|no such folder"):
        _pretrain(0, f"--train-iters 1 --load {tmp_path}")
    _pretrain(0, f"--train-iters 1 --load {tmp_path} --save {tmp_path} --auto-resume")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capsys):
    _pretrain(0, f"--train-iters 4 --save {tmp_path} --save-interval 2")
    shard = tmp_path / "iter_0000004" / "shard_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    _pretrain(0, f"--train-iters 4 --save {tmp_path} --load {tmp_path}")
    said = capsys.readouterr().out
    assert re.search(r"warning: .*iter_0000004 is passed over, and iteration 2 loaded instead: .*damaged", said)
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "damaged_checkpoint"]
    assert (event["level"], event["loaded"], event["checkpoint"]) == ("warning", 2, str(shard.parent))
    assert _steps(tmp_path)[-1]["iteration"] == 4


def test_finetune_takes_weights_and_starts_counting_anew(tmp_path, capsys):
    _pretrain(0, f"--train-iters 3 --save {tmp_path / 'a'}")
    _pretrain(0, f"--train-iters 1 --save {tmp_path / 'b'} --load {tmp_path / 'a'} --finetune --lr 0.0001")
    first = _steps(tmp_path / "b")[0]
    assert first["iteration"] == 1 and first["lm loss"] < _steps(tmp_path / "a")[0]["lm loss"]


def test_keep_last(tmp_path):
    _pretrain(0, f"--train-iters 5 --save {tmp_path} --save-interval 1 --keep-last 2")
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000005"]
