# SPDX-License-Identifier: Apache-2.0
"""Each module of megatron/tools is a command, or says which command to use: none ends in silence."""

import subprocess
import sys

import pytest

NAMED = [("checkpoint_convert", "checkpoint"), ("openwebtext.fetch", "openwebtext.download")]


def test_every_module_says_something(root):
    modules = [path for path in root.glob("megatron/tools/**/*.py") if path.name != "__init__.py"]
    assert len(modules) > 30
    silent = [path.name for path in modules if 'if __name__ == "__main__":' not in path.read_text(encoding="utf-8")]
    assert silent == []


@pytest.mark.parametrize("module, command", NAMED)
def test_a_module_that_is_no_command_names_one(module, command, root):
    run = [sys.executable, "-m", f"megatron.tools.{module}", "to-hf", "a", "b"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=root)
    expected = f"error: this module is no command\n  -> use python -m megatron.tools.{command}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
