# SPDX-License-Identifier: Apache-2.0
"""A thread on rank 0 that reports problems of the training thread: no step ends, or the supervisor was killed."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Optional

from megatron.guard.heartbeat import Heartbeat
from megatron.guard.stacks import PHASES
from megatron.guard.supervisor_mark import lost_supervisor
from megatron.telemetry.event_rules import rule_of
from megatron.telemetry.events import EventLog

LOOK = 1.0  # seconds between two checks
PAUSES = ("evaluate", "save", "replay")  # phases between steps: each beat is progress, and they may take longer
LONGER = 5  # these phases may take so many times longer
REMEMBERED = 50  # last steps, whose median duration is the usual one


class Alarm:
    """Listens to the records of a run, and reports if no step ends for too long. Starts with the first step of a launch.

    supervisor: path of the mark of the job's supervisor (`supervisor_mark`), if it has one
    """

    def __init__(self, events: EventLog, heartbeat: Heartbeat, supervisor: Optional[str] = None):
        self.events, self.heartbeat = events, heartbeat
        self.supervisor = Path(supervisor) if supervisor else None
        self.durations: deque[float] = deque(maxlen=REMEMBERED)
        self.steps, self.iteration = 0, 0  # steps of this launch; the last one's number
        self.quiet, self._progress, self._reported = 0.0, None, False
        self._over, self._thread = threading.Event(), None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take note of a step that ended."""
        if record["kind"] == "step" and record.get("seconds") is not None:
            self.durations.append(record["seconds"])
            self.steps, self.iteration = self.steps + 1, record["iteration"]

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, name="alarm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after a last check of the supervisor."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.look_at_supervisor()

    def _work(self) -> None:
        before = time.monotonic()
        while not self._over.wait(LOOK):
            now = time.monotonic()
            self.look(min(now - before, 2 * LOOK))  # does not count the time in which the process was suspended
            self.look_at_supervisor()
            before = now

    def look(self, seconds: float) -> None:
        """Record an event if no step has ended for too long. seconds: since the last check"""
        pausing = self.heartbeat.phase in PAUSES
        progress = (self.steps, self.heartbeat.at if pausing else None)
        if progress != self._progress:
            self.quiet, self._progress, self._reported = 0.0, progress, False
            return
        self.quiet += seconds
        rule = rule_of(self.events.rules, "no_step")
        if rule.off or self._reported or not self.durations:
            return
        usual = median(list(self.durations))
        if self.quiet < max(rule.seconds, rule.threshold * usual) * (LONGER if pausing else 1):
            return
        self._reported = True
        doing = PHASES.get(self.heartbeat.phase, self.heartbeat.phase)
        self.events.record(
            "no_step",
            f"no step has ended for {self.quiet:.0f} s after iteration {self.iteration}; one usually takes {usual:.3g} s; "
            f"the first rank is {doing}",
            iteration=self.iteration,
            seconds=round(self.quiet, 1),
            median=usual,
            doing=doing,
        )

    def look_at_supervisor(self) -> None:
        """Record once that the supervisor was killed."""
        mark = lost_supervisor(self.supervisor)
        if mark is not None:
            self.supervisor = None
            message = f"the supervisor ({mark}) was killed: nobody restarts this job"
            self.events.record("supervisor_lost", message, iteration=self.iteration or None, supervisor=str(mark))
