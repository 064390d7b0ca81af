# SPDX-License-Identifier: Apache-2.0
"""Steps that slow down while other programs run: threads that spin while they wait are the usual reason on a CPU."""

import math
from collections import deque
from statistics import median

import torch

from megatron.mpu import cpu_threads
from megatron.mpu.initialize import RankContext
from megatron.settings import rank_env

CRAWLS = 3.0  # times the median
IN_A_ROW = 3  # steps that crawl before anybody looks at the machine
ENOUGH = 8  # steps that make a median
FIRST_LOOK = 5.0  # seconds after the first step: programs that came with this run were in no average at its start


class Pace:
    """How long the steps of one start take, on a rank with so many threads."""

    def __init__(self, threads: int, ranks_here: int = 1):
        self.threads, self.wanted = threads, threads * ranks_here
        self._watches = cpu_threads.may_spin(threads)
        self._times: deque[float] = deque(maxlen=64)  # of steps that did not crawl
        self._crawling, self._first_look = 0, math.inf

    @classmethod
    def of(cls, context: RankContext) -> "Pace":
        """That of this rank."""
        threads = torch.get_num_threads() if context.device.type == "cpu" else 1
        return cls(threads, rank_env.ranks().local_world_size or 1)

    def after(self, seconds: float, now: float) -> str:
        """What to say after a step of so many seconds, which ended now: once, that waiting threads sleep; else nothing."""
        if not self._watches:
            return ""
        usual = median(self._times) if len(self._times) >= ENOUGH else math.inf
        if seconds > CRAWLS * usual:
            self._crawling += 1
        else:
            self._crawling = 0
            self._times.append(seconds)
        if len(self._times) == 1:
            self._first_look = now + FIRST_LOOK
        early = now >= self._first_look
        if early:
            self._first_look = math.inf
        if not (early or self._crawling >= IN_A_ROW) or not cpu_threads.crowded(self.wanted, own=self.wanted):
            return ""
        self._watches = False
        return self._told(seconds, usual)

    def _told(self, seconds: float, usual: float) -> str:
        slower = (
            f"steps take {seconds:.2g} s, {usual:.2g} s before"
            if seconds > CRAWLS * usual
            else f"{seconds:.2g} s a step"
        )
        others = f"other programs use the cores ({slower}; load {cpu_threads.load():.1f}, {cpu_threads.cores()} cores)"
        if cpu_threads.sleep_from_now_on(self.threads):
            return f"{others}: threads that wait for each other sleep from here on, and spin no more; no result changes"
        return (
            f"{others}, and threads that spin while they wait keep each other from them: stop, and go on from the last "
            "checkpoint with OMP_WAIT_POLICY=PASSIVE in the environment (2.1 s a step became 0.3: docs/benchmarks.md)"
        )
