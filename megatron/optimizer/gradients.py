# SPDX-License-Identifier: Apache-2.0
"""Gradients of a rank: hooks collect them in flat buffers, unit by unit, and data parallel ranks sum them.

There are two modes, by ZeRO stage. `keep` (0, 1): one buffer of all units accumulates the micro-batches of a step, and
each unit is reduced once a step. Otherwise a unit has a buffer from the first gradient of a pass to the last. Then the
buffer is reduce-scattered and freed, and the rank keeps only its shard of the sum.

The list of ops of a step (`pipeline/data_parallel_messages.py`), which `messages.py` runs, says when a unit is reduced:
after the last gradient of a micro-batch, or of the step. With overlap the reduction starts inside the backward pass, and
the rank waits for it later.

Buffers are fp32, or bf16 with `--grad-reduce-in-bf16`: then micro-batches and ranks are added in bf16, as in Megatron-LM.
With `keep`, the shard is the result of the reduction and has the same format. Otherwise the shard adds up the micro-batches
in the format of `--main-grads-dtype`. Updates read bf16 gradients in fp32, so a copy of the shard in fp32 would change
nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Optional

import torch

from megatron.mpu import collectives
from megatron.mpu.collectives import COMPUTED, Traffic
from megatron.mpu.mesh import Axis, Mesh
from megatron.optimizer.units import OwnedRange, Slot


@dataclass(eq=False)
class UnitGradients:
    """The gradients of a unit in this step: their buffer, and how many have arrived."""

    own: OwnedRange
    arrived: dict[str, int]  # parameter -> number of gradients
    buffer: Optional[torch.Tensor] = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)  # parameter -> its view into the buffer
    written: set[str] = field(default_factory=set)  # parameters whose view holds a gradient
    reductions: int = 0  # started in this step
    summed: bool = False  # the shard holds a sum of this step

    def take(self, buffer: torch.Tensor) -> None:
        """Collect gradients in `buffer` from now on."""
        self.buffer = buffer
        self.views = {
            slot.name: buffer[slot.start : slot.stop].view(slot.parameter.shape) for slot in self.own.unit.slots
        }

    def zero_rest(self) -> None:
        """Zero the views of parameters that got no gradient; the next gradients overwrite."""
        for name in self.views.keys() - self.written:
            self.views[name].zero_()
        self.written.clear()

    def start_step(self) -> None:
        """Reset the counts for a new step."""
        self.arrived = dict.fromkeys(self.arrived, 0)
        self.written.clear()
        self.reductions, self.summed = 0, False


class PassKey(NamedTuple):
    """A pass: the numbers of its micro-batch and of the rank's model chunk."""

    micro: int = 0
    chunk: int = 0


class Reduction(NamedTuple):
    """A running reduction of a unit. `buffer` is read, and `piece`, if any, is filled until `work` is done."""

    tally: UnitGradients
    work: Any
    buffer: Optional[torch.Tensor]  # None: `work` has its own
    piece: Optional[torch.Tensor]


class GradientBuffers:
    """The gradient buffers of a rank. `reduced` is its shard of the sum over a step and all data parallel ranks.

    owned:      this rank's range of each unit
    dtype:      number format of the buffers, and so of reductions
    main_dtype: number format of the shard, unless `keep`
    arrived:    called with a unit when one of its parameters has got a gradient
    passing:    returns which pass it is that runs
    """

    def __init__(
        self,
        owned: Sequence[OwnedRange],
        mesh: Mesh,
        *,
        device,
        keep: bool,
        overlap: bool,
        dtype=torch.float32,
        main_dtype=torch.float32,
    ):
        self.mesh, self.device, self.keep, self.dtype = mesh, device, keep, dtype
        self.arrived: Callable[[UnitGradients], None] = lambda tally: None
        self.passing: Callable[[], PassKey] = PassKey
        self.tallies = {
            own.unit.name: UnitGradients(own, dict.fromkeys((slot.name for slot in own.unit.slots), 0)) for own in owned
        }
        self.whole = None
        if keep:
            self.whole = self._zeros(sum(own.unit.size for own in owned))
            for tally in self.tallies.values():
                tally.take(self.whole[tally.own.unit.buffer_slice])
        self.in_place = keep and all(own.whole for own in owned)
        self.together = self.in_place and not overlap  # all units are one reduction
        self.reduced = self.whole
        if not self.in_place:
            self.reduced = self._zeros(sum(own.high - own.low for own in owned), dtype if keep else main_dtype)
        self.num_microbatches = 0  # of this step
        self.under_way: list[Reduction] = []
        self.slots = {slot.parameter: (tally, slot) for tally in self.tallies.values() for slot in tally.own.unit.slots}
        for tally in self.tallies.values():
            for slot in tally.own.unit.slots:
                slot.parameter.register_post_accumulate_grad_hook(self._collect(tally, slot))

    def axis(self, name: str) -> Axis:
        """The mesh axis of this name."""
        return getattr(self.mesh, name)

    def _spans(self) -> Iterator[tuple[str, slice]]:
        """(replicating axis, range of the rank's shard) for each run of neighbouring units with the same axis."""
        for name, tallies in groupby(self.tallies.values(), lambda tally: tally.own.unit.replicate):
            places = [tally.own.shard_slice for tally in tallies]
            yield name, slice(places[0].start, places[-1].stop)

    def _zeros(self, size: int, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype or self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes held now: the shard, and the buffers of units."""
        tensors = [self.reduced] if self.whole is None else [self.reduced, self.whole]
        if not self.keep:
            tensors += [tally.buffer for tally in self.tallies.values() if tally.buffer is not None]
            tensors += [x for reduction in self.under_way for x in (reduction.buffer, reduction.piece) if x is not None]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    # ---- during passes ---------------------------------------------------------------------------------------------

    def _collect(self, tally: UnitGradients, slot: Slot) -> Callable:
        """A hook that writes the first gradient of a step to the buffer and adds later ones, so it needs no zeroing."""

        def collect(parameter):
            view, overwrite = self._view(tally, slot.name)
            view.copy_(parameter.grad) if overwrite else view.add_(parameter.grad)
            parameter.grad = None
            self._count(tally, slot.name)

        return collect

    def accumulator(self, weight: torch.Tensor) -> Optional[Callable]:
        """A function that adds a `WgradGemm` to a weight's gradient in place of autograd; None for an unknown weight."""
        entry = self.slots.get(weight)
        return entry and partial(self._accumulate, *entry)

    @torch.no_grad()
    def _accumulate(self, tally: UnitGradients, slot: Slot, product: Any) -> None:
        view, overwrite = self._view(tally, slot.name)
        product.add_to(view, overwrite)
        self._count(tally, slot.name)

    def _view(self, tally: UnitGradients, name: str) -> tuple[torch.Tensor, bool]:
        """A parameter's place in the buffer, and whether a gradient overwrites the values there."""
        if tally.buffer is None:
            tally.take(self._zeros(tally.own.unit.size))
        overwrite = name not in tally.written
        tally.written.add(name)
        return tally.views[name], overwrite

    def _count(self, tally: UnitGradients, name: str) -> None:
        """Count a parameter's gradient."""
        tally.arrived[name] += 1
        self.arrived(tally)

    def complete(self, tally: UnitGradients) -> bool:
        """Whether all gradients for the next reduction of a unit have arrived."""
        return min(tally.arrived.values()) >= (self.num_microbatches if self.keep else tally.reductions + 1)

    def start(self, tally: UnitGradients, passing: Optional[PassKey] = None) -> None:
        """Start a unit's reduction, after this pass or, with `keep`, all passes."""
        if tally.buffer is None:  # it got no gradient
            tally.take(self._zeros(tally.own.unit.size))
        tally.zero_rest()
        place, buffer, piece = self.reduced[tally.own.shard_slice], tally.buffer, None
        Traffic.report(COMPUTED, tally.own.unit.name, buffer, self.mesh.alone)
        if self.in_place:
            work = collectives.start_all_reduce(buffer, self.axis(tally.own.unit.replicate))
        elif self.keep:
            work = collectives.start_reduce_scatter(place, buffer, self.axis(tally.own.unit.sharded))
        else:
            piece = torch.empty_like(place, dtype=self.dtype)
            work = collectives.start_reduce_scatter(piece, buffer, self.axis(tally.own.unit.sharded))
            tally.buffer, tally.views = None, {}
        tally.reductions += 1
        self.under_way.append(Reduction(tally, work, buffer, piece))

    def wait_for(self, tallies: Sequence[UnitGradients]) -> None:
        """Wait for the oldest reduction of each of these units, and for those before it."""
        order = [reduction.tally for reduction in self.under_way]
        last = max((order.index(tally) for tally in tallies if tally in order), default=-1)
        self._wait(down_to=len(order) - last - 1)

    def _wait(self, down_to: int = 0) -> None:
        """Wait for the oldest reductions until only `down_to` are running."""
        while len(self.under_way) > down_to:
            tally, work, _, piece = self.under_way.pop(0)
            work.wait()
            if piece is not None:
                place = self.reduced[tally.own.shard_slice]
                place.add_(piece) if tally.summed else place.copy_(piece)
                tally.summed = True

    # ---- at the end of a step --------------------------------------------------------------------------------------

    def sum_all(self) -> None:
        """Sum gradients over the ranks that hold the same shards. With `together` it is the only reduction of the step."""
        self.reduce_rest()
        if self.together:
            Traffic.report(COMPUTED, "gradients", self.reduced, self.mesh.alone)
        if self.together or not self.in_place:
            for name, where in self._spans():
                collectives.all_reduce(self.reduced[where], self.axis(name))

    def reduce_rest(self) -> None:
        """Reduce the units that no list has reduced, and wait for all reductions."""
        for tally in self.tallies.values():
            if self.together:
                tally.zero_rest()
            elif self.keep and not tally.reductions or not self.keep and tally.buffer is not None:
                self.start(tally)
        self._wait()
        for tally in () if self.keep else self.tallies.values():
            if not tally.summed:
                self.reduced[tally.own.shard_slice].zero_()

    def zero_grad(self) -> None:
        """Drop the gradients since the last step."""
        self._wait()
        for tally in self.tallies.values():
            tally.start_step()
            if not self.keep:
                tally.buffer, tally.views = None, {}
