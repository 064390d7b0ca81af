# SPDX-License-Identifier: Apache-2.0
"""The documented command lines as a shell reads them: what each program in a script is called with."""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CATCH = """
__called() { printf '%s\\0' "$@"; printf '\\1\\0'; }
python() { __called python "$@"; }; torchrun() { __called torchrun "$@"; }; shuf() { __called shuf "$@"; }
"""


@pytest.fixture(scope="session")
def calls():
    """`calls("A_train.sh", RANK="0")`: the words of each python, torchrun and shuf that a script starts, by bash itself."""

    def read(name: str, **environment: str) -> list[list[str]]:
        # In one subshell, because a line that ends in a backslash would take the next line with it.
        script = CATCH + (HERE / name).read_text(encoding="utf-8").rstrip("\\\n ") + "\n"
        done = subprocess.run(["bash", "-c", script], capture_output=True, env={"PATH": "/usr/bin:/bin", **environment})
        return [found.split("\0")[:-1] for found in done.stdout.decode().split("\1\0")[:-1]]

    return read
