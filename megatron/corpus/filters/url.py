# SPDX-License-Identifier: Apache-2.0
"""Filter documents by their URL: listed addresses, those with at most 8 letters, malformed ones, and any other rule.

A list is a text file, compressed or not, with one entry per line and comments after #:

    name             any registered domain of this name, under any public suffix: imgur.com, imgur.io
    name.com         this domain and its subdomains
    name.com/page    this page and all pages below it; http(s):// and www. before it do not count
    .ext             an address with this end of its path or query
"""

import importlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional
from urllib.parse import SplitResult, urlsplit

from megatron.corpus.lines import lines
from megatron.corpus.stage import Document, Verdict
from megatron.errors import DataError, MissingPackage, SettingsError


class UrlFilter:
    """Drops documents by their "url".

    rule: "module:function" of url -> reason to drop (one word with underscores), "" or None to keep
    domains: domains to drop, with their subdomains
    blacklist: files (see above) with the rules of the command blacklist_urls, except that for repeated addresses
    missing: keep or drop documents without a URL
    """

    def __init__(
        self,
        rule: Optional[str] = None,
        domains: Sequence[str] = (),
        missing: Literal["keep", "drop"] = "keep",
        blacklist: Sequence[str] = (),
    ):
        if missing not in ("keep", "drop"):
            raise SettingsError(f"missing: {missing!r} is neither keep nor drop")
        self.rule = None if rule is None else named_function(rule)
        self.domains = frozenset(domain.lower().strip(".") for domain in domains)
        self.missing = missing
        self.blacklist = AddressRules(read_lists(blacklist)) if blacklist else None

    def __call__(self, document: Document) -> Verdict:
        url = document.get("url")
        if not isinstance(url, str) or not url:
            return Verdict(document) if self.missing == "keep" else Verdict(None, "no_url")
        figures = {"url": url[:500]}
        if self.domains and self._is_listed(url):
            return Verdict(None, "listed_domain", figures)
        reason = self.blacklist(url.strip()) if self.blacklist else None
        reason = reason or (self.rule(url) if self.rule else None)
        return Verdict(None, reason, figures) if reason else Verdict(document, "", figures)

    def _is_listed(self, url: str) -> bool:
        try:
            host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
        except ValueError:  # an unclosed bracket
            return False
        return is_below(host.strip("."), self.domains)


def named_function(name: str) -> Callable:
    """The object of "package.module:name". Raises SettingsError if there is none."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise SettingsError(f"{name!r} is not of the form package.module:name")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise SettingsError(f"{name}: there is no module {error.name}", do="check PYTHONPATH") from None
    except AttributeError:
        raise SettingsError(f"{name}: the module {module} has no {attribute}") from None


LONGEST = 8192  # bytes of an address: browsers and servers accept no longer ones
SHORTEST = 9  # "http://a." is too short
ADDRESS = re.compile(
    r"https?://"
    r"(?:(?:[\w](?:[\w-]{0,61}[\w])?\.)+(?:[^\W\d_]{2,63}|xn--[a-z0-9-]{1,59})\.?"  # labels, the last one of letters
    r"|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?::\d{1,5})?"
    r"(?:[/?#][^\s\x00-\x1f\x7f\ufffd]*)?",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"(?:https?:)?//", re.IGNORECASE)


@dataclass(frozen=True)
class AddressLists:
    """Entries of lists by kind: names without a dot, domains, pages ("host/path"), endings."""

    names: frozenset[str]
    domains: frozenset[str]
    pages: frozenset[str]
    endings: tuple[str, ...]


def read_lists(paths: Iterable[str | Path]) -> AddressLists:
    """All entries of some lists. Raises DataError for one that cannot be read."""
    entries = {}
    for path in paths:
        try:
            for line in lines(path, LONGEST):
                entries[line.decode("utf-8").split("#")[0].strip()] = True
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: the list of addresses cannot be read: {error}") from None
    entries.pop("", None)
    pages = set()
    for entry in (entry for entry in entries if "/" in entry):
        with suppress(ValueError):  # an impossible host: no valid address has it
            parts = urlsplit(f"//{_SCHEME.sub('', entry, count=1)}")
            pages |= {_page_and_query(parts)} if parts.hostname else set()
    words = [entry.lower() for entry in entries if "/" not in entry]
    domains = [word.strip(".") for word in words if word[0] != "." and "." in word]
    return AddressLists(
        names=frozenset(word for word in words if "." not in word),
        domains=frozenset(domains),
        pages=frozenset(pages),
        endings=tuple(word for word in words if word[0] == "."),
    )


class AddressRules:
    """The reason to leave an address out: listed_domain, listed_page, listed_ending, short or malformed; "" to keep it."""

    def __init__(self, listed: AddressLists):
        self.listed = listed
        self._public = _public_suffixes() if listed.names else None

    def __call__(self, address: str) -> str:
        if len(address.encode("utf-8", "surrogatepass")) > LONGEST:
            return "malformed"
        try:
            parts = urlsplit(address)
            host = (parts.hostname or "").rstrip(".")
        except ValueError:  # unclosed brackets of an IPv6 address
            return "short" if len(address) < SHORTEST else "malformed"
        if host and (is_below(host, self.listed.domains) or self._of_a_name(host)):
            return "listed_domain"
        if host and self.listed.pages and self._is_page(parts):
            return "listed_page"
        if parts.path.lower().endswith(self.listed.endings) or parts.query.lower().endswith(self.listed.endings):
            return "listed_ending"
        if len(address) < SHORTEST:
            return "short"
        return "" if ADDRESS.fullmatch(address) else "malformed"

    def _of_a_name(self, host: str) -> bool:
        if not self._public:
            return False
        # Private suffixes (github.io) are registered domains too.
        parsed = self._public(f"http://{host}", fail_silently=True, as_object=True, search_private=False)
        return parsed is not None and parsed.domain in self.listed.names

    def _is_page(self, parts: SplitResult) -> bool:
        page = _page_and_query(parts)
        if page in self.listed.pages:
            return True
        page = page.partition("?")[0]
        while page and page not in self.listed.pages:
            page = page.rpartition("/")[0]
        return bool(page)


def is_below(host: str, domains: Collection[str]) -> bool:
    """Whether a host is one of the domains, or below one.

    >>> is_below("a.b.org", {"b.org"}), is_below("ab.org", {"b.org"})
    (True, False)
    """
    labels = host.split(".")
    return any(".".join(labels[start:]) in domains for start in range(len(labels)))


def _page_and_query(parts: SplitResult) -> str:
    """A page in the normal form of lists and addresses: www.B.org:80/a/?x=1 is b.org/a?x=1."""
    host = (parts.hostname or "").rstrip(".").removeprefix("www.")
    return "/".join(filter(None, (host, parts.path.strip("/")))) + (f"?{parts.query}" if parts.query else "")


def _public_suffixes():
    try:
        from tld import get_tld
    except ImportError as error:
        do = "pip install '.[corpus]' (or tld)"
        raise MissingPackage(
            "names without a dot need the list of public suffixes, package tld", str(error), do
        ) from None
    return get_tld
