# SPDX-License-Identifier: Apache-2.0
"""What the chaos tool consists of: cases, each of which does something terrible and says what came of it.

A module of cases is named in `MODULES` and has a function `cases() -> list[Case]`. A case is one row of the report:

    def cases():
        return [Case("kill/dp2/forward/rank1", "SIGKILL at a phase", RECOVERED, partial(killed, "dp2", "forward", 1),
                     phase="forward", rank=1, short=True)]

    def killed(layout, phase, rank, folder, seed) -> Got: ...

It runs in a forked process of its own, in an empty folder, and is as expected when the text that it returns is the one
that it promised. An exception, a crash and a hang are texts too, and never the promised one. Needs no torch.
"""

import contextlib
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.errors import Failure

# Of this package, in the order of the report
MODULES = (
    "processes",
    "numbers",
    "supervised",
    "resuming",
    "crashes",
    "damage",
    "shortages",
    "pickles",
    "forgeries",
    "rivals",
)


class Got(NamedTuple):
    """What came of a case."""

    text: str
    exit: Optional[int] = None  # of the process that was hurt, where there is one
    faults: int = 1  # that were injected: a case may hold many small ones


@dataclass(frozen=True)
class Case:
    """One row.

    id:        "what/where/when", for --only
    group:     the row of the table that it is counted in
    expected:  what `run` returns as text when all is well
    run:       (empty folder, seed) -> Got. The folder's parent is common to the cases of a run of the tool: a clean run
               to compare with can be kept there
    short:     it belongs to the short tier too
    limit:     seconds after which it counts as a hang
    """

    id: str
    group: str
    expected: str
    run: Callable[[Path, int], Got]
    phase: str = ""
    rank: Optional[int] = None
    short: bool = False
    limit: float = 180.0


def surprise_of(load: Callable[[], object]) -> Optional[str]:
    """The error of a loader that is none of the suite's own; None where it loads or refuses. What it prints is lost."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            load()
    except Failure:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def all_cases() -> list[Case]:
    """The cases of all modules. Imports them, and torch with them."""
    found = [case for name in MODULES for case in importlib.import_module(f"tests.chaos.{name}").cases()]
    assert len({case.id for case in found}) == len(found), "two cases have one id"
    return found


def chosen(cases: list[Case], only: Optional[str] = None, short: bool = False) -> list[Case]:
    """Those whose id matches one of the patterns (`kill/*,nan/dp2/*`), of the short tier alone if asked for."""
    patterns = (only or "*").split(",")
    return [case for case in cases if (case.short or not short) and any(fnmatch(case.id, p) for p in patterns)]
