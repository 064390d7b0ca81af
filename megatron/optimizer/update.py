# SPDX-License-Identifier: Apache-2.0
"""What an optimizer computes: an update rule for stretches of flat fp32 main weights, with state tensors of its own.

ZeRO, offload, clipping, the loss scale and checkpoints know a rule through `UpdateRule` alone; settings and the planner
through its row of `kinds.KINDS`. A new one is a class here and a row in either table; its name and its settings are
fields of `settings.schema.Optimizer`. A recipe's own needs none of these: `Recipe.optimizers`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch.optim.adamw import adamw

from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Placement
from megatron.optimizer.kinds import state_of
from megatron.optimizer.muon import Directions
from megatron.settings.schema import Optimizer

Tensors = Sequence[torch.Tensor]


class Group(NamedTuple):
    """What stretches of weights have in common: weight decay or none, the learning rate, and the formula."""

    decay: bool
    decoupled: bool = False  # input and output embeddings, which have the rate of --decoupled-lr
    matrix: bool = False  # matrices of linear layers

    @classmethod
    def of(cls, placement: Placement) -> "Group":
        return cls(placement.decay, placement.embedding_or_output, placement.matrices is not None)


class Rates(NamedTuple):
    """Learning rate and weight decay of a step. decoupled_lr: of input and output embeddings; None: they have the same."""

    lr: float
    weight_decay: float
    decoupled_lr: Optional[float] = None

    def of(self, group: Group) -> tuple[float, float]:
        """(learning rate, weight decay) of a group."""
        own = group.decoupled and self.decoupled_lr is not None
        return self.decoupled_lr if own else self.lr, self.weight_decay if group.decay else 0.0


def choose(flag: torch.Tensor, yes: float, no: float) -> torch.Tensor:
    """`yes` where a flag on the device is up, else `no`, both finite: an fp64 scalar there.

    Not torch.where, which copies numbers of the host to the device, and waits for that.
    """
    up = flag.double()
    return up * yes + (1.0 - up) * no


class Gate:
    """Whether the update that a rule is asked for is made. The host may not know yet: then a flag on the device says so.

    skip: bool scalar on the device; None: the update is made
    """

    def __init__(self, skip: Optional[torch.Tensor] = None):
        self.skip = skip
        self.found_inf = None if skip is None else skip.float()  # as torch's fused optimizers want it

    def factor(self, value: float, idle: float) -> float | torch.Tensor:
        """What to multiply with: `value`, or in a step that is skipped `idle`, which changes nothing."""
        return value if self.skip is None else choose(self.skip, idle, value).float()

    def clean(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient, in place zero in a step that is skipped: it may be infinite there, or NaN."""
        return gradient if self.skip is None else gradient.masked_fill_(self.skip, 0.0)


def add(target: torch.Tensor, other: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """target += factor * other."""
    if isinstance(factor, torch.Tensor):
        return target.addcmul_(other, factor)
    return target.add_(other, alpha=factor)


class UpdateRule:
    """One step of an optimizer, element by element, so that any stretch of weights can be updated by itself.

    state: names of all its state tensors (`kinds.py`), which start from zero
    gate:  whether the updates of this step are made
    gated: this rule looks at `gate`. One that does not is asked for updates that are made, and no others: on a GPU the
           host then waits in each step until it knows
    scale: of one that `scales`: what it multiplies gradients by where it reads them, a number or an fp32 scalar; others
           get gradients that are multiplied
    """

    gated = scales = False

    def __init__(self, settings: Optimizer):
        self.settings, self.gate, self.scale = settings, Gate(), 1.0
        self.state = tuple(dict.fromkeys(name for matrix in (False, True) for name in state_of(settings, matrix)))

    def state_of(self, group: Group) -> tuple[str, ...]:
        """Names of the state tensors that a group's weights have."""
        return state_of(self.settings, group.matrix)

    def prepare(self, states: Sequence, reduced: torch.Tensor, mesh: Mesh) -> None:
        """Before the updates of a step, on all ranks: what has to be done with gradients that is not element by element.

        states:  all `OwnedState`s of the rank
        reduced: this rank's shard of the gradients
        """

    def update(
        self, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], step: int, lr: float, decay: float
    ) -> None:
        """Update stretches of weights in place, and their state.

        weights, gradients: flat fp32 tensors of the same sizes, on one device; gradients may be overwritten
        states:             such tensors for each name of `state_of` of their group
        step:               how many updates there have been before this one, 0 at the first: Adam divides its means by
                            1 - beta ** (step + 1)
        decay:              weight decay
        """
        raise NotImplementedError

    def update_matrices(self, weights, gradients, states, step, lr, decay) -> None:
        """`update` of matrices of linear layers; the same, unless a rule treats them as such."""
        self.update(weights, gradients, states, step, lr, decay)


class AdamW(UpdateRule):
    """arXiv:1711.05101, fused."""

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
    """With momentum, as torch.optim.SGD: weight decay is added to the gradient. Without momentum it keeps no state."""

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
    """arXiv:2302.06675: the sign of a mean of gradients, with decoupled weight decay."""

    gated = True

    def update(self, weights, gradients, states, step, lr, decay):
        gate, beta1, beta2 = self.gate, self.settings.lion_beta1, self.settings.lion_beta2
        kept, shrink, rate = gate.factor(beta2, 1.0), gate.factor(1 - lr * decay, 1.0), gate.factor(-lr, 0.0)
        for weight, gradient, mean in zip(weights, map(gate.clean, gradients), states[0]):
            direction = mean.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
            add(weight.mul_(shrink), direction, rate)
            mean.mul_(kept).add_(gradient, alpha=1 - beta2)


class Muon(AdamW):
    """Matrices of linear layers move along their orthogonalised momentum (`muon.py`); all other weights have AdamW."""

    scales = False  # momentum is taken before the update

    def __init__(self, settings: Optimizer):
        super().__init__(settings)
        self.directions = Directions(settings)

    def prepare(self, states, reduced, mesh):
        for state in states:
            self._take_momentum(state, reduced[state.span])
            for own in state.owned:
                self.directions.replace(own, reduced, mesh)

    def _take_momentum(self, state, gradients: torch.Tensor) -> None:
        """Gradients of matrices become their momentum."""
        share, name = self.settings.muon_momentum, "momentum_buffer"
        new = self.gate.factor(1 - share, 0.0)
        for stretch in (stretch for group, found in state.ranges.items() if group.matrix for stretch in found):
            gradient, momentum = self.gate.clean(gradients[stretch]), state.moments[name][state.where(name, stretch)]
            momentum.lerp_(gradient, new)
            gradient.copy_(gradient.lerp(momentum, share) if self.settings.muon_nesterov else momentum)

    def update_matrices(self, weights, gradients, states, step, lr, decay):
        shrink, rate = self.gate.factor(1 - lr * decay, 1.0), self.gate.factor(-lr, 0.0)
        for weight, direction in zip(weights, gradients):
            add(weight.mul_(shrink), direction, rate)


RULES = dict(adam=AdamW, sgd=SGD, lion=Lion, muon=Muon)


def rule_of(settings: Optimizer) -> UpdateRule:
    """The update rule of `--optimizer`: the suite's, or the recipe's own."""
    own = settings.own_optimizers.get(settings.rule)
    return (own.update if own else RULES[settings.rule])(settings)
