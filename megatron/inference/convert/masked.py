# SPDX-License-Identifier: Apache-2.0
"""Apply the masks of a training with --sparsity: W * mask, a checkpoint of an ordinary model with zeros."""

from pathlib import Path

import torch

from megatron.checkpoint import reshard
from megatron.checkpoint.base import open_checkpoint
from megatron.checkpoint.reader import Reader
from megatron.errors import SettingsError
from megatron.inference.convert.imported import check_free, without_kinds
from megatron.model.linear_kinds import PLAIN, choices
from megatron.model.sparsity import KIND, MASK, STEP

OWN = "linear sparsity initial_sparsity sparsity_begin_step sparsity_end_step sparsity_frequency".split()
OWN += ["sparsity_layers", "sparsity_skip"]


def apply_masks(path: Path, out: Path, writers: int = 1) -> Path:
    """Write the checkpoint at `path` to the folder `out` with zeros where its masks are 0; returns the new checkpoint.

    Weights keep their format, optimizer state is left out. Raises SettingsError if it has no masks, or `out` is not free.
    """
    check_free(out)
    with open_checkpoint(path) as reader:
        source = MaskedReader(reader)
        state = {**reader.state, "config": without_kinds(reader.state["config"], OWN), "optimizer_steps": None}
        return reshard.reshard(source, out, reshard.evenly(reshard.whole_pieces(source), writers), state)


def has_masks(reader: Reader) -> bool:
    """Whether all special linear layers of a checkpoint's model have masks, and there are some."""
    model = reader.state.get("config", {}).get("model", {})
    kinds = {choice.kind for choice in choices(model.get("linear") or "")} - {PLAIN}
    return bool(model.get("sparsity")) and kinds == {KIND}


class MaskedReader(reshard.Computed):
    """The weights with zeros."""

    def __init__(self, reader: Reader):
        if not has_masks(reader):
            raise SettingsError(
                f"{reader.folder} has no masks of --sparsity, or other special linear layers",
                do="give a checkpoint of a run with --sparsity alone",
            )
        self.reader, self.folder = reader, reader.folder
        own = lambda name: name.startswith(reshard.OPTIMIZER) or name.endswith((f".{MASK}", f".{STEP}"))
        self.tensors = {name: one for name, one in reader.tensors.items() if not own(name)}

    def read(self, name: str) -> torch.Tensor:
        """A weight with zeros where its mask is 0, or any other tensor."""
        weight, mask = self.reader.read(name), f"{name.removesuffix('weight')}{MASK}"
        if not name.endswith(".weight") or mask not in self.reader.tensors:
            return weight
        return weight * self.reader.read(mask)
