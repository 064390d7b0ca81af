# SPDX-License-Identifier: Apache-2.0
"""Apply the masks of a training with --sparsity: W * mask, a checkpoint of an ordinary model with zeros, or of one of
quantization aware training.
"""

from pathlib import Path
from typing import Optional

import torch

from megatron.checkpoint import reshard
from megatron.checkpoint.base_checkpoint import open_checkpoint
from megatron.checkpoint.reader import Reader
from megatron.convert.imported import without_kinds
from megatron.errors import SettingsError
from megatron.model.linear_kinds import PLAIN, TOGETHER, choices
from megatron.model.sparsity import KIND, MASK, STEP
from megatron.storage.new_folder import check_free

OWN = "sparsity initial_sparsity sparsity_begin_step sparsity_end_step sparsity_frequency".split()
OWN += ["sparsity_layers", "sparsity_skip"]


def apply_masks(path: Path, out: Path, writers: int = 1) -> Path:
    """Write the checkpoint at `path` to the folder `out` with zeros where its masks are 0; returns the new checkpoint.

    Weights keep their format, optimizer state is left out. Raises SettingsError if it has no masks, or `out` is not free.
    """
    check_free(out)
    with open_checkpoint(path) as reader:
        source = MaskedReader(reader)
        config = without_kinds(reader.state["config"], OWN)
        config["model"]["linear"] = without_masks(config["model"]["linear"])
        state = {**reader.state, "config": config, "optimizer_steps": None}
        return reshard.reshard(source, out, reshard.evenly(reshard.whole_pieces(source), writers), state)


def has_masks(reader: Reader) -> bool:
    """Whether linear layers of a checkpoint's model have masks, and none are special in another way than by rounding."""
    model = reader.state.get("config", {}).get("model", {})
    kinds = {name for choice in choices(model.get("linear") or "") for name in choice.names} - {PLAIN}
    return bool(model.get("sparsity")) and KIND in kinds and kinds <= TOGETHER


def without_masks(linear: str) -> Optional[str]:
    """The value of --linear for the layers' other kinds; None if they have none.

    >>> without_masks("*=fake_quantize,mlp.*=+sparse,blocks.0.*=-sparse,blocks.1.*=sparse")
    '*=fake_quantize,blocks.1.*=plain'
    >>> without_masks("*=sparse,blocks.0.*=plain")
    """
    kept = [(choice.pattern, choice.without(KIND)) for choice in choices(linear)]
    kept = [(pattern, kind) for pattern, kind in kept if kind]
    return ",".join(f"{pattern}={kind}" for pattern, kind in kept) if {kind for _, kind in kept} - {PLAIN} else None


class MaskedReader(reshard.Computed):
    """The weights with zeros."""

    def __init__(self, reader: Reader):
        if not has_masks(reader):
            raise SettingsError(
                f"{reader.folder} has no masks of --sparsity, or other special linear layers",
                do="give a checkpoint of a run with --sparsity, alone or with --quantization",
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
