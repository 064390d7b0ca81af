# SPDX-License-Identifier: Apache-2.0
"""Repair texts like ftfy (mojibake, entities, quotes, widths, control characters, NFC), in a tenth of the time.

ftfy processes each line of a text, and does not change most lines. A line that it changes has at least one of

  1. a character that it replaces individually: curly quotes, ligatures, full and half widths, controls, line ends;
  2. an HTML entity, if no "<" came before the end of the line;
  3. mojibake by its heuristic: each of its patterns needs two adjacent characters of a small set of non-ASCII ones, or a C1
     control, or one of four letters; `FtfyRules.hard` matches all of these;
  4. an escape sequence of a terminal, or half of a surrogate pair;
  5. characters that are not in the normal form C.

Lines without any of these are kept. Lines with only the first get the replacements of single characters, as ftfy's own
functions give them, and are checked again; all others are processed by ftfy. tests/corpus/test_repair.py verifies that the
list is complete for a certain version of ftfy's patterns, branch by branch; with other patterns, ftfy processes every text.

`BinaryGate` is a cheap first filter, which drops binary data and text in a wrong encoding.
"""

import re
import unicodedata
from functools import cache

from megatron.corpus.stage import Document, Verdict
from megatron.errors import MissingPackage

KNOWN = "3281edbd1e8f1760"  # fingerprint of ftfy's patterns for which the list above was verified
_ENTITY = re.compile(r"&#?[0-9A-Za-z]{1,24};")


class TextRepair:
    """Repairs texts as `ftfy.fix_text` does. Never drops a document."""

    def __init__(self) -> None:
        self._rules = rules_of_ftfy()

    def __call__(self, document: Document) -> Verdict:
        text = document["text"]
        repaired = self._rules.fix(text)
        if repaired == text:
            return Verdict(document)
        return Verdict({**document, "text": repaired}, "repaired")


class FtfyRules:
    """`ftfy.fix_text` with default settings, skipping lines that it would not change."""

    def __init__(self, ftfy):
        import ftfy.badness
        import ftfy.chardata
        import ftfy.fixes

        self.ftfy = ftfy
        self.auto = ftfy.TextFixerConfig(explain=False)
        self.in_html = self.auto._replace(unescape_html=False)
        self.known = fingerprint(ftfy) == KNOWN
        self.replaced = {character: _replacement(ftfy.fixes, character) for character in _characters(ftfy.chardata)}
        self.replaceable = re.compile("\r\n|" + _any_of(self.replaced))
        mojibake = "".join(ftfy.badness.MOJIBAKE_CATEGORIES.values())
        mojibake += "".join(sorted({c for c in ftfy.badness.BADNESS_RE.pattern if not c.isascii()}))
        self.hard = re.compile(f"[{mojibake}][{mojibake}]|[\x80-\x9f\u0152\u0153\xc2\xc3\x1b\ud800-\udfff]")

    def fix(self, text: str) -> str:
        """The result of `ftfy.fix_text(text)`."""
        if not self.known:
            return self.ftfy.fix_text(text)
        html = text.find("<")  # from its line on, entities are not decoded
        entities_end = len(text) if html < 0 else text.rfind("\n", 0, html) + 1
        if not self._is_hard(text, entities_end):
            fixed = self._replace(text)
            if fixed is text or not self._is_hard(fixed, entities_end):
                return fixed
        return self._by_lines(text, entities_end)

    def _is_hard(self, text: str, entities_end: int) -> bool:
        """Whether rules 2 to 5 may apply to some line. After deletions, `entities_end` may be too large."""
        if "&" in text and _ENTITY.search(text, 0, entities_end):
            return True
        if text.isascii():
            return "\x1b" in text
        return self.hard.search(text) is not None or not unicodedata.is_normalized("NFC", text)

    def _replace(self, text: str) -> str:
        """Apply rule 1; returns the same object where it changes nothing."""
        if text.isascii() and not _ASCII_CONTROLS.search(text):
            return text
        fixed = self.replaceable.sub(lambda match: self.replaced.get(match[0], "\n"), text)
        return text if fixed == text else fixed

    def _by_lines(self, text: str, entities_end: int) -> str:
        """Process lines that need it by ftfy, one at a time. ftfy splits huge lines: then it gets the whole text."""
        lines = text.split("\n")
        if max(map(len, lines)) >= self.auto.max_decode_length:
            return self.ftfy.fix_text(text)
        fixed, start = [], 0
        for number, line in enumerate(lines):
            line += "\n" * (number < len(lines) - 1)
            fixed.append(self._line(line, entities=start < entities_end))
            start += len(line)
        return "".join(fixed)

    def _line(self, line: str, entities: bool) -> str:
        end = len(line) if entities else 0
        if not self._is_hard(line, end):
            fixed = self._replace(line)
            if fixed is line or not self._is_hard(fixed, len(fixed) if entities else 0):
                return fixed
        return self.ftfy.fix_and_explain(line, self.auto if entities else self.in_html).text


_ASCII_CONTROLS = re.compile("[\x00-\x08\x0b\r\x0e-\x1f\x7f]")


@cache
def rules_of_ftfy() -> FtfyRules:
    """The rules, built once per process. Raises SettingsError where ftfy is not installed."""
    try:
        import ftfy
    except ImportError:
        raise MissingPackage("repairing texts needs the package ftfy", do="pip install '.[corpus]'") from None
    return FtfyRules(ftfy)


def fingerprint(ftfy) -> str:
    """A hash of everything in ftfy that the shortcuts rely on."""
    import hashlib

    data = ftfy.chardata
    parts = [ftfy.badness.BADNESS_RE.pattern, data.HTML_ENTITY_RE.pattern, data.C1_CONTROL_RE.pattern]
    parts += [data.SINGLE_QUOTE_RE.pattern, data.DOUBLE_QUOTE_RE.pattern, ftfy.fixes.ANSI_RE.pattern]
    parts += [repr(sorted(table.items())) for table in (data.LIGATURES, data.CONTROL_CHARS)]
    parts += [ftfy.fixes.SURROGATE_RE.pattern, repr(ftfy.TextFixerConfig()), " ".join(ftfy.FIXERS)]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _characters(data) -> list[str]:
    """All characters that ftfy replaces individually, except those of escape sequences."""
    points = {*data.LIGATURES, *data.WIDTH_MAP, *data.CONTROL_CHARS, 0x0D, 0x2028, 0x2029} - {0x1B}
    quotes = [
        c for c in map(chr, range(0x2000, 0x2100)) if data.DOUBLE_QUOTE_RE.match(c) or data.SINGLE_QUOTE_RE.match(c)
    ]
    return sorted({*map(chr, points), *quotes, "\u02bc"})


def _replacement(fixes, character: str) -> str:
    """ftfy's replacement of a single character, by its steps in their order."""
    for step in (
        fixes.fix_latin_ligatures,
        fixes.fix_character_width,
        fixes.uncurl_quotes,
        fixes.fix_line_breaks,
        fixes.remove_control_chars,
    ):
        character = step(character)
    return character


def _any_of(characters) -> str:
    return f"[{''.join(map(re.escape, characters))}]"


# Control characters: Unicode's category Cc without tab, line feed, vertical tab, form feed, carriage return and U+0085,
# which is a line feed too.
_CONTROLS = bytes([*range(9), *range(14, 32), 127])
_OTHERS = re.compile("[\x80-\x84\x86-\x9f\ud800-\udfff]")
_REPLACEMENT = b"\xef\xbf\xbd"  # U+FFFD, which decoders write for invalid bytes


class BinaryGate:
    """Drops a text with too many U+FFFD, control characters and lone surrogates.

    max_share: their maximal share of all characters, from 0 to 1
    """

    def __init__(self, max_share: float = 0.02):
        self.max_share = max_share

    def __call__(self, document: Document) -> Verdict:
        text = document["text"]
        share = junk(text) / max(len(text), 1)
        figures = {"junk": share}
        return Verdict(None, "binary", figures) if share > self.max_share else Verdict(document, "", figures)


def junk(text: str) -> int:
    """Number of U+FFFD, control characters and lone surrogates in a text."""
    data = text.encode("utf-8", "surrogatepass")
    count = len(data) - len(data.translate(None, _CONTROLS))
    if len(data) == len(text):  # ASCII
        return count
    return count + data.count(_REPLACEMENT) + len(_OTHERS.findall(text))
