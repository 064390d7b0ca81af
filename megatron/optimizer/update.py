# SPDX-License-Identifier: Apache-2.0
"""What an optimizer computes: an update rule for stretches of flat fp32 main weights, with state tensors of its own.

ZeRO, offload, clipping, the loss scale and checkpoints know a rule through `UpdateRule` alone; settings and the planner
through its row of `kinds.KINDS`. A new one is a class here and a row in either table; its name and its settings are
fields of `settings.schema.Optimizer`.
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


class UpdateRule:
    """One step of an optimizer, element by element, so that any stretch of weights can be updated by itself.

    state: names of all its state tensors (`kinds.py`), which start from zero
    """

    def __init__(self, settings: Optimizer):
        self.settings = settings
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

    def update(self, weights, gradients, states, step, lr, decay):
        s = self.settings
        steps = [torch.full((), float(step), device=weight.device) for weight in weights]
        betas = dict(beta1=s.adam_beta1, beta2=s.adam_beta2, eps=s.adam_eps)
        common = dict(fused=True, amsgrad=False, maximize=False, lr=lr, weight_decay=decay)
        adamw(weights, gradients, *states, [], steps, **common, **betas)


class SGD(UpdateRule):
    """With momentum, as torch.optim.SGD: weight decay is added to the gradient. Without momentum it keeps no state."""

    def update(self, weights, gradients, states, step, lr, decay):
        momenta = states[0] if states else [None] * len(weights)
        for weight, gradient, momentum in zip(weights, gradients, momenta):
            if decay:
                gradient.add_(weight, alpha=decay)
            if momentum is not None:
                gradient = momentum.mul_(self.settings.sgd_momentum).add_(gradient)
            weight.add_(gradient, alpha=-lr)


class Lion(UpdateRule):
    """arXiv:2302.06675: the sign of a mean of gradients, with decoupled weight decay."""

    def update(self, weights, gradients, states, step, lr, decay):
        beta1, beta2 = self.settings.lion_beta1, self.settings.lion_beta2
        for weight, gradient, mean in zip(weights, gradients, states[0]):
            direction = mean.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
            weight.mul_(1 - lr * decay).add_(direction, alpha=-lr)
            mean.mul_(beta2).add_(gradient, alpha=1 - beta2)


class Muon(AdamW):
    """Matrices of linear layers move along their orthogonalised momentum (`muon.py`); all other weights have AdamW."""

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
        for stretch in (stretch for group, found in state.ranges.items() if group.matrix for stretch in found):
            gradient, momentum = gradients[stretch], state.moments[name][state.where(name, stretch)]
            momentum.lerp_(gradient, 1 - share)
            gradient.copy_(gradient.lerp(momentum, share) if self.settings.muon_nesterov else momentum)

    def update_matrices(self, weights, gradients, states, step, lr, decay):
        for weight, direction in zip(weights, gradients):
            weight.mul_(1 - lr * decay).add_(direction, alpha=-lr)


RULES = dict(adam=AdamW, sgd=SGD, lion=Lion, muon=Muon)


def rule_of(settings: Optimizer) -> UpdateRule:
    """The update rule of `--optimizer`."""
    return RULES[settings.rule](settings)
