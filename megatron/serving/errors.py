# SPDX-License-Identifier: Apache-2.0
"""Answers to requests that cannot be served, in OpenAI's form.

raise ApiError(400, "temperature: has to be 0 or more", param="temperature")
# HTTP 400 {"error": {"message": ..., "type": "invalid_request_error", "param": "temperature", "code": None}}
"""

from collections.abc import Mapping
from typing import Any, Optional

from megatron.errors import Failure

TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """A request that is not served. status: of HTTP; code: a short name of the problem, for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: Optional[str] = None,
        code: Optional[str] = None,
        headers: Optional[Mapping[str, str]] = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return dict(error=dict(message=self.message, type=kind, param=self.param, code=self.code))


class ClientLeft(Exception):
    """The client closed the connection before it had the whole answer."""


def in_one_line(failure: Failure) -> str:
    """The message of a failure, with its reason and advice."""
    return "; ".join(filter(None, (failure.what, failure.why, failure.do)))
