# SPDX-License-Identifier: Apache-2.0
"""Add up the counts of tasks: nested dicts of numbers, with histograms as {bucket: count}."""

from collections.abc import Iterable, Mapping
from typing import Any


def text_bytes(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def bucket(value: float) -> str:
    """The histogram bucket of a number: its first digit and its magnitude.

    >>> bucket(0), bucket(0.137), bucket(1), bucket(98765), bucket(-0.26)
    ('0', '0.1', '1', '90000', '-0.2')
    """
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    digit, _, power = f"{abs(value):.12e}".partition("e")
    number = float(f"{digit[0]}e{power}")
    return f"{'-' * (value < 0 and number > 0)}{number:.12g}"


def add(total: dict[str, Any], counts: Mapping[str, Any]) -> None:
    """Add the counts of a task to a total: numbers are summed, dicts entry by entry, lists joined; the first text stays.

    >>> total = {}
    >>> add(total, {"documents": 2, "rules": {"short": 1}}); add(total, {"documents": 3, "rules": {"long": 1}})
    >>> total
    {'documents': 5, 'rules': {'short': 1, 'long': 1}}
    """
    for name, value in counts.items():
        if isinstance(value, Mapping):
            if not isinstance(total.setdefault(name, {}), dict):
                continue
            add(total[name], value)
        elif isinstance(value, list):
            if isinstance(total.setdefault(name, []), list):
                total[name] = total[name] + value[: max(0, 1000 - len(total[name]))]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            before = total.get(name, 0)
            total[name] = before + value if isinstance(before, (int, float)) else before
        else:
            total.setdefault(name, value)


def summed(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for one in counts:
        add(total, one)
    return total
