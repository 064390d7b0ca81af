# SPDX-License-Identifier: Apache-2.0
"""Tensors of Megatron-LM's checkpoints as boxes of ours, and back: their rows are our leading dims, flattened.

qkv.weight [g, q + 2, d, h]      linear_qkv.weight [g (q + 2) d, h]
in_proj.weight [groups, n, h]    in_proj.weight [groups n, h], part after part (`megatron_form.RowOrder`)
"""

from collections.abc import Iterator
from math import prod

import torch

from megatron.checkpoint.boxes import Box, flat_to_boxes
from megatron.checkpoint.store import Piece
from megatron.convert.megatron_names import OurTensor, is_norm
from megatron.errors import CheckpointError
from megatron.model.megatron_form import RowOrder
from megatron.mpu.placement import Placement

Part = tuple[Box, torch.Tensor]


def split_shape(name: str, rows: RowOrder, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(dims that their rows flatten, dims after these) of a tensor of ours."""
    columns = rows.taps or (name.endswith(".weight") and len(shape) > 1)
    return (shape[:-1], shape[-1:]) if columns else (shape, ())


def boxes_of_rows(lead: tuple[int, ...], numbers: torch.Tensor, x: torch.Tensor) -> Iterator[Part]:
    """Rows x of theirs as boxes of our leading dims. numbers: for each row, the number of ours"""
    if len(numbers) > 1 and not bool((numbers.diff() > 0).all()):
        numbers, order = numbers.sort()
        x = x[order]
    ends = [*((numbers.diff() != 1).nonzero().flatten() + 1).tolist(), len(numbers)]
    at = 0
    for end in ends:
        start = int(numbers[at]) if end > at else 0
        for box in flat_to_boxes(lead, start, start + end - at):
            yield box, x[at : at + box.size].reshape(*box.extent, *x.shape[1:])
            at += box.size


def local_parts(target: OurTensor, placed: Placement, x: torch.Tensor, rank: int, ranks: int, where: str) -> list[Part]:
    """The boxes of our tensor in a tensor of one of their tensor parallel ranks. where: its file, for messages"""
    whole, dim = placed.shape, placed.cut.get("tp")
    if dim is None and x.numel() * ranks == prod(whole) and ranks > 1:
        return _rows_of_rank(target, whole, x, rank)
    local = list(whole)
    if dim is not None:
        local[dim] = x.numel() // max(1, prod(whole) // whole[dim])
    lead, columns = split_shape(target.name, target.rows, tuple(local))
    if not _fits(target.rows, lead, columns, x):
        error = f"{where}: {target.name} has shape {tuple(x.shape)}, which does not fit {whole}"
        raise CheckpointError(error)
    x, box = our_rows(target.name, target.rows, x, tuple(local)), Box(*placed.box(tuple(local), {"tp": rank}))
    return [(box, x[Box.whole(box.extent).slices()].contiguous())]


def _fits(rows: RowOrder, lead: tuple[int, ...], columns: tuple[int, ...], x: torch.Tensor) -> bool:
    flat = (prod(lead), *((1,) if rows.taps else ()), *columns)
    return tuple(x.shape) == flat or x.numel() == prod(flat) and x.dim() > len(flat)


def _rows_of_rank(target: OurTensor, whole: tuple[int, ...], x: torch.Tensor, rank: int) -> list[Part]:
    """Of a tensor that their ranks divide by rows, and each of ours has whole."""
    lead, columns = split_shape(target.name, target.rows, whole)
    x = x.reshape(-1, *columns)
    numbers = target.rows.numbers(lead)[rank * len(x) : (rank + 1) * len(x)]
    parts = boxes_of_rows(lead, numbers, x)
    zeros = (0,) * len(columns)
    return [(Box((*box.offset, *zeros), (*box.extent, *columns)), part.contiguous()) for box, part in parts]


def our_rows(name: str, rows: RowOrder, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of one of their ranks as a part of ours, which has this shape: the inverse of `their_rows`."""
    if not rows.is_ours:
        lead, columns = split_shape(name, rows, shape)
        theirs = x.reshape(-1, *columns)
        x = torch.empty_like(theirs)
        x[rows.numbers(lead)] = theirs
    return x.reshape(shape)


def their_rows(name: str, rows: RowOrder, x: torch.Tensor) -> torch.Tensor:
    """A rank's part of a tensor of ours as theirs: a matrix [rows, inputs], a vector, or a convolution's weight."""
    lead, columns = split_shape(name, rows, tuple(x.shape))
    x = x.reshape(prod(lead), *columns)
    x = x if rows.is_ours else x[rows.numbers(lead)]
    return x.unsqueeze(1) if rows.taps else x


def expert_piece(name: str, placed: Placement, x: torch.Tensor, number: int, tensor: int, file: str) -> Piece:
    """The piece of our tensor of all experts that is one of their tensors. tensor: its tensor parallel rank."""
    inner, cut = list(placed.shape[1:]), placed.cut.get("etp")
    if cut is not None:
        inner[cut - 1] = x.numel() * inner[cut - 1] // max(1, prod(inner))
    if x.numel() != prod(inner):
        raise CheckpointError(f"{file}: an expert of {name} has shape {tuple(x.shape)}, expected {placed.shape[1:]}")
    box = Box(*placed.box((1, *inner), {"ep": number, "etp": tensor}))
    return Piece(name, placed.shape, box, x.reshape(1, *inner).contiguous())


def zero_counts(weights: dict[str, Placement]) -> list[Piece]:
    """The loads of experts, which their files do not have: 0 between steps."""
    counts = {name: one for name, one in weights.items() if one.buffer and one.buffer.combine == "sum"}
    return [
        Piece(name, one.shape, Box.whole(one.shape), torch.zeros(one.shape, dtype=getattr(torch, one.buffer.dtype)))
        for name, one in counts.items()
    ]


def with_ones(centred: bool, placed: Placement, prefix: str, x: torch.Tensor) -> torch.Tensor:
    """The weight of a norm, from what --apply-layernorm-1p stores. prefix: of our name; empty: no moment"""
    return x + 1 if centred and not prefix and is_norm(placed) else x
