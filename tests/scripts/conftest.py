# SPDX-License-Identifier: Apache-2.0
"""The project as a newcomer has it: a copy in another folder, with a `.venv`, after a shrunk quickstart."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def copy(root, tmp_path_factory) -> Path:
    """The project's files in a folder with a space in its name, with a `.venv` that is this interpreter's."""
    folder = tmp_path_factory.mktemp("a newcomer") / "megatron copy"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "build", "dist", ".*_cache", ".hypothesis")
    shutil.copytree(root, folder, ignore=ignored)
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("requirements", "requirements-test"):
        shutil.copy(folder / f"{name}.txt", folder / ".venv" / f"{name}.installed")
    (folder / ".venv" / "project.installed").write_text(f"{folder}\n")  # not into this interpreter's packages
    python = folder / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')  # a link would not find the packages
    python.chmod(0o755)
    (folder / ".venv" / "bin" / "activate").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    return folder


@pytest.fixture(scope="session")
def bash(copy):
    """`bash(*words, check=True, limit=250, **environment)` runs bash in the copy and returns the completed process.

    limit: seconds after which the test fails, with the output so far: its end shows the command that has not ended
    """
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PYTHON", "OMP_NUM_THREADS")}

    def run(*words: str, check: bool = True, limit: float = 250, **environment: str) -> subprocess.CompletedProcess:
        try:
            done = subprocess.run(
                ["bash", *words], cwd=copy, capture_output=True, text=True, timeout=limit, env=inherited | environment
            )
        except subprocess.TimeoutExpired as error:
            out, errors = ((stream or b"").decode(errors="replace")[-3000:] for stream in (error.stdout, error.stderr))
            pytest.fail(f"bash, or a process that holds its output, still ran after {limit:g} s:\n{out}{errors}")
        assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


@pytest.fixture(scope="session")
def quickstart(bash, copy, tmp_path_factory) -> str:
    """What the quickstart says, shrunk to 4 steps; its results are in the copy.

    The first worker that asks runs it, and the others have what came of it.
    """
    own = tmp_path_factory.getbasetemp()
    made = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "quickstart"
    made.mkdir(exist_ok=True)
    with open(made / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (made / "said").exists():
            shutil.copytree(made / "runs", copy / "runs", dirs_exist_ok=True)
        else:
            said = bash("scripts/quickstart.sh", "--train-iters", "4", "--log-interval", "2").stdout
            shutil.copytree(copy / "runs", made / "runs")
            (made / "said").write_text(said)
    return (made / "said").read_text()
