# SPDX-License-Identifier: Apache-2.0
"""Small rules of the sources that a linter does not know."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from megatron.errors import MissingPackage, exit_code
from tests.test_floors import ENTRIES

ROOT = Path(__file__).resolve().parent.parent
CODE = [path for folder in ("megatron", "benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
CODE = [path for path in CODE if path.name != "B_gpt2_zero3.py"]  # another system's, as it is printed
CODE += [ROOT / f"{name}.py" for name in ENTRIES]  # what else lies there is a user's own
PRIVATE = re.compile(r"(/home/\w+|/root/|/work/|index-url|extra-index)")


@cache
def sources() -> dict[str, str]:
    """{file: text} of all code, read once."""
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in CODE}


def assert_none(problem: str, places: list[str]):
    """One failure names every place."""
    assert not places, "\n".join([f"{problem}:", *places])


def test_the_first_line_names_the_licence():
    head = "# SPDX-License-Identifier: Apache-2.0\n"
    assert_none(
        f"the first line is not {head!r}", [f"{n}:1" for n, text in sources().items() if not text.startswith(head)]
    )


def test_code_is_ascii():
    lines = [(f"{name}:{n}", line) for name, text in sources().items() for n, line in enumerate(text.splitlines(), 1)]
    assert_none("not ASCII", [f"{place}: {line.strip()}" for place, line in lines if not line.isascii()])


def test_a_module_says_what_it_is_for():
    plain = re.compile(r'\A(#.*\n)*r?"""')  # those of other forms are parsed
    texts = {name: text for name, text in sources().items() if not (name.startswith("tests/") or plain.match(text))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    assert_none(
        "no docstring says what the file is for",
        [f"{name}:1" for name, tree in trees.items() if len(tree.body) > 1 and not ast.get_docstring(tree)],
    )


def test_nothing_private_is_published():
    """No absolute path of somebody's machine, no package index, in any file of the repository."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = [ROOT / name for name in listed.stdout.splitlines()]
    texts = [path for path in texts if path.suffix in (".py", ".md", ".sh", ".toml", ".txt", ".yaml", "")]
    texts = [path for path in texts if path.is_file() and path != Path(__file__)]
    assert ROOT / "README.md" in texts
    lines = [(path, n, line) for path in texts for n, line in enumerate(path.read_text("utf-8").splitlines(), 1)]
    found = [f"{path.relative_to(ROOT)}:{n}: {line.strip()}" for path, n, line in lines if PRIVATE.search(line)]
    assert_none("private", found)


def test_a_missing_package_is_one_error_with_one_exit_code():
    """Each message that says what installs a package is `errors.MissingPackage`, whatever the package is for."""
    found = []
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text)) if re.search("pip install|package", text) else ():
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            if not re.fullmatch(r"Failure|\w+Error", call.func.id):
                continue
            if re.search("pip install|needs? the package", ast.unparse(call)):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {call.func.id}")
    assert not found, "say MissingPackage"
    assert exit_code(MissingPackage("x")) == exit_code(ModuleNotFoundError("x", name="gguf")) == 3
