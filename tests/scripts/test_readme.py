# SPDX-License-Identifier: Apache-2.0
"""What the documents say is true: the README's commands run as written, those of the guides are possible runs, links
lead somewhere, flags exist."""

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.settings.parse import parse_pretrain
from megatron.tools.verify_layout import VerifyLayoutOptions
from megatron.training.rules import check

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.sampled(10)
def test_the_two_commands(bash):
    assert BLOCKS[:2] == ["bash scripts/quickstart.sh\n", "bash scripts/test.sh\n"]  # the first is run by `quickstart`
    one = "-n", "0", "--unit", "tests/settings/test_batch.py"  # in one process: CI runs the command as it stands
    assert "passed" in bash("scripts/test.sh", *one).stdout


def test_a_command_that_does_not_end_is_shown(bash):
    with pytest.raises(pytest.fail.Exception, match="still ran after 0.5 s:\na server that waits for Ctrl-C"):
        bash("-c", "echo a server that waits for Ctrl-C; sleep 60", limit=0.5)


GUIDES = [ROOT / "docs" / "parallelism.md", ROOT / "docs" / "survival.md"]


def commands_of(page, folder):
    """The commands of a page's blocks, as words; the files that they write with cat are in `folder` then."""
    text = "".join(re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
    for name, content in re.findall(r"cat > (\S+) <<'END'\n(.*?)^END\n", text, re.S | re.M):
        (folder / name).write_text(content)
    text = re.sub(r"cat > .*?^END\n", "", text, flags=re.S | re.M).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines()]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_commands_of_the_guides_are_possible_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = commands_of(page, tmp_path)
    assert len(commands) > 10
    for words in commands:
        if "pretrain_gpt.py" in words:
            ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
            found = check(parse_pretrain(words[words.index("pretrain_gpt.py") + 1 :]), ranks)
            assert found == [], words
        if words[:2] == ["python", "-m"]:
            flags_exist(words[2], words[3:])


@pytest.mark.sampled(10)
def test_the_loop_of_ones_own_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands_of(ROOT / "docs" / "parallelism.md", tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "own_model.py"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0], done.stderr[-2000:]


def flags_exist(module, words):
    """Whether a tool knows the flags that it is given."""
    words = words[: words.index("--")] if "--" in words else words
    if module.endswith("verify_layout"):
        parse_pretrain(words, {"verify": VerifyLayoutOptions})
        return
    first = words[: next((n for n, word in enumerate(words) if word.startswith("-")), len(words))]
    command = first[:1] if module.endswith(".checkpoint") else []
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*command, "--help-all"])
    known = re.findall(r"--[a-z][a-z-]*", told.getvalue())
    for word in words:
        assert not word.startswith("--") or word in (*known, "--pp"), f"{module}: {word}"


def anchors(page) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


LINKS = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))]


def test_the_readme_links_to_every_guide():
    linked = {README_LINK.partition("#")[0] for page, README_LINK in LINKS if page.name == "README.md"}
    guides = {str(page.relative_to(ROOT)) for page in PAGES if page.parent in (ROOT / "docs", ROOT / "docs" / "proof")}
    assert guides - linked == set()


@pytest.mark.parametrize("page, link", LINKS, ids=[f"{page.parent.name}/{page.name} to {link}" for page, link in LINKS])
def test_links_lead_somewhere(page, link):
    if "://" in link:
        return
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    assert target.exists()
    assert not anchor or anchor in anchors(target)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "flags.md"], ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_named_files_and_modules_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"python -m (megatron[.\w]+\w)", text)):
        if not name.endswith("NAME"):
            assert hasattr(importlib.import_module(name), "main"), name
    for name in set(re.findall(r"`((?:megatron|tests|scripts|benchmarks|docs)/[\w/]+\.\w+)`", text)):
        assert (ROOT / name).exists(), name


def test_what_is_to_be_installed_exists():
    """`pip install '.[extra]'` in documents and messages: from this folder, for on PyPI `megatron` is another package."""
    listed = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^(\w+) = \[", listed.partition("\n[")[0], re.M))
    told = []
    for path in [*PAGES, *(ROOT / "megatron").rglob("*.py"), *(ROOT / "scripts").rglob("*.sh")]:
        for name, found in re.findall(r"pip install (?:-e )?'([\w.]*)\[([\w,]+)\]'", path.read_text(encoding="utf-8")):
            assert name == "." and set(found.split(",")) <= extras, f"{path}: {name}[{found}]"
            told += found.split(",")
    assert len(set(told)) > 3


def test_flags_exist():
    known = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "megatron" / "tools").glob("*.py"))
    sources += "".join(path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.py"), *ROOT.glob("scripts/*.sh")))
    sources += (ROOT / "megatron" / "inference" / "sampling.py").read_text(encoding="utf-8")
    for flag in sorted(
        set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", README))
        - {"--help", "--help-all", "--nproc-per-node", "--nodes"}
    ):
        spellings = rf"(?<![\w-])({flag}|{flag[2:].replace('-', '_')})(?![\w-])"
        assert re.search(spellings, known) or re.search(spellings, sources), flag
