# SPDX-License-Identifier: Apache-2.0
"""How many weights a rank holds, unit by unit: the arithmetic of `optimizer/units.py` on a model's tables of weights.

Elements, not bytes. Tests hold it equal to what a run allocates.
"""

import math
from collections import Counter
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron.model.facts import Facts, LayerDesign
from megatron.model.weights import Table
from megatron.optimizer.flat import aligned, unit_size
from megatron.planner.layout import Job, Layout


class ParameterSize(NamedTuple):
    """A parameter: its elements on one tp rank, whether it is decayed, the axes over which its gradient is partial, and
    (rows, columns) of the whole matrices that it is of, if it is a linear layer's.
    """

    size: int
    decay: bool = True
    partial: tuple[str, ...] = ()
    matrices: tuple[tuple[int, int], ...] = ()


class UnitSizes(NamedTuple):
    """A unit's parameters as they lie. name: its name, or of a layer its kind; ends: see `model.weights.Unit`."""

    name: str
    slots: tuple[ParameterSize, ...]
    layer: bool = False
    ends: tuple[str, ...] = ()

    def padded(self, pieces: int) -> int:
        """Elements of the unit's buffer when `pieces` ranks shard it."""
        return _padded(self.slots, pieces)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of all its matrices."""
        return [shape for slot in self.slots for shape in slot.matrices]

    def in_matrices(self, rank: int, pieces: int) -> int:
        """Elements in the shard of `rank` of `pieces` that are of matrices, each with its padding."""
        size = self.padded(pieces) // pieces
        low, high, at, found = size * rank, size * (rank + 1), 0, 0
        for slot in self.slots:
            stop = at + aligned(slot.size)
            found += max(0, min(high, stop) - max(low, at)) if slot.matrices else 0
            at = stop
        return found

    @property
    def exact(self) -> int:
        """Elements without padding."""
        return sum(slot.size for slot in self.slots)

    def partial(self, axis: str, rank: int, pieces: int) -> int:
        """Elements in the shard of `rank` of `pieces` whose gradients are partial sums over an axis."""
        size = self.padded(pieces) // pieces
        low, high, at, found = size * rank, size * (rank + 1), 0, 0
        for slot in self.slots:
            if axis in slot.partial:
                found += max(0, min(high, at + slot.size) - max(low, at))
            at += aligned(slot.size)
        return found


class Units(tuple):
    """The units of a rank, in order; figures of the whole are computed once."""

    @cached_property
    def others(self) -> "Units":
        """Those that are no layers."""
        return Units(unit for unit in self if not unit.layer)

    @cached_property
    def layers(self) -> "Units":
        """The layers."""
        return Units(unit for unit in self if unit.layer)

    def largest_layer(self, pieces: int) -> int:
        """Elements of the largest layer's buffer."""
        return max((unit.padded(pieces) for unit in set(self.layers)), default=0)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(slot.size for unit in self.counts for slot in unit.slots)

    @cached_property
    def counts(self) -> Counter:
        """Unit -> how many there are of it."""
        return Counter(self)

    @cached_property
    def _sizes(self) -> dict[int, int]:
        return {}

    def padded(self, pieces: int) -> int:
        """Elements of the buffer that holds all of them when `pieces` ranks shard it."""
        if pieces not in self._sizes:
            self._sizes[pieces] = sum(count * unit.padded(pieces) for unit, count in self.counts.items())
        return self._sizes[pieces]


def rank_units(job: Job, layout: Layout, rank: int) -> Units:
    """The units of a pipeline rank's chunks, on one tp rank."""
    pipeline = layout.pipeline(job.facts.num_layers)
    last = len(pipeline.stages) - 1
    stages = tuple((pipeline.layers[stage], stage == 0, stage == last) for stage in pipeline.stages_of(rank))
    return _units(
        job.facts, layout.tp, layout.sp, tuple((_designs(job.facts, layers), *ends) for layers, *ends in stages)
    )


@lru_cache(maxsize=65536)
def _designs(facts: Facts, layers: range) -> tuple[LayerDesign, ...]:
    return tuple(map(facts.design_of, layers))


@lru_cache(maxsize=1024)
def layer_sizes(facts: Facts, design: LayerDesign, tp: int, sp: bool) -> UnitSizes:
    """The parameters of a layer on one tp rank."""
    return UnitSizes(design.kind, _slots(facts.design_weights(design, sp), tp), layer=True)


@lru_cache(maxsize=4096)
def _units(facts: Facts, tp: int, sp: bool, stages: tuple[tuple[tuple[LayerDesign, ...], bool, bool], ...]) -> Units:
    """stages: of each chunk the designs of its layers, whether it is the first, the last."""
    first, last = any(stage[1] for stage in stages), any(stage[2] for stage in stages)
    held = facts.units((), first, last, sp)
    layers = [layer_sizes(facts, design, tp, sp) for designs, _, _ in stages for design in designs]
    front, back = [], []
    for unit in held:
        shared = len(unit.ends) > 1 and not (first and last)  # the other end holds a copy
        sizes = UnitSizes(unit.name, _slots(unit.weights, tp, ("tied",) * shared), False, unit.ends)
        (front if "first" in unit.ends else back).append(sizes)
    return Units(front + layers + back)


def _slots(table: Table, tp: int, shared: tuple[str, ...] = ()) -> tuple[ParameterSize, ...]:
    """Decayed weights first, as `optimizer.units.flat_units_of` has them."""
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
