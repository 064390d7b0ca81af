# SPDX-License-Identifier: Apache-2.0
"""Experts in a layer, of which each data parallel rank holds one and several hold the same.

The experts are matrices [2, 6, 6], cut along `ep`: a rank multiplies its rows of the batch with the expert of its place.
One process with torch's AdamW does the same with both matrices.
"""

import pytest
import torch

from megatron.errors import NumericsError
from megatron.guard.replicas import check_buffers, check_replicas
from megatron.model.plain import as_stage
from megatron.model.weights import Unit
from megatron.mpu.layers import create_parameters, register_buffer
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


class Mixed(torch.nn.Module):
    """Experts, then a dense layer, in one unit."""

    def __init__(self, mesh):
        super().__init__()
        self.first, self.second, self.dense = Part(EXPERTS, mesh.ep), Part(EXPERTS, mesh.ep), Part(DENSE)

    def forward(self, x):
        return self.dense(self.second(self.first(x)))


class MixedModel(torch.nn.Module):
    """Two layers of both."""

    def __init__(self, mesh):
        super().__init__()
        self.blocks = torch.nn.ModuleDict({"0": Mixed(mesh), "1": Mixed(mesh)})

    forward = Model.forward


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


@pytest.mark.sampled(10)
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


@pytest.mark.parametrize("stage", [2, 3])
def test_experts_that_read_the_input_of_a_layer(stage, run_ranks):
    """The first layer's input has no gradient: what ends a unit there is its own last gradient, of dense weights first."""

    def steps(rank):
        mesh = Mesh(rank, shard=4, ep=2)
        model, kind = MixedModel(mesh), dict(dtype=torch.float32, device="cpu", seed=3)
        optimizer = DistributedOptimizer(model, mesh, Optimizer(), Parallel(sharding_stage=stage), **kind)
        start, norms, held = _pieces(optimizer), [], []
        for step in range(STEPS):
            x, y = _data(step, rank)
            ((model(x) - y) ** 2).sum().backward()
            held.append(optimizer.weights.nbytes)
            norms.append(optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))[1])
            optimizer.step(1e-2, 0.1, 1.0)
        return start, norms, _pieces(optimizer), held

    results = run_ranks(4, steps)
    named = {name: torch.nn.Parameter(values) for name, values in _whole(start for start, *_ in results).items()}
    groups = [
        dict(params=[p for n, p in named.items() if ("bias" in n) is bias], weight_decay=0.1 * (not bias))
        for bias in (False, True)
    ]
    adam, norms = torch.optim.AdamW(groups, lr=1e-2), []
    for step in range(STEPS):
        adam.zero_grad()
        for rank in range(4):
            x, y = _data(step, rank)
            for n in "01":
                for part in ("first", "second"):
                    x = torch.tanh(x @ named[f"blocks.{n}.{part}.weight"][rank % 2].t())
                x = torch.tanh(x @ named[f"blocks.{n}.dense.weight"].t() + named[f"blocks.{n}.dense.bias"])
            ((x - y) ** 2).sum().backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in named.values()]).item())
        adam.step()
    for _, found, _, held in results:
        assert found == pytest.approx(norms, rel=1e-5)
        assert stage == 2 or held == [0] * STEPS  # nothing is left gathered
    for name, weight in _whole(pieces for _, _, pieces, _ in results).items():
        torch.testing.assert_close(weight, named[name].detach(), rtol=1e-4, atol=1e-5)


def test_experts_are_gathered_with_their_layer(run_ranks):
    """In the order of use, not behind the dense weights of all layers."""

    def order(rank):
        mesh, kind, seen = Mesh(rank, shard=4, ep=2), dict(dtype=torch.float32, device="cpu", seed=3), []
        parallel = Parallel(sharding_stage=1, overlap_param_gather=True)
        optimizer = DistributedOptimizer(MixedModel(mesh), mesh, Optimizer(), parallel, **kind)
        start = optimizer.weights.start
        optimizer.weights.start = lambda memory: seen.append(memory.unit.name) or start(memory)
        optimizer.copy_main_params_to_model_params()
        return seen

    assert run_ranks(4, order) == [["blocks.0", "blocks.0 (experts)", "blocks.1", "blocks.1 (experts)"]] * 4


class Loads(torch.nn.Module):
    """Buffers: one number for each expert of this rank, and one for each of all experts."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        register_buffer(self, "own", torch.zeros(2), "sum", shape=(4,), cut={"ep": 0})
        register_buffer(self, "largest", torch.zeros(2), "max", shape=(4,), cut={"ep": 0})
        register_buffer(self, "all", torch.zeros(4), "sum", partial=("ep",))


def test_buffers_of_experts(run_ranks):
    """Ranks that hold the same experts make one value of theirs, and ranks of `ep` where they have parts of a sum."""

    def steps(rank):
        mesh = Mesh(rank, replicate=4, ep=2)
        model = as_stage(Loads())
        optimizer = DistributedOptimizer(model, mesh, Optimizer(), dtype=torch.float32, device="cpu", seed=3)
        for _ in range(2):
            model.own += torch.tensor([1.0, 10.0]) * 2**rank
            model.largest.copy_(torch.tensor([rank, -rank]))
            model.all += 2.0**rank
            optimizer.step(0.0, 0.0, 1.0)
        check_buffers(optimizer, 2)
        pieces = [
            (p.name, p.shape, p.box, p.tensor.clone())
            for p in optimizer.pieces(unique=True)
            if p.name in model._buffers
        ]
        return model.own.tolist(), model.largest.tolist(), model.all.tolist(), pieces

    results = run_ranks(4, steps)
    assert [own for own, *_ in results] == [[10.0, 100.0], [20.0, 200.0]] * 2
    assert [largest for _, largest, *_ in results] == [[2.0, 0.0], [3.0, -1.0]] * 2
    assert [both for *_, both, _ in results] == [[30.0] * 4] * 4
    whole = _whole(pieces for *_, pieces in results)
    assert whole["own"].tolist() == [10.0, 100.0, 20.0, 200.0] and whole["all"].tolist() == [30.0] * 4


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stage", [0, 3])
def test_copies_of_experts_are_compared(stage, run_ranks):
    def changed(rank):
        sizes = dict(replicate=4) if stage == 0 else dict(replicate=2, shard=4)
        mesh, parallel = Mesh(rank, ep=2, **sizes), Parallel(sharding_stage=stage)
        kind = dict(dtype=torch.float32, device="cpu", seed=3)
        optimizer = DistributedOptimizer(Model(mesh), mesh, Optimizer(), parallel, **kind)
        check_replicas(optimizer, 1)
        for own, slot, where in optimizer._primary_slots(optimizer.states[0]) if rank == 1 else ():
            if slot.name == "blocks.1.weight" and own.low == 0:
                optimizer.states[0].main[where.start] += 1e-6
        optimizer.copy_main_params_to_model_params()
        with pytest.raises(NumericsError) as found:
            check_replicas(optimizer, 2)
        return found.value.why

    ranks = "1, 3" if stage == 0 else "1, 5"
    for said in run_ranks(4 if stage == 0 else 8, changed):
        assert f"blocks.1.weight (main weights) differs on ranks {ranks} of {ranks} (expert_replicate)" in said
        assert "blocks.0" not in said and "blocks.2" not in said


def test_groups_of_experts():
    """Two tensor parallel ranks, four data parallel ones with two experts: expert 0 is on dp ranks 0 and 2."""
    meshes = [Mesh(rank, tp=2, replicate=4, ep=2, create_groups=False) for rank in range(8)]
    assert [mesh.ep.ranks for mesh in meshes[::2]] == [(0, 2), (0, 2), (4, 6), (4, 6)]
    assert [mesh.expert_dp.ranks for mesh in meshes[::2]] == [(0, 4), (2, 6), (0, 4), (2, 6)]
    assert Mesh(1, replicate=4, create_groups=False).expert_dp.ranks == (0, 1, 2, 3)
