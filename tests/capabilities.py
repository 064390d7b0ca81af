# SPDX-License-Identifier: Apache-2.0
"""docs/capabilities.md, written from docs/capabilities.yaml: `python -m tests.capabilities --output docs/capabilities.md`.

It is not one of the tools, because both files refer to tests, which an installed package does not contain.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "capabilities.yaml"
STATES = ("works", "partly", "not there")
SYSTEMS = dict(
    A="PaddleNLP GPT-3",
    B="Colossal-AI ZeRO GPT-2",
    C="Pangu-beta",
    D="PAI Megatron on DLC",
    E="PaddleFleetX GPT",
    M="Megatron-LM",
)
SUBJECTS = {  # first letters of ids
    "P": "Parallelism and memory",
    "M": "Models",
    "O": "Optimizer and batch",
    "T": "Data",
    "R": "Runtime",
    "K": "Checkpoints",
    "U": "Planning",
    "V": "Evaluation and fine-tuning",
    "I": "Inference",
    "Q": "Compression",
}

INTRO = """# Capabilities

Written by `python -m tests.capabilities --output docs/capabilities.md` from `docs/capabilities.yaml`; do not edit.
`tests/test_capabilities.py` checks that the flags, commands and tests in this table exist, and that those listed as
missing do not.

What five published systems promise, and how this suite compares. The systems: {systems}; M is Megatron-LM.

- **works**: the tests show all of it, on CPUs; [limits.md](limits.md#never-run-so-far) lists what has not run on a GPU.
- **partly**: the tests show a part; the sentence names what is missing.
- **not there**: a request for it ends with a message.

[limits.md](limits.md) lists all limits, [flags.md](flags.md) all flags, and [migrating.md](migrating.md) translates the
terms of those systems.
"""


@dataclass(frozen=True)
class Capability:
    """One entry of docs/capabilities.yaml; the comment at its start explains the fields."""

    id: str
    what: str
    of: str
    here: tuple[str, ...]
    tests: tuple[str, ...]
    state: str
    missing: str = ""
    limits: str = ""
    absent: tuple[str, ...] = ()
    docs: Optional[str] = None


def read(path: Path = TABLE) -> list[Capability]:
    """The entries, in the order of the file. An unknown or a missing field is a TypeError."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        Capability(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
        for row in rows
    ]


def page(rows: list[Capability]) -> str:
    """The text of docs/capabilities.md."""
    systems = ", ".join(f"{name} ({letter})" for letter, name in SYSTEMS.items() if letter != "M")
    parts = [INTRO.format(systems=systems), _counts(rows)]
    for letter, subject in SUBJECTS.items():
        lines = "\n".join(_line(row) for row in rows if row.id[0] == letter)
        parts.append(f"## {subject}\n\n| id | what | of | here | state | tests |\n|---|---|---|---|---|---|\n{lines}\n")
    return "\n".join(parts)


def _counts(rows: list[Capability]) -> str:
    """The table of how many there are of each state."""
    found = Counter((row.id[0], row.state) for row in rows)
    lines = [
        f"| {subject} | " + " | ".join(str(found[letter, state]) for state in STATES) + " |"
        for letter, subject in SUBJECTS.items()
    ]
    whole = " | ".join(f"**{sum(row.state == state for row in rows)}**" for state in STATES)
    head = f"| subject | {' | '.join(STATES)} |\n|---|---|---|---|\n"
    return head + "\n".join([*lines, f"| **all {len(rows)}** | {whole} |"]) + "\n"


def _line(row: Capability) -> str:
    state = f"{row.state}: {row.missing}" if row.missing else row.state
    more = [f"[{row.docs.partition('#')[0]}]({row.docs})"] if row.docs else []
    here = ", ".join([*map(_code, row.here), *more])
    cells = (row.id, row.what, row.of.replace(" ", ""), here, state, ", ".join(map(_code, row.tests)))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    return f"`{text}`"


def main() -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.capabilities", description="Write docs/capabilities.md.")
    parser.add_argument("--output", type=Path, help="file to write (default: the terminal)")
    asked, text = parser.parse_args(), page(read())
    if asked.output:
        asked.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
