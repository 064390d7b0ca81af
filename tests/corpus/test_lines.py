# SPDX-License-Identifier: Apache-2.0
"""Lines of streams that are cut into blocks anywhere, against bytes.split."""

import random

import pytest

from megatron.corpus.lines import lines, split
from megatron.errors import DataError


def test_lines_whatever_the_blocks():
    choice = random.Random(1)
    for _ in range(500):
        data = bytes(choice.choice(b"ab\n\n") for _ in range(choice.randrange(40)))
        cuts = sorted(choice.randrange(len(data) + 1) for _ in range(4))
        blocks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        expected = data.split(b"\n")
        expected = expected[:-1] if not expected[-1] else expected
        assert list(split(blocks, 100)) == expected
        assert list(split(blocks, 2)) == [line[:3] for line in expected]


def test_a_line_that_is_too_long_is_named(tmp_path):
    (tmp_path / "a").write_bytes(b"short\n" + b"x" * 2_000_001)
    with pytest.raises(DataError, match="a: line 2 is longer than 2 MB"):
        list(lines(tmp_path / "a", 2_000_000))
