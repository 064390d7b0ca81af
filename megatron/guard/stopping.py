# SPDX-License-Identifier: Apache-2.0
"""Reasons to stop before the last step: a signal, a file, the time. Each rank votes, and the sums of the votes decide for
all ranks.

The votes are a few numbers in the all-reduce that every step does anyway. Their sums are the same on every rank, so all
stop after the same step. Needs no torch.
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
LOOK = 1.0  # seconds between two checks of the kill switch, which may lie on a network file system
VOTES = 3  # numbers of `StopRequests.votes`
INTERRUPTED = 2.0**32  # the vote for Ctrl-C: more than the votes of all ranks for other signals


class Stop(NamedTuple):
    """The decision of all ranks to stop."""

    why: str
    preempted: bool  # by a signal, to be resumed later: exit code 9
    interrupted: bool = False  # by Ctrl-C: exit code 130


class UnbrokenPipe:
    """An output that ignores the loss of its reader: Ctrl-C also ends `| tee log`, but the run still saves a checkpoint."""

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
    """One rank's requests to end a run early.

    signals:      catch SIGTERM and SIGUSR1. Only the first one counts: launchers repeat them.
    kill_switch:  a file whose appearance stops the run; it must not exist at the start
    minutes:      the longest duration of the run, from `started` (seconds of time.time)
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
            raise SettingsError(f"--kill-switch-file {self.kill_switch} exists already", do="remove it to train")
        for name in SIGNALS if signals else ():
            number = getattr(signal, name, None)
            if number is not None:
                self._before[number] = signal.signal(number, self._catch)

    def _catch(self, number: int, frame) -> None:
        self.caught = self.caught or number

    @contextlib.contextmanager
    def interruptible(self, notice: str = "") -> Iterator[None]:
        """A context in which the first Ctrl-C requests a stop after this step, and the second one is a KeyboardInterrupt.

        notice: written immediately, by the rank that logs. A Ctrl-C too late for a vote is raised at the end.
        Where SIGINT is ignored, or an embedding program handles it, nothing changes.
        """

        def interrupt(number: int, frame) -> None:
            if self.interrupted:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt("interrupted twice: ended immediately")
            self.interrupted = True
            if sys.stdout is not None:
                sys.stdout = UnbrokenPipe(sys.stdout)
            with contextlib.suppress(OSError):  # not print: a print may be what was interrupted
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
            raise KeyboardInterrupt("interrupted after the last step")

    def votes(self) -> list[float]:
        """This rank's votes: signal caught, kill switch seen, time over."""
        over = self.minutes is not None and time.time() - self.started > 60 * self.minutes
        caught = INTERRUPTED if self.interrupted else float(self.caught != 0)
        return [caught, float(self._switched()), float(over)]

    def agreed(self, sums: list[float]) -> Optional[Stop]:
        """The decision from the sums of all ranks' votes; None to continue."""
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
        """Restore the signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
