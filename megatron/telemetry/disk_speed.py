# SPDX-License-Identifier: Apache-2.0
"""Detects that checkpoints are written much more slowly than before.

    speed = DiskSpeed(events)
    speed.judge("runs/a", iteration=1000, size=14_000_000_000, seconds=95.0)    # after each save

A save is slow if it takes at least `seconds` of the rule `slow_disk`, and its bytes per second are below `threshold` times
the median of the earlier saves of this launch to the same folder, or below `bytes_per_second`. Needs no torch.
"""

from collections import defaultdict, deque
from statistics import median
from typing import Optional

from megatron.telemetry.event_rules import rule_of
from megatron.telemetry.events import EventLog
from megatron.telemetry.figures import size as sized

ENOUGH = 3  # earlier saves before one is compared with them
WINDOW = 30  # earlier saves whose median is the reference


class DiskSpeed:
    """Records `slow_disk` when writing to a folder becomes slow, and `recovered` when it is no longer."""

    def __init__(self, events: EventLog):
        self.events = events
        self.rates: dict[str, deque] = defaultdict(lambda: deque(maxlen=WINDOW))  # folder -> bytes per second
        self.slow: set[str] = set()  # folders

    def judge(self, folder: str, iteration: int, size: int, seconds: float) -> None:
        """Judge a checkpoint of `size` bytes that was written in `seconds`."""
        rule, rates = rule_of(self.events.rules, "slow_disk"), self.rates[folder]
        if rule.off:
            return
        rate = size / max(seconds, 1e-9)
        usual = median(rates) if len(rates) >= ENOUGH else None
        slow = seconds >= rule.seconds and rate < max(rule.threshold * (usual or 0.0), rule.bytes_per_second)
        if not slow:  # slow saves must not become the reference
            rates.append(rate)
        if slow and folder not in self.slow:
            self._record(folder, iteration, size, seconds, usual)
        elif not slow and folder in self.slow:
            message = f"the disk of {folder} is no longer slow: {sized(rate)} per second"
            self.events.record("recovered", message, iteration=iteration, what="slow_disk", folder=folder)
        (self.slow.add if slow else self.slow.discard)(folder)

    def _record(self, folder: str, iteration: int, size: int, seconds: float, usual: Optional[float]) -> None:
        rate = size / seconds
        before = "" if usual is None else f", {rate / usual:.0%} of the median of earlier saves, {sized(usual)}"
        self.events.record(
            "slow_disk",
            f"writing the checkpoint of iteration {iteration} to {folder} took {seconds:.1f} s: {sized(size)}, "
            f"{sized(rate)} per second{before}: check the disk, and what else uses it",
            iteration=iteration,
            folder=folder,
            bytes=size,
            seconds=round(seconds, 3),
            bytes_per_second=round(rate),
            median=usual and round(usual),
        )
