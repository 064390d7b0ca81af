# SPDX-License-Identifier: Apache-2.0
"""What the web servers of this suite share: a socket that listens, headers of every response, and the head of a page."""

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import SettingsError, UsageError

# Everything comes from the server itself; a page adds what else it needs.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


COMMON = Path(__file__).parent / "web_page"  # head.html, page.css, icon.svg


@dataclass(frozen=True)
class PageHead:
    """The words of a page's head. files: its own style sheets and scripts; theme_key, help_key: keys of its buttons."""

    title: str
    heading: str
    files: Sequence[str]
    theme_key: str
    help_key: str

    def page(self, body: Path) -> str:
        """The page: the common head with these words, and the rest of the page."""
        tags = [
            f'<script src="{name}" defer></script>'
            if name.endswith(".js")
            else f'<link rel="stylesheet" href="{name}">'
            for name in self.files
        ]
        head = (COMMON / "head.html").read_text(encoding="utf-8")
        return head.format(**vars(self) | dict(files="\n".join(tags))) + body.read_text(encoding="utf-8")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises SettingsError if the port is taken, or the address is not of this machine."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OverflowError:
        raise UsageError(f"--port {port}: ports are from 1 to 65535; 0 chooses a free one") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"--port {port}: another process listens on this port of {host}",
                do=f"give another one, or 0 for a free one; ss -ltnp 'sport = :{port}' shows the process",
            ) from None
        do = "--host 127.0.0.1 for this machine alone, 0.0.0.0 for all its networks"
        if error.errno == errno.EACCES:
            do = "ports below 1024 are those of the system: give a larger one"
        raise SettingsError(
            f"--host {host} --port {port}: cannot listen there", error.strerror or str(error), do
        ) from None


def local_names(local: bool) -> list[str]:
    """Names that a server answers to. local: those of this machine, so that no web site can read it through a browser."""
    # "[": an address of IPv6, which the middleware cuts at its first colon
    return ["localhost", "127.0.0.1", "[", "testserver"] if local else ["*"]


class Headers:
    """Middleware that adds headers to every response, which forbid other origins and caching. policy: more of POLICY."""

    def __init__(self, app, policy: str = ""):
        self.app = app
        own = {
            "content-security-policy": "; ".join(filter(None, (POLICY, policy))),
            "cache-control": "no-cache",
            "x-content-type-options": "nosniff",
        }
        self.headers = [(name.encode(), value.encode()) for name, value in own.items()]

    async def __call__(self, scope, receive, send):
        async def with_headers(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self.headers]
            await send(message)

        await self.app(scope, receive, with_headers)
