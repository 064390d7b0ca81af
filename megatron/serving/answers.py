# SPDX-License-Identifier: Apache-2.0
"""Read JSON bodies, and send answers to clients that may leave, be slow, or wait for too long."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import orjson

from megatron.serving.errors import ApiError, ClientLeft
from megatron.serving.settings import ServeLimits

log = logging.getLogger("megatron.serving")
Result = TypeVar("Result")


async def read_json(request, limits: ServeLimits) -> Any:
    """The JSON value in the body of a request. Raises ApiError if there is none."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # Browsers let any web site post other types to a server on this machine, without asking it.
        raise ApiError(415, f"content-type: has to be application/json, not {kind or 'empty'}", code="content_type")
    try:
        return orjson.loads(await read_body(request, limits))
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


async def read_body(request, limits: ServeLimits) -> bytes:
    """The body of a request. Raises ApiError if it is too long, or does not arrive."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.max_body_bytes:
        raise _too_long(limits)
    try:
        return await asyncio.wait_for(_body(request, limits), limits.body_timeout)
    except asyncio.TimeoutError:
        what = f"the body did not arrive within {limits.body_timeout:g} seconds"
        raise ApiError(408, what, code="timeout", headers={"connection": "close"}) from None


async def _body(request, limits: ServeLimits) -> bytes:
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limits.max_body_bytes:
                raise _too_long(limits)
    except ClientDisconnect:
        raise ClientLeft from None
    return bytes(body)


def _too_long(limits: ServeLimits) -> ApiError:
    what = f"the body has more than {limits.max_body_bytes} bytes"
    return ApiError(413, what, code="body_too_long", headers={"connection": "close"})


async def unless_gone(receive, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
    """The result of `work`. It is cancelled if the client leaves (ClientLeft), or after some seconds (ApiError)."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientLeft
        raise ApiError(504, f"there was no whole answer after {seconds:g} seconds", code="timeout")
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events. Errors after its beginning are events, too, as OpenAI's clients expect.

    close: called at the end, also if no event was ever asked for
    """

    def __init__(self, events: AsyncIterator[Any], seconds: float, close: Callable[[], None]):
        self.events, self.seconds, self.close = events, seconds, close

    async def __call__(self, scope, receive, send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        try:
            await send(dict(type="http.response.start", status=200, headers=headers))
            await unless_gone(receive, self._send(send), self.seconds)
        except ApiError as error:
            await self._event(send, error.body())
        except ClientLeft:
            scope["left"] = True
            return
        except Exception:
            log.exception("an answer failed")
            await self._event(send, ApiError(500, "the server failed", code="internal_error").body())
        finally:
            await self.events.aclose()
            self.close()
        await send(dict(type="http.response.body", body=b"", more_body=False))

    async def _send(self, send) -> None:
        async for event in self.events:
            await self._event(send, event)
            await asyncio.sleep(0)  # other clients' turn; and this one may have left

    async def _event(self, send, event: Any) -> None:
        data = event if isinstance(event, bytes) else orjson.dumps(event)
        await send(dict(type="http.response.body", body=b"data: " + data + b"\n\n", more_body=True))
