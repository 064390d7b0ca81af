# SPDX-License-Identifier: Apache-2.0
"""Files without a flag before, between and behind flags."""

from dataclasses import dataclass
from typing import Optional

import pytest

from megatron.errors import UsageError
from megatron.settings.positional import divide, expect
from megatron.settings.schema import setting


@dataclass(frozen=True)
class Shape:
    json: bool = setting("a switch", False)
    output: Optional[str] = setting("one word", None)
    inputs: list[str] = setting("some words", ())


@pytest.mark.parametrize(
    "line, files, flags",
    [
        ("--json dump --output out", "dump", "--json --output out"),
        ("--json true dump", "dump", "--json true"),
        ("dump --no-json other", "dump other", "--no-json"),
        ("a -o b c", "a c", "--output b"),
        ("--output=b a", "a", "--output=b"),
        ("--inputs a b --json c", "c", "--inputs a b --json"),
        ("- -- --json", "- --json", ""),
        ("a --unknown b", "a b", "--unknown"),
        ("--output", "", "--output"),
        ("--config file a", "a", "--config file"),
    ],
)
def test_files_and_flags(line, files, flags):
    assert divide(line.split(), Shape, letters={"-o": "--output"}) == (files.split(), flags.split())


def test_another_number_of_files():
    assert expect(["a", "b"], "IN OUT", "tool") == ["a", "b"]
    with pytest.raises(UsageError, match="2 files are wanted .1 given: a"):
        expect(["a"], "IN OUT", "tool")
