# SPDX-License-Identifier: Apache-2.0
"""The rules of C4 (Raffel et al. 2020, section 2.2): drop lines that are not sentences, and pages with too few of them.

A line is kept when it ends in terminal punctuation (no ellipsis), has enough words between spaces and none that is too
long, and mentions neither Javascript nor cookies nor terms of use. A page is dropped for "lorem ipsum" or a curly bracket
in a line that passed the earlier rules, or when the kept lines have too few sentences. Citation marks are removed.
"""

import re
from dataclasses import dataclass
from typing import Optional

from megatron.corpus.stage import Document, Verdict

TERMINAL, ELLIPSIS = (".", "?", "!", '"', "'"), "..."
CHINESE_TERMINAL = (*TERMINAL, *"\u3002\uff1f\uff01\u201d\u2019\u300d\u300f\uff0e\uff09")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
CHINESE_POLICY = (*POLICY, "\u9690\u79c1\u653f\u7b56", "\u4f7f\u7528\u6761\u6b3e", "\u4f7f\u7528cookie")
_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_CHINESE_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)|[\u3002\uff01\uff1f]+")


@dataclass
class C4:
    """Keeps lines that are sentences; drops pages with fewer than `min_sentences` of them.

    Thresholds of the rules, None to disable one, and switches.
    """

    min_sentences: Optional[int] = 5
    min_words_a_line: Optional[int] = 3
    max_word_length: Optional[int] = 1000
    terminal_punctuation: bool = True
    lorem_ipsum: bool = True
    curly_bracket: bool = True
    javascript: bool = True
    policy: bool = True
    citations: bool = True

    ends, policies, terminal = _SENTENCE_END, POLICY, TERMINAL

    def __call__(self, document: Document) -> Verdict:
        text, kept, sentences = document["text"], [], 0
        lines = text.splitlines()
        for line in lines:
            line = self._sentence_line(line.strip())
            if line is None:
                continue
            lower = line.lower()
            if self.lorem_ipsum and "lorem ipsum" in lower:
                return Verdict(None, "lorem_ipsum", {"lines": len(lines)})
            if self.javascript and "javascript" in lower:
                continue
            if self.curly_bracket and "{" in line:
                return Verdict(None, "curly_bracket", {"lines": len(lines)})
            if self.policy and any(phrase in lower for phrase in self.policies):
                continue
            if self.min_sentences is not None and sentences < self.min_sentences:  # more are not counted
                sentences += max(1, len(self.ends.findall(line)))
            kept.append(line)
        figures = {"lines": len(lines), "kept_lines": len(kept), "sentences": sentences}
        if self.min_sentences is not None and sentences < self.min_sentences:
            return Verdict(None, "too_few_sentences", figures)
        cleaned = "\n".join(kept).strip()
        if cleaned == text:
            return Verdict(document, "", figures)
        if not cleaned:
            return Verdict(None, "no_lines", figures)
        return Verdict({**document, "text": cleaned}, "lines_removed", figures)

    def _sentence_line(self, line: str) -> Optional[str]:
        """The line without citation marks; None if it does not look like sentences."""
        longest = self.max_word_length
        words = line.split() if self.min_words_a_line is not None or longest is not None and len(line) > longest else ()
        if longest is not None and len(line) > longest and any(len(word) > longest for word in words):
            return None
        if self.citations and "[" in line:
            line = _CITATION.sub("", line)
        if self.terminal_punctuation and (not line.endswith(self.terminal) or line.endswith(ELLIPSIS)):
            return None
        return None if self.min_words_a_line is not None and len(words) < self.min_words_a_line else line


@dataclass
class C4Chinese(C4):
    """The same with Chinese punctuation and policies, and without the two rules for words between spaces."""

    min_words_a_line: Optional[int] = None
    max_word_length: Optional[int] = None

    ends, policies, terminal = _CHINESE_SENTENCE_END, CHINESE_POLICY, CHINESE_TERMINAL
