# SPDX-License-Identifier: Apache-2.0
"""Muon against torch's own on plain linear weights, and its parts against their definitions."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron.checkpoint.boxes import Box
from megatron.errors import SettingsError
from megatron.mpu.layers import create_parameters
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Normal, Placement
from megatron.optimizer.kinds import COEFFICIENTS
from megatron.optimizer.muon import Directions, UnitWork, divide_work, orthogonal
from megatron.optimizer.sharded import sharded_init
from megatron.optimizer.units import flat_units_of
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings.schema import Optimizer, Parallel

WIDTH = 16
TORCHS = Optimizer(
    optimizer="muon",
    muon_momentum=0.9,
    muon_nesterov=True,
    muon_scale_mode="shape_scaling",
    muon_coefficient_type="simple",
    adam_beta2=0.95,
)


class Plain(torch.nn.Module):
    """A table, linear layers of all shapes of matrices in `blocks`, and an output layer."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, WIDTH)
        shapes = ((WIDTH, 3 * WIDTH), (3 * WIDTH, 8), (8, WIDTH))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(*shape, bias=n == 1) for n, shape in enumerate(shapes))
        self.output = torch.nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.output(x).square().sum()


def rows(step):
    return torch.randint(10, (8,), generator=torch.Generator().manual_seed(step))


def trained(rank, sizes, settings, stage=0, steps=4, **parallel):
    """(weights by name, moments by name and box) after some steps; data parallel ranks share the rows."""
    mesh = Mesh(rank, **sizes)
    model, optimizer = sharded_init(
        Plain, mesh, settings, Parallel(sharding_stage=stage, **parallel), seed=5, init_std=0.5
    )
    for step in range(steps):
        model(rows(step)[mesh.dp.rank :: mesh.dp.size]).backward()
        optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))
        optimizer.step(2e-2, 0.1, 1 / 8)
    with optimizer.gathered_parameters():
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    moments = {piece.name for piece in optimizer.pieces() if piece.name.startswith("optimizer.")}
    return weights, moments, sum(state.nbytes for state in optimizer.states)


def torchs(settings, adjust="original", lr=2e-2, steps=4):
    """The same with torch.optim.Muon for the weights of linear layers in `blocks`, AdamW for all others."""
    model, _ = sharded_init(Plain, Mesh(), settings, Parallel(), seed=5, init_std=0.5)
    weights = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in model.named_parameters()}
    matrices = [name for name in weights if name.startswith("blocks") and name.endswith("weight")]
    tables = [name for name in ("table.weight", "output.weight")]
    vectors = [name for name in weights if name not in matrices + tables]
    muon = torch.optim.Muon(
        [weights[name] for name in matrices],
        lr=lr,
        weight_decay=0.1,
        momentum=settings.muon_momentum,
        nesterov=settings.muon_nesterov,
        ns_steps=settings.muon_num_ns_steps,
        adjust_lr_fn=adjust,
    )
    groups = [dict(params=[weights[n] for n in tables], weight_decay=0.1)]
    groups.append(dict(params=[weights[n] for n in vectors], weight_decay=0.0))
    adam = torch.optim.AdamW(groups, lr=lr, betas=(settings.adam_beta1, settings.adam_beta2))
    for step in range(steps):
        loss = torch.func.functional_call(model, weights, (rows(step),)) / 8
        for weight, gradient in zip(weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True):
            weight.grad = gradient
        muon.step()
        adam.step()
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize(
    "changes, adjust",
    [
        ({}, "original"),
        (dict(muon_nesterov=False, muon_momentum=0.5, muon_num_ns_steps=3), "original"),
        (dict(muon_scale_mode="spectral", muon_extra_scale_factor=0.2), "match_rms_adamw"),
    ],
    ids=["nesterov", "plain momentum", "as large as AdamW's"],
)
def test_plain_linear_weights_move_as_with_torchs_muon(changes, adjust):
    settings = replace(TORCHS, **changes)
    # Two steps: the iteration in bf16 magnifies a last bit of a gradient, on some CPUs to 3e-4 of a weight in the third.
    weights, moments, size = trained(0, {}, settings, steps=2)
    expected = torchs(settings, adjust, steps=2)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    matrices = {f"blocks.{n}.weight" for n in range(3)}
    assert moments == {f"optimizer.momentum_buffer.{name}" for name in matrices} | {
        f"optimizer.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in weights.keys() - matrices
    }


def test_a_matrix_has_one_number_of_state_and_other_weights_two():
    _, _, size = trained(0, {}, TORCHS, steps=1)
    table, matrices, bias, output = 10 * WIDTH + 32, WIDTH * 48 + 48 * 8 + 8 * WIDTH, 64, 10 * WIDTH + 32 + 64  # padded
    assert size == 8 * matrices + 12 * (table + bias + output)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_parallel_ranks_and_shards_move_as_one_process_does(stage, run_ranks):
    settings = replace(TORCHS, muon_fp32_matmul_prec="highest")
    expected, *_ = trained(0, {}, settings)
    sizes = dict(shard=3) if stage else dict(replicate=3)
    for weights, *_ in run_ranks(
        3, lambda rank: trained(rank, sizes, settings, stage, overlap_param_gather=stage == 1)
    ):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)


class Fused(torch.nn.Module):
    """What a layer's fused weight is: matrices along one of its dims, a rank's part along another."""

    def __init__(self, mesh, matrices, cut, shape):
        super().__init__()
        self.blocks = torch.nn.ModuleDict({"0": torch.nn.Module()})
        local = [n // mesh.tp.size if dim == cut else n for dim, n in enumerate(shape)]
        self.blocks["0"].weight = torch.nn.Parameter(torch.empty(local, device="meta"))
        placement = Placement(shape, Normal(0.3), cut={} if cut is None else {"tp": cut}, matrices=matrices)
        self.blocks["0"].placements = {"weight": placement}


FUSED = {  # matrices, the dim that tp cuts, shape
    "queries, keys, values": ((1, (2, 1, 1)), 0, (4, 4, 3, 10)),
    "gate, values": ((0, (1, 1)), 1, (2, 12, 10)),
    "columns": ((0, (12,)), 0, (12, 10)),
    "rows": ((0, (7,)), 1, (7, 20)),
    "on all ranks alike": ((0, (7,)), None, (7, 20)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sizes", [{}, dict(tp=2), dict(tp=2, shard=2)], ids=["one rank", "tp2", "tp2 zero1"])
@pytest.mark.parametrize("case", FUSED)
def test_each_matrix_of_a_fused_weight_is_torchs_own(case, sizes, run_ranks):
    matrices, cut, shape = FUSED[case]
    dim, counts = matrices
    settings = replace(TORCHS, muon_momentum=0.0, muon_nesterov=False)

    def body(rank):
        mesh = Mesh(rank, **sizes)
        model = Fused(mesh, *FUSED[case])
        parallel = Parallel(sharding_stage=1 if "shard" in sizes else 0)
        optimizer = DistributedOptimizer(model, mesh, settings, parallel, dtype=torch.float32, device="cpu", seed=1)
        weight = model.blocks["0"].weight
        before = weight.detach().clone()
        part = whole if cut is None else whole.chunk(mesh.tp.size, cut)[mesh.tp.rank]
        (weight * part).sum().backward()
        optimizer.finalize_grads(torch.zeros(1))
        optimizer.step(1.0, 0.0, 1 / mesh.dp.size)
        return mesh.tp.rank, before - weight.detach()

    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(shape)
    for gradient, moved in zip(whole.split(counts, dim), expected.split(counts, dim), strict=True):
        flat = torch.nn.Parameter(torch.zeros(gradient.numel() // shape[-1], shape[-1]))
        flat.grad = gradient.reshape(flat.shape).clone()
        torch.optim.Muon([flat], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        moved.copy_(-flat.detach().view(moved.shape))
    tp = sizes.get("tp", 1)
    for place, moved in run_ranks(tp * sizes.get("shard", 1), body) if sizes else [body(0)]:
        torch.testing.assert_close(
            moved, expected if cut is None else expected.chunk(tp, cut)[place], rtol=1e-4, atol=1e-5
        )


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "sizes, grid", [(dict(tp=2, replicate=2), (2, 1)), (dict(shard=4), (2, 2)), (dict(shard=4), (2, 1))], ids=str
)
def test_each_expert_is_a_matrix(sizes, grid, run_ranks):
    """Four experts over ep, whose rows are divided over etp, with a gate or without, beside a dense matrix over tp: torch's
    own of each.
    """
    settings = replace(TORCHS, muon_momentum=0.0, muon_nesterov=False)
    draw = torch.Generator().manual_seed(1)
    shapes = {"experts": (4, 6, 10), "dense": (12, 10), "gated": (4, 2, 6, 10)}
    whole = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    tables = {
        "gated": Placement((4, 2, 6, 10), Normal(0.3), cut={"ep": 0, "etp": 2}, matrices=(0, (1,) * 4), fused=2),
        "experts": Placement((4, 6, 10), Normal(0.3), cut={"ep": 0, "etp": 1}, matrices=(0, (1,) * 4)),
        "dense": Placement((12, 10), Normal(0.3), cut={"tp": 0}, matrices=(0, (12,))),
    }

    def body(rank):
        mesh = Mesh(rank, ep=grid[0], etp=grid[1], **sizes)
        model, parallel = torch.nn.Module(), Parallel(sharding_stage=int("shard" in sizes))
        create_parameters(model, tables, (mesh.tp, mesh.ep, mesh.etp), dtype=torch.float32, device="meta")
        optimizer = DistributedOptimizer(model, mesh, settings, parallel, dtype=torch.float32, device="cpu", seed=1)
        before, boxes = {}, {}
        for name, placed in tables.items():
            weight = getattr(model, name)
            before[name] = weight.detach().clone()
            boxes[name] = Box(*placed.box(weight.shape, mesh.coordinates)).slices()
            (weight * whole[name][boxes[name]]).sum().backward()
        optimizer.finalize_grads(torch.zeros(1))
        optimizer.step(1.0, 0.0, 1.0)
        return {name: (boxes[name], before[name] - getattr(model, name).detach()) for name in tables}

    def direction(gradient):
        flat = torch.nn.Parameter(torch.zeros_like(gradient))
        flat.grad = gradient.clone()
        torch.optim.Muon([flat], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        return -flat.detach()

    each = lambda matrices: torch.stack(list(map(direction, matrices)))
    wanted = {"experts": each(whole["experts"]), "dense": direction(whole["dense"])}
    wanted["gated"] = each(whole["gated"].flatten(0, 1)).view(shapes["gated"])
    for found in run_ranks(4, body):
        for name, (box, moved) in found.items():
            torch.testing.assert_close(moved, wanted[name][box], rtol=1e-4, atol=1e-5)


def test_an_expert_that_ranks_of_ep_divide_is_refused():
    placed = Placement((4, 6, 10), Normal(0.3), cut={"ep": 1}, matrices=(0, (1,) * 4))
    model = torch.nn.Module()
    mesh = Mesh(0, replicate=2, ep=2, create_groups=False)
    create_parameters(model, {"experts": placed}, mesh.ep, dtype=torch.float32, device="meta")
    [unit] = flat_units_of(model, partial(getattr, mesh))
    with pytest.raises(SettingsError, match="ranks of ep divide the matrices of experts, each of which it needs whole"):
        UnitWork.of(unit, mesh)


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_an_orthogonalised_matrix_has_the_same_singular_vectors_and_values_near_one(kind, shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    steps = COEFFICIENTS[kind] * max(1, 5 // len(COEFFICIENTS[kind]))
    found = orthogonal(matrix, steps)
    inside = left.T @ found.double() @ right.T
    values = values / values.norm()
    for a, b, c in steps:  # what the polynomials make of singular values
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(inside, torch.diag(values), rtol=0, atol=2e-5)
    assert 0.65 < values.min() < values.max() < 1.25


def test_work_is_divided_so_that_nobody_waits_for_one_rank():
    equal = Placement((8, 4, 16, 128), Normal(1.0), matrices=(1, (1, 1, 2)))
    assert divide_work([equal], 1) == [[0, 0, 0]]
    loads = [0] * 3
    placements = [equal, Placement((128, 128), Normal(1.0), matrices=(0, (128,)))]
    for placed, workers in zip(placements, divide_work(placements, 3), strict=True):
        for (height, width), worker in zip(placed.matrix_shapes(), workers, strict=True):
            loads[worker] += height * width * min(height, width)
    assert max(loads) <= 2 * min(loads)


def test_products_are_computed_as_they_are_told():
    """--muon-fp32-matmul-prec: in fp32 the fp64 answer, in bf16 to two digits; torch is left as it was."""
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(3))
    exact = orthogonal(matrix.double(), COEFFICIENTS["simple"] * 5, torch.float64)
    before = torch.get_float32_matmul_precision()
    errors = {}
    for precision in ("highest", "high", "medium"):
        settings = replace(TORCHS, muon_fp32_matmul_prec=precision, muon_scale_mode="shape_scaling")
        errors[precision] = (Directions(settings).direction(matrix) - exact).abs().max().item()
        assert torch.get_float32_matmul_precision() == before
    assert errors["highest"] < 1e-5 and errors["high"] < 1e-2 and 1e-4 < errors["medium"] < 5e-2
