# SPDX-License-Identifier: Apache-2.0
"""A flag on the device decides about an update: up, nothing changes, whatever the gradients are; down, it is made."""

import math

import pytest
import torch

from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Normal, Placement
from megatron.optimizer.update import RULES, UpdateRule, choose
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings.schema import Optimizer, Parallel

SCALE = 0.25


class Layer(torch.nn.Module):
    """A matrix of a linear layer, which Muon treats as such, and a vector without weight decay."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(6, 5, device="meta"))
        self.bias = torch.nn.Parameter(torch.empty(6, device="meta"))
        self.placements = dict(
            weight=Placement((6, 5), Normal(0.3), matrices=(0, (6,))), bias=Placement((6,), Normal(0.1), decay=False)
        )

    def forward(self, x):
        return (x @ self.weight.float().t() + self.bias.float()).sin().sum()


def trained(rank: int, sizes: dict, settings: Optimizer, stage: int, gates: str, dtype=torch.float32):
    """(updates, weights and state by name) after the steps of `gates`: "." without a flag, "d" with one that is
    down, "u" with one that is up and gradients that are not finite, "-" left out.
    """
    mesh, model = Mesh(rank, **sizes), Layer()
    kind = dict(dtype=dtype, device="cpu", seed=1)
    optimizer = DistributedOptimizer(model, mesh, settings, Parallel(sharding_stage=stage), **kind)
    for step, gate in enumerate(gates):
        if gate == "-":
            continue
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        fault = (math.nan if step % 2 else math.inf) if gate == "u" else 1.0
        (model(x) * fault).backward()
        optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))
        if gate == ".":
            optimizer.step(1e-2, 0.1, SCALE)
        else:
            optimizer.step(1e-2, 0.1, torch.tensor(SCALE), skip=torch.tensor(gate == "u"))
        if gate == "u":
            optimizer.undo_step_count()
    with optimizer.gathered_parameters():
        found = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    state = {(at, piece.name): piece.tensor.clone() for at, piece in enumerate(optimizer.pieces())}
    return optimizer.step_count, found | state


IN_BF16 = dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", grad_reduce_in_bf16=True)
SETTINGS = {
    **{name: Optimizer(optimizer=name) for name in RULES},
    "sgd without momentum": Optimizer(optimizer="sgd", sgd_momentum=0.0),
    "muon, nesterov": Optimizer(optimizer="muon", muon_nesterov=True),
    **{f"{name}, bf16": Optimizer(optimizer=name, **IN_BF16) for name in RULES},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_flag_that_is_up_keeps_everything_as_it_is(name):
    """Also before there is any state, and twice; the others are made as without a flag, to rounding."""
    steps, found = trained(0, {}, SETTINGS[name], 0, "ududdu.")
    wanted_steps, wanted = trained(0, {}, SETTINGS[name], 0, "-.-..-.")
    assert steps == wanted_steps == 4 and found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-8)
    once, twice = trained(0, {}, SETTINGS[name], 0, "."), trained(0, {}, SETTINGS[name], 0, ".uu")
    assert once[0] == twice[0] and all(torch.equal(once[1][key], twice[1][key]) for key in once[1])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name, stage", [("adam", 1), ("muon", 3), ("lion", 2), ("adam, bf16", 3), ("muon, bf16", 1)])
def test_so_it_does_on_ranks_that_share_state(name, stage, run_ranks):
    """bf16 weights: they are made of main weights again, which have not changed."""
    for found, wanted in zip(
        run_ranks(2, trained, dict(shard=2), SETTINGS[name], stage, ".uu", torch.bfloat16),
        run_ranks(2, trained, dict(shard=2), SETTINGS[name], stage, ".", torch.bfloat16),
        strict=True,
    ):
        assert found[0] == wanted[0] == 1 and found[1].keys() == wanted[1].keys()
        assert all(torch.equal(found[1][key], wanted[1][key]) for key in wanted[1])


def test_a_rule_that_knows_no_flag_is_given_none():
    class Own(UpdateRule):
        pass

    optimizer = DistributedOptimizer(Layer(), Mesh(), Optimizer(), dtype=torch.float32, device="cpu", seed=1)
    assert optimizer.skips_on_device
    optimizer.rule = Own(Optimizer())
    assert not optimizer.skips_on_device
    for away in (dict(optimizer_cpu_offload=True), dict(optimizer="cpu_adam"), dict(nvme_offload_fraction=0.5)):
        optimizer.rule, optimizer.settings = RULES["adam"](Optimizer()), Optimizer(**away)
        assert not optimizer.skips_on_device, away


@pytest.mark.parametrize("yes, no", [(0.0, 0.1), (1.0, 0.95), (2.0**-24, 2.0**31), (1 / 3, -1 / 7)])
def test_a_choice_is_exact(yes, no):
    assert [choose(torch.tensor(flag), yes, no).item() for flag in (True, False)] == [yes, no]
