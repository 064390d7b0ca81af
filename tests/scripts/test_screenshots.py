# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys


def test_without_a_browser_nothing_is_done_and_that_is_said(root, tmp_path):
    command = [sys.executable, str(root / "scripts" / "screenshots.py"), "--output", str(tmp_path / "shots")]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(PATH=str(tmp_path)))
    assert done.returncode == 0 and done.stdout.startswith("no screenshots: chromium or ") and done.stderr == ""
    assert not (tmp_path / "shots").exists()
    assert "$(PYTHON) scripts/screenshots.py" in (root / "Makefile").read_text(encoding="utf-8")
