# SPDX-License-Identifier: Apache-2.0
"""The state of a working tree as git sees it, for the check that tests leave it as it was."""

import subprocess
from pathlib import Path
from typing import Optional

CACHES = {"__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache", ".venv"}


def state(root: Path) -> Optional[set[str]]:
    """Changed, new and ignored files (`git status`), without caches of tools; None where git does not know the tree."""
    words = ["git", "-C", str(root), "status", "--porcelain", "--ignored"]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError:  # no git
        return None
    if done.returncode or not (root / ".git").exists():
        return None
    rows = done.stdout.splitlines()
    return {row for row in rows if not CACHES & set(Path(row[3:]).parts) and not row.endswith(".egg-info/")}


def changes(before: Optional[set[str]], after: Optional[set[str]]) -> list[str]:
    """What is another state now than before, as lines of `git status`."""
    if before is None or after is None:
        return []
    return sorted([*(after - before), *(f"{row}: no longer" for row in before - after)])


def tracked(root: Path, *flags: str) -> Optional[list[str]]:
    """The files that git tracks; None where it does not know the tree. flags: of `git ls-files`"""
    if state(root) is None:
        return None
    done = subprocess.run(["git", "-C", str(root), "ls-files", *flags], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
