# SPDX-License-Identifier: Apache-2.0
"""Convert the bytes of a page to text, in separate processes: a page that crashes one of them only loses itself.

newspaper     the article, without menus and comments, by resiliparse: the library newspaper is no longer maintained
trafilatura   the article by trafilatura: slower, more careful
bs4           the texts of paragraphs, as in the original's scraper of this name
raw           the page as it is, decoded
"""

import asyncio
import contextlib
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Optional

from megatron.corpus.openwebtext.fetch import Refused
from megatron.corpus.processes import end, process_pool
from megatron.errors import MissingPackage

SCRAPERS = dict(newspaper="resiliparse", trafilatura="trafilatura", bs4="lxml", raw="resiliparse")  # -> its packages
SECONDS = 30  # limit for a page
MEMORY = 4 << 30  # bytes of address space of a process


def scrape(body: bytes, content_type: str, charset: Optional[str], scraper: str) -> str:
    """The text of a page, one line per paragraph; "" if there is none."""
    text = decode(body, charset)
    if scraper != "raw" and content_type != "text/plain":
        text = dict(newspaper=_main_content, trafilatura=_trafilatura, bs4=_paragraphs)[scraper](text)
    text = text.replace("\0", "").encode("utf-8", "replace").decode()  # &#xD800; is half a character
    return text if scraper == "raw" else re.sub(r"\n{3,}", "\n\n", text).strip()


def decode(body: bytes, charset: Optional[str]) -> str:
    """Decode bytes by their byte order mark, the server's charset, the page's own, or the most probable one.

    Bytes that are invalid in that charset become U+FFFD.
    """
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    for mark, name in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if body.startswith(mark):
            return body[len(mark) :].decode(name, errors="replace")
    if charset:
        with contextlib.suppress(LookupError, UnicodeDecodeError, ValueError):
            return body.decode(charset)  # if all of it is valid in that charset: many servers report a wrong one
    return bytes_to_str(body, detect_encoding(body, from_html_meta=True))


def _trafilatura(page: str) -> str:
    from trafilatura import extract

    return extract(page, include_comments=False, include_tables=False) or ""


def _main_content(page: str) -> str:
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(page, main_content=True, preserve_formatting=True, links=False)


def _paragraphs(page: str) -> str:
    from lxml import etree
    from lxml.html import HTMLParser

    root = etree.fromstring(page.encode(), HTMLParser(encoding="utf-8", no_network=True, huge_tree=False))
    if root is None:
        return ""
    texts = (" ".join("".join(one.itertext()).split()) for one in root.iter("p"))
    return "\n".join(text for text in texts if text)


class ScraperPool:
    """Processes that scrape. A process that dies or takes too long is replaced, and its page is lost."""

    def __init__(self, processes: int, scraper: str, seconds: float = SECONDS):
        needed = SCRAPERS[scraper]
        try:
            __import__(needed)
        except ImportError as error:
            do = f"pip install '.[corpus]' (or {needed})"
            raise MissingPackage(f"--scraper {scraper} needs the package {needed}", str(error), do) from None
        self._scraper, self._seconds = scraper, seconds
        self._idle: asyncio.Queue[Optional[ProcessPoolExecutor]] = asyncio.Queue()
        for _ in range(processes):
            self._idle.put_nowait(None)  # started when it is needed

    async def text(self, body: bytes, content_type: str, charset: Optional[str]) -> str:
        """The text of a page. Raises Refused where its process died, ran out of memory, or took too long."""
        process = await self._idle.get() or process_pool(1, MEMORY)
        try:
            work = asyncio.get_running_loop().run_in_executor(
                process, scrape, body, content_type, charset, self._scraper
            )
            text = await asyncio.wait_for(work, self._seconds)
        except (asyncio.TimeoutError, TimeoutError):
            end(process)
            process = None
            raise Refused("scraper_timeout") from None
        except BrokenProcessPool:
            process = None
            raise Refused("scraper_crash") from None
        except asyncio.CancelledError:
            end(process)
            process = None
            raise
        except Exception:  # of a library, for a page that it cannot process
            raise Refused("scraper_error") from None
        finally:
            self._idle.put_nowait(process)
        return text

    def close(self) -> None:
        """End all processes."""
        while not self._idle.empty():
            if process := self._idle.get_nowait():
                end(process)
