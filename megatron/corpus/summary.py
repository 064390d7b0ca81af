# SPDX-License-Identifier: Apache-2.0
"""The summary at the end of a run. Its numbers add up: documents read, minus dropped ones, plus pieces of cut ones."""

from collections.abc import Mapping
from typing import Any

from megatron.telemetry.figures import size

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
