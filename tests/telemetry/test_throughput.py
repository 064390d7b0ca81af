# SPDX-License-Identifier: Apache-2.0
"""Samples, steps and tokens per second, in all and of a data-parallel rank, against counts by hand on a set clock."""

import json
import re

import pytest

import pretrain_gpt
from megatron.settings.schema import Logging
from megatron.telemetry import metrics as module
from megatron.telemetry.log_lines import short_line
from megatron.telemetry.metrics import Metrics
from megatron.telemetry.step_metrics import Interval, RunSizes, StepMetrics

# 4 ranks, of which 2 are data parallel; samples of 16 tokens; 1 GFLOP a token
SIZES = dict(sample_tokens=16, ranks=4, data_ranks=2, flops_per_token=1e9)


def take(monkeypatch, folder, seconds, *, ignore=0, left_out=(), wanted=True, train_iters=None):
    """Record steps of 8 samples that take so many seconds; returns the records."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    logging = Logging(log_interval=2, log_throughput=wanted, throughput_ignore_steps=ignore)
    with Metrics(logging, RunSizes(train_iters or len(seconds), **SIZES), save=str(folder)) as metrics:
        metrics.start()
        for number, took in enumerate(seconds, 1):
            now[0] += took
            losses = {} if number in left_out else {"lm loss": 2.0}
            metrics.record(StepMetrics(number, 8 * number, 8, losses, learning_rate=1e-4, skipped=not losses))
        metrics.log_mean_throughput(len(seconds))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rates_of_a_step_and_of_a_line(tmp_path, monkeypatch, capsys):
    records = take(monkeypatch, tmp_path, [0.5, 0.25])
    first, second = [one for one in records if one["kind"] == "step"]
    assert (first["samples_per_second"], first["steps_per_second"], first["tokens_per_second"]) == (16, 2, 256)
    assert (first["samples_per_second_per_data_rank"], first["tokens_per_second_per_data_rank"]) == (8, 128)
    assert (second["samples_per_second"], second["steps_per_second"]) == (32, 4)
    line = capsys.readouterr().out.splitlines()[0]  # 16 samples and 2 steps in 0.75 s
    assert line.count("tokens per second: 341.3 | samples per second: 21.33 | steps per second: 2.667 |") == 1
    assert "| tokens per second per data rank: 170.7 | ETA: " in line
    take(monkeypatch, tmp_path / "plain", [0.5, 0.25], wanted=False)
    said = capsys.readouterr().out
    assert "samples per second" not in said and "mean throughput" not in said


def test_rates_with_causal_attention_stand_beside_the_others(tmp_path, monkeypatch, capsys):
    """Of 1 GFLOP a token .8 are left: 16 samples of 16 tokens a second on 4 ranks. Lines keep what parsers look for."""
    monkeypatch.setitem(SIZES, "seen_flops_per_token", 0.8e9)
    monkeypatch.setitem(SIZES, "peak_flops", 0.1e12)
    records = take(monkeypatch, tmp_path, [0.5, 0.5])
    first, second = [one for one in records if one["kind"] == "step"]
    assert (first["tflops_per_rank"], first["mfu"]) == (pytest.approx(0.064), pytest.approx(0.64))
    assert (first["tflops_per_rank_causal"], first["mfu_causal"]) == (pytest.approx(0.0512), pytest.approx(0.512))
    line, *_, mean = capsys.readouterr().out.splitlines()
    assert "throughput per GPU (TFLOP/s/GPU): 0.064 |" in line and "| MFU: 64.0% |" in line
    assert "| TFLOP/s with causal attention: 0.051 | MFU with causal attention: 51.2% | ETA:" in line
    assert mean.endswith("a rank 0.064 TFLOP/s, MFU 64.0%, with causal attention 0.0512 TFLOP/s and MFU 51.2%")
    step, run = StepMetrics(1, 8, 8, {}, 1e-4), RunSizes(2, **SIZES)
    interval = Interval(seconds=0.5, samples=8, advanced=1)
    wide, narrow = (short_line(step, interval, run, first, width) for width in (140, 62))
    assert "MFU 64%  causal 51%" in wide and "MFU 64%" in narrow and "causal" not in narrow
    monkeypatch.setitem(SIZES, "seen_flops_per_token", 1e9)  # no attention is causal
    assert "mfu_causal" not in take(monkeypatch, tmp_path / "both", [0.5])[0]


def test_the_mean_leaves_the_first_steps_of_a_start_out(tmp_path, monkeypatch, capsys):
    seconds = [9.0, 5.0, 0.5, 0.001, 1.0, 0.5]
    *_, mean = take(monkeypatch, tmp_path, seconds, ignore=2, left_out=[4])  # whose samples nobody trained on
    assert (mean["kind"], mean["iteration"], mean["steps"], mean["ignored"]) == ("throughput", 6, 3, 2)
    assert mean["samples_per_second"] == 12 and mean["steps_per_second"] == 1.5  # 24 samples in 2 s
    assert mean["tokens_per_second"] == 192 and mean["tokens_per_second_per_data_rank"] == 96
    assert mean["tflops_per_rank"] == pytest.approx(0.048)
    line = (
        "mean throughput over 3 steps (without the first 2 of this start): 12 samples/s, 1.5 steps/s, 192 tokens/s, "
        "a data rank 6 samples/s and 96 tokens/s, a rank 0.048 TFLOP/s"
    )
    assert line in capsys.readouterr().out.splitlines()
    take(monkeypatch, tmp_path / "none", [1.0, 1.0], ignore=2)
    assert "--throughput-ignore-steps 2 leaves no step of this start" in capsys.readouterr().out
    *_, mean = take(monkeypatch, tmp_path / "all", [1.0, 3.0])
    assert mean["samples_per_second"] == 4 and "over 2 steps: 4 samples/s" in capsys.readouterr().out


def test_a_run_and_its_data_ranks(run_ranks, tmp_path):
    flags = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 99 --lr 1e-2 "
        "--micro-batch-size 1 --global-batch-size 4 --device cpu --num-workers 0 --eval-iters 0 --train-iters 6 "
        f"--log-throughput --throughput-ignore-steps 1 --exit-interval 4 --save {tmp_path}"
    ).split()
    run_ranks(2, lambda rank: pretrain_gpt.main(flags))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in records if one["kind"] == "step"]
    [mean] = [one for one in records if one["kind"] == "throughput"]
    assert mean["steps"] == 3 and mean["samples_per_second"] == pytest.approx(
        12 / sum(step["seconds"] for step in steps[1:]), rel=1e-3
    )
    for one in (*steps, mean):
        assert one["tokens_per_second_per_data_rank"] == pytest.approx(one["tokens_per_second"] / 2, rel=1e-3)
    said = (tmp_path / "train.log").read_text()
    assert len(re.findall("^mean throughput over 3 steps", said, re.M)) == 1  # also of a run that stops early
