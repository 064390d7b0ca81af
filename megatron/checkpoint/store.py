# SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint: boxes of logical tensors in safetensors files, one file per writer, and an index of them.

    iter_0000100/
        index.json                   every logical tensor: dtype, shape, and for each box offset, file and checksums
        index_00000.json ...         of a large job: these entries, a few layers in each file; index.json lists the files
        state.json                   the caller's state: iteration, consumed samples, settings, versions
        shard_00000.safetensors      pieces of writer 0, readable by any safetensors library
        shard_00001.safetensors      pieces of writer 1

Checksums cover every byte: data by one checksum per block of 4 MiB (a reader of a part verifies only that part), file
headers and state.json by checksums in the index, and the index by its own first line. There is no pickle.

Writers are independent: each calls `write_shard` with its pieces; when all are done, one calls `commit`. The caller
synchronizes them (`folder.Saver`), so this module does not depend on process groups.

A save that is killed at any moment (kill -9) changes no earlier checkpoint. Files are written and synced in a folder with a
temporary name (`durable.write_synced`), which is renamed when the checkpoint is complete. The next save removes leftovers.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

import torch

from megatron.checkpoint.backends import CheckpointPath, backend_of
from megatron.checkpoint.boxes import Box, cut_evenly, describe, find_flaw, flat_to_boxes
from megatron.errors import CheckpointError, StorageError
from megatron.mpu.bits_sum import bits_sum
from megatron.storage.durable import checksum, read_sealed, seal, storage_errors
from megatron.storage.urls import Draft

FORMAT = "boxes in safetensors"
WHOLE, IN_PARTS = VERSIONS = 1, 2  # entries of tensors in index.json, or in files beside it
PART = 1 << 22  # bytes of entries in one file of an index in parts
FAN = 32  # writers whose entries one of them merges
_REQUESTS = 16  # concurrent requests to an object store
COPY = "copy_of_"  # before the name of a small file, of which there is a copy beside parity files
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
    box:     the position of `tensor` in it
    tensor:  shape `box.extent`, any strides, any device
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


class ShardRecord(NamedTuple):
    """A file that a writer has written: its bytes, and its part of the index."""

    size: int
    block: int
    files: dict[str, dict]
    tensors: dict[str, dict]

    @property
    def entries(self) -> dict:
        """Its part of the index."""
        return {"block": self.block, "files": self.files, "tensors": self.tensors}


class StablePiece(Piece):
    """A piece whose content does not change during training: a save in the background does not need to copy it."""

    __slots__ = ()


def flat_pieces(name: str, shape, box, local_shape, flat: torch.Tensor, start: int = 0) -> list[Piece]:
    """The pieces of a flat range of a local tensor: a ZeRO shard's part of a parameter or its optimizer state.

    shape:        of the logical tensor
    box:          (offset, extent) of the local tensor in it, without padding, from `Placement.box`
    local_shape:  of the local tensor, padding included
    flat:         1-D; elements [start, start + len(flat)) of the flattened local tensor
    The padding is in no piece. The pieces' tensors are views of `flat`.
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
    """Divide the writing of pieces that all of `parts` replicas hold: the share of replica `part`, in equal bytes."""
    chosen = []
    sizes = [piece.box.size * piece.tensor.element_size() for piece in pieces]
    for piece, span in zip(pieces, cut_evenly(sizes, part, parts)):
        start, stop = (-(-edge // piece.tensor.element_size()) for edge in span)
        for run in flat_to_boxes(piece.box.extent, start, stop):
            chosen.append(piece._replace(box=run.shifted(piece.box.offset), tensor=piece.tensor[run.slices()]))
    return chosen


class LiveSum(NamedTuple):
    """The checksum of a piece where it lives, taken before it is copied: of each block on a CPU, or of all its bits on a
    device, which computes it."""

    blocks: tuple[str, ...] = ()
    on_device: Optional[torch.Tensor] = None

    @classmethod
    def of(cls, tensor: torch.Tensor, block: int = BLOCK) -> "LiveSum":
        if tensor.device.type != "cpu":
            return cls(on_device=bits_sum(tensor))
        data = memoryview(as_bytes(tensor.detach().contiguous()).numpy())
        return cls(tuple(checksum(data[at : at + block]) for at in range(0, len(data), block)))

    def is_of(self, written: torch.Tensor, sums: Sequence[str]) -> bool:
        """Whether a tensor on the CPU, written with these checksums of blocks, has the bits that lived."""
        if self.on_device is None:
            return self.blocks == tuple(sums)
        return bits_sum(written).item() == self.on_device.item()


def live_sums(pieces: Iterable[Piece], on_cpu: bool) -> dict[str, LiveSum]:
    """Name in the file -> checksum of each piece now, but for `StablePiece`s, which nobody copies.

    on_cpu: also of those that are not on a device
    """
    return {
        key_in_file(piece): LiveSum.of(piece.tensor)
        for piece in pieces
        if piece.box.size and not isinstance(piece, StablePiece) and (on_cpu or piece.tensor.device.type != "cpu")
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a contiguous CPU tensor as uint8 [bytes]."""
    return tensor.reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------------------------------------------- each writer


Parts = Callable[[Piece], Iterable[torch.Tensor]]


def single_part(piece: Piece) -> Iterable[torch.Tensor]:
    """The content of a piece as one part, its tensor."""
    return (piece.tensor,)


def write_shard(
    folder: CheckpointPath,
    writer: int,
    pieces: Iterable[Piece],
    block: int = BLOCK,
    parts: Parts = single_part,
    live: Mapping[str, LiveSum] = MappingProxyType({}),
) -> ShardRecord:
    """Write this writer's file and its part of the index into `folder`, durably. Arguments, errors: as in `write_file`."""
    record = write_file(folder / file_name(writer), pieces, block, parts, live)
    _write_entries(_entries_file(folder, writer), record.entries)
    return record


def write_file(
    path: CheckpointPath,
    pieces: Iterable[Piece],
    block: int = BLOCK,
    parts: Parts = single_part,
    live: Mapping[str, LiveSum] = MappingProxyType({}),
) -> ShardRecord:
    """Write pieces to a file, durably, and return its part of the index.

    An empty piece only declares that its tensor exists. `parts` generates the content of a piece while it is written, for
    pieces that do not fit into memory: consecutive parts of the flattened piece, all but the last a multiple of `block`
    bytes. The pieces' own tensors may then be on the meta device.

    live: `live_sums` of the pieces from before they were copied, if they were
    Raises StorageError when the disk is full or read-only, or when a piece is not what lived.
    """
    pieces = list(pieces)
    tensors: dict[str, dict] = {}
    for piece in pieces:
        entry = tensors.setdefault(piece.name, _entry(piece))
        assert entry == _entry(piece), f"{piece.name}: {entry} and {_entry(piece)}"
    pieces = [piece for piece in pieces if piece.box.size]
    pieces.sort(key=lambda piece: -piece.tensor.element_size())  # keeps every piece aligned to its elements
    header, size = _header(pieces)
    with backend_of(path).create(path, size) as file:
        _write_all(file, memoryview(header))
        for piece in pieces:
            copied = piece.tensor.detach().cpu() if parts is single_part else piece.tensor
            sums = _write_blocks(file, parts(piece._replace(tensor=copied)), block)
            _check_live(piece, copied, sums, live, path)
            assert len(sums) == -(-piece.tensor.nbytes // block), f"{key_in_file(piece)}: its parts are not the whole"
            tensors[piece.name]["boxes"].append([*map(list, piece.box), path.name, key_in_file(piece), sums])
    files = {path.name: {"bytes": size, "header": checksum(header)}}
    return ShardRecord(size, block, files, tensors)


def _check_live(
    piece: Piece, copied: torch.Tensor, sums: list[str], live: Mapping[str, LiveSum], path: CheckpointPath
) -> None:
    """Raise StorageError if a piece was written with other bits than it had when the save began."""
    lived = live.get(key_in_file(piece))
    if lived and not lived.is_of(copied, sums):
        raise StorageError(
            f"{key_in_file(piece)}: what was written to {path.name} is not what training held when the save began",
            "its copy in memory was changed, or not renewed",
            "the checkpoint is not kept, earlier ones are; if it comes again, report it, and save without --async-save",
        )


def _entries_file(folder: CheckpointPath, writer: int) -> CheckpointPath:
    return folder / f"part_{writer:05d}.json"


def _write_entries(path: CheckpointPath, entries: dict) -> None:
    with storage_errors(path):
        backend_of(path).write(path, seal(entries)[1])


def _entry(piece: Piece) -> dict:
    return {"dtype": CODES[piece.tensor.dtype], "shape": list(piece.shape), "boxes": []}


def file_name(writer: int) -> str:
    """The name of a writer's file."""
    return f"shard_{writer:05d}.safetensors"


def key_in_file(piece: Piece) -> str:
    """The name inside the file. A whole tensor has its plain name, which other tools expect."""
    return piece.name if piece.box.extent == tuple(piece.shape) else piece.name + describe(piece.box)


def _header(pieces: list[Piece]) -> tuple[bytes, int]:
    """(header of a safetensors file, bytes of the whole file)."""
    entries, at = {}, 0
    for piece in pieces:
        assert tuple(piece.tensor.shape) == piece.box.extent and piece.box.fits(piece.shape), (piece.name, piece.box)
        assert key_in_file(piece) not in entries, f"{key_in_file(piece)} is written twice by one writer"
        end = at + piece.tensor.numel() * piece.tensor.element_size()
        entries[key_in_file(piece)] = {
            "dtype": CODES[piece.tensor.dtype],
            "shape": piece.tensor.shape,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)  # data starts at a multiple of 64 bytes
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at


def _write_blocks(file, parts: Iterable[torch.Tensor], block: int) -> list[str]:
    """Append the bytes of tensors. Returns a checksum per block, computed while the block is in the cache."""
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


def merge_group(folder: CheckpointPath, writer: int, num_writers: int) -> None:
    """Every FAN-th writer merges the entries of the writers up to the next one. Call it after `write_shard` of all."""
    if writer % FAN == 0:
        group = range(writer, min(writer + FAN, num_writers))
        _write_entries(_entries_file(folder, writer), merge(_read_entries(folder, group), whole=False))


def _read_entries(folder: CheckpointPath, writers: Iterable[int]) -> Iterator[dict]:
    with ThreadPoolExecutor(_REQUESTS) as pool:
        for _, content in pool.map(lambda writer: read_sealed(_entries_file(folder, writer)), writers):
            yield content


def commit(
    folder: CheckpointPath,
    final: CheckpointPath,
    num_writers: int,
    state: dict[str, Any],
    in_groups: bool = False,
    parity: Mapping[str, dict] = MappingProxyType({}),
) -> None:
    """Merge the parts of the index, check that they form whole tensors, and publish `folder` as `final`.

    in_groups: `merge_group` has merged those of each group, so this process reads one file of each.
    parity: entries of the parity files, if there are any

    Call it once, after `write_shard` of all writers 0 .. num_writers - 1 has returned. An existing checkpoint is set aside
    or replaced (see `backends`), and the caller cleans up after it. Raises CheckpointError when the pieces do not tile the
    tensors exactly once, StorageError when the disk fails.
    """
    index = merge(_read_entries(folder, range(0, num_writers, FAN if in_groups else 1)))
    with storage_errors(folder):
        content, sizes = index_of(folder, index, state, parity)
        parts = [_entries_file(folder, writer) for writer in range(num_writers)]
        backend_of(folder).publish(folder, final, content, sizes, parts)


def index_of(
    folder: CheckpointPath, index: dict, state: dict[str, Any], parity: Mapping[str, dict] = MappingProxyType({})
) -> tuple[bytes, dict[str, int]]:
    """Write state.json and the parts of a large index into `folder`. Returns the content of index.json, which comes last,
    and the bytes of all other files. index: by `merge`; parity: entries of parity files: then with copies of small files
    """
    state_path = folder / "state.json"
    state_sum, content = seal(state)
    backend_of(folder).write(state_path, content)
    tables = _write_tables(folder, index)
    head = {"format": FORMAT, "version": IN_PARTS if tables else WHOLE, "state": state_sum}
    if isinstance(folder, Draft):
        head.update(state_file=state_path.name, token=folder.token)
    sizes = {state_path.name: len(content), **{name: entry["bytes"] for name, entry in index["files"].items()}}
    sizes |= {name: table["bytes"] for name, table in tables.items()}
    if not parity:
        return seal({**head, **index})[1], sizes
    whole = seal({**head, **index, "parity": dict(parity)})[1]
    for name in (state_path.name, *tables):
        backend_of(folder).write(folder / (COPY + name), (folder / name).read_bytes())
    backend_of(folder).write(folder / f"{COPY}index.json", whole)
    return whole, sizes


def _write_tables(folder: CheckpointPath, index: dict) -> dict[str, dict]:
    """Move the entries of a large index into files of about PART bytes, and list these in it. Returns the list.

    A file has the names of a few layers, in the order of their numbers: a rank of a stage reads those of its layers.
    """
    sizes = {name: len(json.dumps(entry)) for name, entry in index["tensors"].items()}
    if sum(sizes.values()) <= PART:
        return {}
    groups, held = [[]], 0
    for name in sorted(sizes, key=_by_layer):
        if held and held + sizes[name] > PART:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += sizes[name]
    tables = {}
    for number, names in enumerate(groups):
        path = folder / f"index_{number:05d}.json"
        mark, content = seal({"tensors": {name: index["tensors"].pop(name) for name in names}})
        backend_of(folder).write(path, content)
        tables[path.name] = {"bytes": len(content), "checksum": mark, "names": names}
    index["tables"] = tables
    return tables


def _by_layer(name: str) -> list:
    """
    >>> sorted(["blocks.10.norm", "blocks.9.norm", "embedding"], key=_by_layer)
    ['blocks.9.norm', 'blocks.10.norm', 'embedding']
    """
    return [word.zfill(9) if word.isdecimal() else word for word in name.split(".")]


def merge(parts: Iterable[dict], whole: bool = True) -> dict:
    """Merge the writers' parts into one index: {"block": ..., "files": ..., "tensors": ...}, names sorted.

    whole: they are those of all writers, so boxes have to form whole tensors
    """
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
    for name, entry in tensors.items() if whole else ():
        flaw = find_flaw(entry["shape"], [Box(tuple(offset), tuple(extent)) for offset, extent, *_ in entry["boxes"]])
        if flaw:
            raise CheckpointError(f"{name}: the writers' pieces do not form the tensor: {flaw}")
    (block,) = blocks
    return {"block": block, "files": files, "tensors": dict(sorted(tensors.items()))}
