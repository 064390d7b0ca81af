# SPDX-License-Identifier: Apache-2.0
"""Update rules: the formulas of the optimizers, for ranges of flat fp32 main weights and their state tensors.

ZeRO, offload, clipping, the loss scale and checkpoints use a rule only through `UpdateRule`; settings and the planner use
its row of `kinds.KINDS`. A new rule is a class here and a row in each table; its name and its settings are fields of
`settings.schema.Optimizer`. A rule of a recipe needs none of these: `Recipe.optimizers`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Optional

import torch
from torch.optim.adamw import adamw

from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Placement
from megatron.optimizer.kinds import format_of, state_of
from megatron.optimizer.muon import Directions
from megatron.optimizer.rounding import Noise, Widened, parts_of
from megatron.settings.schema import Optimizer

Tensors = Sequence[torch.Tensor]
DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16)


class Group(NamedTuple):
    """The properties by which weights are grouped for an update: weight decay, learning rate and formula."""

    decay: bool
    decoupled: bool = False  # input and output embeddings, which have the rate of --decoupled-lr
    matrix: bool = False  # matrices of linear layers

    @classmethod
    def of(cls, placement: Placement) -> "Group":
        return cls(placement.decay, placement.embedding_or_output, placement.matrices is not None)


class Rates(NamedTuple):
    """Learning rate and weight decay of a step. decoupled_lr: of input and output embeddings; None: the same as `lr`."""

    lr: float
    weight_decay: float
    decoupled_lr: Optional[float] = None

    def of(self, group: Group) -> tuple[float, float]:
        """The learning rate and the weight decay of a group."""
        own = group.decoupled and self.decoupled_lr is not None
        return self.decoupled_lr if own else self.lr, self.weight_decay if group.decay else 0.0


def choose(flag: torch.Tensor, yes: float, no: float) -> torch.Tensor:
    """Select `yes` if a flag on the device is set, else `no`: an fp64 scalar on the device. Both are finite.

    torch.where would copy the numbers from the host to the device and wait for it.
    """
    up = flag.double()
    return up * yes + (1.0 - up) * no


class Gate:
    """Skips an update on the device, by a flag that the host has not read.

    skip: bool scalar on the device; None: do not skip
    """

    def __init__(self, skip: Optional[torch.Tensor] = None):
        self.skip = skip
        self.found_inf = None if skip is None else skip.float()  # the argument of torch's fused optimizers

    def factor(self, value: float, idle: float) -> float | torch.Tensor:
        """The factor of an update: `value`, or `idle` in a skipped step, which changes nothing."""
        return value if self.skip is None else choose(self.skip, idle, value).float()

    def clean(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient. In a skipped step, where it may be infinite or NaN, it is zeroed in place."""
        return gradient if self.skip is None else gradient.masked_fill_(self.skip, 0.0)


def add(target: torch.Tensor, other: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """Compute target += factor * other, in place."""
    if isinstance(factor, torch.Tensor):
        return target.addcmul_(other, factor)
    return target.add_(other, alpha=factor)


class UpdateRule:
    """An optimizer's update, element by element, so that any range of weights can be updated separately.

    state:  names of all its state tensors (`kinds.py`), initially zero
    gate:   skips the updates of a step
    gated:  this rule uses `gate`. Other rules are only called for steps that are not skipped: on a GPU the host then waits
            in each step until it knows
    scales: this rule multiplies gradients by `scale`, a number or an fp32 scalar, as it reads them. Other rules get scaled
            gradients
    prepares: `prepare` replaces gradients: then all of a rank's are fp32. Otherwise they are widened part by part
    widened_scale: the scale of bf16 gradients, which are multiplied when they are widened
    noise:  random words for rounding this step's bf16 state; None: round to the nearest number
    """

    gated = scales = prepares = False
    noise: Optional[Noise] = None
    widened_scale: float | torch.Tensor = 1.0

    def __init__(self, settings: Optimizer):
        self.settings, self.gate, self.scale = settings, Gate(), 1.0
        self.state = tuple(dict.fromkeys(name for matrix in (False, True) for name in state_of(settings, matrix)))

    def dtype_of(self, name: str) -> torch.dtype:
        """The number format of a state tensor. Rules get fp32 copies of it."""
        return DTYPES[format_of(self.settings, name)]

    def state_of(self, group: Group) -> tuple[str, ...]:
        """Names of the state tensors that a group's weights have."""
        return state_of(self.settings, group.matrix)

    def prepare(self, states: Sequence, reduced: torch.Tensor, mesh: Mesh) -> None:
        """Process gradients before the updates of a step, for rules that are not element by element. All ranks call it.

        states:  all `OwnedState`s of the rank
        reduced: this rank's shard of the gradients
        """

    def update(
        self, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], step: int, lr: float, decay: float
    ) -> None:
        """Update ranges of weights and their state in place.

        weights, gradients: flat fp32 tensors of the same sizes, on one device; gradients may be overwritten
        states:             state tensors of the same sizes, for each name in `state_of(group)`
        step:               number of earlier updates, 0 at the first: Adam divides its means by 1 - beta ** (step + 1)
        decay:              weight decay
        """
        raise NotImplementedError

    def update_matrices(self, weights, gradients, states, step, lr, decay) -> None:
        """Update matrices of linear layers. By default the same as `update`."""
        self.update(weights, gradients, states, step, lr, decay)


class AdamW(UpdateRule):
    """AdamW (arXiv:1711.05101), by torch's fused kernel."""

    gated = scales = True

    def update(self, weights, gradients, states, step, lr, decay):
        s, divisor = self.settings, None
        if isinstance(self.scale, torch.Tensor):
            divisor = self.scale.reciprocal()
        elif self.scale != 1.0 and weights:
            divisor = torch.full((), self.scale, device=weights[0].device).reciprocal_()
        steps = [torch.full((), float(step), device=weight.device) for weight in weights]
        betas = dict(beta1=s.adam_beta1, beta2=s.adam_beta2, eps=s.adam_eps)
        common = dict(fused=True, amsgrad=False, maximize=False, lr=lr, weight_decay=decay)
        common |= dict(found_inf=self.gate.found_inf, grad_scale=divisor)
        adamw(weights, gradients, *states, [], steps, **common, **betas)


class SGD(UpdateRule):
    """SGD with momentum, as in torch.optim.SGD: weight decay is added to the gradient. No state without momentum."""

    gated = True

    def update(self, weights, gradients, states, step, lr, decay):
        gate, momenta = self.gate, states[0] if states else [None] * len(weights)
        kept, pull, rate = gate.factor(self.settings.sgd_momentum, 1.0), gate.factor(decay, 0.0), gate.factor(-lr, 0.0)
        for weight, gradient, momentum in zip(weights, map(gate.clean, gradients), momenta):
            if decay:
                add(gradient, weight, pull)
            if momentum is not None:
                gradient = momentum.mul_(kept).add_(gradient)
            add(weight, gradient, rate)


class Lion(UpdateRule):
    """Lion (arXiv:2302.06675): the sign of a mean of gradients, with decoupled weight decay."""

    gated = True

    def update(self, weights, gradients, states, step, lr, decay):
        gate, beta1, beta2 = self.gate, self.settings.lion_beta1, self.settings.lion_beta2
        kept, shrink, rate = gate.factor(beta2, 1.0), gate.factor(1 - lr * decay, 1.0), gate.factor(-lr, 0.0)
        for weight, gradient, mean in zip(weights, map(gate.clean, gradients), states[0]):
            direction = mean.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
            add(weight.mul_(shrink), direction, rate)
            mean.mul_(kept).add_(gradient, alpha=1 - beta2)


class Muon(AdamW):
    """Muon (`muon.py`): orthogonalised momentum for matrices of linear layers, AdamW for all other weights."""

    scales, prepares = False, True  # momentum is updated before

    def __init__(self, settings: Optimizer):
        super().__init__(settings)
        self.directions = Directions(settings)

    def prepare(self, states, reduced, mesh):
        for state in states:
            self._apply_momentum(state, reduced[state.span])
            for own in state.owned:
                self.directions.replace(own, reduced, mesh)

    def _apply_momentum(self, state, gradients: torch.Tensor) -> None:
        """Replace the gradients of matrices by their momentum."""
        share, name = self.settings.muon_momentum, "momentum_buffer"
        new = self.gate.factor(1 - share, 0.0)
        stretches = [stretch for group, those in state.ranges.items() if group.matrix for stretch in those]
        if self.dtype_of(name) != torch.float32:
            stretches = parts_of(stretches, gradients.device.type)
        memory = Widened(gradients.device)
        for stretch in stretches:
            gradient, momentum = self.gate.clean(gradients[stretch]), state.moments[name][state.where(name, stretch)]
            wide = memory.of(name, momentum).lerp_(gradient, new)
            gradient.copy_(gradient.lerp(wide, share) if self.settings.muon_nesterov else wide)
            memory.store([momentum], [wide], partial(state.fill, stretch))

    def update_matrices(self, weights, gradients, states, step, lr, decay):
        shrink, rate = self.gate.factor(1 - lr * decay, 1.0), self.gate.factor(-lr, 0.0)
        for weight, direction in zip(weights, gradients):
            add(weight.mul_(shrink), direction, rate)


RULES = dict(adam=AdamW, sgd=SGD, lion=Lion, muon=Muon)


def rule_of(settings: Optimizer) -> UpdateRule:
    """The update rule of `--optimizer`, built in or from the recipe."""
    own = settings.own_optimizers.get(settings.rule)
    return (own.update if own else RULES[settings.rule])(settings)
