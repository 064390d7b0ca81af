# SPDX-License-Identifier: Apache-2.0
"""A command line as words: [(flag, its words)] in order, flags with dashes.

>>> split(["--tp", "2", "--bf16", "true--seed", "3"], {"--tp", "--bf16", "--seed"}).words
[('--tp', ['2']), ('--bf16', ['true']), ('--seed', ['3'])]
"""

import argparse
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from megatron.settings.dialects.megatron_lm import answer

THEN = "--then"  # scripts put it between their words and those of whoever calls them
OWN = ("-h", "--help", "--help-all", "--config", "-c", "-o", "--print-config", THEN)
TYPOGRAPHIC_DASHES = tuple("\u2010\u2011\u2012\u2013\u2014\u2015\u2212")
# argparse's short forms: -crun.yaml, -oModel.hidden_size=64
GLUED = re.compile(r"(-c(?=[^-=].*\.(?:yaml|yml|json|py)$)|-o(?=\w+(?:\.\w+)+=))(.+)")
JOINED_LINES = re.compile(r"(true|false|[-+]?[\d.]+(?:[eE][-+]?\d+)?)(--[A-Za-z][\w-]*)", re.IGNORECASE)


@dataclass
class CommandLine:
    """words: flags with what stands after each. problems, notes: sentences for the user."""

    words: list[tuple[str, list[str]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def values(self, *flags: str) -> list[str]:
        """The words of some flags, an empty one for a flag without any."""
        return [word for flag, words in self.words if flag in flags for word in words or [""]]

    def overrides(self) -> list[tuple[str, int]]:
        """The words of -o, each with how many --then stand before it."""
        turns = [self.words[:place].count((THEN, [])) for place in range(len(self.words))]
        found = zip(self.words, turns, strict=True)
        return [(word, turn) for (flag, words), turn in found if flag == "-o" for word in words or [""]]


def split(argv: list[str], flags: Collection[str]) -> CommandLine:
    """Divide a command line; flags: those that there are. argparse does the splitting.

    Every flag takes any number of words here; what it may take is judged later, together with everything else.
    """
    line = CommandLine()
    argv = [with_dashes(part) for word in argv if not _refused(word, flags, line) for part in _parts(word, flags, line)]
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    # Values, not flags: -1e-4, which argparse doubts before 3.14, and dashes alone (--document-separator ---).
    parser._negative_number_matcher = re.compile(r"-[.\d]|-{3,}$")
    met = [word.partition("=")[0] for word in argv if re.match("--?[A-Za-z]", word)]
    for flag in dict.fromkeys([*OWN, *met]):
        parser.add_argument(flag, nargs="*", action=_Record, dest="words")
    namespace, rest = parser.parse_known_args(argv)
    line.problems += [f"'{word}' belongs to no flag" for word in rest]
    line.words = getattr(namespace, "words", [])
    return line


class _Record(argparse.Action):
    def __call__(self, parser, namespace, values, flag=None):
        namespace.words = [*getattr(namespace, "words", []), (flag, values)]


def with_dashes(word: str) -> str:
    """A flag with dashes in place of underscores; its value, and any other word, as it is."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _refused(word: str, flags: Collection[str], line: CommandLine) -> bool:
    """Whether a word is what a copy from a web page or a broken line leaves; the user hears of it."""
    flag = "--" + re.sub(r"^\W+", "", word)
    if word and not word.strip():
        line.problems.append("a blank word: is there a space after a backslash at the end of a line?")
    elif word.strip("-")[:1] in TYPOGRAPHIC_DASHES and with_dashes(flag).partition("=")[0] in flags:
        line.problems.append(f"'{word}' begins with a typographic dash, as web pages make them; type {flag}")
    else:
        return False
    return True


def _parts(word: str, flags: Collection[str], line: CommandLine) -> list[str]:
    """A word as two where it is a value and a flag: what a backslash without a blank before it makes of two lines; or where
    it is a short flag and its value."""
    if glued := GLUED.fullmatch(word):
        return [*glued.groups()]
    joined = JOINED_LINES.fullmatch(word)
    if not joined or with_dashes(joined[2]) not in flags and not answer(joined[2]):
        return [word]
    line.notes.append(f"'{word}' is read as {joined[1]} and {joined[2]}: the line before lacks a blank at its end")
    return [joined[1], joined[2]]
