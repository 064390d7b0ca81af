# SPDX-License-Identifier: Apache-2.0
"""The web server: routes, authentication, errors, log, and a stop that lets running answers end.

serve(Service({"345M": model}, metrics, ServeLimits(), keys=()), listen("127.0.0.1", 8000))     # until SIGTERM or Ctrl-C
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from megatron import __version__
from megatron.serving.errors import ApiError, ClientLeft
from megatron.serving.metrics import ServeMetrics
from megatron.serving.served_model import ServedModel
from megatron.serving.settings import ServeLimits
from megatron.telemetry.web import COMMON, Headers, PageHead, local_names

PAGE = Path(__file__).parent / "page"
HEAD = PageHead(
    "Model server", "Model server", (PAGE / "serve.css", PAGE / "serve.js"), theme_key="Alt+D", help_key="Alt+K"
)
FILES = {f"/{file.name}": file for file in (PAGE / "serve.css", PAGE / "serve.js")}
FILES |= {f"/{name}": COMMON / name for name in ("page.css", "icon.svg")}
OPEN = {"/", *FILES, "/health", "/ping"}  # for everybody, also without a key
IDLE = 20.0  # seconds until a connection without a whole request is closed
CLIENT_LEFT = 499  # for the log and the metrics; no client sees it
log = logging.getLogger("megatron.serving")


@dataclass
class Service:
    """What is served. keys: one of them has to be sent, if there are any; background: runs as long as the server does."""

    models: Mapping[str, ServedModel]
    metrics: ServeMetrics
    limits: ServeLimits
    keys: Sequence[str] = ()
    background: Sequence[Callable[[], AsyncIterator[None]]] = ()
    stopping: bool = False
    failure: Optional[BaseException] = None
    stop: Callable[[], None] = field(default=lambda: None)

    def fail(self, error: BaseException) -> None:
        """Stop, because an engine has ended with an error."""
        self.failure = error
        self.stop()


def app(service: Service, local: bool = True):
    """The application. local: only answer to names of this machine."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
    from starlette.routing import Route

    from megatron.serving.megatron_api import MegatronApi
    from megatron.serving.openai_api import OpenAI
    from megatron.serving.tokens_api import TokensApi

    openai = OpenAI(service.models, service.limits)
    megatron, tokens = MegatronApi(service.models, service.limits), TokensApi(service.models, service.limits)

    async def health(request):
        return _health(service)

    async def version(request):
        return JSONResponse(dict(version=__version__))

    async def metrics(request):
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    whole = HEAD.page((PAGE / "body.html").read_text(encoding="utf-8"))

    async def page(request):
        return FileResponse(FILES[request.url.path]) if request.url.path in FILES else HTMLResponse(whole)

    routes = [
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/completions", openai.completions, methods=["POST"]),  # as Megatron-LM's server names it
        Route("/v1/chat/completions", openai.chat, methods=["POST"]),
        Route("/v1/models", openai.models),
        Route("/v1/models/{name:path}", openai.model),
        Route("/api", megatron.generate, methods=["PUT"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/version", version),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/metrics", metrics),
        *(Route(path, page) for path in ("/", *FILES)),
    ]
    known = [route.path for route in routes]
    handlers = {ApiError: refused, HTTPException: no_route, ClientLeft: left, Exception: failed}
    middleware = [
        Middleware(Log, metrics=service.metrics, paths=known),
        Middleware(Headers),
        Middleware(Hosts, names=local_names(local)),
        Middleware(Keys, keys=service.keys),
    ]
    made = Starlette(
        routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lambda app: _running(service)
    )
    made.router.redirect_slashes = False  # to a client of an API a wrong path is an error
    return made


@contextlib.asynccontextmanager
async def _running(service: Service) -> AsyncIterator[None]:
    for model in service.models.values():
        model.thread.on_failure = service.fail
        model.thread.start()
    tasks = [asyncio.create_task(work()) for work in service.background]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in service.models.values():
            await model.thread.close()


def _health(service: Service):
    from starlette.responses import JSONResponse

    state = "failed" if service.failure else "stopping" if service.stopping else "ok"
    texts = {name: model.thread.in_flight for name, model in service.models.items()}
    return JSONResponse(dict(status=state, texts=texts), 200 if state == "ok" else 503)


# -- errors ------------------------------------------------------------------------------------------------------------


async def refused(request, error: ApiError):
    from starlette.responses import JSONResponse

    body = error.body()
    if request.url.path == "/api":  # where Megatron-LM's client looks for it
        body["message"] = error.message
    return JSONResponse(body, error.status, headers=error.headers)


async def no_route(request, error):
    path = request.url.path[:200]
    instead = f"; it takes {error.headers['Allow']}" if error.headers and "Allow" in error.headers else ""
    words = {404: f"there is nothing at {path}", 405: f"{request.method[:20]} is not possible at {path}{instead}"}
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = words.get(error.status_code, str(error.detail))
    more = dict(code=codes.get(error.status_code), headers=error.headers)
    return await refused(request, ApiError(error.status_code, message, **more))


async def left(request, error):
    from starlette.responses import Response

    request.scope["left"] = True
    return Response(status_code=CLIENT_LEFT)


async def failed(request, error):
    return await refused(request, ApiError(500, "the server failed", code="internal_error"))


# -- middleware --------------------------------------------------------------------------------------------------------


class Hosts:
    """Refuses requests to names of other machines: through a browser, a web site could use a server on this one.

    names: those that are answered, as `telemetry.web.local_names` has them
    """

    def __init__(self, app, names: Sequence[str]):
        self.app, self.names = app, set(names)

    async def __call__(self, scope, receive, send):
        sent = next((value for name, value in scope.get("headers", ()) if name == b"host"), b"").decode("latin-1")
        if scope["type"] == "http" and not self.names & {"*", sent.partition(":")[0].lower()}:
            from starlette.responses import JSONResponse

            what = f"this server answers to localhost and 127.0.0.1, not to {sent[:200]!r}; start it with --host"
            answer = JSONResponse(ApiError(400, what, code="invalid_host").body(), 400)
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)


class Keys:
    """Refuses requests without one of the keys. All keys are compared, each in constant time."""

    def __init__(self, app, keys: Sequence[str]):
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and self.keys and scope["path"] not in OPEN and not self._has_key(scope):
            from starlette.responses import JSONResponse

            error = ApiError(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            answer = JSONResponse(error.body(), 401, headers={"www-authenticate": "Bearer"})
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _has_key(self, scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = sent.partition(b" ")
        found = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        return kind.lower() == b"bearer" and any(found)


class Log:
    """Counts requests, and logs a line for each. Bodies are not logged."""

    def __init__(self, app, metrics: ServeMetrics, paths: Sequence[str]):
        self.app, self.metrics, self.paths = app, metrics, set(paths)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500  # unless it is answered

        async def watch(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            if scope.get("left"):
                status = CLIENT_LEFT
                self.metrics.left.inc()
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            label = scope.get("label")
            who = f" user={json.dumps(label)}" if label else ""
            seconds = time.monotonic() - began
            # Asked for every second by whoever watches the server
            healthy = scope["path"] == "/health" and status == 200
            if not healthy:
                log.info(
                    "%s %s %d %.3f s%s", scope["method"][:20], json.dumps(scope["path"][:200]), status, seconds, who
                )


# -- the process -------------------------------------------------------------------------------------------------------


def serve(service: Service, listener: socket.socket) -> None:
    """Answer requests until SIGTERM or Ctrl-C; then let running answers end. Raises the error of a failed engine."""

    def stopping() -> None:
        service.stopping = True

    def late() -> None:
        for model in service.models.values():
            model.thread.cancel_all(ApiError(503, "the server is stopping", code="stopping"))

    server = web_server(app(service, is_local(listener)), service.limits, stopping, late)
    service.stop = lambda: setattr(server, "should_exit", True)
    server.run(sockets=[listener])
    if service.failure:
        raise service.failure


def is_local(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def web_server(
    application,
    limits: ServeLimits,
    stopping: Callable[[], None] = lambda: None,
    late: Callable[[], None] = lambda: None,
):
    """uvicorn's server of an application. stopping: called when it is to stop; late: after --stop-timeout."""
    import uvicorn

    from megatron.serving.connection import Connection

    class Server(uvicorn.Server):
        def handle_exit(self, number, frame):
            """uvicorn's would raise the signal again at the end: a server that was asked to stop is done."""
            if self.should_exit:  # the second signal
                self.force_exit = True
            self.should_exit = True

        async def shutdown(self, sockets=None):
            stopping()
            timer = asyncio.get_running_loop().call_later(limits.stop_timeout, late)
            try:
                await super().shutdown(sockets)
            finally:
                timer.cancel()

    config = uvicorn.Config(
        application,
        http=Connection,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(IDLE),
        timeout_graceful_shutdown=int(limits.stop_timeout) + 5,
    )
    return Server(config)
