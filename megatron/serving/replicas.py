# SPDX-License-Identifier: Apache-2.0
"""Replicas of a server: processes of this machine that are started again when they end, or servers elsewhere.

replicas = Replicas([Child(command, number=0), Child(command, number=1)])
async with replicas.watched():
    replica = replicas.best()        # the ready one with the fewest requests; None if there is none
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Optional

LOOK = 1.0  # seconds between two checks of a replica's health
PATIENCE = 3  # checks in a row that fail until a replica is given up
ANSWER = 10.0  # seconds for the answer to a check
PAUSES = (0.5, 30.0)  # seconds until a replica that has ended is started again: at first, and at most
log = logging.getLogger("megatron.serving")


class Replica:
    """A server at an address. name: for the metrics and the log; several: it stands for more than one."""

    def __init__(self, name: str, url: str = "", several: bool = False):
        self.name, self.url, self.several = name, url, several
        self.ready = False
        self.requests = 0  # that were sent to it and are not answered
        self.turn = 0
        self._failed = 0

    async def watch(self, session) -> None:
        """Check its health, again and again."""
        while True:
            await self._look(session)
            await asyncio.sleep(LOOK)

    async def _look(self, session) -> None:
        was, self._failed = self.ready, 0 if await self._healthy(session) else self._failed + 1
        if self._failed == 0:
            self.ready = True
        elif self._failed >= PATIENCE:
            self.ready = False
        if was != self.ready:
            log.warning("replica %s %s: %s", self.name, self.url, "answers" if self.ready else "does not answer")

    async def _healthy(self, session) -> bool:
        import aiohttp

        try:
            async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(ANSWER)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return False

    async def close(self) -> None:
        """End it, if it was started here."""


class Child(Replica):
    """A server that is started here, with a command that prints its address, and again whenever it ends."""

    def __init__(self, command: Sequence[str], name: str, environment: dict[str, str]):
        super().__init__(name)
        self.command, self.environment = command, environment
        self.process: Optional[asyncio.subprocess.Process] = None

    async def watch(self, session) -> None:
        pause, most = PAUSES
        while True:
            began = time.monotonic()
            await self._start()
            ended = asyncio.create_task(self.process.wait())
            while not ended.done():
                if self.url:
                    await self._look(session)
                    if self._failed >= PATIENCE:
                        with contextlib.suppress(ProcessLookupError):
                            self.process.kill()
                await asyncio.wait({ended}, timeout=LOOK)
            self.ready, self.url, self._failed = False, "", 0
            pause = PAUSES[0] if time.monotonic() - began > most else min(most, 2 * pause)
            log.warning("replica %s has ended with %s; it starts again", self.name, self.process.returncode)
            await asyncio.sleep(pause)

    async def _start(self) -> None:
        environment = os.environ | self.environment
        # In a group of its own: a Ctrl-C in the terminal is for the front, which ends its replicas when they are idle.
        self.process = await asyncio.create_subprocess_exec(
            *self.command, stdout=asyncio.subprocess.PIPE, env=environment, start_new_session=True
        )
        self._reading = asyncio.create_task(self._read(self.process.stdout))

    async def _read(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            if found := re.search(rb"(http://[0-9.]+:[0-9]+)/v1", line):
                self.url = found[1].decode()

    async def close(self) -> None:
        if self.process and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), ANSWER)
            except asyncio.TimeoutError:
                self.process.kill()
                await self.process.wait()


class Replicas:
    """Some replicas, of which the least busy one is chosen."""

    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = list(replicas)
        self._turns = itertools.count(1)

    def best(self, without: Collection[Replica] = ()) -> Optional[Replica]:
        """The ready replica with the fewest requests; of several, the one whose last turn is longest ago."""
        found = [replica for replica in self.replicas if replica.ready and replica not in without]
        if not found:
            return None
        best = min(found, key=lambda replica: (replica.requests, replica.turn))
        best.turn = next(self._turns)
        return best

    @contextlib.asynccontextmanager
    async def watched(self, session) -> AsyncIterator[None]:
        """Start them and check their health; end them at the end."""
        tasks = [asyncio.create_task(replica.watch(session)) for replica in self.replicas]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(replica.close() for replica in self.replicas))
