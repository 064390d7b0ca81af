# SPDX-License-Identifier: Apache-2.0
"""Filter documents by their URL: lists of bad addresses, and any other rule."""

import importlib
from collections.abc import Callable, Sequence
from typing import Literal, Optional
from urllib.parse import urlsplit

from megatron.corpus.addresses import AddressRules, is_below, read_lists
from megatron.corpus.stage import Document, Verdict
from megatron.errors import SettingsError


class UrlFilter:
    """Drops documents by their "url".

    rule: "module:function" of url -> reason to drop (one word with underscores), "" or None to keep
    domains: domains to drop, with their subdomains
    blacklist: files (see `addresses.py`) with the rules of the command blacklist_urls, except that for repeated addresses
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
