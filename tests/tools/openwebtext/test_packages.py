# SPDX-License-Identifier: Apache-2.0
"""What the commands import is what their extra installs."""

import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.test_floors import PATHS, imports, reached

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BY_NAME = ("eldc", "langdetect", "fasttext")  # imported by a name that a setting gives
OTHERS = {"fasttext": "fasttext-predict", "yaml": "pyyaml"}  # distributions that are called otherwise


def distributions(words: list[str]) -> set[str]:
    """The distributions of a list in pyproject.toml, and of the extras that it names."""
    found = set()
    for word in words:
        name, extra = re.match(r"([\w.-]+)(?:\[(\w+)\])?", word).groups()
        found |= distributions(PROJECT["optional-dependencies"][extra]) if extra else {name.lower()}
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", [name for name in PATHS if name.startswith("tools.openwebtext.")])
def test_the_extra_installs_what_a_command_imports(command):
    own = [name for name in reached(command, at_start_only=False) if name.startswith(("tools.openwebtext", "corpus."))]
    packages = {name.split(".")[0] for module in [command, *own] for name in imports(module) - PATHS.keys()}
    packages |= {*BY_NAME} if "cleanup" in command else set()
    packages -= {*sys.stdlib_module_names, "megatron"}
    known = packages_distributions()
    needed = {OTHERS.get(name) or known.get(name, [name])[0].lower() for name in packages}
    assert needed - distributions(PROJECT["dependencies"]) <= distributions(
        PROJECT["optional-dependencies"]["openwebtext"]
    )
