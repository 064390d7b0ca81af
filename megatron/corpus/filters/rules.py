# SPDX-License-Identifier: Apache-2.0
"""Evaluate a sequence of rules until one drops the document.

    def rules(self, text):
        words = len(text.split())
        yield "words", words, words < 50 and "too_few_words"

Rules after the one that drops are not computed.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, Optional

from megatron.corpus.stage import Document, Verdict

Rule = tuple[str, float, Literal[False] | str]  # the figure's name, the figure, the reason to drop


def judged(document: Document, rules: Iterable[Rule]) -> Verdict:
    """The verdict of rules: the first one with a reason drops the document; figures are those up to it."""
    figures = {}
    for name, figure, reason in rules:
        figures[name] = figure
        if reason:
            return Verdict(None, reason, figures)
    return Verdict(document, "", figures)


def below(name: str, figure: float, least: Optional[float], reason: str) -> Iterator[Rule]:
    """A rule with a lower limit; None disables it."""
    if least is not None:
        yield name, figure, figure < least and reason


def above(name: str, figure: float, most: Optional[float], reason: str) -> Iterator[Rule]:
    """A rule with an upper limit; None disables it."""
    if most is not None:
        yield name, figure, figure > most and reason
