# SPDX-License-Identifier: Apache-2.0
"""Add up the counts of tasks: nested dicts of numbers, with histograms as {bucket: count}. Then the summary of a run.

The numbers of the summary add up: documents read, minus dropped ones, plus pieces of cut ones.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron.telemetry.figures import size


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


MOST_RULES, MOST_FILES = 8, 20  # shown one by one; the others as a sum


def summary(counts: Mapping[str, dict[str, Any]]) -> list[str]:
    """Lines with the documents read, set aside, dropped and kept, from the counts of `driver.counts_by_phase`."""
    last = counts[list(counts)[-1]]
    totals = [f"{last[name]:,} {name}" for name in ("documents", "tokens") if name in last]
    return [*removed_lines(counts), f"final: {', '.join(totals) or 'see final/'}"]


def removed_lines(counts: Mapping[str, dict[str, Any]]) -> list[str]:
    """Lines with the documents read, set aside, dropped and cut."""
    phase = next(iter(counts))
    first = counts[phase]
    lines = [f"read: {first.get('documents', 0):,} documents, {size(first.get('bytes', 0))} of text"]
    if rejected := first.get("rejected"):
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in largest(rejected))
        lines.append(f"lines set aside: {sum(rejected.values()):,} ({reasons}); see rejected.jsonl in tasks/{phase}")
    damaged = list(first.get("damaged", {}).items())
    lines += [f"set aside: {path}: {reason}" for path, reason in damaged[:MOST_FILES]]
    if len(damaged) > MOST_FILES:
        lines.append(f"set aside: {len(damaged) - MOST_FILES:,} other input files")
    for name, phase_counts in counts.items():
        dropped = {rule: one["documents"] for rule, one in phase_counts.get("dropped", {}).items()}
        lines += [f"{name}: {rule} dropped {n:,}" for rule, n in largest(dropped) if n or not phase_counts.get("cut")]
        if phase_counts.get("cut"):
            became = f", which became {phase_counts['pieces']:,}" if "pieces" in phase_counts else ""
            passages = f"{phase_counts.get('passages', 0):,} passages ({phase_counts.get('bytes_cut', 0):,} bytes)"
            lines.append(f"{name}: cut {passages} out of {phase_counts['cut']:,} documents{became}")
    return lines


def largest(counts: Mapping[str, int], most: int = MOST_RULES) -> list[tuple[str, int]]:
    """The largest numbers with their names, followed by the sum of the others.

    >>> largest({"a": 1, "b": 5, "c": 2}, most=1)
    [('b', 5), ('2 others', 3)]
    """
    rows = sorted(counts.items(), key=lambda one: -one[1])
    others = rows[most:]
    return rows[:most] + [(f"{len(others)} others", sum(number for _, number in others))] * bool(others)
