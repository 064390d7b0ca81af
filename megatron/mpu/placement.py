# SPDX-License-Identifier: Apache-2.0
"""`Placement`: the shape, sharding and initial values of a parameter or buffer, in one record.

Initialization, gradient reduction, the global norm, weight decay, replica checks and checkpoints all use it, rather than
attributes of tensors. A module lists the placements of its own parameters and buffers in `self.placements`:

    self.weight = Parameter(torch.empty(heads // tp.size, 3, head_dim, hidden))
    self.placements = {"weight": Placement(shape=(heads, 3, head_dim, hidden), cut={"tp": 0}, init=Normal(0.02))}

`placements(model)` collects those of parameters under logical names such as `blocks.17.attention.qkv.weight`, and
`placed_buffers(model)` those of buffers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Union

from megatron.errors import SettingsError, did_you_mean

COMBINE = ("same", "max", "min", "sum", "mean")
# dtypes of buffers, by torch's names -> bytes per element.
BUFFER_BYTES = dict(float64=8, float32=4, bfloat16=2, float16=2, int64=8, int32=4, int16=2, int8=1, uint8=1, bool=1)
# Axes that split dense weights and experts, slowest first (mesh.py). Their ranks have copies of weights that are not split.
DENSE_AXES, EXPERT_AXES = ("tp",), ("ep", "etp")
# Axes of data and context parallelism, of dense weights and of experts: ranks along the first have the same shards, and
# ZeRO may shard a weight along the second.
DATA_PARALLEL, EXPERT_DATA_PARALLEL = ("replicate", "shard"), ("expert_replicate", "expert_shard")


class Normal(NamedTuple):
    """Drawn from N(0, std)."""

    std: float


class Constant(NamedTuple):
    """Filled with one value."""

    value: float


class Uniform(NamedTuple):
    """Drawn evenly from [low, high)."""

    low: float
    high: float


class LogUniform(NamedTuple):
    """exp of numbers drawn evenly from [log low, log high), none below `least`."""

    low: float
    high: float
    least: float = 0.0


class LogOf(NamedTuple):
    """The natural logarithm of positive numbers, in fp32: of decay rates, which a layer stores as logarithms."""

    of: Union[Uniform, LogUniform]


class InverseSoftplus(NamedTuple):
    """x with softplus(x) = y, for positive numbers y, in fp32: of step sizes, which a layer stores before its softplus."""

    of: Union[Uniform, LogUniform]


class Own(NamedTuple):
    """Filled by the module's own code, with the same values on every rank: for whole tensors, created on the CPU."""


Init = Union[Normal, Constant, Uniform, LogUniform, LogOf, InverseSoftplus, Own]


@dataclass(frozen=True)
class Buffer:
    """Marks a tensor as a buffer: training changes it, and it has no gradient and no optimizer state.

    combine: how the values of its ranks are combined, once a step, before the optimizer's update. "same": passes make the
             same change on all ranks, or none; "max", "min" and "mean": of the ranks' values; "sum": the sum of the ranks'
             changes in this step. The ranks are those of data and context parallelism, and of the axes in
             `Placement.partial`.
    dtype:   by torch's name
    saved:   whether checkpoints have it; not if every step begins with its initial values

    Raises SettingsError for an unknown rule or format.
    """

    combine: str = "same"
    dtype: str = "float32"
    saved: bool = True

    def __post_init__(self):
        for word, known, what in ((self.combine, COMBINE, "rule"), (self.dtype, BUFFER_BYTES, "format")):
            if word not in known:
                raise SettingsError(
                    f"{word!r} is no {what} of a buffer{did_you_mean(str(word), known)}",
                    do=f"there are {', '.join(known)} (docs/extending.md#buffers)",
                )


@dataclass(frozen=True)
class Placement:
    """The layout of a logical tensor over ranks.

    shape:    of the logical tensor, without padding
    cut:      axis name -> the dim that this axis splits into equal pieces of ceil(dim / axis size): `tp`, or for experts
              `ep` and `etp`. If both split one dim, there are ep x etp pieces, and those of an ep rank are consecutive
    partial:  axes over which each rank's gradient is a partial sum that must be reduced before use: `tp` for
              sequence-parallel norms, `tied` for an embedding on both the first and the last stage
    init:     initial values
    decay:    weight decay applies (matrices: yes; biases and norms: no)
    multiple: each rank's piece of a split dim is padded to a multiple of this (rows of a vocabulary)
    embedding_or_output: an input embedding of words, or the output layer, which use --decoupled-lr
    matrices: (dim, sizes along it): the matrices [-1, last dim] of linear layers in the tensor, which Muon updates
              separately: (1, (q, 1, 1)) of [groups, q + 2, d, h] are those of queries, keys and values. None: no matrices
    fused:    matrices in each of these, along the next dim: 2 for the gate and the values of each expert, (0, (1,) * E) of
              [E, 2, f, h]
    frozen:   a parameter that is not trained: it has no gradient and no optimizer state, and no step changes it
    exact:    the model computes with the fp32 main weight also if its other parameters have 16 bits: few numbers whose
              rounding matters, such as logarithms of decay rates
    buffer:   set if the tensor is a buffer

    A local tensor may be larger than its box in the logical tensor (padded vocabulary rows). The rest is not part of the
    model, has no gradient and is not saved.
    """

    shape: tuple[int, ...]
    init: Init
    cut: dict[str, int] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    decay: bool = True
    multiple: int = 1
    embedding_or_output: bool = False
    matrices: Optional[tuple[int, tuple[int, ...]]] = None
    fused: int = 1
    frozen: bool = False
    exact: bool = False
    buffer: Optional[Buffer] = None

    def __post_init__(self):
        if not any({*self.cut, *self.partial} <= {*axes, "tied"} for axes in (DENSE_AXES, EXPERT_AXES)):
            raise SettingsError(
                f"axes of a weight of shape {list(self.shape)} cannot be combined: cut {self.cut}, partial {self.partial}",
                "tp splits dense weights; ep and etp split experts, over another grid of the ranks (docs/design.md)",
                'write cut={"tp": dim}, or cut={"ep": dim, "etp": dim}',
            )

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes whose ranks have pieces or copies of the tensor: those of experts if one splits it or sums its gradient."""
        return EXPERT_AXES if {*EXPERT_AXES} & {*self.cut, *self.partial} else DENSE_AXES

    @property
    def data_axes(self) -> tuple[str, str]:
        """Axes whose ranks process different tokens: shards are equal along the first, different along the second."""
        return EXPERT_DATA_PARALLEL if self.model_axes == EXPERT_AXES else DATA_PARALLEL

    @property
    def stacked(self) -> int:
        """The dims before those of a matrix: 1 for experts, whose matrices are stacked."""
        return int(self.cut.get("ep") == 0)

    @property
    def cut_dims(self) -> list[tuple[int, tuple[str, ...]]]:
        """(dim, axes that split it) for each split dim."""
        axes_of = lambda dim: tuple(axis for axis in self.model_axes if self.cut.get(axis) == dim)
        return [(dim, axes_of(dim)) for dim in sorted(set(self.cut.values()))]

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one rank's piece, including padding; `sizes`: axis name -> number of ranks.

        >>> Placement((50257, 4), Normal(0.02), cut={"tp": 0}, multiple=128).local_shape({"tp": 8})
        (6400, 4)
        >>> Placement((8, 12, 4), Normal(0.02), cut={"ep": 0, "etp": 1}).local_shape({"ep": 4, "etp": 2})
        (2, 6, 4)
        """
        local = list(self.shape)
        for dim, axes in self.cut_dims:
            pieces = math.prod(sizes.get(axis, 1) for axis in axes)
            local[dim] = math.ceil(local[dim] / (pieces * self.multiple)) * self.multiple
        return tuple(local)

    def matrix_shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of each of `matrices`.

        >>> Placement((4, 3, 8, 32), Normal(0.02), matrices=(1, (1, 1, 1))).matrix_shapes()
        [(32, 32), (32, 32), (32, 32)]
        """
        dim, sizes = self.matrices or (0, ())
        others = math.prod(self.shape[:-1]) // self.shape[dim]
        return [(others * size // self.fused, self.shape[-1]) for size in sizes for _ in range(self.fused)]

    def is_primary(self, place: dict[str, int]) -> bool:
        """Whether this rank counts these elements in norms, sums and files. True on exactly one rank per element."""
        copies = {*self.model_axes, *self.partial} - set(self.cut)
        return all(place[axis] == 0 for axis in copies)

    def box(self, local_shape, ranks: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, extent) of the local piece in the logical tensor.

        ranks: this rank's coordinate on each axis in `cut` (`Mesh.coordinates`), or `ep_etp` if both split one dim

        >>> Placement((10, 4), Normal(0.02), cut={"tp": 0}).box((8, 4), {"tp": 1})
        ((8, 0), (2, 4))
        >>> Placement((8, 12, 4), Normal(0.02), cut={"ep": 0, "etp": 1}).box((2, 6, 4), {"ep": 3, "etp": 1})
        ((6, 6, 0), (2, 6, 4))
        """
        offset = [0] * len(self.shape)
        for dim, axes in self.cut_dims:
            offset[dim] = min(ranks["_".join(axes)] * local_shape[dim], self.shape[dim])
        return tuple(offset), tuple(min(n, full - at) for n, full, at in zip(local_shape, self.shape, offset))


def placements(model) -> dict[str, tuple]:
    """Logical name -> (parameter, Placement) for every parameter of a module tree, in registration order.

    model: a module, or a list of them (the chunks of a pipeline rank), which may share parameters of one name.
    Raises SettingsError if a parameter has no placement, or a placement no parameter, as may happen in a user's model.
    """
    found = {}
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        for prefix, module in chunk.named_modules():
            own = dict(module.named_parameters(recurse=False))
            listed = {name: placed for name, placed in getattr(module, "placements", {}).items() if not placed.buffer}
            if odd := [f"{prefix}.{name}".strip(".") for name in sorted(set(own) ^ set(listed))]:
                raise SettingsError(
                    f"parameters and placements of the model do not match: {', '.join(odd[:8])}",
                    f"{type(module).__name__} lists {', '.join(sorted(listed)) or 'nothing'} in `placements`",
                    "create parameters with mpu.layers.create_parameters, or train it as a plain module (model.plain)",
                )
            for name, parameter in own.items():
                path = f"{prefix}.{name}" if prefix else name
                assert found.get(path, (parameter,))[0] is parameter, f"two parameters are named {path}"
                found[path] = (parameter, listed[name])
    return found


class PlacedBuffer(NamedTuple):
    """A buffer with a placement, and its module. The module may replace the tensor at any time."""

    module: Any
    attribute: str
    placement: Placement

    @property
    def tensor(self):
        """The current tensor on this rank."""
        return self.module._buffers[self.attribute]


def placed_buffers(model) -> dict[str, PlacedBuffer]:
    """Logical name -> buffer, for every buffer of a module tree (or a list of them) that has a placement.

    Raises SettingsError if a module lists a buffer that it does not have.
    """
    found: dict[str, PlacedBuffer] = {}
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        for prefix, module in chunk.named_modules():
            for name, placement in getattr(module, "placements", {}).items():
                if placement.buffer is None:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                if module._buffers.get(name) is None:
                    raise SettingsError(
                        f"{type(module).__name__} lists a buffer in `placements` that it does not have: {path}",
                        do="create it with mpu.layers.create_parameters, or mpu.layers.register_buffer",
                    )
                assert found.get(path, (module,))[0] is module, f"two buffers are named {path}"
                found[path] = PlacedBuffer(module, name, placement)
    return found


Table = Mapping[str, Placement]


def elements(table: Table) -> int:
    """Number of parameter elements in a table, without buffers."""
    return sum(math.prod(placement.shape) for placement in table.values() if not placement.buffer)


def beside_rows(weight: Placement, width: int, init: Union[Normal, Constant], decay: bool = True) -> Placement:
    """The placement of a tensor [rows..., width] for a layer's weight [rows..., i], split as the weight's rows.

    >>> beside_rows(Placement((8, 4), Normal(0.02), cut={"tp": 1}), 2, Constant(0.0)).partial
    ('tp',)
    """
    last = len(weight.shape) - 1
    cut = {axis: dim for axis, dim in weight.cut.items() if dim < last}
    return _beside(weight, (*weight.shape[:-1], width), cut, init, decay)


def beside_inputs(weight: Placement, height: int, init: Union[Normal, Constant], decay: bool = True) -> Placement:
    """The placement of a tensor [height, i] for a layer's weight [rows..., i], split as the weight's inputs; of experts
    [E, height, i].

    >>> beside_inputs(Placement((8, 4), Normal(0.02), cut={"tp": 1}), 2, Normal(0.02)).cut
    {'tp': 1}
    >>> beside_inputs(Placement((8, 12, 4), Normal(0.02), cut={"ep": 0, "etp": 2}), 2, Normal(0.02)).cut
    {'ep': 0, 'etp': 2}
    """
    last, stack = len(weight.shape) - 1, weight.stacked
    cut = {axis: 1 + stack if dim == last else dim for axis, dim in weight.cut.items() if dim in (last, stack - 1)}
    return _beside(weight, (*weight.shape[:stack], height, weight.shape[-1]), cut, init, decay)


def _beside(weight: Placement, shape: tuple[int, ...], cut: dict[str, int], init, decay: bool) -> Placement:
    """Axes that split only the weight hold partial sums of the gradient of this tensor."""
    partial_over = (*weight.partial, *(axis for axis in weight.cut if axis not in cut))
    return Placement(shape, init, cut=cut, partial=partial_over, decay=decay)
