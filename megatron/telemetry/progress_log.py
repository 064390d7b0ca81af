# SPDX-License-Identifier: Apache-2.0
"""progress.txt next to the checkpoints, in Megatron-LM's form: a line at each start and each save (`--log-progress`).

2026-11-22 10:00:00\tJob ID: 4711\t# GPUs: 8\tSaved checkpoint\tIteration: 500\tJob throughput: 98.1 TFLOP/s/GPU\t
Cumulative throughput: 95.0 TFLOP/s/GPU\tFloating-point operations: 3.92e+18\tTokens (in billions): 0.52
"""

import os
import re
from datetime import datetime
from pathlib import Path
from typing import Optional

DATE = "%Y-%m-%d %H:%M:%S"
LINE = re.compile(
    r"(?P<date>\S+ \S+)\tJob ID: \S*\t# GPUs: (?P<ranks>\d+)\t(?:(?P<start>Starting job)$|.*operations: (?P<done>\S+))"
)


class ProgressLog:
    """Writes progress.txt, on the first rank. done: floating-point operations of the whole run, up to this start."""

    def __init__(self, folder: Path, ranks: int, done: float):
        self.path, self.ranks, self.done, self.began = folder / "progress.txt", ranks, done, datetime.now()
        folder.mkdir(parents=True, exist_ok=True)
        self._append("Starting job")

    def saved(self, iteration: int, done: float, tokens: int, in_background: bool = False) -> None:
        """Log a checkpoint that was written, or is about to be. done: operations of the run so far"""
        before = first_start(self.path.read_text(encoding="utf-8").splitlines(), self.ranks)
        since, had = before or (self.began, self.done)
        parts = [
            "Saving async checkpoint" if in_background else "Saved checkpoint",
            f"Iteration: {iteration}",
            f"Job throughput: {self._rate(done - self.done, self.began):.1f} TFLOP/s/GPU",
            f"Cumulative throughput: {self._rate(done - had, since):.1f} TFLOP/s/GPU",
            f"Floating-point operations: {done:.2e}",
            f"Tokens (in billions): {tokens / 1e9:.2f}",
        ]
        self._append("\t".join(parts))

    def _rate(self, operations: float, since: datetime) -> float:
        return operations / max((datetime.now() - since).total_seconds(), 1e-9) / 1e12 / self.ranks

    def _append(self, text: str) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().strftime(DATE)}\tJob ID: {job}\t# GPUs: {self.ranks}\t{text}\n")


def first_start(lines: list[str], ranks: int) -> Optional[tuple[datetime, float]]:
    """The time, and the operations so far, of the first among the last consecutive starts on this many ranks.

    >>> first_start(["2026-01-02 03:04:05\\tJob ID: \\t# GPUs: 8\\tStarting job"], 8)
    (datetime.datetime(2026, 1, 2, 3, 4, 5), 0.0)
    """
    first, done = None, 0.0
    for line in lines:
        match = LINE.match(line)
        if not match:
            continue
        if match["start"] and int(match["ranks"]) != ranks:
            first = None
        elif match["start"] and first is None:
            first = datetime.strptime(match["date"], DATE), done
        elif match["done"]:
            done = float(match["done"])
    return first
