# SPDX-License-Identifier: Apache-2.0
"""Timers of a rank by name, and the table of all ranks' times (`--timing-log-level 1|2`).

    timers = Timers(level=2)
    with timers("tokenize", level=2):               # or .start() and .stop()
        ...
    timers("tokenize").mean(skip=2), timers("tokenize").sum, timers("tokenize").history

Timers of one level never count the same moment twice: a timer that starts inside another one of its level pauses that one
until it ends. So timers of level 1 add up to at most the time of a step. Timers of level 2 measure parts of them. A clock
is read only if a timer runs. Needs no torch: the synchronization with the device and with other ranks is passed in.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple, Optional

HISTORY = 1000  # uses that a timer remembers
WIDTH = 48  # characters of a name and its dots in the log


class Timed(NamedTuple):
    """The timer of a part of a run."""

    name: str
    level: int
    apart: bool = False  # not part of a step: logged separately, and timers of a step do not run inside it


class _Lane:
    """The running timers of one level, the innermost last: only that one counts time."""

    def __init__(self, synchronize: Callable[[], object]):
        self.synchronize, self.running, self.mark = synchronize, [], 0.0

    def switch(self) -> None:
        """Add the time since the last switch to the innermost timer."""
        self.synchronize()
        before, self.mark = self.mark, time.perf_counter()
        if self.running:
            self.running[-1].part += self.mark - before


class Timer:
    """A timer of `Timers`: `with timer:`, or `start` and `stop`.

    history: seconds of the last uses, oldest first; sum: of all uses; uses: their number
    """

    def __init__(self, name: str, lane: _Lane, barrier: Optional[Callable[[], object]] = None):
        self.name, self.lane, self.barrier = name, lane, barrier
        self.history: deque[float] = deque(maxlen=HISTORY)
        self.sum, self.uses = 0.0, 0
        self.fresh = 0.0  # part of the sum that was not collected yet
        self.part = 0.0  # of the present use

    def start(self) -> None:
        """Start the timer, after the barrier if it has one; the time in the barrier counts in no timer."""
        lane = self.lane
        assert self not in lane.running, f"the timer {self.name} runs already"
        lane.switch()
        if self.barrier is not None:
            self.barrier()
            lane.synchronize()
            lane.mark = time.perf_counter()
        self.part = 0.0
        lane.running.append(self)

    def stop(self) -> None:
        """Stop the timer. Timers stop in the opposite order of their start."""
        lane = self.lane
        inner = [timer.name for timer in lane.running[-1:]]
        assert inner == [self.name], f"the timer {self.name} cannot stop: {inner or 'none'} runs"
        lane.switch()
        lane.running.pop()
        self.history.append(self.part)
        self.sum += self.part
        self.fresh += self.part
        self.uses += 1

    @property
    def last(self) -> float:
        """Seconds of the last use; 0 before the first."""
        return self.history[-1] if self.history else 0.0

    def mean(self, skip: int = 0) -> float:
        """Mean seconds of a use over `history`, without the first `skip` of all uses, which are slower. 0 without any."""
        forgotten = self.uses - len(self.history)
        kept = list(islice(self.history, max(0, skip - forgotten), None))
        return sum(kept) / len(kept) if kept else 0.0

    def __enter__(self) -> "Timer":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()


class _Apart(Timer):
    """A timer that disables the timers of a step while it runs."""

    def __init__(self, timers: "Timers", *given):
        super().__init__(*given)
        self.timers = timers

    def start(self) -> None:
        super().start()
        self.timers.apart = True

    def stop(self) -> None:
        self.timers.apart = False
        super().stop()


class Off(Timer):
    """A timer of a higher level than requested: it never runs."""

    def start(self) -> None:
        pass

    stop = start


class Timers:
    """The timers of a rank. Those of `parts`, which all ranks have, are logged; others belong to their creator.

    level:    timers of a higher level do not run
    parts:    phase (phases.py) -> its timer
    synchronize:   waits for the device before the clock is read: torch.cuda.synchronize
    barrier:  waits for all ranks before a timer of `parts` of level 1 starts
    gather:   numbers of this rank -> numbers of all ranks, in rank order; all ranks call it together
    """

    def __init__(
        self,
        level: int,
        parts: Optional[dict[str, Timed]] = None,
        *,
        synchronize: Callable = lambda: None,
        barrier: Optional[Callable] = None,
        gather: Callable[[list[float]], list[list[float]]] = lambda seconds: [seconds],
    ):
        self.level, self.gather = level, gather
        self.lanes = {number: _Lane(synchronize) for number in range(1, level + 1)}
        self.named: dict[str, Timer] = {}
        self.apart = False  # inside a timer that is not part of a step
        parts = {part: timed for part, timed in (parts or {}).items() if timed.level <= level}
        for name, number, apart in dict.fromkeys(parts.values()):
            given = name, self.lanes[number], barrier if number == 1 else None
            self.named[name] = _Apart(self, *given) if apart else Timer(*given)
        self.parts = {part: self.named[timed.name] for part, timed in parts.items()}
        self.of_a_step = list(dict.fromkeys(timed.name for timed in parts.values() if not timed.apart))

    def __call__(self, name: str, level: int = 1) -> Timer:
        """The timer of this name, created by the first call with its level."""
        timer = self.named.get(name)
        if timer is None:
            timer = Timer(name, self.lanes[level]) if level <= self.level else Off(name, _Lane(lambda: None))
            self.named[name] = timer
        return timer

    def timer_of(self, part: str) -> Optional[Timer]:
        """The timer of a phase that begins now; None if it is not timed."""
        return None if self.apart else self.parts.get(part)

    def collect(self, names: Optional[Iterable[str]] = None) -> dict[str, list[float]]:
        """Timer -> seconds since the last collection, of each rank (0: it did not run there). All ranks call it together.

        names: by default the timers of a step
        """
        running = [timer.name for lane in self.lanes.values() for timer in lane.running]
        assert not running, f"started and never stopped: {', '.join(running)}"
        names = self.of_a_step if names is None else list(names)
        mine = []
        for timer in map(self.named.__getitem__, names):
            mine.append(timer.fresh)
            timer.fresh = 0.0
        return {name: list(times) for name, times in zip(names, zip(*self.gather(mine))) if any(times)}

    def forget(self) -> None:
        """Drop times that were not collected: they belong to steps that no longer count."""
        for timer in self.named.values():
            timer.fresh = 0.0


def spans(times: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Timer -> smallest and largest time among the ranks where it ran.

    >>> spans({"forward-recv": [0.0, 2.0, 3.0]})
    {'forward-recv': (2.0, 3.0)}
    """
    return {name: (min(filter(None, ranks)), max(ranks)) for name, ranks in times.items()}


def table(times: dict[str, list[float]], option: str) -> str:
    """Times in the form of Megatron-LM's log, in milliseconds. option: max, minmax or all.

    >>> print(table({"optimizer": [0.5, 0.25]}, "minmax"))
    (min, max) time across ranks (ms):
        optimizer ......................................: (250.00, 500.00)
    """
    if option == "all":
        rows = [
            line
            for name, ranks in times.items()
            for line in (
                f"  {name}:",
                *(f"     rank {rank:2d}: {1000 * seconds:.2f}" for rank, seconds in enumerate(ranks) if seconds),
            )
        ]
        return "\n".join(["times across ranks (ms):", *rows])
    both = option == "minmax"
    rows = []
    for name, (least, most) in spans(times).items():
        shown = f"({1000 * least:.2f}, {1000 * most:.2f})" if both else f"{1000 * most:.2f}"
        rows.append(f"    {(name + ' ').ljust(WIDTH, '.')}: {shown}")
    return "\n".join(["(min, max) time across ranks (ms):" if both else "max time across ranks (ms):", *rows])
