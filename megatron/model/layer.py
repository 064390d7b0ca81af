# SPDX-License-Identifier: Apache-2.0
"""A transformer layer: a list of branches (`model.branches`), each a sum of its input and what mixers make of it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from megatron.errors import SettingsError
from megatron.model.branches import Branch, Mixer, in_turn
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.kinds.table import resolved
from megatron.model.layer_ops import ATTENTION, MLP, NORM
from megatron.model.norms import NORMS
from megatron.model.recompute import recompute, recompute_output
from megatron.model.weights import Table, take_prefix
from megatron.mpu.random import Dropout

Sums = dict[str, torch.Tensor]  # name -> fp32 scalar


class Layer(nn.Module):
    """[s, b, h] (or [s/tp, b, h] with sequence parallelism) -> the same; with sums of its mixers (x, {name: sum}).

    It runs the branches that the facts list for it. Norms, mixers and dropouts are attributes with the branches' names for
    them, registered in the order of `weights`, the layer's table. A variant is another list of branches, or a subclass with
    another `forward` (docs/extending.md).
    """

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__()
        self.settings, self.recompute = setup.model, setup.recompute
        model = self.settings
        self.tp, self.sequence_parallel = setup.tp, setup.sequence_parallel
        self.branches: tuple[Branch, ...] = setup.facts.layer_kind(setup.layer).branches
        norms = {name for branch in self.branches for name in branch.norms}
        mixers = {mixer.slot: mixer for branch in self.branches for mixer in branch.mixers}
        for name in dict.fromkeys(full.partition(".")[0] for full in weights):
            table = take_prefix(weights, name)
            if name in norms:
                self.add_module(name, NORMS[model.normalization](table, model.norm_epsilon, **setup.factory))
            elif name in mixers:
                self._check_sums(mixers[name], setup)
                self.add_module(name, resolved(mixers[name].module)(table, setup.of(mixers[name])))
        axis = self.tp if self.sequence_parallel else None
        for branch in self.branches:
            site = f"after {branch.site or branch.slot}"
            drop = Dropout(model.hidden_dropout, site, setup.layer, setup.seed, axis=axis, cp=setup.mesh.cp)
            self.add_module(branch.dropout, drop)

    def forward(self, x: torch.Tensor, context: ForwardContext):
        total, normal, reading = {}, None, nullcontext()
        for branch, then in in_turn(self.branches):
            with reading:
                y = self._branch(branch, x, context) if normal is None else self._mixed(branch, normal, context)
            if isinstance(y, tuple):
                y, sums = y
                total = added(total, sums)
            dropout, normal, reading = getattr(self, branch.dropout), None, nullcontext()
            if dropout.idle and self._norm_joins_sum(branch, then):
                x, normal = getattr(self, then.before)(x, y)
                continue
            x = dropout.add(x, y, context.samples)
            if branch.closing and then is None:
                x = getattr(self, branch.closing)(x)
            elif branch.closing:
                x, reading = self._norm(branch.closing, x, context)
        return (x, total) if total else x

    def part(self, slot: str, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """What a branch adds to x, for variants with another sum: dropout(mixers(norm(x)))."""
        branch = next(branch for branch in self.branches if branch.slot == slot)
        return getattr(self, branch.dropout)(self._branch(branch, x, context), context.samples)

    def _check_sums(self, mixer: Mixer, setup: LayerSetup) -> None:
        if mixer.sums(setup.model) and type(self).forward is not Layer.forward:
            raise SettingsError(
                f"{mixer.asked(setup.facts.settings) or mixer.name}: {type(self).__name__} has its own forward function",
                f"{mixer.name} return sums, which the forward function of Layer returns with x",
                "leave them out, or see docs/extending.md#experts",
            )

    def _norm_joins_sum(self, branch: Branch, then: Branch) -> bool:
        """Whether one kernel may compute a branch's sum and the norm before the next branch."""
        if then is None or not then.before or branch.closing or NORM in self.recompute:
            return False
        return not self._runs_again(then)

    def _runs_again(self, branch: Branch) -> bool:
        """Whether the backward pass recomputes a branch, from its norm to the norm after the mixers."""
        return ATTENTION in self.recompute and branch.mixes_tokens

    def _branch(self, branch: Branch, x: torch.Tensor, context: ForwardContext):
        """`_mixed` of norm(x)."""
        if self._runs_again(branch):
            return recompute(self._mixed_norm, branch, x, context, inside=context.region, of=(self,))
        return self._mixed_norm(branch, x, context)

    def _mixed_norm(self, branch: Branch, x: torch.Tensor, context: ForwardContext):
        if not branch.before:
            return self._mixed(branch, x, context)
        normal, reading = self._norm(branch.before, x, context)
        with reading:
            return self._mixed(branch, normal, context)

    def _mixed(self, branch: Branch, normal: torch.Tensor, context: ForwardContext):
        """The sum of the mixers' outputs, and the norm after it; with sums (y, sums)."""
        y, total = None, {}
        for mixer in branch.mixers:
            module = getattr(self, mixer.slot)
            if MLP in self.recompute and not mixer.mixes_tokens:
                own = recompute(module, normal, context, inside=context.region, of=(module,))
            else:
                own = module(normal, context)
            if isinstance(own, tuple):
                own, sums = own
                total = added(total, sums)
            y = own if y is None else y + own
        y = getattr(self, branch.after)(y) if branch.after else y
        return (y, total) if total else y

    def _norm(self, name: str, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, AbstractContextManager]:
        """norm(x), and a context for what reads it."""
        norm = getattr(self, name)
        if NORM in self.recompute:
            return recompute_output(norm, x, inside=context.region, of=(norm,))
        return norm(x), nullcontext()


def added(sums: Sums, more: Sums) -> Sums:
    """The sums with more of them; those of one name are added up."""
    return sums | {name: sums[name] + value if name in sums else value for name, value in more.items()}
