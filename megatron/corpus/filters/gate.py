# SPDX-License-Identifier: Apache-2.0
"""A gate in front of everything else: binary data and text in a wrong encoding go before they cost anything."""

import re

from megatron.corpus.stage import Document, Verdict

# Control characters are Unicode's category Cc without those that lay text out: tab, line feed, vertical tab, form feed,
# carriage return and U+0085, which is a line feed too.
_CONTROLS = bytes([*range(9), *range(14, 32), 127])
_OTHERS = re.compile("[\x80-\x84\x86-\x9f\ud800-\udfff]")
_REPLACEMENT = b"\xef\xbf\xbd"  # U+FFFD, what decoders write for bytes that are no text


class BinaryGate:
    """Drops a text of which more than a share is U+FFFD, control characters or lone surrogates.

    max_share: of all characters, from 0 (none may be there) to 1
    """

    def __init__(self, max_share: float = 0.02):
        self.max_share = max_share

    def __call__(self, document: Document) -> Verdict:
        text = document["text"]
        share = junk(text) / max(len(text), 1)
        figures = {"junk": share}
        return Verdict(None, "binary", figures) if share > self.max_share else Verdict(document, "", figures)


def junk(text: str) -> int:
    """How many characters of a text are U+FFFD, controls or lone surrogates."""
    data = text.encode("utf-8", "surrogatepass")
    count = len(data) - len(data.translate(None, _CONTROLS))
    if len(data) == len(text):  # ASCII
        return count
    return count + data.count(_REPLACEMENT) + len(_OTHERS.findall(text))
