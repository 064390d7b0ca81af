# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that hold only what a run trains, such as adapters, and name a base: a checkpoint with all other weights.

The base is an entry `base` of state.json:

    path         where it was
    beside       the same, relative to the folder of the adapters' checkpoints: both folders may move together
    iteration    of the base
    fingerprint  of its weights: another checkpoint in its place is refused
    index        checksum of its index.json: if it is the same, the fingerprint is not computed again

`open_checkpoint` reads both as one, so whatever loads a checkpoint loads such a one.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

import torch

from megatron.checkpoint.backends import CheckpointPath
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.reader import PART, Reader, Strictness
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError
from megatron.storage.durable import Damaged, read_sealed
from megatron.storage.urls import UrlPath, location

BASE = "base"  # the entry of state.json
_OPTIMIZER = "optimizer."
_VALUES = 8  # of each tensor, that the fingerprint covers


def fingerprint(reader: Reader) -> str:
    """A fingerprint of the weights of a checkpoint, equal for all layouts that could have saved it.

    It covers names, shapes, formats and first values of all weights, of each of which one block is read. Training
    changes these; bits that change in a file do not match their checksum.
    """
    weights = sorted(name for name in reader.tensors if not name.startswith(_OPTIMIZER))
    listed = [[name, str(reader.tensors[name].dtype), list(reader.tensors[name].shape)] for name in weights]
    digest = hashlib.blake2b(json.dumps(listed).encode(), digest_size=8)
    for name in weights:
        shape = reader.tensors[name].shape
        extent = tuple(min(size, _VALUES if dim == len(shape) - 1 else 1) for dim, size in enumerate(shape))
        values = reader.read(name, Box((0,) * len(shape), extent))
        digest.update(values.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def base_record(path: CheckpointPath, save: Optional[str]) -> dict[str, Any]:
    """The entry for checkpoints below `save` of a run that starts from the checkpoint at `path`, or from its base."""
    with open_checkpoint(path) as reader:
        if isinstance(reader, ReaderWithBase):
            known = reader.state[BASE]
            path, mark, iteration = reader.base.folder, known["fingerprint"], reader.base.state["iteration"]
        else:
            mark, iteration = fingerprint(reader), reader.state["iteration"]
    place, beside = location(path), None
    if not isinstance(place, UrlPath):
        place = Path(os.path.abspath(place))
        if save is not None and not isinstance(location(save), UrlPath):
            beside = os.path.relpath(place, os.path.abspath(save))
    return dict(path=str(place), beside=beside, iteration=iteration, fingerprint=mark, index=_index_mark(place))


def base_names(path: CheckpointPath) -> set[str]:
    """The names of the tensors that a run that starts from `path` need not save, because its base has them."""
    with open_checkpoint(path) as reader:
        return set(reader.base.tensors if isinstance(reader, ReaderWithBase) else reader.tensors)


def open_checkpoint(path: CheckpointPath) -> Reader:
    """A reader of a checkpoint, together with its base if it names one.

    Raises Damaged, and CheckpointError if the base is not there, or is another one.
    """
    reader = Reader(path)
    return ReaderWithBase(path, _found(reader.folder, reader.state[BASE])) if reader.state.get(BASE) else reader


class ReaderWithBase(Reader):
    """A checkpoint of what a run trained, and the other weights from its base.

    base: the reader of the base; own: the names of the tensors in the checkpoint itself
    """

    def __init__(self, folder: CheckpointPath, base: Reader):
        super().__init__(folder)
        self.base, self.own = base, set(self.tensors)
        frozen = (self.state.get("untrained") or {}).get("frozen") or ()
        more = {name: base.tensors[name] for name in frozen if name in base.tensors and name not in self.own}
        self.tensors = {**self.tensors, **more}

    def rename(self, names: Callable[[str], str]) -> None:
        """See `Reader`."""
        super().rename(names)
        self.base.rename(names)
        self.own = set(map(names, self.own))

    def read(self, name: str, box: Optional[Box] = None, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """See `Reader`."""
        return self._of(name).read(name, box, dtype)

    def parts(self, name: str, box: Optional[Box] = None, size: int = PART) -> Iterator[torch.Tensor]:
        """See `Reader`."""
        return self._of(name).parts(name, box, size)

    def load(
        self,
        pieces: Iterable[Piece],
        *,
        names: Optional[Collection[str]] = None,
        cast: bool | Collection[str] = False,
        strictness: Strictness = "strict",
    ) -> list[str]:
        """See `Reader`."""
        pieces = list(pieces)
        notices = self._require(pieces, names, cast, strictness)
        own = [piece for piece in pieces if piece.name in self.own]
        other = [piece for piece in pieces if piece.name in self.tensors and piece.name not in self.own]
        super().load(own, cast=True)
        self.base.load(other, cast=True)
        self.bytes_read += self.base.bytes_read
        return notices

    def check_files(self) -> None:
        """See `Reader`."""
        super().check_files()
        self.base.check_files()

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.base.num_bytes

    def _of(self, name: str) -> Reader:
        return super() if name in self.own or name not in self.tensors else self.base


def find_base(reader: Reader, place: CheckpointPath) -> Reader:
    """The reader of the base of a checkpoint, which is at `place` now. Raises CheckpointError if another one is there."""
    return _opened(reader.folder, reader.state[BASE], place)


def _found(folder: CheckpointPath, record: dict[str, Any]) -> Reader:
    """The base of the checkpoint in `folder`."""
    places = [location(record["path"])]
    if record.get("beside") and not isinstance(folder, UrlPath):
        places.insert(0, Path(os.path.normpath(folder.parent / record["beside"])))
    for place in places:
        if (place / "index.json").exists():
            return _opened(folder, record, place)
    raise CheckpointError(
        f"{folder} holds what was trained on top of {record['path']}, and that checkpoint is not there",
        "its other weights are those of this base",
        f"put it there, or: python -m megatron.tools.checkpoint reshard {folder} OUT --writers 1 --base FOLDER",
    )


def _opened(folder: CheckpointPath, record: dict[str, Any], place: CheckpointPath) -> Reader:
    try:
        base = Reader(place)
        mark = record["fingerprint"] if _index_mark(place) == record["index"] else fingerprint(base)
    except Damaged as problem:
        raise CheckpointError(f"the base of {folder} is damaged: {problem}") from None
    if mark != record["fingerprint"]:
        raise CheckpointError(
            f"{place} is not the base of {folder}: it holds other weights",
            f"fingerprint {mark}, and of the base {record['fingerprint']} (iteration {record['iteration']})",
            "give the checkpoint that the adapters were trained on",
        )
    return base


def _index_mark(place: CheckpointPath) -> str:
    return read_sealed(place / "index.json")[0]
