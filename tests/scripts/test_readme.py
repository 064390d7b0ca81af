# SPDX-License-Identifier: Apache-2.0
"""What the README says is true: its commands run as written, its links lead somewhere, its flags exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_two_commands(bash):
    assert BLOCKS[:2] == ["bash scripts/quickstart.sh\n", "bash scripts/test.sh\n"]  # the first is run by `quickstart`
    assert "passed" in bash("scripts/test.sh", "tests/test_batch.py").stdout


@pytest.mark.parametrize("block", BLOCKS[2:])
def test_commands_run_as_written(bash, quickstart, block):
    out = bash("-euc", block).stdout
    assert "iteration       20/      20" in out and "validation results" in out and "Return the" in out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "flags.md"], ids=lambda page: page.name)
def test_named_files_and_modules_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"python -m (megatron[.\w]+\w)", text)):
        if not name.endswith("NAME"):
            assert hasattr(importlib.import_module(name), "main"), name
    for name in set(re.findall(r"`((?:megatron|tests|scripts|benchmarks|docs)/[\w/]+\.\w+)`", text)):
        assert (ROOT / name).exists(), name


def test_flags_exist():
    known = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "megatron" / "tools").glob("*.py"))
    sources += "".join(path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.py"), *ROOT.glob("scripts/*.sh")))
    sources += (ROOT / "megatron" / "inference" / "sampling.py").read_text(encoding="utf-8")
    for flag in sorted(
        set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - {"--help", "--help-all", "--nproc-per-node"}
    ):
        assert flag in known or flag[2:].replace("-", "_") in sources or flag in sources, flag
