# SPDX-License-Identifier: Apache-2.0
"""The scripts, run as a newcomer runs them, in a copy of the project and shrunk to a few steps."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def copy(root, tmp_path_factory) -> Path:
    """The project's files in another folder (with a space in its name), with a `.venv` that is this interpreter's."""
    folder = tmp_path_factory.mktemp("a newcomer") / "megatron copy"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "build", "dist", ".*_cache", ".hypothesis")
    shutil.copytree(root, folder, ignore=ignored)
    (folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(folder / "requirements.txt", folder / ".venv" / "requirements.installed")
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (folder / ".venv" / "bin" / "activate").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    return folder


def bash(
    folder: Path, *words: str, check: bool = True, timeout: float = 200, **env: str
) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PYTHON", "OMP_NUM_THREADS")}
    done = subprocess.run(
        ["bash", *words], cwd=folder, capture_output=True, text=True, timeout=timeout, env=clean | env
    )
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def first_run(copy) -> str:
    return bash(copy, "scripts/quickstart.sh", "--train-iters", "4", "--log-interval", "2").stdout


def test_quickstart_from_corpus_to_report(copy, first_run):
    run = copy / "runs" / "quickstart"
    for name in "train.jsonl vocab.json train_text_document.idx evaluation.jsonl samples.txt report.html".split():
        assert (run / name).stat().st_size > 0, name
    assert (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert "step 4 of 4    loss" in first_run and "ppl:" in first_run and "report.html" in first_run.splitlines()[-3]
    assert (
        "<svg" in (run / "report.html").read_text(encoding="utf-8").lower()
        or "base64" in (run / "report.html").read_text()
    )


def test_quickstart_goes_on_where_it_stopped(copy, first_run):
    again = bash(copy, "scripts/quickstart.sh", "--train-iters", "4").stdout
    assert "already trained to step 4" in again and again.count("already there") >= 6
    more = bash(copy, "scripts/quickstart.sh", "--train-iters", "6", "--log-interval", "1").stdout
    assert "step 5 of 6" in more and "step 4 of 6" not in more and "ppl:" in more
    assert (copy / "runs/quickstart/checkpoints/latest_checkpointed_iteration.txt").read_text() == "6"


def test_help_and_mistakes(copy):
    assert "--fresh" in bash(copy, "scripts/quickstart.sh", "--help").stdout
    shutil.copytree(copy / "scripts", copy / "elsewhere" / "scripts")
    (copy / "elsewhere" / "requirements.txt").write_text("nothing\n")
    done = bash(copy, "elsewhere/scripts/test.sh", check=False, PYTHON="/bin/false")
    assert done.returncode == 1 and "PYTHON=/bin/false does not run" in done.stderr


def test_shell_syntax(root):
    scripts = sorted((root / "scripts").rglob("*.sh")) + [root / ".ci" / "run"]
    assert len(scripts) >= 3
    for script in scripts:
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0, script
        assert script.name.startswith("_") or os.access(script, os.X_OK), f"{script} is not executable"
