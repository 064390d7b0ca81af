# SPDX-License-Identifier: Apache-2.0
"""An index in parts: what a rank reads and validates of it, and what is read back of a save."""

import json
import shutil

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint import folder as saving
from megatron.checkpoint import store, survey
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import choose
from megatron.checkpoint.copies import copy_checkpoint
from megatron.checkpoint.folder import Saver, restore
from megatron.checkpoint.index import ShardFile
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece, commit, merge_group, write_shard
from megatron.errors import CheckpointError, StorageError
from megatron.storage.durable import Damaged, read_sealed, seal
from megatron.storage.urls import UrlPath, location

LAYERS, WRITERS = 12, 5
TENSORS = {f"blocks.{layer}.weight": torch.arange(40.0).view(10, 4) + 100 * layer for layer in range(LAYERS)}


def pieces_of(writer, writers=WRITERS):
    rows = 10 // writers
    return [
        Piece(name, (10, 4), Box((writer * rows, 0), (rows, 4)), tensor[writer * rows :][:rows])
        for name, tensor in TENSORS.items()
    ]


def wanted(*layers):
    return [Piece(f"blocks.{layer}.weight", (10, 4), Box((3, 1), (5, 2)), torch.zeros(5, 2)) for layer in layers]


def save(folder, in_groups=False):
    final = folder / "iter_0000001"
    temporary = folder / ".tmp-0"
    temporary.mkdir(parents=True)
    for writer in range(WRITERS):
        write_shard(temporary, writer, pieces_of(writer), 64)
    if in_groups:
        for writer in reversed(range(WRITERS)):
            merge_group(temporary, writer, WRITERS)
    commit(temporary, final, WRITERS, {"iteration": 1}, in_groups)
    return final


@pytest.fixture
def parted(tmp_path, monkeypatch):
    """A checkpoint with the entries of two layers in each part of its index."""
    monkeypatch.setattr(store, "PART", 1500)
    return save(tmp_path / "parted")


def holds(pieces):
    return all(torch.equal(piece.tensor, TENSORS[piece.name][3:8, 1:3]) for piece in pieces)


def forge(path, change):
    """Change a part of the index, and give it and index.json the right checksums."""
    content = json.loads(path.read_bytes())
    del content["checksum"]
    change(content["tensors"])
    mark, raw = seal(content)
    path.write_bytes(raw)
    _, index = read_sealed(path.parent / "index.json")
    index["tables"][path.name].update(checksum=mark, bytes=len(raw))
    (path.parent / "index.json").write_bytes(seal(index)[1])


def test_a_rank_reads_the_parts_of_its_layers(parted, tmp_path, monkeypatch):
    monkeypatch.undo()
    with Reader(parted) as reader, Reader(save(tmp_path / "whole")) as whole:
        tables = reader.index.tables
        assert len(tables) == LAYERS / 2 and set(reader.tensors) == set(whole.tensors) == set(TENSORS)
        assert [name.split(".")[1] for table in tables.values() for name in table.names] == list(map(str, range(12)))
        assert reader.index_bytes == 0 and "blocks.7.weight" in reader.tensors and "no" not in reader.tensors
        pieces = wanted(9, 10)  # in two parts
        reader.load(pieces, names=set(TENSORS))
        assert (
            holds(pieces) and reader.index_bytes == tables["index_00004.json"].bytes + tables["index_00005.json"].bytes
        )
        assert {name: (t.dtype, t.shape, sorted(t.stored)) for name, t in reader.tensors.items()} == {
            name: (t.dtype, t.shape, sorted(t.stored)) for name, t in whole.tensors.items()
        }
        assert reader.index_bytes == sum(table.bytes for table in tables.values())
    assert survey.verify(parted)[1] == []


LIES = {
    "hole": lambda tensors: tensors["blocks.4.weight"]["boxes"].pop(),
    "twice": lambda tensors: tensors["blocks.4.weight"]["boxes"][0].__setitem__(
        slice(2, 5), tensors["blocks.4.weight"]["boxes"][1][2:5]
    ),
    "unlisted file": lambda tensors: tensors["blocks.4.weight"]["boxes"][0].__setitem__(2, "shard_00077.safetensors"),
    "another name": lambda tensors: tensors.update(other=tensors.pop("blocks.4.weight")),
    "another key": lambda tensors: tensors["blocks.4.weight"]["boxes"][0].__setitem__(3, "blocks.5.weight[0:2, 0:4]"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_entry_is_damage_for_those_who_load_it(lie, parted):
    forge(parted / "index_00002.json", LIES[lie])
    with Reader(parted) as reader:
        pieces = wanted(0, 3, 11)
        reader.load(pieces)
        assert holds(pieces)
    with Reader(parted) as reader, pytest.raises(Damaged, match="iter_0000001"):
        reader.load(wanted(4))


@pytest.mark.parametrize("harm", ["gone", "cut", "flipped", "another's", "another step's"])
def test_a_damaged_part_is_noticed(harm, parted):
    path = parted / "index_00003.json"
    raw = path.read_bytes()
    if harm == "gone":
        path.unlink()
    elif harm == "another step's":
        _, content = read_sealed(path)
        path.write_bytes(seal({"tensors": content["tensors"], "step": 2})[1])
    elif harm == "another's":
        shutil.copy(parted / "index_00004.json", path)
    else:
        path.write_bytes(raw[:-9] if harm == "cut" else raw[:60] + bytes([raw[60] ^ 4]) + raw[61:])
    with Reader(parted) as reader:
        if harm in ("gone", "cut"):  # choosing a checkpoint sees it without reading
            with pytest.raises(Damaged, match="index_00003"):
                reader.check_files()
            with pytest.raises(CheckpointError, match="index_00003"):
                choose(parted.parent)
        with pytest.raises(Damaged, match="index_00003"):
            reader.load(wanted(7))


@pytest.mark.parametrize(
    "lie",
    [
        lambda index: index["tables"]["index_00000.json"]["names"].append("blocks.9.weight"),
        lambda index: index["tables"].update({"../index_00009.json": index["tables"].pop("index_00000.json")}),
        lambda index: index["tensors"].update(x={}),
        lambda index: index["tables"]["index_00000.json"].update(names="blocks.0.weight"),
        lambda index: index.update(tables=[]) or index["files"].clear(),
    ],
)
def test_a_list_of_parts_that_lies_is_refused(lie, parted):
    _, index = read_sealed(parted / "index.json")
    lie(index)
    (parted / "index.json").write_bytes(seal(index)[1])
    with pytest.raises((Damaged, CheckpointError)), Reader(parted) as reader:
        reader.load(wanted(0))


def test_writers_merge_in_groups_to_the_same_index(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FAN", 2)
    asked, real = [], store.read_sealed
    monkeypatch.setattr(store, "read_sealed", lambda path: asked.append(path.name) or real(path))
    alone, in_groups = save(tmp_path / "alone"), None
    assert asked == [f"part_{writer:05d}.json" for writer in range(5)]
    asked.clear()
    in_groups = save(tmp_path / "groups", in_groups=True)
    assert asked[-3:] == ["part_00000.json", "part_00002.json", "part_00004.json"]  # what the last one reads
    assert read_sealed(alone / "index.json")[1] == read_sealed(in_groups / "index.json")[1]
    assert sorted(path.name for path in in_groups.iterdir()) == sorted(path.name for path in alone.iterdir())


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_parts_in_an_object_store_go_with_their_checkpoint(bucket, parted, tmp_path, monkeypatch):
    folder = location(bucket)
    for _ in range(2):  # the second save replaces the first, whose files go
        with Saver(folder) as saver:
            saver.save(1, pieces_of(0, 1), {})
    names = [path.name for path in (folder / "iter_0000001").iterdir()]
    assert sum(name.startswith("index_") for name in names) > 1
    with Reader(folder / "iter_0000001") as reader:
        assert {*reader.index.tables, *reader.index.files, reader.index.state_file, "index.json"} == set(names)
    pieces = wanted(2, 8)
    restore(folder, pieces)
    with Saver(folder) as saver, monkeypatch.context() as patch:  # a store that loses bytes of one
        write = UrlPath.write_bytes
        patch.setattr(
            UrlPath, "write_bytes", lambda self, raw: write(self, raw[: 99 if "index_00001" in self.name else None])
        )
        with pytest.raises(StorageError, match="wrong sizes\n.*index_00001"):
            saver.save(2, pieces_of(0, 1), {})
    assert holds(pieces)
    copy_checkpoint(parted, tmp_path)
    assert survey.verify(tmp_path / "iter_0000001")[1] == []


def test_blocks_take_turns_to_be_read_back(tmp_path, monkeypatch):
    """A quarter at each save; a byte that rots in the block whose turn it is keeps the older checkpoint."""
    read, real, write = [], ShardFile.read_into, store.write_shard
    monkeypatch.setattr(
        ShardFile, "read_into", lambda self, at, data, what: read.append((at, len(data))) or real(self, at, data, what)
    )
    monkeypatch.setattr(saving, "write_shard", lambda *args, **live: write(*args, 32, **live))
    pieces = [Piece("x", (10, 4), Box.whole((10, 4)), TENSORS["blocks.3.weight"])]  # 160 bytes: 5 blocks
    with Saver(tmp_path, keep_last=1, verified=0.25) as saver:
        saver.save(0, pieces, {})
        turns = []
        for iteration in range(1, 5):
            read.clear()
            saver.save(iteration, pieces, {})
            turns.append([at for at, size in read if size == 32])
        first = min(turns[0])
        assert turns == [[first, first + 128], [first + 32], [first + 64], [first + 96]]

        def rotten(*args, **live):
            written = write(*args, 32, **live)
            with open(args[0] / "shard_00000.safetensors", "r+b") as file:
                file.seek(first + 5)
                file.write(b"\xff")
            return written

        monkeypatch.setattr(saving, "write_shard", rotten)
        with pytest.raises(StorageError, match="reads back differently"):
            saver.save(5, pieces, {})  # the turn of the first block
        assert {path.name for path in tmp_path.glob("iter_*")} == {"iter_0000004", "iter_0000005"}
        with pytest.raises(StorageError, match="reads back differently"):
            saver.save(5, pieces, {})  # tried again: still its turn
        monkeypatch.setattr(saving, "write_shard", write)
        saver.save(6, pieces, {})
        assert {path.name for path in tmp_path.glob("iter_*")} == {"iter_0000006"}
    with Saver(tmp_path, keep_last=1, verified=0.0) as saver:
        read.clear()
        saver.save(7, pieces, {})
        assert not read


def test_a_run_reads_back_the_share_that_was_asked_for(tmp_path, monkeypatch):
    """From the second save on: the first one deletes nothing."""
    turns, real = [], saving.read_back
    monkeypatch.setattr(saving, "read_back", lambda *args: turns.append(args[2:]) or real(*args))
    pretrain_gpt.main(
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 50 --lr 1e-2 "
        "--micro-batch-size 1 --eval-iters 0 --device cpu --num-workers 0 --train-iters 5 --save-interval 1 --keep-last 1 "
        f"--save {tmp_path} --verify-saves 0.25".split()
    )
    assert turns == [(4, 0), (4, 1), (4, 2), (4, 3)]
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000005"]
