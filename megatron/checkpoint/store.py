# SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint: boxes of logical tensors into safetensors files, one file per writer, and an index over them.

    iter_0000100/
        index.json                   every logical tensor: dtype, shape, and its boxes: where, in which file, checksums
        state.json                   what the caller says: iteration, consumed samples, settings, versions
        shard_00000.safetensors      pieces of writer 0, readable by any safetensors library
        shard_00001.safetensors      pieces of writer 1

Every byte is covered: data by one checksum per block of 4 MiB (so that a reader of a part verifies a part), file headers
and state.json by checksums in the index, and the index by its own first line. There is no pickle.

Writers work alone: each calls `write_shard` with its pieces; when all are done, one calls `commit`. How the writers wait
for each other is the caller's affair (`folder.Saver`), so nothing here knows about process groups.

Killed at any moment (kill -9), a save leaves every earlier checkpoint as it was: all is written and synced in a folder of
another name (`durable.write_synced`), and a checkpoint has its own name only once it is complete. What is left over is
cleared away by the next save.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.boxes import Box, cut_evenly, describe, find_flaw, flat_to_boxes
from megatron.checkpoint.storage import CheckpointPath, storage_of
from megatron.errors import CheckpointError
from megatron.storage.durable import checksum, read_sealed, seal, storage_errors
from megatron.storage.urls import Draft

FORMAT, VERSION = "boxes in safetensors", 1
_REQUESTS = 16  # at a time, to an object store
BLOCK = 1 << 22  # bytes under one checksum; a multiple of every element size

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Piece(NamedTuple):
    """A box of a logical tensor and the memory that holds it. Saving reads the memory, loading fills it in place.

    name:    logical name, the same on every layout: `blocks.17.attention.qkv.weight`
    shape:   shape of the whole logical tensor
    box:     where `tensor` lies in it
    tensor:  shape `box.extent`, any strides, any device
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


class StablePiece(Piece):
    """A piece whose memory keeps its content while training goes on: a save in the background needs no copy of it."""

    __slots__ = ()


def flat_pieces(name: str, shape, box, local_shape, flat: torch.Tensor, start: int = 0) -> list[Piece]:
    """Pieces of a flat range of a local tensor: what a ZeRO shard holds of a parameter or of its optimizer state.

    shape:        of the logical tensor
    box:          (offset, extent) of the local tensor in it, as `Placement.box` gives it, padding excluded
    local_shape:  of the local tensor, padding included
    flat:         1-D; elements [start, start + len(flat)) of the flattened local tensor
    Elements in the padding are in no piece. The pieces' tensors are views of `flat`.
    """
    pieces, at = [], 0
    real = Box.whole(box[1])
    for run in flat_to_boxes(local_shape, start, start + flat.numel()):
        view = flat[at : at + run.size].view(run.extent)
        at += run.size
        kept = run.intersection(real)
        if kept:
            pieces.append(Piece(name, tuple(shape), kept.shifted(box[0]), view[kept.relative_to(run).slices()]))
    return pieces


def share(pieces: Sequence[Piece], part: int, parts: int) -> list[Piece]:
    """What one of `parts` replicas writes when all hold the same pieces: equal bytes each, together everything once."""
    chosen = []
    sizes = [piece.box.size * piece.tensor.element_size() for piece in pieces]
    for piece, span in zip(pieces, cut_evenly(sizes, part, parts)):
        start, stop = (-(-edge // piece.tensor.element_size()) for edge in span)
        for run in flat_to_boxes(piece.box.extent, start, stop):
            chosen.append(piece._replace(box=run.shifted(piece.box.offset), tensor=piece.tensor[run.slices()]))
    return chosen


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous CPU tensor as uint8 [bytes], without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------------------------------------------- each writer


Parts = Callable[[Piece], Iterable[torch.Tensor]]


def at_once(piece: Piece) -> Iterable[torch.Tensor]:
    """The parts of a piece whose tensor is there: one."""
    return (piece.tensor,)


def write_shard(
    folder: CheckpointPath, writer: int, pieces: Iterable[Piece], block: int = BLOCK, parts: Parts = at_once
) -> int:
    """Write this writer's file and its part of the index into `folder`, durably; returns the bytes of the file.

    Empty pieces only tell that their tensor exists. `parts` makes the content of a piece while it is written, for more
    than memory holds: tensors that are, end to end, the piece flattened, all but the last a multiple of `block` bytes.
    The pieces' own tensors may then be on the meta device. Raises StorageError when the disk is full or read-only.
    """
    pieces = list(pieces)
    tensors: dict[str, dict] = {}
    for piece in pieces:
        entry = tensors.setdefault(piece.name, _entry(piece))
        assert entry == _entry(piece), f"{piece.name}: {entry} and {_entry(piece)}"
    pieces = [piece for piece in pieces if piece.box.size]
    pieces.sort(key=lambda piece: -piece.tensor.element_size())  # keeps every piece aligned to its elements
    path = folder / f"shard_{writer:05d}.safetensors"
    header, size = _header(pieces)
    with storage_of(folder).create(path, size) as file:
        _write_all(file, memoryview(header))
        for piece in pieces:
            sums = _write_blocks(file, parts(piece), block)
            assert len(sums) == -(-piece.tensor.nbytes // block), f"{_key(piece)}: its parts are not the whole"
            tensors[piece.name]["boxes"].append([*map(list, piece.box), path.name, _key(piece), sums])
    files = {path.name: {"bytes": size, "header": checksum(header)}}
    partial = folder / f"part_{writer:05d}.json"
    with storage_errors(partial):
        storage_of(folder).write(partial, seal({"block": block, "files": files, "tensors": tensors})[1])
    return size


def _entry(piece: Piece) -> dict:
    return {"dtype": CODES[piece.tensor.dtype], "shape": list(piece.shape), "boxes": []}


def _key(piece: Piece) -> str:
    """Name inside the file: plain for a whole tensor, so that other tools see the names that they expect."""
    return piece.name if piece.box.extent == tuple(piece.shape) else piece.name + describe(piece.box)


def _header(pieces: list[Piece]) -> tuple[bytes, int]:
    """(header of a safetensors file, bytes of the whole file)."""
    entries, at = {}, 0
    for piece in pieces:
        assert tuple(piece.tensor.shape) == piece.box.extent and piece.box.fits(piece.shape), (piece.name, piece.box)
        assert _key(piece) not in entries, f"{_key(piece)} is written twice by one writer"
        end = at + piece.tensor.numel() * piece.tensor.element_size()
        entries[_key(piece)] = {
            "dtype": CODES[piece.tensor.dtype],
            "shape": piece.tensor.shape,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)  # data starts at a multiple of 64 bytes
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at


def _write_blocks(file, parts: Iterable[torch.Tensor], block: int) -> list[str]:
    """Append the bytes of tensors and return a checksum per block, taken while the block is in the cache."""
    sums = []
    for part in parts:
        data = memoryview(as_bytes(part.detach().cpu().contiguous()).numpy())
        for at in range(0, len(data), block):
            sums.append(checksum(data[at : at + block]))
            _write_all(file, data[at : at + block])
    return sums


def _write_all(file, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


# ---------------------------------------------------------------------------------------------------- one of them


def commit(folder: CheckpointPath, final: CheckpointPath, num_writers: int, state: dict[str, Any]) -> None:
    """Join the parts of the index, check that they make whole tensors, and let `folder` appear as `final`.

    Called once, after `write_shard` of all writers 0 .. num_writers - 1 has returned. A checkpoint that is there already is
    set aside or replaced, as `storage.Storage` says of each kind, and what it leaves is for the caller to clean. Raises
    CheckpointError when the pieces do not tile the tensors exactly once, StorageError when the disk fails.
    """
    parts = [folder / f"part_{writer:05d}.json" for writer in range(num_writers)]
    with ThreadPoolExecutor(_REQUESTS if isinstance(folder, Draft) else 1) as pool:
        index = merge([content for _, content in pool.map(read_sealed, parts)])
    place, state_path = storage_of(folder), folder / "state.json"
    with storage_errors(folder):
        state_sum, content = seal(state)
        place.write(state_path, content)
        head = {"format": FORMAT, "version": VERSION, "state": state_sum}
        if isinstance(folder, Draft):
            head.update(state_file=state_path.name, token=folder.token)
        sizes = {state_path.name: len(content), **{name: entry["bytes"] for name, entry in index["files"].items()}}
        place.publish(folder, final, seal({**head, **index})[1], sizes, parts)


def merge(parts: Iterable[dict]) -> dict:
    """One index from the writers' parts: {"block": ..., "files": ..., "tensors": ...}, names sorted."""
    blocks, files, tensors = set(), {}, {}
    for part in parts:
        blocks.add(part["block"])
        files.update(part["files"])
        for name, entry in part["tensors"].items():
            known = tensors.setdefault(name, {**entry, "boxes": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise CheckpointError(
                    f"{name}: writers disagree: {known['dtype']} {known['shape']} and {entry['dtype']} {entry['shape']}"
                )
            known["boxes"] += entry["boxes"]
    for name, entry in tensors.items():
        flaw = find_flaw(entry["shape"], [Box(tuple(offset), tuple(extent)) for offset, extent, *_ in entry["boxes"]])
        if flaw:
            raise CheckpointError(f"{name}: the writers' pieces do not make the tensor: {flaw}")
    (block,) = blocks
    return {"block": block, "files": files, "tensors": dict(sorted(tensors.items()))}
