# SPDX-License-Identifier: Apache-2.0
"""Runs whose metrics are not beside their checkpoints: who knows the --save folder finds them, or says what is known."""

import json
import os
import re
import time

import pytest

from megatron.guard import run_state
from megatron.settings.schema import Logging
from megatron.telemetry.metrics import Metrics
from megatron.telemetry.run_folder import find_metrics
from megatron.telemetry.step_metrics import RunSizes, StepMetrics
from megatron.tools import report, status

CONFIG = dict(
    model=dict(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=16),
    batch=dict(train_iters=20, micro_batch_size=2, global_batch_size=8),
)


def config(save, **logging):
    return {**CONFIG, "checkpoint": dict(save=str(save)), "logging": logging}


def train(save, metrics_file=None, steps=20):
    """What a run of so many steps writes of itself, without training."""
    header = dict(kind="run", iteration=0, pid=os.getpid(), config=config(save), mesh=dict(replicate=1, shard=1))
    settings = Logging(metrics_file=metrics_file and str(metrics_file), console="full")
    with Metrics(settings, RunSizes(20, 16), header=header, save=str(save)) as metrics:
        for n in range(1, steps + 1):
            metrics.record(StepMetrics(n, 8 * n, 8, {"lm loss": 3.0}, learning_rate=1e-3))
        metrics.end(steps, 0, "")


def checkpoint(save, iteration, age=500.0, **logging):
    """A complete checkpoint, as far as its files say so."""
    folder = save / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(dict(config=config(save, **logging), mesh=dict(shard=1))))
    (folder / "index.json").write_text("{}")
    os.utime(folder / "index.json", (time.time() - age,) * 2)


def test_status_and_report_follow_the_path_that_a_run_leaves(tmp_path):
    """Also after both were moved together, and until a launch writes into the folder again."""
    old = tmp_path / "old"
    train(old / "checkpoints", metrics_file=old / "metrics.jsonl")
    checkpoint(old / "checkpoints", 20)
    old.rename(tmp_path / "new")
    save = tmp_path / "new" / "checkpoints"
    assert find_metrics(save) == tmp_path / "new" / "metrics.jsonl"
    line = run_state.look(save)
    assert (line.state, line.iteration, line.iterations, line.loss, line.checkpoint) == ("done", 20, 20, 3.0, 20)
    assert line.age < 100
    assert [path.name for path in run_state.folders([str(tmp_path)])] == ["new"]
    assert "training loss" in report.build(save)
    train(save, steps=10)
    assert find_metrics(save) == save / "metrics.jsonl" and run_state.look(save).iteration == 10


@pytest.mark.parametrize("iteration, state", [(20, "done"), (12, "unknown")])
def test_without_metrics_the_checkpoint_is_what_is_known(iteration, state, tmp_path, capsys):
    """No age of its own: it was 20,779 days, since 1970."""
    checkpoint(tmp_path / "run", iteration)
    line = run_state.look(tmp_path / "run")
    assert (line.state, line.iteration, line.iterations, line.checkpoint) == (state, iteration, 20, iteration)
    assert 499 < line.age < 600 and 499 < line.checkpoint_age < 600
    status.main([str(tmp_path / "run")])
    told = capsys.readouterr().out
    assert f"{iteration}/20" in told and "no metrics.jsonl: known from its last checkpoint" in told
    assert not re.search(r"\d+ d ago", told)
    (tmp_path / "run" / f"iter_{iteration:07d}" / "state.json").write_text("{")
    line = run_state.look(tmp_path / "run")
    assert (line.state, line.iteration, line.iterations) == ("unknown", iteration, None)


def test_metrics_that_are_gone_are_none(tmp_path):
    train(tmp_path / "run", metrics_file=tmp_path / "elsewhere.jsonl")
    checkpoint(tmp_path / "run", 20)
    (tmp_path / "elsewhere.jsonl").unlink()
    assert find_metrics(tmp_path / "run") is None
    assert run_state.look(tmp_path / "run").state == "done"


def test_a_run_of_an_earlier_version_is_found_by_its_checkpoint(tmp_path, monkeypatch):
    """Where the path means the same: from another folder it may be that of another run."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        train("run", metrics_file="log.jsonl")
        checkpoint(tmp_path / name / "run", 20, metrics_file="log.jsonl")
        (tmp_path / name / "run" / "metrics_file.txt").unlink()
    assert find_metrics(tmp_path / "two" / "run").read_text() and run_state.look(tmp_path / "two" / "run").loss == 3.0
    assert find_metrics(tmp_path / "one" / "run") is None
