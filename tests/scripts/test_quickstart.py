# SPDX-License-Identifier: Apache-2.0
"""The scripts, run as a newcomer runs them, shrunk to a few steps."""

import os
import shutil
import subprocess


def test_from_corpus_to_report(copy, quickstart):
    run = copy / "runs" / "quickstart"
    for name in "train.jsonl vocab.json train_text_document.idx evaluation.jsonl samples.txt report.html".split():
        assert (run / name).stat().st_size > 0, name
    assert "step 4 of 4    loss" in quickstart and "ppl:" in quickstart
    assert "report.html" in quickstart.splitlines()[-3]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page or "base64" in page


def test_it_goes_on_where_it_stopped(copy, bash, quickstart):
    reached = int((copy / "runs/quickstart/checkpoints/latest_checkpointed_iteration.txt").read_text())
    again = bash("scripts/quickstart.sh", "--train-iters", str(reached)).stdout
    assert f"already trained to step {reached}" in again and again.count("already there") >= 6
    more = bash("scripts/quickstart.sh", "--train-iters", str(reached + 1), "--log-interval", "1").stdout
    assert f"step {reached + 1} of {reached + 1}" in more and f"step {reached} of" not in more and "ppl:" in more


def test_help_and_mistakes(copy, bash):
    assert "--fresh" in bash("scripts/quickstart.sh", "--help").stdout
    shutil.copytree(copy / "scripts", copy / "elsewhere" / "scripts")
    (copy / "elsewhere" / "requirements.txt").write_text("nothing\n")
    done = bash("elsewhere/scripts/test.sh", check=False, PYTHON="/bin/false")
    assert done.returncode == 1 and "PYTHON=/bin/false does not run" in done.stderr


def test_shell_syntax(root):
    scripts = sorted((root / "scripts").rglob("*.sh")) + [root / ".ci" / "run"]
    assert len(scripts) >= 3
    for script in scripts:
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0, script
        assert script.name.startswith("_") or os.access(script, os.X_OK), f"{script} is not executable"
