# SPDX-License-Identifier: Apache-2.0
"""`make check` passes for a file that a user adds to the root, as docs/extending.md tells."""

import re
import shutil
import subprocess
import sys

import pytest


@pytest.fixture
def tree(root, tmp_path):
    """What `make check` looks at, without the suite's own tests."""
    for name in ("megatron", "benchmarks"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    for name in ("test_floors.py", "test_source_form.py"):
        shutil.copy(root / "tests" / name, tmp_path / "tests")
    for path in (*root.glob("*.py"), root / "pyproject.toml"):
        shutil.copy(path, tmp_path)
    return tmp_path


def run(folder, *words):
    return subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.sampled(5)
def test_models_in_the_root(root, tree):
    """Files of the page as files of one's own, without a licence line or a docstring."""
    for name in ("own_dataset", "gpt_variant", "own_update"):
        assert f"`tests/models/{name}.py`" in (root / "docs" / "extending.md").read_text()
        text = (root / "tests" / "models" / f"{name}.py").read_text()
        text = re.sub(r'\A# SPDX[^\n]*\n""".*?"""\n\n', "", text, flags=re.S)
        text = text.replace(f"tests.models.{name}", f"mine_{name}")
        assert text.startswith("from dataclasses")
        (tree / f"mine_{name}.py").write_text(text)
    page = (root / "docs" / "extending.md").read_text(encoding="utf-8")
    (tree / "my_gpt.py").write_text(re.search(r"^```python\n(# my_gpt\.py\n.*?)^```", page, re.S | re.M)[1])
    own = [path.name for pattern in ("mine_*.py", "my_gpt.py") for path in tree.glob(pattern)]
    for words in (["check"], ["format", "--check"]):
        done = run(tree, "ruff", *words, *own)
        assert done.returncode == 0, done.stdout
    # what such files have a part in
    chosen = "mine or my_gpt or pretrain_gpt or circles or installed or licence or ascii or module"
    files = ["tests/test_floors.py", "tests/test_source_form.py"]
    done = run(tree, "pytest", "-p", "no:cacheprovider", *files, "-k", chosen)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("fails", ["", "check", "format", "pytest", "check pytest"])
def test_make_check_does_all_and_says_what_failed(root, tmp_path, fails):
    """With a python that fails at what is asked for: one failure hides no other, and the exit code tells."""
    shutil.copy(root / "Makefile", tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "ran $*"\ncase " {fails} " in *" $2 "*|*" $3 "*) exit 1;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "check", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    ran = re.findall(r"^ran -m (\w+)(?: (check|format))?", done.stdout, re.M)
    assert ran == [("ruff", "check"), ("ruff", "format"), ("pytest", "")]
    assert "test_docs_are_up_to_date" in done.stdout
    assert (done.returncode != 0) == bool(fails)
    told = {"check": "lint", "format": "format (make format)", "pytest": "floors, form or flag table"}
    said = ", ".join(told[one] for one in fails.split())
    assert done.stdout.endswith(f"failed: {said}\n") if fails else "failed" not in done.stdout
