# SPDX-License-Identifier: Apache-2.0
"""Two passes of a rank that take turns: one computes while a message of the other is under way.

    with TwoPasses() as passes:
        passes.run(forward, backward)  # two functions

`forward` runs until it has started a message and calls `pass_turn`. Then `backward` runs until it does the same, and so on.
If one of them ends, the other one runs alone. Outside of `run`, `pass_turn` does nothing.

Each pass has a thread, because a backward pass calls `pass_turn` inside of autograd, where it has to continue later. Only
one of the two runs at any time. The thread of the caller runs the first function.

Which turn computes what depends on the model and on nothing else: not on data, and not on time. So ranks with equal layers
start their collectives in the same order, as without turns, and none waits for a collective that another one starts later.

Passes must not see each other's state. Each thread has its own grad mode, autocast and hooks of saved tensors, and torch's
generators are saved and restored at each turn. `swap` sets an attribute for one pass only.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import overrides
from torch.utils import _python_dispatch

from megatron.telemetry import rank_times

FIRST, SECOND = 0, 1


class TwoPasses:
    """A context with the thread of the second functions; see the module."""

    active: Optional["TwoPasses"] = None  # of this process, while two functions run

    def __init__(self):
        self._mine = threading.Lock(), threading.Lock()  # a thread may run when it gets its lock
        for lock in self._mine:
            lock.acquire()
        self._work: Optional[Callable[[], Any]] = None  # of the second thread; None: it ends
        # Of each pass: they exchange its state and the common one.
        self._swaps: tuple[list[Callable[[], None]], ...] = ([], [])
        self._over, self._errors = [True, True], [None, None]
        self._now = FIRST
        self._state = _ThreadState()

    def __enter__(self) -> "TwoPasses":
        self._thread = threading.Thread(target=self._serve, name="second pass", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._work = None
        self._mine[SECOND].release()
        self._thread.join()

    def run(self, first: Callable[[], Any], second: Callable[[], Any]) -> None:
        """Run both functions to their end. If one raises an error, the other one is stopped, and the error raised."""
        self._work, self._now = second, FIRST
        self._over, self._errors = [False, False], [None, None]
        TwoPasses.active = self
        try:
            self._do(FIRST, first)
            if not self._over[SECOND]:
                self._hand_to(SECOND)
                self._wait(FIRST)
        finally:
            TwoPasses.active = None
        error = next((error for error in self._errors if error and not isinstance(error, _OtherFailed)), None)
        if error is not None:
            raise error

    def pass_turn(self) -> None:
        """Let the other pass run until it passes the turn, or ends."""
        me, other = self._now, 1 - self._now
        if self._over[other]:
            return
        swaps, random = self._swaps[me], _random_states()
        for exchange in reversed(swaps):
            exchange()
        self._hand_to(other)
        self._wait(me)
        for exchange in swaps:
            exchange()
        _restore(random)
        if self._errors[me] or self._errors[other]:
            raise self._errors[me] or _OtherFailed()

    def _hand_to(self, who: int) -> None:
        self._now = who
        self._mine[who].release()

    def _wait(self, me: int) -> None:
        """Wait for the turn. An interrupt is raised later: until then the other pass runs."""
        try:
            self._mine[me].acquire()
        except BaseException as error:
            self._errors[me] = error
            self._mine[me].acquire()

    def _serve(self) -> None:
        """Run the second functions, in their thread."""
        self._state.take_over()
        while True:
            self._mine[SECOND].acquire()
            if self._work is None:
                return
            self._do(SECOND, rank_times.counted_as_main_thread(self._work))
            self._work = None  # its tensors are free before the next one
            self._hand_to(FIRST)

    def _do(self, me: int, function: Callable[[], Any]) -> None:
        try:
            if not any(self._errors):
                function()
        except BaseException as error:  # also an interrupt: `run` raises it
            self._errors[me] = self._errors[me] or error
        self._over[me] = True


class _OtherFailed(Exception):
    """Ends a pass beside one that failed."""


def pass_turn() -> None:
    """A message has been started: let the other pass compute, if there is one."""
    if TwoPasses.active is not None:
        TwoPasses.active.pass_turn()


@contextmanager
def swap(exchange: Callable[[], None]) -> Iterator[None]:
    """A context around which `exchange()` is called: it exchanges values of its own with those that all passes use.

    It is also called when the turn is passed inside the context, so the other pass never sees these values.
    """
    turns = TwoPasses.active
    swaps = [] if turns is None else turns._swaps[turns._now]
    exchange()
    swaps.append(exchange)
    try:
        yield
    finally:
        swaps.pop()
        exchange()


def swap_attribute(holder: Any, name: str, value: Any) -> Any:
    """A context in which an attribute of `holder` has this value, for this pass only."""

    def exchange() -> None:
        nonlocal value
        now = getattr(holder, name)
        setattr(holder, name, value)
        value = now

    return swap(exchange)


def _random_states() -> list[tuple[torch.Generator, torch.Tensor]]:
    """The states of torch's generators, from which modules of a user may draw."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(generator, generator.get_state()) for generator in generators]


def _restore(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


class _ThreadState:
    """What the second thread takes from the first: the number of its own threads, modes, the device, and the stream."""

    def __init__(self):
        self.threads = torch.get_num_threads()
        self.function_modes = overrides._get_current_function_mode_stack()
        self.dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def take_over(self) -> None:
        torch.set_num_threads(self.threads)
        for mode in self.function_modes:
            overrides._push_mode(mode)
        for mode in self.dispatch_modes:
            _python_dispatch._push_mode(mode)
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)
            torch.cuda.set_stream(self.stream)
