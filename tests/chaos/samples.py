# SPDX-License-Identifier: Apache-2.0
"""Small files of every kind that the suite writes, whose content is known: what the file faults are tried on."""

from pathlib import Path

import numpy as np
import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver, restore
from megatron.checkpoint.store import Piece
from megatron.data.indexed import write_index
from megatron.data.manifest import write_manifest

NAMES, SHARDS = ("weight", "optimizer.exp_avg.weight"), 2
SIZE = 6


def pieces_of(value: float, size: int = SIZE, part: int = 0, parts: int = 1) -> list[Piece]:
    """Two tensors full of a number, or one part of their elements."""
    share = size // parts
    tensor = torch.full((share,), float(value))
    return [Piece(name, (size,), Box((part * share,), (share,)), tensor.clone()) for name in NAMES]


def write_checkpoint(folder: Path, iteration: int, value: float, shards: int = 1, size: int = SIZE) -> Path:
    """A checkpoint of several files, all its tensors full of `value`."""
    with Saver(folder) as saver:
        parts = [pieces_of(value, size, part, shards) for part in range(shards)]
        path = saver.write(iteration, parts, {"value": value})
        return path


def surviving(folder: Path, size: int = SIZE) -> tuple[int, float]:
    """(iteration, value) that a new run would start from."""
    wanted = pieces_of(-1, size)
    found = restore(folder, wanted)
    (value,) = {float(value) for piece in wanted for value in piece.tensor}
    return found.state["iteration"], value


def token_files(prefix: Path, tokens: int = 3000, seed: int = 0) -> str:
    """A dataset of sequences of several lengths, two to a document, with its manifest."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    dice = np.random.default_rng(seed)
    cuts = np.sort(dice.choice(np.arange(1, tokens), tokens // 12 * 2 - 1, replace=False))
    lengths = np.diff(np.concatenate([[0], cuts, [tokens]]))
    dice.integers(0, 90, tokens).astype("<u2").tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", np.uint16, lengths, np.arange(0, len(lengths) + 1, 2))
    write_manifest(str(prefix))
    return str(prefix)
