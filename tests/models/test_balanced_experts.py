# SPDX-License-Identifier: Apache-2.0
"""Routers with a bias and a balance loss (`balanced_experts.py`) in all kinds of layouts, against the same network in plain
torch, in one process, in fp64; and the mistakes that others made with them.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from megatron.inference.load import load_model
from megatron.model import language_model
from megatron.model.command_line import parse_any
from megatron.model.weights import take_prefix
from megatron.mpu.forked import RankFailed, run_ranks
from megatron.mpu.placement import Buffer
from tests.models import balanced_experts
from tests.models.plain_state import LAYERS, LINE, compare, read_all, train
from tests.models.test_own_experts import CHOSEN, EP2, ETP1, EXPERTS, PP2, TP2, initial_weights, logits
from tests.ranks import trains

pytestmark = pytest.mark.sampled(10)

RATE, COEFF = 0.004, 0.5
BALANCED = f"--bias-rate {RATE} --balance-coeff {COEFF}"
FULL = "--recompute-granularity full"
LAYOUTS = {
    "one process": (1, ""),
    "recomputed": (1, f"{FULL} --recompute-num-layers 2"),
    "ep2, one sample at a time": (2, f"{EP2} --micro-batch-size 1"),
    "tp2, whole experts": (2, f"{TP2} {ETP1}"),
    "cp2, ep over its ranks": (2, f"--context-parallel-size 2 {EP2}"),
    "tp2 ep2, zero3, recomputed": (4, f"{TP2} {EP2} {ETP1} --sharding-stage 3 {FULL}"),
    "pp2 ep2, zb-h1, zero2": (4, f"{PP2} {EP2} --pipeline-schedule zb-h1 --sharding-stage 2"),
    "pp2 ep2 in a V, zero3": (4, f"{PP2} {EP2} --pipeline-schedule zb-v --sharding-stage 3"),
}


pretrain = trains(balanced_experts, f"{LINE} {BALANCED}")


def plain_buffers() -> dict[str, torch.Tensor]:
    zeros = {"bias": torch.float64, "load": torch.int64}
    return {
        f"blocks.{n}.router.{name}": torch.zeros(EXPERTS, dtype=d) for n in range(LAYERS) for name, d in zeros.items()
    }


def network(weights, tokens, buffers):
    """(logits, the balance loss of arXiv:2405.04434, eq. 17-19: of each sequence, sums of f_i P_i)."""
    losses = []

    def route(n, scores):  # [b, s, E]
        bias, load = (buffers[f"blocks.{n}.router.{name}"] for name in ("bias", "load"))
        picked = torch.zeros_like(scores).scatter(-1, (scores + bias).topk(CHOSEN, -1).indices, 1.0).detach()
        load += picked.sum((0, 1)).long()
        f = picked.sum(1) * EXPERTS / (CHOSEN * tokens.shape[1])
        losses.append((f * scores.mean(1)).sum(-1).mean())
        return scores * picked

    return logits(weights, tokens, route), {balanced_experts.BALANCE: (sum(losses), COEFF)}


def update_buffers(buffers) -> None:
    for n in range(LAYERS):
        bias, load = (buffers[f"blocks.{n}.router.{name}"] for name in ("bias", "load"))
        bias += RATE * (load.double().mean() - load).sign()
        load.zero_()


@cache
def plain():
    return train(initial_weights(EXPERTS), lambda name: True, plain_buffers(), range(4), network, update_buffers)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{words} --save {tmp_path} --check-replicas-interval 1")
    compare(tmp_path, *plain())


@pytest.mark.sampled(10)
def test_a_run_goes_on_with_experts_divided_in_another_way(tmp_path):
    """The bias of a resumed run, and a model for use, are those of the run before, bit for bit."""
    flags = f"--save {tmp_path} --load {tmp_path} --auto-resume"
    run_ranks(2, pretrain, f"{EP2} {flags} --exit-interval 2")
    run_ranks(2, pretrain, f"{TP2} {ETP1} --sharding-stage 1 {flags}")
    tensors = compare(tmp_path, *plain())
    model = load_model(str(tmp_path), precision="bf16").model
    for name, held in model.named_buffers():
        assert torch.equal(held, tensors[name]), name
    assert sum(name.endswith("router.bias") for name, _ in model.named_buffers()) == LAYERS


def test_half_precision_leaves_bias_and_loads_exact(tmp_path):
    run_ranks(2, pretrain, f"{EP2} --bf16 --save {tmp_path}")
    tensors, possible = read_all(tmp_path), {0.0}
    for _ in range(4):
        possible |= {(torch.tensor(value) + step * RATE).item() for value in possible for step in (-1, 1)}
    for n in range(LAYERS):
        bias = tensors[f"blocks.{n}.router.bias"]
        assert bias.dtype == torch.float32 and bias.any() and set(bias.tolist()) <= possible


# ---- a router by itself ----------------------------------------------------------------------------------------------


def router(dtype=torch.float32, bias=0.01):
    """A router of 8 experts, 2 a token, with biases of both signs."""
    config = parse_any(f"{LINE} {BALANCED}".split(), recipe=balanced_experts.recipe())
    facts = balanced_experts.facts(config, 101)
    weights = take_prefix(facts.layer_weights("", False), "router")
    made = balanced_experts.BalancedRouter(weights, facts, (), dtype=dtype, device="cpu")
    torch.nn.init.normal_(made.weight, 0.0, 0.3, generator=torch.Generator().manual_seed(1))
    made.bias.copy_(bias * torch.tensor([1.0, -1.0]).repeat(4))
    made.load.zero_()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_scores_and_loads_are_exact(dtype):
    """More tokens than bf16 counts to. Weights are the scores, which a bias does not pass through."""
    layer, x = router(dtype), torch.randn(2000, 2, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    weights, chosen, _ = layer(x, None)
    scores = F.linear(x.float(), layer.weight.float()).softmax(-1)
    assert torch.equal(weights, scores.gather(-1, chosen).to(dtype))
    assert torch.equal(chosen.sort(-1).values, (scores + layer.bias).argsort(-1)[..., -2:].sort(-1).values)
    assert torch.equal(layer.load, chosen.flatten().bincount(minlength=8)) and layer.load.sum() == 8000
    before, loads = layer.bias.clone(), layer.load.clone()
    layer.update_buffers()
    assert torch.equal(layer.bias, before + RATE * (1000 - loads).sign())


def test_padding_is_not_counted():
    """A sequence with padding has the loss and the load of the same sequence without, and so has a batch with both."""
    x = torch.randn(12, 2, 24, generator=torch.Generator().manual_seed(2))
    counts = torch.ones(12, 2)
    counts[7:, 1] = 0
    alone = [router(), router()]
    losses = [
        layer(x[:rows, n : n + 1], None)[2].sum() for n, (layer, rows) in enumerate(zip(alone, (12, 7), strict=True))
    ]
    both = router()
    balance = (both(x, counts)[2] * counts).sum(0)
    torch.testing.assert_close(balance, torch.stack(losses))
    assert torch.equal(both.load, alone[0].load + alone[1].load) and both.load.sum() == 2 * 19
    assert 7 * 1.01 < balance[1]  # the loss of equal loads is 1 a token


# ---- mistakes that others made ---------------------------------------------------------------------------------------

ROUTER = balanced_experts.BalancedRouter


def with_balance(change):
    """Plants a change of the balance loss of each token."""
    real = ROUTER.forward

    def forward(self, x, counts):
        weights, chosen, balance = real(self, x, counts)
        return weights, chosen, change(balance)

    return lambda patch: patch.setattr(ROUTER, "forward", forward)


def parts_of_sequences(patch):
    real = ROUTER.__init__
    patch.setattr(ROUTER, "__init__", lambda self, weights, facts, axes, **more: real(self, weights, facts, (), **more))


def twice_when_recomputed(patch):
    real = language_model.recomputed

    def recomputed(*args, **more):
        x, sums = real(*args, **more)
        return x, {name: 2 * value - value.detach() for name, value in sums.items()}

    patch.setattr(language_model, "recomputed", recomputed)


def with_table(change):
    real = balanced_experts.BalancedFacts.layer_weights

    def table(self, kind, sequence_parallel):
        return {name: change(name, one) for name, one in real(self, kind, sequence_parallel).items()}

    return lambda patch: patch.setattr(balanced_experts.BalancedFacts, "layer_weights", table)


def of_one_rank(name, placement):
    return replace(placement, buffer=Buffer("same", "int64")) if name == "router.load" else placement


def of_one_tp_rank(name, placement):
    return replace(placement, partial=()) if name == "router.load" else placement


MISTAKES = {  # who makes it, in which layout, and what the run says (None: nothing, and figures differ)
    "the loss has no gradient": (with_balance(torch.Tensor.detach), "one process", None),
    "the loss is multiplied by micro-batches": (with_balance(lambda x: 4 * x), "one process", None),
    "the loss depends on tp": (parts_of_sequences, "tp2, whole experts", None),
    "the loss depends on cp": (parts_of_sequences, "cp2, ep over its ranks", None),
    "the loss counts twice where layers are recomputed": (twice_when_recomputed, "recomputed", None),
    "loads of one rank": (with_table(of_one_rank), "ep2, one sample at a time", "blocks.0.router.bias differs"),
    "loads of one tp rank": (with_table(of_one_tp_rank), "tp2, whole experts", "blocks.0.router.bias differs"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_that_others_made_are_seen(mistake, tmp_path, monkeypatch):
    """Each is made here; then the run fails, or differs from the plain loop."""
    (plant, layout, said), wanted = MISTAKES[mistake], plain()
    plant(monkeypatch)
    world, words = LAYOUTS[layout]
    train = lambda: run_ranks(world, pretrain, f"{words} --save {tmp_path} --check-replicas-interval 1")
    if said:
        with pytest.raises(RankFailed, match=said):
            train()
        return
    train()
    with pytest.raises(AssertionError):
        compare(tmp_path, *wanted)
