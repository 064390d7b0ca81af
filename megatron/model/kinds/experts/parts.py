# SPDX-License-Identifier: Apache-2.0
"""What layers with experts consist of: ways to balance loads, the sums that layers return, the capacity of experts, and
what a recipe may bring (`ExpertParts`). Needs no torch.

The balancing losses are those of Megatron-Core, as a value per token. With c_i the tokens of expert i among T tokens,
f_i = c_i / (k T) its share, and p_ti the score of token t for it, normalized over experts,

    aux loss = E sum_i f_i (1/T sum_t p_ti) = 1/T sum_t b_t,   b_t = E sum_i f_i p_ti

so the mean over tokens of b_t is the loss. It is 1 if loads are equal. Gradients flow through p only. The losses differ in
the tokens that c counts: those of the micro-batch (aux_loss, arXiv:2101.03961), of the token's sequence (seq_aux_loss,
arXiv:2405.04434), or of all ranks and the micro-batches of the step so far (global_aux_loss, arXiv:2501.11873).

Sums are means over layers: a layer divides its sum by the number of layers with experts. So the weight of a sum in the loss
is the coefficient times this number, and each layer's loss counts as much as Megatron-LM has it.

Legend: s sequence, b micro-batch, n = s b tokens of a rank, E experts, k experts of a token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.mpu.placement import Placement
from megatron.settings.schema import Model

ROUTER_Z_LOSS, DROPPED, ENTROPY = "router z loss", "dropped tokens", "routing entropy"


class Balancing:
    """A way to balance the loads of experts: a value of --moe-router-load-balancing-type. A subclass defines its methods;
    this class does nothing. `router` is the layer's `experts.router.Router`.

    label:      the name of its loss in logs; "": it has no loss
    chooses:    it chooses experts by itself, and no other way goes with it
    over_stage: `router.stage` is needed, the axis of all ranks with other tokens
    """

    label = ""
    chooses = over_stage = False

    def buffers(self, load: Placement) -> Mapping[str, Placement]:
        """More buffers of the router. load: the placement of numbers [E] of which ranks have parts."""
        return {}

    def choose(self, router, logits, counted):
        """The experts [n, k] for logits [n, E], if it `chooses`. counted: [n] bool, the tokens that count; None: all."""
        raise NotImplementedError

    def loads(self, router, own):
        """What `loss` compares with, from the tokens of each expert in this rank's part of each sequence, own [b, E]. It is
        computed in the first pass; recomputation repeats it.
        """
        return own

    def loss(self, scores, loads):
        """The loss of each token, [s, b], from scores [s, b, E], whose sum is 1, and `loads`."""
        return balance_loss(scores, loads)

    def update(self, router) -> None:
        """Called once a step, when the buffers are those of all ranks."""


def balance_loss(scores, loads):
    """b_t of each token, [s, b], for scores [s, b, E] and loads [b, E] or [E]."""
    shares = loads.to(scores.dtype) / loads.sum(-1, keepdim=True).clamp_min(1)
    return scores.shape[-1] * (shares * scores).sum(-1)


class OverMicroBatch(Balancing):
    """Counts the tokens of the micro-batch."""

    label = "load balancing loss"

    def loads(self, router, own):
        return router.total(own.clone()).sum(0)


class OverSequence(Balancing):
    """Counts the tokens of the token's own sequence."""

    label = "seq load balancing loss"

    def loads(self, router, own):
        return router.total(own.clone())


class OverStep(Balancing):
    """Counts the tokens of all ranks and of the micro-batches of the step so far."""

    label, over_stage = "global load balancing loss", True

    def buffers(self, load: Placement) -> Mapping[str, Placement]:
        return {"scored_load": load}

    def loads(self, router, own):
        if not router.training:
            return router.total(own.sum(0))
        router.scored_load += own.sum(0)  # of this rank in the step so far
        return router.total(router.scored_load.clone(), router.stage)

    def update(self, router) -> None:
        router.scored_load.zero_()


class Sinkhorn(Balancing):
    """Chooses by scores of which each expert gets as many as any other (`routing.sinkhorn`)."""

    chooses = True

    def choose(self, router, logits, counted):
        even = router.sinkhorn(logits, counted) if router.training else logits
        return even.topk(router.choice.topk, -1).indices


BALANCING: Mapping[str, Balancing] = {
    "aux_loss": OverMicroBatch(),
    "seq_aux_loss": OverSequence(),
    "global_aux_loss": OverStep(),
    "sinkhorn": Sinkhorn(),
    "none": Balancing(),
}


@dataclass(frozen=True)
class ExpertParts:
    """What a recipe brings for its layers with experts (`Recipe.experts`); None: as in every model.

    router:     a subclass of `experts.router.Router`
    dispatcher: a subclass of `experts.dispatch.Dispatcher`, or what makes one from the same arguments
    balancing:  its own ways to balance: name for --moe-router-load-balancing-type -> `Balancing`
    group:      a frozen dataclass of settings of its own, which become settings of the model: `router.model.NAME`
    """

    router: Any = None
    dispatcher: Any = None
    balancing: Mapping[str, Balancing] = field(default_factory=dict)
    group: Any = None


def parts_of(model: Model) -> ExpertParts:
    """What a model's recipe brings."""
    return model.own_experts or ExpertParts()


def known_ways(model: Model) -> dict[str, Balancing]:
    """All ways to balance that a model may choose."""
    return {**BALANCING, **parts_of(model).balancing}


def ways_of(model: Model) -> dict[str, Balancing]:
    """The ways in which a model's experts are balanced."""
    return {kind: known_ways(model)[kind] for kind, _ in model.balancing}


def expert_sums(model: Model) -> dict[str, float]:
    """Name of a sum -> its weight in the loss; 0: it is only logged. Empty for a model without experts."""
    if not model.mixture:
        return {}
    layers, ways = len(model.expert_layers), ways_of(model)
    weights = {ways[kind].label: layers * weight for kind, weight in model.balancing if ways[kind].label}
    if model.moe_z_loss_coeff:
        weights[ROUTER_Z_LOSS] = layers * model.moe_z_loss_coeff
    if model.moe_expert_capacity_factor is not None:
        weights[DROPPED] = 0.0
    return {**weights, ENTROPY: 0.0}


def expected_parts(model: Model, parts: int) -> float:
    """How many of `parts` equal parts of the experts have some of a token's, on average over random scores.

    With groups a token goes to each of the --moe-router-group-topk groups that it chooses, as it nearly always does: groups
    are chosen by their best scores.

    >>> from types import SimpleNamespace as Settings
    >>> plain = dict(num_experts=256, moe_router_topk=8, moe_router_num_groups=None, moe_router_group_topk=None)
    >>> groups = plain | dict(moe_router_num_groups=8, moe_router_group_topk=4)
    >>> [round(expected_parts(Settings(**own), parts), 2) for own in (plain, groups) for parts in (4, 8, 64)]
    [3.61, 5.29, 7.68, 3.14, 4.0, 7.61]
    """
    number, groups, chosen = model.num_experts, model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
    size, each, k = number // parts, number // groups, max(1, model.moe_router_topk // chosen)
    if size >= each:  # whole groups: is one of them chosen?
        missed = math.comb(groups - size // each, chosen) / math.comb(groups, chosen)
    else:  # a part of a group: is it chosen, and is one of its experts?
        missed = 1 - chosen / groups * (1 - math.comb(each - size, k) / math.comb(each, k))
    return parts * (1 - missed)


def capacity(n: int, k: int, experts: int, factor: float) -> int:
    """The most tokens that an expert takes from a rank with n tokens: its equal share, times a factor.

    >>> capacity(64, 2, 8, 1.25), capacity(4, 2, 2, 9.0)
    (20, 4)
    """
    return min(math.ceil(n * k / experts * factor), n)
