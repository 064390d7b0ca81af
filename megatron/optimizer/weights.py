# SPDX-License-Identifier: Apache-2.0
"""The parameters of a rank's model chunks, in the model's number format: kept whole, or gathered around each use.

`keep` (ZeRO 0-2): one buffer holds all of them. Otherwise (ZeRO 3) a layer's parameters are gathered before its forward
pass and freed after it, and again around its backward pass. Other units (embedding, final norm, output layer) are used
throughout a chunk: they stay from the start of a micro-batch's forward pass to the end of its backward pass.

          forward            backward
    block | need x -> y free | gradient of y: need ... gradient of x: free |
    other | need ................................ all its gradients: free |

A layer that is recomputed inside the backward pass runs with its hooks: its memory is filled already, and stays.
With `overlap`, gathering starts early: of all units directly after an update (`keep`), or of the next layer, and in the
backward pass also of the last layer, while the output layer computes. NCCL runs the operations of a group in order, so
waiting for one waits for all earlier ones. Gathers therefore start in the order of use.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from megatron.mpu import collectives
from megatron.optimizer.units import AxisOf, FlatUnit, materialise


@dataclass
class UnitParameters:
    """The memory of a unit's parameters."""

    unit: FlatUnit
    flat: torch.Tensor  # [unit.size]
    ready: bool = False  # it holds the parameters
    under_way: Any = None  # (work, piece) of a running gather
    in_backward: bool = False  # the backward pass of the layer is running
    passes: int = 0  # in this step: a layer's backward passes; otherwise forward passes with a backward pass to follow
    # For a layer whose input has no gradient: units that this one's last gradient frees.
    with_it: Sequence["UnitParameters"] = ()


class ParameterBuffers:
    """Memory of all parameters, and the hooks that fill and free it.

    axis_of:  axis name -> the axis on this rank
    piece_of: unit -> this rank's shard of it, in `dtype` on `device`
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
        overlap: bool,
    ):
        self.axis_of, self.piece_of, self.keep, self.overlap = axis_of, piece_of, keep, overlap
        self.parts = {part: number for number, part in enumerate(dict.fromkeys(unit.part for unit in units))}
        self.whole = None
        if keep:
            self.whole = torch.zeros(sum(unit.size for unit in units), dtype=dtype, device=device)
        self.memory: dict[str, UnitParameters] = {}
        for unit in units:
            flat = self.whole[unit.buffer_slice] if keep else torch.empty(unit.size, dtype=dtype, device=device)
            materialise(unit, flat)
            self.memory[unit.name] = memory = UnitParameters(unit, flat)
            self._free(memory)

    def _use(self, memory: UnitParameters) -> tuple[int, bool, int]:
        """Sort key: the order in which a step first uses units, chunk by chunk, and within a chunk layers last; a layer's
        units follow each other.
        """
        return min(memory.unit.chunks), memory.unit.layer, self.parts[memory.unit.part]

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        flats = (memory.flat.untyped_storage() for memory in self.memory.values())
        return self.whole.nbytes if self.keep else sum(storage.nbytes() for storage in flats)

    # ---- filling and freeing ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, unit: FlatUnit, values: torch.Tensor) -> None:
        """Fill a unit's parameters from `values`, all of them, if they are kept whole."""
        if self.keep:
            self.memory[unit.name].flat.copy_(values)
            self.memory[unit.name].ready = True

    def start_param_sync(self, frozen: bool = True) -> None:
        """Gather parameters after their shards changed, or free the old ones. frozen: frozen units changed too."""
        changed = [memory for memory in self.memory.values() if frozen or not memory.unit.frozen]
        for memory in changed:
            self._free(memory)
        kept = sorted(changed, key=self._use) if self.keep else ()
        for memory in kept:
            self._start(memory)
        for memory in () if self.overlap else kept:
            self._finish(memory)

    @contextmanager
    def gathered_parameters(self):
        """Make all parameters readable inside the context: for checks between steps."""
        self._need(*self.memory.values())
        try:
            yield
        finally:
            self.end_step()

    def end_step(self) -> None:
        """Reset the passes of a step, and free gathered parameters."""
        for memory in self.memory.values():
            memory.in_backward, memory.passes, memory.with_it = False, 0, ()
            if not self.keep:
                self._free(memory)

    @torch.no_grad()
    def _start(self, memory: UnitParameters) -> None:
        if memory.ready or memory.under_way:
            return
        piece = self.piece_of(memory.unit)
        if not self.keep:
            storage = memory.flat.untyped_storage()
            storage.resize_(memory.flat.numel() * memory.flat.element_size())
        if piece.data_ptr() == memory.flat.data_ptr():  # the shard is the parameters' own memory
            memory.ready = True
        else:
            memory.under_way = (
                collectives.start_all_gather(memory.flat, piece, self.axis_of(memory.unit.sharded)),
                piece,
            )

    def _finish(self, memory: UnitParameters) -> None:
        if memory.under_way:
            work, _ = memory.under_way
            work.wait()
            memory.under_way, memory.ready = None, True

    def _need(self, *needed: UnitParameters) -> None:
        for memory in needed:
            self._start(memory)
        for memory in needed:
            self._finish(memory)

    def _free(self, memory: UnitParameters) -> None:
        self._finish(memory)
        memory.ready = False
        if not self.keep:
            memory.flat.untyped_storage().resize_(0)

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def register_hooks(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Register the hooks that gather and free parameters, if any are needed."""
        if self.keep and not self.overlap:
            return
        for number, chunk in enumerate(chunks):
            held = [memory for memory in self.memory.values() if number in memory.unit.chunks]
            places = {name: place for place, (name, _) in enumerate(chunk.named_modules())}
            layers = sorted((memory for memory in held if memory.unit.layer), key=lambda m: places[m.unit.part])
            blocks = [list(parts) for _, parts in groupby(layers, key=lambda memory: memory.unit.part)]
            self._attach_chunk(chunk, [memory for memory in held if not memory.unit.layer], blocks)
            for at, block in enumerate(blocks):
                before, after = blocks[at - 1] if at else [], blocks[at + 1] if at + 1 < len(blocks) else []
                self._attach_block(chunk.get_submodule(block[0].unit.part), block, before, after)

    def _ahead(self, neighbours: Sequence[UnitParameters]) -> None:
        """Start to gather the units that are used next."""
        for memory in neighbours if self.overlap and not self.keep else ():
            self._start(memory)

    def _attach_chunk(
        self, chunk: torch.nn.Module, roots: Sequence[UnitParameters], blocks: Sequence[Sequence[UnitParameters]]
    ) -> None:
        def pre_forward(module, args):
            for memory in roots:
                self._start(memory)
                memory.passes += torch.is_grad_enabled()
            self._ahead(blocks[0] if blocks else ())
            self._need(*roots)

        def post_forward(module, args, output):
            for memory in roots:
                if not memory.passes:
                    self._free(memory)
            for tensor in _backward_roots(output):
                tensor.register_hook(begin_backward)

        def begin_backward(gradient):
            self._ahead(blocks[-1] if blocks else ())

        chunk.register_forward_pre_hook(pre_forward)
        if not self.keep:
            chunk.register_forward_hook(post_forward)

    def arrived(self, unit: FlatUnit, count: int) -> None:
        """Free a unit after its last gradient: `count` is the least number of gradients that its parameters have got.

        A layer's backward pass normally ends with the gradient of its input; this ends that of a layer without one.
        """
        memory = self.memory[unit.name]
        if self.keep or unit.layer and count <= memory.passes or not unit.layer and count != memory.passes:
            return
        memory.passes = count
        self._leave(memory.with_it if unit.layer else (memory,))

    def _leave(self, block: Sequence[UnitParameters]) -> None:
        """End the backward pass of a layer."""
        for memory in block:
            memory.in_backward = False
            self._free(memory)

    def _enter(self, block: Sequence[UnitParameters], before: Sequence[UnitParameters]) -> None:
        """Begin the backward pass of a layer."""
        for memory in block:
            memory.in_backward = True
        self._need(*block)
        if not block[0].with_it:  # otherwise no layer follows
            self._ahead(before)

    def _attach_block(
        self,
        module: torch.nn.Module,
        block: Sequence[UnitParameters],
        before: Sequence[UnitParameters],
        after: Sequence[UnitParameters],
    ):
        """Register the hooks of a layer. `block`: its units, more than one if it has experts or is frozen in part, frozen
        ones last.
        """
        first = block[0]
        alone = [memory for memory in block[1:] if not memory.unit.frozen]  # experts

        def pre_forward(module, args):
            self._need(*block)
            if not first.in_backward:
                self._ahead(after)
            if self.keep or not torch.is_grad_enabled():
                return
            if args[0].requires_grad:
                args[0].register_hook(lambda gradient: self._leave(block))
            else:
                first.with_it = [memory for memory in block if memory not in alone]
                for memory in alone:
                    memory.with_it = (memory,)

        def post_forward(module, args, output):
            if not first.in_backward:
                self._leave(block)
            for tensor in _backward_roots(output):
                tensor.register_hook(lambda gradient: self._enter(block, before))

        module.register_forward_pre_hook(pre_forward)
        if not self.keep:
            module.register_forward_hook(post_forward)


def _backward_roots(output) -> list[torch.Tensor]:
    """The tensors of a module's output where its backward pass begins."""
    x, sums = output if isinstance(output, tuple) else (output, {})
    return [tensor for tensor in (x, *sums.values()) if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
