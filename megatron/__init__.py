# SPDX-License-Identifier: Apache-2.0
"""Pretraining of language models: the same code on a laptop's CPU (gloo) and on many GPUs (NCCL).

What each package does: the tour in README.md. How they are built and why: docs/design.md.
"""

import sys
from importlib.util import spec_from_file_location
from pathlib import Path

__version__ = "0.1.0"

if sys.version_info < (3, 10):  # noqa: UP036 (told before anything is imported that an older Python cannot read)
    sys.exit(
        "error: Python {}.{} is too old: 3.10 to 3.13 are needed\n"
        "  -> source .venv/bin/activate (scripts/quickstart.sh makes it)".format(*sys.version_info[:2])
    )


# Commands that users type by another module's name: `python -m NAME` -> file of the module that answers.
COMMANDS = "tools/__main__.py"
ALIASES = {
    "megatron.__main__": COMMANDS,
    "megatron.pretrain": "tools/pretrain.py",
    "megatron.tasks.main": "tools/tasks.py",
}


class _Aliases:
    """Finds the modules of ALIASES for `import` and `python -m`; a mistyped command is answered by COMMANDS."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        mistyped = name.rpartition(".")[0] == "megatron.tools" and sys.argv[:1] == ["-m"]  # `python -m NAME`
        if file := ALIASES.get(name, COMMANDS if mistyped else None):
            return spec_from_file_location(name, Path(__file__).parent / file)


sys.meta_path.append(_Aliases)
