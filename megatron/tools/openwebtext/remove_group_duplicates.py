# SPDX-License-Identifier: Apache-2.0
"""Remove near-duplicates from documents, by the groups of group_duplicate_url: step three of three.

    python -m megatron.tools.openwebtext.remove_group_duplicates process_stage_two.json clean.json dedup.json

Of each group, the document that comes first in DATA is kept, regardless of the order in the group. Kept lines are copied
unchanged. A line that is no JSON is dropped and reported; one without a name is kept.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Optional

from megatron.corpus.openwebtext.duplicate_files import LeftOut, documents
from megatron.errors import DataError, run_main
from megatron.settings.positional import divide, expect, parse_one
from megatron.settings.schema import setting
from megatron.storage.durable import whole_file

PROG = "python -m megatron.tools.openwebtext.remove_group_duplicates"


@dataclass(frozen=True)
class RemoveOptions:
    """The key of documents' names."""

    key: str = setting("the key of a document's name, as given to find_duplicates", "url")
    debug: bool = setting("tracebacks with error messages", False)


def main(argv: list[str]) -> None:
    """GROUPS DATA OUT"""
    files, flags = divide(argv, RemoveOptions)
    about = "Remove near-duplicates: of each group, the first document of the file stays."
    options = parse_one(flags, RemoveOptions, f"{PROG} GROUPS DATA OUT", about)
    groups, source, target = expect(files, "GROUPS DATA OUT", PROG)
    counts = remove(read_groups(groups), source, target, options.key)
    print(f"written: {counts['written']:,}, removed: {counts['removed']:,} (characters: {counts['characters']:,})")


def read_groups(path: str) -> dict[str, int]:
    """Read groups: document -> number of its group. Raises DataError for a file without any group."""
    group_of: dict[str, int] = {}
    left_out, groups = LeftOut(path), 0
    for number, _, line in documents(path, left_out):
        members = [names for names in map(_names, line.values()) if names]
        if not members:
            left_out.add(number, "no group of documents")
        for names in members:
            for name in names:
                group_of.setdefault(name, groups)
            groups += 1
    left_out.tell()
    if left_out.counts and not groups:
        raise DataError(f"{path}: holds no groups", do="give the output of group_duplicate_url")
    return group_of


def _names(value: Any) -> Optional[list[str]]:
    """The names of a group: a list of texts or numbers; None for anything else (pairs with similarities)."""
    fit = isinstance(value, list) and all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in value)
    return [str(name) for name in value] if fit else None


def remove(group_of: dict[str, int], source: str, target: str, key: str) -> Counter:
    """Copy the kept lines of `source`. Returns counts of documents, and of characters of removed texts."""
    counts: Counter = Counter(written=0, removed=0, characters=0)
    stays: dict[int, str] = {}  # group -> the name that came first
    left_out, unnamed = LeftOut(source), 0
    with whole_file(target) as file:
        for _, line, document in documents(source, left_out):
            name = document.get(key)
            unnamed += name is None
            group = group_of.get(str(name)) if name is not None else None
            if group is not None and stays.setdefault(group, str(name)) != str(name):
                text = document.get("text")
                counts.update(removed=1, characters=len(text) if isinstance(text, str) else 0)
                continue
            file.write(line + b"\n")
            counts["written"] += 1
        if counts["written"] and unnamed == counts["written"] and group_of:
            raise DataError(f"{source}: no document has {key}", do="--key NAME, as given to find_duplicates")
    left_out.tell()
    return counts


if __name__ == "__main__":
    run_main(main)
