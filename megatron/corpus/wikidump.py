# SPDX-License-Identifier: Apache-2.0
"""A wiki's dump (MediaWiki's XML, plain or packed) as a stream of pages, in pieces that processes can share.

    dump = WikiDump("enwiki-latest-pages-articles.xml.bz2")
    for piece in dump.pieces():                     # bytes of whole <page> elements
        for page in pages_of(piece): ...

The dump is cut at `</page>`, which stands nowhere else: in texts a `<` is written as `&lt;`. Both ways of packing by bzip2
are read: one stream, and many (multistream). Declarations of entities are refused: a few can stand for gigabytes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.parsers import expat

from megatron.corpus.lines import blocks
from megatron.errors import DataError

PIECE = 1 << 20  # bytes of pages that are given at once, at least
LARGEST = 64 << 20  # bytes of a page, or of what stands before the first one
FIRST, END, LAST = b"<page>", b"</page>", b"</mediawiki>"


@dataclass(frozen=True)
class WikiPage:
    """A page of a dump. redirect: it only points to another one."""

    id: str
    revision: str
    title: str
    namespace: str
    redirect: bool
    text: str


class WikiDump:
    """A dump that is read once, from its start. `base`: the address of its wiki, once pieces are given."""

    def __init__(self, path: str | Path):
        self.path, self.base, self.language = str(path), "", ""

    def pieces(self) -> Iterator[bytes]:
        """Whole pages, some at a time. Raises DataError where the dump is none, damaged, or cut short."""
        stream = blocks(self.path)
        head, rest = self._until_first_page(stream)
        self.base, self.language = _site(head, self.path)
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
            raise DataError(f"{self.path}: the dump is cut short", self._near(last), "copy or download it again")

    def _until_first_page(self, stream: Iterator[bytes]) -> tuple[bytes, bytes]:
        """(what stands before the first page, the first bytes from there on)."""
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
        return f"in the page {titles[-1].decode(errors='replace')!r}" if titles else "behind its last page"


def _site(head: bytes, path: str) -> tuple[str, str]:
    """(address that ids are put behind, language) of what stands before the first page."""
    if b"<!DOCTYPE" in head or b"<!ENTITY" in head:
        raise DataError(f"{path}: declares entities, as no dump of a wiki does", do="it is refused: they can be bombs")
    found = re.search(rb"<base>([^<]*)</base>", head)
    base = found[1].decode("utf-8", errors="replace").strip() if found else ""
    language = re.search(rb"<mediawiki[^>]*xml:lang=\"([\w-]*)\"", head)
    return base.rpartition("/")[0], language[1].decode() if language else ""


class BadPages(ValueError):
    """A piece that is not XML. The text says where."""


def pages_of(piece: bytes) -> Iterator[WikiPage]:
    """The pages of a piece; of several revisions the last one's text. Raises BadPages where it is no XML.

    Inside of an element, as here, nothing can be declared: entities are XML's own five.
    """
    found: list[WikiPage] = []
    parser = expat.ParserCreate()
    reader = _Reader(found)
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.CharacterDataHandler = reader.text
    parser.buffer_text = True
    try:
        parser.Parse(b"<pages>", False)
        parser.Parse(piece, False)
        parser.Parse(b"</pages>", True)
    except expat.ExpatError as error:
        raise BadPages(str(error)) from None
    yield from found


class _Reader:
    """Follows the elements of pages; what it does not know it passes over."""

    def __init__(self, found: list[WikiPage]):
        self._found, self._path, self._text = found, [], []

    def start(self, name: str, attributes: dict) -> None:
        self._path.append(name)
        self._text = []
        if name == "page":
            self._page = dict(id="", revision="", title="", namespace="0", redirect=False, text="")
        elif name == "redirect":
            self._page["redirect"] = True

    def text(self, data: str) -> None:
        self._text.append(data)

    def end(self, name: str) -> None:
        where = "/".join(self._path[1:])
        self._path.pop()
        key = FIELDS.get(where)
        if key:
            self._page[key] = "".join(self._text)
        elif where == "page":
            self._found.append(WikiPage(**self._page))
        self._text = []


FIELDS = {
    "page/title": "title",
    "page/ns": "namespace",
    "page/id": "id",
    "page/revision/id": "revision",
    "page/revision/text": "text",
}
