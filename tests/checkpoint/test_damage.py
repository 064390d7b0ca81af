# SPDX-License-Identifier: Apache-2.0
"""No damaged or forged byte is ever used: every file, every byte, and indices that lie on purpose.

Other damages, at random: tests/chaos/test_files.py.
"""

import json
import os
import random
import shutil

import pytest
import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece, commit, write_shard
from megatron.storage.durable import Damaged, checksum, read_sealed, seal

FILES = ["index.json", "state.json", "shard_00000.safetensors", "shard_00001.safetensors"]


def make(parent, seed):
    """A checkpoint of two writers, 3 dtypes and several blocks a tensor."""
    torch.manual_seed(seed)
    tensors = {"a": torch.randn(8, 10), "b": torch.randn(6, 4).bfloat16(), "n": torch.arange(9) + seed}
    temporary = parent / ".tmp-0"
    temporary.mkdir(parents=True)
    for writer in range(2):
        pieces = []
        for name, tensor in tensors.items():
            half = len(tensor) // 2
            rows = slice(0, half) if writer == 0 else slice(half, len(tensor))
            box = Box((rows.start,) + (0,) * (tensor.dim() - 1), tuple(tensor[rows].shape))
            pieces.append(Piece(name, tuple(tensor.shape), box, tensor[rows]))
        write_shard(temporary, writer, pieces, block=64)
    commit(temporary, parent / "iter_0000001", 2, {"iteration": 1, "seed": seed})
    return parent / "iter_0000001"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make(tmp_path_factory.mktemp("good"), 1)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same tensors of another step: same names, shapes and file sizes."""
    return make(tmp_path_factory.mktemp("other"), 2)


def use(path):
    """Load everything, as a resuming run would."""
    with Reader(path) as reader:
        pieces = [
            Piece(name, t.shape, Box.whole(t.shape), torch.zeros(t.shape, dtype=t.dtype))
            for name, t in reader.tensors.items()
        ]
        reader.load(pieces)
        return {piece.name: piece.tensor for piece in pieces}


def assert_noticed(path, file):
    with pytest.raises(Damaged) as caught:
        use(path)
    assert str(path) in str(caught.value)
    try:
        with Reader(path) as reader:
            assert any(file in problem for problem in reader.verify())
    except Damaged as problem:
        assert "json" in str(problem)  # noticed when it was opened


def test_the_undamaged_one_is_fine(good):
    with Reader(good) as reader:
        reader.check_files()
        assert reader.verify() == []
    assert use(good)["n"].tolist() == list(range(1, 10))


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "iter_0000001")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_in_any_byte_is_noticed(copy, file):
    raw, dice = (copy / file).read_bytes(), random.Random(file)
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << dice.randrange(8)
        (copy / file).write_bytes(damaged)
        with pytest.raises(Damaged, match="iter_0000001"):
            use(copy)


@pytest.mark.parametrize("file", FILES)
def test_missing_files_and_things_that_are_no_files_are_noticed(copy, file):
    def pipe(path):
        os.mkfifo(path)  # would block a careless reader for ever

    for replacement in (lambda path: None, os.mkdir, pipe, lambda path: os.symlink("nowhere", path)):
        path = copy / file
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        replacement(path)
        assert_noticed(copy, file)
        path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_checkpoint_is_noticed(copy, other, file):
    assert (other / file).stat().st_size == (copy / file).stat().st_size
    shutil.copy(other / file, copy / file)
    if file == "index.json":
        file = "state.json"  # the index is whole; what does not belong to it is named
    assert_noticed(copy, file)


def test_files_that_changed_places_are_noticed(copy):
    first, second = copy / FILES[2], copy / FILES[3]
    first.rename(copy / "x"), second.rename(first), (copy / "x").rename(second)
    assert_noticed(copy, FILES[2])


def test_verify_names_every_damaged_piece_and_file(copy):
    raw = bytearray((copy / FILES[2]).read_bytes())
    raw[-1] ^= 1  # the last piece is the one with the smallest elements
    (copy / FILES[2]).write_bytes(raw)
    os.truncate(copy / FILES[3], 100)
    with Reader(copy) as reader:
        problems = reader.verify()
    assert len(problems) == 2
    assert any("b[0:3, 0:4]" in problem for problem in problems) and any(FILES[3] in problem for problem in problems)


# ---------------------------------------------------------------------------------------------------- lies


def forge(path, change):
    """Rewrite index.json with valid checksums after `change(index)`."""
    _, index = read_sealed(path / "index.json")
    change(index)
    (path / "index.json").write_bytes(seal(index)[1])


def box_of(index, name="a"):
    return index["tensors"][name]["boxes"][0]


def rename_file(index, name):
    index["files"][name] = index["files"].pop("shard_00000.safetensors")
    for tensor in index["tensors"].values():
        for box in tensor["boxes"]:
            box[2] = name if box[2] == "shard_00000.safetensors" else box[2]


def grow(index, rows):
    """A tensor of absurd size, all consistent but the bytes."""
    index["tensors"]["a"]["shape"][0] = rows
    last = index["tensors"]["a"]["boxes"][1]
    last[1][0] = rows - last[0][0]


LIES = {
    "no tensors": lambda index: index.pop("tensors"),
    "tensors a list": lambda index: index.update(tensors=[]),
    "another format": lambda index: index.update(format="pickle"),
    "newer version": lambda index: index.update(version=3),
    "path upwards": lambda index: rename_file(index, "../../shard_00000.safetensors"),
    "absolute path": lambda index: rename_file(index, "/etc/passwd"),
    "zero byte in name": lambda index: rename_file(index, "shard_00000.safetensors\0"),
    "unlisted file": lambda index: box_of(index).__setitem__(2, "shard_00007.safetensors"),
    "negative offset": lambda index: box_of(index)[0].__setitem__(0, -1),
    "box outside": lambda index: box_of(index)[1].__setitem__(1, 11),
    "hole": lambda index: index["tensors"]["a"]["boxes"].pop(),
    "overlap": lambda index: index["tensors"]["a"]["boxes"].append(box_of(index)),
    "same bytes twice": lambda index: index["tensors"]["a"]["boxes"][1].__setitem__(slice(2, 5), box_of(index)[2:5]),
    "2^62 rows": lambda index: grow(index, 1 << 62),
    "2^70 rows": lambda index: grow(index, 1 << 70),
    "a float as size": lambda index: index["tensors"]["a"]["shape"].__setitem__(0, 8.0),
    "a bool as size": lambda index: index["tensors"]["a"]["shape"].__setitem__(0, True),
    "text as shape": lambda index: index["tensors"]["a"].update(shape="88"),
    "10,000 dims": lambda index: index["tensors"]["a"].update(shape=[1] * 10000),
    "unknown dtype": lambda index: index["tensors"]["a"].update(dtype="OBJECT"),
    "dtype unhashable": lambda index: index["tensors"]["a"].update(dtype=[]),
    "another dtype": lambda index: index["tensors"]["a"].update(dtype="I32"),
    "another key": lambda index: box_of(index).__setitem__(3, "b[0:3, 0:4]"),
    "key not there": lambda index: box_of(index).__setitem__(3, "nothing"),
    "too few checksums": lambda index: box_of(index)[4].pop(),
    "checksums no list": lambda index: box_of(index).__setitem__(4, None),
    "huge block": lambda index: index.update(block=1 << 60),
    "no block": lambda index: index.update(block=0),
    "odd block": lambda index: index.update(block=63),
    "file size": lambda index: index["files"]["shard_00000.safetensors"].update(bytes=1 << 62),
    "extra in box": lambda index: box_of(index).append(1),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(copy, lie):
    forge(copy, LIES[lie])
    with pytest.raises(Damaged, match="iter_0000001"):
        use(copy)


HEADERS = {
    "length 2^63": (b"\xff" * 7 + b"\x7f", None),
    "no JSON": (None, b"{" * 40),
    "deep nesting": (None, b"[" * 100_000),
    "a list": (None, b"[]"),
    "overlapping": (None, {"x": [0, 8], "y": [0, 8]}),
    "hole": (None, {"x": [0, 8], "y": [16, 24]}),
    "backwards": (None, {"x": [8, 0]}),
    "beyond the end": (None, {"x": [0, 1 << 62]}),
    "no offsets": (None, {"x": []}),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused(copy, case):
    length, entries = HEADERS[case]
    if isinstance(entries, dict):
        shape = {key: [max(0, (span[1] - span[0]) // 8)] if span else [1] for key, span in entries.items()}
        entries = json.dumps(
            {key: {"dtype": "I64", "shape": shape[key], "data_offsets": span} for key, span in entries.items()}
        ).encode()
    header = (length or len(entries).to_bytes(8, "little")) + (entries or b"")
    raw = header + bytes(4096)
    (copy / FILES[2]).write_bytes(raw)
    forge(copy, lambda index: index["files"].update({FILES[2]: {"bytes": len(raw), "header": checksum(header)}}))
    with pytest.raises(Damaged, match="header") as caught:
        use(copy)
    assert FILES[2] in str(caught.value)


def test_sealed_json_of_odd_content(tmp_path):
    contents = [{}, {"a": {}}, {"a": 1, "b": {"c": [1, {"d": None}], "e": '\u2028\n"'}, "f": [[], {}]}, {"x": {"": {}}}]
    for content in contents:
        (tmp_path / "x").write_bytes(seal(content)[1])
        assert read_sealed(tmp_path / "x")[1] == content
        plain = json.loads((tmp_path / "x").read_bytes())
        assert len(plain.pop("checksum")) == 32 and plain == content
    for nonsense in (b"[" * 100_000, b'"' + b"x", b",\n"):
        mark = checksum(nonsense)
        (tmp_path / "x").write_bytes(f'{{"checksum": "{mark}"'.encode() + nonsense)
        with pytest.raises(Damaged, match="not JSON"):
            read_sealed(tmp_path / "x")
    os.truncate(tmp_path / "x", 1 << 40)  # a sparse terabyte is not read
    with pytest.raises(Damaged, match="reasonable size"):
        read_sealed(tmp_path / "x")
