# SPDX-License-Identifier: Apache-2.0
"""What a run says at its end, in lines whose numbers add up: documents read, less those dropped, and more where cutting
made several of one, are the documents of the corpus.
"""

from collections.abc import Mapping
from typing import Any

MOST_RULES, MOST_FILES = 8, 20  # shown one by one; the others as a sum


def summary(counts: Mapping[str, dict[str, Any]]) -> list[str]:
    """A few lines about phases (`driver.counts_by_phase`): what came in, what became of it, what goes out."""
    last = counts[list(counts)[-1]]
    found = [f"{last[name]:,} {name}" for name in ("documents", "tokens") if name in last]
    return [*became_of(counts), f"final: {', '.join(found) or 'see final/'}"]


def became_of(counts: Mapping[str, dict[str, Any]]) -> list[str]:
    """The lines about what was read, set aside, dropped and cut."""
    phase = next(iter(counts))
    first = counts[phase]
    lines = [f"read: {first.get('documents', 0):,} documents, {first.get('bytes', 0) / 1e6:,.1f} MB of text"]
    if rejected := first.get("rejected"):
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in largest(rejected))
        lines.append(f"lines set aside: {sum(rejected.values()):,} ({reasons}); see rejected.jsonl in tasks/{phase}")
    damaged = list(first.get("damaged", {}).items())
    lines += [f"set aside: {path}: {reason}" for path, reason in damaged[:MOST_FILES]]
    if len(damaged) > MOST_FILES:
        lines.append(f"set aside: {len(damaged) - MOST_FILES:,} other input files")
    for name, found in counts.items():
        dropped = {rule: one["documents"] for rule, one in found.get("dropped", {}).items()}
        lines += [f"{name}: {rule} dropped {n:,}" for rule, n in largest(dropped) if n or not found.get("cut")]
        if found.get("cut"):
            became = f", which became {found['pieces']:,}" if "pieces" in found else ""
            passages = f"{found.get('passages', 0):,} passages ({found.get('bytes_cut', 0):,} bytes)"
            lines.append(f"{name}: cut {passages} out of {found['cut']:,} documents{became}")
    return lines


def largest(counts: Mapping[str, int], most: int = MOST_RULES) -> list[tuple[str, int]]:
    """The largest numbers with their names; what is not among them last, as one.

    >>> largest({"a": 1, "b": 5, "c": 2}, most=1)
    [('b', 5), ('2 others', 3)]
    """
    rows = sorted(counts.items(), key=lambda one: -one[1])
    others = rows[most:]
    return rows[:most] + [(f"{len(others)} others", sum(number for _, number in others))] * bool(others)
