# SPDX-License-Identifier: Apache-2.0
"""Folders of torch.distributed.checkpoint (DCP), as torchtitan and NeMo Automodel write them: read and written.

    tok_embeddings.weight                  a weight, in chunks: boxes of it
    optimizer.state.NAME.exp_avg           of get_optimizer_state_dict, flattened; Automodel says `optim`
    optimizer.param_groups.NAME.lr         a pickled number
    lr_scheduler.last_epoch                and others of the run, which are not read

Reading runs no pickled code (`megatron_metadata`). torch itself writes, one tensor in memory at a time.
"""

import json
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron.checkpoint.boxes import Box, find_flaw
from megatron.convert.megatron_metadata import Chunk, by_file, list_content, read_chunks, read_values
from megatron.errors import CheckpointError
from megatron.storage.durable import storage_errors

TABLES = ("tok_embeddings.weight", "model.embed_tokens.weight", "transformer.wte.weight")
OPTIMIZER = r"(?:.*\.)?optim(?:izer)?\."
_STATE = re.compile(OPTIMIZER + r"state\.(.+)\.(\w+)")
_VALUES = re.compile(OPTIMIZER + r"param_groups\.(.+)\.(lr|initial_lr|betas|eps|weight_decay)")
_OTHER = re.compile(r"(?:.*\.)?(?:optim(?:izer)?|lr_scheduler|sched|dataloader|train_state|rng(?:_state)?)\..*")
_SHARDS = "DCP_SHARDING_INFO"  # in the header of a safetensors file that has boxes of tensors


class StoredTensor(NamedTuple):
    """A tensor, and its chunks."""

    shape: tuple[int, ...]
    chunks: list[Chunk]


class DCPFolder:
    """The tensors and values of a folder with `.metadata`.

    weights: name -> tensor; without a prefix that all of them have
    state:   of the optimizer: kind (`exp_avg`) -> name of a parameter -> tensor
    groups:  settings of the optimizer: name of a parameter -> {"lr": ...}
    """

    def __init__(self, folder: Path):
        """Raises CheckpointError if `.metadata` is refused, or a file is missing or short."""
        self.folder = folder
        with tempfile.TemporaryDirectory(prefix="megatron-") as name:
            chunks, places, _ = list_content(folder, Path(name), _named, dict(values=_VALUES))
            values = read_values(folder, places["values"], Path(name))
        self.weights: dict[str, StoredTensor] = {}
        self.state: dict[str, dict[str, StoredTensor]] = {}
        prefix = _prefix({chunk.name for chunk in chunks if not chunk.kind})
        for chunk in chunks:
            own = self.state.setdefault(chunk.kind, {}) if chunk.kind else self.weights
            name = chunk.name if chunk.kind else chunk.name.removeprefix(prefix)
            own.setdefault(name, StoredTensor(chunk.shape, [])).chunks.append(chunk)
        for name, stored in [*self.weights.items(), *(one for own in self.state.values() for one in own.items())]:
            if flaw := find_flaw(stored.shape, [chunk.box for chunk in stored.chunks]):
                raise CheckpointError(f"{folder} lacks a part of {name}: {flaw}")
        self.groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            parameter, what = _VALUES.fullmatch(name).groups()
            self.groups.setdefault(parameter, {})[what] = value

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights."""
        return {name: stored.shape for name, stored in self.weights.items()}

    def get(self, name: str) -> torch.Tensor:
        """Read one weight."""
        return self.read({name: name})[name]

    def read(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Read weights. names: the caller's -> that in the folder"""
        return self.read_stored({key: self.weights[name] for key, name in names.items()})

    def read_stored(self, wanted: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """Read tensors whole, each file once. The keys are the caller's."""
        owners: dict[Chunk, list[str]] = {}
        for name, stored in wanted.items():
            for chunk in stored.chunks:
                owners.setdefault(chunk, []).append(name)
        found: dict[str, torch.Tensor] = {}
        for own in by_file(owners).values():
            for chunk, x in read_chunks(self.folder, own):
                for name in owners[chunk]:
                    whole = found.setdefault(name, torch.empty(wanted[name].shape, dtype=x.dtype))
                    whole[chunk.box.slices()] = x
        return found


def _named(name: str) -> Optional[tuple[str, str]]:
    """(name, kind) of a weight or of an optimizer's state, or None.

    >>> _named("optimizer.state.layers.0.attention.wo.weight.exp_avg"), _named("lr_scheduler.x")
    (('layers.0.attention.wo.weight', 'exp_avg'), None)
    """
    if match := _STATE.fullmatch(name):
        return match[1], match[2]
    return None if _OTHER.fullmatch(name) else (name, "")


def _prefix(names: set[str]) -> str:
    """What stands before the names of all weights: `model.` of a state dictionary {"model": ...}; often nothing."""
    table = next((name for table in TABLES for name in sorted(names) if f".{name}".endswith(f".{table}")), "")
    prefix = next((table.removesuffix(one) for one in TABLES if table.endswith(one)), "")
    return prefix if all(name.startswith(prefix) for name in names) else ""


class ShardedFiles:
    """The weights in safetensors files that each have boxes of tensors, as Automodel's `model` has."""

    def __init__(self, folder: Path):
        """Raises CheckpointError if a file cannot be read, or a part of a tensor is missing."""
        from safetensors import SafetensorError, safe_open

        self.shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[tuple[Box, Any]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
                placed = json.loads((file.metadata() or {}).get(_SHARDS) or "{}")
                for key in file.keys():
                    extent = tuple(file.get_slice(key).get_shape())
                    offset = tuple(map(int, placed.get(key, {}).get("saved_offsets") or (0,) * len(extent)))
                    self._parts.setdefault(key, []).append((Box(offset, extent), file))
            except (SafetensorError, OSError, ValueError, AttributeError, TypeError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
        for name, parts in self._parts.items():
            ends = zip(*(map(sum, zip(box.offset, box.extent)) for box, _ in parts))
            self.shapes[name] = tuple(map(max, ends))
            if flaw := find_flaw(self.shapes[name], [box for box, _ in parts]):
                raise CheckpointError(f"{folder} lacks a part of {name}: {flaw}")

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        parts = [(box, file.get_tensor(name)) for box, file in self._parts[name]]
        whole = torch.empty(self.shapes[name], dtype=parts[0][1].dtype)
        for box, x in parts:
            whole[box.slices()] = x
        return whole

    def read(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Read tensors. names: the caller's -> that in the folder"""
        return {key: self.get(name) for key, name in names.items()}


# ---- writing ---------------------------------------------------------------------------------------------------------


class LaterTensor(NamedTuple):
    """A tensor to write in boxes, each made when it is written. boxes: none: it is one"""

    shape: tuple[int, ...]
    make: Callable[[Box], torch.Tensor]
    dtype: torch.dtype = torch.float32
    boxes: tuple[Box, ...] = ()

    @property
    def parts(self) -> tuple[Box, ...]:
        """The boxes that are written."""
        return self.boxes or (Box.whole(self.shape),)


class _LazyPlanner(dcp.DefaultSavePlanner):
    """Plans tensors that do not exist yet. later: by name in the flattened dictionary"""

    def __init__(self, later: Mapping[str, LaterTensor]):
        super().__init__()
        self.later = later

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = (_item(name, one, box) for name, one in self.later.items() for box in one.parts)
        return replace(plan, items=[*plan.items, *items])

    def lookup_object(self, index: MetadataIndex) -> Any:
        later = self.later.get(index.fqn)
        if later is None:
            return super().lookup_object(index)
        box = next(box for box in later.parts if box.offset == tuple(index.offset))
        return later.make(box).to(later.dtype).contiguous()


def _item(name: str, later: LaterTensor, box: Box) -> WriteItem:
    """What torch's plan says of a box."""
    offset, extent = torch.Size(box.offset), torch.Size(box.extent)
    kind = TensorProperties(dtype=later.dtype)
    data = TensorWriteData(ChunkStorageMetadata(offset, extent), kind, torch.Size(later.shape))
    return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)


def write_dcp(folder: Path, content: Mapping[str, Any]) -> None:
    """Write nested dictionaries of `LaterTensor`, tensors and picklable values as a folder of DCP."""
    later: dict[str, LaterTensor] = {}

    def without_later(inner: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found = {}
        for name, value in inner.items():
            if isinstance(value, LaterTensor):
                later[prefix + name] = value
            else:
                found[name] = without_later(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        return found

    state, planner = without_later(content, ""), _LazyPlanner(later)
    with storage_errors(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        folder.mkdir(parents=True, exist_ok=True)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)
