# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint: any box of any tensor, in whatever boxes it was saved.

Files are read in checksummed blocks. A block is a flat range of a stored box, so it consists of a few boxes
(`flat_to_boxes`). Their intersection with the wanted box is copied. Each thread needs memory for one block. Blocks without
an intersection are not read, and no byte is used before its checksum was compared.

    with Reader(path) as reader:
        reader.load(pieces)                                        # fills the memory of `store.Piece`s
        row = reader.read("output.weight", Box((7, 0), (1, 768)))  # or creates a new tensor
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional

import torch

from megatron.checkpoint.boxes import Box, describe, flat_to_boxes
from megatron.checkpoint.index import ShardFile, Stored, Tensor, check_size, read_index
from megatron.checkpoint.store import CODES, Piece, as_bytes
from megatron.errors import CheckpointError
from megatron.storage.durable import Damaged, read_sealed
from megatron.storage.urls import UrlPath, location

PART = 1 << 26  # bytes of a part of `Reader.parts`: 16 blocks, so that few blocks are read twice
_REQUESTS = 16  # concurrent requests to an object store: each takes tens of milliseconds
_OPEN_FILES = 64  # at a time; a large job writes thousands
# Types, if present
_STATE = dict(iteration=int, config=dict, state=dict, mesh=dict, samples=dict, libraries=dict, wandb_run=str)
_LISTED = 8  # tensors that a message lists
QUANTIZED = "quantized"  # entry of state.json: the format of the weights of a quantized model (inference/quantized.py)

# Which mismatched names give a notice instead of an error: none, tensors that the checkpoint lacks (they keep their
# values), tensors that the job lacks, both. Another shape is always an error.
Strictness = Literal["strict", "warn-missing", "warn-extra", "warn-all"]


class _Copy(NamedTuple):
    """One stored box's share of a wanted box: fill `overlap` in `out`, the memory of `wanted`."""

    name: str
    out: torch.Tensor
    wanted: Box
    stored: Stored
    overlap: Box


class Reader:
    """A checkpoint directory, open for reading.

    tensors:  logical name -> index.Tensor(dtype, shape, stored boxes)
    state:    the content of state.json

    Opening reads only index.json and state. `check_files` checks the files' sizes, reading verifies the blocks that it
    needs, and `verify` reads everything. Raises Damaged, which names file and tensor.
    """

    def __init__(self, folder: Path | UrlPath, num_threads: Optional[int] = None):
        self.folder = location(folder)
        self.remote = isinstance(self.folder, UrlPath)
        self.num_threads = num_threads or (_REQUESTS if self.remote else 2)
        self.index = read_index(self.folder)
        self.tensors = self.index.tensors
        state_path = self.folder / self.index.state_file
        mark, self.state = read_sealed(state_path)
        if mark != self.index.state_checksum:
            raise Damaged(f"{state_path} does not belong to index.json")
        wrong = [name for name, kind in _STATE.items() if not isinstance(self.state.get(name, kind()), kind)]
        groups = [] if wrong else self.state.get("config", {}).values()
        if wrong or not all(isinstance(group, dict) for group in groups):
            raise Damaged(f"{state_path} is not what a run saves: {', '.join(wrong) or 'config'}")
        self._files: dict[str, ShardFile] = {}
        self._lock, self._thread = threading.Lock(), threading.local()
        self.bytes_read = 0  # of tensors, in all calls

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_) -> None:
        self._files.clear()

    def rename(self, names: Callable[[str], str]) -> None:
        """Give the tensors other logical names, by a function of those in the checkpoint."""
        self.tensors = {names(name): tensor for name, tensor in self.tensors.items()}

    def needed(self, key: str) -> Any:
        """The value of `key` in state.json. Raises CheckpointError if there is none."""
        if key not in self.state:
            raise CheckpointError(f"{self.folder} does not say what model it is", f"state.json has no {key}")
        return self.state[key]

    def read(self, name: str, box: Optional[Box] = None, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """Read a box of a tensor (default: all of it) as a new CPU tensor, converted to `dtype` if given."""
        tensor = self._known(name, box)
        box = Box.whole(tensor.shape) if box is None else box
        for stored in tensor.stored:  # check that the bytes exist before allocating memory
            if stored.box.intersection(box):
                self._locate(name, stored)
        out = torch.empty(box.extent, dtype=dtype or tensor.dtype)
        self._run(self._plan(name, box, out))
        return out

    def parts(self, name: str, box: Optional[Box] = None, size: int = PART) -> Iterator[torch.Tensor]:
        """Read a box of a tensor (default: all of it), flattened, in consecutive 1-D parts of `size` bytes.

        For tensors that do not fit into memory. The last part may be shorter. Each part has its own memory.
        """
        tensor = self._known(name, box)
        box = Box.whole(tensor.shape) if box is None else box
        step = max(1, size // tensor.dtype.itemsize)
        for start in range(0, box.size, step):
            stop = min(start + step, box.size)
            part, copies, at = torch.empty(stop - start, dtype=tensor.dtype), [], 0
            for run in flat_to_boxes(box.extent, start, stop):
                view = part[at : at + run.size].view(run.extent)
                copies += self._plan(name, run.shifted(box.offset), view)
                at += run.size
            self._run(copies)
            yield part

    def load(
        self,
        pieces: Iterable[Piece],
        *,
        names: Optional[Collection[str]] = None,
        cast: bool | Collection[str] = False,
        strictness: Strictness = "strict",
    ) -> list[str]:
        """Fill the memory of all pieces, or of none if one is missing or has another shape or dtype.

        names:       all logical names of the job, over all ranks; if given, other tensors in the checkpoint are an error
        cast:        convert tensors with another dtype, which is otherwise an error; or the names of tensors to convert
                     with a notice
        strictness:  which mismatches are notices instead of errors
        Returns notices. Raises CheckpointError when the checkpoint belongs to another model, Damaged when its bytes
        changed.
        """
        pieces = list(pieces)
        notices = self._require(pieces, names, cast, strictness)
        stored = [piece for piece in pieces if piece.name in self.tensors]
        self._run([copy for piece in stored for copy in self._plan(piece.name, piece.box, piece.tensor)])
        return notices

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.index.files.values())

    @property
    def index_bytes(self) -> int:
        """Bytes of the parts of the index that were read, without index.json."""
        return getattr(self.index.tensors, "bytes_read", 0)

    def check_files(self) -> None:
        """Raise Damaged unless every file exists with its size. Reads no data."""
        for name, (size, _) in self.index.files.items():
            check_size(self.folder / name, size)
        for name, table in self.index.tables.items():
            check_size(self.folder / name, table.bytes)

    def verify(
        self, files: Optional[Collection[str]] = None, done: Callable[[int], None] = lambda size: None
    ) -> list[str]:
        """Read every byte (of `files`, if given). Returns the damaged and missing parts, one sentence each.

        done: called with the bytes of each part that was read
        """
        files = self.index.files if files is None else set(files)
        problems: dict = {}
        for name in files:
            try:
                self._file(name)
            except Damaged as problem:
                problems[name] = str(problem)
        for name, tensor in self.tensors.items():
            for stored in tensor.stored:
                if stored.file in files and stored.file not in problems:
                    try:
                        self._verify_box(name, stored)
                    except Damaged as problem:
                        problems[stored.file, stored.key] = str(problem)
                    done(stored.box.size * tensor.dtype.itemsize)
        return list(problems.values())

    # ------------------------------------------------------------------------------------------------ inside

    def _known(self, name: str, box: Optional[Box]) -> Tensor:
        """The index entry of a tensor. Raises CheckpointError if there is none, or if the box lies outside its shape."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        tensor = self.tensors[name]
        if box is not None and not box.fits(tensor.shape):
            raise CheckpointError(f"{name}: box {describe(box)} lies outside its shape {tensor.shape}")
        return tensor

    def _require(
        self,
        pieces: list[Piece],
        names: Optional[Collection[str]],
        cast: bool | Collection[str],
        strictness: Strictness,
    ) -> list[str]:
        """Raise one CheckpointError that lists all missing, extra and different tensors. Returns notices."""
        missing, different, converted = {}, {}, {}
        for name, shape, box, tensor in pieces:
            assert tuple(tensor.shape) == box.extent and box.fits(shape), (name, tensor.shape, box, shape)
            saved = self.tensors.get(name)
            if saved is None:
                missing[name] = f"{name} {tuple(shape)}: not in the checkpoint"
            elif saved.shape != tuple(shape):
                different[name] = f"{name}: {saved.shape} in the checkpoint, {tuple(shape)} in this run"
            elif saved.dtype != tensor.dtype and cast is not True:
                where = converted if cast and name in cast else different
                where[name] = f"{name}: {saved.dtype} in the checkpoint, {tensor.dtype} in this run"
        extra = {} if names is None else {name: f"{name}: not in this run" for name in set(self.tensors) - set(names)}
        notices = [f"{len(converted)} tensors are converted: {_listed(converted.values())}"] if converted else []
        if strictness in ("warn-missing", "warn-all") and missing:
            notices.append(f"{len(missing)} tensors keep their initial values: {_listed(missing.values())}")
            missing = {}
        if strictness in ("warn-extra", "warn-all") and extra:
            notices.append(f"{len(extra)} tensors are not loaded: {_listed(sorted(extra.values()))}")
            extra = {}
        lines = [*different.values(), *missing.values(), *sorted(extra.values())]
        if lines:
            counts = f"{len(different)} tensors differ, {len(missing)} are missing, {len(extra)} are unknown"
            raise CheckpointError(
                f"{self.folder} does not fit this model: {counts}",
                _listed(lines, "\n  "),
                "it is quantized: generate, evaluate, lm_eval, serve and export read it; give the one that it was made from"
                if self.state.get(QUANTIZED)
                else "use the model settings in its state.json, or another --load (or see --load-strictness)",
            )
        return notices

    def _plan(self, name: str, box: Box, out: torch.Tensor) -> list[_Copy]:
        """The copy operations that fill `out` with a box."""
        overlaps = [(stored, stored.box.intersection(box)) for stored in self.tensors[name].stored]
        return [_Copy(name, out.detach(), box, stored, overlap) for stored, overlap in overlaps if overlap]

    def _run(self, copies: list[_Copy]) -> None:
        """Run all copies, file by file, on a few threads: reads, checksums and copies release the interpreter."""
        copies.sort(key=lambda copy: copy.stored.file)
        if self.num_threads < 2 or len(copies) < 2:
            for copy in copies:
                self._copy(copy)
            return
        with ThreadPoolExecutor(self.num_threads) as pool:
            futures = [pool.submit(self._copy, copy) for copy in copies]
            try:
                for future in futures:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _copy(self, copy: _Copy) -> None:
        name, out, wanted, stored, overlap = copy
        dtype, first_byte = self.tensors[name].dtype, self._locate(name, stored)
        step = self.index.block // dtype.itemsize
        inside = overlap.relative_to(stored.box)
        target = out[overlap.relative_to(wanted).slices()]  # a view, 0-d tensors included
        direct = (
            inside.extent == stored.box.extent
            and target.is_contiguous()
            and target.dtype == dtype
            and target.device.type == "cpu"
        )
        for number, start in enumerate(range(0, stored.box.size, step)):
            runs = flat_to_boxes(stored.box.extent, start, min(start + step, stored.box.size))
            if not any(map(inside.intersection, runs)):
                continue
            low, size = start * dtype.itemsize, sum(run.size for run in runs) * dtype.itemsize
            block = as_bytes(target)[low : low + size] if direct else self._buffer()[:size]
            self._fetch(stored, number, first_byte + low, block)
            if not direct:
                _scatter(block.view(dtype), runs, inside, target)

    def _verify_box(self, name: str, stored: Stored) -> None:
        at, left = self._locate(name, stored), stored.box.size * self.tensors[name].dtype.itemsize
        for number in range(len(stored.checksums)):
            size = min(left, self.index.block)
            self._fetch(stored, number, at, self._buffer()[:size])
            at, left = at + size, left - size

    def _fetch(self, stored: Stored, number: int, at: int, block: torch.Tensor) -> None:
        """Read a block of a stored box into `block` [bytes] uint8 and compare its checksum."""
        file, data = self._file(stored.file), memoryview(block.numpy())
        whole = file.holds(at, data, stored.key, stored.checksums[number])
        with self._lock:
            self.bytes_read += len(data)
        if whole:
            return
        raise Damaged(
            f"{file.path} is damaged in {stored.key}: the bytes from {at:,} to {at + len(data):,} do not "
            "match their checksum"
        )

    def _locate(self, name: str, stored: Stored) -> int:
        """First byte of a stored box in its file. Raises Damaged if the file's header contradicts the index."""
        file = self._file(stored.file)
        at, code, shape = file.entries.get(stored.key, (0, None, None))
        if code != CODES[self.tensors[name].dtype] or tuple(shape) != stored.box.extent:
            raise Damaged(f"{file.path} does not hold {stored.key} as listed in index.json")
        return at

    def _file(self, name: str) -> ShardFile:
        """The file. The first use opens it and verifies its header."""
        with self._lock:
            if name not in self._files:
                if len(self._files) >= _OPEN_FILES:
                    del self._files[next(iter(self._files))]
                self._files[name] = ShardFile(self.folder / name, *self.index.files[name])
            return self._files[name]

    def _buffer(self) -> torch.Tensor:
        """This thread's buffer of one block."""
        if not hasattr(self._thread, "block"):
            self._thread.block = torch.empty(self.index.block, dtype=torch.uint8)
        return self._thread.block


def _listed(lines: Collection[str], between: str = "; ") -> str:
    """The first few lines, joined, and the number of the others."""
    more = [f"... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return between.join([*list(lines)[:_LISTED], *more])


def _scatter(elements: torch.Tensor, runs: list[Box], inside: Box, target: torch.Tensor) -> None:
    """Copy the part of `elements` in the box `inside` to its memory `target`. runs: consecutive boxes of `elements`."""
    at = 0
    for run in runs:
        part = inside.intersection(run)
        if part:
            source = elements[at : at + run.size].view(run.extent)[part.relative_to(run).slices()]
            target[part.relative_to(inside).slices()].copy_(source)
        at += run.size
