# SPDX-License-Identifier: Apache-2.0
"""A comparison of ids that says which tokenizer, which text and which token differ."""

from collections.abc import Iterable, Sequence
from typing import Any


def first_difference(expected: Sequence, found: Sequence) -> int:
    """The number of equal elements at the beginning.

    >>> first_difference([1, 2, 3], [1, 2])
    2
    """
    shorter = min(len(expected), len(found))
    return next((n for n in range(shorter) if expected[n] != found[n]), shorter)


def assert_equal(where: str, theirs: Any, rows: Iterable[tuple[str, str, Sequence[int], Sequence[int]]]) -> int:
    """Compare (title, text, expected ids, found ids) of each row; returns how many there were."""
    wrong, count = [], 0
    for title, text, expected, found in rows:
        count += 1
        if list(expected) != list(found):
            at = first_difference(expected, found)
            there, here = (theirs.convert_ids_to_tokens(list(ids[at : at + 6])) for ids in (expected, found))
            wrong.append(f"{where}, {title}: {text[:80]!r}: token {at} is {here}, and should be {there}")
    assert not wrong, f"{len(wrong)} of {count} texts differ:\n" + "\n".join(wrong[:5])
    assert count
    return count
