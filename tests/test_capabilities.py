# SPDX-License-Identifier: Apache-2.0
"""docs/capabilities.yaml against the code: what it names is there, what it calls missing is not, nobody is left out."""

import ast
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Optional

import pytest
import yaml

from megatron.errors import Failure
from megatron.settings.parse import parse_pretrain

ROOT = Path(__file__).resolve().parent.parent
STATES = ("works", "partly", "not there")
SYSTEMS = "ABCDEM"  # the comment at the start of the file names them
COUNTS = dict(P=16, M=3, O=4, T=20, R=16, K=5, U=3, V=5, I=5, Q=5)  # of the list that the five systems make together
SHAPE = "--num-layers 4 --hidden-size 8 --num-attention-heads 2".split()
FILES = ("--config", "-o", "--parallel-plan")  # flags that read a file


@dataclass(frozen=True)
class Capability:
    """One entry of docs/capabilities.yaml; the comment at its start explains the fields."""

    id: str
    what: str
    of: str
    here: tuple[str, ...]
    tests: tuple[str, ...]
    state: str
    missing: str = ""
    limits: str = ""
    absent: tuple[str, ...] = ()
    docs: Optional[str] = None


def read() -> list[Capability]:
    """The entries, in the order of the file. An unknown or a missing field is a TypeError."""
    rows = yaml.safe_load((ROOT / "docs" / "capabilities.yaml").read_text(encoding="utf-8"))
    return [
        Capability(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
        for row in rows
    ]


ROWS = read()
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)


def test_it_has_all_82_once_and_in_order():
    assert [row.id for row in ROWS] == [f"{one}{n:02}" for one, count in COUNTS.items() for n in range(1, count + 1)]
    assert len(ROWS) == 82


@each
def test_its_page_is_there(row):
    """Its page of docs/, with the heading that it names."""
    if row.docs:
        name, _, anchor = row.docs.partition("#")
        headings = re.findall(r"^#+ +(.*)$", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.M)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors


@each
def test_an_entry_says_what_its_state_needs(row):
    assert row.state in STATES and row.what and set(row.of.split()) <= set(SYSTEMS) and row.of
    assert bool(row.tests) == bool(row.here) == (row.state != "not there"), "tests and commands, or neither"
    limits = " ".join((ROOT / "docs" / "limits.md").read_text(encoding="utf-8").split())
    if row.state == "works":
        assert not (row.missing or row.limits or row.absent), "what works lacks nothing"
    else:
        assert row.missing.endswith(".") and row.missing.count(". ") == 0, "one sentence says what is missing"
        assert row.limits and row.limits in limits, f"docs/limits.md does not say {row.limits!r}"


# ---- tests -------------------------------------------------------------------------------------------------------------


@cache
def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """The tests of a file by name, those of classes too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@cache
def marks_of_file(path: Path) -> str:
    """The source of a file's `pytestmark` and of what it skips itself for at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return " ".join(
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.Expr)) and re.search(r"pytestmark|importorskip", ast.unparse(node))
    )


def skipped(test: str) -> str:
    """Where a test is skipped: "everywhere" but on GPUs; "somewhere": on some machines, or without --full; nowhere: ""."""
    file, name = test.split("::")
    function = functions(ROOT / file)[name]
    marks = " ".join([marks_of_file(ROOT / file), *map(ast.unparse, function.decorator_list)])
    own = " ".join(ast.unparse(mark) for mark in function.decorator_list if "parametrize" not in ast.unparse(mark))
    begins = ast.unparse(function.body[bool(ast.get_docstring(function))])
    if re.search(r"mark\.(skip\b|gpu)", marks) or begins.startswith("pytest.skip(") or "gpu" in Path(file).parts:
        return "everywhere"
    return "somewhere" if re.search(r"skipif|importorskip", marks) or "mark.full" in own else ""


@pytest.mark.sampled(10)
@each
def test_its_tests_are_there_and_run(row):
    assert len(set(row.tests)) == len(row.tests)
    for test in row.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), f"{test}: there is no such file"
        assert name.startswith("test_") and name in functions(ROOT / file), f"{test}: there is no such test"
        assert skipped(test) != "everywhere", f"{test} is never run"
    assert not row.tests or any(skipped(test) == "" for test in row.tests), "no test of it runs everywhere"


def test_what_is_skipped_is_seen():
    assert skipped("tests/optimizer/test_zero_stages.py::test_on_a_gpu_with_state_on_the_host") == "everywhere"
    assert skipped("tests/gpu/test_gpu_model.py::" + next(iter(functions(ROOT / "tests/gpu/test_gpu_model.py"))))
    assert skipped("tests/scripts/test_slurm.py::test_every_way_to_start_ranks") == "somewhere"
    assert skipped("tests/documented/test_commands.py::test_b_trains_by_zero_3_with_offload") == "somewhere"
    assert skipped("tests/layouts/test_matrix.py::test_layout_trains_the_same_model") == ""


# ---- flags and commands ------------------------------------------------------------------------------------------------


@cache
def help_of(module: str, command: tuple[str, ...]) -> str:
    """What `--help-all` of a command prints, or `--help` where it has no more."""
    for word in ("--help-all", "--help"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            try:
                importlib.import_module(module).main([*command, word])
            except (SystemExit, Failure):
                pass
        if out.getvalue():
            return out.getvalue().replace("_", "-").replace("-\n", "-")
    raise AssertionError(f"{module} has no help")


def exists(module: str) -> bool:
    """Whether a module can be imported, whatever its packages are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def problem(command: str) -> str:
    """What is wrong with a command, a script, a name or flags of pretrain_gpt.py; "" where all of it is there."""
    words = shlex.split(command)
    if words[0].startswith("-"):
        if words[0] in FILES:
            return "" if words[0] in help_of("pretrain_gpt", ()) else f"no flag {words[0]}"
        try:
            parse_pretrain([*SHAPE, *words])
        except Failure as failure:
            return str(failure)
        return ""
    if words[0].startswith("scripts/"):
        return "" if (ROOT / words[0]).is_file() else "no such script"
    if words[0] == "python":
        module, words = words[2], words[2:]
    elif words[0].endswith(".py"):
        assert (ROOT / words[0]).is_file(), words[0]
        module = words[0].removesuffix(".py")
    else:
        module, _, name = words[0].rpartition(".")
        return "" if exists(words[0]) or hasattr(importlib.import_module(module), name) else "no such name"
    if not exists(module):
        return "no such module"
    flags = [word.replace("_", "-") for word in words[1:] if word.startswith("--")]
    text = help_of(module, tuple(word for word in words[1:] if not word.startswith("--"))) if words[1:] else "--"
    missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", text)]
    return f"no {', '.join(missing)}" if missing else ""


@each
def test_what_it_names_is_there(row):
    assert [f"{command}: {why}" for command in row.here if (why := problem(command))] == []


@each
def test_what_it_calls_missing_is_missing(row):
    """Once it is there, its state and its sentence have to be thought over."""
    there = [command for command in row.absent if not problem(command)]
    assert there == [], f"{row.id} says {row.state!r}; is that so?"
