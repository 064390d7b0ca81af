# SPDX-License-Identifier: Apache-2.0
"""Import the weights of GPTs from Megatron-LM's distributed checkpoints (`--ckpt-format torch_dist`) of any layout.

    iter_0000100/
        .metadata         a pickle: shape, chunks and their locations of every tensor (torch.distributed.checkpoint)
        __0_0.distcp      concatenated chunks, each a file of torch.save; `__RANK_NUMBER.distcp`
        common.pt         the arguments of the run and other non-tensor values
        metadata.json     the name of the format

No pickled code is executed. A restricted unpickler reads `.metadata`: it replaces the few known classes by shells without
code and refuses all others by name. torch's weights-only reader reads chunks and common.pt. All of this happens in a
separate process (`megatron_pickle`), which writes plain tensors and JSON.

A chunk is a box of a tensor in Megatron-LM's shape: [rows, inputs], or [layers, rows, inputs] if all layers are one
tensor (`decoder.layers.mlp.linear_fc1.weight`, else `decoder.layers.0.mlp...`). It becomes boxes of our tensors.
"""

import io
import json
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

import torch

from megatron.checkpoint.boxes import Box, flat_to_boxes
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError
from megatron.inference.convert.imported import ModelImport, check_complete
from megatron.inference.convert.megatron_lm import our_name, settings_of
from megatron.inference.convert.megatron_pickle import Shell, extract, refused_in_child
from megatron.model.gpt.facts import GPTFacts
from megatron.mpu.placement import Placement
from megatron.settings import schema

METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
_FILE = re.compile(r"__\d+_\d+\.distcp")
_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")  # of all layers: no number after `layers`
_NOT_WEIGHTS = re.compile(
    r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine_state)\b.*|.*_extra_state.*"
)
_HALVES = {"weight_w": 0, "weight_v": 1, "bias_w": 0, "bias_v": 1}  # a gated layer's two matrices as separate tensors
_GROUP = 1 << 30  # bytes of chunks that a child process passes at a time
_INERT = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.", "pathlib.")
_PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict, ("builtins", "set"): set}


class Chunk(NamedTuple):
    """A box of one of their tensors, and its location."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    file: str
    offset: int
    length: int


def is_distributed(source: Path, step: Optional[int]) -> bool:
    """Whether the folder's checkpoint (the tracker's, or that of `step`) has torch's distributed format."""
    return find_folder(source, step) is not None


def find_folder(source: Path, step: Optional[int]) -> Optional[Path]:
    """The directory with `.metadata`; None if there is none."""
    if (source / METADATA).exists():
        return source
    try:
        text = (source / TRACKER).read_text()[:32].strip() if step is None else str(step)
    except (OSError, UnicodeDecodeError):
        return None
    folder = source / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
    return folder if (folder / METADATA).exists() or any(folder.glob("*.distcp")) else None


def open_distributed(
    source: Path, step: Optional[int], vocab_size: Optional[int], heads: Optional[int], log: Callable[[str], None]
) -> ModelImport:
    """Open a checkpoint for import. Raises CheckpointError if it is refused, damaged or incomplete."""
    folder = find_folder(source, step)
    if folder is None:
        raise CheckpointError(f"{source} holds no {METADATA}")
    with tempfile.TemporaryDirectory(prefix="megatron-") as name:
        if not (folder / COMMON).is_file():
            raise CheckpointError(f"{folder} has no {COMMON}", "it holds the arguments of the run that saved it")
        extract(folder / COMMON, Path(name))
        facts = json.loads((Path(name) / "facts.json").read_text())
        chunks = read_metadata(folder, Path(name))
    shapes = {f"0/{_half(name)[0]}": shape for chunk in chunks for name, shape in _by_layer(chunk)}
    model, vocab_size, notices = settings_of(facts, shapes, (1, 1), vocab_size, heads)
    wanted = GPTFacts(model, vocab_size).weights

    def shards() -> Iterator[list[Piece]]:
        seen: set[str] = set()
        for file in sorted({chunk.file for chunk in chunks}):
            log(f"reading {folder / file}")
            own = sorted((chunk for chunk in chunks if chunk.file == file), key=lambda chunk: chunk.offset)
            pieces = []
            for chunk, tensor in read_chunks(folder, own):
                pieces += pieces_of(chunk, tensor, model, wanted)
            seen |= {piece.name for piece in pieces}
            yield pieces
        check_complete(source, wanted, seen)

    return ModelImport(model, vocab_size, f"Megatron-LM in {folder.parent.resolve()}", notices, shards)


# ---- .metadata -------------------------------------------------------------------------------------------------------


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


def read_metadata(folder: Path, work: Path) -> list[Chunk]:
    """List the chunks of all weights. Raises CheckpointError if `.metadata` is refused, or a file is missing or short."""
    source, result = folder / METADATA, work / "chunks.json"
    if not source.is_file():
        raise CheckpointError(f"{folder} has no {METADATA}", "the save did not end, or a part of it was not copied")

    def in_child() -> None:
        with source.open("rb") as file:
            content = MetadataUnpickler(file).load()
        try:
            result.write_text(json.dumps(_chunks(content)))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it does not describe tensors ({error!r})") from None

    refused_in_child(source, work, in_child)
    chunks = [
        Chunk(name, tuple(shape), Box(tuple(offset), tuple(extent)), *where)
        for name, shape, offset, extent, *where in json.loads(result.read_text())
    ]
    if not chunks:
        raise CheckpointError(f"{source} names no weights")
    for chunk in chunks:
        if not _FILE.fullmatch(chunk.file):
            raise CheckpointError(f"{source} names {chunk.file[:80]!r}, which is no file of its folder")
        path = folder / chunk.file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing", f"{METADATA} says that {chunk.name} is in it")
        if min(chunk.offset, chunk.length) < 0 or chunk.offset + chunk.length > path.stat().st_size:
            raise CheckpointError(f"{path} is damaged: it ends before {chunk.name} does")
        if not chunk.box.fits(chunk.shape) or chunk.box.size > chunk.length:  # at least one byte per element
            raise CheckpointError(
                f"{source} is damaged: {chunk.name} has {chunk.shape}, and a chunk {tuple(chunk.box)}"
            )
    return chunks


def _chunks(metadata: Content) -> list[tuple]:
    """(name, shape, offset, extent, file, offset in it, length) of each chunk of a weight, from the pickle's content."""
    tensors, places = metadata.content["state_dict_metadata"], metadata.content["storage_data"]
    where = {}
    for index, info in places.items():
        at = index.content.get("offset")
        where[index.content["fqn"], None if at is None else tuple(at)] = info.content
    found = {}
    for name, tensor in tensors.items():
        if "chunks" not in tensor.content or _NOT_WEIGHTS.fullmatch(name):
            continue
        for chunk in tensor.content["chunks"]:
            offset, extent = (tuple(map(int, chunk.content[key])) for key in ("offsets", "sizes"))
            info = where.get((name, offset)) or where.get((name, None))
            if info is None:
                raise ValueError(f"it does not say where {name} at {offset} lies")
            if info.get("transform_descriptors"):
                raise ValueError(f"{name} is packed ({info['transform_descriptors']}), which is not read here")
            shape = tuple(map(int, tensor.content["size"]))
            place = str(info["relative_path"]), int(info["offset"]), int(info["length"])
            found[name, offset, extent] = (str(name).removeprefix("model."), shape, offset, extent, *place)
    return list(found.values())


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
    with path.open("rb") as file:
        file.seek(chunk.offset)
        content = file.read(chunk.length)
    tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.box.extent:
        raise ValueError(f"{chunk.name} at {chunk.box.offset} is not there with shape {chunk.box.extent}")
    return tensor.detach().clone().contiguous()  # drops other data of its storage


# ---- names and shapes ------------------------------------------------------------------------------------------------


def _by_layer(chunk: Chunk) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors in a chunk, with stacked layers separated."""
    match = _STACKED.fullmatch(chunk.name)
    if not match:
        yield chunk.name, chunk.shape
        return
    for layer in range(chunk.box.offset[0], chunk.box.offset[0] + chunk.box.extent[0]):
        yield f"{match[1]}.{layer}.{match[2]}", chunk.shape[1:]


def _half(name: str) -> tuple[str, Optional[int]]:
    """(name of the fused tensor, 0 or 1) for a separate matrix of a gated layer, else (name, None).

    >>> _half("decoder.layers.0.mlp.linear_fc1.weight_v")
    ('decoder.layers.0.mlp.linear_fc1.weight', 1)
    """
    half = _HALVES.get(name.rpartition(".")[2])
    return (name, None) if half is None else (name[:-2], half)


def pieces_of(chunk: Chunk, tensor: torch.Tensor, model: schema.Model, wanted: dict[str, Placement]) -> Iterator[Piece]:
    """The pieces of our tensors in a chunk. Raises CheckpointError if it does not fit the model."""
    if not _STACKED.fullmatch(chunk.name):
        yield from _in_tensor(chunk.name, chunk.shape, chunk.box, tensor, model, wanted)
        return
    inner = Box(chunk.box.offset[1:], chunk.box.extent[1:])
    for number, (name, shape) in enumerate(_by_layer(chunk)):
        yield from _in_tensor(name, shape, inner, tensor[number], model, wanted)


def _in_tensor(
    theirs: str, shape: tuple[int, ...], box: Box, x: torch.Tensor, model: schema.Model, wanted: dict[str, Placement]
) -> Iterator[Piece]:
    """The boxes of our tensor in a box [rows, inputs] or [rows] of theirs."""
    plain, half = _half(theirs)
    found = our_name(plain)
    if found is None:
        return
    layer, name = found
    name = name if layer is None else f"blocks.{layer}.{name}"
    if name == "output.weight" and not model.untie_embeddings_and_output_weights:
        return  # the last stage's copy of the embedding
    if name not in wanted:
        raise CheckpointError(f"{theirs} would be {name}, which this model does not have")
    ours = wanted[name].shape
    columns = ours[-1:] if name.endswith(".weight") and len(ours) > 1 else ()
    lead = ours[: len(ours) - len(columns)]  # the dimensions that their rows flatten
    if half is not None:
        lead = lead[1:]
    rows, padded = prod(lead), name in ("embedding.word.weight", "output.weight")
    if shape[1:] != columns or (shape[0] < rows if padded else shape[0] != rows):
        raise CheckpointError(f"{theirs} has shape {shape}, expected {(rows, *columns)}")
    start, at = box.offset[0], 0
    for run in flat_to_boxes(lead, start, min(start + box.extent[0], rows)):
        part = x[at : at + run.size].reshape(*run.extent, *x.shape[1:])
        at += run.size
        own = Box((*run.offset, *box.offset[1:]), (*run.extent, *box.extent[1:]))
        if half is not None:
            own, part = Box((half, *own.offset), (1, *own.extent)), part.unsqueeze(0)
        yield Piece(name, ours, own, part.float().contiguous())
