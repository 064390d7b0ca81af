# SPDX-License-Identifier: Apache-2.0
"""docs/provenance.md is true: its commands run as they stand, one after another, and say what it says they say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIGURES = re.compile(r"\d+\.\d+ (s|MB)|\d\.\d{4}E[+-]\d\d|/\S*/(?=data/)|\d\d? s\b")


def blocks_of(page: str) -> list[tuple[str, list[str]]]:
    """(commands, lines of the output that follows them, without those that are left out)."""
    found = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.S | re.M):
        if kind == "bash":
            found.append((block, []))
        else:
            found[-1][1].extend(line for line in block.splitlines() if line.strip() not in ("...", ""))
    return found


def plain(line: str) -> str:
    return FIGURES.sub("", line.split(" | ...")[0]).strip()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_its_commands_run_and_say_what_it_says(root, tmp_path):
    for name in ("preprocess_data.py", "pretrain_gpt.py", "merge_datasets.py"):
        shutil.copy(root / name, tmp_path)
    shell = "set -e\npython() { " + sys.executable + ' "$@"; }\n'
    env = dict(os.environ, PYTHONPATH=str(root))
    variables = ""
    for commands, expected in blocks_of((root / "docs" / "provenance.md").read_text(encoding="utf-8")):
        done = subprocess.run(
            ["bash", "-c", shell + variables + commands],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        variables += "".join(re.findall(r'^[A-Z]+="[^"]*"\n', commands, re.M))
        said = [plain(line) for line in done.stdout.splitlines()]
        for line in map(plain, expected):
            assert any(own.startswith(line) for own in said), (commands, line, done.stdout)


def test_its_pages_say_where_to_look(root):
    assert (
        "provenance.md" in Path(root, "README.md").read_text()
        and "provenance.md" in Path(root, "docs/data.md").read_text()
    )
