# SPDX-License-Identifier: Apache-2.0
"""Saving and loading speed of checkpoints beside plain safetensors, alternating in one process.

    python benchmarks/checkpoint.py --mib 1536 --repeats 5

Ours writes with checksums, waits for the disk (fsync) and commits by rename; `save_file` does none of it, so it is also
timed with an fsync after it. Loading fills memory that is there, as a resuming run does; `load_file` makes new tensors
and they are copied over. Files stay in the page cache: the figures are those of the code, not of the disk.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece, as_bytes
from megatron.storage.durable import checksum


def training_state(mebibytes: int) -> dict[str, torch.Tensor]:
    """Weights in bf16, main weights and moments in fp32: 14 bytes a parameter, in matrices of a transformer's sizes."""
    tensors, left, layer = {}, mebibytes << 20, 0
    while left > 0:
        rows = max(1, min(3072, left // (768 * 14)))
        for name, dtype in (
            ("", torch.bfloat16),
            (".main", torch.float32),
            (".m", torch.float32),
            (".v", torch.float32),
        ):
            tensors[f"blocks.{layer}.mlp.weight{name}"] = torch.randn(rows, 768).to(dtype)
        left, layer = left - rows * 768 * 14, layer + 1
    return tensors


def sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def measure(folder: Path, mebibytes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, in the order of its runs."""
    tensors = training_state(mebibytes)
    memory = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    pieces = [Piece(name, tuple(t.shape), Box.whole(t.shape), t) for name, t in tensors.items()]
    wanted = [piece._replace(tensor=memory[piece.name]) for piece in pieces]
    plain, seconds = folder / "plain.safetensors", {}

    def copied() -> None:
        for name, tensor in load_file(plain).items():
            memory[name].copy_(tensor)

    def loaded() -> None:
        with Reader(folder / "iter_0000001") as reader:
            reader.load(wanted)

    with Saver(folder) as saver:
        ways = {
            "save: ours, durable": lambda: saver.save(1, pieces, {}),
            "save: safetensors save_file": lambda: save_file(tensors, plain),
            "save: save_file + fsync": lambda: (save_file(tensors, plain), sync(plain)),
            "load: ours, verified": loaded,
            "load: load_file + copy": copied,
            "checksums alone": lambda: [checksum(as_bytes(t).numpy()) for t in tensors.values()],
        }
        for _ in range(repeats):
            for name, way in ways.items():
                for path in ("plain.safetensors", "iter_0000001"):  # new files each time, for both alike
                    if name.startswith("save"):
                        (folder / path).unlink(missing_ok=True) if "." in path else shutil.rmtree(folder / path, True)
                if name.startswith("load") and not plain.exists():
                    save_file(tensors, plain)
                if name.startswith("load") and not (folder / "iter_0000001").exists():
                    saver.save(1, pieces, {})
                for tensor in memory.values():
                    tensor.zero_()
                start = time.perf_counter()
                way()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
                if name.startswith("load"):
                    assert all(torch.equal(memory[key], tensors[key]) for key in tensors), name
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the state in MiB (default 64)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way (default 3)")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        seconds = measure(Path(folder), arguments.mib, arguments.repeats)
    print(f"{arguments.mib} MiB, median of {arguments.repeats} runs, {torch.get_num_threads()} threads")
    for name, runs in seconds.items():
        middle = statistics.median(runs)
        print(f"{name:<30} {middle:8.3f} s {arguments.mib / 1024 * 1.073741824 / middle:8.2f} GB/s")
    for ours, peer in (
        ("save: ours, durable", "save: save_file + fsync"),
        ("load: ours, verified", "load: load_file + copy"),
    ):
        ratio = statistics.median(b / a for a, b in zip(seconds[ours], seconds[peer]))
        print(f"{ours} is {ratio:.2f} x as fast as {peer.partition(': ')[2]}")


if __name__ == "__main__":
    main()
