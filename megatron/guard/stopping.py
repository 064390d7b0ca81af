# SPDX-License-Identifier: Apache-2.0
"""Reasons to stop before the last step: a signal, a file, the time. Each rank notices its own; all agree on one.

A rank's view is a few numbers, which ride on a reduction that every step makes anyway; their sums are the same on every
rank, so all stop behind the same step. Needs no torch.
"""

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.errors import SettingsError

SIGNALS = ("SIGTERM", "SIGUSR1")
LOOK = 1.0  # seconds between two looks at the kill switch: a look at a network file system is not free
VOTES = 3  # numbers of `StopRequests.votes`


class Stop(NamedTuple):
    """All ranks have agreed to stop."""

    why: str
    preempted: bool  # from outside, to be continued later: exit code 9


class StopRequests:
    """What may end a run early, on one rank.

    signals:      catch SIGTERM and SIGUSR1. The first one is remembered, later ones change nothing: launchers repeat them.
    kill_switch:  a file whose appearance stops the run; it must not be there at the start
    minutes:      the longest time that the run may take, counted from `started` (seconds of time.time)
    """

    def __init__(
        self,
        *,
        signals: bool = False,
        kill_switch: Optional[str] = None,
        minutes: Optional[float] = None,
        started: Optional[float] = None,
    ):
        self.kill_switch, self.minutes = kill_switch and Path(kill_switch), minutes
        self.started = time.time() if started is None else started
        self.caught, self._looked, self._seen = 0, -LOOK, False
        self._before: dict[int, object] = {}
        if self.kill_switch and self.kill_switch.exists():
            raise SettingsError(f"--kill-switch-file {self.kill_switch} is there already", do="remove it to train")
        for name in SIGNALS if signals else ():
            number = getattr(signal, name, None)
            if number is not None:
                self._before[number] = signal.signal(number, self._catch)

    def _catch(self, number: int, frame) -> None:
        self.caught = self.caught or number

    def votes(self) -> list[float]:
        """This rank's numbers: signal caught, kill switch seen, time over."""
        over = self.minutes is not None and time.time() - self.started > 60 * self.minutes
        return [float(self.caught != 0), float(self._switched()), float(over)]

    def agreed(self, sums: list[float]) -> Optional[Stop]:
        """What all ranks make of the sums of their votes."""
        caught, switched, over = (total > 0.5 for total in sums)
        if caught:
            own = f" ({signal.Signals(self.caught).name})" if self.caught else " (on another rank)"
            return Stop(f"signal caught{own}", True)
        if switched:
            return Stop(f"--kill-switch-file {self.kill_switch} has appeared", False)
        return Stop(f"--exit-duration-in-mins {self.minutes:g}", False) if over else None

    def _switched(self) -> bool:
        now = time.monotonic()
        if self.kill_switch and not self._seen and now - self._looked >= LOOK:
            self._looked, self._seen = now, os.path.exists(self.kill_switch)
        return self._seen

    def close(self) -> None:
        """Signals mean again what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
