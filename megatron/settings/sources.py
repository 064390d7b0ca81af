# SPDX-License-Identifier: Apache-2.0
"""Settings as other suites have them, read from their files and command lines: [TheirSetting(key, words, where, text)].

    read_commands("torchrun --nproc_per_node 8 train.py --lr 1e-4", "run.sh")
        -> [Command(["torchrun", "--nproc_per_node", "8"], "train.py", [TheirSetting("--lr", ["1e-4"], "run.sh:1", ...)])]

YAML, JSON and Python are read, and nothing in them is run: of Python, assignments of plain values alone.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.errors import UsageError
from megatron.settings.dialects.programs import INSTEAD, OURS, TOOLS
from megatron.settings.dialects.table import TheirSetting
from megatron.settings.words import JOINED_LINES

FLAG = re.compile(r"--?[A-Za-z]")


@dataclass
class Command:
    """One command of a script: what starts it, the script or module, its flags, and what is odd about its lines."""

    launcher: list[str]
    program: str
    sources: list[TheirSetting]
    where: str = ""
    words: list[str] = field(default_factory=list)  # behind the program
    notes: list[str] = field(default_factory=list)


def read_commands(text: str, name: str, programs: tuple[str, ...] = ()) -> list[Command]:
    """The commands of a script, by its lines: those of `programs` and of what prepares their data, else all with flags.

    A line that ends in a backslash goes on, also where the shell would take its value and the next flag for one word,
    or the backslash for a part of a comment; that is noted.
    """
    found, tokens, notes = [], [], []
    lines = text.splitlines()
    for number, raw in enumerate(lines, 1):
        body, continued = raw.rstrip(), raw.rstrip().endswith("\\")
        where = f"{name}:{number}"
        words = _words(body[:-1] if continued else body)
        if continued and words and not re.search(r"\s\\$", body) and _begins_with_a_word(lines, number):
            notes.append(f"{where}: no blank before the backslash: for a shell its last word and the next are one")
        if continued and "#" in body and not _words(body[body.index("#") :][:-1]):
            notes.append(f"{where}: for a shell the command ends here, in the comment")
        tokens += [(word, where, body.removesuffix("\\").strip()) for word in words]
        if not continued or number == len(lines):
            if tokens:
                found.append(_command(tokens, programs, notes))
            tokens, notes = [], []
    wanted = [one for one in found if _is_one_of(one.program, (*programs, *OURS, *TOOLS, *INSTEAD))]
    if not wanted and found and all(one.sources and not one.launcher and not one.program for one in found):
        return [Command([], "", [source for one in found for source in one.sources])]  # a list of flags
    return wanted or [one for one in found if one.sources and not programs]


def read_words(words: list[str], programs: tuple[str, ...] = ()) -> Command:
    """A command as a shell has split it already."""
    tokens = []
    for word in words:
        joined = JOINED_LINES.fullmatch(word)
        tokens += [(part, "command", "") for part in (joined.groups() if joined else [word])]
    return _command(tokens, programs, [])


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # quotes that another line closes
        return line.replace('"', " ").replace("'", " ").split()


def _begins_with_a_word(lines: list[str], number: int) -> bool:
    return number < len(lines) and lines[number][:1].strip() != ""


def _is_one_of(program: str, programs: tuple[str, ...]) -> bool:
    return bool(program) and (Path(program).name in programs or program in programs)


def _command(tokens: list[tuple[str, str, str]], programs: tuple[str, ...], notes: list[str]) -> Command:
    words = [word for word, _, _ in tokens]
    at = next((i for i, word in enumerate(words) if _is_one_of(word, (*programs, *OURS, *TOOLS, *INSTEAD))), None)
    if at is None:
        at = next((i for i, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")), None)
    if at is None:
        at = next((i for i, word in enumerate(words) if FLAG.match(word)), len(words)) - 1
    launcher = words[: max(at, 0)]
    if launcher[-1:] == ["-m"]:
        launcher = launcher[:-1]
    program = words[at] if at >= 0 else ""
    place = tokens[max(at, 0)][1] if tokens else ""
    return Command(launcher, program, list(_flags(tokens[at + 1 :])), place, words[at + 1 :], notes)


def _flags(tokens: list[tuple[str, str, str]]) -> Iterator[TheirSetting]:
    """Flags and their words; words that belong to none are `key=value` pairs, as hydra has them."""
    flag, words, where = "", [], ""
    for word, place, _ in [*tokens, ("--", "", "")]:
        if word == "--" or FLAG.match(word):
            if flag:
                yield TheirSetting(flag, words, where, " ".join([flag, *map(shlex.quote, words)]))
            flag, equals, value = word.partition("=")
            words, where = [value] if equals else [], place
        elif flag and (flag == "-o" or not re.match(r"[+~]*[\w.]+\.[\w.]+=", word)):
            words.append(word)
        else:
            key, _, value = word.partition("=")
            yield TheirSetting(key.lstrip("+~"), value.strip("[]").split(","), place, word)


# Files ----------------------------------------------------------------------------------------------------------------


def read_tree(path: str) -> list[TheirSetting]:
    """The leaves of a YAML or JSON file, by dotted keys. Raises UsageError where it is none.

    `${model.x}` and `${.x}` of OmegaConf are what they refer to, where that is plain.
    """
    import yaml

    text = _text(path)
    try:
        root = yaml.compose(text.replace("\t", "  ") if path.endswith(".json") else text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UsageError(f"{where}: neither YAML nor JSON", str(getattr(error, "problem", "") or error)) from None
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: no settings in it", "keys and values are wanted")
    lines = text.splitlines()
    found = {one.key: one for one in _leaves(root, "", path, lines, yaml)}
    return [one._replace(words=[_resolved(word, one.key, found) for word in one.words]) for one in found.values()]


def _leaves(mapping, prefix: str, path: str, lines: list[str], yaml) -> Iterator[TheirSetting]:
    for key_node, node in mapping.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line
        if isinstance(node, yaml.MappingNode):
            yield from _leaves(node, f"{key}.", path, lines, yaml)
        else:
            many = isinstance(node, yaml.SequenceNode)
            words = [str(item.value) for item in node.value] if many else [str(node.value)]
            text = lines[line].split(" #")[0].strip().rstrip(",")
            alone = (
                text.lstrip("\"'").startswith(str(key_node.value)) and text.count(":") == 1 and text[-1] not in ":[{"
            )
            yield TheirSetting(key, words, f"{path}:{line + 1}", text if alone else f"{key}: {', '.join(words)}")


def _resolved(word: str, key: str, found: dict[str, TheirSetting]) -> str:
    reference = re.fullmatch(r"\$\{(\.?)([\w.]+)\}", word)
    if not reference:
        return word
    target = (key.rpartition(".")[0] + "." if reference[1] else "") + reference[2]
    return _resolved(found[target].value, target, found) if target in found and target != key else word


def read_python(path: str) -> list[TheirSetting]:
    """Assignments of a Python file by dotted keys: constants, lists, `dict(...)`, names that were assigned before.

    A class or a call stands as its name. Raises UsageError where the file is no Python.
    """
    text = _text(path)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    found: dict[str, TheirSetting] = {}
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            for key, words, line in _values(node.value, node.targets[0].id, found):
                found[key] = TheirSetting(key, words, f"{path}:{line}", lines[line - 1].strip().rstrip(","))
    return list(found.values())


def _values(node: ast.expr, key: str, found: dict[str, TheirSetting]) -> Iterator[tuple[str, list[str], int]]:
    if isinstance(node, ast.Dict):
        pairs = [
            (one.value if isinstance(one, ast.Constant) else "?", value) for one, value in zip(node.keys, node.values)
        ]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        pairs = [(one.arg or "?", one.value) for one in node.keywords]
    elif isinstance(node, (ast.List, ast.Tuple)):
        yield key, [_word(one, found) for one in node.elts], node.lineno
        return
    else:
        yield key, [_word(node, found)], node.lineno
        return
    for name, value in pairs:
        yield from _values(value, f"{key}.{name}", found)


def _word(node: ast.expr, found: dict[str, TheirSetting]) -> str:
    """A value as a word: `3`, `HybridAdam` for a name or a call of it, a product of numbers as their product."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func)
    if isinstance(node, ast.Name) and node.id in found:
        return found[node.id].value
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        try:
            return str(ARITHMETIC[type(node.op)](*(int(_word(side, found)) for side in (node.left, node.right))))
        except (ValueError, ZeroDivisionError):
            return ast.unparse(node)
    return ast.unparse(node)


ARITHMETIC = {
    ast.Mult: lambda a, b: a * b,
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.FloorDiv: lambda a, b: a // b,
}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text") from None
