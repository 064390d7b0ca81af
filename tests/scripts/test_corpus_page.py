# SPDX-License-Identifier: Apache-2.0
"""docs/corpus.md is true: its way from a dump to a trained model runs as it stands."""

import bz2
import importlib.util
import os
import pydoc_data.topics
import re
import shutil
import subprocess
import sys
from xml.sax.saxutils import escape

import pytest


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mwparserfromhell", "eldc", "ftfy", "rensa"))),
    reason="pip install '.[corpus]'",
)
def test_from_a_dump_to_a_trained_model(root, tmp_path):
    for script in root.glob("*.py"):
        shutil.copy(script, tmp_path)
    pages = "".join(
        f"<page><title>{escape(name)}</title><ns>0</ns><id>{number}</id><revision><id>9</id><text>{escape(text)}</text></revision>"
        "</page>\n"
        for number, (name, text) in enumerate(sorted(pydoc_data.topics.topics.items()))
    )
    head = "<mediawiki><siteinfo><base>https://en.wikipedia.org/wiki/Main</base></siteinfo>\n"
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(f"{head}{pages}</mediawiki>\n".encode()))
    page = (root / "docs" / "corpus.md").read_text(encoding="utf-8")
    commands = re.search(r"## From a dump.*?```bash\nsource .venv/bin/activate\n(.*?)```", page, re.S)[1]
    (tmp_path / "run.sh").write_text("python() { " + sys.executable + ' "$@"; }\n' + commands)
    env = {**os.environ, "PYTHONPATH": str(root), "DUMP": "dump.xml.bz2"}
    done = subprocess.run(["bash", "-eu", "run.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "final: ",
        "written: runs/corpus/report.html",
        ": kept",
        "iteration       50/      50",
        "agrees",
        "The city",
    ):
        assert words in done.stdout, words
