# SPDX-License-Identifier: Apache-2.0
"""AdamW over flat units: fp32 main weights, fp32 gradients, sharded or not by one mechanism.

| stage | parameters | gradients                              | main weights and moments |
|-------|------------|----------------------------------------|--------------------------|
| 0     | full       | full, all-reduced once a step          | full                     |
| 1     | full       | full, reduce-scattered once a step     | shard                    |

Stage 0 is the stage whose shard axis has size 1: its shard is the whole unit. A step is

    backward passes -> hooks add each gradient to the fp32 buffer -> `totals` -> `step`

Gradients are *sums* of token losses over the global batch times the scale that the caller put on the loss; the caller
says in `step` what to multiply them by, so that averaging, un-scaling and clipping are one pass over the buffer.
"""

from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from megatron import config
from megatron.checkpoint.store import Piece
from megatron.mpu import collectives
from megatron.mpu.mesh import Mesh
from megatron.optimizer.units import Unit, initialise, lay_out, materialise, pieces_of


class Owned(NamedTuple):
    """The range [low, high) of a unit that this rank owns; it lies at `at` in the rank's shard."""

    unit: Unit
    low: int
    high: int
    at: int

    @property
    def place(self) -> slice:
        return slice(self.at, self.at + self.high - self.low)


class ShardedAdamW:
    """Owns the memory of a model's weights, gradients and optimizer state on this rank.

    model:    modules whose parameters may be on the meta device; they become views into one flat buffer of `dtype`
    mesh:     `shard` is the axis that divides optimizer state, `replicate` the one that copies it
    """

    def __init__(self, model, mesh: Mesh, settings: config.Optimizer, *, dtype, device, seed: int):
        self.mesh, self.dtype = mesh, dtype
        self.units = lay_out(model, mesh.shard.size)
        self.owned = self._owned_ranges()
        total = sum(unit.size for unit in self.units)
        self.weights = torch.zeros(total, dtype=dtype, device=device)
        self.grads = torch.zeros(total, dtype=torch.float32, device=device)
        materialise(model, self.units, self.weights)
        self.main = self._main_weights(seed)
        self.reduced = self.grads if mesh.shard.size == 1 else torch.zeros_like(self.main)
        self.moments = {name: torch.zeros_like(self.main) for name in ("exp_avg", "exp_avg_sq")}
        self.ranges = {decay: self._ranges(decay) for decay in (True, False)}
        self.settings, self.step_count = settings, 0
        self._fresh: set[str] = set()  # parameters whose gradient buffer holds something of this step
        self._hook_gradients()

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _owned_ranges(self) -> list[Owned]:
        owned, at = [], 0
        for unit in self.units:
            low, high = unit.shard(self.mesh.shard.rank, self.mesh.shard.size)
            owned.append(Owned(unit, low, high, at))
            at += high - low
        return owned

    def _main_weights(self, seed: int) -> torch.Tensor:
        """Initial fp32 weights of this rank's shard: the very buffer of the weights where one can serve as both."""
        whole = self.weights if self.dtype == torch.float32 else torch.zeros_like(self.weights, dtype=torch.float32)
        initialise(self.units, whole, self.mesh.place, seed)
        if whole is not self.weights:
            self.weights.copy_(whole)
        if self.mesh.shard.size == 1:
            return whole
        return torch.cat([whole[own.unit.start + own.low : own.unit.start + own.high] for own in self.owned])

    def _ranges(self, decay: bool) -> list[slice]:
        """The stretches of the shard with (or without) weight decay."""
        found = []
        for own in self.owned:
            border = min(max(own.unit.decay, own.low), own.high)
            start, stop = (own.low, border) if decay else (border, own.high)
            if start < stop:
                found.append(slice(own.at + start - own.low, own.at + stop - own.low))
        return found

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _hook_gradients(self) -> None:
        """The first gradient of a step overwrites the buffer, later ones add: no pass to zero it."""
        for unit in self.units:
            for slot in unit.slots:
                buffer = self.grads[unit.start + slot.start : unit.start + slot.stop].view(slot.parameter.shape)

                def collect(parameter, name=slot.name, buffer=buffer):
                    if name in self._fresh:
                        buffer.add_(parameter.grad)
                    else:
                        buffer.copy_(parameter.grad)
                        self._fresh.add(name)
                    parameter.grad = None

                slot.parameter.register_post_accumulate_grad_hook(collect)

    @torch.no_grad()
    def totals(self, sums: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Reduce gradients over data parallel ranks; then, in one small reduction, `sums` and the gradient norm.

        sums: fp64 vector of this rank's loss and token counts. Returns (their totals over all ranks, norm of the
        summed gradients). A value that is not finite anywhere makes the norm not finite everywhere.
        """
        for unit in self.units:
            for slot in unit.slots:
                if slot.name not in self._fresh:
                    self.grads[unit.start + slot.start : unit.start + slot.stop].zero_()
        self._fresh.clear()
        for own in self.owned if self.mesh.shard.size > 1 else ():
            whole = self.grads[own.unit.start : own.unit.start + own.unit.size]
            self.reduced[own.place] = collectives.reduce_scatter(whole, self.mesh.shard)
        collectives.all_reduce(self.reduced, self.mesh.replicate)
        square = self._square() / self.mesh.replicate.size  # each replica holds the same
        vector = torch.cat([square.reshape(1), sums.to(square)])
        vector = collectives.all_reduce(vector, self.mesh.world).cpu()
        return vector[1:], vector[0].sqrt().item()

    def _square(self) -> torch.Tensor:
        """Sum of squares of the owned gradients, each logical element counted on one tp rank only."""
        views = []
        for own in self.owned:
            for slot in own.unit.slots:
                start, stop = max(own.low, slot.start), min(own.high, slot.stop)
                if start < stop and slot.placement.owned(self.mesh.place):
                    views.append(self.reduced[own.at + start - own.low : own.at + stop - own.low])
        if not views:
            return torch.zeros((), dtype=torch.float64, device=self.grads.device)
        return torch.stack(torch._foreach_norm(views)).double().square().sum()

    # ---- the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, scale: float) -> None:
        """AdamW (arXiv:1711.05101) on gradients times `scale`; new weights go to every rank that uses them."""
        if scale != 1.0:
            self.reduced.mul_(scale)
        for decay, ranges in self.ranges.items():
            adamw(
                *[[flat[where] for where in ranges] for flat in (self.main, self.reduced, *self.moments.values())],
                [],
                [torch.tensor(float(self.step_count), device=self.main.device) for _ in ranges],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=lr,
                weight_decay=weight_decay if decay else 0.0,
                beta1=self.settings.adam_beta1,
                beta2=self.settings.adam_beta2,
                eps=self.settings.adam_eps,
            )
        self.step_count += 1
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Main weights -> weights of the model, gathered over the shard axis."""
        if self.mesh.shard.size == 1:
            if self.main is not self.weights:
                self.weights.copy_(self.main)
            return
        for own in self.owned:
            piece = self.main[own.place].to(self.dtype)
            whole = slice(own.unit.start, own.unit.start + own.unit.size)
            self.weights[whole] = collectives.all_gather(piece, self.mesh.shard)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def pieces(self, moments: bool = True) -> list[Piece]:
        """What this rank holds of the logical state, as views: saving reads them, loading fills them.

        fp32 weights have the names of the parameters, moments those with `optimizer.exp_avg.` in front.
        """
        found = []
        for name, flat in [("", self.main), *self.moments.items()][: None if moments else 1]:
            prefix = name and f"optimizer.{name}."
            for own in self.owned:
                found += pieces_of(own.unit, own.low, own.high, flat[own.place], self.mesh.place, prefix)
        return found
