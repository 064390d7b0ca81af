# SPDX-License-Identifier: Apache-2.0
"""Split a command line into [(flag, its words)], in order, with dashes in flags.

>>> split(["--tp", "2", "--bf16", "true--seed", "3"], {"--tp", "--bf16", "--seed"}).words
[('--tp', ['2']), ('--bf16', ['true']), ('--seed', ['3'])]
"""

import argparse
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from megatron.settings.dialects.megatron_lm import answer

THEN = "--then"  # scripts put it between their own flags and the caller's
OWN = ("-h", "--help", "--help-all", "--config", "-c", "-o", "--print-config", THEN)
TYPOGRAPHIC_DASHES = tuple("\u2010\u2011\u2012\u2013\u2014\u2015\u2212")
# argparse's short forms: -crun.yaml, -oModel.hidden_size=64
GLUED = re.compile(r"(-c(?=[^-=].*\.(?:yaml|yml|json|py)$)|-o(?=\w+(?:\.\w+)+=))(.+)")
JOINED_LINES = re.compile(r"(true|false|[-+]?[\d.]+(?:[eE][-+]?\d+)?)(--[A-Za-z][\w-]*)", re.IGNORECASE)


@dataclass
class CommandLine:
    """A split command line. words: flags with the words after each; problems, notes: messages for the user."""

    words: list[tuple[str, list[str]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def values(self, *flags: str) -> list[tuple[str, int]]:
        """The words of some flags, "" for a flag without any, each with the number of --then before it."""
        turns = [self.words[:place].count((THEN, [])) for place in range(len(self.words))]
        pairs = zip(self.words, turns, strict=True)
        return [(word, turn) for (flag, words), turn in pairs if flag in flags for word in words or [""]]


def split(argv: list[str], flags: Collection[str]) -> CommandLine:
    """Split a command line with argparse. flags: the known ones.

    Every flag takes any number of words here; their number is checked later.
    """
    line = CommandLine()
    argv = _without_command(argv, line)
    argv = [with_dashes(part) for word in argv if not _refused(word, flags, line) for part in _parts(word, flags, line)]
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    # Values, not flags: -1e-4, which argparse before 3.14 takes for a flag, only dashes (--document-separator ---), and
    # patterns of layers (--hybrid-layer-pattern -*-*).
    parser._negative_number_matcher = re.compile(r"-[.\d*|+]|-{3,}$")
    met = [word.partition("=")[0] for word in argv if re.match("--?[A-Za-z]", word)]
    for flag in dict.fromkeys([*OWN, *met]):
        parser.add_argument(flag, nargs="*", action=_Record, dest="words")
    namespace, rest = parser.parse_known_args(argv)
    line.problems += [f"{', '.join(map(repr, rest))} belong{'s' * (len(rest) == 1)} to no flag"] * bool(rest)
    line.words = getattr(namespace, "words", [])
    return line


def _without_command(argv: list[str], line: CommandLine) -> list[str]:
    """The words without a command in front of its flags, which is a problem: `-- python SCRIPT.py --bf16`."""
    if "--" not in argv:
        return argv
    at = argv.index("--")
    first = next((place for place in range(at + 1, len(argv)) if re.match("--[A-Za-z]", argv[place])), len(argv))
    command = " ".join(argv[at:first])
    line.problems.append(f"this command takes the flags alone: leave '{command}' out")
    return [*argv[:at], *argv[first:]]


class _Record(argparse.Action):
    def __call__(self, parser, namespace, values, flag=None):
        namespace.words = [*getattr(namespace, "words", []), (flag, values)]


def with_dashes(word: str) -> str:
    """Replace underscores in a flag by dashes; its value, and any other word, is unchanged."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _refused(word: str, flags: Collection[str], line: CommandLine) -> bool:
    """Whether a word is left from a copy from a web page or a broken line; adds a message to `line.problems`."""
    flag = "--" + re.sub(r"^\W+", "", word)
    if word and not word.strip():
        line.problems.append("a blank word: is there a space after a backslash at the end of a line?")
    elif word.strip("-")[:1] in TYPOGRAPHIC_DASHES and with_dashes(flag).partition("=")[0] in flags:
        line.problems.append(f"'{word}' begins with a typographic dash, as copied from a web page; type {flag}")
    else:
        return False
    return True


def _parts(word: str, flags: Collection[str], line: CommandLine) -> list[str]:
    """Split a word that is a value and a flag, which two lines become if there is no space before the backslash, or a short
    flag and its value.
    """
    if glued := GLUED.fullmatch(word):
        return [*glued.groups()]
    joined = JOINED_LINES.fullmatch(word)
    if not joined or with_dashes(joined[2]) not in flags and not answer(joined[2]):
        return [word]
    line.notes.append(f"'{word}' is read as {joined[1]} and {joined[2]}: the line before lacks a space at its end")
    return [joined[1], joined[2]]
