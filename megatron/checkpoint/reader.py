# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint: any box of any tensor, whatever boxes it was saved as.

Files are read in the blocks that were checksummed. A block is a flat range of a stored box, so it is a few boxes itself
(`flat_to_boxes`); what they share with the wanted box is copied. Memory stays at one block a thread, blocks that share
nothing with the wanted box are not read, and no byte is used before its checksum was compared.

    with Reader(path) as reader:
        reader.load(pieces)                                        # fills the memory of `store.Piece`s
        row = reader.read("output.weight", Box((7, 0), (1, 768)))  # or makes a new tensor
"""

import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, Optional

import torch

from megatron.checkpoint.boxes import Box, describe, flat_to_boxes
from megatron.checkpoint.index import ShardFile, Stored, Tensor, check_size, read_index
from megatron.checkpoint.store import CODES, Piece, as_bytes
from megatron.errors import CheckpointError
from megatron.storage.durable import Damaged, checksum, read_sealed
from megatron.storage.urls import UrlPath, location

PART = 1 << 26  # bytes of a part that `Reader.parts` yields: 16 blocks, so that few blocks are read twice
_REQUESTS = 16  # at a time, to an object store: each waits for tens of milliseconds
_OPEN_FILES = 64  # at a time; a large job wrote thousands
_STATE = dict(iteration=int, config=dict, state=dict, mesh=dict, samples=dict, libraries=dict)  # where they are there
_LISTED = 8  # tensors that a message lists

# What becomes a notice instead of an error when names do not match: nothing, tensors that the checkpoint does not have
# (they keep their values), tensors that the job does not have, both. Another shape is always an error.
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

    Opening reads index and state only; `check_files` looks at the files' sizes, reading verifies what it touches, and
    `verify` reads everything. Raises Damaged, which names file and tensor.
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
            raise Damaged(f"{state_path} is not the one that index.json was written with")
        wrong = [name for name, kind in _STATE.items() if not isinstance(self.state.get(name, kind()), kind)]
        groups = [] if wrong else self.state.get("config", {}).values()
        if wrong or not all(isinstance(group, dict) for group in groups):
            raise Damaged(f"{state_path} is not what a run saves: {', '.join(wrong) or 'config'}")
        self._files: dict[str, ShardFile] = {}
        self._lock, self._thread = threading.Lock(), threading.local()
        self.bytes_read = 0  # of tensors, by all calls so far

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_) -> None:
        self._files.clear()

    def read(self, name: str, box: Optional[Box] = None, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """A box of a tensor (default: all of it) as a new CPU tensor, converted to `dtype` if one is given."""
        tensor = self._known(name, box)
        box = Box.whole(tensor.shape) if box is None else box
        for stored in tensor.stored:  # the bytes exist before memory is taken for them
            if stored.box.intersection(box):
                self._locate(name, stored)
        out = torch.empty(box.extent, dtype=dtype or tensor.dtype)
        self._run(self._plan(name, box, out))
        return out

    def parts(self, name: str, box: Optional[Box] = None, size: int = PART) -> Iterator[torch.Tensor]:
        """A box of a tensor (default: all of it), flattened row by row, in consecutive 1-D parts of `size` bytes.

        For tensors that do not fit into memory; the last part may be shorter, and each is a tensor of its own.
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
        """Fill the memory of all pieces. Nothing is touched unless all of them are there with shape and dtype.

        names:       all logical names of the job, over all ranks; given them, other tensors in the checkpoint are an error
        cast:        convert where the stored dtype differs, instead of calling it an error; or the names of tensors that
                     are converted with a notice
        strictness:  what is a notice instead of an error
        Returns notices. Raises CheckpointError when the checkpoint is another model's, Damaged when its bytes are not what
        was written.
        """
        pieces = list(pieces)
        notices = self._require(pieces, names, cast, strictness)
        found = [piece for piece in pieces if piece.name in self.tensors]
        self._run([copy for piece in found for copy in self._plan(piece.name, piece.box, piece.tensor)])
        return notices

    def check_files(self) -> None:
        """Raise Damaged unless every file is there with its size. Reads no data."""
        for name, (size, _) in self.index.files.items():
            check_size(self.folder / name, size)

    def verify(self, files: Optional[Collection[str]] = None) -> list[str]:
        """Read every byte (of some files, by name); what is damaged or missing, one sentence each."""
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
        return list(problems.values())

    # ------------------------------------------------------------------------------------------------ inside

    def _known(self, name: str, box: Optional[Box]) -> Tensor:
        """What the index says of a tensor; CheckpointError when it has none, or not this box of it."""
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
        """Raise one CheckpointError that lists every missing, extra and different tensor; returns what is a notice."""
        missing, different, converted = {}, {}, {}
        for name, shape, box, tensor in pieces:
            assert tuple(tensor.shape) == box.extent and box.fits(shape), (name, tensor.shape, box, shape)
            found = self.tensors.get(name)
            if found is None:
                missing[name] = f"{name} {tuple(shape)}: not in the checkpoint"
            elif found.shape != tuple(shape):
                different[name] = f"{name}: {found.shape} in the checkpoint, {tuple(shape)} in this run"
            elif found.dtype != tensor.dtype and cast is not True:
                where = converted if cast and name in cast else different
                where[name] = f"{name}: {found.dtype} in the checkpoint, {tensor.dtype} in this run"
        extra = {} if names is None else {name: f"{name}: not in this run" for name in set(self.tensors) - set(names)}
        notices = [f"{len(converted)} tensors are converted: {_listed(converted.values())}"] if converted else []
        if strictness in ("warn-missing", "warn-all") and missing:
            notices.append(f"{len(missing)} tensors keep their first values: {_listed(missing.values())}")
            missing = {}
        if strictness in ("warn-extra", "warn-all") and extra:
            notices.append(f"{len(extra)} tensors are left out: {_listed(sorted(extra.values()))}")
            extra = {}
        lines = [*different.values(), *missing.values(), *sorted(extra.values())]
        if lines:
            counts = f"{len(different)} tensors differ, {len(missing)} are missing, {len(extra)} are unknown"
            raise CheckpointError(
                f"{self.folder} does not fit this model: {counts}",
                _listed(lines, "\n  "),
                "give the model settings that are in its state.json, or another --load (or see --load-strictness)",
            )
        return notices

    def _plan(self, name: str, box: Box, out: torch.Tensor) -> list[_Copy]:
        """The copies that fill `out` with a box."""
        overlaps = [(stored, stored.box.intersection(box)) for stored in self.tensors[name].stored]
        return [_Copy(name, out.detach(), box, stored, overlap) for stored, overlap in overlaps if overlap]

    def _run(self, copies: list[_Copy]) -> None:
        """Do all copies, file by file, over a few threads: reads, checksums and copies release the interpreter."""
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
        for _ in range(2 if self.remote else 1):  # what came over a network may be good when it is asked for again
            file.read_into(at, data, stored.key)
            with self._lock:
                self.bytes_read += len(data)
            if checksum(data) == stored.checksums[number]:
                return
        raise Damaged(
            f"{file.path} is damaged in {stored.key}: the bytes from {at:,} to {at + len(data):,} do not "
            "have the checksum that they were written with"
        )

    def _locate(self, name: str, stored: Stored) -> int:
        """First byte of a stored box in its file; Damaged unless the file's header agrees with the index."""
        file = self._file(stored.file)
        at, code, shape = file.entries.get(stored.key, (0, None, None))
        if code != CODES[self.tensors[name].dtype] or tuple(shape) != stored.box.extent:
            raise Damaged(f"{file.path} does not hold {stored.key} as index.json says")
        return at

    def _file(self, name: str) -> ShardFile:
        """The file, opened and its header verified at first use."""
        with self._lock:
            if name not in self._files:
                if len(self._files) >= _OPEN_FILES:
                    del self._files[next(iter(self._files))]
                self._files[name] = ShardFile(self.folder / name, *self.index.files[name])
            return self._files[name]

    def _buffer(self) -> torch.Tensor:
        """This thread's memory for one block."""
        if not hasattr(self._thread, "block"):
            self._thread.block = torch.empty(self.index.block, dtype=torch.uint8)
        return self._thread.block


def _listed(lines: Collection[str], between: str = "; ") -> str:
    """The first few of many."""
    more = [f"... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return between.join([*list(lines)[:_LISTED], *more])


def _scatter(elements: torch.Tensor, runs: list[Box], inside: Box, target: torch.Tensor) -> None:
    """Copy from `elements`, which lie in `runs` one after another, what falls into `inside`; `target` is its memory."""
    at = 0
    for run in runs:
        part = inside.intersection(run)
        if part:
            source = elements[at : at + run.size].view(run.extent)[part.relative_to(run).slices()]
            target[part.relative_to(inside).slices()].copy_(source)
        at += run.size
