# SPDX-License-Identifier: Apache-2.0
"""Read the files of Megatron-LM's distributed checkpoints: `.metadata`, chunks of tensors, and pickled objects.

A restricted unpickler reads `.metadata`: it replaces the few known classes by shells without code and refuses all others by
name. torch's weights-only reader reads the rest. All of it happens in a separate process (`megatron_pickle`).
"""

import io
import json
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

import torch

from megatron.checkpoint.boxes import Box, flat_to_boxes
from megatron.convert.megatron_pickle import Shell, facts_of, load, refused_in_child
from megatron.errors import CheckpointError

METADATA = ".metadata"
EXPERTS = "e"  # after the rank of a buffer that has experts
_FILE = re.compile(r"__\d+_\d+\.distcp")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")  # chained: of experts by themselves
_BUFFER = re.compile(
    r"(?:chained_(\d)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.(\w+)"
)
_OBJECT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_0\.(?:optimizer|grad_scaler)/.*")
_COMMON = re.compile(r"common_state/.*")
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\b.*")
_NOT_WEIGHTS = re.compile(r"(opt_param_scheduler|rng_state|rerun_state_machine_state)\b.*|.*_extra_state.*")
_GROUP = 1 << 30  # bytes of chunks that a child process passes at a time
_INERT = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.", "pathlib.")
_PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict, ("builtins", "set"): set}


class Chunk(NamedTuple):
    """A box of one of their tensors, and its location.

    name: without a prefix of the optimizer. kind: of the optimizer's state (`exp_avg`); empty for weights
    shape: of the whole tensor. box: as stored
    whole: of a tensor that is stored flattened, its own shape; `shape` is then [parts of each dim ..., elements of a part]
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    box: Box
    whole: Optional[tuple[int, ...]]
    file: str
    offset: int
    length: int

    def parts(self, x: torch.Tensor) -> Iterator[tuple["Chunk", torch.Tensor]]:
        """The chunk's content as boxes of the whole tensor. x: as stored"""
        if self.whole is None:
            yield self, x
            return
        part = tuple(size // count for size, count in zip(self.whole, self.shape))
        corner = [at * size for at, size in zip(self.box.offset, part)]
        flat, start = x.reshape(-1), self.box.offset[-1]
        for run in flat_to_boxes(part, start, start + flat.numel()):
            own, flat = flat[: run.size], flat[run.size :]
            yield self._replace(shape=self.whole, box=run.shifted(corner), whole=None), own.view(run.extent)


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that builds only shells, tuples, dictionaries and numbers, refuses everything else, and runs no code."""

    def find_class(self, module: str, name: str):
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return f"{module}.{name}"
        if (module, name) == ("torch.serialization", "_get_layout"):
            return Shell
        if f"{module}.".startswith(_INERT):
            return type(name, (Content,), {})
        raise ValueError(f"it asks for {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid):
        raise ValueError("it refers to something outside of it, which no checkpoint needs")


class Content(Shell):
    """A shell that keeps its state in `content`: the fields of a dataclass."""

    content: Mapping[str, Any] = MappingProxyType({})

    def __setstate__(self, state) -> None:
        self.content = state if isinstance(state, dict) else {}


class Metadata(NamedTuple):
    """The content of `.metadata`.

    state: chunks of the optimizer's state that have the names of weights. buffers: of its buffers, named
    RANK/BUFFER/BUCKET, or RANKe/BUFFER/BUCKET for those of experts, which have an optimizer of their own if ep is above 1
    objects: (file, offset, length) of pickles that have the number of updates. unknown: another name of the optimizer's
    common: the place of the arguments of the run in newer checkpoints; empty: they are in a file of their own
    """

    weights: list[Chunk]
    state: list[Chunk]
    buffers: list[Chunk]
    objects: list[tuple[str, int, int]]
    unknown: str
    common: tuple = ()


def read_metadata(folder: Path, work: Path) -> Metadata:
    """List the chunks of all tensors. Raises CheckpointError if `.metadata` is refused, or a file is missing or short."""
    chunks, places, unknown = list_content(folder, work, _named, dict(objects=_OBJECT, common=_COMMON), _unknown)
    buffers = [chunk for chunk in chunks if chunk.name[0].isdigit()]
    weights = [chunk for chunk in chunks if not chunk.kind]
    state = [chunk for chunk in chunks if chunk.kind and not chunk.name[0].isdigit()]
    if not weights:
        raise CheckpointError(f"{folder / METADATA} names no weights")
    return Metadata(weights, state, buffers, places["objects"], unknown, next(iter(places["common"]), ()))


def list_content(
    folder: Path,
    work: Path,
    named: Callable[[str], Optional[tuple[str, str]]],
    objects: Mapping[str, re.Pattern],
    unknown: Callable[[Content], str] = lambda content: "",
) -> tuple[list[Chunk], dict[str, list[tuple]], str]:
    """(chunks of tensors, places of pickled objects, `unknown` of the content) of a folder of torch.distributed.checkpoint.

    named: name of a tensor -> (name, kind) of its chunks, or None to leave it out
    objects: names of objects, each with a key for the list of their (name, file, offset, length)
    Raises CheckpointError if `.metadata` is refused, or a file is missing or short.
    """
    source, result = folder / METADATA, work / "chunks.json"
    if not source.is_file():
        raise CheckpointError(f"{folder} has no {METADATA}", "the save did not end, or a part of it was not copied")

    def in_child() -> None:
        with source.open("rb") as file:
            content = MetadataUnpickler(file).load()
        try:
            places = {key: _objects(content, names) for key, names in objects.items()}
            listed = dict(chunks=_chunks(content, named), places=places, unknown=unknown(content))
            result.write_text(json.dumps(listed))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it does not describe tensors ({error!r})") from None

    refused_in_child(source, work, in_child)
    listed = json.loads(result.read_text())
    chunks = [
        Chunk(name, kind, tuple(shape), Box(tuple(offset), tuple(extent)), whole and tuple(whole), *where)
        for name, kind, shape, offset, extent, whole, *where in listed["chunks"]
    ]
    for chunk in chunks:
        _check(source, chunk)
    return chunks, {key: list(map(tuple, own)) for key, own in listed["places"].items()}, listed["unknown"]


def _check(source: Path, chunk: Chunk) -> None:
    """Raise CheckpointError for a chunk that cannot be where `.metadata` says that it is."""
    _check_place(source, chunk.name, chunk.file, chunk.offset, chunk.length)
    odd = chunk.whole is not None and (
        len(chunk.shape) != len(chunk.whole) + 1
        or any(count < 1 or size % count for size, count in zip(chunk.whole, chunk.shape))
        or any(n != 1 for n in chunk.box.extent[:-1])
        or chunk.shape[-1] * prod(chunk.shape[:-1]) != prod(chunk.whole)
    )
    if odd or not chunk.box.fits(chunk.shape) or chunk.box.size > chunk.length:  # at least one byte per element
        raise CheckpointError(f"{source} is damaged: {chunk.name} has {chunk.shape}, and a chunk {tuple(chunk.box)}")


def _check_place(source: Path, name: str, file: str, offset: int, length: int) -> None:
    if not _FILE.fullmatch(file):
        raise CheckpointError(f"{source} names {file[:80]!r}, which is no file of its folder")
    path = source.parent / file
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", f"{METADATA} says that {name} is in it")
    if min(offset, length) < 0 or offset + length > path.stat().st_size:
        raise CheckpointError(f"{path} is damaged: it ends before {name} does")


def _chunks(metadata: Content, named: Callable[[str], Optional[tuple[str, str]]]) -> list[tuple]:
    """The fields of each `Chunk`, from the pickle's content."""
    tensors, places = metadata.content["state_dict_metadata"], _places(metadata)
    whole = metadata.content.get("mcore_data") or {}
    found = {}
    for name, tensor in tensors.items():
        own = named(name)
        if "chunks" not in tensor.content or own is None:
            continue
        for chunk in tensor.content["chunks"]:
            offset, extent = (tuple(map(int, chunk.content[key])) for key in ("offsets", "sizes"))
            info = places.get((name, offset)) or places.get((name, None))
            if info is None:
                raise ValueError(f"it does not say where {name} at {offset} lies")
            if info.get("transform_descriptors"):
                raise ValueError(f"{name} is packed ({info['transform_descriptors']}), which is not read here")
            shape = tuple(map(int, tensor.content["size"]))
            place = str(info["relative_path"]), int(info["offset"]), int(info["length"])
            found[name, offset, extent] = (*own, shape, offset, extent, _flattened(whole.get(name)), *place)
    return list(found.values())


def _named(name: str) -> Optional[tuple[str, str]]:
    """(name, kind) of a chunk of a weight or of the optimizer's state, or None.

    >>> _named("optimizer.state.exp_avg.decoder.final_layernorm.weight")
    ('decoder.final_layernorm.weight', 'exp_avg')
    """
    if match := _BUFFER.fullmatch(name):
        rank, *rest = match.groups()[1:4]
        return "/".join((rank + EXPERTS * (match[1] == "1"), *rest)), match[5]
    if match := _STATE.fullmatch(name):
        return match[2].removeprefix("model."), match[1]
    if _OPTIMIZER.fullmatch(name) or _NOT_WEIGHTS.fullmatch(name):
        return None
    return str(name).removeprefix("model."), ""


def _flattened(data: Any) -> Optional[list[int]]:
    """The shape of a tensor that is stored flattened, from what Megatron-Core adds to `.metadata`; None for others."""
    shape = data.get("nd_reformulated_orig_global_shape") if isinstance(data, dict) else None
    return None if shape is None else [int(size) for size in shape]


def _places(metadata: Content) -> dict[tuple, dict]:
    """(name, offset of the chunk or None) -> where it lies."""
    places = {}
    for index, info in metadata.content["storage_data"].items():
        at = index.content.get("offset")
        places[index.content["fqn"], None if at is None else tuple(at)] = info.content
    return places


def _objects(metadata: Content, names: re.Pattern) -> list[tuple]:
    """(name, file, offset, length) of the pickled objects of these names."""
    return [
        (name, str(info["relative_path"]), int(info["offset"]), int(info["length"]))
        for (name, _), info in _places(metadata).items()
        if names.fullmatch(name)
    ]


def _unknown(metadata: Content) -> str:
    """A name of the optimizer's state that is not read, or an empty string."""
    names = map(str, metadata.content["state_dict_metadata"])
    return next((name for name in names if _OPTIMIZER.fullmatch(name) and _named(name) is None), "")


def read_objects(folder: Path, objects: list[tuple], work: Path, facts: dict) -> dict[str, Any]:
    """The number of updates and the loss scale in the pickled objects of an optimizer, as in `facts`."""
    updates, scale = set(facts["updates"]), dict(facts["scale"])
    for name, file, *where in objects:
        copy, result = copy_object(folder, (name, file, *where), work), work / "object.json"
        kind = "grad_scaler" if "grad_scaler/" in name else "optimizer"

        def in_child(copy=copy, result=result, kind=kind) -> None:
            result.write_text(json.dumps(facts_of(dict(optimizer={kind: load(copy)}))))

        refused_in_child(folder / file, work, in_child)
        own = json.loads(result.read_text())
        updates |= set(own["updates"])
        scale |= own["scale"]
    return dict(updates=sorted(updates), scale=scale)


def copy_object(folder: Path, place: tuple, work: Path) -> Path:
    """A file in `work` with a pickled object alone. place: its name, file, offset and length"""
    name, file, offset, length = place
    _check_place(folder / METADATA, name, file, offset, length)
    copy = work / "object.pt"
    copy.write_bytes(_bytes(folder / file, offset, length))
    return copy


def read_values(folder: Path, places: Iterable[tuple], work: Path) -> dict[str, Any]:
    """The numbers, strings and lists of them in pickled objects, by name. An object of another kind is left out."""
    files: dict[str, list[tuple]] = {}
    for place in places:
        _check_place(folder / METADATA, *place)
        files.setdefault(place[1], []).append(place)
    found, result = {}, work / "values.json"
    for file, own in files.items():

        def in_child(path=folder / file, own=own) -> None:
            values = {name: _value(path, at, length) for name, _, at, length in own}
            result.write_text(json.dumps({name: value for name, value in values.items() if _is_plain(value)}))

        refused_in_child(folder / file, work, in_child)
        found |= json.loads(result.read_text())
    return found


def _value(path: Path, offset: int, length: int) -> Any:
    """A pickled object in a file, as a number if it is a tensor of one element."""
    value = torch.load(io.BytesIO(_bytes(path, offset, length)), map_location="cpu", weights_only=True)
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _bytes(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _is_plain(value: Any) -> bool:
    inner = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(one, (int, float, str, bool, type(None))) for one in inner)


# ---- chunks ----------------------------------------------------------------------------------------------------------


def read_chunks(folder: Path, chunks: list[Chunk]) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Read chunks of one file, in order. Raises CheckpointError for a damaged file, and names it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = folder / chunks[0].file
    for group in _groups(chunks):
        with tempfile.TemporaryDirectory(prefix="megatron-") as name:
            result = Path(name) / "tensors.safetensors"

            def in_child(group=group, result=result) -> None:
                save_file({str(n): _chunk(path, chunk) for n, chunk in enumerate(group)}, result)

            refused_in_child(path, Path(name), in_child)
            with safe_open(result, framework="pt") as file:
                for number, chunk in enumerate(group):
                    yield chunk, file.get_tensor(str(number))


def by_file(chunks: Iterable[Chunk]) -> dict[str, list[Chunk]]:
    """The chunks of each file, in the order in which it holds them."""
    files: dict[str, list[Chunk]] = {}
    for chunk in sorted(chunks, key=lambda chunk: (chunk.file, chunk.offset)):
        files.setdefault(chunk.file, []).append(chunk)
    return files


def _groups(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """Consecutive chunks in groups of about 1 GiB."""
    group: list[Chunk] = []
    for chunk in chunks:
        if group and sum(other.length for other in group) + chunk.length > _GROUP:
            yield group
            group = []
        group.append(chunk)
    yield group


def _chunk(path: Path, chunk: Chunk) -> torch.Tensor:
    """Read one chunk of a file. Raises ValueError if it does not match `.metadata`."""
    content = io.BytesIO(_bytes(path, chunk.offset, chunk.length))
    tensor = torch.load(content, map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.box.extent:
        raise ValueError(f"{chunk.name} at {chunk.box.offset} is not there with shape {chunk.box.extent}")
    return tensor.detach().clone().contiguous()  # drops other data of its storage
