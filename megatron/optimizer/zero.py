# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer: flat fp32 main weights and gradients, sharded or not by one mechanism (arXiv:1910.02054).

| stage | parameters                       | gradients                                | main weights and moments |
|-------|----------------------------------|------------------------------------------|--------------------------|
| 0     | full                             | full, all-reduced once a step            | full                     |
| 1     | full, gathered once a step       | full, reduce-scattered once a step       | shard                    |
| 2     | full, gathered once a step       | shard, reduce-scattered each micro-batch | shard                    |
| 3     | shard, gathered around each use  | shard, reduce-scattered each micro-batch | shard                    |

Stage 0 is the stage whose shard axis has size 1: its shard is the whole unit. The others differ in when `weights.py`
gathers and `gradients.py` reduces. A step is

    set_num_microbatches -> passes, whose hooks gather parameters and collect gradients -> `reduce_grads` -> `step`

Gradients are *sums* of token losses over the global batch times the scale that the caller put on the loss; the caller
says in `step` what to multiply them by, so that averaging, un-scaling and clipping are one pass over the buffer.

Frozen parameters (`Placement.frozen`) are weights alone: kept or gathered as others are, with nothing in the last two
columns. Buffers with a placement are `buffers.py`'s.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import NamedTuple, Optional

import torch

from megatron.checkpoint.store import Piece, StablePiece, share
from megatron.mpu import collectives
from megatron.mpu.layers import attach_wgrad_accumulator, linear_products, place_buffers
from megatron.mpu.mesh import Mesh
from megatron.optimizer.buffers import BufferStore
from megatron.optimizer.gradients import GradientBuffers
from megatron.optimizer.state import FrozenState, OwnedState, Targets
from megatron.optimizer.storage import store
from megatron.optimizer.units import (
    Chunks,
    FlatUnit,
    OwnedRange,
    Slot,
    as_chunks,
    flat_units_of,
    initialise,
    owned_ranges,
    pieces_of,
)
from megatron.optimizer.update import Gate, Rates, rule_of
from megatron.optimizer.weights import ParameterBuffers
from megatron.settings import schema
from megatron.telemetry.phases import phase


class ZeroStage(NamedTuple):
    """What a rank has all the time of parameters and gradients: everything, or its shard."""

    parameters: bool
    gradients: bool


STAGES = {0: ZeroStage(True, True), 1: ZeroStage(True, True), 2: ZeroStage(True, False), 3: ZeroStage(False, False)}
PARTIAL = ("tp", "ep", "tied")  # axes of `Placement.partial`


class DistributedOptimizer:
    """Owns the memory of a rank's weights, gradients and optimizer state.

    model:    the rank's model chunks, whose parameters may be on the meta device: they become views of flat memory
    mesh:     `shard` is the axis that divides optimizer state, `replicate` the one that copies it
    parallel: the stage, and what is to be overlapped with computation
    stable:  pieces may be asked for that outlast steps (`pieces`): state in files then takes twice its size of disk
    Buffers of the model go to the device; those with a placement are in `buffers`.
    Raises StorageError when there is no place for state that is to be in files.
    """

    def __init__(
        self,
        model: Chunks,
        mesh: Mesh,
        settings: schema.Optimizer,
        parallel: schema.Parallel | None = None,
        *,
        dtype,
        device,
        seed: int,
        stable: bool = False,
    ):
        parallel = parallel or schema.Parallel()
        keep = STAGES[parallel.sharding_stage]
        self.mesh, self.dtype, self.device = mesh, dtype, torch.device(device)
        self.settings, self.rule, self.step_count = settings, rule_of(settings), 0
        self.buffers = BufferStore(as_chunks(model), mesh, self.device)
        for chunk in as_chunks(model):
            place_buffers(chunk, self.device)
        axis_of = partial(getattr, mesh)
        self.units = flat_units_of(model, axis_of)
        self.owned = owned_ranges([unit for unit in self.units if not unit.frozen], axis_of)
        self.weights = ParameterBuffers(
            self.units,
            axis_of,
            self._piece,
            dtype=dtype,
            device=device,
            keep=keep.parameters,
            overlap=parallel.overlap_param_gather,
        )
        self.gradients = GradientBuffers(
            self.owned,
            mesh,
            device=device,
            keep=keep.gradients,
            overlap=parallel.overlap_grad_reduce,
            arrived=self.weights.arrived,
        )
        if settings.gradient_accumulation_fusion:
            attach_wgrad_accumulator(as_chunks(model), self.gradients.accumulator)
        self.states = store(
            self.owned,
            self.rule,
            self.reduced,
            settings,
            self._parameters_of,
            whole=self.weights.keep,
            copies=1 + stable,
        )
        self.frozen = self._frozen_states(owned_ranges([unit for unit in self.units if unit.frozen], axis_of))
        self.everything: list[OwnedState] = [*self.states, *self.frozen]  # the weights of all units
        self.shards = self._parameter_shards()
        self.sources = {own.unit.name: (own, state) for state in self.everything for own in state.owned}
        self._draw(seed)
        self.buffers.settle()
        self.weights.register_hooks(as_chunks(model))
        self.products = linear_products(as_chunks(model))

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _parameters_of(self, owned: list[OwnedRange], keep: bool) -> Optional[torch.Tensor]:
        """Memory of fp32 parameters that are main weights too, end to end; None where these are others."""
        span = slice(owned[0].shard_slice.start, owned[-1].shard_slice.stop)
        if self.dtype != torch.float32 or keep and not all(own.whole for own in self.owned):
            return None
        if keep:
            return self.weights.whole[span]
        return torch.zeros(span.stop - span.start, dtype=torch.float32, device=self._home)

    @property
    def _home(self) -> torch.device:
        """Where the shards of stage 3's parameters are."""
        return torch.device("cpu") if self.settings.param_cpu_offload else self.device

    def _frozen_states(self, owned: list[OwnedRange]) -> list[FrozenState]:
        """Of frozen units: each rank's part of kept weights, or shards of their own."""
        states = []
        for own in owned:
            if self.weights.keep:
                memory = self.weights.memory[own.unit.name].flat[own.low : own.high]
            else:
                memory = torch.zeros(own.high - own.low, dtype=self.dtype, device=self._home)
            states.append(FrozenState(own, self.rule, memory))
        return states

    def _parameter_shards(self) -> list[torch.Tensor]:
        """What stage 3 gathers parameters from: for each state, its main weights in the format of the parameters."""
        shards = []
        for state in () if self.weights.keep else self.everything:
            main = state.main
            same = main.dtype == self.dtype and main.device == self._home and not state.offload
            shards.append(main if same else torch.empty_like(main, dtype=self.dtype, device=self._home))
        return shards

    def _draw(self, seed: int) -> None:
        """Initial weights, a unit at a time: of a model that is sharded, no rank ever has more than one unit whole."""
        for state in self.everything:
            for own in state.owned:
                whole = torch.zeros(own.unit.size, dtype=torch.float32, device=self.device)
                initialise(own.unit, whole, self.mesh.coordinates, seed)
                state.main[state.slice_of(own)] = whole[own.low : own.high].to(state.main.device)
                self.weights.fill(own.unit, whole)
        self._fill(self.everything)

    def _targets(self, state: OwnedState) -> Targets:
        """Parameters, or shards of them, that have the values of main weights: (where in the state, memory)."""
        if self.weights.keep:
            for own in state.owned if state.direct else ():
                yield state.slice_of(own), self.weights.memory[own.unit.name].flat[own.low : own.high]
        elif self.shards[self.everything.index(state)] is not state.main:
            yield slice(0, state.size), self.shards[self.everything.index(state)]

    @torch.no_grad()
    def _fill(self, states: Iterable[OwnedState]) -> None:
        for state in states:
            main = state.main
            for where, target in self._targets(state):
                target.copy_(main[where])

    def _piece(self, unit: FlatUnit) -> torch.Tensor:
        """This rank's shard of a unit's parameters, ready to be gathered."""
        own, state = self.sources[unit.name]
        if self.weights.keep and state.direct:
            piece = self.weights.memory[unit.name].flat[own.low : own.high]
            return piece if own.whole else piece.clone()  # it is gathered into its own place
        flat = state.main if self.weights.keep else self.shards[self.everything.index(state)]
        piece = flat[state.slice_of(own)]
        return piece if own.whole else piece.to(self.device, self.dtype)

    @property
    def reduced(self) -> torch.Tensor:
        """This rank's shard of the sum of gradients, fp32."""
        return self.gradients.reduced

    def memory(self) -> dict[str, int]:
        """Bytes held at this moment of parameters (whole ones and stage 3's shards), gradients, optimizer state and buffers
        that training changes.
        """
        pairs = zip(self.everything, self.shards)
        own = [shard for state, shard in pairs if shard is not state.main or isinstance(state, FrozenState)]
        return dict(
            parameters=self.weights.nbytes,
            shards=sum(shard.nbytes for shard in own),
            gradients=self.gradients.nbytes,
            state=sum(state.nbytes for state in self.states),
            buffers=self.buffers.nbytes,
        )

    def owned_slots(self) -> Iterable[tuple[Slot, slice]]:
        """The parameters of which this rank owns something, and where in its shard that lies."""
        for own in self.owned:
            yield from own.slots()

    # ---- gradients -------------------------------------------------------------------------------------------------

    def set_num_microbatches(self, num_microbatches: int) -> None:
        """Say how many micro-batches the coming step has: reductions that overlap the last one's backward need it."""
        self.gradients.num_microbatches = num_microbatches

    def zero_grad(self) -> None:
        """Drop the gradients of passes since the last step."""
        self.gradients.zero_grad()
        self.weights.end_step()

    def finalize_grads(self, sums: torch.Tensor) -> tuple[torch.Tensor, float]:
        """`reduce_grads`, and what it gives read by the host, which waits for it: (totals, norm)."""
        norm, *totals = self.reduce_grads(sums).tolist()
        return torch.tensor(totals, dtype=torch.float64), norm

    @torch.no_grad()
    def reduce_grads(self, sums: torch.Tensor) -> torch.Tensor:
        """Reduce gradients over data parallel ranks; then, in one small reduction, `sums` and the gradient norm.

        sums: fp64 vector of this rank's loss and token counts. Returns, on the device, [norm of the summed gradients,
        totals of `sums` over all ranks ...], fp64: the host waits for nothing. A value that is not finite anywhere
        makes the norm not finite everywhere.
        """
        self.gradients.finish()
        self.weights.end_step()
        for axis in PARTIAL:
            self._sum_partial(axis)
        with phase("norm"):
            square = self._square()
            vector = torch.cat([square.reshape(1), sums.to(square)])
            vector = collectives.all_reduce(vector, self.mesh.world)
            vector[0].sqrt_()
        return vector

    def _sum_partial(self, name: str) -> None:
        """Sum gradients that are partial sums over an axis, in one message: over tp those of norms that saw a part of the
        tokens, over `tied` those of the embedding that first and last stage both hold.
        """
        axis = getattr(self.mesh, name)
        views = [self.reduced[where] for slot, where in self.owned_slots() if name in slot.placement.partial]
        if axis.size == 1 or not views:
            return
        with phase("partial"):
            if len(views) == 1:
                collectives.all_reduce(views[0], axis)
                return
            packed = collectives.all_reduce(torch.cat(views), axis)
            torch._foreach_copy_(views, list(packed.split([view.numel() for view in views])))

    def _square(self) -> torch.Tensor:
        """This rank's part of the sum of squares of all gradients, each logical element counted once over all ranks."""
        total, place = torch.zeros((), dtype=torch.float64, device=self.device), self.mesh.coordinates
        for name, owned in groupby(self.owned, lambda own: own.unit.replicate):
            slots = (found for own in owned for found in own.slots())
            views = [self.reduced[where] for slot, where in slots if slot.placement.owned(place)]
            if views:
                square = torch.stack(torch._foreach_norm(views)).double().square().sum()
                total = total + square / getattr(self.mesh, name).size  # each of its ranks holds the same
        return total

    # ---- figures for the log ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def params_norm(self) -> float:
        """The norm of all parameters (main weights, fp32), each counted once over all ranks, which all call it."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for state in self.everything:
            main = state.main.float()  # of a frozen unit it may be another format's
            views = [
                main[where.start - state.span.start : where.stop - state.span.start] for *_, where in self._mine(state)
            ]
            if views:
                total += torch.stack(torch._foreach_norm(views)).double().square().sum().to(self.device)
        return collectives.all_reduce(total, self.mesh.world).sqrt().item()

    @torch.no_grad()
    def num_zeros_in_grad(self) -> int:
        """How many elements of the step's gradient are 0, padding left out, behind `finalize_grads`; all ranks together."""
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for state in self.states:
            for own, slot, where in self._mine(state):
                if own.low <= slot.start < own.high:  # where the parameter begins, the whole of it is counted
                    _, extent = slot.placement.box(slot.parameter.shape, self.mesh.coordinates)
                    total += math.prod(extent)
                total -= torch.count_nonzero(self.reduced[where])  # padding has no gradient
        return int(collectives.all_reduce(total, self.mesh.world).item())

    def _mine(self, state: OwnedState) -> Iterable[tuple[OwnedRange, Slot, slice]]:
        """What this rank counts of a state, so that of all ranks together each element is counted once."""
        place = self.mesh.coordinates
        for own in state.owned:
            if getattr(self.mesh, own.unit.replicate).rank == 0:
                for slot, where in own.slots():
                    if slot.placement.owned(place):
                        yield own, slot, where

    # ---- the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        lr: float,
        weight_decay: float,
        scale: float | torch.Tensor,
        decoupled_lr: Optional[float] = None,
        skip: Optional[torch.Tensor] = None,
    ) -> None:
        """The rule's update from gradients times `scale`; new weights go to every rank that uses them.

        scale: or an fp32 scalar on the device
        decoupled_lr: of input and output embeddings, if they have another one
        skip: a flag on the device: where it is up, nothing changes. Whoever gives one checks `skips_on_device` before,
            and says `take_back_step` once it is known to have been up.
        """
        rates, self.rule.gate = Rates(lr, weight_decay, decoupled_lr), Gate(skip)
        self.buffers.combine()
        self.buffers.settle(skip)
        with phase("scale"):
            if self.rule.scales:
                self.rule.scale = scale
            elif isinstance(scale, torch.Tensor) or scale != 1.0:
                self.reduced.mul_(scale)
        direct = self.weights.keep and any(state.direct for state in self.states)
        with (
            phase("inner"),
            self.gathered_parameters() if direct else nullcontext(),
        ):  # nothing is on its way into the parameters
            self.rule.prepare(self.states, self.reduced, self.mesh)
            for state in reversed(self.states):  # a GPU begins with its own, and the host goes on meanwhile
                state.step(self.reduced, self.step_count, rates, self._targets(state))
        self.step_count += 1
        self.copy_main_params_to_model_params(read=False)

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` takes a flag: the rule looks at it, and no state is updated by the host, which has to wait."""
        settings = self.settings
        return self.rule.gated and settings.host_share == settings.nvme_offload_fraction == 0.0

    def take_back_step(self) -> None:
        """The last step was none, for its flag was up: it does not count."""
        self.step_count -= 1

    def copy_main_params_to_model_params(self, read: bool = True) -> None:
        """Main weights -> weights of the model. `read`: all of them and buffers were filled, from a checkpoint; else those
        alone that a step has changed, and has not brought there already.
        """
        if read:
            self.buffers.settle()
        with phase("copy"):
            self._fill(state for state in self.everything if read or not state.direct)
        with phase("gather" if self.mesh.shard.size > 1 else "copy"):
            self.weights.start_param_sync(frozen=read)
        for product in self.products:
            product.weights_changed()

    def gathered_parameters(self) -> AbstractContextManager:
        """Inside, between two steps, all parameters can be read at every stage: for checks."""
        return self.weights.gathered_parameters()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def pieces(
        self, moments: bool = True, unique: bool = False, stable: bool = False, shared: bool = False
    ) -> list[Piece]:
        """What this rank holds of the logical state, as views: saving reads them, loading fills them.

        fp32 weights have the names of the parameters, moments those with `optimizer.exp_avg.` in front. `unique`:
        what several tensor parallel ranks or tied stages hold is given by one of them only, as saving needs it.
        `shared`: of what several data parallel ranks hold, each gives its part.
        State in files is mapped for as long as the pieces are kept. `stable`: these pieces are `StablePiece`, and
        keep their content until steps have gone on and pieces that last are asked for again. Frozen weights have the
        format of the model, and buffers their own.
        """
        found: dict[str, list[Piece]] = {}  # by the axis along which are copies
        for state in self.everything:
            if stable:
                state.keep()
            flats = {None: state.main} | (state.moments if moments else {})
            for name, flat in flats.items():
                is_stable, prefix = stable and state.is_stable(flat), f"optimizer.{name}." if name else ""
                for own in state.owned:
                    part_of = partial(state.part, flat, name)
                    own_pieces = pieces_of(own, part_of, self.mesh.coordinates, prefix, unique)
                    found.setdefault(own.unit.replicate, []).extend(
                        [StablePiece(*piece) for piece in own_pieces] if is_stable else own_pieces
                    )
        axes = {name: getattr(self.mesh, name) for name in found if shared}
        parts = (share(one, axes[name].rank, axes[name].size) if shared else one for name, one in found.items())
        return [piece for part in parts for piece in part] + self.buffers.pieces(unique)
