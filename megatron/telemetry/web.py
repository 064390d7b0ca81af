# SPDX-License-Identifier: Apache-2.0
"""What the web servers of this suite share: a socket that listens, headers of every response, and the head of a page."""

import errno
import html
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import SettingsError, UsageError
from megatron.telemetry.curves import data_url

# Everything comes from the server itself; a page adds what else it needs.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


COMMON = Path(__file__).parent / "web_page"  # head.html, page.css, facts.css, icon.svg


@dataclass(frozen=True)
class PageHead:
    """The words of a page's head. files: its own style sheets and scripts; theme_key, help_key: keys of its buttons."""

    title: str
    heading: str
    files: Sequence[Path]
    theme_key: str
    help_key: str

    def page(self, body: str) -> str:
        """The page: the common head with these words, and the rest of the page. Its files are loaded by name."""
        scripts, styles = self._files()
        tags = ['<link rel="icon" href="icon.svg" type="image/svg+xml">']
        tags += [f'<link rel="stylesheet" href="{path.name}">' for path in styles]
        return self._head(tags + [f'<script src="{path.name}" defer></script>' for path in scripts]) + body

    def whole(self, body: str) -> str:
        """The same page in one file. Scripts are at the end of the body."""
        scripts, styles = self._files()
        icon = data_url((COMMON / "icon.svg").read_text(encoding="utf-8"))
        tags = [
            f'<link rel="icon" href="{icon}">',
            *(f"<style>{path.read_text(encoding='utf-8')}</style>" for path in styles),
        ]
        text = "\n".join(f"<script>{path.read_text(encoding='utf-8')}</script>" for path in scripts)
        return self._head(tags) + body.replace("</body>", f"{text}\n</body>")

    def _files(self) -> tuple[list[Path], list[Path]]:
        """(scripts, style sheets)"""
        scripts = [path for path in self.files if path.suffix == ".js"]
        return scripts, [COMMON / "page.css", *(path for path in self.files if path.suffix == ".css")]

    def _head(self, tags: list[str]) -> str:
        head = (COMMON / "head.html").read_text(encoding="utf-8")
        words = dict(title=html.escape(self.title), heading=html.escape(self.heading), tags="\n".join(tags))
        return head.format(**vars(self) | words)


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
