# SPDX-License-Identifier: Apache-2.0
"""The web server of the dashboard: its page, its values as JSON, and updates as server-sent events.

serve(Runs(["runs"]), listen("127.0.0.1", 8050))     # until Ctrl-C
"""

import asyncio
import contextlib
import ipaddress
import math
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Optional

import orjson

from megatron.telemetry.dashboard.page_files import PAGE, body, page_head
from megatron.telemetry.dashboard.runs import Runs, View
from megatron.telemetry.history import AXES
from megatron.telemetry.web import COMMON, Headers, local_names

HEAD = page_head("Runs", "Training runs")
EVERY = 1.0  # seconds between checks of the files
LOOK = 0.25  # seconds between checks of an open stream for changes
PING = 15.0  # seconds after which a stream without changes sends a comment: proxies close silent streams
JSON = "application/json"
WIDEST, LONGEST = 4000, 1 << 20  # pixels of a chart; steps of a running mean
# uPlot sets styles by script.
POLICY = "style-src 'self' 'unsafe-inline'; img-src 'self' data:"


def serve(runs: Runs, listener: socket.socket) -> None:
    """Answer requests until Ctrl-C."""
    import uvicorn

    local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    board = Board(runs)
    config = uvicorn.Config(app(board, local), log_level="warning", timeout_graceful_shutdown=5, lifespan="on")
    server = uvicorn.Server(config)
    board.stopping = lambda: server.should_exit
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def app(board: "Board", local: bool = True):
    """The application. local: only answer to names of this machine, so that no web site can read it through a browser."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import FileResponse, HTMLResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    answers = dict(
        runs=board.runs,
        charts=board.charts,
        events=board.events,
        ranks=board.ranks,
        experts=board.experts,
        pictures=board.pictures,
    )
    routes = [Route(f"/api/{name}", board.answer(ask)) for name, ask in answers.items()]
    page = HEAD.page(body())

    async def whole(request):
        return HTMLResponse(page)  # a new one each time: middleware changes its headers

    async def common(request):
        return FileResponse(COMMON / request.url.path.lstrip("/"))

    routes += [Route("/api/live", board.live), Route("/", whole)]
    routes += [Route(f"/{name}", common) for name in ("page.css", "icon.svg")]
    routes += [Mount("/", StaticFiles(directory=PAGE))]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=local_names(local)),
        Middleware(Headers, policy=POLICY),
    ]
    middleware += [Middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)]
    return Starlette(routes=routes, middleware=middleware, lifespan=board.watching)


class Board:
    """Reads the runs in the background, and answers from them. One thread at a time uses them.

    stopping: whether open streams should end
    """

    def __init__(self, runs: Runs, stopping: Callable[[], bool] = lambda: False):
        self.watched, self.stopping = runs, stopping

    @contextlib.asynccontextmanager
    async def watching(self, app) -> AsyncIterator[None]:
        """Keep reading as long as the server runs."""
        reader = asyncio.create_task(self._read())
        try:
            yield
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _read(self) -> None:
        from starlette.concurrency import run_in_threadpool

        while True:
            whole = await run_in_threadpool(self._refresh)
            await asyncio.sleep(EVERY if whole else 0.02)

    def _refresh(self) -> bool:
        """Read new lines. Returns whether all files were read to their end."""
        self.watched.refresh()
        return all(run.tail.share >= 1 or run.error for run in self.watched.runs.values())

    def answer(self, ask: Callable[[Any], Any]):
        """A route that answers with the value of `ask(query)` as JSON."""
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import Response

        async def route(request):
            try:
                return Response(await run_in_threadpool(self._json, ask, request.query_params), media_type=JSON)
            except BadQuery as error:
                return Response(orjson.dumps(dict(error=str(error))), 400, media_type=JSON)

        return route

    def _json(self, ask: Callable[[Any], Any], query=None) -> bytes:
        with self.watched.lock:
            return orjson.dumps(ask(query), option=orjson.OPT_SERIALIZE_NUMPY)

    def _state(self) -> tuple[int, bytes]:
        """(version, JSON) of the state of all runs."""
        with self.watched.lock:
            return self.watched.version, orjson.dumps(self.runs())

    # -- the routes ----------------------------------------------------------------------------------------------------

    def runs(self, query=None) -> dict[str, Any]:
        return dict(version=self.watched.version, runs=self.watched.summaries())

    def charts(self, query) -> dict[str, Any]:
        view = View(
            _axis(query),
            _between(query),
            int(min(WIDEST, max(50, _number(query, "width", 600)))),
            int(min(LONGEST, max(1, _number(query, "window", 1)))),
        )
        return dict(version=self.watched.version, charts=self.watched.charts(query.getlist("run"), view))

    def events(self, query) -> list[dict]:
        return self.watched.events(query.getlist("run"), _axis(query))

    def ranks(self, query) -> dict[str, Any]:
        return self.watched.ranks(query.get("run", ""), query.get("name", ""), _axis(query))

    def experts(self, query) -> dict[str, Any]:
        return self.watched.experts(query.get("run", ""), query.get("name", ""), _axis(query))

    def pictures(self, query) -> list[dict[str, str]]:
        return self.watched.pictures_of(query.get("run", ""))

    async def live(self, request):
        """A stream with the state of all runs, whenever one changes."""
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import StreamingResponse

        async def news() -> AsyncIterator[bytes]:
            while not self.stopping():
                (seen, state), quiet = await run_in_threadpool(self._state), 0.0
                yield b"data: " + state + b"\n\n"
                while self.watched.version == seen and not self.stopping():
                    await asyncio.sleep(LOOK)
                    quiet += LOOK
                    if quiet % PING == 0:
                        yield b": still here\n\n"

        return StreamingResponse(news(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


class BadQuery(ValueError):
    """A request with invalid parameters."""


def _axis(query) -> str:
    axis = query.get("axis", AXES[0])
    if axis not in AXES:
        raise BadQuery(f"axis={axis}: one of {', '.join(AXES)}")
    return axis


def _number(query, name: str, default: float) -> float:
    text = query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadQuery(f"{name}={text}: not a finite number")
    return value


def _between(query) -> Optional[tuple[float, float]]:
    if "from" not in query or "to" not in query:
        return None
    return _number(query, "from", 0.0), _number(query, "to", 0.0)
