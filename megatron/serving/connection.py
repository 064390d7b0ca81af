# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP connection, with an end for clients that send no whole request, and errors in OpenAI's form."""

import asyncio
from typing import Optional

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.serving.errors import ApiError

SLOW = 20.0  # seconds for a client to send the head of a request


class Connection(H11Protocol):
    _slow: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc) -> None:
        if self._slow:
            self._slow.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Close the connection if the head of a request takes too long: uvicorn waits for it forever."""
        silent = self.cycle is None and self.conn.their_state is h11.IDLE
        if silent or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]):
            self._slow = self._slow or self.loop.call_later(SLOW, self.transport.close)
        elif self._slow:
            self._slow.cancel()
            self._slow = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all gets an answer of the usual form."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of an answer
            self.transport.close()
            return
        body = orjson.dumps(ApiError(400, "this is not a valid HTTP request", code="invalid_http").body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()
