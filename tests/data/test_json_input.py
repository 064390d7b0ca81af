# SPDX-License-Identifier: Apache-2.0
"""Reading JSON lines: byte ranges, compressed streams, folders, and what is a document."""

import bz2
import gzip
import lzma

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.json_input import BadLine, Source, find_sources, parse_line, read_blocks, read_lines
from megatron.errors import DataError

PACK = dict(gz=gzip.compress, bz2=bz2.compress, xz=lzma.compress, zst=zstandard.ZstdCompressor().compress)
TEXT = b"".join(b'{"text": "%d %s"}\n' % (i, b"word " * (i % 40)) for i in range(3000))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"\r"))), st.booleans(), st.integers(1, 9))
def test_ranges_give_each_line_once(tmp_path_factory, lines, last_newline, size):
    """Whatever the cut, the pieces together are the file, and each piece ends with a line's end."""
    data = b"\n".join(lines) + (b"\n" if last_newline else b"")
    path = tmp_path_factory.mktemp("ranges") / "file"
    path.write_bytes(data)
    with open(path, "rb", buffering=0) as file:
        pieces = [read_lines(file, at, min(at + size, len(data)))[1] for at in range(0, len(data), size)]
    assert b"".join(pieces) == data.removeprefix(b"\xef\xbb\xbf")
    assert all(piece.endswith(b"\n") for piece in pieces[:-1] if piece and not data.endswith(piece))


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("size", [100, 10_000, 1 << 20])
def test_compressed_equals_plain(tmp_path, kind, size):
    path = tmp_path / "misleading.name"  # the bytes tell, not the name
    path.write_bytes(PACK[kind](TEXT[:1000]) + PACK[kind](TEXT[1000:]))  # two members, as `cat a.gz b.gz` makes
    blocks = list(read_blocks(find_sources([str(path)])[0], size))
    assert b"".join(data for data, _ in blocks) == TEXT
    assert all(data.endswith(b"\n") for data, _ in blocks)
    assert blocks[-1][1] == path.stat().st_size


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_compression_is_a_data_error(tmp_path, kind, damage):
    data = bytearray(PACK[kind](TEXT))
    if damage == "cut":
        del data[-20:]
    else:
        data[len(data) // 2] ^= 0x55
    if kind == "zst" and damage == "flipped":
        data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(TEXT))
        data[len(data) // 2] ^= 0x55
    path = tmp_path / f"a.{kind}"
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged or cut short"):
        list(read_blocks(find_sources([str(path)])[0], 1 << 16))


def test_folder_glob_and_order(tmp_path):
    for name in ["b/x.jsonl", "a/wiki_00", "a/y.json.gz", "c.txt", "a/.hidden.json", "old.rejected.jsonl", "d.bin"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b"{}\n") if name.endswith(".gz") else b"{}\n")
    found = [source.path.removeprefix(f"{tmp_path}/") for source in find_sources([str(tmp_path)])]
    assert found == ["a/wiki_00", "a/y.json.gz", "b/x.jsonl"]
    found = find_sources([f"{tmp_path}/*.txt", f"{tmp_path}/**/*.jsonl"])
    assert [source.path.rsplit("/", 1)[1] for source in found] == ["c.txt", "x.jsonl", "old.rejected.jsonl"]


@pytest.mark.parametrize("given_", ["missing.jsonl", "*.nothing", "empty"])
def test_what_is_not_there(tmp_path, given_):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        find_sources([str(tmp_path / given_)])


@pytest.mark.parametrize(
    "line, value",
    [
        (b'{"text": "a"}', "a"),
        (b'{"text": "a", "text": "b"}', "b"),
        (b'{"text": "a", "score": NaN}', "a"),
        (b'{"text": "a", "n": 123456789012345678901234567890}\r', "a"),
        ('{"text": "a\u2028b\u0085c"}'.encode(), "a\u2028b\u0085c"),
        (b'{"text": "\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"text": ["a", ""]}', ["a", ""]),
        (b'{"text": []}', []),
    ],
)
def test_documents(line, value):
    assert parse_line(line, ["text"]) == [value]


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "a"', "not JSON"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b"[1]", "a list instead of an object"),
        (b'"text"', "a string instead"),
        (b'{"body": "a", "id": 1}', "no key 'text' \\(keys: body, id\\)"),
        (b"{}", "keys: none"),
        (b'{"text": 3}', "a number, not text"),
        (b'{"text": null}', "null, not text"),
        (b'{"text": ["a", 1]}', "a list, not text"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b"[" * 100_000, "not JSON"),
        ('{"text": "a"}'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_bad_lines_say_why(line, reason):
    with pytest.raises(BadLine, match=reason):
        parse_line(line, ["text"])


def test_blank_lines_are_no_documents():
    assert parse_line(b"", ["text"]) is parse_line(b" \r\t", ["text"]) is None


def test_last_line_without_newline_and_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}')
    assert [data for data, _ in read_blocks(Source(str(path), 0, None), 5)] == [b'{"text": "a"}\n', b'{"text": "b"}']
