# SPDX-License-Identifier: Apache-2.0
"""Run a generation engine in a thread of its own, and bring its tokens to the coroutines that wait for them.

    thread = EngineThread(engine, room=80, version="iteration 700", meter=meter)
    thread.start()                           # in the event loop
    job = await thread.add(requests)         # raises ApiError if there is no room, or the engine refuses one
    async with job:                          # texts that have not ended are cancelled at the end
        async for place, output in job:      # place: number of the request among `requests`
            ...

The event loop never waits for the engine, and the engine never waits for a client. Commands reach the engine's thread
through a queue, and outputs reach the loop by one call for each step.
"""

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

from megatron.errors import Failure
from megatron.inference.requests import Output, Request
from megatron.serving.errors import ApiError, in_one_line
from megatron.serving.metrics import Meter

IDLE = 5.0  # seconds without work until the engine is called nevertheless
LONGEST_RETRY = 60  # seconds that a client is asked to wait, at most


class TextJob:
    """The texts of one HTTP request. An asynchronous iterator of (place, Output)."""

    def __init__(self, thread: "EngineThread", requests: Sequence[Request]):
        self.thread, self.requests = thread, tuple(requests)
        self.added: asyncio.Future = thread.loop.create_future()
        self.numbers: list[int] = []  # of the engine
        self.version = ""  # of the weights that answer
        self.abandoned = False
        self.began = time.monotonic()
        self.last: list[Optional[float]] = [None] * len(self.requests)  # when each text got its last token
        self.running = set(range(len(self.requests)))
        self._outputs: asyncio.Queue = asyncio.Queue()

    async def __aenter__(self) -> "TextJob":
        return self

    async def __aexit__(self, *error) -> None:
        self.cancel()

    def __aiter__(self) -> "TextJob":
        return self

    async def __anext__(self) -> tuple[int, Output]:
        if not self.running and self._outputs.empty():
            raise StopAsyncIteration
        found = await self._outputs.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def put(self, found: Any) -> None:
        self._outputs.put_nowait(found)

    def end(self, error: ApiError) -> None:
        """Raise an error where the job, or its outputs, are waited for."""
        if not self.added.done():
            self.added.set_exception(error)
        self.put(error)

    def cancel(self, place: Optional[int] = None) -> None:
        """End one text or all of them, if they go on."""
        if place is None:
            self.abandoned = True
        for one in [place] if place is not None else sorted(self.running):
            if one in self.running:
                self.thread.cancel(self, one)


class EngineThread:
    """Serves one model. All public methods are called in the event loop.

    room: texts that may run and wait at a time; on_failure: called with the error that ended the engine
    """

    def __init__(
        self,
        engine,
        *,
        room: int,
        version: str,
        meter: Meter,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ):
        self.engine, self.room, self.version, self.meter, self.on_failure = engine, room, version, meter, on_failure
        self.in_flight = 0  # texts that run or wait; of a beam search each beam is one
        self.error: Optional[BaseException] = None
        self.loop: asyncio.AbstractEventLoop
        self._seconds = 1.0  # that a text takes, lately
        self._jobs: set[TextJob] = set()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # The following belong to the thread.
        self._owners: dict[int, tuple[TextJob, int]] = {}
        self._held: deque[TextJob] = deque()  # while the weights are replaced
        self._replacement: Optional[tuple[Callable[[], tuple], asyncio.Future]] = None
        self._open = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    async def add(self, requests: Sequence[Request]) -> TextJob:
        """Queue requests. Raises ApiError if there is no room for all of them, or the engine refuses one."""
        if self.error is not None:
            raise ApiError(500, "the model has failed; the server is stopping", code="engine_failed")
        texts = sum(request.texts for request in requests)
        if texts > self.room:
            raise ApiError(400, f"{texts} texts in one request; the server takes {self.room} at a time")
        if self.in_flight + texts > self.room:
            seconds = math.ceil(min(LONGEST_RETRY, self._seconds))
            raise ApiError(
                429,
                f"the server is busy: {self.in_flight} texts run or wait, of at most {self.room}",
                code="queue_full",
                headers={"retry-after": str(seconds)},
            )
        job = TextJob(self, requests)
        self.in_flight += texts
        self._jobs.add(job)
        self._commands.put(partial(self._add, job))
        try:
            await job.added
        except Failure as error:
            raise ApiError(400, in_one_line(error)) from None
        except BaseException:
            job.cancel()
            raise
        return job

    def cancel(self, job: TextJob, place: int) -> None:
        self._commands.put(partial(self._cancel, job, place))

    def cancel_all(self, reason: ApiError) -> None:
        """End all texts; their clients get `reason`."""
        for job in list(self._jobs):
            job.end(reason)
            job.cancel()

    async def replaced(self, make: Callable[[], tuple]) -> Any:
        """Answer later requests with another engine. make: called in the thread, returns (engine, version, result).

        Texts that run end with the present engine, and those that come meanwhile wait for the new one. Returns `result`.
        """
        done = self.loop.create_future()
        self._commands.put(partial(setattr, self, "_replacement", (make, done)))
        return await done

    async def close(self) -> None:
        """Stop. Texts that run are lost: cancel or await them before."""
        self._commands.put(partial(setattr, self, "_open", False))
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._open:
                self._obey(wait=not self.engine.busy and not self._replacement)
                if self._replacement and not self.engine.busy:
                    self._replace()
                else:  # also if there is nothing to do: other ranks wait for a message now and then
                    self._sort(self.engine.step())
            self.engine.close()
        except BaseException as error:
            self._call(self._fail, error)

    def _obey(self, wait: bool) -> None:
        try:
            while self._open:
                self._commands.get(wait, IDLE)()
                wait = False
        except queue.Empty:
            pass

    def _add(self, job: TextJob) -> None:
        if self._replacement and not job.abandoned:
            self._held.append(job)
            return
        numbers: list[int] = []
        try:
            for request in job.requests if not job.abandoned else ():
                numbers.append(self.engine.add(request))
        except Failure as error:
            for number in numbers:
                self.engine.cancel(number)
            self._call(self._refuse, job, error)
            return
        job.numbers, job.version = numbers, self.version
        self._owners.update({number: (job, place) for place, number in enumerate(numbers)})
        self._call(self._accept, job)

    def _cancel(self, job: TextJob, place: int) -> None:
        if not job.numbers:  # it is held, or was refused
            return
        number = job.numbers[place]
        if self._owners.pop(number, None):
            self.engine.cancel(number)
            self._call(self._deliver, [(job, place, Output(number, finish="cancelled"))], self.engine.stats())

    def _sort(self, outputs: list[Output]) -> None:
        found = []
        for output in outputs:
            owner = self._owners.get(output.request)
            if owner:
                found.append((*owner, output))
                if output.finish:
                    del self._owners[output.request]
        self._call(self._deliver, found, self.engine.stats())

    def _replace(self) -> None:
        make, done = self._replacement
        self.engine.close()
        self.engine, self.version, result = make()
        self._replacement = None
        held, self._held = self._held, deque()
        for job in held:
            self._add(job)
        self._call(_set, done, result)

    def _call(self, function: Callable, *args) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed: nobody waits
            pass

    # -- called by the thread, in the loop -----------------------------------------------------------------------------

    def _accept(self, job: TextJob) -> None:
        if not job.numbers:
            self._drop(job)
        _set(job.added, None)

    def _refuse(self, job: TextJob, error: Failure) -> None:
        self._drop(job)
        if not job.added.done():
            job.added.set_exception(error)

    def _drop(self, job: TextJob) -> None:
        self.in_flight -= sum(job.requests[place].texts for place in job.running)
        job.running.clear()
        self._jobs.discard(job)

    def _deliver(self, found: list[tuple[TextJob, int, Output]], stats) -> None:
        now = time.monotonic()
        for job, place, output in found:
            if output.new is not None:
                self.meter.token(now - (job.last[place] or job.began), first=job.last[place] is None)
                job.last[place] = now
            if output.finish:
                job.running.discard(place)
                self.in_flight -= job.requests[place].texts
                self._seconds += 0.1 * (now - job.began - self._seconds)
                self.meter.ended(output.finish, now - job.began)
                if not job.running:
                    self._jobs.discard(job)
            job.put((place, output))
        self.meter.look(stats)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        refusal = ApiError(500, "the model has failed; the server is stopping", code="engine_failed")
        for job in list(self._jobs):
            job.end(refusal)
        self.on_failure(error)


def _set(future: asyncio.Future, result: Any) -> None:
    if not future.done():
        future.set_result(result)
