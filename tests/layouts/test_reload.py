# SPDX-License-Identifier: Apache-2.0
"""A run goes on in other layouts than it began in: weights, moments and counts, and so the training that follows.

That every layout reads what every other wrote is tested to the bit, for all pairs, in tests/checkpoint/test_elastic.py.
"""

import json

import pytest

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.planner.parity import parse_layout

FLAGS = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --global-batch-size 8 --micro-batch-size 1 --train-iters 6 --eval-iters 1 --precision fp32 --device cpu
    --num-workers 0"""


def _flags(layout):
    layout = parse_layout(layout)
    words = f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp} "
    words += f"--context-parallel-size {layout.cp} "
    if 1 < layout.a2a < layout.cp:
        words += f"--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes {layout.a2a} {layout.cp // layout.a2a} "
    else:
        words += f"--cp-comm-type {'a2a' if layout.a2a else 'allgather' if layout.gather else 'p2p'} "
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


CHAINS = [
    ("tp2", "tp2sp-pp2", ""),  # 2 -> 4 -> 1 processes
    ("pp2-zbv", "tp2-dp2-zero2", "dp4-zero3"),
    ("cp2-zero1", "cp2gather", "cp2a2a"),
    pytest.param(("cp2-zero1", "tp2", "cp2a2a-dp2-zero3"), marks=pytest.mark.full),
    pytest.param(("cp4a2a2-zero1", "cp2-tp2", "cp4gather-zero3"), marks=pytest.mark.full),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("chain", CHAINS, ids=" then ".join)
def test_a_run_that_changes_its_layout_twice_continues_its_loss_curve(chain, reference, run_ranks, tmp_path):
    """Two steps in each layout; number of processes, tp and pp change on the way."""
    losses, tensors = reference
    for layout, stop in zip(chain, (2, 4, 6), strict=True):
        _run(run_ranks, layout, f"--save {tmp_path} --load {tmp_path} --auto-resume --exit-interval {stop}")
    found = _losses(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    for iteration, loss in found.items():
        assert loss == pytest.approx(losses[iteration], rel=1e-5)
    ends = _tensors(tmp_path / "iter_0000006")
    assert set(ends) == set(tensors)
    for name, tensor in tensors.items():
        scale = max(tensor.norm().item(), 1e-3 * tensor.numel() ** 0.5)
        assert (ends[name] - tensor).norm().item() <= 2e-4 * scale, name
