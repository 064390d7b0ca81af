# SPDX-License-Identifier: Apache-2.0
"""Rewriting a checkpoint: into other files, in bounded memory (`reshard`), or into that of another model (`rewrite`).

Loading does not need other files: every layout reads every checkpoint. They are useful for moving: as many as there are
disks or nodes, or one for each rank of an inference job (`by_rank`), which then reads only that file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.backends import CheckpointPath, backend_of
from megatron.checkpoint.base_checkpoint import BASE, open_checkpoint
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.index import Tensor
from megatron.checkpoint.reader import PART, Reader
from megatron.checkpoint.store import Parts, Piece, share
from megatron.storage.new_folder import removed_after_error
from megatron.storage.urls import UrlPath
from megatron.tokenizer.chat_template import CONFIG, FILE

OPTIMIZER = "optimizer."  # prefix of the names of optimizer state: optimizer.exp_avg.blocks.0...
COMPANIONS = (FILE, CONFIG, "generation_config.json")  # in a folder of checkpoints


def reshard(source: Reader, out: Path, shards: Iterable[list[Piece]], state: dict[str, Any]) -> Path:
    """Write `source` into the folder `out` as the files `shards`. Returns the new checkpoint's directory.

    Takes about twice `reader.PART` of memory. Tensors are converted to the dtype of their piece. After a failure, including
    damage in the source, `out` contains no new files. Files for conversations beside the source are copied (COMPANIONS).
    """

    def parts(piece: Piece) -> Iterator[torch.Tensor]:
        stored = source.tensors[piece.name].dtype
        size = PART * stored.itemsize // max(stored.itemsize, piece.tensor.element_size())
        for part in source.parts(piece.name, piece.box, size):
            yield part.to(piece.tensor.dtype)

    return _written(source, out, shards, state, parts)


class Rewritten(NamedTuple):
    """The checkpoint that a method makes of another one.

    tensors: name -> format and shape
    compute: returns a whole tensor by its name; one of them is in memory at a time
    state:   the content of state.json, so far with the base and the optimizer's steps of the other one
    """

    tensors: Mapping[str, Tensor]
    compute: Callable[[str], torch.Tensor]
    state: Mapping[str, Any]


def rewrite(path: CheckpointPath, out: Path, method: Callable[[Reader], Rewritten], writers: int = 1) -> Path:
    """Write what `method` makes of the checkpoint at `path` to the folder `out`; returns the new checkpoint's directory.

    It has all weights, those of a base too, and no optimizer state. writers: files of equal size. Raises SettingsError if
    `out` is not free. After a failure `out` contains no new files.
    """

    def parts(piece: Piece) -> Iterator[torch.Tensor]:
        flat = made.compute(piece.name)[piece.box.slices()].reshape(-1)
        yield from flat.split(max(1, PART // flat.element_size()))

    with removed_after_error(out), open_checkpoint(path) as reader:
        made = method(reader)
        shards = evenly(whole_pieces(made), writers)
        return _written(reader, out, shards, weights_alone(made.state), parts)


def weights_alone(state: Mapping[str, Any]) -> dict[str, Any]:
    """The content of state.json for all weights, without optimizer state."""
    return {name: value for name, value in state.items() if name != BASE} | dict(optimizer_steps=None)


def _written(source: Reader, out: Path, shards: Iterable[list[Piece]], state: dict[str, Any], parts: Parts) -> Path:
    with Saver(out) as saver:
        written = saver.write(state["iteration"], shards, state, parts=parts)
    copy_companions(source.folder.parent, out)
    return written


def copy_companions(source: "Path | UrlPath", out: "Path | UrlPath") -> None:
    """Copy the files beside the checkpoints of a folder (COMPANIONS) to another one that does not have them."""
    for name in COMPANIONS:
        place, copy = source / name, out / name
        if place.is_file() and not copy.exists():
            backend_of(out).replace(copy, place.read_bytes())


def whole_pieces(
    source: Reader | Rewritten, wanted: Callable[[str], bool] = lambda name: True, dtype=None
) -> list[Piece]:
    """Every wanted tensor as one piece without memory. dtype: of all pieces; default: as stored."""
    pieces = []
    for name, tensor in source.tensors.items():
        if wanted(name):
            empty = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
            pieces.append(Piece(name, tensor.shape, Box.whole(tensor.shape), empty))
    return pieces


def evenly(pieces: list[Piece], writers: int) -> list[list[Piece]]:
    """Divide the pieces into files of equal size."""
    return [share(pieces, writer, writers) for writer in range(writers)]


def by_rank(pieces: list[Piece], boxes: list[dict[str, Box]]) -> list[list[Piece]]:
    """Divide the pieces into one file for each rank.

    boxes: for each rank, parameter name -> the box that it holds. Optimizer state follows its parameter. Tensors that
    several ranks need whole are divided evenly among their files, unknown tensors among all files.
    """
    files: list[list[Piece]] = [[] for _ in boxes]
    for piece in pieces:
        held = {rank: box for rank, names in enumerate(boxes) if (box := names.get(parameter_of(piece.name)))}
        if all(box == piece.box for box in held.values()):
            ranks = list(held) or range(len(files))
            for place, rank in enumerate(ranks):
                files[rank] += share([piece], place, len(ranks))
        else:
            for rank, box in held.items():
                files[rank].append(piece._replace(box=box, tensor=piece.tensor[box.slices()]))
    return files


def parameter_of(name: str) -> str:
    """The parameter that a tensor belongs to: `optimizer.exp_avg.output.weight` -> `output.weight`."""
    return name.split(".", 2)[2] if name.startswith(OPTIMIZER) else name
