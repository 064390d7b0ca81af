# SPDX-License-Identifier: Apache-2.0
"""A layer's experts in the place of its MLP: router, dispatch, experts, and an expert that all tokens share. Experts may
compute in latents, which are narrower than hidden states: of these, router and shared expert see nothing.

Ranks of tp route different tokens. With sequence parallelism each has its own anyway; without it, each takes its part of
the rows, and they gather the results. So tp may be any part of the ranks that experts are divided over.

Legend: s sequence (a rank's part with context parallelism), b micro-batch, n tokens of this rank = s b / tp, h hidden,
k experts of a token, f width of an expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.kinds.experts.dispatch import Dispatcher, PaddedDispatcher
from megatron.model.kinds.experts.grouped import GroupedLinear, Rows
from megatron.model.kinds.experts.hops import HopDispatcher
from megatron.model.kinds.experts.libraries import library_dispatcher
from megatron.model.kinds.experts.parts import capacity, parts_of
from megatron.model.kinds.experts.router import Router, Routing
from megatron.model.kinds.mlp.module import MLP, Activation
from megatron.model.recompute import recompute_output
from megatron.model.weights import Table, take_prefix
from megatron.mpu import collectives, mappings
from megatron.mpu.layers import ReplicatedLinear, create_parameters


class MoELayer(nn.Module):
    """[s, b, h] (or [s/tp, b, h] under sequence parallelism) -> the same, and the sums of the router.

    weights: `experts.weights.experts(...)`
    """

    ordered = False  # sums have one order (--batch-invariant-mode)

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__()
        of, model, mesh = lambda name: take_prefix(weights, name), setup.model, setup.mesh
        self.layer, self.tp, self.cut = setup.layer, mesh.tp, mesh.tp.size > 1 and not setup.sequence_parallel
        router = parts_of(model).router or Router
        self.router = router(model, self.layer, of("router"), mesh, seed=setup.seed, **setup.factory)
        self.experts = Experts(of("experts"), setup)
        self.latent_down = self.latent_up = nn.Identity()
        if of("latent_down"):  # each rank of tp has its own tokens there
            whole = partial(ReplicatedLinear, tp=setup.tp, sequence_parallel=True, **setup.factory)
            self.latent_down, self.latent_up = whole(of("latent_down")), whole(of("latent_up"))
        self.shared = self.shared_gate = None
        if shared := of("shared"):
            self.shared = MLP(shared, setup)
        if gate := of("shared_gate"):
            self.shared_gate = SharedGate(gate, **setup.factory)
        if setup.kernels.torch_compile:  # a graph would have the sizes of one step, so experts stay out of graphs
            self.forward = torch.compiler.disable(self.forward)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows, memo = self._own_rows(x), context.routings.get(self.layer)
        rows = rows.view_as(rows) if self.ordered else rows  # its two gradients are added first, whatever is cut
        routing = self.router(rows, self._own_mask(x, context.loss_mask), context.samples, memo=memo)
        context.routings[self.layer] = routing.memo
        dispatcher, shared = self.experts.start(routing), None
        if self.shared is not None:
            shared = self.shared(x) if self.shared_gate is None else self.shared_gate(x) * self.shared(x)
        y = self.latent_down(rows)
        y = self.latent_up(self.experts(y.flatten(0, 1), routing, dispatcher).view_as(y))
        if self.cut:
            y = mappings.join_rows(y, self.tp)[: len(x)]
        return y if shared is None else y + shared, routing.sums

    def attach_ordered(self) -> None:
        """Give its sums one order (--batch-invariant-mode)."""
        self.ordered = self.experts.up.ordered = self.experts.down.ordered = True
        self.experts.dispatcher = partial(_ordered, self.experts.dispatcher, self.tp.size)

    def _own_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of this rank along tp, [s', b, h]; the last ones may be added rows of zeros."""
        return mappings.cut_rows(self._even(x), self.tp) if self.cut else x

    def _own_mask(self, x: torch.Tensor, mask: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """The rows of the loss mask [s, b] that belong to `_own_rows`: 0 for added rows; None: all count."""
        if self.tp.size == 1:
            return mask
        if mask is None and self.cut and len(x) % self.tp.size:
            mask = x.new_ones(x.shape[:2])
        return None if mask is None else self._even(mask).chunk(self.tp.size)[self.tp.rank]

    def _even(self, x: torch.Tensor) -> torch.Tensor:
        """x with rows of zeros up to a multiple of tp."""
        lacking = -len(x) % self.tp.size
        return torch.cat((x, x.new_zeros(lacking, *x.shape[1:]))) if lacking else x


class Experts(Activation):
    """Tokens [n, h] and their routing -> [n, h], the weighted sums of what their experts make of them."""

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__(setup)
        model, mesh = setup.model, setup.mesh
        self.ep, self.etp, self.number = mesh.ep, mesh.etp, model.num_experts
        self.capacity_factor, self.padded = model.moe_expert_capacity_factor, model.moe_pad_expert_input_to_capacity
        hops = dict(over=mesh.ep_counts, levels=(mesh.ep_outer, mesh.ep_inner))
        usual = partial(HopDispatcher, **hops) if mesh.in_hops else partial(Dispatcher, over=mesh.ep_counts)
        if mesh.ep_library and mesh.ep.size > 1:
            usual = library_dispatcher(mesh, usual)
        self.dispatcher = parts_of(model).dispatcher or usual
        axes = self.ep, self.etp
        self.up = GroupedLinear(take_prefix(weights, "up"), axes, **setup.factory)
        self.down = GroupedLinear(take_prefix(weights, "down"), axes, with_bias=mesh.etp.rank == 0, **setup.factory)

    def start(self, routing: Routing) -> Dispatcher:
        """The dispatcher of this rank's tokens, and those of other etp ranks. The numbers of rows are under way."""
        (n, k), memo = routing.experts.shape, routing.memo
        experts = collectives.all_gather(routing.experts, self.etp)
        if self.padded:
            most = self.etp.size * capacity(n, k, self.number, self.capacity_factor)
            return PaddedDispatcher(experts, self.number, self.ep, most)
        return self.dispatcher(experts, self.number, self.ep, self.capacity_factor is not None, memo.counts)

    def forward(self, x: torch.Tensor, routing: Routing, dispatcher: Dispatcher) -> torch.Tensor:
        # Each rank of etp has a part of each expert, and all their tokens.
        gathered = (mappings.gather_from_sequence_parallel_region(one, self.etp) for one in (x, routing.weights))
        rows, weights = dispatcher.dispatch(*gathered)  # [m, h], [m, 1]
        routing.memo.counts = dispatcher.counts
        y = dispatcher.combine(self._mlp(rows, weights, dispatcher.rows))
        return mappings.reduce_scatter_to_sequence_parallel_region(y, self.etp)

    def _mlp(self, x: torch.Tensor, weights: torch.Tensor, rows: Rows) -> torch.Tensor:
        x = self.up(x, rows)  # [m, f/etp], twice as wide with a gate
        if not self.recompute_activation:
            return self.down(_Weighted.apply(x, weights, self._activation), rows, weights)
        weighted = lambda x, weights: (self._activation(x) * weights).to(x.dtype)
        x, reading = recompute_output(weighted, x, weights, inside=self.region, of=(self,))
        with reading:
            return self.down(x, rows, weights)


def _ordered(make: Callable, sample_ranks: int, *arguments) -> Dispatcher:
    dispatcher = make(*arguments)
    dispatcher.sample_ranks = sample_ranks
    return dispatcher


class _Weighted(torch.autograd.Function):
    """The activation of x [m, ...], times weights [m, 1]. It keeps x alone, and computes the activation again for the
    gradient of the weights.
    """

    @staticmethod
    def forward(ctx, x, weights, activation):
        ctx.save_for_backward(x, weights)
        ctx.activation = activation
        return (activation(x) * weights).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.activation(x)
        wide = gradient.to(weights.dtype)
        [d_x] = torch.autograd.grad(y, x, (wide * weights).to(y.dtype))
        return d_x, (wide * y.detach()).sum(-1, keepdim=True), None


class SharedGate(nn.Module):
    """sigmoid(x w), [s, b, h] -> [s, b, 1]: how much of the shared expert a token gets."""

    def __init__(self, weights: Table, **factory_kwargs):
        super().__init__()
        create_parameters(self, weights, None, **factory_kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight).sigmoid()
