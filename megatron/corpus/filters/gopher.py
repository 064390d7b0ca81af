# SPDX-License-Identifier: Apache-2.0
"""The quality rules of Gopher (Rae et al. 2021, section A1.1), with its thresholds; None disables a rule.

Details that the paper leaves open follow datatrove, whose names of the thresholds are in docs/corpus_filters.md: words are
the tokens of `words.cut`; punctuation counts in ratios to words, but not in their number and length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from megatron.corpus.filters.words import LETTER, VISIBLE, Rule, above, below, cut, judged
from megatron.corpus.stage import Document, Verdict

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS, ELLIPSES = ("\u2022", "-"), ("...", "\u2026")


@dataclass
class Gopher:
    """Rules for length, word length, symbols, bullets, ellipses, alphabetic words, stop words."""

    min_words: Optional[int] = 50
    max_words: Optional[int] = 100_000
    min_mean_word_length: Optional[float] = 3
    max_mean_word_length: Optional[float] = 10
    max_symbol_ratio: Optional[float] = 0.1
    max_bullet_lines: Optional[float] = 0.9
    max_ellipsis_lines: Optional[float] = 0.3
    min_alphabetic_words: Optional[float] = 0.8
    min_stop_words: Optional[int] = 2
    stop_words: Sequence[str] = STOP_WORDS

    chinese = False

    def __call__(self, document: Document) -> Verdict:
        return judged(document, self._rules(document["text"]))

    def _rules(self, text: str) -> Iterator[Rule]:
        tokens = cut(text, self.chinese)
        words = tokens.having(VISIBLE)
        count = int(words.sum())
        yield from below("words", count, self.min_words, "too_few_words")
        yield from above("words", count, self.max_words, "too_many_words")
        length = int(tokens.lengths[words].sum()) / max(count, 1)
        yield from below("mean_word_length", length, self.min_mean_word_length, "short_words")
        yield from above("mean_word_length", length, self.max_mean_word_length, "long_words")
        total = max(len(tokens), 1)
        yield from above("hashes", text.count("#") / total, self.max_symbol_ratio, "hashes")
        ellipses = text.count(ELLIPSES[0]) + text.count(ELLIPSES[1])
        yield from above("ellipses", ellipses / total, self.max_symbol_ratio, "ellipses")
        yield from self._line_rules(text)
        alphabetic = int(tokens.having(LETTER).sum()) / total
        yield from below("alphabetic_words", alphabetic, self.min_alphabetic_words, "few_alphabetic_words")
        if self.min_stop_words is not None:
            yield from below(
                "stop_words", tokens.count(dict.fromkeys(self.stop_words)), self.min_stop_words, "few_stop_words"
            )

    def _line_rules(self, text: str) -> Iterator[Rule]:
        lines = text.splitlines() or [""]
        bullets = sum(line.lstrip().startswith(BULLETS) for line in lines) if self.max_bullet_lines is not None else 0
        yield from above("bullet_lines", bullets / len(lines), self.max_bullet_lines, "bullet_lines")
        some = any(ellipsis in text for ellipsis in ELLIPSES)
        ellipses = sum(line.rstrip().endswith(ELLIPSES) for line in lines) if some else 0
        yield from above("ellipsis_lines", ellipses / len(lines), self.max_ellipsis_lines, "ellipsis_lines")


@dataclass
class GopherChinese(Gopher):
    """Gopher's rules for Chinese, without mean word length and English stop words.

    Each Han character counts as a word. Punctuation is a larger share of characters than of words, and a minimum of .8
    alphabetic words would drop good prose: the default is .7.
    """

    min_mean_word_length: Optional[float] = None
    max_mean_word_length: Optional[float] = None
    min_alphabetic_words: Optional[float] = 0.7
    min_stop_words: Optional[int] = None
    stop_words: Sequence[str] = ()

    chinese = True
