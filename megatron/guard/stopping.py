# SPDX-License-Identifier: Apache-2.0
"""Reasons to stop before the last step: a signal, a file, the time. Each rank notices its own; all agree on one.

A rank's view is a few numbers, a part of the all-reduce that every step makes anyway; their sums are the same on every
rank, so all stop behind the same step. Needs no torch.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.errors import SettingsError

SIGNALS = ("SIGTERM", "SIGUSR1")
LOOK = 1.0  # seconds between two looks at the kill switch: a look at a network file system is not free
VOTES = 3  # numbers of `StopRequests.votes`
INTERRUPTED = 2.0**32  # a vote by Ctrl-C: more than all ranks together that have caught another signal


class Stop(NamedTuple):
    """All ranks have agreed to stop."""

    why: str
    preempted: bool  # from outside, to be continued later: exit code 9
    interrupted: bool = False  # by Ctrl-C: exit code 130


class Unheard:
    """An output whose reader may go away: Ctrl-C ends `| tee log` as well, and must not keep us from saving."""

    def __init__(self, output):
        self.output = output

    def write(self, text: str) -> int:
        self._try(lambda: self.output.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.output.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.output.fileno())

    def __getattr__(self, name: str):
        return getattr(self.output, name)


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
        self.caught, self.interrupted, self._looked, self._seen = 0, False, -LOOK, False
        self._before: dict[int, object] = {}
        if self.kill_switch and self.kill_switch.exists():
            raise SettingsError(f"--kill-switch-file {self.kill_switch} is there already", do="remove it to train")
        for name in SIGNALS if signals else ():
            number = getattr(signal, name, None)
            if number is not None:
                self._before[number] = signal.signal(number, self._catch)

    def _catch(self, number: int, frame) -> None:
        self.caught = self.caught or number

    @contextlib.contextmanager
    def interruptible(self, notice: str = "") -> Iterator[None]:
        """Inside, the first Ctrl-C is a request to stop behind this step, and the second one a KeyboardInterrupt.

        notice: written at once by the rank that speaks for all. One that comes too late for a vote is raised at the end.
        A process whose SIGINT is ignored, or is somebody else's (a program that this is a part of), keeps it so.
        """

        def interrupt(number: int, frame) -> None:
            if self.interrupted:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt("interrupted twice: ended at once")
            self.interrupted = True
            if sys.stdout is not None:
                sys.stdout = Unheard(sys.stdout)
            with contextlib.suppress(OSError):  # not print: it may be what was interrupted
                os.write(2, notice.encode())

        output, ours = sys.stdout, threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.stdout = output
        if self.interrupted:
            raise KeyboardInterrupt("interrupted behind the last step")

    def votes(self) -> list[float]:
        """This rank's numbers: signal caught, kill switch seen, time over."""
        over = self.minutes is not None and time.time() - self.started > 60 * self.minutes
        caught = INTERRUPTED if self.interrupted else float(self.caught != 0)
        return [caught, float(self._switched()), float(over)]

    def agreed(self, sums: list[float]) -> Optional[Stop]:
        """What all ranks make of the sums of their votes."""
        if sums[0] >= INTERRUPTED:
            return Stop("interrupted by Ctrl-C", True, interrupted=True)
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
