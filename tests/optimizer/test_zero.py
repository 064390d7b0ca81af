# SPDX-License-Identifier: Apache-2.0
"""Flat, sharded AdamW against torch's own, and one layout against another."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron.mpu import random
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, LogUniform, Normal, Own, Placement, Uniform, placements
from megatron.optimizer.flat import ALIGN
from megatron.optimizer.units import OwnedRange, Slot, flat_units_of, initialise
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings import schema

SETTINGS = schema.Optimizer(lr=1e-2, weight_decay=0.1)


class Layer(torch.nn.Module):
    def __init__(self, inputs, outputs, device="meta"):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, device=device))
        self.bias = torch.nn.Parameter(torch.empty(outputs, device=device))
        self.placements = dict(
            weight=Placement((outputs, inputs), Normal(0.3)), bias=Placement((outputs,), Constant(0.1), decay=False)
        )

    def forward(self, x):
        return x @ self.weight.t().float() + self.bias.float()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleDict({"0": Layer(5, 7), "1": Layer(7, 7)})
        self.output = Layer(7, 3)

    def forward(self, x):
        for block in self.blocks.values():
            x = torch.tanh(block(x))
        return self.output(x)


def _data(step, rows=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


def _train(rank, mesh_sizes, steps, num_microbatches=2, dtype=torch.float32, clip=None):
    """Losses, norms and weights after some steps; data-parallel ranks and micro-batches share 8 rows."""
    mesh = Mesh(rank, **mesh_sizes)
    model = Model()
    optimizer = DistributedOptimizer(model, mesh, SETTINGS, dtype=dtype, device="cpu", seed=1)
    dp, seen = mesh.dp, []
    for step in range(steps):
        total = 0.0
        x, y = _data(step)
        for part in range(num_microbatches):
            mine = slice(part * dp.size + dp.rank, None, num_microbatches * dp.size)
            loss = ((model(x[mine]) - y[mine]) ** 2).sum()
            total += loss.item()
            loss.backward()
        sums, norm = optimizer.finalize_grads(torch.tensor([total, 1.0], dtype=torch.float64))
        optimizer.step(1e-2, 0.1, 1 / 8)
        seen.append((sums[0].item(), norm))
    weights = {name: parameter.detach().clone() for name, (parameter, _) in placements(model).items()}
    return seen, weights, sum(state.main.numel() for state in optimizer.states)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("tp, at", [(1, 0), (2, 0), (2, 1)])
def test_ranges_of_initial_values_are_those_of_whole_parameters(ranks, tp, at, monkeypatch):
    """Ranges begin inside rows and blocks; rows of padding are 0."""
    monkeypatch.setattr(random, "BLOCK", 30)
    placed = {
        "matrix": Placement((11, 6), Normal(0.5), cut={"tp": 0}),
        "bias": Placement((11,), Constant(3.0), cut={"tp": 0}),
        "scalar": Placement((), Constant(2.0)),
        "wide": Placement((7, 4, 5), Normal(0.1), cut={"tp": 1}),
        "norm": Placement((6,), Constant(1.0)),
        "own": Placement((4, 3), Own()),
    }
    shapes = dict(
        matrix=(-(-11 // tp), 6), bias=(-(-11 // tp),), scalar=(), wide=(7, 4 // tp, 5), norm=(6,), own=(4, 3)
    )
    wanted, slots, start = [], [], 0
    for name, shape in shapes.items():
        whole = torch.full(shape, 9.0)
        if name == "own":
            whole = torch.arange(12.0).view(shape)
        else:
            random.init_parameter(name, whole, placed[name], {"tp": at}, 7)
        slots.append(Slot(name, torch.empty(shape, device="meta"), placed[name], start, start + whole.numel()))
        slots[-1].values = whole if name == "own" else None
        wanted.append(whole.flatten())
        start += whole.numel()
    wanted = torch.cat(wanted)
    unit, each, found = SimpleNamespace(slots=slots, size=len(wanted)), -(-len(wanted) // ranks), []
    for low in range(0, len(wanted), each):
        own = OwnedRange(unit, low, min(low + each, len(wanted)), 100)
        values = {slot.name: slot.values for slot in slots}
        part = torch.full((own.high - own.low,), 5.0)
        initialise(own, part, {"tp": at}, 7)
        for slot in slots:
            slot.values = values[slot.name]
        found.append(part)
    assert torch.equal(torch.cat(found), wanted)


def _drawn(rank, sizes, stage):
    """The weights of a fresh model, and how many numbers this rank drew for them."""
    counts, draw = [], random._drawn
    random.BLOCK = 5  # numbers: less than a row
    random._drawn = lambda init, shape, generator: counts.append(shape[0] * shape[1]) or draw(init, shape, generator)
    model, parallel = Model(), schema.Parallel(sharding_stage=stage)
    optimizer = DistributedOptimizer(
        model, Mesh(rank, **sizes), SETTINGS, parallel, dtype=torch.float32, device="cpu", seed=1
    )
    optimizer.weights.need(*optimizer.weights.memory.values())
    return [parameter.detach().clone() for parameter in model.parameters()], sum(counts)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "sizes, stage",
    [(dict(replicate=4), 0), (dict(replicate=3), 0), (dict(shard=4), 1), (dict(replicate=2, shard=2), 3)],
)
def test_ranks_with_copies_draw_a_part_each(sizes, stage, run_ranks):
    [(whole, alone)] = run_ranks(1, _drawn, {}, 0)
    assert alone == 5 * 7 + 7 * 7 + 7 * 3  # each number once; biases are not drawn
    found = run_ranks(math.prod(sizes.values()), _drawn, sizes, stage)
    assert all(torch.equal(a, b) for weights, _ in found for a, b in zip(weights, whole, strict=True))
    rows_in_two_parts = 3 * 3 * 7  # three cuts in each of three matrices
    assert alone <= sum(count for _, count in found) <= alone + rows_in_two_parts


CUT = {  # of rows: the input dim of a row-parallel weight, the output dim of gate and values, the matrices of experts
    "row": (Placement((37, 12), Normal(0.5), cut={"tp": 1}), (37, 3), dict(tp=4)),
    "padded": (Placement((9, 10), Normal(0.5), cut={"tp": 1}), (9, 3), dict(tp=4)),
    "nothing for the last": (Placement((5, 9), Normal(0.5), cut={"tp": 1}), (5, 3), dict(tp=4)),
    "gate": (Placement((2, 8, 5), Uniform(0.0, 1.0), cut={"tp": 1}), (2, 2, 5), dict(tp=4)),
    "experts": (Placement((6, 4, 5), Normal(0.1), cut={"ep": 0, "etp": 2}), (3, 4, 3), dict(tp=4, ep=2, etp=2)),
    "one block": (Placement((4, 8), LogUniform(0.1, 0.9), cut={"tp": 1}), (4, 2), dict(tp=4)),
}


def _drawn_together(rank, sizes, block):
    """(rows of a rank's part, the same drawn alone, numbers that it drew) of each tensor, for three ranges of rows."""
    random.BLOCK, random.DRAWN_AT_ONCE = block, 4 * block  # several rounds
    mesh, counts, draw, found = Mesh(rank, **sizes), [], random._drawn, {}
    random._drawn = lambda init, shape, generator: counts.append(math.prod(shape)) or draw(init, shape, generator)
    for name, (placement, shape, needed) in CUT.items():
        for low, high in ((0, shape[0]), (1, shape[0] - 1), (2, 2)) if needed == sizes else ():
            rows, alone = torch.full((high - low, *shape[1:]), 9.0), torch.full((high - low, *shape[1:]), 9.0)
            counts.clear()
            random.init_rows(name, rows, low, shape, placement, mesh.coordinates, 7, lambda axis: getattr(mesh, axis))
            number = sum(counts)
            random.init_rows(name, alone, low, shape, placement, mesh.coordinates, 7)
            found[name, low, high] = rows, alone, number
    return found


@pytest.mark.parametrize("sizes", [dict(tp=4), dict(tp=4, ep=2, etp=2)], ids=["tp", "etp"])
@pytest.mark.parametrize("block", [20, 1 << 20])
def test_ranks_that_cut_rows_draw_each_number_once(sizes, block, run_ranks):
    """To the bits of a rank that draws all of it; blocks of a row or two, or one of everything."""
    results = run_ranks(4, _drawn_together, sizes, block)
    for name, low, high in results[0]:
        for found in results:
            rows, alone, _ = found[name, low, high]
            assert torch.equal(rows, alone), (name, low, high)
        placement, shape, _ = CUT[name]
        drawn = sum(found[name, low, high][2] for found in results)
        width = math.prod(placement.shape[1:])
        at_a_time = max(1, block // width)
        first = [0, 3] if name == "experts" else [0]  # rows of the two groups of experts
        blocks = {b for at in first for b in range((at + low) // at_a_time, -(-(at + high) // at_a_time)) if high > low}
        copies = len(first) if name == "experts" and block > 20 else 1  # both groups are in the only block
        assert drawn == copies * sum(
            width * (min((b + 1) * at_a_time, placement.shape[0]) - b * at_a_time) for b in blocks
        )


def _torch_reference(steps):
    model = Model()
    DistributedOptimizer(model, Mesh(), SETTINGS, dtype=torch.float32, device="cpu", seed=1)
    model2 = Model().to_empty(device="cpu")
    model2.load_state_dict(model.state_dict())
    named = placements(model2)
    groups = [
        dict(params=[p for p, place in named.values() if place.decay is decay], weight_decay=0.1 * decay)
        for decay in (True, False)
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    seen = []
    for step in range(steps):
        x, y = _data(step)
        loss = ((model2(x) - y) ** 2).sum()
        (loss / 8).backward()
        norm = torch.nn.utils.get_total_norm([p.grad * 8 for p in model2.parameters()]).item()
        seen.append((loss.item(), norm))
        adam.step()
        adam.zero_grad()
    return seen, {name: parameter.detach() for name, (parameter, _) in named.items()}


def test_equals_torch_adamw():
    seen, weights, _ = _train(0, {}, 5)
    expected, expected_weights = _torch_reference(5)
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "mesh, num_microbatches",
    [(dict(replicate=2), 1), (dict(shard=2), 2), (dict(replicate=2, shard=2), 1), (dict(shard=4), 1)],
)
def test_layouts_agree(mesh, num_microbatches, run_ranks):
    expected, expected_weights, elements = _train(0, {}, 4)
    world = mesh.get("replicate", 1) * mesh.get("shard", 1)
    for seen, weights, own in run_ranks(world, _train, mesh, 4, num_microbatches):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-5, atol=1e-7)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=1e-4, atol=1e-5)
        assert own <= elements / mesh.get("shard", 1) + 3 * ALIGN * 4  # three units, padded


def test_bf16_weights_are_rounded_main_weights():
    model = Model()
    optimizer = DistributedOptimizer(model, Mesh(), SETTINGS, dtype=torch.bfloat16, device="cpu", seed=1)
    (state,) = optimizer.states
    assert state.main.dtype == torch.float32 and model.output.weight.dtype == torch.bfloat16
    before = state.main.clone()
    for _ in range(3):
        x, y = _data(0)
        ((model(x) - y) ** 2).sum().backward()
        optimizer.finalize_grads(torch.zeros(2))
        optimizer.step(1e-5, 0.0, 1.0)
    assert (state.main - before).abs().max() > 1e-6  # steps far below bf16's resolution are not lost
    assert torch.equal(optimizer.weights.whole[torch.bfloat16], state.main.bfloat16())


def test_gradients_accumulate_and_a_step_starts_anew():
    model = Model()
    optimizer = DistributedOptimizer(model, Mesh(), SETTINGS, dtype=torch.float32, device="cpu", seed=1)
    for _ in range(3):
        x, y = _data(0)
        ((model(x) - y) ** 2).sum().backward()
        ((model(x) - y) ** 2).sum().backward()
        _, norm = optimizer.finalize_grads(torch.zeros(2))
        assert all(parameter.grad is None for parameter in model.parameters())
    ((model(x) - y) ** 2).sum().backward()
    assert norm == pytest.approx(2 * optimizer.finalize_grads(torch.zeros(2))[1], rel=1e-6)


def test_a_parameter_without_gradient_in_a_step_counts_as_zero():
    model = Model()
    optimizer = DistributedOptimizer(model, Mesh(), SETTINGS, dtype=torch.float32, device="cpu", seed=1)
    model(_data(0)[0]).sum().backward()
    optimizer.finalize_grads(torch.zeros(2))
    model.blocks["0"](_data(0)[0]).sum().backward()
    optimizer.finalize_grads(torch.zeros(2))
    unit = next(unit for unit in optimizer.units if unit.name == "output")
    assert not optimizer.reduced[unit.start : unit.start + unit.size].any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_on_one_rank_is_seen_by_all(bad, run_ranks):
    def body(rank):
        model = Model()
        optimizer = DistributedOptimizer(
            model, Mesh(rank, shard=2), SETTINGS, dtype=torch.float32, device="cpu", seed=1
        )
        x, _ = _data(0)
        (model(x).sum() * (bad if rank == 1 else 1.0)).backward()
        return optimizer.finalize_grads(torch.zeros(2))[1]

    assert not any(torch.isfinite(torch.tensor(run_ranks(2, body))))


def test_units_are_aligned_and_decayed_first():
    units = flat_units_of(Model(), partial(getattr, Mesh(0, shard=3, create_groups=False)))
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", "output"]
    for unit in units:
        assert unit.start % ALIGN == 0 and unit.size % (3 * ALIGN) == 0
        assert [slot.name.split(".")[-1] for slot in unit.slots] == ["weight", "bias"]
        assert all(slot.start % ALIGN == 0 for slot in unit.slots)
        assert unit.slots[0].stop <= unit.decay <= unit.slots[1].start


def test_pieces_tile_every_tensor(run_ranks):
    """What the ranks of any sharding would save is every logical tensor exactly once, moments included."""
    from megatron.checkpoint.boxes import find_flaw

    def body(rank):
        optimizer = DistributedOptimizer(
            Model(), Mesh(rank, shard=3), SETTINGS, dtype=torch.bfloat16, device="cpu", seed=1
        )
        return [(piece.name, piece.shape, piece.box) for piece in optimizer.pieces()]

    boxes: dict = {}
    for name, shape, box in [entry for entries in run_ranks(3, body) for entry in entries]:
        boxes.setdefault((name, shape), []).append(box)
    assert len(boxes) == 3 * 6
    for (name, shape), found in boxes.items():
        assert find_flaw(shape, found) is None, name
