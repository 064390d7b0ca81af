# SPDX-License-Identifier: Apache-2.0
"""docs/extending.md is true: its Python is that of the files it names, its patches fit, its commands run as they stand.

The first section is a file that the reader writes; the commands of all begin with the file of settings of the page's head.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))
# The file of the commands
SET_UP = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE.partition("\n## ")[0], re.S | re.M))
FIRST = "Change one thing of GPT"
SAID = {
    FIRST: [r"iteration +4/ +4", r"2 of 2 pass", r"1 2 3"],
    "A variant of GPT": [r"3 of 3 pass", r"iteration +4/ +4.* added: \d", r"attention\.gate\.weight"],
    "A kind of mixers": [r"2 of 2 pass", r"iteration +4/ +4", r"1 2 3"],
    "Position biases: ALiBi": [r"2 of 2 pass", r"iteration +4/ +4"],
    "A head and a loss": [r"2 of 2 pass", r"iteration +4/ +4.* ahead loss: \d", r"ahead\.weight"],
    "A kind of linear layer": [r"2 of 2 pass", r"iteration +4/ +4", r"attention\.qkv\.pair_a"],
    "Experts": [
        r"iteration +5/ +5",
        r"expert-model-parallel size: 2",
        r"blocks\.1\.experts\.up\.weight +float32 +\[8, 128, 32\] 2\n",
    ],
    "Buffers that training changes": [r"2 of 2 pass", r"iteration +4/ +4", r"10 buffers", r"watch\.seen.* buffer, sum"],
    "Frozen parameters": [r"[\d,]+ parameters are trained, [\d,]+ are frozen", r"of them frozen", r"adapter\.down"],
    "A model": [r"no problems found", r"2 of 2 pass", r"activity: \d", r"saved checkpoint at iteration +4"],
    "A plain torch module": [r"plain module of [\d,]+ parameters", r"iteration +4/ +4"],
    "A flag": [r"--position-scale X +what learned positions are multiplied with", r"iteration +1/ +1"],
    "A learning-rate schedule": [
        r"iteration +2/.*learning rate: 5.625000E-01",
        r"iteration +4/.*learning rate: 6.250000E-02",
    ],
    "An optimizer": [r"iteration +3/ +3", r"optimizer state: sum"],
    "A kernel": [r"the formula", r"iteration +1/ +1"],
    "A dataset": [r"iteration +4/ +4"],
    "A hook": [r"best validation: \d\.\d{4} at iteration [246]"],
}


def blocks(section: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", SECTIONS[section], re.S | re.M)


def test_every_section_is_run():
    assert list(SAID) == list(SECTIONS)
    assert all(blocks(section, "bash") for section in SECTIONS)


def test_the_first_section_is_a_file_of_thirty_lines():
    [source] = blocks(FIRST, "python")
    assert re.match(r"# my_gpt\.py\nimport ", source) and len(source.splitlines()) <= 30


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != FIRST and blocks(name, "python")])
def test_python_is_that_of_the_files(section):
    named = [
        ROOT / name for name in re.findall(r"`((?:tests/models/(?!test)|megatron/model/)\w+\.py)`", SECTIONS[section])
    ]
    sources = [lines(path.read_text(encoding="utf-8")) for path in named]
    assert sources and all(any(lines(block) in source for source in sources) for block in blocks(section, "python"))


def lines(text: str) -> str:
    """A source without indentation and blank lines: a page shows methods without their class."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"


def apply(patch: str, folder: Path) -> None:
    """As a reader would: `git apply`, outside of any repository, so that no ignored file is passed over."""
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        ["git", "apply", "-"], cwd=folder, input=patch, text=True, capture_output=True, env=alone, timeout=60
    )
    assert done.returncode == 0, done.stderr
    added = [line[1:] for line in patch.splitlines() if re.match(r"\+(?!\+\+ )", line)]
    found = "\n".join((folder / name).read_text() for name in re.findall(r"^\+\+\+ b/(\S+)", patch, re.M))
    assert added and all(line in found for line in added)


LONG = ["A variant of GPT"]  # several layouts; those are compared in tests/models/test_gpt_variant.py, too


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "section", [pytest.param(name, marks=pytest.mark.full) if name in LONG else name for name in SECTIONS]
)
def test_patches_fit_and_commands_run(section, tmp_path):
    folder = tmp_path / "tree"
    for name in ("megatron", "tests/models", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("pretrain_*.py"):
        shutil.copy(script, folder)
    for patch in blocks(section, "diff"):
        apply(patch, folder)
    if section == FIRST:  # as its reader does
        (folder / "my_gpt.py").write_text(blocks(FIRST, "python")[0])
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", "\n".join([SET_UP, *blocks(section, "bash")])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        env=inherited | dict(PATH=path, OMP_NUM_THREADS="1", PYTHONPATH=str(folder)),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [words for words in SAID[section] if not re.search(words, done.stdout)] == []
