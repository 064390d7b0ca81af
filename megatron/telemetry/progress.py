# SPDX-License-Identifier: Apache-2.0
"""Progress of commands that take long: a bar on a terminal, and nothing elsewhere.

    with ProgressBar("writing", total=sum(sizes)) as done:
        for size in sizes:
            ...
            done(size)

The bar appears after a second, on stderr, and goes away at the end. (Training has a bar of its own: `console.py`; its
first step and its evaluations log `ProgressLines`.)
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Optional

from megatron.telemetry.figures import duration

DELAY = 1.0  # seconds
FIRST = 10.0  # seconds


class ProgressBar:
    """A context; called with what was done since the last call. total: None if it is not known; unit: B for bytes."""

    def __init__(self, doing: str, total: Optional[float] = None, unit: str = "B"):
        self._bar = None
        if is_shown():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no drawing thread, which forks would not have
            self._bar = tqdm(
                desc=doing,
                total=total,
                unit=unit,
                unit_scale=unit == "B",
                delay=DELAY,
                leave=False,
                file=sys.stderr,
                dynamic_ncols=True,
            )

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, count: float = 1) -> None:
        """Count what was done."""
        if self._bar is not None:
            self._bar.update(count)

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()


def followed(things: Iterable, doing: str, total: float, unit: str) -> Iterator:
    """The things one by one, as a bar counts them."""
    with ProgressBar(doing, total, unit) as done:
        for thing in things:
            yield thing
            done()


class ProgressLines:
    """Log lines of something that may take minutes: after `FIRST` seconds, then each time after twice as long as before."""

    def __init__(self, log: Callable[[str], None]):
        self._log, self._began, self._due = log, time.monotonic(), FIRST

    def __call__(self, what: str, done: float, total: float) -> None:
        """Log `what` if it is due. done of total: how much is over"""
        passed = time.monotonic() - self._began
        if done and passed >= self._due:
            self._due = 2 * passed
            self._log(f" > {what} after {duration(passed)}, of about {duration(passed * total / done)}")


def is_shown() -> bool:
    """Whether somebody looks at stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


def say(doing: str) -> None:
    """Print on a terminal what takes long now, without a measure of it."""
    if is_shown():
        print(f"{doing} ...", file=sys.stderr, flush=True)
