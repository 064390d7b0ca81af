# SPDX-License-Identifier: Apache-2.0
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron.errors import SettingsError
from megatron.settings.schema import Logging
from megatron.telemetry import metrics as module
from megatron.telemetry.history import read_history
from megatron.telemetry.metrics import Metrics, metrics_path
from megatron.telemetry.run_record import JsonLines, run_record
from megatron.telemetry.step_metrics import RunSizes, StepMetrics

# A pattern that users have for Megatron-LM's log line, field by field.
LINE = re.compile(
    r"^ \[(\d+-\d+-\d+ \d+:\d+:\d+)\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) "
    r"\| elapsed time per iteration \(ms\): ([\d.]+) \| learning rate: ([\d.E+-]+) \| global batch size: +(\d+) "
    r"\| lm loss: ([\d.E+-]+) \| loss scale: ([\d.]+) \| grad norm: ([\d.]+) "
    r"\| number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|"
)


class Clock:
    """A clock that only moves when told to."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def step(iteration: int, loss: float = 2.0, size: int = 8, **more) -> StepMetrics:
    given = dict(losses={"lm loss": loss}, learning_rate=1e-4, grad_norm=1.5)
    return StepMetrics(iteration, size * iteration, size, **{**given, **more})


def take(metrics: Metrics, clock: Clock, seconds: float, *steps: StepMetrics) -> None:
    for one in steps:
        clock.now += seconds
        metrics.record(one)


def test_console_line_is_megatrons_with_rates_behind_it(clock, capsys):
    run = RunSizes(train_iters=40, sample_tokens=16, ranks=2, flops_per_token=1e9, peak_flops=1e12, device="cuda")
    metrics = Metrics(Logging(log_interval=2), run)
    take(metrics, clock, 0.5, step(1, 4.0), step(2, 2.0, loss_scale=4096.0))
    line = capsys.readouterr().out.rstrip("\n")
    found = LINE.match(line)
    assert found.groups()[1:] == (
        "2",
        "40",
        "16",
        "500.0",
        "1.000000E-04",
        "8",
        "3.000000E+00",
        "4096.0",
        "1.500",
        "0",
        "0",
    )
    # 8 samples x 16 tokens in 0.5 s; 1 GFLOP a token over 2 ranks of 1 TFLOP/s
    rest = line[found.end() :]
    assert rest == " tokens per second: 256.0 | throughput per GPU (TFLOP/s/GPU): 0.1 | MFU: 12.8% | ETA: 0:00:19 |"


def test_lines_come_at_multiples_of_the_interval_and_start_over_after_each(clock, capsys):
    metrics = Metrics(Logging(log_interval=3), RunSizes(9, 16), iteration=4)
    take(metrics, clock, 1.0, *[step(n, loss=float(n)) for n in range(5, 10)])
    losses = [float(LINE.match(line)[8]) for line in capsys.readouterr().out.splitlines()]
    assert losses == [5.5, 8.0]


def test_skipped_steps_have_no_part_in_the_mean_loss(clock, capsys):
    metrics = Metrics(Logging(log_interval=4), RunSizes(8, 16))
    bad = [step(2, math.inf, skipped=True), step(3, 100.0, skipped=True)]
    take(metrics, clock, 1.0, step(1, 3.0), *bad, step(4, 5.0))
    take(metrics, clock, 1.0, *[step(n, math.nan, skipped=True) for n in range(5, 9)])
    first, second = capsys.readouterr().out.splitlines()
    assert LINE.match(first).groups()[7] == "4.000000E+00"
    assert LINE.match(first).groups()[10:] == ("2", "1")
    assert "lm loss" not in second and "skipped iterations:   4 " in second and "nan iterations:   4 " in second


def test_evaluation_and_checkpoints_are_not_part_of_a_steps_time(clock, capsys):
    metrics = Metrics(Logging(log_interval=2), RunSizes(4, 16))
    clock.now += 100.0
    metrics.start()
    take(metrics, clock, 1.0, step(1))
    clock.now += 0.25
    with metrics.paused():
        clock.now += 50.0
    take(metrics, clock, 0.75, step(2))
    assert LINE.match(capsys.readouterr().out)[5] == "1000.0"


def test_evaluation_line_is_megatrons(capsys):
    Metrics(Logging(), RunSizes(10, 16)).record_eval(10, 80, {"lm loss": 2.0})
    rule, line, again = capsys.readouterr().out.splitlines()
    assert line == " validation loss at iteration 10 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert rule == again == "-" * (len(line) + 1)


def test_perplexity_is_capped_as_megatrons(capsys):
    Metrics(Logging(), RunSizes(10, 16)).record_eval(10, 80, {"lm loss": 90.0}, split="test", final=True)
    out = capsys.readouterr().out
    assert " validation loss at iteration 10 on test set |" in out and f"PPL: {math.exp(20):.6E}" in out


def test_silent_ranks_print_and_open_nothing(tmp_path, clock, capsys):
    logging = Logging(log_interval=1, tensorboard_dir=str(tmp_path / "tb"), metrics_file=str(tmp_path / "m.jsonl"))
    with Metrics(logging, RunSizes(2, 16), active=False) as metrics:
        take(metrics, clock, 1.0, step(1))
        metrics.record_eval(1, 8, {"lm loss": 1.0})
        metrics.log("nothing")
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_where_the_json_lines_go():
    assert metrics_path(Logging(), None) is None
    assert str(metrics_path(Logging(), "runs/a")) == "runs/a/metrics.jsonl"
    assert str(metrics_path(Logging(metrics_file="x.jsonl"), "runs/a")) == "x.jsonl"


def test_json_lines_hold_run_steps_and_evaluations(tmp_path, clock):
    header = run_record({"lr": 1.0}, {"tp": 1, "dp": 2}, question="why")
    with Metrics(Logging(), RunSizes(4, 16), header=header, save=str(tmp_path)) as metrics:
        take(metrics, clock, 0.5, step(1, extra={"memory": 3.0}), step(2, math.nan, grad_norm=math.inf))
        metrics.record_eval(2, 16, {"lm loss": 2.0}, seconds=7.0)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["kind"] for line in lines] == ["run", "step", "step", "eval"]
    assert lines[0]["mesh"] == {"tp": 1, "dp": 2} and lines[0]["versions"]["python"] and lines[0]["question"] == "why"
    assert lines[1] == {
        "kind": "step",
        "iteration": 1,
        "consumed_samples": 8,
        "batch_size": 8,
        "lm loss": 2.0,
        "learning_rate": 1e-4,
        "grad_norm": 1.5,
        "loss_scale": 1.0,
        "skipped": False,
        "seconds": 0.5,
        "tokens_per_second": 256.0,
        "tflops_per_rank": 0.0,
        "samples_per_second": 16.0,
        "steps_per_second": 2.0,
        "samples_per_second_per_data_rank": 16.0,
        "tokens_per_second_per_data_rank": 256.0,
        "memory": 3.0,
    }
    assert lines[2]["lm loss"] is None and lines[2]["grad_norm"] is None
    assert lines[3]["lm loss ppl"] == pytest.approx(math.exp(2)) and lines[3]["seconds"] == 7.0


def test_a_resumed_run_takes_back_what_a_killed_one_wrote_behind_its_checkpoint(tmp_path, clock):
    path = tmp_path / "metrics.jsonl"
    with Metrics(Logging(), RunSizes(9, 16), save=str(tmp_path)) as killed:
        take(killed, clock, 1.0, *[step(n, loss=1.0) for n in range(1, 6)])
        killed.record_eval(4, 32, {"lm loss": 1.0})
    with path.open("a") as file:
        file.write('{"kind": "step", "iteration": 6, "lm lo')  # torn by the kill
    with Metrics(Logging(), RunSizes(9, 16), save=str(tmp_path), iteration=3) as resumed:
        take(resumed, clock, 1.0, *[step(n, loss=2.0) for n in range(4, 8)])
    history = read_history(path)
    assert [(s["iteration"], s["lm loss"]) for s in history.steps] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
        (7, 2.0),
    ]
    assert (history.evals, history.starts, history.damaged_lines) == ([], [0, 3], 1)


def test_a_full_disk_stops_the_log_and_not_the_training(tmp_path, clock, capsys, monkeypatch):
    def full(self, record):
        raise OSError(28, "No space left on device")

    with Metrics(Logging(), RunSizes(4, 16), save=str(tmp_path)) as metrics:
        monkeypatch.setattr(JsonLines, "write", full)
        take(metrics, clock, 1.0, step(1), step(2))
    assert capsys.readouterr().out.count("is no longer written: [Errno 28] No space left") == 1


def test_tensorboard_has_megatrons_tags_over_iterations_and_samples(tmp_path, clock):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    with Metrics(
        Logging(log_interval=2, tensorboard_dir=str(tmp_path)), RunSizes(4, 16, flops_per_token=1e12)
    ) as metrics:
        take(metrics, clock, 0.5, step(1, 3.0), step(2, 2.0))
        metrics.record_eval(2, 16, {"lm loss": 1.0})
        metrics.record_experts(2, 16, {"blocks.1": [6, 2, 4]})
    (path,) = tmp_path.iterdir()
    points = {}
    for event in reader.EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            points.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    tags = [
        "lm loss",
        "learning-rate",
        "grad-norm",
        "loss-scale",
        "batch-size",
        "throughput",
        "iteration-time",
        "lm loss validation",
        "lm loss validation ppl",
        "largest expert load/blocks.1",
        "smallest expert load/blocks.1",
    ]
    assert points["largest expert load/blocks.1"] == [(2, 1.5)]
    assert set(points) == {*tags, *(f"{tag} vs samples" for tag in tags)}
    assert points["lm loss"] == [(1, 3.0), (2, 2.0)]
    assert points["lm loss vs samples"] == [(8, 3.0), (16, 2.0)]
    assert points["iteration-time"] == [(2, 0.5)] and points["throughput"] == [(2, 256.0)]


@pytest.mark.parametrize(
    "flag, package, value",
    [
        ("tensorboard_dir", "tensorboard", "folder"),
        ("visualdl_dir", "visualdl", "folder"),
        ("wandb_project", "wandb", "name"),
        ("metrics_port", "prometheus-client", 0),
    ],
)
def test_a_missing_library_is_named_with_its_flag(flag, package, value, tmp_path, monkeypatch):
    module = package.replace("-", "_")
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=f"--{flag.replace('_', '-')} needs the package {package}"):
        Metrics(Logging(**{flag: value}), RunSizes(4, 16))


def test_visualdl_gets_the_curves(monkeypatch, clock, tmp_path):
    calls = []

    class LogWriter:
        def __init__(self, logdir):
            calls.append(logdir)

        def add_scalar(self, tag, value, step):
            calls.append((tag, value, step))

        def close(self):
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "visualdl", SimpleNamespace(LogWriter=LogWriter))
    with Metrics(Logging(visualdl_dir=str(tmp_path)), RunSizes(2, 16)) as metrics:
        take(metrics, clock, 0.5, step(1, 3.0), step(2, 2.0))
        metrics.record_eval(2, 16, {"lm loss": 1.0})
    assert calls[0] == str(tmp_path) and calls[-1] == "closed"
    assert [call for call in calls if call[0] == "lm loss"] == [("lm loss", 3.0, 1), ("lm loss", 2.0, 2)]
    assert {("learning-rate", 1e-4, 2), ("iteration-time", 0.5, 2), ("lm loss validation", 1.0, 2)} <= set(calls[1:-1])


def test_weights_and_biases_gets_the_settings_and_the_curves(monkeypatch, clock):
    calls = []

    class Fake:
        def init(self, **given):
            calls.append(given)
            return self

        def log(self, values):
            calls.append(values)

        def finish(self):
            calls.append("finish")

    monkeypatch.setitem(sys.modules, "wandb", Fake())
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    logging, header = Logging(wandb_project="p", wandb_exp_name="n"), dict(kind="run", a=1)
    with Metrics(logging, RunSizes(4, 16), header=header, wandb_run="a1") as metrics:
        take(metrics, clock, 0.5, step(1, 3.0))
    assert calls[0] == dict(project="p", name="n", dir=None, id="a1", resume="allow", config=dict(kind="run", a=1))
    assert calls[1]["lm loss"] == 3.0 and calls[1]["consumed-samples"] == 8 and calls[1]["iteration"] == 1
    assert calls[2] == "finish"


def test_importing_brings_neither_torch_nor_the_trackers():
    heavy = "('torch', 'numpy', 'tensorboard', 'tqdm')"
    code = f"import sys, megatron.telemetry.metrics; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
