# SPDX-License-Identifier: Apache-2.0
"""The real command line: `supervise -- torchrun ... pretrain_gpt.py`, with ranks that stop, die, or have nothing wrong.

The supervisor has to say what happened, to end the job in time and to bring it to the bits of a clean run by itself; and
to say nothing where nothing happens.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Optional

from tests.chaos.case import Case, Got
from tests.chaos.processes import TWO
from tests.chaos.runs import RECOVERED, STEPS, Job, attempts_in, clean_run, compare, record
from tests.chaos.victim import Fault

ROOT = Path(__file__).resolve().parent.parent.parent
HANG, IN_TIME = 5.0, 10.0  # --hang-timeout; seconds after it within which a job that hangs is explained and ended
EXPLAINED = f"explained and ended within the timeout + {IN_TIME:.0f} s; then {RECOVERED}"
QUIET = "no alarm, no restart"
CLEAN_RUNS = 10


def cases() -> list[Case]:
    """All of them; each takes as long as real commands take."""
    found = []
    for layout in TWO:
        for rank in range(2):
            found.append(
                Case(
                    f"stop/{layout}/rank{rank}",
                    "SIGSTOP of a rank, supervised",
                    EXPLAINED,
                    partial(hung, layout, rank),
                    "forward",
                    rank,
                    limit=300,
                )
            )
    for layout, place, rank in (
        ("dp2", "forward", 1),
        ("zero1", "optimizer", 0),
        ("tp2", "backward", 1),
        ("pp2", "before rename", 0),
    ):
        found.append(
            Case(
                f"supervised/{layout}/kill/rank{rank}",
                "SIGKILL of a rank, supervised torchrun",
                RECOVERED,
                partial(died, layout, place, rank),
                place,
                rank,
                limit=300,
            )
        )
    for number in range(CLEAN_RUNS):
        layout = TWO[number % len(TWO)]
        found.append(
            Case(f"clean/{number}/{layout}", "nothing: false alarms", QUIET, partial(alone, layout), limit=300)
        )
    return found


def command(
    flags: Iterable[str],
    folder: Path,
    fault: Optional[Fault] = None,
    *settings: str,
    launcher: str = "torch.distributed.run",
) -> list[str]:
    """A supervised torchrun of two ranks; heartbeats and logs lie in `folder`."""
    script = ["-m", "tests.chaos.victim", fault.text(), "pretrain_gpt.py"] if fault else [str(ROOT / "pretrain_gpt.py")]
    return [
        sys.executable,
        "-m",
        "megatron.tools.supervise",
        "--hang-timeout",
        f"{HANG:g}",
        "--start-timeout",
        "120",
        "--backoff",
        "0.2",
        "--poll",
        "0.1",
        *settings,
        "--heartbeat-dir",
        str(folder / "beats"),
        "--log-dir",
        str(folder / "logs"),
        "--",
        sys.executable,
        "-m",
        launcher,
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        *script,
        *flags,
    ]


def environment() -> dict[str, str]:
    """For commands that may run from any folder."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


class Supervised:
    """A supervised job that has ended: what was said, and when (seconds of time.time)."""

    def __init__(self, layout: str, folder: Path, fault: Optional[Fault] = None):
        self.job = Job(layout, folder, folder.parent)
        process = subprocess.Popen(
            command(self.job.flags(), folder, fault),
            env=environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines = [(time.time(), line) for line in process.stdout]
        self.code = process.wait()
        self.said = "".join(line for _, line in self.lines)
        print(self.said)
        path = folder / "logs" / "goodput.json"
        self.account = json.loads(path.read_text()) if path.exists() else {}

    def at(self, words: str) -> float:
        """When a line with these words was said first."""
        return next((when for when, line in self.lines if words in line), float("inf"))

    def compared(self) -> str:
        """With the clean run."""
        return compare(clean_run(self.job.layout, self.job.common), record(self.job.save), attempts_in(self.said))


def hung(layout: str, rank: int, folder: Path, seed: int) -> Got:
    """A rank is stopped in the middle of a step."""
    step = random.Random(f"{seed} {layout} {rank} stop").choice(range(4, STEPS))
    marker = folder / "marker"
    run = Supervised(layout, folder, Fault("forward", str(marker), rank, step=step, action="SIGSTOP"))
    if run.code != 0:
        return Got(f"the supervisor ended with {run.code}: {run.said[-300:]}", run.code)
    if f"rank {rank} on " not in run.said or "is stopped by a signal (SIGSTOP)" not in run.said:
        return Got(f"rank {rank} was not named: {run.said[-600:]}", run.code)
    took = run.at("the job's processes were ended") - marker.stat().st_mtime
    if took > HANG + IN_TIME:
        return Got(f"ended {took:.1f} s after the rank stopped", run.code)
    found = run.compared()
    return Got(EXPLAINED if found == RECOVERED else found, run.code)


def died(layout: str, place: str, rank: int, folder: Path, seed: int) -> Got:
    """A rank is killed; the supervisor starts the job again."""
    run = Supervised(layout, folder, Fault(place, str(folder / "marker"), rank, step=6))
    if run.code != 0 or run.account["restarts"] != 1 or "rank killed by SIGKILL" not in run.said:
        return Got(f"ended with {run.code}, {run.account.get('restarts')} restarts: {run.said[-300:]}", run.code)
    return Got(run.compared(), run.code)


def alone(layout: str, folder: Path, seed: int) -> Got:
    """Nothing happens. No guard may say that something has."""
    run = Supervised(layout, folder)
    alarms = [
        line for _, line in run.lines if any(word in line.lower() for word in ("hang", "warning", "error", "lost"))
    ]
    alarms = [line for line in alarms if "lost 0" not in line and not line.startswith("  lost ")]
    if run.code != 0 or run.account["restarts"] or alarms:
        return Got(f"ended with {run.code}, {run.account.get('restarts')} restarts, said: {alarms}", run.code, faults=0)
    found = run.compared()
    return Got(QUIET if found == RECOVERED else found, run.code, faults=0)
