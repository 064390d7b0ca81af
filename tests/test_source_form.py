# SPDX-License-Identifier: Apache-2.0
"""Small rules of the sources that a linter does not know."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.test_floors import ENTRIES

ROOT = Path(__file__).resolve().parent.parent
CODE = [path for folder in ("megatron", "benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
CODE = [path for path in CODE if path.name != "B_gpt2_zero3.py"]  # another system's, as it is printed
CODE += [ROOT / f"{name}.py" for name in ENTRIES]  # what else lies there is a user's own
PRIVATE = re.compile(r"(/home/\w+|/root/|/work/|index-url|extra-index)")


@pytest.mark.parametrize("path", CODE, ids=[str(path.relative_to(ROOT)) for path in CODE])
def test_form(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), "the first line names the licence"
    assert [line for line in text.splitlines() if not line.isascii()] == []
    tree = ast.parse(text)
    if len(tree.body) > 1 and "tests" not in path.parts:
        assert ast.get_docstring(tree), "the file does not say what it is for"


def test_nothing_private_is_published():
    """No absolute path of somebody's machine, no package index, in any file of the repository."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = [ROOT / name for name in listed.stdout.splitlines()]
    texts = [path for path in texts if path.suffix in (".py", ".md", ".sh", ".toml", ".txt", ".yaml", "")]
    texts = [path for path in texts if path.is_file() and path != Path(__file__)]
    assert ROOT / "README.md" in texts
    found = {path: PRIVATE.findall(path.read_text(encoding="utf-8")) for path in texts}
    assert {path: words for path, words in found.items() if words} == {}
