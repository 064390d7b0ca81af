# SPDX-License-Identifier: Apache-2.0
"""Runs a case in a forked process of its own and makes a line of what came of it. Needs no torch.

Whatever a case does to its process, to signals or to the folder it works in, the next one does not see; and nothing that
it started outlives it.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Optional

from megatron.guard import processes
from megatron.storage.processes import adopt_orphans
from tests.chaos.case import Case, Got

TOLD = 600  # characters of what a case has got that a line keeps


def conduct(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    """Run a case in `folder`, which is made and, if all was as expected, removed. Returns its line of the report."""
    folder.mkdir(parents=True)
    started = time.monotonic()
    receive, send = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        receive.close()
        _in_child(case, seed, folder, send)
    send.close()
    try:
        got = _answer(receive, pid, case.limit)
    except BaseException:  # the tool is told to end
        _end(pid)
        raise
    receive.close()
    line = dict(
        id=case.id,
        group=case.group,
        seed=seed,
        phase=case.phase,
        rank=case.rank,
        expected=case.expected,
        got=got.text[:TOLD],
        exit=got.exit,
        faults=got.faults,
        good=got.text == case.expected,
        seconds=round(time.monotonic() - started, 2),
    )
    if line["good"]:
        shutil.rmtree(folder, ignore_errors=True)
    return line


def _in_child(case: Case, seed: int, folder: Path, send: Connection) -> None:
    """Body of the forked process: its output goes to a file, its descendants end before it does."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    log = os.open(folder / "case.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        got = case.run(folder, seed)
    except BaseException as error:
        traceback.print_exc()
        got = Got(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    processes.end_descendants(os.getpid(), grace=0)
    send.send(tuple(got))
    os._exit(0)


def _answer(receive: Connection, pid: int, limit: float) -> Got:
    """What the process says, or how it ended without a word."""
    if not receive.poll(limit):
        _end(pid)
        return Got(f"no answer within {limit:.0f} s")
    try:
        got = Got(*receive.recv())
    except EOFError:
        got = None
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return got or Got(f"the case itself ended with {code}", code)


def _end(pid: int) -> None:
    """A case's process and all that it has started."""
    for process in [pid, *processes.descendants(pid)]:
        processes.send(process, signal.SIGKILL)
    os.waitpid(pid, 0)


def campaign(
    cases: Iterable[Case],
    folder: Path,
    *,
    seed: int = 0,
    repeat: int = 1,
    output: Optional[Path] = None,
    stamp: Optional[dict] = None,
    say=print,
) -> list[dict[str, Any]]:
    """Run cases one after the other, `repeat` times with seeds of their own; a JSON line each in `output`.

    stamp: what every line holds besides (commit, date).
    """
    lines = []
    with open(output or os.devnull, "a", encoding="utf-8") as file:
        for number in range(repeat):
            for case in cases:
                line = {**conduct(case, seed + number, folder / f"{len(lines):05d}"), **(stamp or {})}
                lines.append(line)
                file.write(json.dumps(line) + "\n")
                file.flush()
                say(_progress(line, folder / f"{len(lines) - 1:05d}"))
    return lines


def _progress(line: dict[str, Any], folder: Path) -> str:
    text = f"{'ok    ' if line['good'] else 'FAILED'} {line['seconds']:6.1f} s  {line['id']}"
    if line["good"]:
        return text
    return f"{text}\n         expected: {line['expected']}\n         got: {line['got']}\n         see {folder}/case.log"
