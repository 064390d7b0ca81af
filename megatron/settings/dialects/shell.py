# SPDX-License-Identifier: Apache-2.0
"""Split a shell's commands into launchers, programs and flags. Nothing is run.

read_commands("torchrun --nproc_per_node 8 train.py --lr 1e-4", "run.sh")
    -> [Command(["torchrun", "--nproc_per_node", "8"], "train.py", [TheirSetting("--lr", ["1e-4"], "run.sh:1", ...)])]
"""

import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from megatron.settings.argv import GLUED, JOINED_LINES
from megatron.settings.declare import dashed
from megatron.settings.dialects.commands import INSTEAD, OURS
from megatron.settings.dialects.table import TheirSetting
from megatron.settings.schema import GROUPS
from megatron.settings.spelling import spellings_of

FLAG = re.compile(r"--?[A-Za-z]")
ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
REDIRECTION = re.compile(r"\||\|&|&|(\d|&)?>+(&\d)?.*")  # and what follows: `2>&1 | tee log.txt`
RUN = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # $(command)
QUOTED = rf"""'[^']*' | "(?:\\.|[^"\\])*" | \\. | `[^`]*` | \$\{{[^}}]*\}} | \(\([^()]*\)\) | [<>]\([^()]*\) | {RUN}"""
WORD = re.compile(rf"""(;+ | (?:{QUOTED} | [^\s;'"\\()])+ | [()])""", re.VERBOSE)
OPERATORS = (";", ";;", "&&", "||")
OPENS, CLOSES = ("then", "do", "else", "{", "("), ("elif", "else", "fi", "done", "}", ")")
CONDITIONS, LOOPS, TESTS = ("if", "elif", "while", "until"), ("for", "select"), ("[", "[[", "test")
FUNCTION = re.compile(r"function [\w-]+( \( \))?|[\w-]+ \( \)")
BUILTINS = "set unset wait shift export : true".split()  # shell commands that need no change around another program
LITERAL = "\uf8ff"  # a dollar sign that a shell leaves alone, as in '$x'
HOME = re.compile(r"^~(?=/|$)")  # which a shell replaces where it begins a word without quotes
ALONE = re.compile(rf"\$\w+|\$\{{[^}}]*\}}|{RUN}")  # a word that is a variable or the output of a command
LISTS = re.compile(r"\$[@*]|\$\{[@*]|\$\{\w+\[[@*]\]")  # a word that holds a list of words


@dataclass
class Command:
    """One command of a script: its launcher, the script or module, its flags, and notes about its lines.

    kind: "run" is translated, "assigns" (`export NAME=value`, `sources` are its names) and "shell" (the words of loops
    and conditions) are kept, and "other" is only reported.
    """

    launcher: list[str]
    program: str
    sources: list[TheirSetting]
    where: str = ""
    words: list[str] = field(default_factory=list)  # after the program, as written
    notes: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)  # redirections of the shell
    tokens: list[tuple[str, str, str]] = field(default_factory=list)  # the launcher: word, place, as written
    kind: str = "other"
    text: str = ""  # as written
    in_condition: bool = False  # `if python train.py; then`, which is reported too
    joined: str = ""  # the operator before the next command


def read_commands(text: str, name: str, programs: tuple[str, ...] = ()) -> list[Command]:
    """Parse a script into commands. Those of `programs`, and those that prepare their data, are of kind "run"; without
    them, all commands with flags. The list is empty if there are none.

    A line that ends in a backslash continues, even if the shell would join its last word with the next flag, or read
    the backslash as part of a comment; a note says so.
    """
    commands, tokens, notes = [], [], []
    own, inside = {*BUILTINS}, False  # inside a `case`, everything is only reported
    lines = text.splitlines()
    for number, raw in enumerate(lines, 1):
        body, continued = raw.rstrip(), raw.rstrip().endswith("\\")
        where = f"{name}:{number}"
        words = _words(body[:-1] if continued else body)
        begins_with_a_word = lines[number : number + 1] and lines[number][:1].strip()  # the next line
        if continued and words and not re.search(r"\s\\$", body) and begins_with_a_word:
            notes.append(f"{where}: no blank before the backslash: for a shell its last word and the next are one")
        if continued and "#" in body and not _words(body[body.index("#") :][:-1]):
            notes.append(f"{where}: for a shell the command ends here, in the comment")
        tokens += [(word, where, as_written) for word, as_written in words]
        if not continued or number == len(lines):
            for kind, part, joined in _parts(tokens):
                one, first = _command(part, programs, notes), part[0][2]
                own |= {*(FUNCTION.fullmatch(one.text) or [""])[0].strip("() ").split()[-1:]}
                kind = kind or ("shell" if first in own and one.kind == "other" else one.kind)
                if inside := (inside or first == "case") and first != "esac":
                    one, kind = Command([], "", [], one.where, text=one.text), "other"
                commands.append(replace(one, kind=kind, joined=joined))
                notes = []
            tokens, notes = [], []
    wanted = [one for one in commands if name_among(one.program, (*programs, *OURS, *INSTEAD))]
    if not wanted and commands and all(one.sources and not one.launcher and not one.program for one in commands):
        return [Command([], "", [source for one in commands for source in one.sources], kind="run")]  # a list of flags
    wanted = wanted or [one for one in commands if one.sources and one.kind == "other" and not programs]
    for one in wanted:
        one.in_condition = one.kind == "shell"
        one.kind = "run" if one.kind == "other" else one.kind
    return list(_with_operators(commands)) if wanted else []


def _with_operators(commands: list[Command]) -> Iterator[Command]:
    """Add `&&` and `||` to the commands: kept between words of the shell, and reported with other commands."""
    for one, after in pairwise([*commands, Command([], "", [])]):
        operator = one.joined if one.joined in ("&&", "||") else ""
        single = after.kind == "assigns" and len(after.sources) == 1
        if operator and single and one.kind == "other" and one.text.split()[0] in TESTS:
            one.kind = "shell"
        if operator and one.kind == "shell" and (after.kind == "shell" or single):
            one.text += f" {operator}"
        elif operator and after.kind == "other":
            after.text = f"{operator} {after.text}"
        elif operator and one.kind == "other":
            one.text += f" {operator}"
        elif operator and (operator, one.kind) != ("&&", "assigns"):
            yield one
            one = Command([], "", [], one.where, text=operator)
        yield one


def read_words(words: list[str], programs: tuple[str, ...] = ()) -> Command:
    """Parse a command that a shell has already split."""
    tokens = []
    for word in words:
        joined = JOINED_LINES.fullmatch(word)
        tokens += [(part, "command", quoted(part)) for part in (joined.groups() if joined else [word])]
    return replace(_command(tokens, programs, []), kind="run")


def _words(line: str) -> list[tuple[str, str]]:
    """Split a line of a shell into (word, as written), up to a comment. Quotes that another line closes are skipped.

    >>> _words("A=$(cat x | wc -l); echo 'b c' # d")
    [('A=$(cat x | wc -l)', 'A=$(cat x | wc -l)'), (';', ';'), ('echo', 'echo'), ('b c', "'b c'")]
    """
    words = WORD.findall(line)
    end = next((i for i, word in enumerate(words) if word.startswith("#")), len(words))
    return [(re.sub(QUOTED, _unquoted, HOME.sub("$HOME", word), flags=re.VERBOSE), word) for word in words[:end]]


def _unquoted(match: re.Match) -> str:
    """The text inside quotes; `x` becomes $(x), so that `quoted` keeps it; a literal dollar sign becomes `LITERAL`."""
    text = match[0]
    if text[0] in '"`':
        inner = re.sub(r'\\(["\\])', r"\1", text[1:-1].replace("\\$", LITERAL)) if text[0] == '"' else text
        return re.sub("`([^`]*)`", r"$(\1)", inner)
    if text[0] in "'\\":
        return (text[1:-1] if text[0] == "'" else text[1:]).replace("$", LITERAL)
    return text


def _parts(tokens: list[tuple[str, str, str]]) -> Iterator[tuple[str, list[tuple[str, str, str]], str]]:
    """Split tokens into commands: (kind, tokens, operator after it). `if [ $A ]; then python a.py; fi` has four."""
    part, kind, condition, subshells = [], "", False, 0
    for token in [*tokens, (";", "", ";")]:
        word = token[2]
        if word in (*OPERATORS, "{") and FUNCTION.fullmatch(" ".join(one[2] for one in part)):
            yield "shell", part, ""
            part, kind = [], ""
        if word in OPERATORS:
            if part:
                yield kind, part, word
            part, kind = [], "shell" if condition else ""
        elif subshells and word == ")" and "(" not in [one[2] for one in part]:
            yield from [(kind, part, "")] * bool(part)
            yield "shell", [token], ""
            part, kind, subshells = [], "", subshells - 1
        elif part:
            part.append(token)
        elif word in OPENS:
            condition, kind, subshells = False, "", subshells + (word == "(")
            yield "shell", [token], ""
        else:
            condition = condition or word in CONDITIONS
            kind = "shell" if condition or word in (*LOOPS, *CLOSES) else ""
            part = [token]


def name_among(program: str, names: Collection[str]) -> str:
    """The name that a program's path ends in, "" for none: tools/eval.py of ./tools/eval.py, train.py of x/train.py."""
    return next((name for name in names if program == name or program.endswith(f"/{name}")), "")


def _command(tokens: list[tuple[str, str, str]], programs: tuple[str, ...], notes: list[str]) -> Command:
    words, place = [word for word, _, _ in tokens], tokens[0][1] if tokens else ""
    text = " ".join(written for _, _, written in tokens)
    if sources := list(_assigned(tokens)):
        return Command([], "", sources, place, notes=notes, kind="assigns", text=text)
    named = [i for i, word in enumerate(words) if name_among(word, (*programs, *OURS, *INSTEAD))]
    named = named or [i for i, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")]
    at = named[0] if named else next((i for i, word in enumerate(words) if FLAG.match(word)), len(words)) - 1
    launcher = words[: max(at, 0)]
    if launcher[-1:] in (["-m"], ["--module"]):
        launcher = launcher[:-1]
    program = words[at] if at >= 0 else ""
    place = tokens[max(at, 0)][1] if tokens else ""
    end = next((i for i in range(at + 1, len(words)) if REDIRECTION.fullmatch(words[i])), len(words))
    flags, behind = list(flags_of_words(tokens[at + 1 : end])), words[end:]
    own = [written for _, _, written in tokens[at + 1 : end]]
    return Command(launcher, program, flags, place, own, notes, behind, tokens[: len(launcher)], text=text)


def _assigned(tokens: list[tuple[str, str, str]]) -> Iterator[TheirSetting]:
    """The variables of a line that only assigns: `export A=1 B=2`."""
    exported = [word for word, _, _ in tokens[:1] if word == "export"]
    own = tokens[len(exported) :]
    if own and all(ASSIGNED.match(word) for word, _, _ in own):
        for word, where, written in own:
            name, _, value = word.partition("=")
            yield TheirSetting(name, [value], where, " ".join([*exported, written]))


def quoted(word: str) -> str:
    """Quote a word for bash; variables in it stay variables, and NAME=value an assignment."""
    if ASSIGNED.match(word):
        name, _, value = word.partition("=")
        return f"{name}={quoted(value)}" if value else word
    if "$" not in word:
        return shlex.quote(word.replace(LITERAL, "$"))
    inner = re.sub(rf'{RUN}|"', lambda match: match[0] if match[0] != '"' else '\\"', word)
    return f'"{inner}"'.replace(LITERAL, "\\$")


def flags_of_words(tokens: list[tuple[str, str, str]]) -> Iterator[TheirSetting]:
    """Parse flags and their words; words without a flag are hydra's `key=value` pairs.

    A variable after a value is a setting of its own, since it may hold flags: `--lr 1e-4 $MORE`.
    """
    flag, words, where = "", [], ""
    for word, place, _ in [*tokens, ("--", "", "")]:
        glued = GLUED.fullmatch(word)
        more = LISTS.match(word) or words and ALONE.fullmatch(word) and not _takes_many(flag)
        if word == "--" or FLAG.match(word) or more:
            if flag:
                yield TheirSetting(flag, words, where, " ".join([flag, *map(quoted, words)]))
            flag, equals, value = (word, "", "") if more else word.partition("=")
            flag, value = (glued[1], glued[2]) if glued else (flag, value)
            words, where = [value] if glued or equals else [], place
        elif flag and (flag in ("-o", "--override") or not re.match(r"[+~]*[\w.]+\.[\w.]+=", word)):
            words.append(word)
        else:
            key, _, value = word.partition("=")
            yield TheirSetting(key.lstrip("+~"), value.strip("[]").split(","), place, word)


def _takes_many(flag: str) -> bool:
    """Whether a flag with this suite's own name takes several values."""
    spelling = spellings_of(GROUPS).get(dashed(flag.lstrip("-")))
    return spelling is not None and spelling.setting.many and spelling.flag == dashed(spelling.setting.name)
