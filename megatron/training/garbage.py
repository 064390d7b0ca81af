# SPDX-License-Identifier: Apache-2.0
"""Garbage collection at the same step on all ranks (--manual-gc-interval). Needs no torch.

Python collects reference cycles after a number of allocations: in the middle of a pass, on each rank at another time, and
sometimes over all objects of the run. Ranks wait for each other, so a pause of one delays all. Here

    before training  existing objects (modules, settings) are frozen: later collections ignore them
    first step       objects that survived it (buffers) are frozen too
    N steps later    all ranks collect after the same step, and again every N steps, at evaluations and at saves
    the end          automatic collection is enabled again, also after an error

Objects without cycles are freed immediately, by their reference counts. A cycle lives for at most N steps.
"""

import gc


class GarbageCollection:
    """A context in which cycles are collected every `interval` steps; 0: automatically.

    with GarbageCollection(100) as garbage:
        for step in steps:
            train(step)
            garbage.after_step()
    """

    def __init__(self, interval: int):
        self.interval, self.steps, self.paused = interval, 0, False

    def __enter__(self) -> "GarbageCollection":
        if self.interval and gc.isenabled():
            gc.freeze()  # a collection in a forked process would otherwise copy these objects
        return self

    def after_step(self) -> None:
        """Count a step. The first one disables automatic collection, every `interval`th one collects."""
        if not self.interval:
            return
        self.steps += 1
        if self.steps == 1 and gc.isenabled():  # the first step creates the last permanent objects
            gc.collect()
            gc.freeze()
            gc.disable()
            self.paused = True
        elif self.steps % self.interval == 0:
            self.collect()

    def collect(self) -> None:
        """Collect now if automatic collection is disabled. Next to an evaluation or a save this costs little."""
        if self.paused:
            gc.collect()

    def __exit__(self, *exception) -> None:
        if self.interval:
            gc.unfreeze()
        if self.paused:
            gc.enable()
            self.paused = False
