# SPDX-License-Identifier: Apache-2.0
"""A file and a function fit a reader's head; small rules that a linter does not know."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES = 450, 70  # 400 and 60 are the aim
CODE = [path for folder in ("megatron", "benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
CODE += sorted(ROOT.glob("*.py"))


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", CODE, ids=names(CODE))
def test_size_and_form(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), "the first line names the licence"
    assert text.isascii(), [line for line in lines if not line.isascii()][:3]
    assert len(lines) <= FILE_LINES, f"{len(lines)} lines"
    tree = ast.parse(text)
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: global"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < FUNCTION_LINES, (
                f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
            )
    if len(tree.body) > 1 and "tests" not in path.parts:
        assert ast.get_docstring(tree), "the file does not say what it is for"


def test_no_drawers_for_odds_and_ends():
    assert [path for path in CODE if path.stem in ("utils", "util", "helpers", "misc", "common")] == []


LIBRARY = [path for path in sorted((ROOT / "megatron").rglob("*.py")) if path.parent.name != "tools"]


@pytest.mark.parametrize("path", LIBRARY, ids=names(LIBRARY))
def test_public_functions_say_what_they_do(path):
    """Every longer function and class without an underscore at the top of a module has a docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    public = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]
    public = [
        n for n in public if n.name not in ("main", "build")
    ]  # of commands, of tokenizers: said where they are used
    assert [n.name for n in public if not ast.get_docstring(n) and n.end_lineno - n.lineno > 12] == []


def test_nothing_private_is_published():
    """No absolute path of somebody's machine, no package index, in any file of the repository."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    wrong = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if (
            path.suffix in (".py", ".md", ".sh", ".toml", ".txt", ".yaml", "")
            and path.is_file()
            and path != Path(__file__)
        ):
            for match in re.finditer(
                r"(/home/\w+|/root/|/work/|index-url|extra-index)", path.read_text(encoding="utf-8")
            ):
                wrong.append(f"{name}: {match[0]}")
    assert wrong == []
