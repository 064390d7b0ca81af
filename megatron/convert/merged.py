# SPDX-License-Identifier: Apache-2.0
"""Merge what linear layers have beside their weights into these, for a checkpoint of an ordinary model:

LoRA        W + alpha / rank x B A
--sparsity  W * mask: zeros; or a model of quantization aware training with zeros
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch

from megatron.checkpoint.reader import Reader
from megatron.checkpoint.reshard import OPTIMIZER, Rewritten, rewrite
from megatron.convert.imported import without_kinds
from megatron.errors import SettingsError
from megatron.model import sparsity
from megatron.model.hybrid_names import Rename, as_transformer
from megatron.model.linear_kinds import PLAIN, TOGETHER, choices
from megatron.model.lora import KIND, MAGNITUDE, OWN, PAIR, parts_of, scale_of
from megatron.model.lora_product import SMALLEST, widened
from megatron.model.recipe import config_of, facts_of
from megatron.settings.schema import Config, Model

MASK_SETTINGS = "sparsity initial_sparsity sparsity_begin_step sparsity_end_step sparsity_frequency".split()
MASK_SETTINGS += ["sparsity_layers", "sparsity_skip"]


def merge(path: Path, out: Path, writers: int = 1, log=lambda text: None) -> Path:
    """Write the checkpoint at `path` to the folder `out` with its adapters merged; returns the new checkpoint.

    Weights keep their format; the sum is computed in fp32, one weight at a time. Optimizer state is left out.
    Raises SettingsError if the checkpoint has no adapters, or `out` is not free.
    """
    lost: dict[str, float] = {}
    made = rewrite(path, out, partial(merged, lost=lost), writers)
    for dtype, moved in lost.items():
        log(f"weights keep their format, {dtype}: rounding to it has moved merged ones by at most {moved:.2e}")
    return made


def apply_masks(path: Path, out: Path, writers: int = 1) -> Path:
    """Write the checkpoint at `path` to the folder `out` with zeros where its masks are 0; returns the new checkpoint.

    Weights keep their format, optimizer state is left out. Raises SettingsError if it has no masks, or `out` is not free.
    """
    return rewrite(path, out, masked, writers)


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


@contextmanager
def for_export(
    path: Path, out: Path, what: str, knows: Callable[[Config], bool] = lambda config: False
) -> Iterator[Path]:
    """`merged_first`, with transformer layers: those that a pattern lists are read as such, if they are. For programs that
    know no others; what: which, in words; knows: whether they know the layers of a model as its pattern lists them. Raises
    SettingsError for another pattern.
    """
    with merged_first(path, out) as path:
        with Reader(path) as reader:
            seen = None if knows(config_of(reader.state["config"])) else as_transformer(reader.state, what)
        if seen is None:
            yield path
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-layers-", dir=out.parent) as folder:
            yield rewrite(path, Path(folder), partial(_renamed, *seen))


def _renamed(names: Rename, state: dict[str, Any], reader: Reader) -> Rewritten:
    reader.rename(names)
    return Rewritten(_tensors_without(reader, ()), reader.read, state)


def has_adapters(reader: Reader) -> bool:
    """Whether all special linear layers of a checkpoint's model are those of LoRA, and there are some."""
    model = reader.state.get("config", {}).get("model", {})
    return bool(model.get("lora_rank")) and all(choice.kind == KIND for choice in choices(model.get("linear") or ""))


def merged(reader: Reader, lost: dict[str, float]) -> Rewritten:
    """The weights with their adapters. lost: gets, by format, how far rounding to it has moved a weight."""
    if not has_adapters(reader):
        raise SettingsError(
            f"{reader.folder} has no LoRA adapters"
            if not reader.state.get("config", {}).get("model", {}).get("linear")
            else f"{reader.folder} has other special linear layers than LoRA's: --linear "
            f"{reader.state['config']['model']['linear']}",
            do="give a checkpoint of a run with --lora-rank alone",
        )
    config = config_of(reader.state["config"])
    model, placements = config.model, facts_of(config, reader.state["vocab_size"]).weights

    def compute(name: str) -> torch.Tensor:
        weight, pair = reader.read(name), [f"{name.removesuffix('weight')}{one}" for one in PAIR]
        if not name.endswith(".weight") or pair[0] not in reader.tensors:
            return weight
        a, b = (reader.read(one, dtype=torch.float32) for one in pair)
        moved = weight.float() + delta(model, placements[name], a, b)
        if model.use_dora:
            m = reader.read(f"{name.removesuffix('weight')}{MAGNITUDE}", dtype=torch.float32)
            moved = with_norms(moved, magnitude(weight, m))
        rounded = moved.to(weight.dtype)
        if by := (rounded.float() - moved).abs().max().item():
            kind = str(weight.dtype).removeprefix("torch.")
            lost[kind] = max(by, lost.get(kind, 0.0))
        return rounded

    return Rewritten(_tensors_without(reader, OWN), compute, merged_state(reader.state))


def masked(reader: Reader) -> Rewritten:
    """The weights with zeros."""
    if not has_masks(reader):
        raise SettingsError(
            f"{reader.folder} has no masks of --sparsity, or other special linear layers",
            do="give a checkpoint of a run with --sparsity, alone or with --quantization",
        )

    def compute(name: str) -> torch.Tensor:
        weight, mask = reader.read(name), f"{name.removesuffix('weight')}{sparsity.MASK}"
        has_mask = name.endswith(".weight") and mask in reader.tensors
        return weight * reader.read(mask) if has_mask else weight

    config = without_kinds(reader.state["config"], MASK_SETTINGS)
    config["model"]["linear"] = without_masks(config["model"]["linear"])
    own = f".{sparsity.MASK}", f".{sparsity.STEP}"
    return Rewritten(_tensors_without(reader, own), compute, {**reader.state, "config": config})


def _tensors_without(reader: Reader, own: tuple[str, ...]) -> dict[str, Any]:
    """The tensors of a checkpoint that are neither optimizer state nor have names that end in `own`."""
    found = reader.tensors.items()
    return {name: one for name, one in found if not name.startswith(OPTIMIZER) and not name.endswith(own)}


def has_masks(reader: Reader) -> bool:
    """Whether linear layers of a checkpoint's model have masks, and none are special in another way than by rounding."""
    model = reader.state.get("config", {}).get("model", {})
    kinds = {name for choice in choices(model.get("linear") or "") for name in choice.names} - {PLAIN}
    return bool(model.get("sparsity")) and sparsity.KIND in kinds and kinds <= TOGETHER


def without_masks(linear: str) -> Optional[str]:
    """The value of --linear for the layers' other kinds; None if they have none.

    >>> without_masks("*=fake_quantize,mlp.*=+sparse,blocks.0.*=-sparse,blocks.1.*=sparse")
    '*=fake_quantize,blocks.1.*=plain'
    >>> without_masks("*=sparse,blocks.0.*=plain")
    """
    kept = [(choice.pattern, choice.without(sparsity.KIND)) for choice in choices(linear)]
    kept = [(pattern, kind) for pattern, kind in kept if kind]
    return ",".join(f"{pattern}={kind}" for pattern, kind in kept) if {kind for _, kind in kept} - {PLAIN} else None


def delta(model: Model, weight, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What a pair adds to a weight with this placement, [rows..., i]."""
    return (scale_of(model) * (widened(b, *parts_of(model, weight), weight.stacked) @ a)).view(weight.shape)


def magnitude(weight: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """The norms of rows that DoRA gives to a weight [rows..., i], [rows..., 1] in fp32."""
    return weight.float().norm(dim=-1, keepdim=True) + m


def with_norms(weight: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """A weight [rows..., i] whose rows have these norms [rows..., 1]; rows of zeros stay."""
    return weight * (norms / weight.norm(dim=-1, keepdim=True).clamp_min(SMALLEST))


def merged_state(state: dict[str, Any]) -> dict[str, Any]:
    """The content of state.json without adapters and frozen weights."""
    own = ("linear", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "lora_split_fused", "use_rslora")
    own += ("use_dora",)
    config = without_kinds(state["config"], own)
    optimizer = config.get("optimizer", {})
    kept = [pattern for pattern in optimizer.get("train_only") or () if pattern not in {f"*.{name}" for name in OWN}]
    config["optimizer"] = {**optimizer, "train_only": kept or None}
    untrained = {**(state.get("untrained") or {}), "frozen": []}
    return {**state, "config": config, "untrained": untrained}
