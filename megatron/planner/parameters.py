# SPDX-License-Identifier: Apache-2.0
"""The number of weights on a rank, unit by unit: the arithmetic of `optimizer/units.py` on a model's tables of weights.

In elements, not bytes. Tests compare it with the allocations of a run.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron.model.facts import Facts, LayerDesign
from megatron.model.weights import Table
from megatron.mpu.placement import BUFFER_BYTES
from megatron.mpu.selection import Selection
from megatron.optimizer.flat import aligned, unit_size
from megatron.planner.layout import Job, Layout


class ParameterSize(NamedTuple):
    """A parameter: its elements on one tp rank, whether it has weight decay, the axes over which its gradient is partial,
    and (rows, columns) of its whole matrices, if it belongs to a linear layer.
    """

    size: int
    decay: bool = True
    partial: tuple[str, ...] = ()
    matrices: tuple[tuple[int, int], ...] = ()


class UnitSizes(NamedTuple):
    """A unit's parameters in memory order. name: its name, or the kind of a layer; ends: see `model.weights.Unit`.

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

    def padded(self, pieces: int) -> int:
        """Elements of the buffer of trained parameters if `pieces` ranks shard it."""
        return _padded(self.slots, pieces)

    def padded_frozen(self, pieces: int) -> int:
        """The same for frozen parameters."""
        return _padded(self.frozen, pieces)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of all its matrices."""
        return [shape for slot in self.slots for shape in slot.matrices]

    def in_matrices(self, rank: int, pieces: int) -> int:
        """Elements of matrices, with their padding, in the shard of `rank` of `pieces`."""
        size = self.padded(pieces) // pieces
        low, high, at, elements = size * rank, size * (rank + 1), 0, 0
        for slot in self.slots:
            stop = at + aligned(slot.size)
            elements += max(0, min(high, stop) - max(low, at)) if slot.matrices else 0
            at = stop
        return elements

    @property
    def exact(self) -> int:
        """Elements without padding, including frozen ones."""
        return sum(slot.size for slot in (*self.slots, *self.frozen))

    def partial(self, axis: str, rank: int, pieces: int) -> int:
        """Elements in the shard of `rank` of `pieces` with gradients that are partial sums over an axis."""
        size = self.padded(pieces) // pieces
        low, high, at, elements = size * rank, size * (rank + 1), 0, 0
        for slot in self.slots:
            if axis in slot.partial:
                elements += max(0, min(high, at + slot.size) - max(low, at))
            at += aligned(slot.size)
        return elements


class Units(tuple):
    """The units of a rank, in order, with cached totals."""

    @cached_property
    def others(self) -> "Units":
        """The units that are not layers."""
        return Units(unit for unit in self if not unit.layer)

    @cached_property
    def layers(self) -> "Units":
        """The layers."""
        return Units(unit for unit in self if unit.layer)

    def largest_layer(self, pieces: int, frozen: bool = False) -> int:
        """Elements of the largest layer's buffer. frozen: including its frozen parameters."""
        return max(
            (unit.padded(pieces) + (unit.padded_frozen(pieces) if frozen else 0) for unit in set(self.layers)),
            default=0,
        )

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(slot.size for unit in self.counts for slot in (*unit.slots, *unit.frozen))

    @cached_property
    def counts(self) -> Counter:
        """Unit -> number of equal ones."""
        return Counter(self)

    @cached_property
    def _sizes(self) -> dict[int, int]:
        return {}

    def padded(self, pieces: int) -> int:
        """Elements of all buffers of trained parameters if `pieces` ranks shard them."""
        if pieces not in self._sizes:
            self._sizes[pieces] = sum(count * unit.padded(pieces) for unit, count in self.counts.items())
        return self._sizes[pieces]

    def padded_frozen(self, pieces: int) -> int:
        """Elements of all buffers of frozen parameters."""
        return sum(count * unit.padded_frozen(pieces) for unit, count in self.counts.items() if unit.frozen)

    @cached_property
    def buffers(self) -> int:
        """Bytes of buffers that training changes."""
        return sum(count * unit.buffers for unit, count in self.counts.items())


LayerOf = tuple[LayerDesign, frozenset[str]]  # the design of a layer, and the names of its frozen weights


def rank_units(job: Job, layout: Layout, rank: int) -> Units:
    """The units of a pipeline rank's chunks, on one tp rank."""
    pipeline = layout.pipeline(job.facts.num_layers)
    last = len(pipeline.stages) - 1
    stages = tuple((pipeline.layers[stage], stage == 0, stage == last) for stage in pipeline.stages_of(rank))
    own = tuple((layers_of(job.facts, job.selection, layers), *ends) for layers, *ends in stages)
    return _units(job.facts, job.selection, layout.tp, layout.sp, own)


@lru_cache(maxsize=65536)
def layers_of(facts: Facts, selection: Selection, layers: Sequence[int]) -> tuple[LayerOf, ...]:
    """The designs and frozen weights of these layers."""
    return tuple(_layer_of(facts, selection, n) for n in layers)


@lru_cache(maxsize=65536)
def _layer_of(facts: Facts, selection: Selection, layer: int) -> LayerOf:
    design = facts.design_of(layer)
    return design, selection.frozen(facts.design_weights(design, False), f"blocks.{layer}.")


@lru_cache(maxsize=1024)
def layer_sizes(facts: Facts, layer: LayerOf, tp: int, sp: bool) -> UnitSizes:
    """The parameters of a layer on one tp rank."""
    design, frozen = layer
    return _sizes(design.kind, facts.design_weights(design, sp), frozen, tp, layer=True)


@lru_cache(maxsize=4096)
def _units(
    facts: Facts, selection: Selection, tp: int, sp: bool, stages: tuple[tuple[tuple[LayerOf, ...], bool, bool], ...]
) -> Units:
    """stages: per chunk its layers, whether it is the first, the last."""
    first, last = any(stage[1] for stage in stages), any(stage[2] for stage in stages)
    held = facts.units((), first, last, sp)
    layers = [layer_sizes(facts, layer, tp, sp) for own, _, _ in stages for layer in own]
    front, back = [], []
    for unit in held:
        shared = len(unit.ends) > 1 and not (first and last)  # the other end holds a copy
        frozen = selection.frozen(unit.weights, f"{unit.name}.")
        sizes = _sizes(unit.name, unit.weights, frozen, tp, ends=unit.ends, shared=("tied",) * shared)
        (front if "first" in unit.ends else back).append(sizes)
    return Units(front + layers + back)


def _sizes(
    name: str,
    table: Table,
    frozen: frozenset[str],
    tp: int,
    *,
    layer: bool = False,
    ends: tuple[str, ...] = (),
    shared: tuple[str, ...] = (),
) -> UnitSizes:
    """frozen: names of weights; shared: axes of other copies."""
    parameters = {key: placed for key, placed in table.items() if not placed.buffer}
    trained = {key: placed for key, placed in parameters.items() if key not in frozen}
    kept = {key: placed for key, placed in parameters.items() if key in frozen}
    buffers = (placed for placed in table.values() if placed.buffer)
    size = sum(math.prod(one.local_shape({"tp": tp})) * BUFFER_BYTES[one.buffer.dtype] for one in buffers)
    # A buffer has a copy, from before the step.
    return UnitSizes(name, _slots(trained, tp, shared), layer, ends, _slots(kept, tp), 2 * size)


def _slots(table: Table, tp: int, shared: tuple[str, ...] = ()) -> tuple[ParameterSize, ...]:
    """Decayed weights first, as in `optimizer.units.flat_units_of`."""
    slots = [
        ParameterSize(
            math.prod(placed.local_shape({"tp": tp})),
            placed.decay,
            (placed.partial if tp > 1 else ()) + shared,
            tuple(placed.matrix_shapes()),
        )
        for placed in table.values()
    ]
    return tuple(sorted(slots, key=lambda slot: not slot.decay))


@lru_cache(maxsize=65536)
def _padded(slots: tuple[ParameterSize, ...], pieces: int) -> int:
    return unit_size((slot.size for slot in slots), pieces)
