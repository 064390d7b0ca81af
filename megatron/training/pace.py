# SPDX-License-Identifier: Apache-2.0
"""Detects steps that slow down because other programs use the CPU, usually together with spinning threads."""

import math
from collections import deque
from statistics import median

import torch

from megatron.mpu import cpu_threads
from megatron.mpu.initialize import RankContext
from megatron.settings import rank_env

CRAWLS = 3.0  # a slow step takes this many times the median
IN_A_ROW = 3  # consecutive slow steps before the load is checked
ENOUGH = 8  # steps for a median
FIRST_LOOK = 5.0  # seconds after the first step: the load average then includes programs that started with this run


class Pace:
    """The durations of the steps of one launch, on a rank with `threads` threads."""

    def __init__(self, threads: int, ranks_here: int = 1):
        self.threads, self.wanted = threads, threads * ranks_here
        self._watches = cpu_threads.may_spin(threads)
        self._times: deque[float] = deque(maxlen=64)  # of normal steps
        self._crawling, self._first_look = 0, math.inf

    @classmethod
    def of(cls, context: RankContext) -> "Pace":
        """The pace of this rank."""
        threads = torch.get_num_threads() if context.device.type == "cpu" else 1
        return cls(threads, rank_env.ranks().local_world_size or 1)

    def after(self, seconds: float, now: float) -> str:
        """Count a step of `seconds` that ended `now`. Returns a note once, if other programs slow it down; otherwise ""."""
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
        return self._note(seconds, usual)

    def _note(self, seconds: float, usual: float) -> str:
        slower = (
            f"steps take {seconds:.2g} s, {usual:.2g} s before"
            if seconds > CRAWLS * usual
            else f"{seconds:.2g} s a step"
        )
        others = f"other programs use the cores ({slower}; load {cpu_threads.load():.1f}, {cpu_threads.cores()} cores)"
        if cpu_threads.sleep_from_now_on(self.threads):
            return f"{others}: waiting threads sleep from now on instead of spinning; results do not change"
        return (
            f"{others}, and waiting threads spin, which takes cores from working ones: stop, and resume from the last "
            "checkpoint with OMP_WAIT_POLICY=PASSIVE in the environment (2.1 s a step became 0.3: docs/proof/benchmarks.md)"
        )
