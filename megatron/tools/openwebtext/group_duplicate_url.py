# SPDX-License-Identifier: Apache-2.0
"""Group the pairs of near-duplicates from find_duplicates: step two of three.

    python -m megatron.tools.openwebtext.group_duplicate_url process_stage_one.json process_stage_two.json 0.9
    python -m megatron.tools.openwebtext.group_duplicate_url IN OUT --jaccard-threshold 0.9

Documents of a pair of at least this similarity (default: 0.7) belong to one group, and so do those of pairs that share a
document. A line of OUT is a group: {"0": ["first", "second", ...]}, in the order of IN.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.corpus.duplicates.pairs import DocumentGroups
from megatron.corpus.openwebtext.duplicate_files import LeftOut, documents, json_line
from megatron.errors import DataError, SettingsError, UsageError, run_main
from megatron.settings.positional import divide, expect, parse_one
from megatron.settings.schema import setting
from megatron.storage.durable import whole_file

PROG = "python -m megatron.tools.openwebtext.group_duplicate_url"


@dataclass(frozen=True)
class GroupOptions:
    """The threshold for near-duplicates."""

    jaccard_threshold: float = setting("pairs of at least this similarity are of one group", 0.7)
    debug: bool = setting("tracebacks with error messages", False)


def main(argv: list[str]) -> None:
    """IN OUT [THRESHOLD]"""
    files, flags = divide(argv, GroupOptions)
    threshold = None
    if len(files) == 3:
        threshold = _number(files.pop())
        if any(flag.partition("=")[0] == "--jaccard-threshold" for flag in flags):
            raise UsageError(f"the threshold is given twice: {threshold}, and by --jaccard-threshold")
    options = parse_one(flags, GroupOptions, f"{PROG} IN OUT [THRESHOLD]", "Groups of near-duplicates from pairs.")
    source, target = expect(files, "IN OUT", PROG)
    threshold = options.jaccard_threshold if threshold is None else threshold
    if not 0 <= threshold <= 1:
        raise SettingsError(f"a threshold of {threshold}: similarities are 0 to 1")
    groups = groups_of(source, threshold)
    with whole_file(target) as file:
        for number, names in enumerate(groups):
            file.write(json_line({str(number): names}))
    total = sum(map(len, groups))
    print(f"{len(groups):,} groups of {total:,} documents: {total - len(groups):,} would be removed")


def groups_of(path: str, threshold: float) -> list[list[str]]:
    """The groups of more than one document. Raises DataError if the file has lines but no pairs."""
    numbers: dict[str, int] = {}  # of documents, in the order of the file
    near: list[tuple[int, int]] = []
    left_out, understood = LeftOut(path), 0
    for number, _, line in documents(path, left_out):
        pairs = list(pairs_of(line))
        understood += bool(pairs)
        if not pairs:
            left_out.add(number, "no pairs with a similarity")
        for *both, similarity in pairs:
            pair = tuple(numbers.setdefault(name, len(numbers)) for name in both)
            near += [pair] * (similarity >= threshold)
    left_out.tell()
    if left_out.counts and not understood:
        raise DataError(f"{path}: holds no pairs", do="give the --output of find_duplicates")
    joined = DocumentGroups(len(numbers))
    joined.join(np.array(near, np.int64).reshape(-1, 2))
    groups: dict[int, list[str]] = {}
    for name, first in zip(numbers, joined.smallest(0, len(numbers)).tolist()):
        groups.setdefault(first, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def pairs_of(line: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(document, other document, similarity) of a line: {main: [{other: .9}, ...]}, or {main: {other: .9}}."""
    for name, others in line.items():
        for other in others if isinstance(others, list) else [others]:
            for key, similarity in other.items() if isinstance(other, dict) else ():
                if isinstance(similarity, (int, float)) and not isinstance(similarity, bool):
                    yield name, key, similarity


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise UsageError(f"{word} is no threshold", do=f"{PROG} IN OUT 0.7") from None


if __name__ == "__main__":
    run_main(main)
