# SPDX-License-Identifier: Apache-2.0
"""Command lines with positional files and one dataclass of settings, as in Megatron-LM's tools: `shuf IN -o OUT --seed 1`

files, flags = divide(argv, Options, letters={"-o": "--output"})
options = parse_one(flags, Options, f"{PROG} IN", "What it does.")
[source] = expect(files, "IN", PROG)
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from megatron.errors import SettingsError, UsageError
from megatron.settings.declare import dashed
from megatron.settings.parse import parse
from megatron.settings.spelling import NO, YES, spellings_of

SWITCHES = ("-h", "--help", "--help-all", "--print-config", "--then")
VALUED = ("--config", "-c")
Options = TypeVar("Options")


def parse_one(
    argv: list[str], kind: type[Options], prog: str, about: str, common: tuple[str, ...] | None = None
) -> Options:
    """Parse a command's settings. prog: "python -m MODULE ..."; about: a docstring, its first line is shown; common: what
    --help shows (default: all but --debug).
    """
    name = prog.split()[2].rpartition(".")[2]
    common = common or tuple(one for one in kind.__dataclass_fields__ if one != "debug")
    return parse(argv, {name: kind}, prog=prog, description=about.partition("\n")[0], common=common)[name]


def divide(
    argv: list[str], *kinds: type, letters: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], list[str]]:
    """Split a command line into (positional words, flags with their values). A lone `-` is a word: stdin.

    kinds: the command's dataclasses of settings. letters: short flag -> long flag. A switch takes the next word only if
    that is true or false; a flag with several values takes all words up to the next flag; any other takes one word.
    `--` ends the flags.
    """
    known = spellings_of({kind.__name__: kind for kind in kinds})
    files, flags, at = [], [], 0
    while at < len(argv):
        word, at = argv[at], at + 1
        if word == "--":
            return files + argv[at:], flags
        if word == "-" or not word.startswith("-"):
            files.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = letters.get(flag, flag)
        flag = flag if not flag.startswith("--") else flag.replace("_", "-")
        count = 0 if equals else _values(flag, known, argv[at:])
        flags += [flag + equals + value, *argv[at : at + count]]
        at += count
    return files, flags


def _values(flag: str, known: Mapping, rest: list[str]) -> int:
    """The number of words after a flag that are its values."""
    until = next((number for number, word in enumerate(rest) if word.startswith("--")), len(rest))
    if flag in VALUED:
        return min(1, until)
    if flag in SWITCHES or flag not in known:
        return 0
    spelling = known[flag]
    if spelling.setting.many:
        return until
    if spelling.implies is not None or spelling.setting.kind is bool:
        return int(bool(rest) and rest[0].lower() in (*YES, *NO))
    return min(1, len(rest))


def expect(files: list[str], names: str, prog: str) -> list[str]:
    """Return the files if there are as many as `names` has words. Raises UsageError otherwise."""
    wanted = names.split()
    if len(files) == len(wanted):
        return files
    given = f"{len(files)} given: {' '.join(files)}" if files else "none given"
    plural = "s are" if len(wanted) > 1 else " is"
    raise UsageError(f"{len(wanted)} file{plural} wanted ({given})", do=f"{prog} {names}; --help lists the flags")


def refuse_below(options, least: Mapping[str, int]) -> None:
    """Raise SettingsError if a number of a command's settings is below the least one that works; None is not given."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise SettingsError(f"{dashed(name)} {value}: at least {low} is needed")
