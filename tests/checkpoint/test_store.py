# SPDX-License-Identifier: Apache-2.0
"""Boxes in, boxes out: every dtype, every layout, any number of writers, and what is refused."""

import contextlib
import errno
import os
import stat
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import CODES, Piece, commit, flat_pieces, share, write_shard
from megatron.errors import CheckpointError, StorageError
from megatron.mpu.placement import Constant, Placement
from megatron.storage.durable import replace_file


def whole(name, tensor):
    return Piece(name, tuple(tensor.shape), Box.whole(tensor.shape), tensor)


def write(folder, *writers, state=None, block=64):
    """A checkpoint under folder/iter_0000001 of one list of pieces per writer."""
    temporary, final = folder / ".tmp-iter_0000001-0", folder / "iter_0000001"
    temporary.mkdir(parents=True)
    for number, pieces in enumerate(writers):
        write_shard(temporary, number, pieces, block)
    commit(temporary, final, len(writers), state or {})
    return final


def some(shape, dtype):
    generator = torch.Generator().manual_seed(prod(shape))
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 7), (3, 4, 50)])
def test_every_dtype_comes_back_to_the_bit(tmp_path, dtype, shape):
    tensor = some(shape, dtype)
    with Reader(write(tmp_path, [whole("x", tensor)])) as reader:
        back = reader.read("x")
        assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)
        assert reader.tensors["x"][:2] == (dtype, shape)
        out = torch.zeros(shape, dtype=dtype)
        reader.load([whole("x", out)])
        assert torch.equal(out, tensor)


def test_numbers_that_are_not_finite_keep_their_bits(tmp_path):
    bits = torch.tensor([0x7FC00001, 0x7F800000, -1, -(2**31), 1], dtype=torch.int32)
    with Reader(write(tmp_path, [whole("x", bits.view(torch.float32))])) as reader:
        assert torch.equal(reader.read("x").view(torch.int32), bits)


def test_files_are_plain_safetensors(tmp_path):
    tensors = {"a": some((5, 3), torch.bfloat16), "b": some((), torch.float32), "c": some((7,), torch.int64)}
    path = write(tmp_path, [whole(name, tensor) for name, tensor in tensors.items()])
    found = load_file(path / "shard_00000.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_state_comes_back(tmp_path):
    state = {"iteration": 7, "config": {"model": {"hidden_size": 8, "lr": 1e-5, "path": "\u00e9\n"}}, "empty": {}}
    with Reader(write(tmp_path, [], state=state)) as reader:
        assert reader.state == state and reader.tensors == {}


def test_views_and_parameters_are_read_and_filled_in_place(tmp_path):
    table = some((6, 8), torch.float32)
    path = write(tmp_path, [Piece("x", (8, 6), Box.whole((8, 6)), table.t())])
    memory = torch.zeros(9, 20)
    view = memory[1:9, 2:14:2]
    parameter = torch.nn.Parameter(torch.zeros(8, 6))
    with Reader(path) as reader:
        reader.load([Piece("x", (8, 6), Box.whole((8, 6)), view), whole("x", parameter)])
    assert torch.equal(view, table.t()) and torch.equal(parameter.data, table.t())
    assert memory.count_nonzero() == table.count_nonzero()


# ---------------------------------------------------------------------------------------------------- layouts

SHAPES = {"word": (13, 6), "qkv": (4, 3, 2, 6), "mlp": (2, 10, 6), "norm": (6,), "scale": ()}
CUTS = {"word": 0, "qkv": 0, "mlp": 1}


def layout_pieces(values, tp, zero, padding):
    """Pieces of every rank of a tp x zero job: cut along CUTS, then a flat range; `padding` extra rows a rank."""
    ranks = [[] for _ in range(tp * zero)]
    for name, full in values.items():
        cut = {"tp": CUTS[name]} if name in CUTS else {}
        placement = Placement(tuple(full.shape), Constant(0), cut=cut)
        for t in range(tp):
            local_shape = list(full.shape)
            if cut:
                local_shape[cut["tp"]] = -(-full.shape[cut["tp"]] // tp) + (padding if name == "word" else 0)
            offset, extent = placement.box(local_shape, {"tp": t})
            local = torch.full(local_shape, -7, dtype=full.dtype)
            local[Box.whole(extent).slices()] = full[Box(offset, extent).slices()]
            flat, each = local.reshape(-1), -(-local.numel() // zero)
            if not cut and t > 0:
                continue  # held by every tp rank, written by the first
            for z in range(zero):
                start = min(z * each, local.numel())
                part = flat[start : start + each]
                ranks[t * zero + z] += flat_pieces(name, full.shape, (offset, extent), local_shape, part, start)
    return ranks


layouts = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))


@settings(max_examples=40, deadline=None)
@given(
    saved=layouts, wanted=layouts, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64])
)
def test_any_layout_is_loaded_from_any_other(tmp_path_factory, saved, wanted, dtype):
    values = {name: some(shape, dtype) for name, shape in SHAPES.items()}
    path = write(tmp_path_factory.mktemp("layout"), *layout_pieces(values, *saved))
    empty = {name: torch.zeros_like(value) for name, value in values.items()}
    targets = layout_pieces(empty, *wanted)
    expected = layout_pieces(values, *wanted)
    with Reader(path) as reader:
        for name, value in values.items():
            assert torch.equal(reader.read(name), value)
        for target, right in zip(targets, expected, strict=True):
            reader.load(target, names=values.keys())
            assert [piece.box for piece in target] == [piece.box for piece in right]
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(target, right, strict=True))


def test_padding_is_neither_stored_nor_touched(tmp_path):
    values = {"word": some((13, 6), torch.float32)}
    path = write(tmp_path, *layout_pieces(values, 2, 1, 5))
    local = torch.full((12, 6), 3.0)
    with Reader(path) as reader:
        assert reader.tensors["word"].shape == (13, 6)
        reader.load(flat_pieces("word", (13, 6), ((12, 0), (1, 6)), (12, 6), local.view(-1)))
    assert torch.equal(local[0], values["word"][12]) and (local[1:] == 3).all()


@given(st.lists(st.sampled_from([(), (3,), (4, 5), (0, 2), (2, 3, 4)]), max_size=6), st.integers(1, 5))
def test_replicas_share_the_writing(shapes, parts):
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    pieces = [
        Piece(f"{i}", (9, *shape), Box((2,) + (0,) * len(shape), (1, *shape)), some((1, *shape), dtypes[i % 3]))
        for i, shape in enumerate(shapes)
    ]
    seen = {piece.name: torch.zeros(piece.shape) for piece in pieces}
    for part in range(parts):
        for name, _, box, tensor in share(pieces, part, parts):
            seen[name][box.slices()] += 1
            (original,) = (piece for piece in pieces if piece.name == name)
            assert torch.equal(original.tensor[box.relative_to(original.box).slices()], tensor)
    for piece in pieces:
        assert (seen[piece.name][piece.box.slices()] == 1).all() and seen[piece.name].sum() == piece.box.size


def test_a_part_is_read_from_its_blocks_alone(tmp_path, monkeypatch):
    tensor = some((64, 16), torch.float32)  # one row is one block
    path, asked, preadv = write(tmp_path, [whole("x", tensor)]), [], os.preadv
    with Reader(path) as reader:
        reader.check_files()
        assert torch.equal(reader.read("x", Box((1, 0), (1, 1))), tensor[1:2, 0:1])  # opens the file
        monkeypatch.setattr(os, "preadv", lambda fd, data, at: asked.append(len(data[0])) or preadv(fd, data, at))
        assert torch.equal(reader.read("x", Box((10, 3), (4, 2))), tensor[10:14, 3:5])
    assert asked == [64] * 4


# ---------------------------------------------------------------------------------------------------- what is refused


def test_all_misfits_are_reported_at_once_and_nothing_is_touched(tmp_path):
    stored = [
        whole("same", some((3,), torch.float32)),
        whole("shape", some((3,), torch.float32)),
        whole("dtype", some((3,), torch.float32)),
        whole("extra", some((3,), torch.float32)),
    ]
    wanted = {"same": torch.zeros(3), "shape": torch.zeros(4), "dtype": torch.zeros(3).half(), "gone": torch.zeros(1)}
    with Reader(write(tmp_path, stored)) as reader:
        with pytest.raises(CheckpointError) as caught:
            reader.load([whole(name, tensor) for name, tensor in wanted.items()], names=wanted.keys())
        assert "2 tensors differ, 1 are missing, 1 are unknown" in caught.value.what
        for words in ("shape: (3,)", "dtype: torch.float32", "gone (1,)", "extra: not in this run"):
            assert words in str(caught.value)
        assert not any(tensor.any() for tensor in wanted.values())
        reader.load([whole("dtype", wanted["dtype"])], cast=True)  # no names given: others may be there
        assert torch.equal(wanted["dtype"], stored[2].tensor.half())
        assert reader.read("same", dtype=torch.float64).dtype == torch.float64


def test_unknown_names_and_boxes_outside_are_refused(tmp_path):
    with Reader(write(tmp_path, [whole("x", torch.zeros(3, 3))])) as reader:
        for name, box in (("y", None), ("x", Box((0, 0), (4, 1))), ("x", Box((0,), (1,))), ("x", Box((-1, 0), (1, 1)))):
            with pytest.raises(CheckpointError):
                reader.read(name, box)


@pytest.mark.parametrize(
    "second, words",
    [
        (Piece("x", (4, 2), Box((2, 0), (1, 2)), torch.zeros(1, 2)), "2 of 8 elements are in no box"),
        (Piece("x", (4, 2), Box((1, 0), (3, 2)), torch.zeros(3, 2)), "overlap"),
        (Piece("x", (4, 2), Box((2, 0), (2, 2)), torch.zeros(2, 2).half()), "disagree"),
        (Piece("x", (5, 2), Box((2, 0), (3, 2)), torch.zeros(3, 2)), "disagree"),
    ],
)
def test_writers_that_do_not_make_a_tensor_are_refused(tmp_path, second, words):
    first = Piece("x", (4, 2), Box((0, 0), (2, 2)), torch.zeros(2, 2))
    with pytest.raises(CheckpointError, match=words):
        write(tmp_path, [first], [second])
    assert not (tmp_path / "iter_0000001").exists()


def test_a_missing_writer_is_refused(tmp_path):
    (tmp_path / "t").mkdir()
    write_shard(tmp_path / "t", 0, [whole("x", torch.zeros(3))])
    with pytest.raises(CheckpointError, match="part_00001.json"):
        commit(tmp_path / "t", tmp_path / "iter_0000001", 2, {})


@pytest.mark.parametrize("number, ends", [(errno.EINVAL, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_sync_folders_is_no_failing_disk(tmp_path, monkeypatch, number, ends):
    fsync = os.fsync

    def refusing(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refusing)
    with contextlib.nullcontext() if ends else pytest.raises(OSError, match="Input/output"):
        replace_file(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_full_disk_says_what_it_needs(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("megatron.storage.durable.shutil.disk_usage", lambda path: usage)
    with pytest.raises(StorageError) as caught:
        write_shard(tmp_path, 0, [whole("x", torch.zeros(1000))])
    assert "bytes needed, 1,000 bytes free" in str(caught.value) and not list(tmp_path.iterdir())


def test_a_device_that_fills_up_while_writing_is_a_storage_error(tmp_path):
    os.symlink("/dev/full", tmp_path / "shard_00000.safetensors")
    with pytest.raises(StorageError, match="No space left"):
        write_shard(tmp_path, 0, [whole("x", torch.zeros(1000))])
