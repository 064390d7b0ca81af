# SPDX-License-Identifier: Apache-2.0
"""Merge LoRA adapters into the weights of their base: W + alpha / rank x B A, a checkpoint of an ordinary model."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import reshard
from megatron.checkpoint.base_checkpoint import BASE, open_checkpoint
from megatron.checkpoint.reader import Reader
from megatron.convert.imported import without_kinds
from megatron.convert.masked import apply_masks, has_masks
from megatron.errors import SettingsError
from megatron.model.dora_product import SMALLEST
from megatron.model.linear_kinds import choices
from megatron.model.lora import KIND, MAGNITUDE, OWN, PAIR, parts_of, scale_of
from megatron.model.lora_product import widened
from megatron.model.recipe import config_of, facts_of
from megatron.settings.schema import Model
from megatron.storage.new_folder import check_free


def merge(path: Path, out: Path, writers: int = 1, log=lambda text: None) -> Path:
    """Write the checkpoint at `path` to the folder `out` with its adapters merged; returns the new checkpoint.

    Weights keep their format; the sum is computed in fp32, one weight at a time. Optimizer state is left out.
    Raises SettingsError if the checkpoint has no adapters, or `out` is not free.
    """
    check_free(out)
    with open_checkpoint(path) as reader:
        source = MergedReader(reader)
        pieces = reshard.whole_pieces(source)
        merged = reshard.reshard(source, out, reshard.evenly(pieces, writers), source.state)
        for dtype, lost in source.lost.items():
            log(f"weights keep their format, {dtype}: rounding to it has moved merged ones by at most {lost:.2e}")
        return merged


@contextmanager
def merged_first(path: Path, out: Path) -> Iterator[Path]:
    """The checkpoint at `path`, as an ordinary model: if it has adapters or masks, these are merged in a temporary folder
    next to `out`. For exports.
    """
    with Reader(path) as reader:
        merged = merge if has_adapters(reader) else apply_masks if has_masks(reader) else None
    if merged is None:
        yield path
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-merged-", dir=out.parent) as folder:
        yield merged(path, Path(folder))


def has_adapters(reader: Reader) -> bool:
    """Whether all special linear layers of a checkpoint's model are those of LoRA, and there are some."""
    model = reader.state.get("config", {}).get("model", {})
    return bool(model.get("lora_rank")) and all(choice.kind == KIND for choice in choices(model.get("linear") or ""))


class MergedReader(reshard.Computed):
    """The merged weights."""

    def __init__(self, reader: Reader):
        if not has_adapters(reader):
            raise SettingsError(
                f"{reader.folder} has no LoRA adapters"
                if not reader.state.get("config", {}).get("model", {}).get("linear")
                else f"{reader.folder} has other special linear layers than LoRA's: --linear "
                f"{reader.state['config']['model']['linear']}",
                do="give a checkpoint of a run with --lora-rank alone",
            )
        self.reader, self.folder = reader, reader.folder
        config = config_of(reader.state["config"])
        self.model, self.placements = config.model, facts_of(config, reader.state["vocab_size"]).weights
        self.tensors = {name: one for name, one in reader.tensors.items() if not name.startswith(reshard.OPTIMIZER)}
        self.tensors = {name: one for name, one in self.tensors.items() if not name.endswith(OWN)}
        self.state = merged_state(reader.state)
        self.lost: dict[str, float] = {}  # format of merged weights -> how far rounding to it has moved one

    def read(self, name: str) -> torch.Tensor:
        """A merged weight, or any other."""
        weight, pair = self.reader.read(name), [f"{name.removesuffix('weight')}{one}" for one in PAIR]
        if not name.endswith(".weight") or pair[0] not in self.reader.tensors:
            return weight
        a, b = (self.reader.read(one, dtype=torch.float32) for one in pair)
        moved = weight.float() + delta(self.model, self.placements[name], a, b)
        if self.model.use_dora:
            m = self.reader.read(f"{name.removesuffix('weight')}{MAGNITUDE}", dtype=torch.float32)
            moved = with_norms(moved, magnitude(weight, m))
        rounded = moved.to(weight.dtype)
        if lost := (rounded.float() - moved).abs().max().item():
            kind = str(weight.dtype).removeprefix("torch.")
            self.lost[kind] = max(lost, self.lost.get(kind, 0.0))
        return rounded


def delta(model: Model, weight, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What a pair adds to a weight with this placement, [rows..., i]."""
    return (scale_of(model) * (widened(b, *parts_of(model, weight)) @ a)).view(weight.shape)


def magnitude(weight: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """The norms of rows that DoRA gives to a weight [rows..., i], [rows..., 1] in fp32."""
    return weight.float().norm(dim=-1, keepdim=True) + m


def with_norms(weight: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """A weight [rows..., i] whose rows have these norms [rows..., 1]; rows of zeros stay."""
    return weight * (norms / weight.norm(dim=-1, keepdim=True).clamp_min(SMALLEST))


def merged_state(state: dict[str, Any]) -> dict[str, Any]:
    """The content of state.json without adapters, base and frozen weights."""
    own = ("linear", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "lora_split_fused", "use_rslora")
    own += ("use_dora",)
    config = without_kinds(state["config"], own)
    optimizer = config.get("optimizer", {})
    kept = [pattern for pattern in optimizer.get("train_only") or () if pattern not in {f"*.{name}" for name in OWN}]
    config["optimizer"] = {**optimizer, "train_only": kept or None}
    untrained = {**(state.get("untrained") or {}), "frozen": []}
    rest = {name: value for name, value in state.items() if name != BASE}
    return {**rest, "config": config, "untrained": untrained, "optimizer_steps": None}
