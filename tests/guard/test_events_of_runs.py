# SPDX-License-Identifier: Apache-2.0
"""Conditions that are injected into runs, and the event that each gives; a quiet run gives none."""

import contextlib
import signal
import time
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint import store
from megatron.errors import DataError, Interrupted, NumericsError, Preempted, StorageError
from megatron.guard import alarm as module
from megatron.guard import disk
from megatron.guard.alarm import Alarm
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.replicas import copies
from megatron.guard.supervisor_mark import Mark
from megatron.model.recipe import Recipe
from megatron.storage import durable
from megatron.telemetry import metrics
from megatron.telemetry.event_rules import EventRule
from megatron.telemetry.events import EventLog, read_events
from megatron.training import loop
from megatron.training.events import remove_claimed
from megatron.training.hooks import Hook
from tests.guard.test_guarded_runs import NAN, SPIKY, _poisoned, _pretrain, _spike, _with_event

pytestmark = pytest.mark.sampled(5)

USUAL = ("start", "save", "end")


def events_of(folder, *kinds):
    """The events of a run, of these kinds, or those that a quiet run does not have."""
    return [one for one in read_events(folder) if (one["event"] in kinds if kinds else one["event"] not in USUAL)]


def told(folder, *kinds):
    """(kind, level, iteration) of each."""
    return [(one["event"], one["level"], one["iteration"]) for one in events_of(folder, *kinds)]


def with_hook(after_step, recipe=None) -> Recipe:
    """A recipe with a hook: after_step(iteration)"""

    class Injected(Hook):
        def after_step(self, run, step):
            after_step(step.iteration)

    recipe = recipe or pretrain_gpt.recipe()
    return recipe.__class__(**{**vars(recipe), "hooks": (Injected,)})


def rules(folder, text):
    (folder / "rules.yaml").write_text(text)
    return f"--event-rules {folder / 'rules.yaml'}"


@pytest.mark.sampled(10)
def test_a_quiet_run_of_500_steps(tmp_path):
    _pretrain(
        0,
        "--num-layers 1 --hidden-size 16 --micro-batch-size 8 --train-iters 500 --save-interval 200 --keep-last 1 "
        f"--save {tmp_path}",
    )
    found = read_events(tmp_path)
    assert [one["event"] for one in found] == ["start", "save", "save", "save", "end"]
    assert {one["level"] for one in found} == {"info"} and found[-1]["code"] == 0


@pytest.mark.parametrize("action", ["continue", "skip", "rollback"])
def test_a_spike(action, tmp_path):
    _pretrain(0, f"{SPIKY} --save {tmp_path} --on-spike {action}", recipe=_spike())
    (spike,) = events_of(tmp_path, "spike")
    assert (spike["iteration"], spike["what"], spike["action"]) == (40, "loss", action) and spike["score"] > 8
    assert told(tmp_path, "rollback") == [("rollback", "warning", 40)] * (action == "rollback")


def test_values_that_are_not_finite(tmp_path):
    bad = _poisoned("blocks.1.mlp", [20, 33], forward=NAN)
    _pretrain(0, f"--train-iters 8 --save {tmp_path / 'a'} --on-nan skip", recipe=bad)
    assert told(tmp_path / "a") == [("not_finite", "warning", 3), ("not_finite", "warning", 5)]
    with pytest.raises(NumericsError):
        _pretrain(0, f"--train-iters 8 --save {tmp_path / 'b'}", recipe=bad)
    assert told(tmp_path / "b", "not_finite", "end") == [("not_finite", "error", 3), ("end", "error", 2)]
    nan, end = events_of(tmp_path / "b", "not_finite", "end")
    assert "blocks.1.mlp" in nan["message"] and nan["loss"] == "nan" and end["code"] == 8
    assert "iteration 3: loss nan" in end["why"]


def test_steps_that_a_loss_scale_skips(tmp_path):
    flags = rules(tmp_path, "skipped_step: 2")
    _pretrain(0, f"--fp16 --initial-loss-scale 4e12 --hysteresis 1 --train-iters 4 --save {tmp_path} {flags}")
    found = told(tmp_path, "skipped_step")
    assert found[:2] == [("skipped_step", "info", 1), ("skipped_step", "warning", 2)]
    assert {level for _, level, _ in found[2:]} <= {"info"}


def test_a_disk_that_is_nearly_full(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    flags = rules(tmp_path, "disk_nearly_full: 1")
    _pretrain(0, f"--train-iters 2 --save {tmp_path / 'a'} --save-interval 1 {flags}")
    assert events_of(tmp_path / "a") == []
    flags = rules(tmp_path, "disk_nearly_full: 10")
    _pretrain(0, f"--train-iters 2 --save {tmp_path / 'b'} --save-interval 1 {flags}")
    first, second = events_of(tmp_path / "b")
    assert (first["event"], first["iteration"], first["free"]) == ("disk_nearly_full", 1, 1 << 20)
    size = sum(path.stat().st_size for path in (tmp_path / "b" / "iter_0000002").iterdir())
    assert first["needed"] == pytest.approx(10 * size, rel=0.01) and second["iteration"] == 2


def test_a_full_disk(tmp_path, monkeypatch):
    _pretrain(0, f"--train-iters 1 --save {tmp_path}")
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(StorageError):
        _pretrain(
            0,
            f"--train-iters 3 --save {tmp_path} --load {tmp_path} --save-interval 1 --save-retries 0 --max-failed-saves 1",
        )
    (failed,) = events_of(tmp_path, "save_failed")
    assert (failed["event"], failed["level"], failed["iteration"], failed["in_a_row"]) == ("save_failed", "error", 2, 1)
    end = events_of(tmp_path, "end")[-1]
    assert (end["level"], end["code"]) == ("error", 6) and "No space left" in end["why"]


def test_a_slow_disk(tmp_path, monkeypatch):
    """From the hook of step 5 on, each of about 80 writes takes 0.02 s longer; again as before from that of step 6 on."""
    delay, write = [0.0], store._write_all
    monkeypatch.setattr(store, "_write_all", lambda file, data: (time.sleep(delay[0]), write(file, data)))

    def after_step(iteration):
        delay[0] = 0.02 * (iteration == 5)

    flags = rules(tmp_path, "slow_disk: {threshold: 0.8, seconds: 1.0}")
    _pretrain(0, f"--train-iters 7 --save {tmp_path} --save-interval 1 {flags}", recipe=with_hook(after_step))
    slow, recovered = events_of(tmp_path)
    assert (slow["event"], slow["level"], recovered["event"]) == ("slow_disk", "warning", "recovered")
    assert slow["folder"] == recovered["folder"] == str(tmp_path) and 1.0 <= slow["seconds"] < 60
    assert slow["iteration"] in (5, 6) and recovered["iteration"] == slow["iteration"] + 1
    assert slow["bytes_per_second"] == pytest.approx(slow["bytes"] / slow["seconds"], rel=0.01)


def test_replicas_that_drift(run_ranks, tmp_path):
    def body(rank):
        check = loop.check_replicas

        def drifted(optimizer, iteration):
            if rank == 1 and iteration == 3:
                with torch.no_grad():
                    next(iter(copies(optimizer))).values.view(-1)[0] += 1.0
            check(optimizer, iteration)

        loop.check_replicas = drifted
        with pytest.raises(NumericsError):
            _pretrain(rank, f"--train-iters 4 --save {tmp_path} --check-replicas-interval 1", 2)

    run_ranks(2, body)
    (drift, end) = events_of(tmp_path, "replica_drift", "end")
    assert (drift["level"], drift["iteration"], end["code"]) == ("error", 3, 8) and "rank" in drift["why"]


def test_a_validation_that_gets_worse(tmp_path):
    flags = rules(
        tmp_path, "validation_worse: {threshold: 1, level: error}\nloss_above_guess: off\nhigh_grad_norm: off"
    )
    evaluate = "--eval-iters 1 --eval-interval 4 --eval-same-samples"
    _pretrain(0, f"--train-iters 12 --lr 30 --lr-warmup-iters 11 --clip-grad 0 --save {tmp_path} {evaluate} {flags}")
    found = events_of(tmp_path)
    assert {(one["event"], one["level"]) for one in found} == {("validation_worse", "error")}
    assert found[0]["values"][0] < found[0]["values"][1] and found[0]["figure"] == "lm loss"


@pytest.mark.sampled(10)
def test_slow_steps(tmp_path, monkeypatch):
    """The clock of the metrics goes by what the hook says; from step 81 on steps are five times as long."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def after_step(iteration):
        clock.now += 3.0 if iteration < 80 else 15.0

    _pretrain(0, f"--train-iters 95 --save {tmp_path}", recipe=with_hook(after_step))
    (event,) = events_of(tmp_path)
    assert event["event"] == "slow_steps" and 81 <= event["iteration"] <= 95 and event["share"] < 0.7


def test_a_step_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK", 0.05)
    flags = rules(tmp_path, "no_step: {threshold: 3, seconds: 0.4}")
    stuck = with_hook(lambda iteration: time.sleep(1.0) if iteration == 6 else None)
    _pretrain(0, f"--train-iters 8 --save {tmp_path} {flags}", recipe=stuck)
    (event,) = events_of(tmp_path)
    assert (event["event"], event["level"], event["iteration"]) == ("no_step", "error", 6)
    assert 0.4 <= event["seconds"] < 1.0


def test_patience_between_steps_and_after_a_suspension():
    found, heartbeat = [], Heartbeat()
    log = EventLog(listeners=[lambda event: found.append(event["event"])])
    log.rules = {"no_step": EventRule(10, seconds=5)}
    alarm = Alarm(log, heartbeat)
    alarm.look(99)
    alarm.look(99)  # before the first step
    alarm({"kind": "step", "iteration": 1, "seconds": 1.0})
    heartbeat.beat("F", step=2)
    for seconds in (1, 4, 4.9, 1):
        alarm.look(seconds)
    assert found == []  # 10 s are allowed, and the first look only notices the step
    alarm.look(1)
    alarm.look(50)
    assert found == ["no_step"]  # once
    alarm({"kind": "step", "iteration": 2, "seconds": 1.0})
    heartbeat.beat("save")
    for seconds in (1, 20, 20):
        alarm.look(seconds)
    assert found == ["no_step"]  # a save may take longer
    alarm.look(20)
    assert found == ["no_step"] * 2


def test_a_webhook_that_nobody_answers_does_not_hold_a_run_up(tmp_path, capsys):
    flags = f"--webhook http://127.0.0.1:9/ --event-level info --train-iters 3 --save {tmp_path} --save-interval 1"
    start = time.monotonic()
    _pretrain(0, flags)
    assert time.monotonic() - start < 60  # and not 5 events x 40 s of pauses
    lost = events_of(tmp_path, "messages_lost")
    assert lost and all(one["to"] == "--webhook" and "refused" in one["why"] for one in lost if one["why"][:3] != "the")
    assert "not sent to --webhook" in capsys.readouterr().out


def test_a_command_hears_of_the_end(tmp_path):
    command = f'echo "$EVENT $EVENT_LEVEL" >> {tmp_path}/heard'
    with pytest.raises(NumericsError):
        pretrain_gpt.main(
            "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 50 "
            "--micro-batch-size 1 --global-batch-size 1 --device cpu --num-workers 0 --eval-iters 0 --lr 1e38 "
            f"--clip-grad 0 --train-iters 9 --save {tmp_path}/run".split()
            + ["--on-event", command]
        )
    assert (tmp_path / "heard").read_text().splitlines() == ["not_finite error", "end error"]


def test_a_run_that_does_not_come_to_train_has_an_end(tmp_path):
    _pretrain(0, f"--train-iters 1 --save {tmp_path}")
    for path in tmp_path.glob("iter_*/*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(Exception, match="no valid checkpoint|damaged"):
        _pretrain(0, f"--train-iters 2 --save {tmp_path} --load {tmp_path}")
    end = events_of(tmp_path, "end")[-1]
    assert (end["level"], end["code"], end["iteration"]) == ("error", 5, None)
    assert end["message"].startswith("ended before the first step with exit code 5: ")


def test_a_run_that_is_refused_leaves_no_folder_of_its_own(tmp_path, monkeypatch):
    """What is wrong with the data is seen after the folder is claimed. One that was there gets the event."""
    flags = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 50 --lr 1e-3 "
    flags += "--micro-batch-size 1 --global-batch-size 1 --device cpu --num-workers 0 --eval-iters 0 --train-iters 2"
    words = [*flags.split(), "--tokenizer-type", "NullTokenizer", "--data-path", str(tmp_path / "nowhere"), "--save"]
    (tmp_path / "old").mkdir()
    for folder in ("new", "old"):
        with pytest.raises(DataError, match="nowhere.idx: no such file"):
            pretrain_gpt.main([*words, str(tmp_path / folder)])
    assert not (tmp_path / "new").exists() and ended(tmp_path / "old")[2] == DataError.code
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").touch()
    assert not remove_claimed(tmp_path / "kept")  # something of somebody's is in it


def test_a_supervisor_that_was_killed_is_an_event(tmp_path):
    path, found = tmp_path / "supervisor.json", []
    log = EventLog(listeners=[found.append])
    Mark.own().write(path)
    Alarm(log, Heartbeat(), str(path)).look_at_supervisor()
    assert not found
    gone = Mark(2**22 + 1, 1, Mark.own().machine, "vm", 0.0)
    gone.write(path)
    alarm = Alarm(log, Heartbeat(), str(path))
    alarm.close()
    alarm.close()
    assert [(one["event"], one["level"]) for one in found] == [("supervisor_lost", "error")]
    gone = Mark(2**22 + 1, 1, Mark.own().machine, "vm", 0.0, ended="finished")
    gone.write(path)
    Alarm(log, Heartbeat(), str(path)).close()
    assert len(found) == 1


def test_a_high_gradient_norm(tmp_path):
    large = _poisoned("final_norm", [8 * 39 + 3], backward=1e4)  # in step 40
    _pretrain(0, f"{SPIKY} --save {tmp_path} --on-spike continue", recipe=large)
    (event,) = events_of(tmp_path, "high_grad_norm")
    assert (event["level"], event["iteration"]) == ("warning", 40) and event["times"] > 10


def test_a_command_that_fails(tmp_path, capsys):
    flags = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 50 --lr 1e-3 "
    )
    flags += "--micro-batch-size 1 --global-batch-size 1 --device cpu --num-workers 0 --eval-iters 0 --train-iters 2"
    pretrain_gpt.main([*flags.split(), "--save", str(tmp_path), "--on-event", "echo no mail >&2; exit 3"])
    (lost,) = events_of(tmp_path)  # the event `end` could not be sent
    assert (lost["event"], lost["to"], lost["lost"], lost["why"]) == (
        "messages_lost",
        "--on-event",
        1,
        "exit code 3: no mail",
    )


def ended(folder):
    """(level, iteration, exit code, reason) of the end of the last launch."""
    end = events_of(folder, "end")[-1]
    return end["level"], end["iteration"], end["code"], end["why"]


@pytest.mark.parametrize("number, error", [(signal.SIGTERM, Preempted), (signal.SIGINT, Interrupted)])
def test_a_signal_to_stop(number, error, tmp_path):
    """In step 3, which still ends."""
    flags = f"--train-iters 9 --save {tmp_path} --exit-signal-handler"
    with pytest.raises(error):
        _pretrain(0, flags, recipe=_with_event(lambda: signal.raise_signal(number), at_sample=18))
    assert [one["event"] for one in read_events(tmp_path)] == ["start", "save", "end"]
    level, iteration, code, why = ended(tmp_path)
    assert (level, iteration, code) == ("info", 3, error.code) and why.startswith("stopped at iteration 3: ")


@pytest.mark.parametrize(
    "flags, iteration",
    [("--exit-interval 2", 2), ("--exit-duration-in-mins 0.0001", 1), ("--kill-switch-file {folder}/stop", 1)],
)
def test_an_end_before_the_last_step(flags, iteration, tmp_path):
    flags = flags.format(folder=tmp_path)
    touched = _with_event(lambda: (tmp_path / "stop").touch(), at_sample=0)
    _pretrain(0, f"--train-iters 9 --save {tmp_path} {flags}", recipe=touched)
    assert [one["event"] for one in read_events(tmp_path)] == ["start", "save", "end"]
    level, at, code, why = ended(tmp_path)
    assert (level, at, code) == ("info", iteration, 0) and why.startswith(flags.split()[0])


@pytest.mark.parametrize(
    "error, why", [(MemoryError("cannot allocate 9 GB"), "out of memory"), (RuntimeError("a mistake"), "a mistake")]
)
def test_an_exception_in_a_step(error, why, tmp_path):
    def fail():
        raise error

    with contextlib.suppress(type(error)):
        _pretrain(0, f"--train-iters 9 --save {tmp_path}", recipe=_with_event(fail, at_sample=18))
    level, iteration, code, text = ended(tmp_path)
    assert (level, iteration, code, text) == ("error", 2, 1, why)


def test_a_resume_with_another_layout(run_ranks, tmp_path):
    run_ranks(2, _pretrain, f"--train-iters 2 --tp 2 --lr-decay-iters 9 --save {tmp_path}", 2)
    _pretrain(0, f"--train-iters 3 --lr-decay-iters 9 --save {tmp_path} --load {tmp_path}")
    found = [(one["iteration"], one["ranks"], one["resumed"]) for one in events_of(tmp_path, "start")]
    assert found == [(0, 2, False), (2, 1, True)] and events_of(tmp_path) == []
