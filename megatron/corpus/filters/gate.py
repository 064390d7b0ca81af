# SPDX-License-Identifier: Apache-2.0
"""A cheap first filter: drop binary data, and text in a wrong encoding."""

import re

from megatron.corpus.stage import Document, Verdict

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
