# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of quantized models: in the place of a layer's weight they have its whole numbers, scales and zeros.

    blocks.0.mlp.up.weight.values   int8, or uint8 with two numbers of 4 bits, the first in the lower half
    blocks.0.mlp.up.weight.scale    [rows..., g], for g groups of inputs
    blocks.0.mlp.up.weight.zero     the same, int4 alone

They are boxes of logical tensors as all others, so any layout loads them. `state.json` names the format.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.index import Tensor
from megatron.checkpoint.reader import QUANTIZED
from megatron.checkpoint.reshard import Rewritten
from megatron.checkpoint.store import Piece
from megatron.errors import SettingsError
from megatron.inference.quantize import Rounded, attach
from megatron.model.facts import Facts
from megatron.model.quantization import QuantizeOptions, skipped_layers
from megatron.mpu.layers import linear_products
from megatron.mpu.placement import Buffer, Constant, Placement, placed_buffers, placements
from megatron.optimizer.buffers import buffer_pieces

PARTS = ("values", "scale", "zero")
# Names, after a layer's, of what a checkpoint has of a quantized layer: also the buffers of quantization aware training.
STORED_OF_LAYER = (*(f"weight.{part}" for part in PARTS), "input_absmax", "input_average", "pact_alpha")


def quantized(loaded, how: QuantizeOptions) -> Rewritten:
    """The checkpoint of a quantized model (`inference.load.Loaded`), of one process."""
    model, place = loaded.model, dict.fromkeys(("tp", "ep", "etp", "ep_etp"), 0)
    products = [product for product in linear_products([model]) if isinstance(product, Rounded)]
    pieces, named = [], {f"{product.name}.weight" for product in products}
    for name, (parameter, placement) in placements(model).items():
        if name not in named:
            box = Box(*placement.box(tuple(parameter.shape), place))
            whole = parameter.detach()[tuple(slice(n) for n in box.extent)]
            pieces.append(Piece(name, tuple(placement.shape), box, whole))
    for name, buffer in placed_buffers(model).items():
        pieces += buffer_pieces(name, buffer, place)
    for product in products:
        pieces += _pieces(product, product.weight_operand(product.layer.weight), place)
    scale = str(products[0].weight_operand(None)[1].dtype).removeprefix("torch.")
    own = dict(
        quantize=how.quantize,
        quantize_group_size=how.quantize_group_size,
        quantize_symmetric=how.quantize_symmetric,
        quantize_skip=",".join(skipped_layers(how.quantize_skip, "--quantize-skip")) or None,
        quantize_method=how.quantize_method,
        scale=scale,
    )
    named = {piece.name: piece for piece in pieces}
    tensors = {name: Tensor(piece.tensor.dtype, piece.shape, []) for name, piece in named.items()}
    return Rewritten(tensors, lambda name: named[name].tensor, {**loaded.record, QUANTIZED: own})


def quantized_pieces(
    chunks: Iterable[nn.Module], pieces: list[Piece], facts: Facts, record: Mapping[str, Any], place: dict[str, int]
) -> tuple[list[Piece], dict[str, nn.Module]]:
    """(the pieces to load of a quantized checkpoint, its quantized layers), for a model that was built for plain weights.

    pieces: of that model. record: the entry of state.json. The layers' weights have to be freed.
    """
    chosen = attach(chunks, facts, stored_options(record))
    weights = {f"{name}.weight" for name in chosen}
    kept = [piece for piece in pieces if piece.name not in weights]
    for layer in chosen.values():
        operand = _empty(layer.product, getattr(torch, record["scale"]))
        layer.product.hold(operand)
        kept += _pieces(layer.product, operand, place)
    return kept, chosen


def stored_options(record: Mapping[str, Any]) -> QuantizeOptions:
    """How a quantized checkpoint was quantized. record: the entry of its state.json"""
    names = ("quantize", "quantize_group_size", "quantize_symmetric", "quantize_skip")
    return QuantizeOptions(**{name: record[name] for name in names})


def cut_from(whole: Rounded, part: Rounded, place: dict[str, int]) -> None:
    """Give a rank's layer its part of the weight of a whole one. place: the rank's, axis -> index"""
    operand = whole.weight_operand(whole.layer.weight)
    scale = operand[1].dtype
    own = _empty(part, scale)
    pieces = _pieces(part, own, place), _pieces(whole, operand, dict.fromkeys(place, 0))
    for mine, all_of_it in zip(*pieces, strict=True):
        mine.tensor.copy_(all_of_it.tensor[mine.box.slices()])
    part.hold(own)


def refuse_twice(folder, record: Mapping[str, Any], how: QuantizeOptions) -> None:
    """Raise SettingsError if a quantized checkpoint is to be quantized."""
    if record.get(QUANTIZED) and how.quantize:
        raise SettingsError(
            f"--quantize {how.quantize}: {folder} is quantized already, as {record[QUANTIZED]['quantize']}",
            do="leave --quantize out, or give the checkpoint that it was made from",
        )


def refuse_quantized(reader, what: str) -> None:
    """Raise SettingsError if a checkpoint is quantized. what: the command that needs plain weights."""
    if stored := reader.state.get(QUANTIZED):
        raise SettingsError(
            f"{what}: {reader.folder} is quantized, as {stored['quantize']}",
            do="python -m megatron.tools.export has formats for it; or give the checkpoint that it was made from",
        )


def _placements(product: Rounded) -> list[Placement]:
    """Of the tensors of a product's operand, in logical shapes."""
    weight = product.layer.placements["weight"]
    *rows, inputs = weight.shape
    groups = inputs // product.group_size if product.group_size else 1
    last = len(rows)
    of_rows = {axis: dim for axis, dim in weight.cut.items() if dim < last}
    cut = dict(weight.cut) if product.group_size else of_rows
    whole = replace(weight, shape=(*rows, inputs * product.stored_bits // 8), init=Constant(0.0), buffer=Buffer("same"))
    beside = Placement((*rows, groups), Constant(0.0), cut=cut, decay=False, buffer=Buffer("same"))
    return [whole, beside, beside]


def _empty(product: Rounded, scale: torch.dtype) -> tuple[torch.Tensor, ...]:
    """An operand to fill."""
    layer, sizes = product.layer, {product.layer.tp.name: product.layer.tp.size}
    dtypes = (torch.uint8 if product.least == 0 else torch.int8, scale, torch.uint8)
    shapes = [placement.local_shape(sizes) for placement in _placements(product)]
    made = [torch.empty(shape, dtype=one, device=layer.weight.device) for shape, one in zip(shapes, dtypes)]
    flat = [x.flatten(0, -2) for x in made]
    return tuple(flat) if product.least == 0 else (flat[0], flat[1][:, 0])


def _pieces(product: Rounded, operand: tuple[torch.Tensor, ...], place: dict[str, int]) -> list[Piece]:
    found, sizes = [], {product.layer.tp.name: product.layer.tp.size}
    for part, placement, tensor in zip(PARTS, _placements(product), operand):
        local = placement.local_shape(sizes)
        box = Box(*placement.box(local, place))
        found.append(Piece(f"{product.name}.weight.{part}", tuple(placement.shape), box, tensor.view(local)))
    return found
