# SPDX-License-Identifier: Apache-2.0
"""Fetch a page over HTTP, with limits on time, size, redirects and content types, robots.txt, and only the public network.

    async with Fetcher(Limits()) as fetcher:
        page = await fetcher.page("https://example.org/")       # Page, or Refused with the reason in a word

A server's statements are never trusted. The time limit applies from the request to the last byte, the size limit to the
unpacked bytes. Each redirect is checked like an address of the list. A connection uses the IP address that was checked to
be public, so a name cannot change in between.
"""

import asyncio
import ipaddress
import re
import socket
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Optional
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.resolver import ThreadedResolver
from protego import Protego

AGENT = "megatron-openwebtext/1.0"
TEXTS = ("text/html", "application/xhtml+xml", "text/plain")
PASSING = (408, 425, 429, 500, 502, 503, 504)  # status codes that may change later
ROBOTS_BYTES = 500 << 10  # of robots.txt to read (RFC 9309, 2.5)
ORIGINS = 20_000  # whose robots.txt are cached
DNS_AGE = 300  # seconds for which the address of a name is cached


class Refused(Exception):
    """A page that was not fetched. reason: one word; again: a later try may succeed; wait: seconds its server asks for."""

    def __init__(self, reason: str, again: bool = False, wait: Optional[float] = None, status: int = 0):
        super().__init__(reason)
        self.reason, self.again, self.wait, self.status = reason, again, wait, status


class NotAsked(Refused):
    """A page that is refused without a request, so no pause for its server is necessary."""


@dataclass(frozen=True)
class Limits:
    """Limits for fetching a page. Times in seconds."""

    timeout: float = 60.0  # from the first request for a page to its last byte, redirects included
    max_bytes: int = 10 << 20  # of a page, unpacked
    redirects: int = 5
    agent: str = AGENT
    robots: bool = True
    allow_private: bool = False  # addresses of this machine and its networks: for tests
    connections: int = 10


@dataclass(frozen=True)
class Page:
    """A response: its bytes, unpacked, and the server's description of them. url: the end of the redirects."""

    url: str
    status: int
    body: bytes
    content_type: str
    charset: Optional[str]


class Fetcher:
    """Fetches pages; keeps connections, and the rules of each server's robots.txt."""

    def __init__(self, limits: Limits):
        self._limits, self._robots = limits, OrderedDict()

    async def __aenter__(self) -> "Fetcher":
        connector = aiohttp.TCPConnector(
            limit=self._limits.connections,
            resolver=_PublicResolver(self._limits.allow_private),
            ttl_dns_cache=DNS_AGE,
            keepalive_timeout=5,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,  # unpacked here, so that the size of a bomb is limited
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(20, self._limits.timeout)),
            headers={
                "User-Agent": self._limits.agent,
                "Accept": "text/html,application/xhtml+xml,text/plain;q=0.8",
                "Accept-Encoding": "gzip, deflate",
            },
        )
        return self

    async def __aexit__(self, *of_error) -> None:
        await self._session.close()

    async def page(self, url: str) -> Page:
        """The page of an address. Raises Refused."""
        robots = self._may_be_fetched if self._limits.robots else None
        return await self._timed(self._get(url, self._limits.max_bytes, robots))

    async def delay(self, url: str) -> float:
        """Seconds between two requests that the server's robots.txt asks for; 0 where it was not read or says nothing."""
        known = self._robots.get(_origin(url))
        if known is None or not known.done() or known.exception():
            return 0.0
        return float(known.result().crawl_delay(self._limits.agent) or 0)

    async def _timed(self, request):
        try:
            return await asyncio.wait_for(request, self._limits.timeout)
        except (asyncio.TimeoutError, TimeoutError):
            raise Refused("timeout", again=True) from None

    async def _get(self, url: str, most: int, check: Optional[Callable], cut: bool = False) -> Page:
        """Follow redirects to a page. check: awaited with each address of the way; cut: what is too long is cut off."""
        met = set()
        for _ in range(self._limits.redirects + 1):
            try:
                url = self._acceptable(url)
                if check is not None:
                    await check(url)
            except NotAsked as refused:
                raise Refused(refused.reason) if met else refused from None
            if url in met:
                raise Refused("redirect_loop")
            met.add(url)
            answer = await self._one(url, most, cut)
            if isinstance(answer, Page):
                return answer
            url = answer
        raise Refused("too_many_redirects")

    def _acceptable(self, url: str) -> str:
        """The address without its fragment. Raises Refused for other addresses than those of the public web."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise NotAsked("bad_url") from None
        if parts.scheme not in ("http", "https"):
            raise NotAsked("scheme")
        if not host or port == 0 or parts.username is not None:
            raise NotAsked("bad_url")
        if (":" in host or re.fullmatch(r"[\d.]+", host)) and not self._limits.allow_private:
            try:
                address = ipaddress.ip_address(host)
            except ValueError:  # 2130706433 and 127.1, which the system's own resolver takes for 127.0.0.1
                raise NotAsked("bad_url") from None
            if not is_public(address):
                raise NotAsked("private_address")
        return url.split("#")[0]

    async def _one(self, url: str, most: int, cut: bool) -> Page | str:
        """One request: the page, or the address that it redirects to."""
        try:
            async with self._session.get(url, allow_redirects=False) as answer:
                if answer.status in (301, 302, 303, 307, 308):
                    answer.close()
                    return urljoin(url, answer.headers.get("Location") or _refuse("redirect_to_nowhere"))
                if answer.status != 200:
                    answer.close()
                    again, wait = answer.status in PASSING, retry_after(answer.headers.get("Retry-After"))
                    raise Refused(f"http_{answer.status}", again, wait, answer.status)
                if answer.content_type not in TEXTS and "Content-Type" in answer.headers:
                    answer.close()
                    raise Refused("content_type")
                body = await _read(answer, most, cut)
                return Page(url, answer.status, body, answer.content_type, answer.charset)
        except aiohttp.ClientSSLError:
            raise Refused("tls") from None
        except aiohttp.ClientConnectorDNSError:
            raise Refused("dns", again=True) from None
        except aiohttp.InvalidURL:
            raise Refused("bad_url") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError):
            raise Refused("connection", again=True) from None
        except (aiohttp.ClientError, ValueError):  # no HTTP, or header lines without end
            raise Refused("bad_answer") from None

    # ---- robots.txt ----------------------------------------------------------------------------------------------------

    async def _may_be_fetched(self, url: str) -> None:
        """Raise Refused unless robots.txt of its server lets us."""
        known = self._robots.get(_origin(url))
        kind = NotAsked if known is not None and known.done() else Refused  # robots.txt is a request, too
        if not (await self._rules(_origin(url))).can_fetch(url, self._limits.agent):
            raise kind("robots")

    async def _rules(self, origin: str) -> Protego:
        """The rules of a server's robots.txt, read once. Raises Refused if they cannot be read now (RFC 9309, 2.3.1)."""
        rules = self._robots.get(origin)
        if rules is None:
            rules = self._robots[origin] = asyncio.ensure_future(self._read_rules(origin))
            rules.add_done_callback(lambda done: done.cancelled() or done.exception())  # no task may be waiting by then
            if len(self._robots) > ORIGINS:
                self._robots.popitem(last=False)
        try:
            return await asyncio.shield(rules)
        except Refused:
            if self._robots.get(origin) is rules:
                del self._robots[origin]  # request it again
            raise

    async def _read_rules(self, origin: str) -> Protego:
        try:
            page = await self._timed(self._get(f"{origin}/robots.txt", ROBOTS_BYTES, None, cut=True))
            text = page.body.decode("utf-8", errors="replace")
        except Refused as refused:
            if refused.again:
                reason = "robots_unreachable" if refused.status else refused.reason
                raise Refused(reason, True, refused.wait, refused.status) from None
            text = ""  # no robots.txt: everything may be fetched
        return Protego.parse(text)


def _refuse(reason: str):
    raise Refused(reason)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address belongs to the public internet, and is not mapped to another one.

    >>> [is_public(ipaddress.ip_address(one)) for one in ("8.8.8.8", "10.0.0.1", "169.254.169.254", "64:ff9b::a00:1")]
    [True, False, False, False]
    """
    if address.version == 6:
        stands_for = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if stands_for or address in ipaddress.ip_network("64:ff9b::/96"):
            return False
    return address.is_global and not address.is_multicast


class _PublicResolver(AbstractResolver):
    """Resolves names, only to addresses of the public internet."""

    def __init__(self, allow_private: bool):
        self._inner, self._allow_private = ThreadedResolver(), allow_private

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list:
        found = await self._inner.resolve(host, port, family)
        good = [one for one in found if self._allow_private or is_public(ipaddress.ip_address(one["host"]))]
        if found and not good:
            raise Refused("private_address")
        return good

    async def close(self) -> None:
        await self._inner.close()


def retry_after(text: Optional[str], now: Optional[float] = None) -> Optional[float]:
    """Seconds that a server asks to wait: `Retry-After` as a number or a date. None: not given.

    >>> retry_after("120"), retry_after("Thu, 01 Jan 1970 00:02:00 GMT", now=100), retry_after("soon")
    (120.0, 20.0, None)
    """
    if text and text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text or "").timestamp() - (time.time() if now is None else now))
    except (ValueError, TypeError, OverflowError):
        return None


async def _read(answer: aiohttp.ClientResponse, most: int, cut: bool) -> bytes:
    """The unpacked body. Raises Refused if it is longer than `most` bytes, unless it may be cut, or is damaged."""
    unpack = _unpacker(answer.headers.get("Content-Encoding", "").strip().lower())
    pieces, size = [], 0
    async for data in answer.content.iter_chunked(1 << 16):
        piece = unpack(data, most + 1 - size)
        pieces.append(piece)
        size += len(piece)
        if size > most:
            answer.close()
            if cut:
                return b"".join(pieces)[:most]
            raise Refused("too_large")
    unpack(None, 0)
    return b"".join(pieces)


def _unpacker(encoding: str) -> Callable[[Optional[bytes], int], bytes]:
    """(packed bytes, most) -> at most `most` unpacked bytes; None marks the end. Raises Refused for damaged data."""
    if encoding in ("", "identity"):
        return lambda data, most: (data or b"")[:most]
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise Refused("content_encoding")
    engine = None

    def unpack(data: Optional[bytes], most: int) -> bytes:
        nonlocal engine
        if data is None:
            if engine is not None and not engine.eof:
                raise Refused("broken_packing")
            return b""
        if engine is None:
            zlib_header = data[0] & 15 == 8 and len(data) > 1 and (data[0] * 256 + data[1]) % 31 == 0
            engine = zlib.decompressobj(47 if encoding != "deflate" or zlib_header else -15)
        try:
            return engine.decompress(data, most) if not engine.eof and most > 0 else b""
        except zlib.error:
            raise Refused("broken_packing") from None

    return unpack
