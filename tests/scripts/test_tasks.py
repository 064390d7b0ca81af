# SPDX-License-Identifier: Apache-2.0
"""AGENTS.md and docs/tasks: every page ends in a check, which runs as it stands on a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "tasks").glob("*.md"))}
SAID = {  # by the check of each page
    "corpus_stage": ["final: 1 documents", r"dropped \(too_few_words\)"],
    "dataset": [r"iteration +2/ +2"],
    "event": [r"\d passed"],
    "hf_model": ["both models agree", "equal to the bit"],
    "kernel": ["rms_norm", r"\d passed"],
    "layer": ["2 of 2 pass"],
    "optimizer": [r"iteration +2/ +2", r"\d passed"],
    "setting": [r"\d passed"],
}


def test_the_overview_lists_the_pages():
    agents = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(docs/tasks/(\w+)\.md\)", agents)) == set(PAGES) == set(SAID)
    assert len(agents.splitlines()) < 80, "one page"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short_and_ends_in_one_check(name):
    page = PAGES[name]
    assert len(page.splitlines()) < 40 and page.count("```bash\n") == 1 and page.rstrip().endswith("```")
    assert [int(number) for number in re.findall(r"^(\d)\. ", page, re.M)] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tree") / "megatron"
    ignored = shutil.ignore_patterns("__pycache__", ".git", ".venv", "runs", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", PAGES)
def test_the_check_runs(name, tree):
    [commands] = re.findall(r"^```bash\n(.*?)^```", PAGES[name], re.S | re.M)
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    own = dict(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", OMP_NUM_THREADS="1", PYTHONPATH=str(tree))
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=tree, env=inherited | own, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = done.stdout + done.stderr
    assert [words for words in SAID[name] if not re.search(words, told)] == []
