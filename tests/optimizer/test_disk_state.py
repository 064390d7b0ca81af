# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in files: the bits of state in memory, in bounded memory, with checkpoints, and clear failures."""

import errno
import functools
import os
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.manager import CheckpointManager, Snapshot
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import StablePiece, share
from megatron.errors import StorageError
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.optimizer import disk, scratch
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings import schema

WIDTH, BLOCKS = 24, 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of a page or two, so that tiny states pass through memory in many: units and parts end at different places."""
    monkeypatch.setattr(scratch, "PART", 1024)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(3 * WIDTH, WIDTH, device="meta"))
        self.bias = torch.nn.Parameter(torch.empty(WIDTH, device="meta"))
        self.placements = dict(
            weight=Placement((3 * WIDTH, WIDTH), Normal(0.3)), bias=Placement((WIDTH,), Constant(0.1), decay=False)
        )

    def forward(self, x):
        return x + torch.tanh(x @ self.weight.t()).view(-1, 3, WIDTH).sum(1) + self.bias


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Layer()
        self.blocks = torch.nn.ModuleDict({str(n): Layer() for n in range(BLOCKS)})

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks.values():
            x = block(x)
        return x.float().square().sum()


def build(rank=0, sizes=None, dtype=torch.float32, stable=False, stage=0, overlap=False, device="cpu", **settings):
    model, mesh = Model(), Mesh(rank, **(sizes or {}))
    parallel = schema.Parallel(sharding_stage=stage, overlap_param_gather=overlap and stage > 0)
    return model, DistributedOptimizer(
        model, mesh, schema.Optimizer(**settings), parallel, dtype=dtype, device=device, seed=3, stable=stable
    )


def train(model, optimizer, steps=3, first=0):
    for step in range(first, first + steps):
        rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step * 8 + optimizer.mesh.dp.rank))
        model(rows.to(optimizer.device, optimizer.dtype)).backward()
        optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))
        optimizer.step(1e-2, 0.1, 0.25)


def content(optimizer):
    """All state and all parameters that this rank has, as bytes."""
    found = {(p.name, p.box): p.tensor.cpu().clone() for p in optimizer.pieces()}
    with optimizer.weights.gathered_parameters():
        for unit in optimizer.units:
            found |= {(slot.name, "model"): slot.parameter.detach().cpu().clone() for slot in unit.slots}
    return {key: tensor.contiguous().view(torch.uint8).numpy().tobytes() for key, tensor in found.items()}


def trained(rank, cases, **settings):
    """Content after training, for each of several settings."""
    found = []
    for case in cases:
        model, optimizer = build(rank, **settings, **case)
        train(model, optimizer)
        found.append(content(optimizer))
    return found


WAYS = [
    dict(nvme_offload_fraction=1.0),
    dict(nvme_offload_fraction=0.4),
    dict(nvme_offload_fraction=0.4, optimizer_cpu_offload=True, optimizer_offload_fraction=0.3),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_same_bits_as_in_memory(dtype, run_ranks, tmp_path):
    """In every stage, alone and over two ranks, overlapped or not; a share of the state, all of it, beside the host's."""
    cases = [{}, *[dict(way, nvme_offload_dir=str(tmp_path)) for way in WAYS]]
    for stage in range(4):
        memory, *files = trained(0, cases, stage=stage, dtype=dtype)
        assert all(found == memory for found in files), stage

    def body(rank):
        found = []
        for stage, overlap in ((0, False), (1, False), (1, True), (2, True), (3, True)):
            sizes = {"shard" if stage else "replicate": 2}
            memory, *files = trained(rank, cases, sizes=sizes, stage=stage, dtype=dtype, overlap=overlap)
            found.append((stage, overlap, all(found == memory for found in files)))
        return found

    for found in run_ranks(2, body):
        assert all(equal for *_, equal in found), found
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_with_state_in_files_is_one_with_state_on_the_host(stage, dtype, tmp_path):
    cases = [dict(optimizer_cpu_offload=True), dict(WAYS[0], nvme_offload_dir=str(tmp_path))]
    host, files = trained(0, cases, stage=stage, dtype=dtype, device="cuda")
    assert host == files


def test_memory_is_buffers_and_the_disk_has_the_rest(tmp_path):
    where = dict(nvme_offload_dir=str(tmp_path), nvme_offload_fraction=1.0)
    _, low = build(dtype=torch.bfloat16, **where)
    _, single = build(**where)
    _, twice = build(dtype=torch.bfloat16, stable=True, **where)
    count = sum(unit.size for unit in low.units)
    plane = -(-count * 2 // 4096) * 4096 * 2  # whole pages even if its numbers were bf16
    assert count > 6 * scratch.PART
    assert low.memory()["state"] == scratch.SLOTS * 3 * 4 * scratch.PART  # nothing that grows with the model
    assert single.memory()["state"] == scratch.SLOTS * 2 * 4 * scratch.PART + 4 * count  # the parameters themselves
    assert [o.states[0].on_disk for o in (low, single, twice)] == [3 * plane, 2 * plane, 6 * plane]
    assert os.fstat(twice.states[0]._scratch._handle).st_size == 6 * plane


def test_reading_and_writing_go_on_beside_the_update(tmp_path, monkeypatch):
    """The next part is asked for before a part is updated, and no more parts are under way than there are buffers."""
    events, update = [], disk.update
    monkeypatch.setattr(disk, "update", lambda *args: (events.append("update"), update(*args)))
    model, optimizer = build(dtype=torch.bfloat16, nvme_offload_dir=str(tmp_path), nvme_offload_fraction=1.0)
    state = optimizer.states[0]
    read, write = state._read, state._write
    state._read = lambda number: (events.append(f"read {number}"), read(number))
    state._write = lambda number: (events.append(f"write {number}"), write(number))
    monkeypatch.setattr(disk, "ThreadPoolExecutor", AtOnce)
    train(model, optimizer, steps=1)
    expected = ["read 0"]
    for number in range(len(state._parts)):
        expected += [f"read {number + 1}"] * (number + 1 < len(state._parts)) + ["update", f"write {number}"]
    assert events == expected and len(state._parts) > 2 * scratch.SLOTS


@pytest.mark.parametrize("late", ["_read", "_write"])
def test_a_slow_disk_changes_nothing(late, tmp_path, monkeypatch):
    """Reads or writes that happen as late as they may, when they are waited for, find their buffers as they should be."""
    submit = AtOnce.submit

    def put_off(self, function, *args):
        if function.__name__ != late:
            return submit(self, function, *args)
        once = functools.lru_cache(lambda: function(*args))
        return SimpleNamespace(result=once)

    monkeypatch.setattr(AtOnce, "submit", put_off)
    monkeypatch.setattr(disk, "ThreadPoolExecutor", AtOnce)
    memory, files = trained(0, [{}, dict(WAYS[0], nvme_offload_dir=str(tmp_path))], dtype=torch.bfloat16)
    assert memory == files


class AtOnce:
    """A pool that does things when they are asked for."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def submit(self, function, *args):
        function(*args)
        return SimpleNamespace(result=lambda: None)


# ---- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_goes_from_memory_to_files_and_back(stage, tmp_path):
    where = dict(nvme_offload_dir=str(tmp_path), nvme_offload_fraction=0.7)
    expected = None
    for number, (saving, loading) in enumerate((({}, where), (where, {}), (where, where))):
        model, optimizer = build(stage=stage, dtype=torch.bfloat16, **saving)
        train(model, optimizer, steps=2)
        manager = CheckpointManager(schema.Checkpoint(save=str(tmp_path / f"{number}")), log=lambda text: None)
        manager.save(2, optimizer.pieces(unique=True), {})
        manager.close()
        train(model, optimizer, steps=2, first=2)
        model, other = build(stage=stage, dtype=torch.bfloat16, **loading)
        train(model, other, steps=1, first=7)
        with Reader(tmp_path / f"{number}" / "iter_0000002") as reader:
            reader.load(other.pieces(), names={piece.name for piece in other.pieces()})
        other.copy_main_params_to_model_params()
        other.step_count = 2
        train(model, other, steps=2, first=2)
        expected = expected or content(optimizer)
        assert content(optimizer) == content(other) == expected


def test_a_save_in_the_background_needs_no_copy_and_sees_no_later_step(tmp_path):
    model, optimizer = build(
        dtype=torch.bfloat16, stable=True, nvme_offload_dir=str(tmp_path), nvme_offload_fraction=0.6
    )
    other = build(dtype=torch.bfloat16)
    for step in range(3):  # one copy of the file is kept, then the other
        train(model, optimizer, steps=1, first=2 * step)
        before = {(p.name, p.box): p.tensor.clone() for p in optimizer.pieces()}
        pieces = share(optimizer.pieces(unique=True, stable=True), 0, 1)
        snapshot = Snapshot()
        kept = snapshot.take(pieces)
        in_memory = sum(p.tensor.nbytes for p in kept if not isinstance(p, StablePiece))
        everything = sum(p.tensor.nbytes for p in kept)
        assert 0.2 * everything < in_memory < 0.45 * everything
        assert snapshot._memory.numel() < in_memory + 64 * len(kept)
        train(model, optimizer, steps=2, first=2 * step + 1)
        assert all(torch.equal(p.tensor, before[p.name, Box(*p.box)]) for p in kept)
        train(*other, steps=1, first=2 * step)
        train(*other, steps=2, first=2 * step + 1)
        assert content(optimizer) == content(other[1])


# ---- failures ----------------------------------------------------------------------------------------------------------


def refused(**settings):
    with pytest.raises(StorageError) as caught:
        build(nvme_offload_fraction=1.0, **settings)
    return str(caught.value)


def test_folders_that_do_not_work(tmp_path, monkeypatch):
    assert "No such file" in refused(nvme_offload_dir=str(tmp_path / "none"))
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(nvme_offload_dir=str(tmp_path / "file"))

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = refused(nvme_offload_dir=str(tmp_path))
    assert "bytes of optimizer state" in said and "bytes are free" in said and "--nvme-offload-fraction" in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_in_a_step(call, tmp_path, monkeypatch):
    model, optimizer = build(nvme_offload_dir=str(tmp_path), nvme_offload_fraction=1.0)
    train(model, optimizer, steps=1)

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match="optimizer state cannot be .* --nvme-offload-dir"):
        train(model, optimizer, steps=1)


def test_a_file_system_without_direct_access(tmp_path, monkeypatch):
    """And reads and writes that move less than was asked for."""
    monkeypatch.setattr(scratch.Scratch, "_go_direct", lambda self: False)
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda handle, data, at: read(handle, [data[0][:1000]], at))
    monkeypatch.setattr(os, "pwritev", lambda handle, data, at: write(handle, [data[0][:1000]], at))
    memory, files = trained(0, [{}, dict(WAYS[0], nvme_offload_dir=str(tmp_path))], dtype=torch.bfloat16)
    assert memory == files
