# SPDX-License-Identifier: Apache-2.0
"""The .bin/.idx reader and writer: the format's bytes, round trips, damaged and hostile files."""

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.indexed import HEADER, IndexedDataset, stream_index, token_dtype, write_index
from megatron.errors import DataError


def write(prefix, sequences, documents, dtype=np.uint16):
    """A dataset from lists of tokens; `documents`: sequences before each document, with the total at the end."""
    tokens = np.array([token for sequence in sequences for token in sequence], dtype)
    tokens.tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", dtype, np.array([len(s) for s in sequences]), np.array(documents))
    return str(prefix)


def test_bytes_are_the_documented_format(tmp_path):
    prefix = write(tmp_path / "a", [[1, 2, 3], [4]], [0, 1, 1, 2])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 4)
    expected += struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 6) + struct.pack("<4q", 0, 1, 1, 2)
    assert (tmp_path / "a.idx").read_bytes() == expected
    tokens = IndexedDataset(prefix)
    assert (len(tokens), tokens.num_documents, tokens.num_tokens) == (2, 3, 4)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 65499), max_size=5), max_size=4), max_size=6),
    st.sampled_from([np.uint16, np.int32]),
)
def test_round_trip(tmp_path_factory, documents, dtype):
    prefix = str(tmp_path_factory.mktemp("round") / "trip")
    sequences = [sequence for document in documents for sequence in document]
    write(prefix, sequences, np.cumsum([0] + [len(document) for document in documents]), dtype)
    tokens = IndexedDataset(prefix)
    assert [tokens.get(i).tolist() for i in range(len(tokens))] == sequences
    assert np.diff(tokens.document_indices).tolist() == [len(document) for document in documents]
    assert tokens.dtype == dtype
    for i, sequence in enumerate(sequences):
        for offset in range(len(sequence) + 1):
            assert tokens.get(i, offset).tolist() == sequence[offset:]
            assert tokens.get(i, offset, 0).size == 0


def test_streamed_in_pieces_equals_whole(tmp_path):
    lengths, counts = np.arange(1, 50), np.ones(49, np.int64)
    write_index(tmp_path / "whole", np.int32, lengths, np.arange(50))
    pieces = lambda array: lambda: np.array_split(array, 7)
    stream_index(tmp_path / "pieces", np.int32, 49, 49, pieces(lengths), pieces(counts))
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()


def test_get_refuses_places_outside_of_the_sequence(tmp_path):
    tokens = IndexedDataset(write(tmp_path / "a", [[1, 2, 3], [4]], [0, 1, 2]))
    for offset, length in [(0, 4), (4, None), (-1, 2), (2, -1)]:
        with pytest.raises(IndexError):
            tokens.get(0, offset, length)
    assert pickle.loads(pickle.dumps(tokens)).get(1).tolist() == [4]


def test_suffix_of_tab_completion_is_forgiven(tmp_path):
    prefix = write(tmp_path / "a", [[1]], [0, 1])
    assert IndexedDataset(prefix + ".bin").prefix == IndexedDataset(prefix + ".idx").prefix == prefix


def test_missing_files_name_what_is_there(tmp_path):
    write(tmp_path / "corpus_text_document", [[1]], [0, 1])
    with pytest.raises(DataError, match="corpus_text_document"):
        IndexedDataset(tmp_path / "corpus")
    (tmp_path / "corpus_text_document.bin").unlink()
    with pytest.raises(DataError, match="corpus_text_document.bin: no such file"):
        IndexedDataset(tmp_path / "corpus_text_document")


def damaged(data: bytes, what: str) -> bytes:
    if what == "magic":
        return b"X" + data[1:]
    if what == "cut":
        return data[:-3]
    if what == "long":
        return data + b"12345"
    fields = list(HEADER.unpack_from(data))
    position, value = dict(version=(1, 2), dtype=(2, 9), sequences=(3, 2**60), documents=(4, 2**60))[what]
    fields[position] = value
    return HEADER.pack(*fields) + data[HEADER.size :]


@pytest.mark.parametrize("what", ["magic", "cut", "long", "version", "dtype", "sequences", "documents"])
def test_hostile_headers_are_data_errors(tmp_path, what):
    prefix = write(tmp_path / "a", [[1, 2, 3], [4]], [0, 1, 2])
    index = tmp_path / "a.idx"
    index.write_bytes(damaged(index.read_bytes(), what))
    with pytest.raises(DataError, match="a.idx"):
        IndexedDataset(prefix)


def test_contradicting_files_are_data_errors(tmp_path):
    prefix = write(tmp_path / "a", [[1, 2, 3], [4]], [0, 1, 2])
    (tmp_path / "a.bin").write_bytes(b"1234567")
    with pytest.raises(DataError, match="whole number"):
        IndexedDataset(prefix)
    (tmp_path / "a.bin").write_bytes(b"123456")
    with pytest.raises(DataError, match="3 tokens, its .idx describes 4"):
        IndexedDataset(prefix)
    with pytest.raises(DataError, match="do not cover"):
        IndexedDataset(write(tmp_path / "b", [[1]], [0, 2]))


def test_pointer_outside_of_the_bin(tmp_path):
    prefix = write(tmp_path / "a", [[1, 2, 3], [4]], [0, 1, 2])
    data = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<q", data, HEADER.size + 8 + 8, 1000)
    (tmp_path / "a.idx").write_bytes(data)
    with pytest.raises(DataError, match="sequence 1"):
        IndexedDataset(prefix).get(1)


@pytest.mark.parametrize("vocab_size, name", [(65499, "uint16"), (65500, "int32"), (None, "int32"), (300, "uint16")])
def test_dtype_threshold(vocab_size, name):
    assert token_dtype(vocab_size).name == name
