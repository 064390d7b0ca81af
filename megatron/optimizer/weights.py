# SPDX-License-Identifier: Apache-2.0
"""The parameters of a rank's model chunks, in the model's number format: kept whole, or gathered around each use.

`keep` (ZeRO 0-2): one buffer holds all of them, one the exact ones (`Placement.exact`), which are fp32, and one those that
are kept in fp8 (`cast_weights.py`). Otherwise
(ZeRO 3) a layer's parameters are gathered before its forward pass and freed after it, and again around its backward pass.
Other units (embedding, final norm, output layer) are used throughout a chunk: they stay from the start of a micro-batch's
forward pass to the end of its backward pass.

The list of ops of a step (`pipeline/data_parallel_messages.py`), which `messages.py` runs, says when that happens. NCCL
runs the operations of a group in order, so waiting for one waits for all earlier ones. Gathers therefore start in the
order of use.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from megatron.mpu import collectives
from megatron.optimizer.cast_weights import CastWeights
from megatron.optimizer.units import AxisOf, FlatUnit, flat_memory, materialise

User = tuple[int, int, bool]  # a pass: micro-batch, chunk, whether it is a backward one


@dataclass
class UnitParameters:
    """The memory of a unit's parameters."""

    unit: FlatUnit
    flat: torch.Tensor  # [unit.size]
    numbers: torch.Tensor  # `flat`; or of a cast unit memory in the model's format, which is empty in training
    ready: bool = False  # it holds the parameters
    under_way: Any = None  # (work, piece) of a running gather
    users: set[User] = field(default_factory=set)  # passes that have gathered a layer, and not freed it


class ParameterBuffers:
    """Memory of all parameters of a rank, which gathers fill.

    axis_of:  axis name -> the axis on this rank
    piece_of: unit -> this rank's shard of it, in the unit's format on `device`; of a cast unit in the model's
    casts:    of cast units
    whole:    with `keep`, the buffers by their format
    """

    def __init__(
        self,
        units: Sequence[FlatUnit],
        axis_of: AxisOf,
        piece_of: Callable[[FlatUnit], torch.Tensor],
        *,
        dtype,
        device,
        keep: bool,
        casts: Optional[CastWeights] = None,
    ):
        self.axis_of, self.piece_of, self.keep, self.casts = axis_of, piece_of, keep, casts
        sizes = [(unit, unit.size) for unit in units] if keep else []
        self.whole, flats = flat_memory(sizes, dtype=dtype, device=device)
        self.memory: dict[str, UnitParameters] = {}
        for unit in units:
            flat = flats[unit.name] if keep else torch.empty(unit.size, dtype=unit.dtype(dtype), device=device)
            numbers = torch.empty(unit.size, dtype=dtype, device=device) if unit.cast else flat
            materialise(unit, numbers)
            self.memory[unit.name] = memory = UnitParameters(unit, flat, numbers)
            if unit.cast:
                casts.hold(unit, flat)
                _resize(numbers, 0)
            self.free(memory)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        flats = self.whole.values() if self.keep else (memory.flat for memory in self.memory.values())
        held = sum(flat.untyped_storage().nbytes() for flat in flats)
        return held + (self.casts.scales.nbytes if self.casts else 0)

    # ---- filling and freeing ---------------------------------------------------------------------------------------

    def invalidate(self, frozen: bool = True) -> None:
        """Mark parameters to be gathered again, because their shards have changed. frozen: include frozen units."""
        for memory in self.memory.values():
            if frozen or not memory.unit.frozen:
                self.free(memory)

    @contextmanager
    def gathered_parameters(self):
        """Make all parameters readable inside the context: for checks between steps."""
        self.need(*self.memory.values())
        cast = [memory for memory in self.memory.values() if memory.unit.cast]
        for memory in cast:
            _resize(memory.numbers, memory.unit.size)
            piece = self.piece_of(memory.unit)
            collectives.start_all_gather(memory.numbers, piece, self.axis_of(memory.unit.sharded)).wait()
        try:
            yield
        finally:
            for memory in cast:
                _resize(memory.numbers, 0)
            self.end_step()

    def end_step(self) -> None:
        """Free gathered parameters."""
        for memory in () if self.keep else self.memory.values():
            self.free(memory)

    @torch.no_grad()
    def start(self, memory: UnitParameters) -> None:
        """Start to gather a unit's parameters, unless they are there or under way."""
        if memory.ready or memory.under_way:
            return
        piece = self.piece_of(memory.unit)
        if memory.unit.cast:
            piece = self.casts.cast(memory.unit, piece)
        if not self.keep:
            _resize(memory.flat, memory.flat.numel())
        if piece.data_ptr() == memory.flat.data_ptr():  # the shard is the parameters' own memory
            memory.ready = True
        else:
            memory.under_way = (
                collectives.start_all_gather(memory.flat, piece, self.axis_of(memory.unit.sharded)),
                piece,
            )

    def finish(self, memory: UnitParameters) -> None:
        """Wait for a unit's parameters."""
        if memory.under_way:
            work, _ = memory.under_way
            work.wait()
            memory.under_way, memory.ready = None, True

    def need(self, *needed: UnitParameters) -> None:
        """Gather the parameters of units, and wait for them."""
        for memory in needed:
            self.start(memory)
        for memory in needed:
            self.finish(memory)

    def free(self, memory: UnitParameters) -> None:
        """Free a unit's parameters, or mark them to be gathered again if they are kept."""
        self.finish(memory)
        memory.ready = False
        memory.users.clear()
        if not self.keep:
            _resize(memory.flat, 0)


def _resize(flat: torch.Tensor, elements: int) -> None:
    """Allocate or free the memory of a tensor, which keeps its shape."""
    flat.untyped_storage().resize_(elements * flat.element_size())
