# SPDX-License-Identifier: Apache-2.0
"""The latency table: its rows, its memory against the tensors, its times against the clock; FleetX's flags."""

import json
import time

import pytest
import torch

from megatron.errors import Failure, SettingsError
from megatron.tools import benchmark_inference as tool
from megatron.tools import export, plan

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 99 --device cpu --warmup 1".split()


def rows(capsys, *flags: str) -> list[dict]:
    tool.main([*flags, "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.plain_cpu
def test_every_combination_is_a_row(capsys):
    start = time.perf_counter()
    flags = "--seq_len 8 40 --output-length 1 4 --batch-size 1 3 --iter 2 --precisions fp32 bf16".split()
    found = rows(capsys, *SHAPE, *flags)
    took = 1000 * (time.perf_counter() - start)
    keys = {(row["prompt"], row["output"], row["batch"], row["precision"]) for row in found}
    assert len(keys) == len(found) == 16
    assert sum(row["whole"] for row in found) < took
    for row in found:
        assert row["first"] <= row["whole"] and (row["token"] is None) == (row["output"] == 1)
        assert row["tokens_per_second"] == pytest.approx(1000 * row["batch"] * row["output"] / row["whole"])
        size = 4 if row["precision"] == "fp32" else 2
        blocks = row["batch"] * -(-(row["prompt"] + row["output"]) // 16)
        assert row["cache"] == pytest.approx(blocks * 16 * 2 * 2 * 32 * 4 / 1e6)  # fp32 on a CPU
        layers = 2 * (12 * 32 * 32 + 13 * 32)  # two layers with biases and norms
        assert row["weights"] == pytest.approx((layers + 128 * 32 + 1024 * 32 + 2 * 32) * size / 1e6)
        assert row["peak"] > row["weights"]


def test_a_checkpoint_and_its_table(checkpoint, capsys):
    line = ["--load", str(checkpoint), "--prompt-length", "4", "--batch-size", "2", "--iter", "1", "--device", "cpu"]
    tool.main(line)
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["prompt", "output", "batch", "precision"] and row.split()[:3] == ["4", "8", "2"]
    tool.main([*line, "--markdown"])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("| prompt | output | batch |") and len({line.count("|") for line in out}) == 1
    with pytest.raises(SettingsError, match="a prompt of 40 and 8 new tokens are more than the model's 32 positions"):
        tool.main([*line, "--then", "--seq-len", "40"])


@pytest.mark.sampled(10)
def test_an_export_is_measured(checkpoint, tmp_path, capsys):
    """A program, by PaddleFleetX's own words: it computes all texts of a batch at once."""
    for kind in ("generation", "lm"):
        words = f"--load {checkpoint} --output {tmp_path / kind} --format torch-export --kind {kind} --no-check"
        export.main(words.split())
        capsys.readouterr()
        line = f"--seq_len 6 --iter 2 --mp_degree 1 --model_dir {tmp_path / kind} --output-len 3 --batch-size 2"
        [row] = rows(capsys, *line.split(), "--device", "cpu")
        assert (row["prompt"], row["output"], row["batch"], row["precision"]) == (6, 3, 2, "fp32")
        assert row["tokens_per_second"] == pytest.approx(1000 * 6 / row["whole"])
        assert row["first"] + 2 * row["token"] == pytest.approx(row["whole"], rel=0.5)
        [file] = (tmp_path / kind).glob("*.pt2")
        assert row["weights"] == pytest.approx(file.stat().st_size / 1e6)
        past = 2 * 2 * 2 * (6 + 3 - 1) * 32 * 4  # keys and values, layers, texts, tokens, width
        assert row["cache"] == pytest.approx(past / 1e6 if kind == "generation" else 0)
    with pytest.raises(SettingsError, match="a prompt of 40 and 3 new tokens are more than the model's 32 positions"):
        tool.main([*line.split(), "--device", "cpu", "--then", "--seq-len", "40"])


@pytest.mark.sampled(5)
def test_ranks_share_the_model(run_ranks, capfd):
    def body(rank):
        torch.set_num_threads(1)
        tool.main([*SHAPE, *"--seq_len 6 --batch-size 2 --iter 1 --mp_degree 2 --json".split()])

    run_ranks(2, body)
    [line] = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    row = json.loads(line)
    assert row["batch"] == 2 and row["cache"] == pytest.approx(2 * 16 * 2 * 2 * 16 * 4 / 1e6)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--batch-size 0", "--batch-size 0: has to be 1 or more"),
        ("--iter 0", "--iterations 0: has to be 1 or more|--iter 0: has to be 1 or more"),
        ("--markdown --json", "--markdown and --json were both given"),
        ("--mp_degree 2", "tensor 2 x pipeline 1 = 2 ranks, and this job has 1"),
    ],
)
def test_what_cannot_be_measured(flags, words):
    with pytest.raises(Failure, match=words):
        tool.main([*SHAPE, *flags.split()])


def test_a_checkpoint_is_planned_by_its_shape(checkpoint, capsys):
    """`plan --mode inference` needs no flag for it; texts are as long as its context."""
    plan.main(
        ["--mode", "inference", "--world-size", "1", "--device-name", "A100", "--load", str(checkpoint), "--json"]
    )
    record = json.loads(capsys.readouterr().out)
    assert (record["prompt_length"], record["output_length"]) == (26, 6)  # 4/5 and 1/5 of 32
    plan.main(
        ["--mode", "inference", "--world-size", "1", "--load", str(checkpoint), "--prompt-length", "29", "--json"]
    )
    assert json.loads(capsys.readouterr().out)["output_length"] == 3
    with pytest.raises(SettingsError, match=r"(?s)than the 32 positions of the model.*shorter ones"):
        plan.main(["--mode", "inference", "--load", str(checkpoint), "--prompt-length", "30", "--output-length", "3"])
