# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint costs training: written in between, by a thread, or by a forked process.

    OMP_NUM_THREADS=1 python benchmarks/background_save.py --mib 512 --repeats 5

Training is a loop of matrix products that also writes to the state, as an optimizer does. The three ways take turns. Of
each: how long training stood still, how much longer the same steps took than without a save (the whole loss: stall, and
what the writer takes from training while it writes), and when the checkpoint was durable. On a machine without spare cores
the writer competes with training for them; with a GPU the products would not be on these cores.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.manager import CheckpointManager, Snapshot
from megatron.checkpoint.store import Piece
from megatron.settings import schema

WAYS = ("in between", "thread", "fork after a copy", "fork without a copy")


def train(steps: int, tensors: list[torch.Tensor], a: torch.Tensor) -> float:
    """Seconds of some steps: products, and an update of all of the state every step."""
    start = time.perf_counter()
    for _ in range(steps):
        for _ in range(8):
            a @ a
        for tensor in tensors:
            tensor.mul_(0.999)
    return time.perf_counter() - start


def forked_save(folder: Path, pieces: list[Piece]) -> int:
    """Save in a forked process; its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            os.nice(10)
            with Saver(folder) as saver:
                saver.save(1, pieces, {})
            code = 0
        finally:
            os._exit(code)
    return child


def measure(
    way: str, folder: Path, steps: int, pieces: list[Piece], snapshot: Snapshot, a
) -> tuple[float, float, float]:
    """(seconds of stall, seconds of all steps with the save among them, seconds until durable)."""
    tensors, start = [piece.tensor for piece in pieces], time.perf_counter()
    if way.startswith("fork"):
        child = forked_save(folder, snapshot.take(pieces) if way == "fork after a copy" else pieces)
        stall = time.perf_counter() - start
        train(steps, tensors, a)
        took = time.perf_counter() - start
        assert os.waitpid(child, 0)[1] == 0
        return stall, took, time.perf_counter() - start
    said = {}
    manager = CheckpointManager(
        schema.Checkpoint(save=str(folder), async_save=way == "thread"),
        log=lambda text: said.setdefault("saved" in text, time.perf_counter()),
    )
    manager._snapshot = snapshot  # memory that is there, as for every save but the first
    start = time.perf_counter()
    stall = manager.save(1, pieces, {})
    train(steps, tensors, a)
    took = time.perf_counter() - start
    manager.close()
    return stall, took, said[True] - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="size of the state in MiB (default 128)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way (default 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="training around a save, about (default 3)")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    tensors = [torch.randn(1 << 20) for _ in range(arguments.mib // 4)]
    pieces = [Piece(f"t{n}", (1 << 20,), Box.whole((1 << 20,)), tensor) for n, tensor in enumerate(tensors)]
    a, snapshot, rows = torch.ones(512, 512), Snapshot(), {way: [] for way in WAYS}
    snapshot.take(pieces)
    steps = max(1, round(arguments.seconds / (train(3, tensors, a) / 3)))
    for _ in range(arguments.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                alone = train(steps, tensors, a)
                stall, took, durable = measure(way, Path(folder), steps, pieces, snapshot, a)
                rows[way].append((stall, took - alone, durable))
    print(
        f"{arguments.mib} MiB, {steps} steps, {os.cpu_count()} cores, {torch.get_num_threads()} threads, medians of "
        f"{arguments.repeats}"
    )
    print(f"{'written':<20} {'stall ms':>9} {'lost ms':>9} {'durable s':>10} {'MB/s':>7}")
    for way, found in rows.items():
        stall, lost, durable = map(statistics.median, zip(*found))
        speed = arguments.mib * 1.048576 / durable
        print(f"{way:<20} {stall * 1e3:9.0f} {lost * 1e3:9.0f} {durable:10.2f} {speed:7.0f}")


if __name__ == "__main__":
    main()
