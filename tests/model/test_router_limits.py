# SPDX-License-Identifier: Apache-2.0
"""Routers exactly at a limit, in rare states, and with inputs that are equal elsewhere: a single token, loads of zero, a
mask with weights, layers with the same inputs, several steps one after another.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megatron.model.command_line import parse_any
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.experts import routing
from megatron.model.kinds.experts.expert_rules import RULES
from megatron.model.kinds.experts.layer import MoELayer
from megatron.model.kinds.experts.parts import balance_loss, capacity
from megatron.model.kinds.experts.replay import RoutingRecord
from megatron.model.kinds.experts.routing import ExpertChoice, best, places_of
from megatron.model.kinds.experts.weights import experts
from megatron.mpu.mesh import Mesh
from megatron.settings.rules import record
from megatron.training.expert_loads import ENOUGH, idle_experts
from tests.model.test_router import B, E, H, S, inputs, model, router, tensor
from tests.settings.test_expert_settings import LINE, MIXED

LOSSES = dict(moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"])
BALANCE = ("load balancing loss", "seq load balancing loss", "global load balancing loss")


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_the_balance_of_few_tokens(tokens):
    """E sum f p, with f the shares of so few tokens: of one token they are 1 and 0."""
    loads = torch.tensor([tokens, 0, 0, 0])
    scores = tensor([[0.7, 0.1, 0.1, 0.1]])
    wanted = 4 * 0.7 if tokens else 0.0
    torch.testing.assert_close(balance_loss(scores, loads), tensor([wanted]))


@pytest.mark.parametrize("counted", [None, torch.tensor([True, False, True, True, True, True])])
def test_columns_and_rows_of_sinkhorn_are_even_whatever_the_logits(counted):
    """Also where dozens of passes are needed, and with padding. Each token that counts has 1/n, each expert 1/E of all."""
    logits = tensor([[9.0, 0, 0], [9, 1, 0], [9, 0, 1], [8, 0, 0], [8, 2, 0], [7, 0, 3]])
    scores = routing.sinkhorn(logits, counted, tolerance=1e-7)
    own = scores if counted is None else scores[counted]
    torch.testing.assert_close(own.sum(0), torch.full((3,), 1 / 3), rtol=1e-3, atol=0)
    torch.testing.assert_close(own.sum(1), torch.full((len(own),), 1 / len(own)), rtol=1e-3, atol=0)


def test_sinkhorn_goes_on_until_columns_stay_as_they_are():
    """Here for more than a hundred passes; a plain loop without an end to them is the reference."""
    logits = tensor([[12.0, 0, 0], [0, 12, 6], [0, 6, 12], [11, 0, 1], [6, 12, 0], [0, 12, 12]]) / 2
    cost, columns = logits.double().exp(), torch.ones(3, dtype=torch.float64)
    for passes in range(10_000):  # noqa: B007
        rows = 1 / (6 * (columns * cost).sum(1))
        before, columns = columns, 1 / (3 * (rows[:, None] * cost).sum(0))
        if (columns - before).abs().mean() < 1e-6:
            break
    assert 40 < passes < routing.MOST_PASSES
    found = routing.sinkhorn(logits, tolerance=1e-6)
    torch.testing.assert_close(found.double(), columns * cost * rows[:, None], rtol=1e-4, atol=1e-8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_ranks_that_share_rows_unevenly_give_all_of_them_back(rows, run_ranks):
    """Without sequence parallelism each rank of tp takes its part of the rows, and the last one of fewer."""

    def layer(mesh: Mesh) -> torch.Tensor:
        m = model(moe_ffn_hidden_size=8, num_layers=1)
        made = MoELayer(experts(m, False), LayerSetup(GPTFacts(m, 1), 0, mesh, seed=5))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.copy_(whole)
        x = torch.randn(rows, B, H, generator=torch.Generator().manual_seed(1))
        context = ForwardContext(samples=torch.arange(B))
        return made(x, context)[0].detach()

    alone = layer(Mesh(0))
    for found in run_ranks(2, lambda rank: layer(Mesh(rank, tp=2, etp=1))):
        torch.testing.assert_close(found, alone)


def test_no_expert_takes_more_than_all_tokens_nor_less_than_its_share():
    for n, k, number in itertools.product((1, 5, 8), (1, 2), (2, 3)):
        assert capacity(n, k, number, 100.0) == n
        assert n * k <= number * capacity(n, k, number, 1.0) < n * k + number


@pytest.mark.parametrize("weight", [1e-3, 0.25, 1.0])
def test_tokens_with_any_weight_above_0_count_as_one(weight):
    """In loads and balance; in the sums of losses with their weight."""
    mask = torch.ones(S, B)
    mask[3:] = 0
    whole, part = router(**LOSSES), router(**LOSSES)
    expected, found = whole(inputs(), mask), part(inputs(), mask * weight)
    assert torch.equal(whole.load, part.load) and part.load.sum() == 3 * B * 2
    for name in BALANCE:
        torch.testing.assert_close(found.sums[name], weight * expected.sums[name])


def test_loads_of_the_global_loss_begin_anew_after_a_step():
    made, name = router(**LOSSES), BALANCE[2]
    first = made(inputs(1)).sums[name]
    both = made(inputs(2)).sums[name]  # of both micro-batches
    assert made.scored_load.sum() == made.load.sum() == 2 * S * B * 2
    made.update_buffers()
    assert not made.scored_load.any() and not made.load.any()
    torch.testing.assert_close(made(inputs(1)).sums[name], first)
    assert not torch.allclose(made(inputs(2)).sums[name], first) and both is not None


@pytest.mark.parametrize(
    "chosen", [dict(moe_router_num_groups=2, moe_router_group_topk=1), dict(moe_router_enable_expert_bias=True)]
)
def test_losses_count_the_best_scores_whatever_was_chosen(chosen):
    """Without groups and bias, as Megatron-Core counts them."""
    settings = LOSSES | dict(moe_router_score_function="sigmoid", moe_router_topk=2)
    plain, other = router(**settings), router(**settings, **chosen)
    if "moe_router_enable_expert_bias" in chosen:
        other.expert_bias.copy_(tensor([9.0, 9.0, 0.0, 0.0]))
    expected, found = plain(inputs()), other(inputs())
    assert not torch.equal(expected.experts, found.experts)
    for name in BALANCE:
        torch.testing.assert_close(found.sums[name], expected.sums[name])


@pytest.mark.parametrize("site", ["router jitter", "forced router"])
def test_noise_of_layers_sites_samples_and_seeds_is_not_each_others(site):
    like, seen = torch.empty(S, 1, E), {}
    for layer, seed, sample in itertools.product((0, 1), (5, 6), (0, 1)):
        made = router()
        made.layer, made.seed = layer, seed
        seen[layer, seed, sample] = made.uniform(site, like, torch.tensor([sample]))
    for one, other in itertools.combinations(seen, 2):
        assert not torch.equal(seen[one], seen[other]), (one, other)
    assert not torch.equal(made.uniform("another", like, torch.tensor([1])), seen[1, 6, 1])


def test_of_equal_weights_the_first_tokens_have_the_first_places():
    """Of many, for which a sort that is not stable takes another order."""
    experts = torch.zeros(3000, 1, dtype=torch.int64)
    weights = torch.full((3000, 1), 0.5)
    weights[7] = 0.6
    places = places_of(experts, 2, weights).flatten().tolist()
    assert places == [*range(1, 8), 0, *range(8, 3000)]


def test_a_group_is_as_good_as_its_best_k_over_groups():
    """Here its best two of three: a group whose three are larger together is not chosen."""
    rule = ExpertChoice(6, topk=2, num_groups=2, group_topk=1)
    scores = tensor([[3.0, 3.0, 0.0, 2.5, 2.5, 2.5], [1.0, 1.0, 1.0, 1.5, 0.0, 0.9]])
    assert best(scores, rule).sort(-1).values.tolist() == [[0, 1], [3, 5]]


RULED = [  # at the limit, and just above it
    ("--moe-router-topk {}", 8, 9),
    ("--moe-router-num-groups 4 --moe-router-group-topk {} --moe-router-topk 4", 4, 5),
    ("--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk {}", 4, 6),
]


@pytest.mark.parametrize("flags, most, more", RULED)
def test_settings_exactly_at_a_limit_are_taken(flags, most, more):
    """Of all rules of experts, those that one more breaks do not hold yet."""
    broken = {}
    for value in (most, more):
        config = parse_any(f"{LINE} {MIXED} {flags.format(value)}".split(), recipe=pretrain_gpt.recipe())
        settings = record(config, 1)
        broken[value] = [rule.message(settings) for rule in RULES if rule.broken(settings)]
    assert broken[most] == [] and len(broken[more]) == 1, broken


def test_a_note_on_idle_experts_from_enough_tokens_on():
    of = lambda mean: idle_experts("blocks.1", [0, 2 * mean], 7)
    assert of(ENOUGH) and of(ENOUGH + 1) and not of(ENOUGH - 1)
    assert not idle_experts("blocks.1", [1, 2 * ENOUGH], 7)


def test_the_same_experts_in_another_order_are_no_other_choice():
    samples, router = torch.arange(1), SimpleNamespace(layer=0, tp=Mesh().tp, cp=Mesh().cp)
    given = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    replay = RoutingRecord({(0, 0): given})
    own = torch.tensor([[1, 0], [2, 3], [1, 3], [2, 1]])
    assert torch.equal(replay.take(router, samples, own), given) and (replay.changed, replay.seen) == (2, 4)
    assert torch.equal(replay.choices[0, 0].long(), own)
