# SPDX-License-Identifier: Apache-2.0
"""--rerun-mode in whole runs on forked ranks: verdicts, ranks that are named, and weights as without it."""

import pytest
import torch

from megatron.mpu.forked import RankFailed
from megatron.telemetry.events import read_events
from megatron.training.drill import drill_at
from tests.guard.test_guarded_runs import _pretrain, _tensors

VALIDATE = "--rerun-mode validate_results"
LAYOUTS = {
    "dp2": (2, "--micro-batch-size 1"),
    "zero1": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "zero2": (2, "--sharding-stage 2"),
    "zero3": (2, "--sharding-stage 3"),
    "tp2": (2, "--tp 2 --sequence-parallel"),
    "pp2": (2, "--pp 2"),
    "interleaved": (2, "--pp 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    "zb": (2, "--pp 2 --pipeline-schedule zb-h1"),
    "ep2": (2, "--num-experts 4 --expert-model-parallel-size 2"),
    "dp2_ep2": (4, "--num-experts 4 --expert-model-parallel-size 2 --micro-batch-size 1"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2_pp2_dp2": (8, "--tp 2 --pp 2 --micro-batch-size 1"),
    "fp16": (2, "--fp16 --initial-loss-scale 256"),
    "dropout": (2, "--hidden-dropout 0.1 --attention-dropout 0.1"),
    "invariant": (2, "--tp 2 --batch-invariant-mode"),
}


def trained(run_ranks, folder, world, flags):
    """The tensors of the last checkpoint of a run, and its events of reruns."""
    run_ranks(world, _pretrain, f"--train-iters 4 --save {folder} {flags}", world)
    return _tensors(folder / "iter_0000004"), [one for one in read_events(folder) if one["event"] == "rerun"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_transient_error_is_named_and_leaves_no_trace(run_ranks, tmp_path, layout):
    world, flags = LAYOUTS[layout]
    plain, _ = trained(run_ranks, tmp_path / "plain", world, flags)
    drill = f"{VALIDATE} --error-injection-rate 1 --error-injection-type transient_error"
    found, events = trained(run_ranks, tmp_path / "drill", world, f"{flags} {drill}")
    assert [(one["iteration"], one["verdict"], one["rank"]) for one in events] == [
        (step, "transient", drill_at(step, 1, "", 1234, world).rank) for step in range(1, 5)
    ], events
    assert same(plain, found)


def ended(run_ranks, world, flags, recipe=None):
    """The message of a run that a device's error ends."""
    with pytest.raises(RankFailed, match="SilentError") as failed:
        run_ranks(world, _pretrain, flags, world, recipe)
    return str(failed.value)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "world, flags, named",
    [
        (4, "--micro-batch-size 1", ["rank 2"]),
        (4, "--tp 2", ["rank 0", "rank 2"]),  # two data parallel ranks: one of them
        (8, "--pp 2 --sharding-stage 1 --micro-batch-size 1", ["rank 6"]),
        (4, "--num-experts 2 --expert-model-parallel-size 2 --micro-batch-size 1", ["rank 0", "rank 2"]),
        (4, "--sharding-stage 3 --micro-batch-size 1", ["rank 2"]),
    ],
)
def test_a_persistent_error_ends_the_run_with_its_rank(run_ranks, tmp_path, world, flags, named):
    drill = f"{VALIDATE} --error-injection-rate 1 --error-injection-type persistent_error --seed 12"
    rank = drill_at(1, 1, "", 12, world).rank
    text = ended(run_ranks, world, f"--train-iters 4 --save {tmp_path} {flags} {drill}")
    said = "computes other bits than other ranks do" if len(named) == 1 else "compute different bits of the same samples"
    assert said in text and f"rank {rank}" in named and all(f"{one} on" in text for one in named), (rank, text)
    [event] = [one for one in read_events(tmp_path) if one["event"] == "rerun"]
    assert (event["level"], event["verdict"], event["iteration"]) == ("error", "this device", 1)
    assert not list(tmp_path.glob("iter_*"))


def test_a_correct_result_is_told_from_an_error(run_ranks, tmp_path):
    drill = f"{VALIDATE} --error-injection-rate 1 --error-injection-type correct_result"
    _, events = trained(run_ranks, tmp_path, 2, drill)
    assert not events
