# SPDX-License-Identifier: Apache-2.0
"""The weights of a model's parts as tables: name -> shape, cut, initial values, decay (`Placement`). Needs no torch.

A module creates its parameters from its table (`mpu.layers.create_parameters`). The planner, parameter counts, ZeRO's
units, the check that all ranks together hold the model, and conversions read the same tables.

    >>> [(name, placed.shape) for name, placed in column(inputs=8, rows=(32,), std=0.02).items()]
    [('weight', (32, 8)), ('bias', (32,))]

Legend: h hidden, v vocabulary, g key-value groups, q queries of a group, d channels of a head.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Optional

from megatron.mpu.placement import Constant, Normal, Placement, Table
from megatron.settings.schema import Model


@dataclass(frozen=True)
class Unit:
    """Weights that ZeRO gathers together: a layer, a table, a norm. Experts among them are reduced along axes of their own
    (`Placement.data_axes`).

    name:    the prefix of the names of its weights: `blocks.17`
    weights: the rest of the name -> the placement of the weight or buffer
    layer:   its number in the whole network; None: not a layer
    ends:    the ends of the pipeline that hold a unit that is not a layer: "first", "last", or both for a tied table
    """

    name: str
    weights: Table
    layer: Optional[int] = None
    ends: tuple[str, ...] = ()

    def held_by(self, first: bool, last: bool) -> bool:
        """Whether such a stage holds it, if it is not a layer."""
        return (first and "first" in self.ends) or (last and "last" in self.ends)


def add_prefix(name: str, table: Table) -> dict[str, Placement]:
    """A table with `name.` before each of its names."""
    return {f"{name}.{key}": placement for key, placement in table.items()}


def take_prefix(table: Table, name: str) -> dict[str, Placement]:
    """The entries of a table whose names begin with `name.`, by the rest of their names."""
    return {key[len(name) + 1 :]: placement for key, placement in table.items() if key.startswith(f"{name}.")}


def frozen(table: Table) -> dict[str, Placement]:
    """A table of weights that are not trained: the base of a model that has adapters, or a teacher."""
    return {name: replace(placement, frozen=placement.buffer is None) for name, placement in table.items()}


def logical(units: Iterable[Unit]) -> dict[str, Placement]:
    """All weights of these units by their full names."""
    return {name: placement for unit in units for name, placement in add_prefix(unit.name, unit.weights).items()}


# Parts ----------------------------------------------------------------------------------------------------------------


def column(
    inputs: int,
    rows: tuple[int, ...],
    std: float,
    *,
    cut: int = 0,
    bias: bool = True,
    matrices=None,
    experts: Optional[int] = None,
) -> dict[str, Placement]:
    """The weights of a column-parallel linear layer: [rows..., inputs], divided along the dim `cut` of its rows.

    Fused queries, keys and values are `rows=(g, q + 2, d), cut=0`, a gated MLP `rows=(2, ffn), cut=1`: every shard is one
    box. matrices: its separate matrices (`Placement`), if it has several. experts: their number; the shape is [experts,
    rows..., inputs], divided over ep, and each expert over etp
    """
    front, cuts, parts, fused = (), {"tp": cut}, matrices or (0, rows[:1]), 1
    if experts is not None:
        front, cuts, parts = (experts,), {"ep": 0, "etp": cut + 1}, (0, (1,) * experts)
        fused = len(matrices[1]) if matrices else 1
    table = {"weight": Placement((*front, *rows, inputs), Normal(std), cut=cuts, matrices=parts, fused=fused)}
    if bias:
        table["bias"] = Placement((*front, *rows), Constant(0.0), cut=cuts, decay=False)
    return table


def row(
    inputs: int,
    outputs: int,
    std: float,
    *,
    bias: bool = True,
    sequence_parallel: bool = False,
    experts: Optional[int] = None,
) -> dict[str, Placement]:
    """The weights of a row-parallel linear layer: [outputs, inputs], divided along its inputs. experts: their number;
    the shape is [experts, outputs, inputs], and the gradient of an expert's bias is partial over etp.
    """
    # It is added to a rank's own tokens only
    front, cuts, partial = (), {"tp": 1}, ("tp",) if sequence_parallel else ()
    if experts is not None:
        front, cuts, partial = (experts,), {"ep": 0, "etp": 2}, ("etp",)
    parts = (0, (1,) * experts) if experts else (0, (outputs,))
    table = {"weight": Placement((*front, outputs, inputs), Normal(std), cut=cuts, matrices=parts)}
    if bias:
        own = {axis: dim for axis, dim in cuts.items() if axis == "ep"}
        table["bias"] = Placement((*front, outputs), Constant(0.0), cut=own, partial=partial, decay=False)
    return table


def replicated(
    inputs: int, outputs: int, std: float, *, bias: bool = True, sequence_parallel: bool = False, parts=None
) -> dict[str, Placement]:
    """The weights of a linear layer that each tensor parallel rank has whole: [outputs, inputs]. With sequence parallelism
    a rank's gradients are those of its own tokens. parts: rows of its separate matrices, if it has several.
    """
    partial = ("tp",) if sequence_parallel else ()
    matrices = (0, parts or (outputs,))
    table = {"weight": Placement((outputs, inputs), Normal(std), partial=partial, matrices=matrices)}
    if bias:
        table["bias"] = Placement((outputs,), Constant(0.0), partial=partial, decay=False)
    return table


def norm(model: Model, width: int, partial: bool) -> dict[str, Placement]:
    """The weights of LayerNorm or RMSNorm. partial: each tensor parallel rank's gradient is a part of a sum, because it
    sees a part of the tokens (sequence parallelism) or of the heads (query-key norm).
    """
    axes = ("tp",) if partial else ()
    table = {"weight": Placement((width,), Constant(1.0), partial=axes, decay=False)}
    if model.normalization == "LayerNorm":
        table["bias"] = Placement((width,), Constant(0.0), partial=axes, decay=False)
    return table


def vocab_embedding(model: Model, vocab_size: int) -> dict[str, Placement]:
    """The weight of a word embedding or an output layer: [v, h], with rows divided over ranks and padded on each."""
    shape, multiple = (vocab_size, model.hidden_size), model.make_vocab_size_divisible_by
    init = Normal(model.init_method_std)
    return {"weight": Placement(shape, init, cut={"tp": 0}, multiple=multiple, embedding_or_output=True)}


def positions(model: Model, sequence_parallel: bool) -> dict[str, Placement]:
    """The weight of learned positions: [positions, h]. With sequence parallelism each rank reads those of its part."""
    shape, partial = (model.position_table, model.hidden_size), ("tp",) if sequence_parallel else ()
    return {"weight": Placement(shape, Normal(model.init_method_std), partial=partial)}


def output_std(model: Model) -> float:
    """The initial standard deviation of layers that write to the residual stream: its variance must not grow with depth."""
    return model.init_method_std / math.sqrt(model.residual_sums)
