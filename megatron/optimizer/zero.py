# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer: flat fp32 main weights, and gradients, sharded by ZeRO stage (arXiv:1910.02054).

| stage | parameters                       | gradients                                | main weights and moments |
|-------|----------------------------------|------------------------------------------|--------------------------|
| 0     | full                             | full, all-reduced once a step            | full                     |
| 1     | full, gathered once a step       | full, reduce-scattered once a step       | shard                    |
| 2     | full, gathered once a step       | shard, reduce-scattered each micro-batch | shard                    |
| 3     | shard, gathered around each use  | shard, reduce-scattered each micro-batch | shard                    |

In stage 0 the shard axis has size 1: its shard is the whole unit. The other stages differ in the times at which
`weights.py` gathers and `gradients.py` reduces. These follow a list of ops, which `messages.py` builds and runs. A step is

    `messages.plan` -> passes and messages, by `pipeline.execute` -> `reduce_grads` -> `step`

In a custom training loop, without `execute`, each pass has a list, and ZeRO 0 and 1 reduce after all passes.

Gradients are *sums* of token losses over the global batch, times the loss scale of the caller. `step` gets one factor for
them, so that averaging, un-scaling and clipping are one pass over the buffer.

Frozen parameters (`Placement.frozen`) have weights only: these are kept or gathered like others, and the last two columns
do not apply. `buffers.py` handles buffers with a placement.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import NamedTuple, Optional

import torch

from megatron.checkpoint.store import Piece, StablePiece, share
from megatron.model.max_logits import WatchedHeads
from megatron.mpu import collectives
from megatron.mpu.layers import attach_wgrad_accumulator, linear_products, place_buffers
from megatron.mpu.mesh import Mesh
from megatron.mpu.ordered_sums import exact_parts
from megatron.optimizer.buffers import BufferStore
from megatron.optimizer.cast_weights import CastWeights
from megatron.optimizer.gradients import GradientBuffers
from megatron.optimizer.messages import Messages
from megatron.optimizer.offload import build_states
from megatron.optimizer.ordered_gradients import OrderedGradients, separate_output_gradients
from megatron.optimizer.qk_clip import QKClip, largest_logit
from megatron.optimizer.rounding import Noise, norms
from megatron.optimizer.state import FrozenState, OwnedState, Targets
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
from megatron.optimizer.update import DTYPES, Gate, Rates, rule_of
from megatron.optimizer.weights import ParameterBuffers
from megatron.pipeline.data_parallel_messages import Sharding
from megatron.settings import schema
from megatron.telemetry.phases import phase


class ZeroStage(NamedTuple):
    """Whether a rank always holds all parameters and all gradients, or only its shard of them."""

    parameters: bool
    gradients: bool


STAGES = {0: ZeroStage(True, True), 1: ZeroStage(True, True), 2: ZeroStage(True, False), 3: ZeroStage(False, False)}
PARTIAL = ("tp", "ep", "etp", "tied")  # axes of `Placement.partial`


class DistributedOptimizer:
    """Owns the memory of a rank's weights, gradients and optimizer state.

    model:    the rank's model chunks, whose parameters may be on the meta device: they become views of flat memory
    mesh:     `shard` is the axis that divides optimizer state, `replicate` the one that copies it
    parallel: the ZeRO stage, and which communication overlaps with computation
    stable:   allow pieces that outlast steps (`pieces`); state in files then takes twice its size on disk
    heads:    for --qk-clip and the log: the heads whose largest logits the model keeps (`model.max_logits`);
              None: neither is asked for
    draws:    give the weights their initial values; otherwise they are 0 until a checkpoint fills them, or `draw`
    Buffers of the model go to the device; those with a placement are in `buffers`.
    Raises StorageError when the disk has no space for state in files.
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
        heads: Optional[Sequence[WatchedHeads]] = None,
        draws: bool = True,
    ):
        parallel = parallel or schema.Parallel()
        keep = STAGES[parallel.sharding_stage]
        self.mesh, self.dtype, self.device = mesh, dtype, torch.device(device)
        self.ordered = parallel.batch_invariant_mode
        self.settings, self.rule, self.step_count, self.seed = settings, rule_of(settings), 0, seed
        self.buffers = BufferStore(as_chunks(model), mesh, self.device)
        for chunk in as_chunks(model):
            place_buffers(chunk, self.device)
        axis_of = partial(getattr, mesh)
        self.units = flat_units_of(model, axis_of)
        self.owned = owned_ranges([unit for unit in self.units if not unit.frozen], axis_of)
        cast = [own for own in self.owned if own.unit.cast]
        self.casts = CastWeights(cast, mesh, self.device) if cast else None
        self.weights = ParameterBuffers(
            self.units, axis_of, self._piece, dtype=dtype, device=device, keep=keep.parameters, casts=self.casts
        )
        formats = dict(dtype=DTYPES[settings.reduced_format], main_dtype=DTYPES[settings.main_grads_dtype])
        build = OrderedGradients if self.ordered else partial(GradientBuffers, keep=keep.gradients)
        self.gradients = build(self.owned, mesh, device=device, overlap=parallel.overlap_grad_reduce, **formats)
        if self.ordered:
            separate_output_gradients(as_chunks(model))
            layers = [layer for chunk in as_chunks(model) for layer in chunk.modules()]
            summed = [layer for layer in layers if getattr(layer, "sums_over_ranks", False)]
            attach_wgrad_accumulator(summed, self.gradients.accumulator)
        if settings.gradient_accumulation_fusion:
            attach_wgrad_accumulator(as_chunks(model), self.gradients.accumulator)
        self.states = build_states(
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
        still = {slot.name for state in self.frozen for own in state.owned for slot, _ in own.slots()}
        self.heads, self.clip = heads, QKClip(heads, settings, still) if settings.qk_clip else None
        self.shards = self._parameter_shards()
        self.sources = {own.unit.name: (own, state) for state in self.everything for own in state.owned}
        self.drawn = False
        if draws:
            self.draw()
        self.buffers.commit()
        how = Sharding(
            max(parallel.sharding_stage, 2) if self.ordered else parallel.sharding_stage,
            not self.gradients.in_place,
            parallel.overlap_param_gather,
            parallel.overlap_grad_reduce,
        )
        self.messages = Messages(as_chunks(model), self.weights, self.gradients, how, first=mesh.pp.rank == 0)
        self.products = linear_products(as_chunks(model))

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _parameters_of(self, owned: list[OwnedRange], keep: bool) -> Optional[torch.Tensor]:
        """Memory of fp32 parameters that also serve as main weights, end to end; None if main weights are separate."""
        span = slice(owned[0].shard_slice.start, owned[-1].shard_slice.stop)
        if self.dtype != torch.float32 or keep and not all(own.whole for own in self.owned):
            return None
        if keep:
            return self.weights.whole[torch.float32][span]
        return torch.zeros(span.stop - span.start, dtype=torch.float32, device=self._shard_device)

    @property
    def _shard_device(self) -> torch.device:
        """The device of stage 3's parameter shards."""
        return torch.device("cpu") if self.settings.param_cpu_offload else self.device

    def _frozen_states(self, owned: list[OwnedRange]) -> list[FrozenState]:
        """The state of frozen units: a part of the kept weights, or separate shards."""
        states = []
        for own in owned:
            if self.weights.keep:
                memory = self.weights.memory[own.unit.name].flat[own.low : own.high]
            else:
                dtype = own.unit.dtype(self.dtype)
                memory = torch.zeros(own.high - own.low, dtype=dtype, device=self._shard_device)
            states.append(FrozenState(own, self.rule, memory))
        return states

    def _parameter_shards(self) -> list[torch.Tensor]:
        """The shards from which stage 3 gathers parameters: each state's main weights in the parameters' format.

        Exact units are gathered from the main weights.
        """
        shards = []
        for state in () if self.weights.keep else self.everything:
            main, dtype = state.main, self._format_of(state)
            same = main.dtype == dtype and main.device == self._shard_device and not state.offload
            shards.append(main if same else torch.empty_like(main, dtype=dtype, device=self._shard_device))
        return shards

    def _format_of(self, state: OwnedState) -> torch.dtype:
        """The format of the model's weights for a state: fp32 for a frozen exact unit."""
        return state.main.dtype if isinstance(state, FrozenState) else self.dtype

    def draw(self) -> None:
        """Give the weights their initial values. Ranks that own the same draw a part of it each, and gather the others;
        parameters are gathered from what ranks own."""
        for state in self.everything:
            for own in state.owned:
                state.main[state.slice_of(own)] = self._drawn(own).to(state.main.device)
        self._fill(self.everything)
        if self.weights.keep:
            self.weights.need(*self.weights.memory.values())
        self.drawn = True

    def _drawn(self, own: OwnedRange) -> torch.Tensor:
        """The initial values of what this rank owns, fp32 on the device."""
        axis = getattr(self.mesh, own.unit.replicate)
        each = -(-(own.high - own.low) // axis.size)
        low = min(own.low + axis.rank * each, own.high)
        part = own._replace(low=low, high=min(low + each, own.high))
        values = torch.zeros(each, dtype=torch.float32, device=self.device)
        axis_of = partial(getattr, self.mesh)
        initialise(part, values[: part.high - part.low], self.mesh.coordinates, self.seed, axis_of)
        return collectives.all_gather(values, axis)[: own.high - own.low]

    def _targets(self, state: OwnedState) -> Targets:
        """Parameters or their shards that copy main weights: (range of the state, memory)."""
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
        if self.casts:
            self.casts.update(self._piece)

    def _piece(self, unit: FlatUnit) -> torch.Tensor:
        """This rank's shard of a unit's parameters, for gathering."""
        own, state = self.sources[unit.name]
        if unit.cast:
            flat = state.main if self.weights.keep else self.shards[self.everything.index(state)]
            return flat[state.slice_of(own)].to(self.device, self.dtype)
        if self.weights.keep and state.direct:
            piece = self.weights.memory[unit.name].flat[own.low : own.high]
            return piece if own.whole else piece.clone()  # the gather writes to its memory
        kept = self.weights.keep or unit.exact and not unit.frozen
        flat = state.main if kept else self.shards[self.everything.index(state)]
        piece = flat[state.slice_of(own)]
        return piece if own.whole else piece.to(self.device, unit.dtype(self.dtype))

    @property
    def reduced(self) -> torch.Tensor:
        """This rank's shard of the summed gradients: fp32, or bf16 if they are reduced in bf16."""
        return self.gradients.reduced

    def memory(self) -> dict[str, int]:
        """Bytes held now by parameters (whole, and stage 3's shards), gradients, optimizer state and buffers."""
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
        """The parameters that this rank owns at least in part, each with its range in the shard."""
        for own in self.owned:
            yield from own.slots()

    # ---- gradients -------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop the gradients since the last step."""
        self.gradients.zero_grad()
        self.weights.end_step()

    def finalize_grads(self, sums: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Call `reduce_grads` and wait for its result: (totals, norm) on the host."""
        norm, *totals = self.reduce_grads(sums).tolist()
        return torch.tensor(totals, dtype=torch.float64), norm

    @torch.no_grad()
    def reduce_grads(self, sums: torch.Tensor) -> torch.Tensor:
        """Reduce gradients over data parallel ranks; then `sums` and the gradient norm, in one small reduction.

        sums: fp64 vector of this rank's loss and token counts. Returns [norm of the summed gradients, totals of `sums` over
        all ranks ...], fp64 on the device, without waiting. A non-finite value on one rank makes the norm
        non-finite on all.
        """
        self.messages.finish()
        self.zero_grad()
        for axis in PARTIAL:
            self._sum_partial(axis)
        with phase("norm"):
            squares = self._exact_squares() if self.ordered else self._squared_norm().reshape(1)
            vector = torch.cat([squares, sums.to(squares)])
            vector = collectives.all_reduce(vector, self.mesh.world)
            squares, totals = vector.split([len(squares), len(sums)])
        return torch.cat([squares.sum(0, keepdim=True).sqrt_(), totals])

    def _sum_partial(self, name: str) -> None:
        """Sum gradients that are partial sums over an axis, in one message.

        Over tp: norms, because each rank has a part of the tokens. Over etp: biases of experts, for the same reason. Over
        `tied`: the embedding of the first and last stage.
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

    def _squared_norm(self) -> torch.Tensor:
        """This rank's part of the squared norm of all gradients. Each logical element counts on one rank only."""
        total, place = torch.zeros((), dtype=torch.float64, device=self.device), self.mesh.coordinates
        for name, owned in groupby(self.owned, lambda own: own.unit.replicate):
            slots = (pair for own in owned for pair in own.slots())
            views = [self.reduced[where] for slot, where in slots if slot.placement.is_primary(place)]
            if views:
                square = torch.stack(norms(views)).double().square().sum()
                total = total + square / getattr(self.mesh, name).size  # ranks of this axis hold the same elements
        return total

    def _exact_squares(self) -> torch.Tensor:
        """Parts of the squared norm of all gradients whose sum over ranks has the same bits in every layout.

        Squares are added up in blocks that no layout cuts (`Slot.block`), and these exactly.
        """
        views = [
            self.reduced[where].view(-1, slot.block)
            for state in self.states
            for _, slot, where in self._primary_slots(state)
        ]
        blocks = [torch.linalg.vector_norm(view, dim=1, dtype=torch.float32) for view in views]
        blocks = torch.cat([torch.zeros(1, device=self.device), *blocks])
        largest = collectives.all_reduce_amax(blocks.max(), self.mesh.world)
        return exact_parts(blocks.double().square(), largest)

    # ---- figures for the log ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def params_norm(self) -> float:
        """The norm of all parameters (fp32 main weights), each counted once. All ranks call it."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for state in self.everything:
            main = state.main.float()  # a frozen unit has the model's format
            first = state.span.start
            views = [main[where.start - first : where.stop - first] for *_, where in self._primary_slots(state)]
            if views:
                total += torch.stack(torch._foreach_norm(views)).double().square().sum().to(self.device)
        return collectives.all_reduce(total, self.mesh.world).sqrt().item()

    def max_attention_logit(self) -> Optional[torch.Tensor]:
        """The largest attention logit of the last step, [1] on the device; None if the model does not keep it. All ranks
        call it.
        """
        return None if self.heads is None else largest_logit(self.heads, self.mesh.world, self.device)

    @torch.no_grad()
    def num_zeros_in_grad(self) -> int:
        """The number of zeros in the step's gradient over all ranks, without padding. Call it after `finalize_grads`."""
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for state in self.states:
            for own, slot, where in self._primary_slots(state):
                if own.low <= slot.start < own.high:  # the rank with the first element counts the whole parameter
                    _, extent = slot.placement.box(slot.parameter.shape, self.mesh.coordinates)
                    total += math.prod(extent)
                total -= torch.count_nonzero(self.reduced[where])  # padding has no gradient
        return int(collectives.all_reduce(total, self.mesh.world).item())

    def _primary_slots(self, state: OwnedState) -> Iterable[tuple[OwnedRange, Slot, slice]]:
        """The parts of a state for which this rank is the primary one: each element counts on one rank only."""
        place = self.mesh.coordinates
        for own in state.owned:
            if getattr(self.mesh, own.unit.replicate).rank == 0:
                for slot, where in own.slots():
                    if slot.placement.is_primary(place):
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
        """Update the weights from gradients times `scale`, and start to send them to every rank that uses them.

        scale: a number, or an fp32 scalar on the device
        decoupled_lr: learning rate of input and output embeddings, if it differs
        skip: a flag on the device; if it is set, nothing changes. Only allowed if `skips_on_device`; call
            `undo_step_count` once the host knows that it was set
        """
        rates, self.rule.gate = Rates(lr, weight_decay, decoupled_lr), Gate(skip)
        self.buffers.combine()
        self.buffers.commit(skip)
        self.rule.noise = self._noise()
        with phase("scale"):
            reduced = self._scaled(scale)
        direct = self.weights.keep and any(state.direct for state in self.states)
        # Nothing is on its way into the parameters
        with phase("inner"), self.gathered_parameters() if direct else nullcontext():
            self.rule.prepare(self.states, reduced, self.mesh)
            for state in reversed(self.states):  # the GPU's state first: the host continues meanwhile
                state.step(reduced, self.step_count, rates, self._targets(state))
            if self.clip is not None:
                self.clip.scale(self.states, self._targets, skip)
        self.step_count += 1
        self.copy_main_params_to_model_params(read=False)

    def _scaled(self, scale: float | torch.Tensor) -> torch.Tensor:
        """The gradients of an update, times `scale` unless they are multiplied when they are read or widened."""
        reduced, rule = self.reduced, self.rule
        if reduced.dtype != torch.float32 and rule.prepares:
            reduced = reduced.float()
        if reduced.dtype != torch.float32:
            rule.widened_scale = scale
        elif rule.scales:
            rule.scale = scale
        elif isinstance(scale, torch.Tensor) or scale != 1.0:
            reduced.mul_(scale)
        return reduced

    def _noise(self) -> Optional[Noise]:
        """The random words of this step; None: bf16 state is rounded to the nearest number."""
        return Noise(self.seed, self.step_count, self.mesh.coordinates) if self.settings.stochastic_rounding else None

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` accepts `skip`: the rule is gated, and no state is updated by the host, which would wait."""
        settings = self.settings
        return self.rule.gated and settings.host_share == settings.nvme_offload_fraction == 0.0

    def undo_step_count(self) -> None:
        """Do not count the last step, because its `skip` flag was set."""
        self.step_count -= 1

    def copy_main_params_to_model_params(self, read: bool = True) -> None:
        """Copy main weights to the model's weights.

        read: a checkpoint has filled all weights and buffers. Otherwise copy only the weights that the last step has
              changed and not yet copied.
        """
        if read:
            self.buffers.commit()
        with phase("copy"):
            self._fill(state for state in self.everything if read or not state.direct)
        with phase("gather" if self.mesh.shard.size > 1 else "copy"):
            self.weights.invalidate(frozen=read)
            self.messages.start_step()
        for product in self.products:
            product.weights_changed(loaded=read)

    def gathered_parameters(self) -> AbstractContextManager:
        """Make all parameters readable inside the context, at every stage: for checks between two steps."""
        return self.weights.gathered_parameters()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def of_any_format(self) -> set[str]:
        """Names of tensors whose format may differ in a checkpoint: frozen weights (the model's format), moments (a
        setting).
        """
        names = {slot.name for unit in self.units for slot in unit.slots}
        return names | {f"optimizer.{moment}.{name}" for moment in self.rule.state for name in names}

    def pieces(
        self, moments: bool = True, unique: bool = False, stable: bool = False, shared: bool = False
    ) -> list[Piece]:
        """Views of this rank's part of the logical state. Saving reads them, loading fills them.

        fp32 weights have the names of the parameters; moments have a prefix such as `optimizer.exp_avg.`. Frozen weights
        have the model's number format, and buffers their own. State in files is mapped until the pieces are freed.

        unique: for saving: one of the tensor parallel ranks or tied stages that hold the same elements returns them
        shared: data parallel ranks that hold the same elements each return a part of them
        stable: return state in files as `StablePiece`s, which keep their content during later steps, until stable pieces
            are requested again
        """
        by_axis: dict[str, list[Piece]] = {}  # replicating axis -> pieces
        for state in self.everything:
            if stable:
                state.keep()
            flats = {None: state.main} | (state.moments if moments else {})
            for name, flat in flats.items():
                is_stable, prefix = stable and state.is_stable(flat), f"optimizer.{name}." if name else ""
                for own in state.owned:
                    part_of = partial(state.part, flat, name)
                    own_pieces = pieces_of(own, part_of, self.mesh.coordinates, prefix, unique)
                    by_axis.setdefault(own.unit.replicate, []).extend(
                        [StablePiece(*piece) for piece in own_pieces] if is_stable else own_pieces
                    )
        axes = {name: getattr(self.mesh, name) for name in by_axis if shared}
        parts = (share(one, axes[name].rank, axes[name].size) if shared else one for name, one in by_axis.items())
        return [piece for part in parts for piece in part] + self.buffers.pieces(unique)
