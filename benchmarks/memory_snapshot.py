# SPDX-License-Identifier: Apache-2.0
"""What a snapshot in memory costs training, and how long a start from one takes, beside torch.save into the same memory.

    OMP_NUM_THREADS=1 python benchmarks/memory_snapshot.py --mib 256 --ranks 2 --repeats 5

Each rank has a state of so many MiB. The ways take turns: `torch.save` of the tensors to a file of /dev/shm, a snapshot, a
snapshot with a copy in the memory of another rank, a checkpoint on the disk, the same with --save-parity 2. Of each:
seconds for which all ranks stand still, and seconds of CPU of a rank. `find` and `load` are a start from the snapshot:
every byte is compared with its checksum twice, when parts are chosen and when they are read.
"""

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.memory_snapshots import MemorySnapshots
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.mpu import collectives
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Axis
from megatron.settings.schema import Checkpoint

WAYS = ("torch.save", "snapshot", "snapshot and copy", "disk", "disk and parity", "find", "load")


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def body(
    rank: int, world: int, mib: int, repeats: int, memory: Path, disk: Path
) -> dict[str, list[tuple[float, float]]]:
    """Way -> (seconds, seconds of CPU) of each turn."""
    axis = Axis("world", tuple(range(world)), rank)
    gather = lambda value: collectives.all_gather_object(value, axis)
    rows = max(1, mib // 4)
    values = [torch.randn(1, 1 << 20) for _ in range(rows)]
    pieces = [Piece(f"t{n}", (world, 1 << 20), Box((rank, 0), (1, 1 << 20)), x) for n, x in enumerate(values)]

    def snapshots(copies: bool) -> MemorySnapshots:
        settings = Checkpoint(
            save=str(disk / f"record{copies}"),
            non_persistent_save_interval=1,
            non_persistent_local_ckpt_dir=str(memory),
            replication=copies,
        )
        where = dict(world=axis, device=torch.device("cpu"), all_gather_object=gather)
        return MemorySnapshots(settings, **where, log=lambda text: None)

    alone, copied = snapshots(False), snapshots(True)
    found = {}

    def load() -> None:
        with Reader(found[0].path) as reader:
            reader.load([piece._replace(tensor=torch.empty_like(piece.tensor)) for piece in pieces])

    def find() -> None:
        found[0] = snapshots(True).find()

    where = dict(rank=rank, all_gather_object=gather)
    with Saver(disk / "plain", **where) as plain, Saver(disk / "parity", **where, parity=2) as parity:
        ways = {
            "torch.save": lambda turn: torch.save(values, memory / f"state_{rank}.pt"),
            "snapshot": lambda turn: alone.save(turn, pieces, {}),
            "snapshot and copy": lambda turn: copied.save(turn, pieces, {}),
            "disk": lambda turn: plain.save(1, pieces, {}),
            "disk and parity": lambda turn: parity.save(1, pieces, {}),
            "find": lambda turn: find(),
            "load": lambda turn: load(),
        }
        results: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(1, repeats + 2):
            for way, act in ways.items():
                gather(None)
                start, used = time.perf_counter(), cpu()
                act(turn)
                gather(None)
                if turn > 1:  # the first one makes the memory's pages
                    results[way].append((time.perf_counter() - start, cpu() - used))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="size of a rank's state in MiB (default 128)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each way (default 3)")
    given = parser.parse_args()
    memory = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    with tempfile.TemporaryDirectory() as disk:
        try:
            answers = run_ranks(
                given.ranks, body, given.ranks, given.mib, given.repeats, memory, Path(disk), timeout=600
            )
        finally:
            shutil.rmtree(memory, ignore_errors=True)
    mean = lambda way, which: statistics.mean(
        statistics.median(turn[which] for turn in answer[way]) for answer in answers
    )
    base = mean("torch.save", 1)
    print(f"{given.ranks} ranks with {given.mib} MiB each, median of {given.repeats} turns")
    for way in WAYS:
        seconds, used = mean(way, 0), mean(way, 1)
        print(f"{way:<18} {seconds:7.3f} s   {used:7.3f} s of CPU a rank ({used / base:.2f} x torch.save)")


if __name__ == "__main__":
    main()
