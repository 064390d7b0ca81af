# SPDX-License-Identifier: Apache-2.0
"""Exact weights: fp32 numbers that a bf16 model computes with, in every ZeRO stage, as one process of plain torch."""

import pytest
import torch

from megatron.mpu.layers import create_parameters
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, LogOf, Normal, Placement, Uniform
from megatron.optimizer.zero import DistributedOptimizer
from megatron.planner.layout import Cuts
from megatron.planner.parameters import Units, _sizes
from megatron.settings import schema

WIDTH, ROWS, STEPS, LR = 6, 8, 3, 0.05
TABLE = {
    "weight": Placement((WIDTH, WIDTH), Normal(0.5)),
    "rates": Placement((WIDTH,), LogOf(Uniform(1, 16)), decay=False, exact=True),
    "bias": Placement((WIDTH,), Constant(0.1), decay=False),
}
STILL = {"steps": Placement((WIDTH,), LogOf(Uniform(1, 2)), decay=False, exact=True, frozen=True)}


class Layer(torch.nn.Module):
    """Outputs decay at the rates that are stored as logarithms: exp(-exp(x)) of close logarithms differs a lot."""

    def __init__(self, dtype):
        super().__init__()
        create_parameters(self, TABLE | STILL, None, dtype=dtype, device="meta")

    def forward(self, x):
        assert self.rates.dtype == self.steps.dtype == torch.float32
        return x + torch.tanh(mixed(x, self.weight, self.bias, self.rates, self.steps))


def mixed(x, weight, bias, rates, steps):
    y = (x @ weight.t() + bias).float()
    return (y * torch.exp(-0.01 * rates.float().exp() * steps.float())).to(x.dtype)


class Model(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.blocks = torch.nn.ModuleDict({str(n): Layer(dtype) for n in range(2)})

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


def rows(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()


def trained(rank, sizes, **settings):
    """Weights after some steps, and what they were at the start, as a checkpoint has them; bytes of memory."""
    mesh, optimizer_settings = Mesh(rank, **sizes), settings.pop("optimizer", {})
    model, parallel = Model(torch.bfloat16), schema.Parallel(**settings)
    optimizer = DistributedOptimizer(
        model, mesh, schema.Optimizer(lr=LR, **optimizer_settings), parallel, dtype=torch.bfloat16, device="cpu", seed=5
    )
    pieces = lambda: [
        (piece.name, piece.shape, piece.box, piece.tensor.clone())
        for piece in optimizer.pieces(moments=False, shared=True)
    ]
    start, memory = pieces(), optimizer.memory()
    for step in range(STEPS):
        x = rows(step).chunk(mesh.dp.size)[mesh.dp.rank].clone().requires_grad_()
        model(x).float().square().sum().backward()
        optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))
        optimizer.step(LR, 0.1, 1 / ROWS)
    with optimizer.weights.gathered_parameters():
        live = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return start, pieces(), live, memory


def joined(ranks):
    """Whole tensors from the pieces of all ranks."""
    whole = {}
    for name, shape, box, tensor in (piece for pieces in ranks for piece in pieces):
        whole.setdefault(name, torch.full(shape, float("nan"), dtype=tensor.dtype))[box.slices()] = tensor
    return whole


def reference(start):
    """One process: fp32 master weights, of which all but rates and steps are rounded to bf16 for each pass."""
    master = {name: tensor.float().clone().requires_grad_("steps" not in name) for name, tensor in start.items()}
    decayed = [weight for name, weight in master.items() if name.endswith(".weight")]
    plain = [weight for name, weight in master.items() if not name.endswith((".weight", ".steps"))]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=plain, weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    for step in range(STEPS):
        x = rows(step)
        for n in range(2):
            weight, bias, rates, steps = (master[f"blocks.{n}.{name}"] for name in ("weight", "bias", "rates", "steps"))
            x = x + torch.tanh(mixed(x, weight.bfloat16(), bias.bfloat16(), rates, steps))
        (x.float().square().sum() / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(decayed + plain, float("inf"))
        adam.step()
        adam.zero_grad()
    return {name: weight.detach() for name, weight in master.items()}


HOST = dict(optimizer_cpu_offload=True, param_cpu_offload=True)
LAYOUTS = {
    "stage 0": (dict(replicate=2), {}),
    "stage 1": (dict(shard=2), dict(sharding_stage=1)),
    "stage 2": (dict(shard=2), dict(sharding_stage=2, overlap_grad_reduce=True, overlap_param_gather=True)),
    "stage 3": (dict(shard=2), dict(sharding_stage=3)),
    "stage 3, on the host": (dict(shard=2), dict(sharding_stage=3, optimizer=HOST)),
    "stage 1, half on the host": (
        dict(shard=2),
        dict(sharding_stage=1, optimizer=dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)),
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_weights_stay_fp32_in_every_stage(layout, run_ranks):
    sizes, settings = LAYOUTS[layout]
    found = run_ranks(2, lambda rank: trained(rank, sizes, **settings))
    start, end = (joined(one[n] for one in found) for n in (0, 1))
    expected = reference(start)
    for name, weight in expected.items():
        torch.testing.assert_close(end[name].float(), weight, rtol=0, atol=3e-3)  # bf16 sums of two halves of the rows
        exact = name.endswith(("rates", "steps"))
        for *_, live, _ in found:
            assert live[name].dtype == (torch.float32 if exact else torch.bfloat16)
            assert torch.equal(live[name], end[name].to(live[name].dtype))
    for n in range(2):
        rates, steps = end[f"blocks.{n}.rates"], end[f"blocks.{n}.steps"]
        assert not torch.equal(rates, rates.bfloat16().float()), "nothing was lost by rounding: this shows nothing"
        assert torch.equal(steps, start[f"blocks.{n}.steps"]) and steps.dtype == torch.float32
        assert not torch.equal(rates, start[f"blocks.{n}.rates"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_process_gets_the_same_bits_in_each_stage(stage):
    start, end, live, _ = trained(0, {}, sharding_stage=stage)
    expected = reference(joined([start]))
    for name, weight in joined([end]).items():
        torch.testing.assert_close(weight.float(), expected[name], rtol=0, atol=1e-6)
        assert torch.equal(live[name].float(), weight.to(live[name].dtype).float())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_planner_counts_their_bytes(stage, run_ranks):
    axis = "shard" if stage else "replicate"
    memory = run_ranks(2, lambda rank: trained(rank, {axis: 2}, sharding_stage=stage)[-1])[0]
    units = Units(
        unit for n in range(2) for unit in _sizes(f"{n}", TABLE | STILL, frozenset(STILL), Cuts(1, 1, 1), layer=True)
    )
    sizes = dict(shard=2 if stage else 1, expert_shard=1)
    whole = lambda unit: unit.padded(sizes) + unit.padded_frozen(sizes)
    assert memory["parameters"] == (0 if stage == 3 else units.bytes_of(whole, 2))
    assert memory["state"] == 12 * units.owned(sizes)
    if stage == 3:
        frozen = units.bytes_of(lambda unit: unit.padded_frozen(sizes) // 2, 2)
        assert memory["shards"] == 2 * units.owned(sizes) + frozen
