# SPDX-License-Identifier: Apache-2.0
"""The thread of an engine: places are given back, refusals reach the caller, and engines are exchanged between texts."""

import asyncio

import pytest

from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.serving.engine_thread import EngineThread
from megatron.serving.errors import ApiError
from megatron.serving.metrics import ServeMetrics
from tests.serving.toy import LONGEST, ToyEngine, alone


def request(prompt: str, length: int = 20, seed: int = 1) -> Request:
    return Request(tuple(prompt.encode()), Sampling(tokens_to_generate=length, sampling_seed=seed))


def run(body, engine: ToyEngine, room: int = 8):
    """Run a coroutine function with a thread of an engine."""

    async def whole():
        thread = EngineThread(engine, room=room, version="one", meter=ServeMetrics().of("toy"))
        thread.start()
        try:
            await asyncio.wait_for(body(thread), 60)
        finally:
            await thread.close()
        assert thread.in_flight == 0 and not thread._jobs and not thread._owners

    asyncio.run(whole())


async def texts(job) -> list[list[int]]:
    found = [[] for _ in job.requests]
    async for place, output in job:
        if output.new is not None:
            found[place].append(output.new.token)
    return found


def test_a_refused_request_gives_its_places_back():
    async def body(thread):
        for _ in range(20):
            with pytest.raises(ApiError, match="too long; give a shorter one"):
                await thread.add([request("a"), request("x" * LONGEST)])
        assert thread.in_flight == 0
        assert await texts(await thread.add([request("a")])) == [alone(request("a"))]

    run(body, ToyEngine())


def test_a_task_that_is_cancelled_at_any_time_leaves_nothing():
    async def body(thread):
        async def ask(number: int):
            async with await thread.add([request(f"t{number}", 60, seed) for seed in range(2)]) as job:
                return await texts(job)

        for number in range(60):
            task = asyncio.create_task(ask(number))
            await asyncio.sleep(number % 7 * 0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while thread.in_flight:
            await asyncio.sleep(0.01)
        assert await ask(99) == [alone(request("t99", 60, seed)) for seed in range(2)]

    run(body, ToyEngine(pause=0.001))


class Second(ToyEngine):
    """Another model: it answers to the prompt in reverse."""

    def add(self, given):
        return super().add(Request(given.prompt[::-1], given.sampling))


def test_all_texts_end_also_those_that_wait_for_another_engine():
    async def body(thread):
        early = await thread.add([request("abc", 400)])
        exchange = asyncio.create_task(thread.replaced(lambda: (Second(), "two", None)))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(thread.add([request("abc", 400)]))
        await asyncio.sleep(0.01)
        thread.cancel_all(ApiError(503, "the server is stopping"))
        for waits in (late, texts(early)):
            with pytest.raises(ApiError, match="stopping"):
                await waits
        await exchange

    run(body, ToyEngine(pause=0.002))


def test_engines_are_exchanged_between_texts():
    """Running texts end with the first, later ones have the second, also those that came before it was there."""
    first = ToyEngine(pause=0.002)

    async def body(thread):
        early = await thread.add([request("abc", 80)])
        made = asyncio.Event()
        loop = asyncio.get_running_loop()

        def make():
            assert first.closed and not first.busy
            loop.call_soon_threadsafe(made.set)
            return Second(), "two", "result"

        exchange = asyncio.create_task(thread.replaced(make))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(thread.add([request("abc", 80)]))
        left = asyncio.create_task(thread.add([request("gone", 80)]))
        await asyncio.sleep(0.01)
        assert not made.is_set() and not late.done() and thread.in_flight == 3
        left.cancel()
        assert await texts(early) == [alone(request("abc", 80))] and early.version == "one"
        job = await late
        assert await exchange == "result" and job.version == "two"
        assert await texts(job) == [alone(request("cba", 80))]
        with pytest.raises(asyncio.CancelledError):
            await left

    run(body, first)
