# SPDX-License-Identifier: Apache-2.0
"""Do terrible things to training jobs and their files, and count what survives.

    python -m tests.chaos --tier short
    python -m tests.chaos --only 'kill/tp2/*' --repeat 5 --output runs/tp2.jsonl
    python -m tests.chaos --table runs/chaos.jsonl       a table of what was counted
    python -m tests.chaos --random --minutes 30          a random fault every 10-20 s, in one long run

Everything happens on CPU processes of this machine, in a temporary folder. Exit code 0: all was as expected, 1: not.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import UsageError, run_main
from megatron.settings.parse import parse
from megatron.settings.schema import setting


@dataclass(frozen=True)
class Chaos:
    """Which cases, how often, and where their lines go."""

    only: Optional[str] = setting("cases whose id matches one of these patterns, such as 'kill/*,nan/dp2/*'", None)
    tier: Literal["short", "full"] = setting("short: some seconds a kind of fault; full: everything", "full")
    repeat: int = setting("times that each case runs, with another seed each time", 1)
    seed: int = setting("of the first time", 0)
    output: str = setting("file to which the JSON lines are appended, one a case", "runs/chaos.jsonl")
    list: bool = setting("name the cases and leave", False)
    work_dir: Optional[str] = setting("folder to work in (default: a temporary one, in memory)", None)
    table: Optional[tuple[str, ...]] = setting("print the Markdown table of these files of lines and leave", None)
    random: bool = setting("one supervised run with a random fault every few seconds, instead of cases", False)
    minutes: Optional[float] = setting("how long --random goes on (default: 30)", None)


def main(argv: list[str]) -> None:
    """Choose the cases, run them, sum up."""
    groups = parse(
        argv,
        {"chaos": Chaos},
        prog="python -m tests.chaos",
        description=__doc__.splitlines()[0],
        common=tuple(Chaos.__dataclass_fields__),
    )
    settings: Chaos = groups["chaos"]
    if settings.table:
        from tests.chaos.report import read_lines, table

        return print(table(read_lines(settings.table)))
    if settings.repeat < 1 or (settings.minutes is not None and not settings.minutes > 0):
        raise UsageError("nothing would be tried", do="--repeat of at least 1, --minutes above 0")
    if settings.minutes is not None and not settings.random:
        raise UsageError("--minutes is for the one long run", do="say --random, too, or leave it out")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and what was started ends too
    Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch comes: ranks are forked, and repeat to the bit
    if settings.random:
        sys.exit(0 if _one_run(settings) else 1)
    sys.exit(0 if _cases(settings) else 1)


def _one_run(settings: Chaos) -> bool:
    """A random fault every few seconds; whether the run came to the bits of one without faults."""
    from tests.chaos.random_run import random_run

    folder = _folder(settings.work_dir)
    say = partial(print, flush=True)
    say(f"everything lies in {folder}")
    found = random_run(folder, settings.minutes or 30.0, settings.seed, say)
    with open(settings.output, "a", encoding="utf-8") as file:
        file.write(json.dumps({**found.line(settings.seed), **_stamp()}) + "\n")
    say(found.text())
    if found.good and not settings.work_dir:
        shutil.rmtree(folder, ignore_errors=True)
    return found.good


def _stamp() -> dict[str, str]:
    """What every line of a report holds besides."""
    from megatron.telemetry.run_record import source_commit

    return dict(commit=source_commit() or "unknown", date=time.strftime("%Y-%m-%d"))


def _cases(settings: Chaos) -> bool:
    """Run what was chosen; whether all was as expected."""
    from tests.chaos.case import all_cases, chosen
    from tests.chaos.conduct import campaign
    from tests.chaos.report import summary

    cases = chosen(all_cases(), settings.only, settings.tier == "short")
    if not cases:
        raise UsageError(f"--only {settings.only}: there is no such case", do="--list names them")
    if settings.list:
        print("\n".join(f"{case.id:<48} {case.group}{' (short)' if case.short else ''}" for case in cases))
        return True
    folder = _folder(settings.work_dir)
    lines = campaign(
        cases,
        folder,
        seed=settings.seed,
        repeat=settings.repeat,
        output=Path(settings.output),
        stamp=_stamp(),
        say=partial(print, flush=True),
    )
    print(summary(lines))
    good = all(line["good"] for line in lines)
    if good and not settings.work_dir:
        shutil.rmtree(folder, ignore_errors=True)
    return good


def _folder(given: Optional[str]) -> Path:
    """An empty folder to work in."""
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="chaos-", dir=given))
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="chaos-", dir=memory if os.access(memory, os.W_OK) else None))


if __name__ == "__main__":
    run_main(main)
