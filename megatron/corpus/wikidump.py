# SPDX-License-Identifier: Apache-2.0
"""Read a wiki's dump (MediaWiki's XML, plain or compressed) as a stream of pages, in pieces for several processes.

    dump = WikiDump("enwiki-latest-pages-articles.xml.bz2")
    for piece in dump.pieces():                     # bytes of whole <page> elements
        for page in pages_of(piece): ...

The dump is cut at `</page>`, which does not occur elsewhere: texts contain `&lt;` instead of `<`. bzip2 files may have one
stream, or many (multistream). Declarations of entities are refused: a few can expand to gigabytes.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from megatron.corpus.lines import blocks
from megatron.errors import DataError

PIECE = 1 << 20  # minimal bytes of a piece
LARGEST = 64 << 20  # bytes of a page, or of the head before the first one
FIRST, END, LAST = b"<page>", b"</page>", b"</mediawiki>"


@dataclass(frozen=True)
class WikiPage:
    """A page of a dump. redirect: it only points to another page"""

    id: str
    revision: str
    title: str
    namespace: str
    redirect: bool
    text: str


@dataclass(frozen=True)
class DumpSite:
    """What the head of a dump tells of its wiki."""

    base: str = ""  # address to which ids are appended
    language: str = ""  # code, such as "en"
    namespaces: dict[str, str] = field(default_factory=dict)  # number -> name in the wiki's language


class WikiDump:
    """A dump, read once from its start. `site`: known after the first piece"""

    def __init__(self, path: str | Path):
        self.path, self.site = str(path), DumpSite()

    def pieces(self) -> Iterator[bytes]:
        """Whole pages in pieces. Raises DataError for a file that is no dump, damaged, or truncated."""
        stream = blocks(self.path)
        head, rest = self._until_first_page(stream)
        self.site = _site(head, self.path)
        pages, size = [rest], len(rest)
        for block in stream:
            pages.append(block)
            size += len(block)
            if size >= PIECE and END in b"".join([*pages[-2:]]):
                data = b"".join(pages)
                cut = data.rindex(END) + len(END)
                yield data[:cut]
                pages, size = [data[cut:]], len(data) - cut
            if size > LARGEST + PIECE:
                raise DataError(f"{self.path}: a page is larger than {LARGEST >> 20} MB", self._near(b"".join(pages)))
        last, end, _ = b"".join(pages).partition(LAST)
        whole, page_end, beyond = last.rpartition(END)
        if whole:
            yield whole + page_end
        if not end or beyond.strip():
            raise DataError(f"{self.path}: the dump is truncated", self._near(last), "copy or download it again")

    def _until_first_page(self, stream: Iterator[bytes]) -> tuple[bytes, bytes]:
        """(the head before the first page, the first bytes from there on)."""
        data = b""
        for block in stream:
            data += block
            if FIRST in data or LAST in data:
                at = data.index(FIRST) if FIRST in data else data.index(LAST)
                return data[:at], data[at:]
            if len(data) > LARGEST:
                break
        what = "is empty" if not data else "holds no pages" if b"<mediawiki" in data[:4096] else "is no dump of a wiki"
        do = "give a file such as enwiki-latest-pages-articles.xml.bz2, whole"
        raise DataError(f"{self.path} {what}", None if not data else f"it begins {data[:40]!r}", do)

    @staticmethod
    def _near(data: bytes) -> str:
        titles = re.findall(rb"<title>([^<]*)", data[: 1 << 20])
        return f"in the page {titles[-1].decode(errors='replace')!r}" if titles else "after its last page"


def _site(head: bytes, path: str) -> DumpSite:
    """The wiki, from the head before the first page."""
    if b"<!DOCTYPE" in head or b"<!ENTITY" in head:
        raise DataError(f"{path}: declares entities, as no dump of a wiki does", do="it is refused: they can be bombs")
    match = re.search(rb"<base>([^<]*)</base>", head)
    base = match[1].decode("utf-8", errors="replace").strip() if match else ""
    language = re.search(rb"<mediawiki[^>]*xml:lang=\"([\w-]*)\"", head)
    named = re.findall(rb'<namespace key="(-?\d+)"[^>]*>([^<]*)</namespace>', head)
    namespaces = {key.decode(): html.unescape(name.decode("utf-8", errors="replace")) for key, name in named}
    return DumpSite(base.rpartition("/")[0], language[1].decode() if language else "", namespaces)


class BadPages(ValueError):
    """A piece that is not XML. The message contains the place."""


def pages_of(piece: bytes) -> Iterator[WikiPage]:
    """The pages of a piece, with the text of the last revision. Raises BadPages if it is not XML.

    The pieces are parsed inside an element, where no entities can be declared.
    """
    try:
        pages = ElementTree.fromstringlist([b"<pages>", piece, b"</pages>"])
    except ElementTree.ParseError as error:
        raise BadPages(str(error)) from None
    for page in pages.findall("page"):
        last = {path: (page.findall(path)[-1:] or [None])[0] for path in FIELDS}
        texts = {FIELDS[path]: found.text or "" for path, found in last.items() if found is not None}
        yield WikiPage(**DEFAULTS | texts, redirect=page.find("redirect") is not None)


FIELDS = {"title": "title", "ns": "namespace", "id": "id", "revision/id": "revision", "revision/text": "text"}
DEFAULTS = dict(id="", revision="", title="", namespace="0", text="")
