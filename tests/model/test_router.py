# SPDX-License-Identifier: Apache-2.0
"""The router of experts against values that megatron-core 0.16.1 computed (`megatron_router.jsonl`), against transformers'
routers, against formulas, and over forked ranks against one.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.fused_kernels.autocast import Autocast
from megatron.model.kinds.experts import routing
from megatron.model.kinds.experts.parts import capacity, expert_sums
from megatron.model.kinds.experts.replay import RoutingRecord, attach
from megatron.model.kinds.experts.router import Router
from megatron.model.kinds.experts.routing import ExpertChoice, choose, normalized_scores, places_of, weights_of
from megatron.model.kinds.experts.weights import router as table
from megatron.mpu.context_parallel import own_rows
from megatron.mpu.forked import run_ranks
from megatron.mpu.layers import linear
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Model

S, B, H, E = 8, 3, 16, 4
SINKHORN = dict(moe_router_load_balancing_type=["sinkhorn"], moe_router_topk=1)


@cache
def recorded() -> list[dict]:
    return [json.loads(line) for line in Path(__file__).with_name("megatron_router.jsonl").read_text().splitlines()]


def of(kind: str) -> list[dict]:
    return [case for case in recorded() if case["kind"] == kind]


def tensor(values, **more) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, **more)


def model(**more) -> Model:
    shape = dict(num_layers=2, hidden_size=H, num_attention_heads=2, seq_length=S, num_experts=E)
    return Model(**shape | dict(disable_bias_linear=True) | more)


def router(mesh: Mesh = None, dtype=torch.float32, **more) -> Router:
    m = model(**more)
    made = Router(m, 1, table(m), mesh or Mesh(0), seed=5, dtype=dtype, device="cpu")
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(3)))
        for buffer in made.buffers():
            buffer.zero_()
    return made


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(seed))


# ---- choices ---------------------------------------------------------------------------------------------------------


def choice_in(settings: dict, experts: int) -> ExpertChoice:
    names = dict(use_pre_softmax="pre_softmax", scaling_factor="topk_scaling_factor")
    settings = {names.get(name, name): value for name, value in settings.items() if name != "expert_bias"}
    return ExpertChoice(experts, **settings)


@pytest.mark.parametrize("case", range(10))
def test_choices_and_weights_are_those_of_megatron_core(case):
    case = of("choice")[case]
    logits, bias = tensor(case["logits"], requires_grad=True), case["settings"].get("expert_bias")
    rule = choice_in(case["settings"], logits.shape[1])
    experts = choose(logits, rule, None if bias is None else tensor(bias))
    weights = weights_of(logits, experts, rule)
    whole = torch.zeros_like(logits).scatter(1, experts, weights)
    chosen = torch.zeros_like(logits).scatter(1, experts, 1.0)
    assert chosen.tolist() == case["chosen"]
    torch.testing.assert_close(whole, tensor(case["probs"]), rtol=1e-5, atol=1e-6)
    (whole * tensor(case["upstream"])).sum().backward()
    torch.testing.assert_close(logits.grad, tensor(case["gradient"]), rtol=1e-4, atol=1e-6)
    scores = normalized_scores(logits, rule.score_function)
    torch.testing.assert_close(scores, tensor(case["aux_scores"]), rtol=1e-5, atol=1e-6)
    best = torch.zeros_like(logits).scatter(1, scores.topk(rule.topk, -1).indices, 1.0)
    assert best.tolist() == case["aux_chosen"]


@pytest.mark.parametrize("case", range(4))
def test_dropped_tokens_are_those_of_megatron_core(case):
    case = of("drop")[case]
    logits = tensor(case["logits"])
    rule = ExpertChoice(4, 2)
    experts = choose(logits, rule)
    weights = weights_of(logits, experts, rule)
    places = places_of(experts, 4, weights if case["policy"] == "probs" else None)
    most = capacity(12, 2, 4, case["factor"])
    assert most == case["capacity"]
    kept = torch.zeros_like(logits).scatter(1, experts, (places < most).float())
    if case["policy"] == "probs":
        assert kept.tolist() == case["kept"]
    else:  # Megatron takes any of them, by a top-k of zeros and ones; here the first
        assert kept.sum(0).tolist() == tensor(case["kept"]).sum(0).tolist()
        firsts = torch.zeros_like(logits).scatter(1, experts, 1.0).cumsum(0)
        assert torch.equal(kept, torch.zeros_like(logits).scatter(1, experts, 1.0) * (firsts <= most))


def test_places_count_from_zero_for_each_expert_and_padding_comes_last():
    experts = torch.tensor([[0], [1], [0], [0]])
    assert places_of(experts, 2).tolist() == [[0], [0], [1], [2]]
    assert places_of(experts, 2, tensor([[0.1], [0.5], [0.3], [0.2]])).tolist() == [[2], [0], [0], [1]]
    counted = torch.tensor([False, True, True, True])
    assert places_of(experts, 2, tensor([[0.9], [0.5], [0.3], [0.2]]), counted).tolist() == [[2], [0], [0], [1]]


def test_sinkhorn_is_that_of_megatron_core_and_skips_padding():
    (case,) = of("sinkhorn")
    logits = tensor(case["logits"])
    torch.testing.assert_close(routing.sinkhorn(logits), tensor(case["scores"]), rtol=1e-4, atol=1e-7)
    made = router(**SINKHORN, hidden_size=4)
    made.weight.data.copy_(torch.eye(4))  # its inputs are its logits
    chosen, plain = tensor(case["scores"]).topk(1).indices, logits.topk(1).indices
    assert torch.equal(made(logits.unsqueeze(1)).experts, chosen) and not torch.equal(chosen, plain)
    assert torch.equal(made.eval()(logits.unsqueeze(1)).experts, plain)
    counted = torch.arange(10) < 7
    torch.testing.assert_close(routing.sinkhorn(logits, counted)[:7], routing.sinkhorn(logits[:7]))


@pytest.mark.full
def test_routers_of_transformers_choose_the_same():
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.olmoe import modeling_olmoe as olmoe

    sigmoid = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, num_experts=8)
    groups = dict(
        moe_router_topk=4, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5
    )
    theirs = dict(n_routed_experts=8, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    plain = dict(num_experts=E, num_experts_per_tok=2, hidden_size=H)
    second = dict(n_routed_experts=8, num_experts_per_tok=5, n_group=4, topk_group=3, routed_scaling_factor=2.5)
    best = dict(
        num_experts=8,
        moe_router_topk=5,
        moe_router_num_groups=4,
        moe_router_group_topk=3,
        moe_router_topk_scaling_factor=2.5,
    )
    greedy = dict(topk_method="group_limited_greedy", norm_topk_prob=False)
    pairs = [
        (
            deepseek_v2.DeepseekV2TopkRouter(
                deepseek_v2.DeepseekV2Config(**second, **greedy, hidden_size=H, num_attention_heads=2)
            ),
            router(**best, moe_router_pre_softmax=True, moe_router_group_score_topk=1),
        ),
        (
            deepseek.DeepseekV3TopkRouter(deepseek.DeepseekV3Config(**second, hidden_size=H)),
            router(**(sigmoid | best), moe_router_group_score_topk=2),
        ),
        (mixtral.MixtralTopKRouter(mixtral.MixtralConfig(num_local_experts=E, hidden_size=H)), router()),
        (olmoe.OlmoeTopKRouter(olmoe.OlmoeConfig(**plain, norm_topk_prob=True)), router()),
        (olmoe.OlmoeTopKRouter(olmoe.OlmoeConfig(**plain)), router(moe_router_pre_softmax=True)),
        (
            deepseek.DeepseekV3TopkRouter(deepseek.DeepseekV3Config(**theirs, hidden_size=H)),
            router(**sigmoid, **groups),
        ),
    ]
    for gate, ours in pairs:
        gate.weight.data.copy_(ours.weight)
        if hasattr(gate, "e_score_correction_bias"):
            ours.expert_bias.uniform_(-1, 0, generator=torch.Generator().manual_seed(2))
            gate.e_score_correction_bias.copy_(ours.expert_bias)
        _, weights, experts = gate(inputs().flatten(0, 1))
        found = ours(inputs())
        expected = torch.zeros(S * B, len(ours.weight)).scatter(1, experts, weights.float())
        torch.testing.assert_close(torch.zeros_like(expected).scatter(1, found.experts, found.weights), expected)


def test_a_negative_bias_excludes_no_group():
    rule = ExpertChoice(4, 2, "sigmoid", num_groups=2, group_topk=1)
    experts = choose(tensor([[3.0, 2.0, 1.0, 0.0]]), rule, tensor([-5.0, -5.0, -9.0, -9.0]))
    assert experts.tolist() == [[0, 1]]


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(10))
def test_gradients_of_losses_are_those_of_megatron_core(case):
    case = of("loss")[case]
    losses = dict(moe_router_load_balancing_type=case["types"], moe_aux_loss_coeff=case["coeffs"])
    made = router(**losses, moe_z_loss_coeff=case["z"], moe_router_score_function=case["score"], hidden_size=4)
    made.weight.data.copy_(torch.eye(4))  # its inputs are its logits
    mask = None if case["padding"] is None else 1 - tensor(case["padding"])
    sums = expert_sums(made.model)
    for step in case["steps"]:
        logits = tensor(step["logits"]).view(5, 3, 4).requires_grad_()
        found = made(logits, mask)
        assert set(found.sums) == set(sums)
        tokens = 15 if mask is None else mask.sum()
        (sum(weight * found.sums[name] for name, weight in sums.items()) / tokens).backward()
        torch.testing.assert_close(logits.grad.view(15, 4), tensor(step["gradient"]), rtol=1e-4, atol=1e-7)


def test_losses_are_1_if_loads_are_equal_and_means_over_layers():
    kinds = ["aux_loss", "seq_aux_loss", "global_aux_loss"]
    made = router(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=[1.0], hidden_size=4)
    made.weight.data.copy_(torch.eye(4))
    x = torch.eye(4).roll(1, 1).add(torch.eye(4)).mul(9.0).unsqueeze(1).expand(4, B, 4)  # each token has two favourites
    sums = made(x).sums
    for name in ("load balancing loss", "seq load balancing loss", "global load balancing loss"):
        torch.testing.assert_close(sums[name] * 2 / 12, torch.tensor(1.0))
        assert expert_sums(made.model)[name] == 2.0  # for two layers
    assert 0.69 < (sums["routing entropy"] * 2 / 12).item() < 0.7  # log 2


def test_padding_is_not_counted():
    """Losses, loads and statistics of 8 tokens and padding are those of the 8 tokens alone."""
    kinds = dict(moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"], moe_z_loss_coeff=0.1)
    alone, padded, x = router(**kinds), router(**kinds), inputs()
    mask = torch.ones(S + 3, B)
    mask[S:] = 0
    expected = alone(x)
    found = padded(torch.cat((x, 7 * inputs(2)[:3])), mask)
    for name, value in expected.sums.items():
        torch.testing.assert_close(found.sums[name], value)
    assert torch.equal(alone.load, padded.load)
    assert alone.load.sum() == S * B * 2
    limited = router(moe_expert_capacity_factor=0.5, moe_token_drop_policy="position")
    mask = torch.ones(S + 3, B)
    mask[:3] = 0
    first, other = (limited(torch.cat((rows, x)), mask).experts[3 * B :] for rows in (inputs(2)[:3], -inputs(2)[:3]))
    assert torch.equal(first, other) and (first == E).any()  # it displaces no token
    mask = mask.flip(0)
    alone, padded = router(**SINKHORN), router(**SINKHORN)
    experts = padded(torch.cat((x, 7 * inputs(2)[:3])), mask).experts
    assert torch.equal(experts[: S * B], alone(x).experts)


def test_losses_count_the_best_scores_without_the_bias_and_loads_are_exact():
    kinds = dict(moe_router_load_balancing_type=["aux_loss"], moe_router_score_function="sigmoid")
    plain, biased = router(**kinds), router(**kinds, moe_router_enable_expert_bias=True)
    biased.expert_bias.copy_(tensor([9.0, 9.0, 0.0, 0.0]))
    biased.load.fill_(1001)  # bf16 has 8 bits, so that it would not be 1002 after another token
    name = "load balancing loss"
    torch.testing.assert_close(biased(inputs()).sums[name], plain(inputs()).sums[name])
    assert biased.load.tolist() == [1001 + S * B, 1001 + S * B, 1001, 1001]


def test_bias_is_moved_by_the_sign_of_the_load():
    (case,) = of("bias")
    moved = routing.moved_bias(tensor(case["before"]), torch.tensor(case["loads"]), 1e-3)
    torch.testing.assert_close(moved, tensor(case["after"]), rtol=1e-6, atol=0)
    made = router(dtype=torch.bfloat16, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    assert made.expert_bias.dtype == torch.float32
    # More than 2^24 tokens and one more: in fp32 both are the same number.
    made.load.copy_(torch.tensor([2**25 + 1, 2**25 - 1, 2**25, 2**25]))
    made.update_buffers()
    torch.testing.assert_close(made.expert_bias, tensor([-1e-3, 1e-3, 0, 0]))
    assert made.load.sum() == 0
    assert made.last_load.sum() == 2**27


def test_weights_exclude_the_bias_and_evaluation_counts_nothing():
    made = router(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True).eval()
    x = inputs()
    made.expert_bias.copy_(tensor([9.0, 9.0, 0.0, 0.0]))
    found = made(x)
    assert set(found.experts.flatten().tolist()) == {0, 1}
    scores = linear(x.flatten(0, 1), made.weight).sigmoid().gather(1, found.experts)
    # To the bit, which biased scores less the bias are not.
    assert torch.equal(found.weights, scores / scores.sum(1, keepdim=True))
    assert made.load.sum() == 0


# ---- formats, noise, capacity, recomputation ---------------------------------------------------------------------------


def test_logits_are_fp32_whatever_the_format():
    x = inputs().bfloat16()
    half = router(dtype=torch.bfloat16)
    exact = F.linear(x.flatten(0, 1).float(), half.weight.float())
    expected = exact.topk(2, -1)
    for region in (torch.no_grad(), Autocast(torch.bfloat16)):
        with region:
            found = half(x)
        assert found.weights.dtype == torch.float32
        assert torch.equal(found.experts, expected.indices)
        torch.testing.assert_close(found.weights, expected.values.softmax(-1))
    assert router(moe_router_dtype="fp64")(inputs()).weights.dtype == torch.float64


def test_jitter_is_drawn_by_sample_and_only_in_training():
    made, x = router(moe_input_jitter_eps=0.1), inputs()
    first = made(x, None, torch.tensor([4, 5, 6])).weights
    again = made(x[:, 1:], None, torch.tensor([5, 6])).weights
    assert torch.equal(first.view(S, B, 2)[:, 1:], again.view(S, 2, 2))
    assert not torch.equal(first, made(x, None, torch.tensor([7, 8, 9])).weights)
    noise = made.uniform("router jitter", torch.empty(64, 3, 256), torch.tensor([1, 2, 3]))
    assert noise.abs().max() < 1
    assert noise.mean().abs() < 0.02
    assert abs(noise.var().item() - 1 / 3) < 0.02
    plain = router()
    assert torch.equal(made.eval()(x).weights, plain(x).weights)
    even = router(moe_input_jitter_eps=0.1, hidden_size=4, seq_length=256)
    even.weight.data.copy_(torch.eye(4))  # logits are inputs
    factors = even.logits(torch.ones(256, 3, 4), torch.tensor([1, 2, 3]))
    assert 0.9 < factors.min() < 0.91 and 1.09 < factors.max() < 1.1 and abs(factors.mean() - 1) < 0.005


def test_forced_balance_chooses_by_numbers_and_keeps_the_gradient():
    made = router(moe_router_force_load_balancing=True, seq_length=512)
    x = torch.randn(512, B, H)
    found = made(x, None, torch.tensor([1, 2, 3]))
    loads = made.load.double()
    assert (loads / loads.mean() - 1).abs().max() < 0.1
    assert torch.equal(found.experts, made(2 - x, None, torch.tensor([1, 2, 3])).experts)
    (found.weights[:, 0].sum()).backward()
    assert made.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_marks_dropped_tokens(policy):
    made = router(moe_expert_capacity_factor=0.5, moe_token_drop_policy=policy)
    found, plain = made(inputs()), router()(inputs())
    most = capacity(S * B, 2, E, 0.5)
    dropped = found.experts == E
    assert torch.equal(found.experts[~dropped], plain.experts[~dropped])
    assert (found.weights[dropped] == 0).all()
    assert torch.equal(found.weights[~dropped], plain.weights[~dropped])
    kept = torch.bincount(found.experts[~dropped], minlength=E)
    wanted = torch.bincount(plain.experts.flatten(), minlength=E)
    assert torch.equal(kept, wanted.clamp(max=most))
    assert torch.equal(made.load, wanted)  # what tokens chose, not what fits
    torch.testing.assert_close(found.sums["dropped tokens"] * 2, dropped.sum() / 2)


@pytest.mark.parametrize("padded", [False, True])
def test_losses_count_what_is_dropped(padded):
    """With padding to a capacity all experts compute equally many rows; losses count what tokens chose."""
    losses = dict(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[1.0]
    )
    expected = router(**losses)(inputs()).sums
    found = router(**losses, moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=padded)(inputs()).sums
    assert found.pop("dropped tokens") > 0
    assert {name: value.item() for name, value in found.items()} == {name: one.item() for name, one in expected.items()}


def test_second_run_takes_the_choices_of_the_first():
    kinds = dict(moe_router_load_balancing_type=["aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[0.1])
    made = router(**kinds, moe_expert_capacity_factor=0.6)
    first = made(inputs())
    load = made.load.clone()
    again = made(inputs(), memo=first.memo)
    other = made(inputs() + 1e-3 * inputs(2), memo=first.memo)  # near a tie rounding would decide
    assert torch.equal(made.load, load)
    assert torch.equal(made.scored_load, load)
    assert torch.equal(again.weights, first.weights)
    assert torch.equal(other.experts, first.experts)
    assert {name: value.item() for name, value in again.sums.items()} == {
        name: value.item() for name, value in first.sums.items()
    }


# ---- ranks -----------------------------------------------------------------------------------------------------------

EVERYTHING = dict(
    moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
    moe_aux_loss_coeff=[0.1, 0.2, 0.3],
    moe_z_loss_coeff=0.05,
    moe_input_jitter_eps=0.2,
)
FORCED = dict(moe_router_force_load_balancing=True)


def routed(mesh: Mesh, settings: dict, steps: int = 2):
    """Of this rank's rows: its sums in training and in an evaluation; the gradient of its share of the loss, summed over
    ranks; and the loads.
    """
    made, weights = router(mesh, **settings), expert_sums(model(**settings))
    recording, sums = RoutingRecord(), dict.fromkeys(weights, 0.0)
    attach([made], recording)
    for step in range(steps):
        whole, mask = inputs(step + mesh.dp.rank * steps), torch.ones(S, B)
        mask[-2:, 1] = 0
        rows = lambda x: own_rows(x, mesh.cp).chunk(mesh.tp.size)[mesh.tp.rank]
        samples = torch.arange(B) + B * (step + mesh.dp.rank * steps)
        found = made(rows(whole), rows(mask), samples)
        total = sum(weight * found.sums[name] for name, weight in weights.items())
        total = total + (found.weights * torch.arange(1.0, found.weights.shape[1] + 1)).sum() / 100
        total.backward()
        sums = {name: sums[name] + found.sums[name].item() for name in sums}
    with torch.no_grad():
        evaluated = made.eval()(rows(inputs(9)), rows(mask), samples + 100).sums
    sums |= {f"{name} of an evaluation": value.item() for name, value in evaluated.items()}
    return sums, made.weight.grad, made.load, recording.choices, mesh.coordinates


@pytest.mark.sampled(5)
@pytest.mark.parametrize("settings", [EVERYTHING, SINKHORN, FORCED], ids=["losses", "sinkhorn", "forced"])
@pytest.mark.parametrize("sizes", [dict(tp=2), dict(cp=2)], ids=["tp2", "cp2"])
def test_parts_of_sequences_give_the_same_as_whole_ones(sizes, settings):
    sums, gradient, load, choices, _ = routed(Mesh(0), settings)
    ranks = run_ranks(2, lambda rank: routed(Mesh(rank, **sizes), settings))
    for name, value in sums.items():  # cp: partial sums; tp: each rank has them all
        found = ranks[0][0][name] if "tp" in sizes else sum(rank[0][name] for rank in ranks)
        assert found == pytest.approx(value, rel=1e-5), name
    torch.testing.assert_close(sum(rank[1] for rank in ranks), gradient, rtol=1e-4, atol=1e-6)
    assert torch.equal(sum(rank[2] for rank in ranks), load)
    for rank in ranks:
        assert rank[3].keys() == choices.keys()
        assert all(torch.equal(rank[3][key], choices[key]) for key in choices)


def test_global_loss_counts_all_ranks_and_micro_batches():
    """Two ranks with two micro-batches each: the loads of all tokens up to the present micro-batch, in the formula."""
    settings = dict(moe_router_load_balancing_type=["global_aux_loss"], moe_aux_loss_coeff=[1.0])
    ranks = run_ranks(2, lambda rank: routed(Mesh(rank, replicate=2), settings))
    made, counts, expected = router(), torch.zeros(E), [0.0, 0.0]
    mask = torch.ones(S, B)
    mask[-2:, 1] = 0
    for step in range(2):
        scores = [F.linear(inputs(step + 2 * rank), made.weight).softmax(-1) for rank in range(2)]
        for one in scores:
            counts += (F.one_hot(one.topk(2).indices, E).sum(2) * mask.unsqueeze(-1)).sum((0, 1))
        for rank, one in enumerate(scores):
            expected[rank] += (E * (one * counts / counts.sum()).sum(-1) * mask).sum().item() / 2
    found = [rank[0]["global load balancing loss"] for rank in ranks]
    assert found == pytest.approx(expected, rel=1e-5)


def test_replay_takes_the_choices_of_another_run_in_another_layout():
    recording, made, x, samples = RoutingRecord(), router(), inputs(), torch.tensor([3, 4, 5])
    attach([made], recording)
    first = made(x, None, samples)

    def again(rank):
        mesh = Mesh(rank, cp=2)
        replay, other = RoutingRecord(recording.choices), router(mesh)
        attach([other], replay)
        found = other(own_rows(x, mesh.cp) + 0.5 * own_rows(inputs(9), mesh.cp), None, samples)
        own = own_rows(first.experts.view(S, B, 2), mesh.cp).flatten(0, 1)
        return torch.equal(found.experts, own), replay.changed, replay.seen

    for same, changed, seen in run_ranks(2, again):
        assert same
        assert 0 < changed < seen == S * B // 2
