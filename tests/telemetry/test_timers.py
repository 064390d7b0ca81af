# SPDX-License-Identifier: Apache-2.0
"""`--timing-log-level`: timers count each moment once, all ranks' times are told, and training is what it was."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import UsageError
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings.schema import Logging
from megatron.telemetry import timers
from megatron.telemetry.metrics import Metrics
from megatron.telemetry.phases import PHASES, ActiveTimers, phase
from megatron.telemetry.step_metrics import RunSizes, StepMetrics
from megatron.telemetry.timers import HISTORY, Timed, Timers, table
from megatron.training import instruments, step

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --device cpu --num-workers 0 --train-iters 6 "
    "--log-interval 3 "
)
MAIN = ("batch-generator", "forward-backward", "all-grads-sync", "optimizer")


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` passes time, which otherwise stands still."""
    now = [100.0]
    monkeypatch.setattr(timers.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_a_moment_counts_once_in_each_level(clock):
    many = Timers(2)
    outer, inner, deep = many("optimizer", 1), many("params-all-gather", 1), many("copy", 2)
    with outer:
        clock(1)
        with deep:
            clock(2)
            with inner:
                clock(4)
        clock(8)
    clock(16)
    assert (outer.sum, inner.sum, deep.sum) == (11, 4, 6)


def test_history_mean_and_sum(clock):
    timer = Timers(1)("copy")
    assert timer.last == timer.mean() == 0.0
    for seconds in (9, 1, 3):
        timer.start()
        clock(seconds)
        timer.stop()
    assert list(timer.history) == [9, 1, 3] and timer.last == 3 and timer.sum == 13 and timer.uses == 3
    assert timer.mean(skip=1) == 2 and timer.mean(skip=3) == 0
    for _ in range(HISTORY):
        with timer:
            clock(5)
    assert len(timer.history) == HISTORY and timer.mean(skip=3) == 5 and timer.sum == 13 + 5 * HISTORY


def test_a_timer_that_was_never_stopped_is_told():
    many = Timers(1, {"reduce": Timed("all-grads-sync", 1)})
    many("all-grads-sync").start()
    with pytest.raises(AssertionError, match="started and never stopped: all-grads-sync"):
        many.collect()
    with pytest.raises(AssertionError, match="all-grads-sync runs already"):
        many("all-grads-sync").start()
    with pytest.raises(AssertionError, match="optimizer cannot stop.*all-grads-sync"):
        many("optimizer").stop()
    many("all-grads-sync").stop()
    assert many.collect()["all-grads-sync"][0] > 0


def test_a_level_that_is_not_asked_for_reads_no_clock(monkeypatch):
    monkeypatch.setattr(timers.time, "perf_counter", lambda: pytest.fail("a clock was read"))
    many = Timers(1, {name: phase.timed for name, phase in PHASES.items()})
    with many("mine", level=2), ActiveTimers.with_timers(many), phase("F"):
        pass
    with ActiveTimers.with_timers(None), phase("reduce"), phase("F"):
        pass
    assert many("mine").uses == 0 and "forward-compute" not in many.collect()


def test_ranks_and_the_device_are_waited_for_before_the_clock_is_read(monkeypatch):
    done = []
    monkeypatch.setattr(timers.time, "perf_counter", lambda: done.append("clock") or 0.0)
    parts = {"update": Timed("optimizer", 1), "inner": Timed("optimizer-inner-step", 2)}
    many = Timers(2, parts, synchronize=lambda: done.append("device"), barrier=lambda: done.append("ranks"))
    with many.timer_of("update"):
        done.append("work")
    assert done == ["device", "clock", "ranks", "device", "clock", "work", "device", "clock"]
    for timer in (many.timer_of("inner"), many("of one rank alone", level=1)):
        done.clear()
        with timer:
            done.append("work")
        assert done == ["device", "clock", "work", "device", "clock"]


def test_the_log_is_megatrons():
    times = {"forward-recv": [0.0, 0.0015], "optimizer": [0.5, 0.25]}
    dots = ["    forward-recv " + "." * 35, "    optimizer " + "." * 38]
    expected = ["(min, max) time across ranks (ms):", f"{dots[0]}: (1.50, 1.50)", f"{dots[1]}: (250.00, 500.00)"]
    assert table(times, "minmax").splitlines() == expected
    assert table(times, "max").splitlines() == ["max time across ranks (ms):", f"{dots[0]}: 1.50", f"{dots[1]}: 500.00"]
    assert table(times, "all").splitlines() == [
        "times across ranks (ms):",
        "  forward-recv:",
        "     rank  1: 1.50",
        "  optimizer:",
        "     rank  0: 500.00",
        "     rank  1: 250.00",
    ]


def test_a_way_back_forgets_what_was_counted(clock, capsys):
    many = Timers(1, {"update": Timed("optimizer", 1)})
    metrics = Metrics(Logging(log_interval=2, timing_log_option="max"), RunSizes(4, 16), timers=many)
    for iteration, seconds in ((1, 100.0), (1, 1.0), (2, 2.0)):
        with many("optimizer"):
            clock(seconds)
        if seconds == 100.0:
            metrics.rollback(0)
        else:
            metrics.record(StepMetrics(iteration, 8, 8, {"lm loss": 1.0}, learning_rate=1e-4))
    assert capsys.readouterr().out.splitlines()[-1].endswith(".: 1500.00")


def _records(folder, kind):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


def _tensors(path):
    with Reader(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


def test_timing_changes_nothing_else(tmp_path, monkeypatch, capsys):
    plain, timed, made = tmp_path / "plain", tmp_path / "timed", []
    build_timers = instruments.build_timers
    monkeypatch.setattr(instruments, "build_timers", lambda *given: made.append(build_timers(*given)) or made[-1])
    flags = f"{TINY} --bf16 --eval-iters 2 --eval-interval 4"
    pretrain_gpt.main([*flags.split(), "--save", str(plain)])
    assert made.pop() is None and "time across ranks" not in capsys.readouterr().out
    more = f"--save {timed} --timing-log-level 2 --log-timers-to-tensorboard --tensorboard-dir {tmp_path}"
    pretrain_gpt.main([*flags.split(), *more.split()])
    for kind, names in dict(step=("lm loss", "grad_norm", "ledger"), eval=("lm loss",)).items():
        found = [[[record[name] for name in names] for record in _records(one, kind)] for one in (plain, timed)]
        assert found[0] == found[1]
    before, after = (_tensors(one / "iter_0000006") for one in (plain, timed))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not _records(plain, "timers") and "(min, max) time across ranks (ms):" in capsys.readouterr().out
    [many] = made
    num_microbatches = 4
    # What is computed in evaluations is no part of a step.
    assert {many(name).uses for name in ("forward-compute", "backward-compute")} == {6 * num_microbatches}
    assert many("evaluate").uses == 3 and many("save-checkpoint").uses == 1
    told = _records(timed, "timers")
    assert [(one["iteration"], one["steps"]) for one in told] == [(3, 3), (4, 1), (6, 3), (6, 1), (6, 1), (6, 1)]
    assert [next(iter(one["seconds"])) for one in told] == [
        "batch-generator",
        "evaluate",
        "batch-generator",
        "save-checkpoint",
        "evaluate",
        "evaluate",
    ]
    for parts in (one["seconds"] for one in told if one["steps"] == 3):
        assert set(parts) >= {*MAIN, "forward-compute", "optimizer-inner-step"} and "params-all-gather" not in parts
    events = b"".join(path.read_bytes() for path in tmp_path.glob("events*"))
    assert b"forward-backward-time" in events and b"save-checkpoint-time vs samples" in events


def test_parts_of_a_pipeline_on_all_ranks(run_ranks, tmp_path, capfd):
    flags = f"{TINY} --pipeline-model-parallel-size 2 --timing-log-level 2 --timing-log-option all --save {tmp_path}"
    run_ranks(2, lambda rank: pretrain_gpt.main(flags.split()))
    assert "  forward-compute:\n     rank  0: " in capfd.readouterr().out
    steps = [record["seconds"] for record in _records(tmp_path, "step")]
    told = [record for record in _records(tmp_path, "timers") if record["steps"] == 3]
    assert [record["iteration"] for record in told] == [3, 6]
    for number, record in enumerate(told):
        ranks = {name: spread["ranks"] for name, spread in record["seconds"].items()}
        for name in (*MAIN, "forward-compute", "backward-compute", "backward-send"):
            assert min(ranks[name]) > 0, name
        # Activations go from the first stage to the last, their gradients the other way.
        assert ranks["forward-recv"][0] == ranks["backward-recv"][1] == ranks["forward-send"][1] == 0
        assert min(ranks["forward-recv"][1], ranks["backward-recv"][0], ranks["forward-send"][0]) > 0
        interval = sum(steps[3 * number : 3 * number + 3]) / 3
        for level in (1, 2):
            names = {phase.timed.name for phase in PHASES.values() if phase.timed.level == level}
            assert sum(ranks[name][0] for name in names & ranks.keys()) <= interval  # which the first rank measures


def test_the_slower_of_two_ranks_is_seen(run_ranks, tmp_path):
    def body(rank):
        there = tmp_path / "there"  # stands while the first rank is where gradients are reduced
        passes, totals, late = step.forward_backward, DistributedOptimizer.reduce_grads, [0.0]

        def slow(*given):
            while not there.exists():
                time.sleep(0.002)
            there.unlink()
            time.sleep(0.2)
            late[0] += 100  # on the clock of this rank
            return passes(*given)

        if rank == 1:
            step.forward_backward = slow
            timers.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])
        else:
            DistributedOptimizer.reduce_grads = lambda *given: there.touch() or totals(*given)
        flags = f"{TINY} --sharding-stage 1 --timing-log-level 1 --no-barrier-with-level-1-timing --save {tmp_path}"
        pretrain_gpt.main(flags.split())

    run_ranks(2, body)
    seconds = _records(tmp_path, "timers")[1]["seconds"]
    assert set(seconds) == {*MAIN, "params-all-gather"}
    assert seconds["forward-backward"]["max"] > 100 > seconds["forward-backward"]["min"] > 0
    # Who is ready first waits for the other where gradients are reduced, as no timer lets them begin together.
    assert 100 > seconds["all-grads-sync"]["max"] > 0.2


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("--timing-log-level 3", "'3' is none of 0, 1, 2"),
        ("--timing-log-option median", "'median' is none of minmax, max, all"),
    ],
)
def test_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        pretrain_gpt.main([*TINY.split(), *wrong.split()])
