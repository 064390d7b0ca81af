# SPDX-License-Identifier: Apache-2.0
"""Every checkpoint of a run that is killed, resumed in other layouts, offloaded and saved in the background holds what
training held when the save began.

What it held is written by this file, from the tensors that training updates, before the suite copies or hashes anything.
"""

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint import folder as checkpoint_folder
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.reader import Reader
from megatron.mpu.forked import RankFailed, run_ranks

FLAGS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 60 --lr 1e-2
    --micro-batch-size 1 --global-batch-size 4 --eval-iters 0 --device cpu --num-workers 0 --train-iters 400
    --precision fp32 --save-interval 1"""
LAYOUTS = {
    "": 1,
    "--zero-stage 1": 2,
    "--zero-stage 3": 2,
    "--tensor-model-parallel-size 2 --sequence-parallel": 2,
    "--pipeline-model-parallel-size 2": 2,
    "--tensor-model-parallel-size 2 --zero-stage 2": 4,
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1": 4,
}
STATE = (
    "",
    "--optimizer-cpu-offload",
    "--optimizer-cpu-offload --nvme-offload-fraction .5 --nvme-offload-dir {folder}/nvme",
)
SAVES = 5  # of a launch


@dataclass(frozen=True)
class Launch:
    """A launch that makes `SAVES` steps, or is killed while it writes the file of the save number `killed_at`."""

    layout: str
    state: str
    in_background: bool
    killed_at: int | None


def drawn(seed: int, count: int) -> list[Launch]:
    """Launches of all layouts, kinds of state and ends, in an order that the seed chooses."""
    draw = random.Random(seed)
    kinds = [(layout, state, own) for layout in LAYOUTS for state in STATE for own in (True, False)]
    chosen = draw.sample(kinds, count)
    return [Launch(*one, draw.randint(2, SAVES) if n % 3 == 1 else None) for n, one in enumerate(chosen)]


def train(rank: int, launch: Launch, folder: Path, number: int, last: int) -> None:
    """Train on one rank. Each save first writes the tensors to `held`."""
    save, write, written = CheckpointManager.save, checkpoint_folder.write_shard, []

    def noted(self, iteration, pieces, state, *more, **named):
        pieces = list(pieces)
        held = [(one.name, one.shape, one.box, one.tensor.detach().cpu().clone()) for one in pieces]
        torch.save(held, folder / "held" / f"{number}_{iteration}_{rank}.pt")
        return save(self, iteration, pieces, state, *more, **named)

    def killed(*words, **more):
        written.append(1)
        if rank == 0 and len(written) == launch.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*words, **more)

    CheckpointManager.save, checkpoint_folder.write_shard = noted, killed  # of this process alone
    words = [launch.layout, launch.state.format(folder=folder), "--async-save" * launch.in_background]
    run = folder / "run"
    pretrain_gpt.main(f"{FLAGS} {' '.join(words)} --save {run} --load {run} --exit-interval {last}".split())


def held_by(folder: Path, number: int, iteration: int) -> dict[str, torch.Tensor]:
    """What all ranks of a launch held when a save began, put together."""
    whole: dict[str, torch.Tensor] = {}
    for path in (folder / "held").glob(f"{number}_{iteration}_*.pt"):
        for name, shape, box, tensor in torch.load(path, weights_only=False):
            whole.setdefault(name, torch.full(shape, float("nan"), dtype=tensor.dtype))[box.slices()] = tensor
    return whole


def make(launches: list[Launch], folder: Path) -> int:
    """Make all launches, one after the other in one folder; returns the number of checkpoints, each compared."""
    (folder / "held").mkdir()
    (folder / "nvme").mkdir()
    known: set[int] = set()
    for number, launch in enumerate(launches):
        last = max(known, default=0) + SAVES
        try:
            run_ranks(LAYOUTS[launch.layout], train, launch, folder, number, last)
            assert launch.killed_at is None, launch
        except RankFailed:
            assert launch.killed_at is not None, launch
        new = set(checkpoints(folder / "run")) - known
        assert new == set(range(last - SAVES + 1, max(new, default=0) + 1)) and (launch.killed_at or max(new) == last)
        for iteration in new:
            held = held_by(folder, number, iteration)
            with Reader(folder / "run" / f"iter_{iteration:07d}") as reader:
                assert set(reader.tensors) == set(held), launch
                for name, tensor in held.items():
                    assert torch.equal(reader.read(name), tensor), (launch, iteration, name)
        known |= new
    return len(known)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(5))
def test_saves_hold_what_training_held(seed, memory_folder):
    assert make(drawn(seed, 3), memory_folder) >= SAVES + 1


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_hundred_saves(memory_folder):
    assert make(drawn(7, 28), memory_folder) >= 100
