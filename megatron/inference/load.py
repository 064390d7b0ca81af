# SPDX-License-Identifier: Apache-2.0
"""A trained model out of a checkpoint, whatever layout wrote it: `loaded = load_gpt("runs/quickstart/checkpoints")`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from megatron import config as schema
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.state import choose, restore
from megatron.errors import CheckpointError
from megatron.model.gpt import GPT
from megatron.mpu.context import DTYPES
from megatron.mpu.mesh import Mesh
from megatron.optimizer.units import lay_out, materialise, pieces_of


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and what its checkpoint says of it."""

    model: GPT
    config: schema.Config  # of the training run
    vocab_size: int  # without padding
    iteration: int
    path: Path
    notices: tuple[str, ...]


def load_gpt(folder: str, *, device="cpu", precision: Optional[str] = None, step: Optional[int] = None) -> Loaded:
    """The GPT of a checkpoint folder (or of one checkpoint in it), weights alone, on one device.

    precision: fp32, bf16 or fp16; default: that of the training run. step: a certain iteration instead of the newest.
    Raises CheckpointError when nothing valid is there.
    """
    record = _record(Path(folder), step)
    config = schema.from_record(record["config"])
    dtype, vocab_size = DTYPES[precision or config.precision.precision], record["vocab_size"]
    model = GPT(config.model, Mesh(), vocab_size, kernels=config.kernels, dtype=dtype, device="meta")
    units = lay_out(model, 1)
    weights = torch.zeros(sum(unit.size for unit in units), dtype=dtype, device=device)
    materialise(model, units, weights)
    pieces = [
        piece
        for unit in units
        for piece in pieces_of(unit, 0, unit.size, weights[unit.start : unit.start + unit.size], Mesh().place)
    ]
    restored = restore(Path(folder), pieces, step=step, cast=True)
    return Loaded(model.eval(), config, vocab_size, restored.state["iteration"], restored.path, restored.notices)


def _record(folder: Path, step: Optional[int]) -> dict[str, Any]:
    """What the newest good checkpoint's state.json holds."""
    with Reader(choose(folder, step=step).paths[0]) as reader:
        record = reader.state
    if "config" not in record or "vocab_size" not in record:
        raise CheckpointError(f"{folder} does not say what model it is", "state.json has no config or vocab_size")
    return record
