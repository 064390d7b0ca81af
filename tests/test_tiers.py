# SPDX-License-Identifier: Apache-2.0
"""Which tests run, and which first: `sampled` cases take turns, long files start first, and --unit leaves them out."""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from tests import conftest


@pytest.mark.parametrize("each", [2, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_each_case_runs_once_in_the_parts_that_follow_each_other(each, count):
    marks = dict(sampled=SimpleNamespace(args=(each,)))
    cases = [
        SimpleNamespace(name=f"test[{n}]", nodeid=f"file::test[{n}]", get_closest_marker=marks.get)
        for n in range(count)
    ]
    for first in (0, 697):
        parts = [conftest.left_out(cases, part) for part in range(first, first + each)]
        left = Counter(case.name for part in parts for case in part)
        assert all(left[case.name] == each - 1 for case in cases)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_functions_of_a_file_of_one_case_each_run_in_different_parts():
    """Five long tests of a file: one of them in each part."""
    marks = dict(sampled=SimpleNamespace(args=(5,)))
    cases = [
        SimpleNamespace(name=f"test_{n}", nodeid=f"file::test_{n}", get_closest_marker=marks.get) for n in range(5)
    ]
    assert all(len(conftest.left_out(cases, part)) == 4 for part in range(697, 702))


FILES = {
    "test_a.py": "import pytest\n@pytest.mark.sampled(5)\n@pytest.mark.parametrize('n', range(5))\ndef test(n): pass\n",
    "test_b.py": "def test(): pass\n",
    "test_long.py": "def test(): pass\n",
}


@pytest.fixture
def run(root, tmp_path):
    """`run(*words, TEST_PART=)`: the tests above under this conftest.py; names of those that ran, in their order."""
    (tmp_path / "tests").mkdir()
    for name, text in FILES.items():
        (tmp_path / "tests" / name).write_text(text)
    for name in ("conftest.py", "huge_pages.py", "tree.py"):
        shutil.copy(root / "tests" / name, tmp_path / "tests")
    (tmp_path / "tests" / "long_files.txt").write_text("9 tests/test_long.py\n5 tests/test_b.py\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  sampled(n)\n  full\n  gpu\n")

    def run(*words, **environment):
        inherited = {key: value for key, value in os.environ.items() if key != conftest.PART and "PYTEST" not in key}
        command = [sys.executable, "-m", "pytest", "-v", "--import-mode=importlib", "-p", "no:cacheprovider", *words]
        alone = dict(PYTHONPATH=str(root), GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=inherited | alone | environment, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.split()[0].removeprefix("tests/") for line in done.stdout.splitlines() if " PASSED" in line]

    return run


def test_a_commit_and_a_merge_count_once_and_without_git_the_day_counts(tmp_path, monkeypatch):
    def number(folder):
        monkeypatch.setattr(conftest, "ROOT", folder)
        return conftest.number_of_submission()

    def git(*words):
        words = ["-C", str(whole), "-c", "user.name=a", "-c", "user.email=b", "-c", "init.defaultBranch=main", *words]
        subprocess.run(["git", *words], check=True, capture_output=True)

    day = int(time.time() // 86400)
    whole, shallow = tmp_path / "whole", tmp_path / "shallow"
    whole.mkdir()
    assert number(whole) in (day, day + 1)
    git("init")
    commit = ("commit", "--allow-empty", "-m", "one more")
    git(*commit)
    git("checkout", "-b", "side")
    git(*commit)
    git(*commit)
    git("checkout", "main")
    assert number(whole) == 1
    git("merge", "--no-ff", "side")
    assert number(whole) == 2
    git(*commit)
    assert number(whole) == 3
    git("clone", "--depth", "1", whole.as_uri(), str(shallow))
    assert number(shallow) in (day, day + 1)


@pytest.mark.sampled(2)
def test_a_variable_chooses_the_cases(run):
    assert run(TEST_PART="4") == ["test_long.py::test", "test_b.py::test", "test_a.py::test[3]"]
    assert len(run("--full", TEST_PART="4")) == 7


@pytest.mark.sampled(2)
def test_long_files_start_first_and_unit_leaves_them_out(run):
    assert [name.split("::")[0] for name in run()] == ["test_long.py", "test_b.py", "test_a.py"]
    assert [name.split("::")[0] for name in run("--unit")] == ["test_a.py"]


def test_long_files_are_there(root):
    assert [name for name in conftest.long_files() if not (root / name).exists()] == []
