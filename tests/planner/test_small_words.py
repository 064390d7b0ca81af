# SPDX-License-Identifier: Apache-2.0
"""Small things that are said before and after a training: drawings that fit, packages that lack, names, plurals."""

import importlib.util
import re

import pytest

import pretrain_gpt
from megatron.data.indexed import IndexedDataset
from megatron.errors import DataError, SettingsError
from megatron.pipeline.stages import Pipeline
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Parallel
from megatron.tools import flag_docs
from megatron.training.rules import remarks

TINY = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data --vocab-size 50 --lr 1e-3 "
    "--micro-batch-size 1 --train-iters 1 --eval-iters 0 --device cpu"
)
LARGE = (
    "--num-layers 32 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --mock-data --vocab-size 512 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 64 --train-iters 10 --pipeline-model-parallel-size 16 --dry-run "
    "--world-size 16 --device-name A100-80GB"
)


@pytest.mark.parametrize("wide", [False, True])
def test_a_schedule_of_many_stages_shows_backward_passes_on_every_rank(wide, capsys):
    pretrain_gpt.main([*LARGE.split(), *(["--wide"] if wide else [])])
    said = capsys.readouterr().out
    rows = re.findall(r"^rank +\d+ \|(.*)$", said, re.MULTILINE)
    drawn = int(re.search(r"of which (\d+) are drawn", said)[1])
    assert len(rows) == 16 and not any("..." in row for row in rows)
    assert all("B" in row for row in rows) and (wide or max(map(len, rows)) <= 80)
    if wide:  # every pass has its label
        assert all(len(re.findall(r"F\d+", row)) == len(re.findall(r"B\d+", row)) == drawn for row in rows)


def test_an_interleaved_schedule_is_named():
    p = Parallel(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    assert Pipeline.of(p, num_layers=4).describe(4).startswith("pipeline interleaved: layers 0 and 2 | 1 and 3")
    assert Pipeline.of(Parallel(pipeline_model_parallel_size=2), num_layers=4).describe(4).startswith("pipeline 1f1b:")


@pytest.mark.parametrize("flag, package", [("--wandb-project", "wandb"), ("--tensorboard-dir", "tensorboard")])
def test_a_tracker_that_is_not_installed_is_told_before_anything_is_built(flag, package, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))
    monkeypatch.delitem(__import__("sys").modules, package, raising=False)
    monkeypatch.setattr("megatron.entry.train", lambda *args: pytest.fail("it has begun"))
    with pytest.raises(SettingsError, match=f"{flag} needs the package {package}"):
        pretrain_gpt.main([*TINY.split(), flag, "x"])
    with pytest.raises(SettingsError, match=f"{flag} needs the package {package}"):
        pretrain_gpt.main([*TINY.split(), flag, "x", "--dry-run"])


def test_half_a_dataset(tmp_path):
    (tmp_path / "x.bin").touch()
    with pytest.raises(DataError, match=r"x\.bin is there: its \.idx was not copied"):
        IndexedDataset(tmp_path / "x")


def test_the_list_of_values_that_ask_for_nothing_has_whole_code_spans():
    [line] = [line for line in flag_docs.page().splitlines() if "`--nnodes 1`" in line]
    assert line.count("`") % 2 == 0 and "`--inference-max-requests 8`" in line


def test_no_evaluation_is_announced_where_there_is_none():
    said = lambda split: [
        remark
        for remark in remarks(parse_pretrain(f"{TINY} --eval-iters 2 --data-path x --split {split}".split()), 1)
        if "evaluation happens" in remark
    ]
    assert said("100,0,0") == [] and len(said("90,10,0")) == 1


def test_the_end_of_training_is_said_once(capsys):
    pretrain_gpt.main(TINY.split())
    said = capsys.readouterr().out
    pattern = r"^\[after training is done\] datetime: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$"
    assert len(re.findall(pattern, said, re.MULTILINE)) == 1


@pytest.mark.parametrize("save, told", [("out", True), ("gone", False)])
def test_a_load_without_a_checkpoint_beside_a_pretrained_one_is_told(save, told):
    """With the same folder to --load and --save the next start resumes; with another it never does."""
    config = parse_pretrain([*TINY.split(), "--load", "gone", "--save", save])
    start = "--load gone holds no checkpoint: training starts from --pretrained-checkpoint base"
    assert (start in remarks(config.derive("--pretrained-checkpoint", load="base"), 1)) == told
    assert start not in remarks(config, 1)
