# SPDX-License-Identifier: Apache-2.0
"""Routers exactly at a limit, in rare states, and with inputs that are equal elsewhere: a single token, loads of zero, a
mask with weights, layers with the same inputs, several steps one after another.
"""

import contextlib
import itertools
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pretrain_gpt
from megatron.checkpoint.boxes import Box
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.expert_ranks import expert_parallel
from megatron.model.command_line import parse_any
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.experts import grouped, hf, routing, upcycling
from megatron.model.kinds.experts.dispatch import Dispatcher, PaddedDispatcher
from megatron.model.kinds.experts.expert_rules import RULES
from megatron.model.kinds.experts.kind import expert_ops
from megatron.model.kinds.experts.layer import MoELayer, _Weighted
from megatron.model.kinds.experts.megatron import _ours as their_run
from megatron.model.kinds.experts.parts import balance_loss, capacity, expected_parts, expert_sums
from megatron.model.kinds.experts.replay import RoutingRecord
from megatron.model.kinds.experts.routing import ExpertChoice, best, choose, places_of, weights_of
from megatron.model.kinds.experts.weights import experts
from megatron.model.layer_ops import Kernel, Product, RankSetup, Residual
from megatron.mpu.mesh import Mesh
from megatron.settings.rules import record
from megatron.training.step_notes import ENOUGH, idle_experts
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


def layer_of(mesh: Mesh, sequence_parallel: bool = False, **settings) -> MoELayer:
    """A rank's part of a layer, whose weights depend on their names."""
    m = model(moe_ffn_hidden_size=8, num_layers=1, **settings)
    setup = LayerSetup(GPTFacts(m, 1), 0, mesh, seed=5, sequence_parallel=sequence_parallel)
    made = MoELayer(experts(m, sequence_parallel), setup)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            whole = torch.randn(placed_of(made, name).shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.copy_(whole[box_of(made, name, parameter, mesh).slices()])
        made.router.load.zero_()
    return made


def placed_of(made: MoELayer, name: str):
    return made.get_submodule(name.rpartition(".")[0]).placements[name.rpartition(".")[2]]


def box_of(made: MoELayer, name: str, parameter: torch.Tensor, mesh: Mesh) -> Box:
    return Box(*placed_of(made, name).box(tuple(parameter.shape), mesh.coordinates))


def layer(mesh: Mesh, rows: int, **settings) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """Output, sums and loads of a layer with `rows` rows on each rank of tp, which take parts of them."""
    made = layer_of(mesh, **settings)
    x = torch.randn(rows, B, H, generator=torch.Generator().manual_seed(1))
    y, sums = made(x, ForwardContext(samples=torch.arange(B)))
    return y.detach(), {name: value.item() for name, value in sums.items()}, made.router.load


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_ranks_that_share_rows_unevenly_give_all_of_them_back(rows, run_ranks):
    """Without sequence parallelism each rank of tp takes its part of the rows, and the last one of fewer. Rows that are
    added count nowhere.
    """
    y, sums, load = layer(Mesh(0), rows)
    ranks = run_ranks(2, lambda rank: layer(Mesh(rank, tp=2, etp=1), rows))
    for found, of_rank, _ in ranks:
        torch.testing.assert_close(found, y)
        assert of_rank == pytest.approx(sums)
    assert torch.equal(ranks[0][2] + ranks[1][2], load)


ROWS = torch.randn(4, B, H, generator=torch.Generator().manual_seed(1))
TIMES = torch.randn(4, B, H, generator=torch.Generator().manual_seed(2))
SHARED = dict(moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True, moe_z_loss_coeff=1.0)


def gradients(mesh: Mesh, sequence_parallel: bool, **settings):
    """(outputs, gradient of the inputs, name -> (box of a rank's part, its gradient, whether ranks add theirs))."""
    made = layer_of(mesh, sequence_parallel, **settings)
    own = lambda x: x.chunk(mesh.tp.size)[mesh.tp.rank] if sequence_parallel else x
    x = own(ROWS).clone().requires_grad_()
    y, sums = made(x, ForwardContext(samples=torch.arange(B)))
    ((y * own(TIMES)).sum() + sums["router z loss"]).backward()
    found = {}
    for name, one in made.named_parameters():
        found[name] = box_of(made, name, one, mesh), one.grad, bool(placed_of(made, name).partial)
    return y.detach(), x.grad, found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", [dict(tp=2), dict(tp=2, etp=1, ep=2)], ids=["etp2", "ep2"])
def test_gradients_of_two_ranks_are_those_of_one(sizes, sequence_parallel, run_ranks):
    """Of parts, of copies that are equal, and of copies whose ranks see other tokens, which add up."""
    y, d_x, wanted = gradients(Mesh(0), False, **SHARED)
    ranks = run_ranks(2, lambda rank: gradients(Mesh(rank, **sizes), sequence_parallel, **SHARED))
    join = (lambda parts: torch.cat(parts)) if sequence_parallel else lambda parts: parts[0]
    torch.testing.assert_close(join([one[0] for one in ranks]), y)
    torch.testing.assert_close(join([one[1] for one in ranks]), d_x, rtol=1e-4, atol=1e-5)
    for name, (_, whole, _) in wanted.items():
        total = torch.zeros_like(whole)
        (first, one, added), (second, other, _) = (found[name] for *_, found in ranks)
        total[first.slices()] += one
        if added or first != second:
            total[second.slices()] += other
        else:
            torch.testing.assert_close(one, other, msg=name)
        torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_the_activation_times_weights_has_the_gradients_of_both():
    draw = torch.Generator().manual_seed(3)
    x, weights = (torch.randn(5, n, dtype=torch.float64, generator=draw).requires_grad_() for n in (6, 1))
    assert torch.autograd.gradcheck(lambda *given: _Weighted.apply(*given, torch.tanh), (x, weights))


@pytest.mark.parametrize("scaling", [None, 2.5])
@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("scores, k", [("softmax", 1), ("softmax", 3), ("sigmoid", 1), ("sigmoid", 3)])
def test_weights_of_the_chosen_are_those_of_their_formula(scores, k, pre, scaling):
    """A single sigmoid is its own weight; one of several is divided by their sum."""
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    chosen = logits.topk(k, -1).indices
    rule = ExpertChoice(6, k, scores, pre, topk_scaling_factor=scaling)
    for row, (own, experts_of) in enumerate(zip(logits.tolist(), chosen.tolist(), strict=True)):
        of = [math.exp(own[e]) if scores == "softmax" else 1 / (1 + math.exp(-own[e])) for e in experts_of]
        whole = sum(map(math.exp, own)) if pre else sum(of)
        whole = whole if scores == "softmax" else sum(of) if k > 1 else 1.0
        wanted = [one / whole * (scaling or 1.0) for one in of]
        assert weights_of(logits, chosen, rule)[row].tolist() == pytest.approx(wanted)


def test_recomputation_takes_the_counts_of_the_first_run():
    """It waits for no message again."""
    made = layer_of(Mesh(0))
    routed = made.router(ROWS, None, torch.arange(B))
    counts = routed.memo.counts = made.experts.start(routed).counts
    assert made.experts.start(routed).counts is counts
    context = ForwardContext(samples=torch.arange(B))
    made(ROWS, context)
    first = context.routings[0].counts
    made(ROWS, context)
    assert context.routings[0].counts is first is not None


CHOICES = [(4, 2, 1, 1), (6, 3, 1, 1), (6, 2, 3, 2), (8, 4, 2, 2), (8, 2, 4, 1)]


@pytest.mark.parametrize("number, k, groups, chosen", CHOICES)
def test_parts_that_a_token_reaches_are_those_of_all_choices(number, k, groups, chosen):
    """The mean over all sets of groups, and of k / groups of each group's experts."""
    each, settings = number // groups, SimpleNamespace(num_experts=number, moe_router_topk=k)
    settings.moe_router_num_groups, settings.moe_router_group_topk = (groups, chosen) if groups > 1 else (None, None)
    sets = []
    for own in itertools.combinations(range(groups), chosen):
        of_group = [itertools.combinations(range(g * each, (g + 1) * each), k // chosen) for g in own]
        sets += [sum(parts, ()) for parts in itertools.product(*of_group)]
    for parts in (n for n in range(1, number + 1) if number % n == 0 and (groups % n == 0 or n % groups == 0)):
        wanted = sum(len({expert // (number // parts) for expert in one}) for one in sets) / len(sets)
        assert expected_parts(settings, parts) == pytest.approx(wanted)


@pytest.mark.parametrize("sizes", [dict(), dict(tp=2), dict(tp=2, etp=1)], ids=["1", "etp2", "tp2"])
def test_padding_to_a_capacity_changes_nothing(sizes, run_ranks):
    """Where experts do not divide the pairs of a rank: 9 or 3 tokens to 2 of 4, half of their share or the whole."""
    both = lambda rank: [
        [layer(Mesh(rank, **sizes), rows, moe_expert_capacity_factor=factor, moe_pad_expert_input_to_capacity=padded)[0]
         for rows in (1, 3, 5) for factor in (0.5, 1.0)]
        for padded in (False, True)
    ]  # fmt: skip
    for plain, padded in run_ranks(2, both) if sizes else [both(0)]:
        for one, other in zip(plain, padded, strict=True):
            torch.testing.assert_close(other, one)


def test_no_expert_takes_more_than_all_tokens_nor_less_than_its_share():
    """The share need not be whole: it is multiplied before it is rounded, as in Megatron-Core."""
    for n, k, number in itertools.product((1, 5, 8), (1, 2), (2, 3)):
        assert capacity(n, k, number, 100.0) == n
        assert n * k <= number * capacity(n, k, number, 1.0) < n * k + number
        for times in (0.5, 0.75, 1.25, 1.5):
            assert capacity(n, k, number, times) == min(n, math.ceil(Fraction(n * k, number) * Fraction(times)))


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


def test_an_evaluation_within_a_step_counts_its_own_tokens_alone():
    """And leaves the loads of the step as they are."""
    made, name = router(**LOSSES), BALANCE[2]
    first = made(inputs(1)).sums[name]
    loads = made.scored_load.clone()
    found = made.eval()(inputs(2)).sums[name]
    torch.testing.assert_close(found, router(**LOSSES)(inputs(2)).sums[BALANCE[0]])
    assert torch.equal(made.scored_load, loads) and torch.equal(made.load, loads) and not torch.equal(found, first)


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


def test_random_choices_are_not_those_of_the_jitter():
    """Of as many numbers: with the identity as weight, logits are 1 + eps times the one, or the other."""
    samples, one = torch.tensor([3]), torch.ones(S, 1, E)
    found = []
    for settings in (dict(moe_input_jitter_eps=0.5), dict(moe_router_force_load_balancing=True)):
        made = router(hidden_size=E, **settings)
        made.weight.data.copy_(torch.eye(E))
        found.append(made.logits(one, samples).detach())
    jitter, choices = (found[0] - 1) / 0.5, found[1]
    assert jitter.abs().max() > 0.5 and choices.abs().max() > 0.5
    assert (jitter - choices).abs().mean() > 0.1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_places_of_many_are_those_of_a_plain_sort(weighted, padded):
    """Of equal weights the first tokens have the first places, and padding the last: of many, for which a sort that is not
    stable takes another order.
    """
    draw = torch.Generator().manual_seed(3)
    experts = torch.rand(3000, 3, generator=draw).topk(2).indices
    weights = torch.randint(1, 4, (3000, 2), generator=draw) / 4
    counted = torch.rand(3000, generator=draw) < 0.7
    found = places_of(experts, 3, weights if weighted else None, counted if padded else None).flatten().tolist()
    last = [bool(padded and not one) for one in counted.tolist()]
    kept, chosen = weights.flatten().tolist(), experts.flatten().tolist()
    order = sorted(range(6000), key=lambda n: (last[n // 2], -kept[n] if weighted else 0, n))
    for expert in range(3):
        assert [found[n] for n in order if chosen[n] == expert] == list(range(chosen.count(expert)))


@pytest.mark.parametrize("logit", [-200.0, -46.0, -40.0, 0.0])
@pytest.mark.parametrize("topk, scaling", [(2, None), (3, 2.5)])
def test_weights_of_sigmoids_however_small(logit, topk, scaling):
    """Megatron-Core adds 1e-20 to their sum: here in fp64, where none becomes 0 before it does in fp32."""
    logits = tensor([[logit, logit + 1, logit + 2, logit - 1]])
    rule = ExpertChoice(4, topk, "sigmoid", topk_scaling_factor=scaling)
    chosen = choose(logits, rule)
    scores = logits.double().sigmoid()
    wanted = scores.gather(1, chosen) / (scores.gather(1, chosen).sum() + 1e-20) * (scaling or 1.0)
    torch.testing.assert_close(weights_of(logits, chosen, rule), wanted.float(), rtol=1e-5, atol=1e-30)
    found = routing.normalized_scores(logits, "sigmoid")
    torch.testing.assert_close(found, (scores / (scores.sum() + 1e-20)).float(), rtol=1e-5, atol=1e-30)


def test_a_group_is_as_good_as_its_best_k_over_groups():
    """Here its best two of three: a group whose three are larger together is not chosen."""
    rule = ExpertChoice(6, topk=2, num_groups=2, group_topk=1)
    scores = tensor([[3.0, 3.0, 0.0, 2.5, 2.5, 2.5], [1.0, 1.0, 1.0, 1.5, 0.0, 0.9]])
    assert best(scores, rule).sort(-1).values.tolist() == [[0, 1], [3, 5]]


@pytest.mark.parametrize("k, groups, chosen, of_score", list(itertools.product((2, 4), (2, 4), (1, 2), (None, 1, 2))))
def test_groups_are_chosen_by_as_many_scores_as_was_said(k, groups, chosen, of_score):
    """Else by the best k / chosen of each group; token by token, with scores that differ, some below 0."""
    members = 8 // groups
    if k > chosen * members:
        return
    scores = torch.randn(20, 8, generator=torch.Generator().manual_seed(4))
    rule = ExpertChoice(8, k, "sigmoid", num_groups=groups, group_topk=chosen, group_score_topk=of_score)
    for row, found in zip(scores.tolist(), best(scores, rule).tolist(), strict=True):
        of_group = [row[n * members : (n + 1) * members] for n in range(groups)]
        sums = [sum(sorted(own, reverse=True)[: of_score or k // chosen]) for own in of_group]
        left = sorted(range(groups), key=lambda n: -sums[n])[:chosen]
        assert found == sorted((e for e in range(8) if e // members in left), key=lambda e: -row[e])[:k]


RULED = [  # at the limit, and just above it
    ("--moe-router-topk {}", 8, 9),
    ("--moe-router-num-groups 4 --moe-router-group-topk {} --moe-router-topk 4", 4, 5),
    ("--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk {}", 4, 6),
    ("--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk {}", 2, 3),
    ("--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk 1 --moe-router-topk {}", 4, 5),
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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_a_bias_moves_by_the_exact_mean_of_loads(loads):
    """Which need not be whole."""
    mean = Fraction(sum(loads), len(loads))
    wanted = [1.0 + 0.5 * ((mean > load) - (mean < load)) for load in loads]
    assert routing.moved_bias(torch.ones(len(loads)), torch.tensor(loads), 0.5).tolist() == wanted


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", range(1, 8))
def test_rows_of_zeros_are_added_up_to_the_next_multiple(rows, ranks):
    x = torch.randn(rows, 2, 3)
    found = MoELayer._even(SimpleNamespace(tp=SimpleNamespace(size=ranks)), x)
    assert len(found) == next(n for n in range(rows, 99) if n % ranks == 0)
    assert torch.equal(found[:rows], x) and not found[rows:].any()
    made = SimpleNamespace(tp=SimpleNamespace(size=ranks, rank=ranks - 1), cut=True)
    made._even = lambda x: MoELayer._even(made, x)
    mask = MoELayer._own_mask(made, x, None)  # of the last rank, which has the added rows
    each = len(found) // ranks
    wanted = [float(row < rows) for row in range((ranks - 1) * each, ranks * each)]
    assert mask is None or mask[:, 0].tolist() == wanted
    assert (mask is None) == (rows % ranks == 0 or ranks == 1)


def test_sums_of_a_mixture_and_their_weights_in_the_loss():
    """Each is a mean over the layers with experts, so its weight is the coefficient times their number."""
    m = model(num_layers=4, moe_layer_freq="[0,1,1,1]", moe_z_loss_coeff=0.5, moe_expert_capacity_factor=1.0)
    m = replace(m, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"], moe_aux_loss_coeff=[0.25, 0.125])
    assert expert_sums(m) == {
        "load balancing loss": 0.75,
        "seq load balancing loss": 0.375,
        "router z loss": 1.5,
        "dropped tokens": 0.0,
        "routing entropy": 0.0,
    }


@pytest.mark.parametrize("scaling", [None, 2.5])
@pytest.mark.parametrize("g", [1, 2, 4])
def test_segments_of_an_mlp_are_the_mlp(g, scaling):
    """k / g groups of all segments, whose weights add up to 1: by a plain sum over the chosen experts."""
    draw, f, h, k = torch.Generator().manual_seed(1), 8, 3, 2 * g
    up, down, bias, offset = (torch.randn(*shape, generator=draw) for shape in ((f, h), (h, f), (h,), (f,)))
    m = model(ffn_hidden_size=f, moe_ffn_hidden_size=f // g, num_experts=4 * g, moe_router_topk=k)
    m = replace(m, moe_router_topk_scaling_factor=scaling)
    of = lambda name, x: upcycling.experts_of(f"blocks.0.mlp.experts.{name}", x, m, 0, 4 * g)
    made = [
        of(name, x) for name, x in (("up.weight", up), ("up.bias", offset), ("down.weight", down), ("down.bias", bias))
    ]
    x, wanted = torch.randn(h, generator=draw), torch.zeros(h)
    for expert in range(k):
        own_up, own_offset, own_down, own_bias = (one[expert] for one in made)
        wanted += (scaling or 1.0) / k * (own_down @ torch.tanh(own_up @ x + own_offset) + own_bias)
    torch.testing.assert_close(wanted, down @ torch.tanh(up @ x + offset) + bias)
    part = upcycling.experts_of("blocks.0.mlp.experts.up.weight", up, m, 1, 2)
    assert torch.equal(part, made[0][1:3])


def dispatched(rank: int):
    """(rows of each expert of this rank, by the device and by the host; outputs if experts multiply by their numbers)."""
    draw = torch.Generator().manual_seed(7 + rank)
    experts_of, ep = torch.randint(0, 7, (6 + rank, 2), generator=draw), Mesh(rank, tp=2, etp=1, ep=2).ep
    x, weights = torch.ones(6 + rank, 3), (experts_of < 6).float()
    made = Dispatcher(experts_of, 6, ep, True)
    rows, own = made.dispatch(x, weights)
    first, filled = 3 * rank, made.rows.lengths
    numbers = torch.repeat_interleave(torch.arange(first, first + 3), torch.tensor(filled))[:, None]
    y = made.combine(rows * own * (numbers + 1))
    return experts_of, made.rows.counts.tolist(), filled, y


def test_rows_of_experts_are_counted_alike_on_the_device_and_the_host(run_ranks):
    """Of both ranks' tokens; pairs without an expert go nowhere."""
    both = run_ranks(2, dispatched)
    chosen = torch.cat([one[0].flatten() for one in both]).tolist()
    for rank, (experts_of, counts, lengths, y) in enumerate(both):
        assert counts == lengths and all(
            n >= chosen.count(e) for n, e in zip(counts, range(3 * rank, 3 * rank + 3), strict=True)
        )
        wanted = [sum(e + 1 for e in row if e < 6) for row in experts_of.tolist()]
        assert y.tolist() == [[float(one)] * 3 for one in wanted]


@pytest.mark.parametrize("tp, ep", list(itertools.product(range(1, 7), range(8))))
def test_experts_are_shared_by_a_part_of_the_ranks_of_tp(tp, ep):
    if ep and tp % ep == 0:
        assert expert_parallel(tp, ep) == dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=tp // ep)
    else:
        with pytest.raises(SettingsError, match=f"size {ep} does not divide the {tp} ranks"):
            expert_parallel(tp, ep)


@pytest.mark.parametrize("ep, number, capacity", [*itertools.product((1, 2, 4), (4, 8), (1, 3))])
def test_padded_experts_have_rows_from_each_rank(ep, number, capacity):
    """An expert of this rank gets as many from each one; slots without a pair are those of the row that is 0."""
    pairs = torch.tensor([[0, number - 1], [number, 1], [0, number]])  # number: dropped
    pairs = pairs if capacity > 1 else pairs[:2]
    sent = PaddedDispatcher(pairs, number, SimpleNamespace(size=ep), capacity)
    assert sent.rows.lengths == sent.rows.counts.tolist() == [ep * capacity] * (number // ep)
    assert sent.rows.total == number * capacity and sent.rows.even == ep * capacity
    slots = {}
    for at, expert in enumerate(pairs.flatten().tolist()):
        slots.setdefault(expert, []).append(at)
    free = [pairs.numel()] * capacity
    assert sent.order.tolist() == [at for n in range(number) for at in (slots.get(n, []) + free)[:capacity]]


@pytest.mark.parametrize("theirs, ours", [("fp64", "fp64"), ("fp32", None), ("bf16", None), (None, None)])
def test_routers_in_double_precision_stay_so(theirs, ours):
    args = dict(num_experts=4, moe_router_dtype=theirs, moe_router_load_balancing_type="none")
    assert their_run(args, 2).get("moe_router_dtype") == ours


@pytest.mark.parametrize("etp, good", [(None, True), (2, True), (1, False), (4, False)])
def test_experts_of_a_run_are_divided_like_other_layers(etp, good):
    args = dict(num_experts=4, tensor_model_parallel_size=2, expert_tensor_parallel_size=etp, moe_layer_freq=2)
    with contextlib.nullcontext() if good else pytest.raises(CheckpointError, match=f"over {etp} ranks .* over 2"):
        assert their_run(args | dict(moe_aux_loss_coeff=[0.5, 0.25]), 4)["moe_aux_loss_coeff"] == [0.5, 0.25]


@pytest.mark.parametrize("topk, scores", list(itertools.product((1, 2), ("softmax", "sigmoid"))))
def test_ways_that_choose_by_themselves_have_scores_of_their_own(topk, scores):
    """As in Megatron-Core: with Sinkhorn a sigmoid of one expert, or the softmax over all of several; no scaling."""
    words = dict(moe_router_topk=topk, moe_router_score_function=scores, moe_router_topk_scaling_factor=2.5)
    words |= dict(moe_router_num_groups=2, moe_router_group_topk=1, moe_router_group_score_topk=2)
    for pre in (False, True):
        own = model(**words, moe_router_pre_softmax=pre, moe_router_load_balancing_type=["none"])
        assert routing.choice_of(own) == ExpertChoice(E, topk, scores, pre, 2, 1, 2, 2.5)
        own = replace(own, moe_router_load_balancing_type=["sinkhorn"])
        kind = "sigmoid" if topk == 1 else "softmax"
        assert routing.choice_of(own) == ExpertChoice(E, topk, kind, True, 2, 1, 2, None)


@pytest.mark.parametrize("rows", range(5))
def test_few_rows_are_multiplied_among_as_many_as_sums_stay_the_same_for(rows, monkeypatch):
    """None and enough as they are."""
    monkeypatch.setattr(grouped, "SAME_ROWS", 3)
    seen, x, matrix = [], torch.randn(rows, 4), torch.randn(5, 4)
    product = lambda x, y: seen.append(x) or x @ y.t()
    torch.testing.assert_close(grouped._many_rows(product, x, matrix), x @ matrix.t())
    assert [len(one) for one in seen] == [rows if rows in (0, 3, 4) else 3] and torch.equal(seen[0][:rows], x)
    assert not seen[0][rows:].any()


@pytest.mark.parametrize("latent, element, tp", list(itertools.product((None, 8), (2, 4), (1, 2))))
def test_a_shared_expert_keeps_the_input_that_nobody_else_does(latent, element, tp):
    """A router in fp32 has the same tensor for its gradient, and so has a product to latents; on several ranks of tp these
    read a part of the rows. The rest is as wide as the expert: twice one of a width less one of twice the width.
    """
    setup = RankSetup(micro_batch_size=2, tp=tp, etp=tp, element=element)

    def kept(width) -> int:
        own = model(moe_latent_size=latent, moe_shared_expert_intermediate_size=width, moe_ffn_hidden_size=16)
        return sum(op.kept for op in expert_ops(Residual(own, setup, 32)) if isinstance(op, (Kernel, Product)))

    inputs = 2 * (kept(16) - kept(None)) - (kept(32) - kept(None))
    assert inputs == (0 if tp == 1 and (element == 4 or latent) else 32 * H * element)


@pytest.mark.parametrize("first, layers", [(0, 3), (2, 3), (3, 3), (4, 3)])
@pytest.mark.parametrize("kind", ["deepseek_v3", "dots1", "qwen3_moe", "mixtral"])
def test_a_family_whose_first_layers_are_dense_may_have_no_others(kind, first, layers):
    """Other families do not look at that entry."""
    words = hf.WORDS[kind]
    config = {words.number: 8, words.width: 16, "num_experts_per_tok": 2, "num_hidden_layers": layers}
    config |= dict(first_k_dense_replace=first, norm_topk_prob=True, topk_method="noaux_tc", scoring_func="sigmoid")
    found = hf.our_experts(kind, config)
    if words.first_dense and first >= layers:
        assert found == {}
    else:
        dense = first if words.first_dense else 0
        assert found["num_experts"] == 8 and found["moe_ffn_hidden_size"] == 16
        assert found["moe_layer_freq"] == (f"[0]*{dense}+[1]*{layers - dense}" if dense else "1")


def test_settings_of_experts_without_an_effect_are_those_of_a_dense_model():
    """All experts in one group, a scaling of 1, a softmax before sigmoids, losses, and the usual score of a group."""
    usual = dict(moe_router_topk=2, moe_router_num_groups=4, moe_router_group_topk=2)
    of = lambda **more: hf.effective_experts(model(**more, num_experts=8))
    changed = lambda **more: {name for name, value in of(**more).items() if value != of()[name]}
    assert hf.effective_experts(model(num_experts=None)) == hf.DENSE
    assert {name for name, value in of().items() if value != hf.DENSE[name]} == {"num_experts"}
    assert changed(moe_router_num_groups=2, moe_router_group_topk=2) == set()
    assert changed(**usual) == {"moe_router_num_groups", "moe_router_group_topk"}
    assert changed(**usual, moe_router_group_score_topk=1) == {"moe_router_num_groups", "moe_router_group_topk"}
    assert of(**usual, moe_router_group_score_topk=2)["moe_router_group_score_topk"] == 2
    assert changed(moe_router_topk_scaling_factor=1.0, moe_router_load_balancing_type=["aux_loss"]) == set()
    assert changed(moe_router_topk_scaling_factor=2.0) == {"moe_router_topk_scaling_factor"}
    assert changed(moe_router_pre_softmax=True) == {"moe_router_pre_softmax"}
    sigmoid = dict(moe_router_score_function="sigmoid")
    assert changed(**sigmoid, moe_router_pre_softmax=True) == set(sigmoid)
    assert changed(moe_router_load_balancing_type=["sinkhorn"]) == {"moe_router_load_balancing_type"}
    assert changed(moe_layer_freq="[1,1]") == set() and changed(moe_layer_freq="[0,1]") == {"moe_layer_freq"}
