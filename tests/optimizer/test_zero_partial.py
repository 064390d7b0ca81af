# SPDX-License-Identifier: Apache-2.0
"""Parameters that several tensor parallel ranks or pipeline stages hold: summed, counted once, saved once, kept equal."""

from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint.boxes import find_flaw
from megatron.errors import NumericsError
from megatron.guard import replicas
from megatron.guard.replicas import check_replicas
from megatron.mpu.bits_sum import bits_sum
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings import schema

WIDTH = 8


class Part(torch.nn.Module):
    """What a rank holds: a tied table, a matrix cut over tp, a norm whose gradient is partial over tp."""

    def __init__(self, mesh):
        super().__init__()
        tied = ("tied",) if mesh.pp.size > 1 else ()
        self.embedding = torch.nn.Module()
        self.embedding.word = _leaf("weight", (4 * WIDTH, WIDTH), cut=0, tp=mesh.tp.size, partial=tied)
        self.blocks = torch.nn.ModuleDict({str(mesh.pp.rank): torch.nn.Module()})
        block = self.blocks[str(mesh.pp.rank)]
        block.matrix = _leaf("weight", (WIDTH, WIDTH), cut=0, tp=mesh.tp.size)
        block.norm = _leaf("weight", (WIDTH,), partial=("tp",))


def _leaf(name, shape, cut=None, tp=1, partial=()):
    module = torch.nn.Module()
    local = [n // tp if dim == cut else n for dim, n in enumerate(shape)]
    setattr(module, name, torch.nn.Parameter(torch.empty(local, device="meta")))
    init = Normal(0.1) if cut is not None else Constant(1.0)
    module.placements = {name: Placement(shape, init, cut={} if cut is None else {"tp": cut}, partial=partial)}
    return module


def _built(rank, stage=1, **sizes):
    mesh = Mesh(rank, **sizes)
    part = Part(mesh)
    parallel = schema.Parallel(sharding_stage=stage)
    return part, DistributedOptimizer(
        part, mesh, schema.Optimizer(), parallel, dtype=torch.float32, device="cpu", seed=1
    )


def _gradients(part, optimizer, value=1.0):
    """Give every parameter a gradient of `value` and reduce; the norm."""
    loss = sum((parameter * value).sum() for parameter in part.parameters())
    with optimizer.gathered_parameters():
        loss.backward()
    return optimizer.finalize_grads(torch.zeros(1))[1]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sizes", [dict(tp=2), dict(pp=2), dict(pp=2, tp=2), dict(pp=2, shard=2), dict(tp=2, shard=2)])
def test_partial_gradients_are_summed_and_counted_once(sizes, run_ranks):
    def body(rank):
        part, optimizer = _built(rank, **sizes)
        norm = _gradients(part, optimizer)
        sums = {}
        for slot, where in optimizer.owned_slots():
            sums.setdefault(slot.name.split(".")[-2], set()).update(optimizer.reduced[where].tolist())
        return norm, sums

    tp, pp, dp = (sizes.get(name, 1) for name in ("tp", "pp", "shard"))
    expected = 4 * WIDTH**2 * (pp * dp) ** 2 + pp * WIDTH**2 * dp**2 + pp * WIDTH * (tp * dp) ** 2
    for norm, sums in run_ranks(tp * pp * dp, body):
        assert norm == pytest.approx(expected**0.5, rel=1e-6)
        for name, value in dict(word=float(pp * dp), matrix=float(dp), norm=float(tp * dp)).items():
            assert sums.get(name, {value}) == {value}  # a rank's shard need not have something of each


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("sizes", [dict(tp=2, shard=2), dict(pp=2, shard=2), dict(pp=2, tp=2)])
def test_what_is_saved_is_every_tensor_once_and_what_is_loaded_is_everything(stage, sizes, run_ranks):
    def body(rank):
        _, optimizer = _built(rank, stage, **sizes)
        listed = [[(p.name, p.shape, p.box) for p in optimizer.pieces(unique=once)] for once in (True, False)]
        return *listed, sum(slot.stop - slot.start for unit in optimizer.units for slot in unit.slots)

    saved: dict = {}
    loaded = held = 0
    for once, everything, elements in run_ranks(4, body):
        for name, shape, box in once:
            saved.setdefault((name, shape), []).append(box)
        assert set(once) <= set(everything)
        loaded, held = loaded + sum(box.size for _, _, box in everything), held + 3 * elements
    assert loaded * sizes.get("shard", 1) == held  # nothing is left out that a rank has to fill
    assert len(saved) == 3 * (1 + 2 * sizes.get("pp", 1))
    for (name, shape), found in saved.items():
        assert find_flaw(shape, found) is None, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "sizes, where, words",
    [
        (dict(tp=2), "norm.weight", "blocks.0.norm.weight differs on ranks 0, 1 of 0, 1 (tp)"),
        (dict(pp=2), "word.weight", "embedding.word.weight differs on ranks 0, 1 of 0, 1 (tied)"),
        (dict(replicate=3), "matrix.weight", "blocks.0.matrix.weight differs on rank 1 of 0, 1, 2 (replicate)"),
        (dict(shard=3), "matrix.weight", "blocks.0.matrix.weight differs on rank 1 of 0, 1, 2 (shard)"),
    ],
)
def test_a_flipped_bit_is_found_and_named_on_all_ranks(sizes, where, words, run_ranks):
    def body(rank):
        part, optimizer = _built(rank, **sizes)
        _gradients(part, optimizer, value=1.0 + rank)
        optimizer.step(1e-2, 0.1, 1.0)
        check_replicas(optimizer, 1)
        if rank == 1:
            name, parameter = next((n, p) for n, p in part.named_parameters() if n.endswith(where))
            parameter.detach().view(torch.int32).view(-1)[-1].bitwise_xor_(1)  # the last bit
        with pytest.raises(NumericsError, match="iteration 2: .* different bits") as refused:
            check_replicas(optimizer, 2)
        return str(refused.value)

    answers = run_ranks(next(iter(sizes.values())), body)
    assert words in answers[0] and len(set(answers)) == 1


def test_stage_3_compares_its_shards(run_ranks):
    def body(rank):
        _, optimizer = _built(rank, 3, replicate=2, shard=2)
        check_replicas(optimizer, 1)
        if rank == 3:
            optimizer.states[0].main[0] += 1
        with pytest.raises(NumericsError) as refused:
            check_replicas(optimizer, 2)
        return str(refused.value)

    assert all("(main weights) differs on ranks 1, 3 of 1, 3 (replicate)" in text for text in run_ranks(4, body))


def test_checksum_sees_order_and_every_bit():
    x = torch.randn(1000, dtype=torch.bfloat16)
    assert bits_sum(x) == bits_sum(x.clone())
    swapped = x.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert bits_sum(swapped) != bits_sum(x)
    for bit in range(16):
        flipped = x.clone()
        flipped.view(torch.int16)[17] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
        assert bits_sum(flipped) != bits_sum(x)


def test_checksums_of_state_on_the_host_are_sent_from_the_device(monkeypatch):
    held = [replicas.Copy("w", torch.ones(2), ("tp",)), replicas.Copy("w (main weights)", torch.ones(2), ("tp",))]
    monkeypatch.setattr(replicas, "copies", lambda optimizer: held)
    found = replicas.checksums(SimpleNamespace(device=torch.device("meta")))  # stands for a GPU
    assert [total.device.type for _, _, total in found] == ["meta", "meta"]
