# SPDX-License-Identifier: Apache-2.0
"""Experts in a layer, of which each data parallel rank holds one and several hold the same.

The experts are matrices [2, 6, 6], cut along `ep`: a rank multiplies its rows of the batch with the expert of its place.
One process with torch's AdamW does the same with both matrices.
"""

import pytest
import torch

from megatron.model.weights import Unit
from megatron.mpu.layers import create_parameters
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings.schema import Optimizer, Parallel

WIDTH, STEPS = 6, 4
DENSE = {"weight": Placement((WIDTH, WIDTH), Normal(0.3)), "bias": Placement((WIDTH,), Constant(0.1), decay=False)}
EXPERTS = {"weight": Placement((2, WIDTH, WIDTH), Normal(0.3), cut={"ep": 0})}


class Part(torch.nn.Module):
    def __init__(self, weights, axis=None):
        super().__init__()
        create_parameters(self, weights, axis, dtype=torch.float32, device=None)

    def forward(self, x):
        weight = self.weight if self.weight.dim() == 2 else self.weight[0]
        return torch.tanh(x @ weight.t() + (0.0 if self.bias is None else self.bias))


class Model(torch.nn.Module):
    """A dense layer, a layer of experts, a dense layer."""

    def __init__(self, mesh):
        super().__init__()
        self.blocks = torch.nn.ModuleDict({"0": Part(DENSE), "1": Part(EXPERTS, mesh.ep), "2": Part(DENSE)})
        told = {"0": DENSE, "1": EXPERTS, "2": DENSE}
        self.units = [Unit(f"blocks.{n}", table, layer=int(n)) for n, table in told.items()]

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


def _data(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)


def _train(rank, sizes, stage, overlap):
    mesh = Mesh(rank, ep=2, **sizes)
    model, parallel = Model(mesh), Parallel(sharding_stage=stage, overlap_grad_reduce=overlap)
    optimizer = DistributedOptimizer(model, mesh, Optimizer(), parallel, dtype=torch.float32, device="cpu", seed=3)
    start, norms = _pieces(optimizer), []
    for step in range(STEPS):
        x, y = _data(step, rank)
        optimizer.set_num_microbatches(1)
        ((model(x.requires_grad_()) - y) ** 2).sum().backward()
        norms.append(optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))[1])
        optimizer.step(1e-2, 0.1, 1.0)
    assert mesh.ep.rank == rank % 2
    return start, norms, _pieces(optimizer)


def _pieces(optimizer):
    """What a checkpoint would get from this rank."""
    found = optimizer.pieces(moments=False, unique=True, shared=True)
    return [(piece.name, piece.shape, piece.box, piece.tensor.clone()) for piece in found]


def _whole(pieces_of_ranks):
    """The tensors of a checkpoint; every element is given once."""
    tensors, given = {}, {}
    for name, shape, box, tensor in (piece for pieces in pieces_of_ranks for piece in pieces):
        tensors.setdefault(name, torch.zeros(shape))[box.slices()] = tensor
        given.setdefault(name, torch.zeros(shape))[box.slices()] += 1
    assert all(bool((count == 1).all()) for count in given.values())
    return tensors


def _reference(start, ranks):
    named = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    groups = [
        dict(params=[p for n, p in named.items() if ("bias" in n) is bias], weight_decay=0.1 * (not bias))
        for bias in (False, True)
    ]
    adam, norms = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8), []
    for step in range(STEPS):
        for rank in range(ranks):
            x, y = _data(step, rank)
            for n in "012":
                weight = named[f"blocks.{n}.weight"][rank % 2] if n == "1" else named[f"blocks.{n}.weight"]
                x = torch.tanh(x @ weight.t() + named.get(f"blocks.{n}.bias", torch.zeros(())))
            ((x - y) ** 2).sum().backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in named.values()]).item())
        adam.step()
        adam.zero_grad()
    return norms, {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "sizes, stage",
    [
        (dict(replicate=2), 0),  # every expert once
        (dict(replicate=4), 0),
        (dict(shard=4), 1),
        (dict(shard=4), 2),
        (dict(shard=4), 3),
        (dict(replicate=2, shard=2), 3),  # no copies of a shard, and nothing to divide
        (dict(replicate=2, shard=4), 2),  # two copies of two shards of each expert
        (dict(replicate=2, shard=4), 3),
    ],
)
def test_experts_train_as_in_one_process(sizes, stage, overlap, run_ranks):
    ranks = sizes.get("replicate", 1) * sizes.get("shard", 1)
    results = run_ranks(ranks, _train, sizes, stage, overlap)
    norms, weights = _reference(_whole(start for start, _, _ in results), ranks)
    for _, found, _ in results:
        assert found == pytest.approx(norms, rel=1e-5)
    trained = _whole(pieces for _, _, pieces in results)
    assert trained.keys() == weights.keys() and trained["blocks.1.weight"].shape == (2, WIDTH, WIDTH)
    for name, weight in trained.items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)


def test_groups_of_experts():
    """Two tensor parallel ranks, four data parallel ones with two experts: expert 0 is on dp ranks 0 and 2."""
    meshes = [Mesh(rank, tp=2, replicate=4, ep=2, create_groups=False) for rank in range(8)]
    assert [mesh.ep.ranks for mesh in meshes[::2]] == [(0, 2), (0, 2), (4, 6), (4, 6)]
    assert [mesh.expert_dp.ranks for mesh in meshes[::2]] == [(0, 4), (2, 6), (0, 4), (2, 6)]
    assert Mesh(1, replicate=4, create_groups=False).expert_dp.ranks == (0, 1, 2, 3)
