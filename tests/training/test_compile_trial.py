# SPDX-License-Identifier: Apache-2.0
"""`--torch-compile auto`: which steps run compiled layers, and what is decided from their times."""

import functools
import json

import pytest
import torch

from megatron.errors import UsageError
from megatron.guard.beat_files import read_beats
from megatron.guard.heartbeat import Heartbeat
from megatron.model.command_line import parse_any
from megatron.settings.general_rules import can_compile
from megatron.training import compile_trial
from megatron.training.rules import remarks, resolve
from tests.training.test_training import TINY, _pretrain, _steps

COMPILED = [False] * 4 + [True] * 2 + [False, True] * 10  # of the steps of a trial


def record(**seconds):
    """The seconds of the steps of a trial, in which a step takes `eager` or `compiled` seconds."""
    return [seconds["compiled" if compiled else "eager"] for compiled in COMPILED]


class Clock:
    """A clock by which the first compiled step takes 30 s, and later ones `compiled` and `eager` seconds."""

    def __init__(self, compiled, eager):
        self.now, self.first, self.step, self.steps = 0.0, 30.0, dict(compiled=compiled, eager=eager), []
        self.calls = 0

    def backend(self, graph, inputs):
        """For torch.compile: changes nothing, and counts the calls of compiled layers."""

        def call(*tensors):
            self.calls += 1
            return graph(*tensors)

        return call

    def perf_counter(self):
        """Called at the begin and the end of a step."""
        if hasattr(self, "before"):
            compiled = self.calls > self.before
            self.steps.append(compiled)
            self.now += self.step["compiled" if compiled else "eager"] + compiled * self.first
            self.first *= not compiled
            del self.before
        else:
            self.before = self.calls
        return self.now


@pytest.mark.sampled(10)
@pytest.mark.parametrize("compiled, kept", [(0.9, True), (0.995, False)])
def test_steps_are_compiled_in_turn_and_the_faster_kind_is_kept(compiled, kept, monkeypatch, tmp_path, capfd):
    """The losses are those of a run that is not compiled."""
    clock = Clock(compiled, 1.0)
    monkeypatch.setattr(compile_trial, "time", clock)
    monkeypatch.setattr(
        torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend=clock.backend)
    )
    calls = []
    hooked = compile_trial.CompileTrial.timed

    def timed(self, run):
        calls.append(clock.calls)
        return hooked(self, run)

    monkeypatch.setattr(compile_trial.CompileTrial, "timed", timed)
    patient, long_steps = Heartbeat.patient, []
    monkeypatch.setattr(
        Heartbeat, "patient", lambda self, seconds: long_steps.append(len(clock.steps)) or patient(self, seconds)
    )
    _pretrain(
        0, f"--torch-compile auto --num-layers 1 --train-iters 2000 --exit-interval 29 --save {tmp_path / 'auto'}"
    )
    assert clock.steps == COMPILED and long_steps == [4, 5]
    later = [after > before for before, after in zip(calls[26:], [*calls[27:], clock.calls], strict=True)]
    assert later == [kept] * 3
    before = clock.calls
    torch.compile(torch.neg, backend=clock.backend)(torch.ones(2))
    assert clock.calls > before  # after the run, torch.compile works as always
    [note] = [one for one in notes(tmp_path / "auto") if one.get("what") == "torch compile"]
    assert note["iteration"] == 26 and note["words"] in capfd.readouterr().out
    assert ("layers are compiled" in note["words"]) == kept
    if kept:
        assert "10.0% less" in note["words"] and "takes 900.00 ms" in note["words"]
        assert "saves about 197.40 s; compiling took 31.80 s" in note["words"]  # 1974 steps of 0.1 s
    _pretrain(0, f"--num-layers 1 --train-iters 2000 --exit-interval 29 --save {tmp_path / 'eager'}")
    losses = [[step["lm loss"] for step in _steps(tmp_path / name)] for name in ("auto", "eager")]
    # Compiled layers take torch's kernels
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 29
    assert losses[0][:4] == losses[1][:4]


def notes(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "note"]


def test_the_supervisor_waits_for_the_compiler(tmp_path):
    """It allows five times the usual time of a phase (tests/tools/test_supervise.py)."""
    heartbeat = Heartbeat(str(tmp_path))
    for phase in "FBFB":
        heartbeat.beat(phase, step=1)
    with heartbeat.patient(600.0):
        for phase in "FB":
            heartbeat.beat(phase, step=2)
            assert read_beats(tmp_path)[0].usual > 500
    heartbeat.beat("F", step=3)
    assert read_beats(tmp_path)[0].usual < 1
    heartbeat.close()


def test_a_short_run_never_starts_the_compiler(monkeypatch, capfd):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **more: pytest.fail("compiled"))
    _pretrain(0, "--torch-compile auto --train-iters 6")
    assert "auto: layers are not compiled: the 2 steps left take about" in capfd.readouterr().out


def test_verdicts():
    judge = compile_trial.judge
    # 6 % of 900 s is less than a minute; the first step is left out
    assert judge([9.0, 1.0, 1.0, 5.0], 900)[0] is False
    assert judge([9.0, 1.0, 1.0, 5.0], 1100) is None
    assert judge([99.0] * 4, 26)[0] is False  # too few steps for the trial
    noisy = record(eager=1.0, compiled=0.95)
    noisy[10] = noisy[15] = 60.0  # two slow steps
    assert judge(noisy, 10_000)[0] and "5.0% less" in judge(noisy, 10_000)[1]
    drifting = [seconds * (1 + 0.02 * step) for step, seconds in enumerate(record(eager=1.0, compiled=1.05))]
    assert not judge(drifting, 10_000)[0] and "more" in judge(drifting, 10_000)[1]


def test_what_cannot_be_compiled_is_left_as_it_is():
    """With --torch-compile alone it is an error (tests/settings/test_rules.py)."""
    zero3 = "--sharding-stage 3"
    config = parse_any(f"{TINY} --train-iters 5 --torch-compile auto {zero3}".split())
    assert config.kernels.torch_compile == "auto" and not can_compile(config, 2)
    resolved = resolve(config, 2)
    assert resolved.kernels.torch_compile is False
    assert any(
        "--torch-compile auto compiles nothing here: --torch-compile needs all" in one for one in remarks(resolved, 2)
    )
    other = resolve(parse_any(f"{TINY} --train-iters 5 --torch-compile auto".split()), 2)
    assert other.kernels.torch_compile == "auto" and not any("compile" in one for one in remarks(other, 2))


@pytest.mark.parametrize(
    "words, found",
    [("", False), ("--torch-compile", True), ("--torch-compile true", True), ("--no-torch-compile", False)],
)
def test_other_values(words, found):
    assert parse_any(f"{TINY} --train-iters 5 {words}".split()).kernels.torch_compile is found


@pytest.mark.parametrize("words", ["--torch-compile maybe", "--no-torch-compile auto"])
def test_wrong_values(words):
    with pytest.raises(UsageError, match="none of true, false, auto|true or false, got auto"):
        parse_any(f"{TINY} --train-iters 5 {words}".split())
