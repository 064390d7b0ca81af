# SPDX-License-Identifier: Apache-2.0
"""The number of weights on a rank, unit by unit: the arithmetic of `optimizer/units.py` on a model's tables of weights.

In elements, not bytes. Tests compare it with the allocations of a run.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from megatron.model.facts import AHEAD, Facts, LayerDesign
from megatron.model.linear_kinds import WEIGHT
from megatron.model.weights import Table
from megatron.mpu.placement import BUFFER_BYTES, DATA_PARALLEL, EXPERT_DATA_PARALLEL
from megatron.mpu.selection import Selection
from megatron.optimizer.flat import aligned, unit_size
from megatron.pipeline.stages import Pipeline
from megatron.planner.layout import Cuts, Job, Layout

SCALE_TILES = dict(tensorwise=0, blockwise=128 * 128)  # fp8 recipe -> elements of a weight that share a scale; 0: all
Sizes = Mapping[str, int]  # axis -> ranks (`Layout.data_sizes`), or a rank's index on it (`Mesh.coordinates`)


class ParameterSize(NamedTuple):
    """A parameter: its elements on one rank, whether it has weight decay, the axes over which its gradient is partial,
    (rows, columns) of its whole matrices, if it belongs to a linear layer, and scales of its fp8 numbers, if it is kept so.
    """

    size: int
    decay: bool = True
    partial: tuple[str, ...] = ()
    matrices: tuple[tuple[int, int], ...] = ()
    scales: int = 0


class UnitSizes(NamedTuple):
    """A unit's parameters in memory order; a layer's experts are a unit of their own, and so are exact parameters, which
    are fp32 in any run, and cast ones, which are kept in fp8. name: its name, or the kind of a layer; ends: see
    `model.weights.Unit`; axes: see `Placement.data_axes`.

    slots:   trained parameters, which have gradients and optimizer state
    frozen:  frozen parameters, a separate unit in memory
    buffers: bytes of buffers that training changes
    """

    name: str
    slots: tuple[ParameterSize, ...]
    layer: bool = False
    ends: tuple[str, ...] = ()
    frozen: tuple[ParameterSize, ...] = ()
    buffers: int = 0
    axes: tuple[str, str] = DATA_PARALLEL
    exact: bool = False
    cast: bool = False

    def bytes_of(self, elements: int, element: int) -> int:
        """Bytes of this many weights; element: bytes of a number in the model's format."""
        return elements * (4 if self.exact else 1 if self.cast else element)

    @property
    def scales(self) -> int:
        """Scales of its fp8 numbers."""
        return sum(slot.scales for slot in self.slots)

    @property
    def sharded(self) -> str:
        """The axis that shards it."""
        return self.axes[1]

    def padded(self, sizes: Sizes) -> int:
        """Elements of the buffer of trained parameters."""
        return _padded(self.slots, sizes[self.axes[1]])

    def padded_frozen(self, sizes: Sizes) -> int:
        """The same for frozen parameters."""
        return _padded(self.frozen, sizes[self.sharded])

    def shared(self, pieces: int) -> int:
        """Elements of a piece of a model that is frozen as a whole."""
        return (_padded(self.slots, pieces) + (_padded(self.frozen, pieces) if self.frozen else 0)) // pieces

    def owned(self, sizes: Sizes) -> int:
        """Trained elements in a rank's shard."""
        pieces = sizes[self.axes[1]]
        return _padded(self.slots, pieces) // pieces

    def _shard(self, place: Sizes, sizes: Sizes) -> tuple[int, int]:
        """The range of the shard of the rank at `place`."""
        size, rank = self.owned(sizes), place[self.sharded]
        return size * rank, size * (rank + 1)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The (rows, columns) of all matrices in the unit."""
        return [shape for slot in self.slots for shape in slot.matrices]

    def in_matrices(self, place: Sizes, sizes: Sizes) -> int:
        """Elements of matrices, with their padding, in the shard of the rank at `place`."""
        (low, high), at, elements = self._shard(place, sizes), 0, 0
        for slot in self.slots:
            stop = at + aligned(slot.size)
            elements += max(0, min(high, stop) - max(low, at)) if slot.matrices else 0
            at = stop
        return elements

    @property
    def elements(self) -> int:
        """Elements without padding, including frozen ones."""
        return sum(slot.size for slot in (*self.slots, *self.frozen))

    def partial(self, axis: str, place: Sizes, sizes: Sizes) -> int:
        """Elements in the shard of the rank at `place` with gradients that are partial sums over an axis."""
        (low, high), at, elements = self._shard(place, sizes), 0, 0
        for slot in self.slots:
            if axis in slot.partial:
                elements += max(0, min(high, at + slot.size) - max(low, at))
            at += aligned(slot.size)
        return elements


class Units(tuple):
    """The units of a rank, in order (dense ones, then experts), with cached totals."""

    @cached_property
    def others(self) -> "Units":
        """The units that are not layers."""
        return Units(unit for unit in self if not unit.layer)

    @cached_property
    def layers(self) -> "Units":
        """The layers."""
        return Units(unit for unit in self if unit.layer)

    def largest_layer(self, size_of: Callable[[UnitSizes], int]) -> int:
        """The size of the largest layer, with its experts."""
        most: dict[tuple[str, ...], int] = {}
        for unit in self.layers.counts:
            key = unit.name, unit.sharded, unit.exact, unit.cast
            most[key] = max(most.get(key, 0), size_of(unit))
        kinds = {name for name, *_ in most}
        return max((sum(size for (name, *_), size in most.items() if name == kind) for kind in kinds), default=0)

    @cached_property
    def over(self) -> dict[tuple[str, str], "Units"]:
        """Axes -> the units that they replicate and shard."""
        return {axes: Units(unit for unit in self if unit.axes == axes) for axes in dict.fromkeys(u.axes for u in self)}

    @cached_property
    def partial_axes(self) -> set[str]:
        """The axes over which some gradients are partial sums."""
        return {axis for unit in self.counts for slot in unit.slots for axis in slot.partial}

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(slot.size for unit in self.counts for slot in (*unit.slots, *unit.frozen))

    @cached_property
    def counts(self) -> Counter:
        """Unit -> number of equal ones."""
        return Counter(self)

    @cached_property
    def _sizes(self) -> dict[tuple, int]:
        return {}

    def _cached(self, what: str, sizes: Sizes, size_of: Callable[[UnitSizes], int]) -> int:
        """A size of all units together, which the axes that shard them decide."""
        key = what, sizes[DATA_PARALLEL[1]], sizes[EXPERT_DATA_PARALLEL[1]]
        if key not in self._sizes:
            self._sizes[key] = self.total(size_of)
        return self._sizes[key]

    def padded(self, sizes: Sizes) -> int:
        """Elements of all buffers of trained parameters."""
        return self._cached("padded", sizes, lambda unit: unit.padded(sizes))

    def total(self, size_of: Callable[[UnitSizes], int]) -> int:
        """A size of all units together."""
        return sum(count * size_of(unit) for unit, count in self.counts.items())

    def bytes_of(self, size_of: Callable[[UnitSizes], int], element: int) -> int:
        """Bytes of weights of all units; size_of: how many of a unit; element: bytes of a number in the model's format."""
        return self.total(lambda unit: unit.bytes_of(size_of(unit), element))

    def weights(self, sizes: Sizes, element: int) -> int:
        """Bytes of the buffers of all parameters. element: bytes of a number in the model's format"""
        size_of = lambda unit: unit.bytes_of(unit.padded(sizes) + unit.padded_frozen(sizes), element)
        return self._cached(f"weights of {element} bytes", sizes, size_of)

    def padded_frozen(self, sizes: Sizes) -> int:
        """Elements of all buffers of frozen parameters."""
        return self._cached("frozen", sizes, lambda unit: unit.padded_frozen(sizes) if unit.frozen else 0)

    def owned(self, sizes: Sizes) -> int:
        """Trained elements in a rank's shard."""
        return self._cached("owned", sizes, lambda unit: unit.owned(sizes))

    @cached_property
    def scales(self) -> int:
        """Scales of fp8 numbers."""
        return self.total(lambda unit: unit.scales)

    def whole(self, sizes: Sizes) -> bool:
        """Whether the shard of a rank is all that it holds."""
        return all(sizes[unit.sharded] == 1 for unit in self.counts if unit.slots)

    @cached_property
    def buffers(self) -> int:
        """Bytes of buffers that training changes."""
        return self.total(lambda unit: unit.buffers)


LayerOf = tuple[LayerDesign, frozenset[str]]  # the design of a layer, and the names of its frozen weights


def rank_units(job: Job, layout: Layout, rank: int) -> Units:
    """The units of a pipeline rank's chunks."""
    last_job, known = layout.__dict__.get("_units", (None, {}))  # many figures of a layout ask for them
    if last_job is not job:
        layout.__dict__["_units"] = job, (known := {})
    if rank not in known:
        pipeline = layout.pipeline(job.facts.num_layers)
        known[rank] = _rank_units(job.facts, job.selection, layout.cuts, layout.sp, pipeline, rank)
    return known[rank]


@lru_cache(maxsize=65536)
def _rank_units(facts: Facts, selection: Selection, cuts: Cuts, sp: bool, pipeline: Pipeline, rank: int) -> Units:
    last = len(pipeline.stages) - 1
    stages = tuple((pipeline.layers[stage], stage == 0, stage == last) for stage in pipeline.stages_of(rank))
    own = tuple((layers_of(facts, selection, layers), *ends) for layers, *ends in stages)
    held = sorted(n for layers, *_ in stages for n in layers) if facts.settings.kd_hidden_projections else ()
    return _units(facts, selection, cuts, sp, own, tuple(held))


def first_units(job: Job, layout: Layout, layers: int, last: bool) -> Units:
    """The units of the first layers of a model without stages, and of its end if `last`."""
    held = layers_of(job.facts, job.selection, range(layers))
    return _units(job.facts, job.selection, layout.cuts, layout.sp, ((held, True, last),))


@lru_cache(maxsize=65536)
def layers_of(facts: Facts, selection: Selection, layers: Sequence[int]) -> tuple[LayerOf, ...]:
    """The designs and frozen weights of these layers."""
    return tuple(_layer_of(facts, selection, n) for n in layers)


@lru_cache(maxsize=65536)
def _layer_of(facts: Facts, selection: Selection, layer: int) -> LayerOf:
    design = facts.design_of(layer)
    return design, selection.frozen(facts.design_weights(design, False), f"blocks.{layer}.")


@lru_cache(maxsize=1024)
def layer_sizes(facts: Facts, layer: LayerOf, cuts: Cuts, sp: bool) -> tuple[UnitSizes, ...]:
    """The parameters of a layer on one rank, and its experts."""
    design, frozen = layer
    table = facts.design_weights(design, sp)
    return _sizes(design.kind, table, frozen, cuts, layer=True, cast=_cast(facts, [design], table, frozen, ""))


def _cast(
    facts: Facts, designs: Sequence[LayerDesign], table: Table, frozen: frozenset[str], prefix: str
) -> dict[str, int]:
    """The weights of a unit with layers of these designs that are kept in fp8, as `_sizes` has them. prefix: of a layer."""
    if (tiles := SCALE_TILES.get(facts.gathered_in_fp8)) is None:
        return {}
    names = (prefix.format(n) + name + WEIGHT for n, design in enumerate(designs) for name in design.in_fp8)
    return {name: tiles for name in names if name not in frozen and not table[name].stacked}


@lru_cache(maxsize=4096)
def _units(
    facts: Facts,
    selection: Selection,
    cuts: Cuts,
    sp: bool,
    stages: tuple[tuple[tuple[LayerOf, ...], bool, bool], ...],
    projected: tuple[int, ...] = (),
) -> Units:
    """stages: per chunk its layers, whether it is the first, the last; projected: layers that may have projections."""
    first, last = any(stage[1] for stage in stages), any(stage[2] for stage in stages)
    held = facts.units((), first, last, sp) + facts.projections(projected, sp)
    layers = [unit for own, _, _ in stages for layer in own for unit in layer_sizes(facts, layer, cuts, sp)]
    front, back = [], []
    for unit in held:
        shared = len(unit.ends) > 1 and not (first and last)  # the other end holds a copy
        frozen = selection.frozen(unit.weights, f"{unit.name}.")
        ahead = facts.designs_ahead if unit.name.startswith(AHEAD) else []
        cast = _cast(facts, ahead, unit.weights, frozen, "layers.{}.")
        (front if "first" in unit.ends else back).extend(
            _sizes(unit.name, unit.weights, frozen, cuts, ends=unit.ends, shared=("tied",) * shared, cast=cast)
        )
    return Units(sorted(front + layers + back, key=lambda unit: (unit.axes != DATA_PARALLEL, unit.exact, unit.cast)))


def _sizes(
    name: str,
    table: Table,
    frozen: frozenset[str],
    cuts: Cuts,
    *,
    layer: bool = False,
    ends: tuple[str, ...] = (),
    shared: tuple[str, ...] = (),
    cast: Mapping[str, int] = MappingProxyType({}),
) -> tuple[UnitSizes, ...]:
    """The sizes of dense weights, and of experts, exact and cast ones if there are any. frozen: their names; shared: axes
    of other copies; cast: name -> elements that share a scale, 0: all.
    """
    units = []
    for kind in product((DATA_PARALLEL, EXPERT_DATA_PARALLEL), (False, True), (False, True)):
        of = lambda key: (table[key].data_axes, table[key].exact, key in cast)
        own = {key: placed for key, placed in table.items() if of(key) == kind}
        if not own and kind != (DATA_PARALLEL, False, False):
            continue
        parameters = {key: placed for key, placed in own.items() if not placed.buffer}
        trained = {key: placed for key, placed in parameters.items() if key not in frozen}
        kept = {key: placed for key, placed in parameters.items() if key in frozen}
        buffers = (placed for placed in own.values() if placed.buffer)
        size = sum(math.prod(one.local_shape(cuts._asdict())) * BUFFER_BYTES[one.buffer.dtype] for one in buffers)
        # A buffer has a copy, from before the step.
        slots = _slots(trained, cuts, shared, cast), layer, ends, _slots(kept, cuts)
        units.append(UnitSizes(name, *slots, 2 * size, *kind))
    return tuple(units)


def _slots(
    table: Table, cuts: Cuts, shared: tuple[str, ...] = (), cast: Mapping[str, int] = MappingProxyType({})
) -> tuple[ParameterSize, ...]:
    """Decayed weights first, as in `optimizer.units.flat_units_of`."""
    sizes = cuts._asdict()
    slots = [
        ParameterSize(
            size := math.prod(placed.local_shape(sizes)),
            placed.decay,
            tuple(axis for axis in placed.partial if sizes.get(axis, 1) > 1) + shared,
            tuple(placed.matrix_shapes()),
            size // (cast[name] or size) if name in cast else 0,
        )
        for name, placed in table.items()
    ]
    return tuple(sorted(slots, key=lambda slot: not slot.decay))


@lru_cache(maxsize=65536)
def _padded(slots: tuple[ParameterSize, ...], pieces: int) -> int:
    return unit_size((slot.size for slot in slots), pieces)
