# SPDX-License-Identifier: Apache-2.0
"""How sets of rules say what they found: one rule after the other, until one drops the document.

    def rules(self, text):
        words = len(text.split())
        yield "words", words, words < 50 and "too_few_words"

What comes after the rule that drops is not computed.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, Optional

from megatron.corpus.stage import Document, Verdict

Rule = tuple[str, float, Literal[False] | str]  # the figure's name, the figure, the reason to drop


def judged(document: Document, rules: Iterable[Rule]) -> Verdict:
    """The verdict of rules: the first that has a reason drops the document; figures are those seen until then."""
    figures = {}
    for name, figure, reason in rules:
        figures[name] = figure
        if reason:
            return Verdict(None, reason, figures)
    return Verdict(document, "", figures)


def below(name: str, figure: float, least: Optional[float], reason: str) -> Iterator[Rule]:
    """A rule with a lower limit; nothing where the limit is None, which switches it off."""
    if least is not None:
        yield name, figure, figure < least and reason


def above(name: str, figure: float, most: Optional[float], reason: str) -> Iterator[Rule]:
    """A rule with an upper limit; nothing where the limit is None."""
    if most is not None:
        yield name, figure, figure > most and reason
