# SPDX-License-Identifier: Apache-2.0
"""Show the state of runs, a line each: iteration, speed, time left, last checkpoint, and whether they are alive.

    python -m megatron.tools.status runs/*
    python -m megatron.tools.status --watch 10 runs/345M runs/1.3B

Sources are a run's metrics (metrics.jsonl in its folder, or at --metrics-file, which the folder names), its events and
checkpoints, and its ranks' heartbeats, if any. A folder that is not a run means all runs in it.
States: starting, running, stalled (no sign of life for longer than its steps take), done, stopped (in order before its
last step; it can be resumed), interrupted (by Ctrl-C), failed (with the reason), unknown (no metrics, and its last
checkpoint is not of its last step), unreadable (no run, or damaged; other runs are still shown).
"""

import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Optional

from megatron.errors import DataError, UsageError, run_main
from megatron.guard.run_state import UNREADABLE, Line, look_at, without_duplicates
from megatron.settings.positional import divide, parse_one
from megatron.settings.schema import setting
from megatron.telemetry import figures
from megatron.telemetry.figures import WIDE, WIDTH, count, duration, sentence, several, shortened, since
from megatron.telemetry.run_folder import NAMED


@dataclass(frozen=True)
class StatusOptions:
    """Options of the output."""

    json: bool = setting("print a JSON list instead of a table", False)
    watch: Optional[float] = setting("print again every so many seconds", None)
    wide: bool = setting("all columns, and names and reasons whole: lines may be longer than 80 columns", False)


def main(argv: list[str]) -> None:
    """Print the state once, or repeatedly with --watch."""
    names, flags = divide(argv, StatusOptions)
    about = "Show the state of runs, a line each: FOLDER... are their --save folders, or any folders above them."
    asked = parse_one(flags, StatusOptions, f"{PROG} FOLDER ...", about)
    if not names:
        raise UsageError("which runs?", do=f"{PROG} FOLDER...")
    while True:
        lines = without_duplicates([line for name in names for line in look_at(name)])
        text = json.dumps([asdict(line) for line in lines], indent=1) if asked.json else table(lines, asked.wide)
        print(f"\033[H\033[J{text}" if asked.watch and os.isatty(1) else text, flush=True)
        if not asked.watch:
            break
        time.sleep(asked.watch)
    if lost := [f"{line.run}: {line.why}" for line in lines if line.state == UNREADABLE]:
        raise DataError(
            "; ".join(lost), "a run writes metrics.jsonl next to its checkpoints (--save), or to --metrics-file", NAMED
        )


PROG = "python -m megatron.tools.status"


URGENT = ("failed", "stalled", UNREADABLE, "interrupted", "stopped", "unknown", "starting", "running", "done")


def verdict(lines: list[Line]) -> str:
    """The number of runs in each state, urgent ones first."""
    states = Counter(line.state for line in lines)
    order = [*(state for state in URGENT if state in states), *(state for state in states if state not in URGENT)]
    counts = ", ".join(f"{states[state]} {state}" for state in order)
    return f"{several(len(lines), 'run')}: {counts if len(lines) > 1 else lines[0].state}" if lines else "no runs"


def table(lines: list[Line], wide: bool = False) -> str:
    """The verdict, and a table of the runs; reasons are below their run, or (wide) at the end of its line."""
    head = ["run", "state", "iteration", "done", "tokens/s", "loss", "left", "checkpoint"]
    rows, notes = [], []
    for line in lines:
        done = f"{min(1, line.iteration / line.iterations):.0%}" if line.iterations else "-"
        quiet = [f"{since(line.age)} ago"] * (line.state in QUIET)
        again = [several(line.restarts, "restart")] * (line.restarts > 0)
        notes.append(
            ", ".join([*again, *filter(None, [line.why]), *quiet, *_snapshot(line), *line.slow, *_alerts(line)])
        )
        rows.append(
            [
                line.run if wide else _short(line.run),
                line.state,
                f"{line.iteration}/{line.iterations}" if line.iterations else str(line.iteration),
                done,
                _or(line.tokens_per_second, count),
                _or(line.loss, "{:.4f}".format),
                _or(line.seconds_left, duration),
                _or(line.checkpoint, str)
                + (f", {since(line.checkpoint_age)} ago" if line.checkpoint_age is not None else ""),
            ]
        )
    if wide:
        rows = [[*row, note] for row, note in zip(rows, notes)]
        return f"{verdict(lines)}\n{figures.table(rows, [*head, ''], LEFT, WIDE)}"
    titles, *texts = figures.table(rows, head, LEFT, WIDTH, spare=("done", "loss", "tokens/s")).splitlines()
    under = [[row, *([sentence(f"  {shortened(note, NOTE)}")] if note else [])] for row, note in zip(texts, notes)]
    return "\n".join([verdict(lines), titles, *(text for pair in under for text in pair)])


def _short(run: str) -> str:
    """A run's path, or the end of a long one: its last two parts, if they are short.

    >>> _short("runs/345M"), _short("/data/experiments/345M/checkpoints"), _short("/data/a-long-name/checkpoints")
    ('runs/345M', '.../345M/checkpoints', '...-name/checkpoints')
    """
    last = "/".join(["...", *run.split("/")[-2:]])
    if len(run) <= LONGEST:
        return run
    return last if len(last) <= LONGEST else f"...{run[3 - LONGEST :]}"


def _snapshot(line: Line) -> list[str]:
    """The newest snapshot in this machine's memory, if the run may go on from it."""
    if line.snapshot is None or line.snapshot <= (line.checkpoint or 0):
        return []
    return [f"a snapshot of iteration {line.snapshot} is in memory, {since(line.snapshot_age or 0.0)} old"]


def _alerts(line: Line) -> list[str]:
    """The number of warnings and errors of a run, and the last one."""
    if line.last_event is None:
        return []
    counts = [several(count, word) for count, word in ((line.errors, "error"), (line.warnings, "warning")) if count]
    ago = since(max(0.0, time.time() - line.last_event["time"]))
    return [f"{' and '.join(counts)}, the last one {ago} ago: {line.last_event['message']}"]


QUIET = ("stalled", "failed", "stopped", "interrupted")
LEFT = (0, 1, 2, 8)  # columns of words
LONGEST, NOTE = 20, 2 * WIDTH  # characters of a run's path, and of the note below it


def _or(value: Optional[float], words, none: str = "-") -> str:
    return none if value is None else words(value)


if __name__ == "__main__":
    run_main(main)
