# SPDX-License-Identifier: Apache-2.0
"""Lines of parts of files, and lines that are too long, beside a plain split of all bytes."""

import gzip
import random

import pytest

from megatron.data.json_input import find_sources, read_blocks, read_part


def lines_of(blocks):
    """Lines of blocks of whole lines, each block but the last of a file ending at a line's end."""
    return b"".join(blocks).split(b"\n")


@pytest.fixture(params=range(12))
def made(request, tmp_path):
    """A file of lines of 0 to 60 bytes, the last one with or without its end."""
    chance = random.Random(request.param)
    lines = [bytes(chance.choices(b"abc", k=chance.choice((0, 1, 5, 20, 60)))) for _ in range(chance.randrange(12))]
    data = b"\n".join(lines) + chance.choice((b"", b"\n"))
    (tmp_path / "lines.jsonl").write_bytes(data)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(data))
    return data, *find_sources([str(tmp_path / "lines.jsonl"), str(tmp_path / "lines.jsonl.gz")])


def test_parts_of_a_file_are_its_lines_once_each(made):
    data, source, _ = made
    starts = [0] + [at + 1 for at, byte in enumerate(data) if byte == 10]
    for step in (1, 2, 7, 30, 1000):
        for block in (1, 3, 16, 1 << 16):
            for start in range(0, len(data), step):
                stop = min(start + step, len(data))
                ours = [at for at in starts if start <= at < stop]
                expected = data[ours[0] : (data.find(b"\n", ours[-1]) + 1) or len(data)] if ours else b""
                assert b"".join(read_part(source, start, stop, block, 1 << 20)) == expected


def test_what_is_behind_the_limit_of_a_line_does_not_come(made):
    data, source, packed = made
    for longest in (0, 4, 19, 20, 59, 60):
        for block in (1, 3, 16, 1 << 16):
            readers = [read_part(source, 0, len(data), block, longest)]
            readers.append(data for data, _ in read_blocks(packed, block, longest))
            for blocks in readers:
                blocks = list(blocks)
                assert all(piece.endswith(b"\n") for piece in blocks[:-1])
                assert max(map(len, blocks), default=0) <= block + longest + 1 + block
                found, lines = lines_of(blocks), data.split(b"\n")
                assert len(found) == len(lines)
                for line, whole in zip(found, lines, strict=True):
                    assert line == whole or len(whole) > longest < len(line) and whole.startswith(line)
