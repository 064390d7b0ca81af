# SPDX-License-Identifier: Apache-2.0
"""The router of a layer with experts: which experts each token goes to, with which weights, and the losses that balance
them. A recipe may bring a subclass (`parts.ExpertParts`), which overrides `logits`, `choose` or both, and `weights` if it
has others.

Legend: s' tokens of this rank in each sequence (its part along cp and tp), b micro-batch, n = s' b, h hidden, E experts,
k experts of a token.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import nn

from megatron.model.kinds.experts.dispatch import Counts
from megatron.model.kinds.experts.parts import DROPPED, ENTROPY, ROUTER_Z_LOSS, capacity, ways_of
from megatron.model.kinds.experts.routing import (
    choice_of,
    choose,
    count_experts,
    entropy,
    moved_bias,
    normalized_scores,
    places_of,
    router_z_loss,
    sinkhorn,
    weights_of,
)
from megatron.model.kinds.experts.weights import router
from megatron.model.weights import Table
from megatron.mpu import collectives, mappings
from megatron.mpu.context_parallel import own_rows
from megatron.mpu.layers import LinearOptions, create_parameters, linear
from megatron.mpu.linear_product import LinearProduct
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.random import random_words, seed_of
from megatron.settings.schema import Model

DTYPES = dict(fp32=torch.float32, fp64=torch.float64)


@dataclass
class Memo:
    """What a second run of a layer takes from the first: it chooses and counts nothing again.

    experts: [n, k] before drops. kept: [n, k] bool; None: all. loads: name of a balancing loss -> [E] or [b, E]
    counts: of the rows that the layer dispatches, which sets them; None: not yet, or padded
    """

    experts: torch.Tensor
    kept: Optional[torch.Tensor]
    loads: dict[str, torch.Tensor]
    counts: Optional[Counts] = None


class Routing(NamedTuple):
    """The experts of a rank's tokens.

    weights: [n, k] factors of what the experts return, fp32 or fp64; 0 for a pair of token and expert that is dropped
    experts: [n, k] int64; E marks such a pair
    sums:    fp32 scalars: sums over the tokens that count, divided by the number of layers with experts
    memo:    for recomputation
    """

    weights: torch.Tensor
    experts: torch.Tensor
    sums: dict[str, torch.Tensor]
    memo: Memo


class Router(nn.Module):
    """See `forward`.

    table:   of `weight` [E, h], and of the buffers `load` [E], the tokens of each expert in this step, and if the model has
             them `expert_bias` [E] and those of its ways to balance
    replay:  a `replay.RoutingRecord`, which records the choices or replaces them; None in normal runs
    last_load: [E], the loads of the last step over all ranks
    """

    replay = last_load = None
    product: Optional[LinearProduct] = None  # of sums of one order; set by `ordered.attach_ordered`
    routes_rows = True  # those of this rank of tp, as of cp

    weights = staticmethod(router)  # (settings) -> the table; needs no torch

    def __init__(self, model: Model, layer: int, table: Table, mesh: Mesh, *, seed: int, dtype, device):
        super().__init__()
        create_parameters(self, table, None, dtype=dtype, device=device)
        self.model, self.layer, self.seed, self.choice = model, layer, seed, choice_of(model)
        self.cp, self.tp = mesh.cp, mesh.tp
        self.dtype, self.layers = DTYPES[model.moe_router_dtype], len(model.expert_layers)
        self.ways = ways_of(model)
        self.stage = mesh.stage() if any(way.over_stage for way in self.ways.values()) else None

    def forward(
        self,
        x: torch.Tensor,
        mask: Optional[torch.Tensor] = None,
        samples: Optional[torch.Tensor] = None,
        memo: Optional[Memo] = None,
    ) -> Routing:
        """The routing of x [s', b, h].

        mask: [s', b] weights of tokens in the loss. Tokens with 0 are routed, but change no load, loss or statistic.
        None: all count. samples: [b], as for `Dropout`. memo: of the first run, in recomputation
        """
        counted = None if mask is None else mask > 0
        logits = self.logits(x, samples)  # [s', b, E]
        scores = normalized_scores(logits, self.choice.score_function)
        if memo is None:
            memo = self._decide(logits, scores, counted, samples)
        experts, weights = memo.experts, weights_of(logits.flatten(0, 1), memo.experts, self.choice)
        if memo.kept is not None:
            experts, weights = experts.masked_fill(~memo.kept, self.choice.num_experts), weights * memo.kept
        return Routing(weights, experts, self._sums(logits, scores, mask, memo), memo)

    def update_buffers(self) -> None:
        """Once a step, when the loads are those of all ranks: move the expert bias, and count from 0 again."""
        self.last_load = self.load.clone()
        if "expert_bias" in self.placements:
            moved = moved_bias(self.expert_bias, self.load, self.model.moe_router_bias_update_rate)
            self.expert_bias.copy_(moved)
        self.load.zero_()
        for way in self.ways.values():
            way.update(self)

    # ---- logits ------------------------------------------------------------------------------------------------------

    def logits(self, x: torch.Tensor, samples: Optional[torch.Tensor]) -> torch.Tensor:
        """[s', b, E] in fp32 or fp64, whatever the format of the run."""
        x, eps = x.to(self.dtype), self.model.moe_input_jitter_eps
        if eps and self.training and not x.is_meta:
            x = x * (1 + eps * self.uniform("router jitter", x, samples))
        with torch._C.DisableTorchFunction() if torch._C._is_torch_function_mode_enabled() else nullcontext():
            # Without `Autocast`, which computes products in half precision.
            bias = None if self.bias is None else self.bias.to(self.dtype)
            logits = linear(x, self.weight.to(self.dtype), bias, LinearOptions(product=self.product))
        if not self.model.moe_router_force_load_balancing or x.is_meta:
            return logits
        # Uniform numbers choose experts like any other; the gradient is that of the logits.
        return self.uniform("forced router", logits, samples) + (logits - logits.detach())

    def uniform(self, site: str, like: torch.Tensor, samples: Optional[torch.Tensor]) -> torch.Tensor:
        """Numbers in (-1, 1) for [s', b, ...], which depend on the sample and the position in it, not on the layout."""
        rows, batch, *width = like.shape
        numbers = [0] * batch if samples is None else samples.tolist()
        seeds = [seed_of(self.seed, self.layer, site, number) for number in numbers]
        words = random_words((rows * self.tp.size * self.cp.size, *width), seeds, like.device)
        words = own_rows(words, self.cp, 1).chunk(self.tp.size, 1)[self.tp.rank]  # [b, s', ...]
        return (words.transpose(0, 1).to(like.dtype) + 0.5) / 32768

    # ---- choices -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _decide(self, logits, scores, counted: Optional[torch.Tensor], samples) -> Memo:
        """Choose experts, drop those above the capacity, and count loads."""
        flat, rows = logits.flatten(0, 1), None if counted is None else counted.flatten()
        experts = self.choose(logits, counted, samples).flatten(0, -2)
        if self.replay:
            experts = self.replay.take(self, samples, experts)
        if self.training:
            self.load += count_experts(experts, self.choice.num_experts, rows)
        # Balancing losses count the experts with the highest scores, without bias and groups.
        plain = experts
        if "expert_bias" in self.placements or self.choice.num_groups:
            plain = scores.topk(self.choice.topk, -1).indices
        loads = self._loads(plain.view(*logits.shape[:2], -1), counted)
        return Memo(experts, self._kept(experts, flat, rows), loads)

    def choose(
        self, logits: torch.Tensor, counted: Optional[torch.Tensor], samples: Optional[torch.Tensor]
    ) -> torch.Tensor:
        """The experts, [s', b, k] or [n, k], for logits [s', b, E].

        counted: [s', b] bool, the tokens that count; None: all. samples: [b], for `uniform`
        """
        flat, rows = logits.flatten(0, 1), None if counted is None else counted.flatten()
        for way in self.ways.values():
            if way.chooses:
                return way.choose(self, flat, rows)
        return choose(flat, self.choice, self.expert_bias if "expert_bias" in self.placements else None)

    def sinkhorn(self, logits: torch.Tensor, counted: Optional[torch.Tensor]) -> torch.Tensor:
        """See `routing.sinkhorn`."""
        return sinkhorn(logits, counted, self.total)

    def _kept(self, experts: torch.Tensor, flat: torch.Tensor, rows: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """Which pairs fit into the capacity of their expert; None: all."""
        factor = self.model.moe_expert_capacity_factor
        if factor is None:
            return None
        weights = weights_of(flat, experts, self.choice) if self.model.moe_token_drop_policy == "probs" else None
        places = places_of(experts, self.choice.num_experts, weights, rows)
        return places < capacity(len(experts), self.choice.topk, self.choice.num_experts, factor)

    def _loads(self, experts: torch.Tensor, counted: Optional[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The loads that each balancing loss counts, from experts [s', b, k]."""
        ways = {kind: way for kind, way in self.ways.items() if way.label}
        if not ways:
            return {}
        by_sequence = None if counted is None else counted.t()
        own = count_experts(experts.transpose(0, 1), self.choice.num_experts, by_sequence)  # [b, E]
        return {kind: way.loads(self, own) for kind, way in ways.items()}

    def total(self, x: torch.Tensor, axis: Optional[Axis] = None) -> torch.Tensor:
        """The sum over the ranks of `axis`, in place; default: over those that have other rows of the same sequences."""
        if axis is not None:
            return collectives.all_reduce(x, axis)
        return collectives.all_reduce(collectives.all_reduce(x, self.cp), self.tp)

    # ---- sums --------------------------------------------------------------------------------------------------------

    def _sums(self, logits, scores, mask: Optional[torch.Tensor], memo: Memo) -> dict[str, torch.Tensor]:
        values = {self.ways[kind].label: self.ways[kind].loss(scores, loads) for kind, loads in memo.loads.items()}
        if self.model.moe_z_loss_coeff:
            values[ROUTER_Z_LOSS] = router_z_loss(logits)
        if memo.kept is not None:
            values[DROPPED] = (~memo.kept).float().mean(-1).view(logits.shape[:2])
        values[ENTROPY] = entropy(scores.detach())
        return {name: self._sum(value.float(), mask) for name, value in values.items()}

    def _sum(self, values: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        """The sum of values [s', b] over the tokens that count, in the part of the sequences along cp."""
        total = (values if mask is None else values * mask).sum() / self.layers
        return mappings.reduce_from_tensor_model_parallel_region(total, self.tp)
