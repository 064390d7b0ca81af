# SPDX-License-Identifier: Apache-2.0
"""A checkpoint written in one layout goes on in any other: weights, moments, counts, and so the training that follows."""

import json
from functools import cache

import pytest

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.parity import parse_layout

FLAGS = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --global-batch-size 8 --micro-batch-size 1 --train-iters 6 --eval-iters 1 --precision fp32 --device cpu
    --num-workers 0"""


def _flags(layout):
    layout = parse_layout(layout)
    words = f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp} "
    words += f"--sharding-stage {layout.zero} " + "--sequence-parallel " * layout.sp
    words += f"--num-layers-per-virtual-pipeline-stage {4 // layout.pp // layout.vp} " * (layout.vp > 1)
    return words + f"--pipeline-schedule {layout.schedule} " * bool(layout.schedule)


def _run(run_ranks, layout, flags):
    def body(rank):
        pretrain_gpt.main(f"{FLAGS} {_flags(layout)} {flags}".split())

    run_ranks(parse_layout(layout).world_size, body)


def _losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["iteration"]: record["lm loss"] for record in records if record["kind"] == "step"}


def _tensors(path):
    with Reader(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.fixture(scope="module")
def reference(run_ranks, tmp_path_factory):
    """Six steps of one process, never interrupted."""
    folder = tmp_path_factory.mktemp("one")
    _run(run_ranks, "", f"--save {folder}")
    return _losses(folder), _tensors(folder / "iter_0000006")


@pytest.fixture(scope="module")
def saved_by(run_ranks, tmp_path_factory):
    """Layout -> folder with its checkpoint of step 3; each layout is run once."""

    @cache
    def run(layout):
        folder = tmp_path_factory.mktemp("saved")
        _run(run_ranks, layout, f"--save {folder} --exit-interval 3")
        return folder

    return run


PAIRS = [
    ("", "tp2sp-pp2"),
    ("tp2sp-pp2", ""),
    ("dp2-zero1", "dp4-zero1"),
    ("dp4-zero3", "tp4"),
    ("tp4", "pp4"),
    ("pp2vp2", "tp2-dp2-zero2"),
    ("tp2-dp2-zero2", "pp2-dp2-zero3"),
    ("pp2-zbv", "pp2vp2"),
    ("pp4", "pp2-zbv"),
    ("pp2-dp2-zero3", "tp2sp-pp2vp2-dp2-zero1"),
]


@pytest.mark.parametrize("before, after", PAIRS)
def test_a_run_goes_on_in_another_layout(before, after, reference, saved_by, run_ranks, tmp_path):
    losses, tensors = reference
    _run(run_ranks, after, f"--load {saved_by(before)} --save {tmp_path}")
    found = _losses(tmp_path)
    assert sorted(found) == [4, 5, 6]
    for iteration, loss in found.items():
        assert loss == pytest.approx(losses[iteration], rel=1e-5)
    ends = _tensors(tmp_path / "iter_0000006")
    assert set(ends) == set(tensors)
    for name, tensor in tensors.items():
        scale = max(tensor.norm().item(), 1e-3 * tensor.numel() ** 0.5)
        assert (ends[name] - tensor).norm().item() <= 2e-4 * scale, name
