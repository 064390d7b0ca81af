# SPDX-License-Identifier: Apache-2.0
"""bf16 moments and gradients: the arithmetic that they stand for, bit by bit, in every stage, layout and place of state."""

import hashlib
import math
from functools import cache

import numpy as np
import pytest
import torch
from torch.optim.adamw import adamw

from megatron.checkpoint.boxes import Box
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.optimizer import flat, scratch
from megatron.optimizer.rounding import Noise
from megatron.optimizer.sharded import sharded_init
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings import schema

SEED, ROWS, WIDTH, STEPS = 5, 16, 64, 4
BOTH = dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
NEAREST = BOTH | dict(stochastic_rounding=False)
LION = dict(optimizer="lion", exp_avg_dtype="bf16")
MOMENTUM = dict(optimizer="sgd", exp_avg_dtype="bf16")
SHAPES = {  # logical shape, dim that tp cuts
    "blocks.0.up": ((ROWS, WIDTH), 0),
    "blocks.0.down": ((ROWS, WIDTH), 1),
    "blocks.0.bias": ((WIDTH,), 0),
    "blocks.1.experts": ((3, ROWS, 8), 1),
    "blocks.1.norm": ((WIDTH,), None),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts that are widened end inside rows; files have many parts. All are whole vectors of the CPU: the rest of one is
    computed by other instructions, whose last bit may differ.
    """
    monkeypatch.setitem(flat.WIDENED, "cpu", 96)
    monkeypatch.setattr(scratch, "PART", 2048)


class Block(torch.nn.Module):
    def __init__(self, prefix, tp):
        super().__init__()
        self.placements = {}
        for name, (shape, dim) in SHAPES.items():
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                local = [size // tp if d == dim else size for d, size in enumerate(shape)]
                setattr(self, name, torch.nn.Parameter(torch.empty(local, device="meta")))
                cut = {} if dim is None else {"tp": dim}
                init = Normal(0.3) if len(shape) > 1 else Constant(0.5)
                self.placements[name] = Placement(shape, init, cut=cut, decay=len(shape) > 1)
        self.prefix = prefix

    def forward(self, x, gradients):
        """A sum whose derivatives are these."""
        return x + sum((getattr(self, name) * gradients[self.prefix + name]).sum() for name in self.placements)


class Model(torch.nn.Module):
    def __init__(self, tp=1):
        super().__init__()
        self.blocks = torch.nn.ModuleDict({str(n): Block(f"blocks.{n}.", tp) for n in range(2)})

    def forward(self, x, gradients):
        for block in self.blocks.values():
            x = block(x, gradients)
        return x


def build(rank=0, sizes=None, stage=0, overlap=False, dtype=torch.float32, **settings):
    mesh = Mesh(rank, **(sizes or {}))
    model, parallel = Model(mesh.tp.size), schema.Parallel(sharding_stage=stage, overlap_grad_reduce=overlap)
    settings = schema.Optimizer(**settings)
    return model, DistributedOptimizer(model, mesh, settings, parallel, dtype=dtype, device="cpu", seed=SEED)


def gradient_of(name, step):
    """Of a whole tensor; sizes differ by orders of magnitude, as in training."""
    shape, _ = SHAPES[name]
    generator = torch.Generator().manual_seed(1000 * step + list(SHAPES).index(name))
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(4)


def trained(rank=0, sizes=None, **settings):
    """Piece -> values after some updates from given gradients."""
    _, optimizer = build(rank, sizes, **settings)
    for step in range(STEPS):
        for slot, where in optimizer.owned_slots():
            offset, extent = slot.placement.box(slot.parameter.shape, optimizer.mesh.coordinates)
            whole = gradient_of(slot.name, step)
            whole = narrow(whole) if optimizer.gradients.dtype == torch.bfloat16 else whole
            local = whole[tuple(slice(at, at + n) for at, n in zip(offset, extent, strict=True))].flatten()
            own = next(own for own in optimizer.owned if slot in own.unit.slots)
            first = own.low + where.start - own.at - slot.start
            optimizer.reduced[where] = local[first : first + where.stop - where.start]
        optimizer.step(1e-2, 0.1, 0.5)
    return {(piece.name, piece.box): piece.tensor.clone() for piece in optimizer.pieces()}


# ---- the explicit arithmetic -----------------------------------------------------------------------------------------


def mixed(numbers, key):
    """lowbias32 of uint32 numbers + key."""
    x = numbers + np.uint32(key & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def seed(*position):
    return int.from_bytes(hashlib.blake2b(repr(position).encode(), digest_size=8).digest(), "little") >> 1


def words(name, step):
    """The word of each element of a whole tensor, in the low 16 bits."""
    shape, _ = SHAPES[name]
    row, column = np.divmod(np.arange(math.prod(shape), dtype=np.uint32), np.uint32(shape[-1]))
    rows, columns = mixed(row, seed(SEED, step, "rows")), mixed(column, seed(SEED, step, "columns"))
    return rows + columns + np.uint32(seed(SEED, step, name) & 0xFFFFFFFF)


def rounded(values, word):
    """fp32 values in bf16, as fp32; word: random words of the elements, or None for the nearest number."""
    if word is None:
        return values.bfloat16().float()
    bits = values.numpy().ravel().view(np.uint32) + (word & np.uint32(0xFFFF))
    return torch.from_numpy((bits & np.uint32(0xFFFF0000)).view(np.float32)).view(values.shape)


@cache
def plain(case):
    """The same updates in plain torch: fp32 formulas on whole tensors, and the rounding of moments behind each."""
    settings = schema.Optimizer(**dict(case))
    found = {}
    initial = {piece.name: piece.tensor.clone() for piece in build()[1].pieces(moments=False)}
    for name, (shape, _) in SHAPES.items():
        weight, decay = initial[name].view(shape), 0.1 if len(shape) > 1 else 0.0
        first, second = torch.zeros(shape), torch.zeros(shape)
        for step in range(STEPS):
            gradient = gradient_of(name, step)
            if settings.reduced_format == "bf16":
                gradient = gradient.bfloat16().float()
            gradient = 0.5 * gradient
            if settings.optimizer == "adam":
                counts = [torch.tensor(float(step))]
                rates = dict(lr=1e-2, weight_decay=decay, beta1=0.9, beta2=0.999, eps=1e-8)
                kind = dict(fused=True, amsgrad=False, maximize=False)
                adamw([weight], [gradient], [first], [second], [], counts, **kind, **rates)
            elif settings.optimizer == "lion":
                direction = (first * 0.95).add(gradient, alpha=1 - 0.95).sign()
                weight.mul_(1 - 1e-2 * decay).add_(direction, alpha=-1e-2)
                first = (first * 0.98).add(gradient, alpha=1 - 0.98)
            else:
                first = first * 0.9 + (gradient.add(weight, alpha=decay) if decay else gradient)
                weight.add_(first, alpha=-1e-2)
            word = words(name, step) if settings.stochastic_rounding else None
            if settings.exp_avg_dtype == "bf16":
                first = rounded(first, word)
            if settings.exp_avg_sq_dtype == "bf16":
                second = rounded(second, word)
        states = dict(adam=("exp_avg", "exp_avg_sq"), lion=("exp_avg",), sgd=("momentum_buffer",))[settings.optimizer]
        found[name] = weight
        found |= {f"optimizer.{state}.{name}": values for state, values in zip(states, (first, second), strict=False)}
    return found


CASES = {
    "random": BOTH,
    "nearest": NEAREST,
    "the second moment": dict(exp_avg_sq_dtype="bf16"),
    "gradients too": BOTH | dict(grad_reduce_in_bf16=True),
    "gradients alone": dict(main_grads_dtype="bf16"),
    "lion": LION | dict(grad_reduce_in_bf16=True),
    "sgd": MOMENTUM,
}


def compare(found, case):
    expected = plain(tuple(case.items()))
    for (name, box), values in found.items():
        narrow = case.get("exp_avg_sq_dtype" if "exp_avg_sq" in name else "exp_avg_dtype") == "bf16"
        assert values.dtype == (torch.bfloat16 if narrow and name.startswith("optimizer.") else torch.float32), name
        wanted = expected[name][box.slices()]
        assert torch.equal(values.float(), wanted), (
            f"{name}: {(values.float() != wanted).sum()} of {wanted.numel()} differ"
        )


@pytest.mark.parametrize("name", CASES)
def test_updates_are_the_explicit_arithmetic(name):
    found = trained(**CASES[name])
    assert {key for key, _ in found} == plain(tuple(CASES[name].items())).keys()
    compare(found, CASES[name])


LAYOUTS = {
    "stage 0": (dict(replicate=2), 0),
    "stage 1": (dict(shard=2), 1),
    "stage 2": (dict(shard=2), 2),
    "stage 3": (dict(shard=3), 3),
    "tp2": (dict(tp=2), 0),
    "tp2, stage 3": (dict(tp=2, shard=2), 3),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_rounds_alike(name, run_ranks):
    sizes, stage = LAYOUTS[name]
    cases = [CASES["random"], CASES["gradients too"]]
    ranks = run_ranks(math.prod(sizes.values()), lambda rank: [trained(rank, sizes, stage=stage, **c) for c in cases])
    for found in ranks:
        for pieces, case in zip(found, cases, strict=True):
            compare(pieces, case)


@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 weights", "bf16 weights"])
def test_so_do_the_host_and_files(fraction, dtype, tmp_path):
    case = CASES["gradients too"]
    compare(trained(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, dtype=dtype, **case), case)
    files = dict(nvme_offload_fraction=fraction, nvme_offload_dir=str(tmp_path))
    compare(trained(**files, dtype=dtype, **case), case)
    compare(trained(**files, dtype=dtype, **CASES["the second moment"]), CASES["the second moment"])


# ---- rounding --------------------------------------------------------------------------------------------------------


def test_random_rounding_is_right_in_the_mean_and_independent():
    """The mean of each element, and the variance of sums over rows, columns and all, over many steps."""
    shape, steps, up = (24, 32), 1500, 0.3
    counts = torch.zeros(shape)
    sums = {dim: [] for dim in (0, 1, (0, 1))}
    for step in range(steps):
        place = shape, Box.whole(shape), torch.device("cpu")
        words = Noise(SEED, step, {}).rows(*place) + Noise(SEED, step, {}).columns(*place)
        ups = ((words & 0xFFFF) + round(up * 65536) >> 16).float()
        counts += ups
        for dim, found in sums.items():
            found.append(ups.sum(dim))
    one = up * (1 - up)
    deviations = (counts / steps - up) / math.sqrt(one / steps)
    assert deviations.abs().max() < 5 and 0.85 < deviations.std() < 1.15
    for dim, size in ((0, 24), (1, 32), ((0, 1), 24 * 32)):
        assert torch.stack(sums[dim]).var(0).mean().item() == pytest.approx(size * one, rel=0.12)


def test_the_second_moment_never_falls_when_it_is_rounded_to_the_nearest(monkeypatch):
    """Gradients fall to a hundredth: their mean square follows with beta2 = .999, or stays as it was."""
    monkeypatch.setitem(flat.WIDENED, "cpu", 1 << 16)

    def mean_square(**settings):
        _, optimizer = build(**settings)
        for step in range(600):
            optimizer.reduced.fill_(1.0 if step < 100 else 0.01)
            optimizer.step(1e-3, 0.0, 1.0)
        squares = [
            piece.tensor.float() for piece in optimizer.pieces() if piece.name.endswith("exp_avg_sq.blocks.0.up")
        ]
        return torch.cat(squares).mean().item()

    exact = mean_square()
    assert exact == pytest.approx((1 - 0.999**100) * 0.999**500, rel=1e-2)
    assert mean_square(exp_avg_sq_dtype="bf16") == pytest.approx(exact, rel=2e-2)
    assert mean_square(exp_avg_sq_dtype="bf16", stochastic_rounding=False) > 1.5 * exact


# ---- reductions ------------------------------------------------------------------------------------------------------

MICROS = 3


def sent(name, rank, micro):
    """The gradient of a whole tensor on a rank, in a micro-batch."""
    return gradient_of(name, 10 * rank + micro)


def reduced(rank, sizes, **settings):
    """(gradients by name, norm) of a step in which each parameter has the gradients of `sent`."""
    model, optimizer = build(rank, sizes, **settings)
    for micro in range(MICROS):
        model(torch.zeros(()), {name: sent(name, rank, micro) for name in SHAPES}).backward()
    _, norm = optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))
    found = {}
    for own in optimizer.owned:
        for slot, where in own.slots():
            found[slot.name, own.low + where.start - own.at - slot.start] = optimizer.reduced[where].clone()
    return found, norm


def narrow(x):
    return x.bfloat16().float()


def summed(name, ranks, stage, main):
    """Explicitly, and in order: micro-batches, then ranks; in stages 2 and 3 the ranks of each micro-batch first."""
    wide = narrow if main == "bf16" else lambda x: x
    parts = [[sent(name, rank, micro) for micro in range(MICROS)] for rank in range(ranks)]
    if stage < 2:
        return add_up([add_up([narrow(first), *more], narrow) for first, *more in parts], narrow)
    return add_up([add_up(map(narrow, one), narrow) for one in zip(*parts, strict=True)], wide)


def add_up(terms, rounding):
    """Add terms one by one and round each sum."""
    total, *more = terms
    for term in more:
        total = rounding(total + term)
    return total


@pytest.mark.sampled(5)
@pytest.mark.parametrize("main", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_reduction_is_the_sum_in_bf16(stage, main, run_ranks):
    ranks = 2 if stage == 0 else 3  # gloo's own all-reduce has its own order
    settings = dict(stage=stage, grad_reduce_in_bf16=True, main_grads_dtype=main)

    def body(rank):
        sizes = {"shard" if stage else "replicate": ranks}
        return [reduced(rank, sizes, overlap=overlap, **settings) for overlap in (False, True)]

    totals = {name: summed(name, ranks, stage, main) for name in SHAPES}
    square = sum(total.double().square().sum().item() for total in totals.values())
    for found in run_ranks(ranks, body):
        for pieces, norm in found:
            assert norm == pytest.approx(math.sqrt(square), rel=1e-6)
            for (name, first), values in pieces.items():
                assert values.dtype == (torch.float32 if stage >= 2 and main == "fp32" else torch.bfloat16)
                assert torch.equal(values.float(), totals[name].flatten()[first : first + len(values)]), name


def test_a_scalar_is_rounded_too():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.linear = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Linear(3, 3)

        def forward(self, x):
            return (self.linear(x) * self.scale).sum()

    model, optimizer = sharded_init(Scaled, Mesh(), schema.Optimizer(**BOTH), init="module")
    with optimizer.gathered_parameters():
        gradient = model.linear(torch.ones(2, 3)).sum().item()
    model(torch.ones(2, 3)).backward()
    optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))
    optimizer.step(1e-2, 0.0, 1.0)
    [mean] = [piece.tensor for piece in optimizer.pieces() if piece.name == "optimizer.exp_avg.scale"]
    assert mean.dtype == torch.bfloat16 and mean.item() == pytest.approx(0.1 * gradient, rel=2**-7)
