# SPDX-License-Identifier: Apache-2.0
"""Extract the text of web pages, by resiliparse (fast, in C) or trafilatura (slower, removes more boilerplate).

Parsers take quadratic time in the depth of nested tags: a page with a deeper nesting than any real page is dropped before
it is parsed.
"""

import re
from collections.abc import Callable
from typing import Literal, Optional

import numpy as np

from megatron.corpus.stage import Document, Verdict
from megatron.errors import MissingPackage, SettingsError

_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
# Elements without contents, or that end at the next one of their kind: they do not nest.
_FLAT = frozenset(
    "area base br col embed hr img input link meta param source track wbr p li dt dd td th tr option thead tbody tfoot "
    "html head body".split()
)


class HtmlToText:
    """Extracts the text of the page under `key` into "text", and removes the page from the document.

    key: key of the page; may be "text"
    main_content: leave out menus, headers and footers
    max_depth: maximal depth of nested tags
    """

    def __init__(
        self,
        extractor: Literal["resiliparse", "trafilatura"] = "resiliparse",
        key: str = "html",
        main_content: bool = True,
        max_depth: int = 1000,
    ):
        if extractor not in EXTRACTORS:
            raise SettingsError(f"extractor {extractor!r} is unknown", do=f"known: {', '.join(EXTRACTORS)}")
        self.key, self.max_depth = key, max_depth
        self.extract = EXTRACTORS[extractor](main_content)

    def __call__(self, document: Document) -> Verdict:
        page = document.get(self.key)
        if not isinstance(page, str):
            return Verdict(None, "no_page")
        figures = {"page_characters": len(page), "depth": depth(page)}
        if figures["depth"] > self.max_depth:
            return Verdict(None, "nested_too_deep", figures)
        page = page.replace("\0", " ").encode("utf-8", "replace").decode()  # parsers stop at NUL, and reject surrogates
        try:
            text = (self.extract(page) or "").strip()
        except (ValueError, RuntimeError) as error:
            return Verdict(None, "no_html", {**figures, "error": str(error)[:200]})
        if not text:
            return Verdict(None, "no_text", figures)
        rest = {name: value for name, value in document.items() if name != self.key}
        return Verdict({**rest, "text": text}, "extracted", {**figures, "characters": len(text)})


def depth(page: str) -> int:
    """An upper bound of the depth of a page's nested tags.

    >>> depth("<div><ul><li>one<li>two</ul></div><p>a<br>b<p>c")
    2
    >>> depth("</div></div></div><div>a</div>")
    1
    """
    levels = [-1 if end else 1 for end, name in _TAG.findall(page) if name.lower() not in _FLAT]
    sums = np.cumsum(np.array(levels, np.int64))
    if not len(sums):
        return 0
    lowest = np.minimum(np.minimum.accumulate(sums), 0)  # surplus end tags do not count
    return int((sums - lowest).max())


def _resiliparse(main_content: bool) -> Callable[[str], Optional[str]]:
    try:
        from resiliparse.extract.html2text import extract_plain_text
    except ImportError:
        raise _missing("resiliparse") from None
    return lambda page: extract_plain_text(page, main_content=main_content)


def _trafilatura(main_content: bool) -> Callable[[str], Optional[str]]:
    try:
        import trafilatura
    except ImportError as error:
        raise _missing("trafilatura", str(error)) from None
    if main_content:
        return lambda page: trafilatura.extract(page, favor_precision=True, include_comments=False)
    return lambda page: trafilatura.html2txt(page)


def _missing(package: str, why: Optional[str] = None) -> SettingsError:
    return MissingPackage(f"extracting texts from pages needs the package {package}", why, "pip install '.[corpus]'")


EXTRACTORS = {"resiliparse": _resiliparse, "trafilatura": _trafilatura}
