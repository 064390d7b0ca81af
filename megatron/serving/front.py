# SPDX-License-Identifier: Apache-2.0
"""A front of several replicas: one address, the least busy replica for each request, another one if that fails.

A request that fails because its replica ends is sent to another one, with the same seed, so that the answer is the same.
Of a stream, what the client has is left out. So a client does not notice that a replica was killed.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import orjson
from yarl import URL

from megatron.serving.answers import EventStream, read_body, unless_gone
from megatron.serving.errors import ApiError, ClientLeft
from megatron.serving.replicas import Replica, Replicas
from megatron.serving.settings import ServeLimits

# path -> its parameter for a seed
SEEDED = {"/v1/completions": "seed", "/completions": "seed", "/v1/chat/completions": "seed", "/api": "random_seed"}
PASSED_ON = ("authorization", "content-type", "accept")  # headers of requests
KEPT = ("content-type", "content-security-policy", "cache-control", "x-content-type-options", "retry-after", "allow",
    "www-authenticate")  # headers of answers  # fmt: skip
AGAIN, PAUSE = 10, 0.5  # how often a replica that stands for several is asked, and seconds between
MOST_LOST = 6  # replicas that may end with a request; it may be the reason
WAIT = 60.0  # seconds that a request waits for a replica to be ready
ELSEWHERE = (429, 500, 503)  # answers after which another replica is asked
log = logging.getLogger("megatron.serving")


class Front:
    """Sends requests to replicas."""

    def __init__(self, replicas: Replicas, limits: ServeLimits):
        self.replicas, self.limits = replicas, limits
        self.session: Any = None

    @contextlib.asynccontextmanager
    async def running(self, app) -> AsyncIterator[None]:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self.session:
            async with self.replicas.watched(self.session):
                yield

    async def forward(self, request):
        """Answer with what a replica answers."""
        raw = await read_body(request, self.limits)
        body, raw = _seeded(request.url.path, raw)
        asked = Forwarded(request, raw)
        seconds = self.limits.request_timeout
        if not (isinstance(body, dict) and body.get("stream") is True and request.url.path in SEEDED):
            return await unless_gone(request.receive, self._whole(asked), seconds)
        found = await unless_gone(request.receive, self._opened(asked), seconds)
        if not isinstance(found, Open):
            return found
        asked.open = found
        return EventStream(self._events(asked), seconds, asked.release)

    async def _whole(self, asked: "Forwarded"):
        """The whole answer of the first replica that has one."""
        return await self._first(asked, self._read)

    async def _opened(self, asked: "Forwarded", failed: Sequence[Replica] = ()):
        """An open stream; or a whole answer, if it is a refusal."""
        return await self._first(asked, self._keep, failed)

    async def _first(self, asked: "Forwarded", take, failed: Sequence[Replica] = ()):
        """What `take` makes of the first answer that is neither lost nor a reason to ask another replica."""
        import aiohttp

        failed, refusal, asked_again = list(failed), None, 0
        while replica := await self._ready(failed, wait=refusal is None):
            found = Open(replica)
            try:
                found.answer = await self._send(asked.request, asked.raw, replica)
                taken = await take(found)
                if found.answer.status not in ELSEWHERE:
                    return taken
                refusal = taken
                if replica.several and found.answer.status != 429 and asked_again < AGAIN:
                    refusal, asked_again = None, asked_again + 1
                    found.close()
                    await asyncio.sleep(PAUSE)
                    continue
            except (aiohttp.ClientError, OSError) as error:
                replica.ready = False  # until its next check
                found.close()
                asked.lost(replica, error)
            except BaseException:
                found.close()
                raise
            found.close()
            failed.append(replica)
        return refusal

    async def _read(self, found: "Open"):
        response = _response(found.answer, await found.answer.read())
        found.close()
        return response

    async def _keep(self, found: "Open"):
        return found if found.answer.status == 200 else await self._read(found)

    async def _ready(self, failed: Sequence[Replica], wait: bool) -> Optional[Replica]:
        """A replica that has not failed; if all have, one that is started again meanwhile. None: do not wait."""
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT
        while not (replica := self.replicas.best(failed)):
            if not wait:
                return None
            if loop.time() > until:
                raise ApiError(503, "no replica is ready", code="no_replica", headers={"retry-after": "5"})
            await asyncio.sleep(0.1)
            failed = ()
        return replica

    async def _send(self, request, raw: bytes, replica: Replica):
        import aiohttp

        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url = replica.url + request.scope["raw_path"].decode("ascii")
        url += f"?{request.url.query}" if request.url.query else ""
        more = dict(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10), allow_redirects=False)
        return await self.session.request(request.method, URL(url, encoded=True), data=raw, headers=headers, **more)

    async def _events(self, asked: "Forwarded") -> AsyncIterator[Any]:
        """The events of a stream, which goes on with another replica if one fails."""
        import aiohttp

        sent: Counter = Counter()  # events of each text
        frame: dict[str, Any] = {}
        while True:
            again: Counter = Counter()
            try:
                async for event in _parsed(asked.open.answer):
                    if event == b"[DONE]":
                        yield event
                        return
                    if "error" in event:
                        raise Broken(event["error"].get("message"))
                    frame = frame or {name: event.get(name) for name in ("id", "created", "system_fingerprint")}
                    if event.get("system_fingerprint") != frame["system_fingerprint"]:
                        raise ApiError(503, "the text cannot go on: the weights have changed", code="weights_changed")
                    place = event["choices"][0]["index"] if event["choices"] else None
                    again[place] += 1
                    if again[place] > sent[place]:
                        sent[place] += 1
                        yield event | frame
                raise Broken("the stream ended early")
            except (aiohttp.ClientError, OSError, Broken) as error:
                replica = asked.open.replica
                asked.release()
                asked.lost(replica, error)
            found = await self._opened(asked, [replica])
            if not isinstance(found, Open):
                raise ApiError(503, "the text cannot go on: no other replica takes it", code="no_replica")
            asked.open = found

    async def health(self, request):
        from starlette.responses import JSONResponse

        states = {replica.name: "ok" if replica.ready else "not ready" for replica in self.replicas.replicas}
        ready = any(replica.ready for replica in self.replicas.replicas)
        return JSONResponse(dict(status="ok" if ready else "starting", replicas=states), 200 if ready else 503)

    async def metrics(self, request):
        """The metrics of all replicas, each with the name of its replica as a label."""
        from starlette.responses import Response

        texts = {}
        for replica in self.replicas.replicas:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                if replica.ready:
                    answer = await asyncio.wait_for(self._send(request, b"", replica), 10)
                    body = await answer.read()
                    if answer.status != 200:  # as without a key
                        return _response(answer, body)
                    texts[replica.name] = body.decode()
        return Response(merged(texts), media_type="text/plain; version=0.0.4")


class Broken(Exception):
    """A stream has no proper end."""


class Open:
    """An answer of a replica, which is busy with it until `close`."""

    def __init__(self, replica: Replica):
        self.replica, self.answer, self.closed = replica, None, False
        replica.requests += 1

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.replica.requests -= 1
            if self.answer is not None:
                self.answer.close()


@dataclass
class Forwarded:
    """A request, and the stream that answers it at present."""

    request: Any
    raw: bytes
    open: Optional[Open] = None
    losses: int = 0

    def lost(self, replica: Replica, error: BaseException) -> None:
        """Count a replica that did not answer to the end. Raises ApiError if there were many."""
        self.losses += 1
        log.warning("replica %s lost a request (%s): another one is asked", replica.name, type(error).__name__)
        if self.losses > MOST_LOST:
            raise ApiError(502, f"{self.losses} replicas have lost this request", code="lost")

    def release(self) -> None:
        if self.open:
            self.open.close()


def _seeded(path: str, raw: bytes) -> tuple[Any, bytes]:
    """(parsed body, body with a seed), so that another replica makes the same texts. A replica refuses what is no JSON."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None, raw
    name = SEEDED.get(path)
    if name and isinstance(body, dict) and body.get(name) in (None, -1):
        body[name] = secrets.randbits(43)
        return body, orjson.dumps(body)
    return body, raw


def _response(answer, body: bytes):
    from starlette.responses import Response

    headers = {name: answer.headers[name] for name in KEPT if name in answer.headers}
    return Response(body, answer.status, headers)


async def _parsed(answer) -> AsyncIterator[Any]:
    rest = b""
    async for part in answer.content.iter_any():
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            yield data if data == b"[DONE]" else orjson.loads(data)


def merged(texts: dict[str, str]) -> bytes:
    """Metrics of several replicas (name -> text) as one text."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Any] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, family)
            samples = [sample._replace(labels=sample.labels | dict(replica=name)) for sample in family.samples]
            whole.samples = samples if whole is family else whole.samples + samples

    class All:
        def collect(self):
            return iter(families.values())

    registry = CollectorRegistry()
    registry.register(All())
    return generate_latest(registry)


def front_app(front: Front, local: bool = True):
    """The application. local: only answer to names of this machine."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    from megatron.serving.server import Hosts, failed, left, no_route, refused
    from megatron.telemetry.web import local_names

    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    routes = [
        Route("/health", front.health),
        Route("/metrics", front.metrics),
        Route("/{path:path}", front.forward, methods=methods),
    ]
    handlers = {ApiError: refused, HTTPException: no_route, ClientLeft: left, Exception: failed}
    middleware = [Middleware(Hosts, names=local_names(local))]
    made = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=front.running)
    made.router.redirect_slashes = False
    return made
