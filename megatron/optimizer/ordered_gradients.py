# SPDX-License-Identifier: Apache-2.0
"""Gradients of a rank with --batch-invariant-mode: the sum over samples has one order, in every layout.

A pass has one sample. Its gradients are reduced for themselves, in every ZeRO stage: the samples of all data parallel ranks
first, then the passes of the step, by one tree over the global batch (`mpu/ordered_sums.py`). A rank keeps the sums of its
shard that wait for a partner, at most log2(passes) + 1 of them.

A weight that is used twice in a pass (a tied embedding) has two gradients, whose sums over samples are separate: where
first and last stage are on different ranks they are, too. They are added at the end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Optional

import torch

from megatron.mpu import collectives
from megatron.mpu.collectives import COMPUTED, Traffic
from megatron.mpu.deferred_wgrad import WeightGradStore
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.ordered_sums import Tree
from megatron.optimizer.gradients import GradientBuffers, PassKey, Reduction, UnitGradients
from megatron.optimizer.units import OwnedRange, Slot

Use = tuple[int, int]  # of a weight: the model chunk, and the number of the use in a pass of it


def separate_output_gradients(chunks: Iterable[torch.nn.Module]) -> None:
    """Let the output layers of chunks add their weight's gradient by themselves: autograd would add that of a tied
    embedding's other use before it arrives.
    """
    for chunk in chunks:
        if hasattr(chunk, "weight_grad_store"):
            chunk.weight_grad_store = WeightGradStore()


class OrderedGradients(GradientBuffers):
    """As `GradientBuffers`, for passes that `passing` tells apart, in any order and also when they overlap."""

    def __init__(self, owned: Sequence[OwnedRange], mesh: Mesh, **more):
        super().__init__(owned, mesh, keep=False, **more)
        self.seen = Counter[tuple[PassKey, str]]()  # gradients of a parameter that have arrived in a pass
        self.open: dict[
            tuple[str, PassKey], list[UnitGradients]
        ] = {}  # those of a unit, by use, until they are reduced
        self.trees: dict[str, dict[Use, Tree]] = {}  # the sums of a unit

    @property
    def nbytes(self) -> int:
        held = [use.buffer for uses in self.open.values() for use in uses]
        waiting = [tree.nbytes for trees in self.trees.values() for tree in trees.values()]
        sent = [one.nbytes for reduction in self.under_way for one in reduction.work.started.values()]
        return super().nbytes + sum(buffer.nbytes for buffer in held) + sum(waiting) + sum(sent)

    def _view(
        self, tally: UnitGradients, name: str, buffer: Optional[torch.Tensor] = None
    ) -> tuple[torch.Tensor, bool]:
        """A place for one gradient of one pass: nothing is added there. buffer: flat, with the unit's whole gradient"""
        now = self.passing()
        number = self.seen[now, name]
        self.seen[now, name] += 1
        uses = self.open.setdefault((tally.own.unit.name, now), [])
        if number == len(uses):
            uses.append(self._use(tally, buffer))
        uses[number].written.add(name)
        return uses[number].views[name], True

    def _collect(self, tally: UnitGradients, slot: Slot) -> Callable:
        collect = super()._collect(tally, slot)
        if not (slot.start == 0 and slot.stop == tally.own.unit.size):
            return collect

        def take(parameter):
            """The gradient itself is the unit's buffer: large embeddings are units of their own."""
            gradient = parameter.grad
            if gradient.dtype != self.dtype or not gradient.is_contiguous():
                return collect(parameter)
            self._view(tally, slot.name, gradient.flatten())
            parameter.grad = None
            self._count(tally, slot.name)

        return take

    def _use(self, tally: UnitGradients, buffer: Optional[torch.Tensor] = None) -> UnitGradients:
        use, unit = UnitGradients(tally.own, {}), tally.own.unit
        if buffer is None:
            buffer = torch.empty(unit.size, dtype=self.dtype, device=self.device)
            for slot, following in zip(unit.slots, [*unit.slots[1:], None]):  # the rest is written, or zeroed
                buffer[slot.stop : following.start if following else unit.size].zero_()
        use.take(buffer)
        return use

    def complete(self, tally: UnitGradients) -> bool:
        """Whether each parameter has got a gradient in the present pass."""
        now = self.passing()
        return all(self.seen[now, slot.name] for slot in tally.own.unit.slots)

    def start(self, tally: UnitGradients, passing: PassKey) -> None:
        """Start the reduction of a unit's gradients of one pass."""
        unit, (micro, chunk) = tally.own.unit, passing
        uses = self.open.pop((unit.name, passing), None) or [self._use(tally)]  # without gradients: zeros
        started = {}
        for number, use in enumerate(uses):
            use.zero_rest()
            Traffic.report(COMPUTED, unit.name, use.buffer, self.mesh.alone)
            started[chunk, number] = _SumOverRanks(use.buffer, self.axis(unit.sharded), self.axis(unit.replicate))
        leaves = _Leaves(self.trees.setdefault(unit.name, {}), micro, started)
        self.under_way.append(Reduction(tally, leaves, None, None))

    def sum_all(self) -> None:
        self.reduce_rest()

    def reduce_rest(self) -> None:
        tallies = {tally.own.unit.name: tally for tally in self.tallies.values()}
        for name, passing in list(self.open):
            self.start(tallies[name], passing)
        self._wait()
        for name, tally in tallies.items():
            place, trees = self.reduced[tally.own.shard_slice], self.trees.pop(name, {})
            place.zero_()
            for use in sorted(trees):
                place.add_(trees[use].total())

    def zero_grad(self) -> None:
        super().zero_grad()
        self.seen.clear()
        self.open.clear()
        self.trees.clear()


class _SumOverRanks:
    """A running sum of flat x [n] over the ranks of two axes, `inner` the lower levels of the tree. `wait()` returns this
    rank's piece along `inner`, [n / inner.size]; x must not change before.
    """

    def __init__(self, x: torch.Tensor, inner: Axis, outer: Axis):
        self.x, self.outer, self.piece = x, None if inner.size == 1 else outer, x
        self.ranks = inner.size * outer.size
        if inner.size == 1:
            self.work = collectives.start_all_reduce(x, outer)
        else:
            self.piece = x.new_empty(len(x) // inner.size)
            self.work = collectives.start_reduce_scatter(self.piece, x, inner)

    @property
    def nbytes(self) -> int:
        """Bytes until the wait: x, and what ranks send each other, of which an all-reduce has a copy."""
        if len(self.piece) < len(self.x):
            return 2 * self.x.nbytes + self.piece.nbytes
        return (3 if self.ranks > 1 else 1) * self.x.nbytes

    def wait(self) -> torch.Tensor:
        self.work.wait()
        self.x = None
        return collectives.all_reduce(self.piece, self.outer) if self.outer else self.piece


class _Leaves(NamedTuple):
    """Running sums over ranks of a unit's gradients of one micro-batch: a leaf of the tree of each use."""

    trees: dict[Use, Tree]
    micro: int
    started: dict[Use, "_SumOverRanks"]

    def wait(self) -> None:
        for use, leaf in self.started.items():
            self.trees.setdefault(use, Tree()).add(self.micro, leaf.wait())
