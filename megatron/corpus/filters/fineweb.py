# SPDX-License-Identifier: Apache-2.0
"""The quality rules that FineWeb adds (Penedo et al. 2024, section 3.6), with its thresholds; None disables a rule.

Blank lines do not count. Words are the tokens of `words.cut`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Optional

from megatron.corpus.filters.repetition import repeated
from megatron.corpus.filters.words import Rule, above, below, cut, judged
from megatron.corpus.stage import Document, Verdict


@dataclass
class FineWeb:
    """Rules for lines that end a sentence, short lines, repeated lines, and line breaks per word.

    short_line: characters of the longest short line. terminal_punctuation: characters that end a sentence; default:
    Unicode's sentence terminators of all scripts
    """

    min_punctuated_lines: Optional[float] = 0.12
    max_short_lines: Optional[float] = 0.67
    short_line: int = 30
    max_duplicate_line_characters: Optional[float] = 0.01
    max_newlines: Optional[float] = 0.3
    terminal_punctuation: str = ""

    chinese = False

    def __post_init__(self):
        self.ends = frozenset(self.terminal_punctuation) if self.terminal_punctuation else sentence_ends()

    def __call__(self, document: Document) -> Verdict:
        return judged(document, self._rules(document["text"]))

    def _rules(self, text: str) -> Iterator[Rule]:
        every = text.split("\n")
        lines = [line for line in every if line and not line.isspace()]
        yield "lines", len(lines), not lines and "empty"
        ends = self.ends
        punctuated = sum([line[-1] in ends for line in lines]) / len(lines)
        yield from below("punctuated_lines", punctuated, self.min_punctuated_lines, "few_punctuated_lines")
        lengths = list(map(len, lines))
        short = self.short_line
        share = sum([length <= short for length in lengths]) / len(lines)
        yield from above("short_lines", share, self.max_short_lines, "short_lines")
        share, name = repeated(lines)[1] / (len(text) - len(every) + 1), "duplicate_line_characters"
        yield from above(name, share, self.max_duplicate_line_characters, name)
        if self.max_newlines is not None:
            newlines = (len(every) - 1) / max(len(cut(text, self.chinese)), 1)
            yield from above("newlines", newlines, self.max_newlines, "newlines")


@dataclass
class FineWebChinese(FineWeb):
    """The same for Chinese, without newlines per word. A short line has half as many characters, which carry more."""

    short_line: int = 15
    max_newlines: Optional[float] = None

    chinese = True


@cache
def sentence_ends() -> frozenset[str]:
    """Unicode's property Sentence_Terminal (version 15), which Python does not have, and three Khmer section signs."""
    ranges = (
        "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 "
        "17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 "
        "2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb "
        "fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 "
        "111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 "
        "1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 "
        "16b37-16b38 16b44 16e98 1bc9f 1da88"
    )
    characters = set()
    for word in ranges.split():
        first, _, last = word.partition("-")
        characters |= set(map(chr, range(int(first, 16), int(last or first, 16) + 1)))
    return frozenset(characters)
