# SPDX-License-Identifier: Apache-2.0
"""When Python looks for reference cycles while a run trains. Needs no torch.

Python collects after so many allocations: in the middle of a pass, on each rank at another time, and now and then through
every object that the run was built of. With ranks that wait for each other, the pause of one is the pause of all. Here

    before it      what is there already (modules, settings) is set aside: no later collection looks at it
    first step     so is what has lasted until now (buffers)
    N steps later  all ranks collect behind the same step, and again every N steps, at evaluations and at saves
    the end        however it comes, Python collects by itself again

Objects without cycles are freed at once by their reference counts, as always. A cycle lives for N steps at most.
"""

import gc


class GarbageCollection:
    """Inside `with`, cycles are collected every `interval` steps; 0: whenever Python does.

    with GarbageCollection(100) as garbage:
        for step in steps:
            train(step)
            garbage.after_step()
    """

    def __init__(self, interval: int):
        self.interval, self.steps, self.paused = interval, 0, False

    def __enter__(self) -> "GarbageCollection":
        if self.interval and gc.isenabled():
            gc.freeze()  # what was there before training: a process that was forked would copy all of it to look at it
        return self

    def after_step(self) -> None:
        """A step is over: the first one turns automatic collection off, every `interval`th one collects."""
        if not self.interval:
            return
        self.steps += 1
        if self.steps == 1 and gc.isenabled():  # the first step is what makes the last of the objects that stay
            gc.collect()
            gc.freeze()
            gc.disable()
            self.paused = True
        elif self.steps % self.interval == 0:
            self.collect()

    def collect(self) -> None:
        """Collect now, where automatic collection is off: beside an evaluation or a save it costs nothing more."""
        if self.paused:
            gc.collect()

    def __exit__(self, *exception) -> None:
        if self.interval:
            gc.unfreeze()
        if self.paused:
            gc.enable()
            self.paused = False
