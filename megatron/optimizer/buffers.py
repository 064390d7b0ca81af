# SPDX-License-Identifier: Apache-2.0
"""Buffers that training changes: a router's bias, scales of observers, masks, running statistics, counters.

Passes change a buffer on each rank by that rank's tokens. Once a step, before the optimizer's update, ranks that hold the
same buffer combine their values by its rule (`mpu.placement.Buffer`), in one or two messages for all buffers. Then the
method `update_buffers` of each module that has one is called, which turns sums into the values that passes read:

    passes -> `combine`: max, min, sum, mean over ranks; `update_buffers()` -> `commit`: keep the step's values

Skipped steps and evaluations change nothing: `rollback`. Every rank has whole buffers; ZeRO does not shard them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.store import Piece
from megatron.mpu import collectives
from megatron.mpu.layers import place_persistent_buffers
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import DATA_PARALLEL, Own, PlacedBuffer, Placement, placed_buffers
from megatron.mpu.random import init_parameter

OPS = dict(max="max", min="min", sum="sum", mean="sum")


class Held(NamedTuple):
    """A buffer of this rank, and the mesh axes over which its values are combined."""

    name: str
    place: PlacedBuffer
    copies: tuple[str, ...]  # axes along which ranks hold the same buffer and have other tokens
    axes: tuple[str, ...]  # `copies`, and the axes over which its value is partial

    @property
    def placement(self) -> Placement:
        return self.place.placement

    @property
    def rule(self) -> str:
        """The rule for combining values, one of `placement.COMBINE`."""
        return self.placement.buffer.combine

    @property
    def tensor(self) -> torch.Tensor:
        """The present values."""
        return self.place.tensor


class BufferStore:
    """The buffers of a rank's model chunks that have a placement.

    Buffers on the meta device get memory on `device` and the initial values of their placement.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], mesh: Mesh, device: torch.device):
        self.mesh, self.device = mesh, device
        fill_buffers(chunks, mesh.coordinates)
        self.held = [_held(name, place) for name, place in placed_buffers(list(chunks)).items()]
        modules = dict.fromkeys(module for chunk in chunks for module in chunk.modules())
        self.updating = [one for one in modules if hasattr(one, "update_buffers") and placed_buffers(one)]
        self.before: dict[str, torch.Tensor] = {}  # values at the end of the last step
        self.combined = False

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, and of their values at the end of the last step."""
        return sum(held.tensor.nbytes + self.before[held.name].nbytes for held in self.held)

    def named(self) -> dict[str, torch.Tensor]:
        """Name -> present values of this rank's piece."""
        return {held.name: held.tensor for held in self.held}

    # ---- once a step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def combine(self) -> None:
        """Combine the values of ranks, then let modules update their buffers. All ranks call it, once a step."""
        if self.combined or not self.held:
            return
        for axes in dict.fromkeys(held.axes for held in self.held):
            self._combine(axes, [held for held in self.held if held.axes == axes])
        for module in self.updating:
            module.update_buffers()
        self.combined = True

    def _combine(self, names: tuple[str, ...], those: list[Held]) -> None:
        axes = [axis for axis in (getattr(self.mesh, name) for name in names) if axis.size > 1]
        for op in ("max", "min", "sum") if axes else ():
            for whole in (True, False):  # integers are summed as integers
                chosen = [held for held in those if OPS.get(held.rule) == op and _is_whole(held.tensor) == whole]
                if chosen:
                    self._reduce(op, chosen, axes, torch.int64 if whole else torch.float64)

    def _reduce(self, op: str, those: list[Held], axes: Sequence, dtype: torch.dtype) -> None:
        """Reduce several buffers in one message, axis by axis. For sums, each rank sends only the part that it added."""
        values = [held.tensor.to(dtype).flatten() for held in those]
        bases = [self.before[held.name].to(dtype).flatten() if held.rule == "sum" else None for held in those]
        packed = torch.cat([value if base is None else value - base for value, base in zip(values, bases)])
        ranks = 1
        for axis in axes:
            collectives.all_reduce(packed, axis, op)
            ranks *= axis.size
        for held, base, total in zip(those, bases, packed.split([value.numel() for value in values])):
            if held.rule == "mean":
                total = total / ranks if total.is_floating_point() else total // ranks
            held.tensor.copy_((total if base is None else base + total).view(held.tensor.shape))

    @torch.no_grad()
    def commit(self, skip: Optional[torch.Tensor] = None) -> None:
        """Keep the present values. skip: a flag on the device; if it is set, restore those of the last step."""
        self.combined = False
        for held in self.held:
            before = self.before.setdefault(held.name, torch.empty_like(held.tensor))
            if skip is not None:
                held.tensor.copy_(torch.where(skip, before, held.tensor))
            before.copy_(held.tensor)

    @torch.no_grad()
    def rollback(self) -> None:
        """Restore the values at the end of the last step."""
        self.combined = False
        for held in self.held:
            held.tensor.copy_(self.before[held.name])

    # ---- checkpoints and checks ------------------------------------------------------------------------------------

    def pieces(self, unique: bool = False) -> list[Piece]:
        """Buffers as pieces of their logical tensors. unique: only one of the ranks with the same buffer returns it."""
        place = self.mesh.coordinates
        return [
            piece
            for held in self.held
            if held.placement.buffer.saved
            if not unique or held.placement.is_primary(place) and all(place[axis] == 0 for axis in held.copies)
            for piece in buffer_pieces(held.name, held.place, place)
        ]

    def shared(self) -> Iterable[tuple[Held, tuple[str, ...]]]:
        """Each buffer, and the axes along which ranks hold the same values between two steps."""
        for held in self.held:
            copies = {*held.placement.model_axes, *held.axes} - set(held.placement.cut)
            yield held, tuple(copies)


def _held(name: str, place: PlacedBuffer) -> Held:
    copies = ("dp_cp",) if place.placement.data_axes == DATA_PARALLEL else ("expert_dp",)
    partial = tuple(axis for axis in place.placement.partial if axis not in copies)
    return Held(name, place, copies, (*copies, *partial))


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point()


@torch.no_grad()
def fill_buffers(chunks: Sequence[torch.nn.Module], place: dict[str, int]) -> None:
    """Initialize placed buffers on the meta device in CPU memory. Persistent buffers without a placement get one."""
    place_persistent_buffers(chunks)
    for name, (module, attribute, placement) in placed_buffers(list(chunks)).items():
        tensor: Any = module._buffers[attribute]
        if tensor.is_meta and not isinstance(placement.init, Own):
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            init_parameter(name, tensor, placement, place, 0)
            module._buffers[attribute] = tensor


def buffer_pieces(name: str, held: PlacedBuffer, place: dict[str, int]) -> list[Piece]:
    """A rank's piece of a buffer's logical tensor, without its padding."""
    tensor, placement = held.tensor, held.placement
    box = Box(*placement.box(tuple(tensor.shape), place))
    return [Piece(name, tuple(placement.shape), box, tensor[tuple(slice(n) for n in box.extent)])]
