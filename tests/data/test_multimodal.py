# SPDX-License-Identifier: Apache-2.0
"""`.idx` files with a mode for each sequence: read, merged and written as megatron-core lays them out."""

import struct

import numpy as np
import pytest

import merge_datasets
from megatron.data.indexed import IndexedDataset
from megatron.errors import DataError


def write(prefix, documents: list[list[tuple[list[int], int]]], modes: bool = True) -> str:
    """A dataset by numpy alone, in megatron-core's order of sections: documents are lists of (tokens, mode)."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(tokens) for tokens, _ in sequences], np.int32)
    np.array([token for tokens, _ in sequences for token in tokens], np.int32).tofile(f"{prefix}.bin")
    pointers = np.concatenate([[0], np.cumsum(4 * lengths.astype(np.int64))])[: len(lengths)].astype(np.int64)
    boundaries = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(boundaries))
    index += lengths.tobytes() + pointers.tobytes() + boundaries.tobytes()
    index += np.array([mode for _, mode in sequences], np.int8).tobytes() if modes else b""
    with open(f"{prefix}.idx", "wb") as file:
        file.write(index)
    return str(prefix)


FIRST = [[([1, 2, 3], 0), ([4], 1)], [], [([5, 6], -3)]]
SECOND = [[([7], 127)], [([8, 9], 0), ([10], 2), ([], 1)]]


def merge(*inputs, output, more=()):
    merge_datasets.main(["--input", *inputs, "--output-prefix", str(output), *more])


def test_modes_are_read(tmp_path):
    found = IndexedDataset(write(tmp_path / "a", FIRST))
    assert found.sequence_modes.tolist() == [0, 1, -3] and found.get(1).tolist() == [4]
    assert IndexedDataset(write(tmp_path / "b", FIRST, modes=False)).sequence_modes is None


@pytest.mark.parametrize("piece", [1 << 20, 2])
def test_merged_files_are_those_of_all_documents_at_once(tmp_path, piece, monkeypatch):
    monkeypatch.setattr("megatron.data.merge.PIECE", piece)
    parts = [write(tmp_path / name, documents) for name, documents in (("a", FIRST), ("b", SECOND), ("c", []))]
    write(tmp_path / "whole", FIRST + SECOND)
    merge(*parts, output=tmp_path / "merged", more=["--multimodal"])
    for end in ("bin", "idx"):
        assert (tmp_path / f"merged.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()
    assert IndexedDataset(tmp_path / "merged").sequence_modes.tolist() == [0, 1, -3, 127, 0, 2, 1]


def test_modes_are_neither_lost_nor_made_up(tmp_path):
    with_modes, without = write(tmp_path / "a", FIRST), write(tmp_path / "b", SECOND, modes=False)
    for inputs, more, told in (
        ([with_modes], [], "a.idx holds a mode for each sequence: it is multimodal"),
        ([with_modes, without], [], "add --multimodal: without it the modes would be lost"),
        ([with_modes, without], ["--multimodal"], "--multimodal: .*b.idx holds no modes of its 4 sequences"),
    ):
        with pytest.raises(DataError, match=told) as error:
            merge(*inputs, output=tmp_path / "out", more=more)
        assert error.value.code == 4 and not list(tmp_path.glob("out*"))


def test_modes_that_are_cut_short(tmp_path):
    prefix = write(tmp_path / "a", FIRST)
    index = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(index[:-1])
    with pytest.raises(DataError, match="bytes, but its header promises"):
        merge(prefix, output=tmp_path / "out", more=["--multimodal"])
