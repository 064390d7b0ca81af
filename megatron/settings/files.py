# SPDX-License-Identifier: Apache-2.0
"""Read settings from a file: YAML, JSON, or assignments of Python, which are not run.

`read_settings` reads this suite's, flat or under group names, with keys spelled as fields or as flags; `read_tree` and
`read_python` those of other suites, with dotted keys.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

from megatron.errors import UsageError, no_such_file
from megatron.settings.dialects.table import TheirSetting
from megatron.settings.python_file import compose_python, items, read_assignments

CODE = "code"  # the key of a line that only execution could resolve

NULL: list[str] = []  # the words of a key that is null; an empty list is another one
EMPTY = ("", "~", "null", "Null", "NULL", "None")


def compose(path: str, flag: str = "--config"):
    """Parse a file to its root, a mapping of PyYAML's nodes; None if the file is empty. flag: as the user wrote it.

    Values stay text, so that `1e-4` or `no` have the same meaning as on a command line.
    Raises UsageError if the file is missing, is not YAML (or plain assignments of Python), or is not a mapping.
    """
    import yaml

    if not path:
        raise UsageError(f"{flag} needs the name of a YAML file")
    text = read_text(path, f"{flag} ")
    try:
        root = compose_python(text, path) if path.endswith(".py") else yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{_place(error, path)}: not YAML: {_problem(error)}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: expected lines of `key: value`")
    return root


def _problem(error) -> str:
    """What PyYAML found wrong. It names tokens of its grammar where lines are indented otherwise than those beside them."""
    found = str(getattr(error, "problem", None) or str(error).splitlines()[0])
    if "<block" in found or "mapping values are not allowed" in found:
        return "this line is not indented as those beside it, or a colon or quote is missing before it"
    return found


def _place(error, path: str) -> str:
    """The place of an error of PyYAML."""
    mark = getattr(error, "problem_mark", None)
    return f"{path}:{mark.line + 1}" if mark else path


def read_text(path: str, flag: str = "") -> str:
    """Read a text file. flag: prefix of messages, such as "--config ". Raises UsageError if it is missing or not text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{flag}{path}: {no_such_file(path)}") from None
    except OSError as error:
        raise UsageError(f"{flag}{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag}{path}: not UTF-8 text") from None


def read_settings(root, path: str) -> list[tuple[str, Optional[list[str]], int]]:
    """The settings of a file's root as [(key, words, line)], in order; a mapping under a key is a group and is flattened.

    `null` omits a key, whose words are `NULL`; a key without a value has None. Raises UsageError for a key given twice.
    """
    import yaml

    return _unfold(root, path, {}, yaml)


def merged(mapping) -> list[tuple]:
    """(key, value) nodes of a mapping, with those of `<<: *anchor`, which its own keys override."""
    own = [pair for pair in mapping.value if pair[0].value != "<<"]
    for node in [node for key, node in mapping.value if key.value == "<<"]:
        for one in node.value if node.id == "sequence" else [node]:
            names = {key.value for key, _ in own}
            own += [pair for pair in merged(one) if pair[0].value not in names]
    return own


def _unfold(mapping, path: str, seen: dict[str, int], yaml) -> list[tuple[str, Optional[list[str]], int]]:
    rows = []
    for key_node, node in merged(mapping):
        key, line = str(key_node.value).replace("-", "_").lstrip("_"), key_node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            rows += _unfold(node, path, seen, yaml)
            continue
        if key in seen:
            raise UsageError(f"{path}:{line}: {key} is given twice (also in line {seen[key]})")
        seen[key] = line
        if isinstance(node, yaml.SequenceNode):
            rows.append((key, [str(item.value) for item in node.value], line))
        elif node.style is None and node.value in ("null", "~"):
            rows.append((key, NULL, line))
        else:
            rows.append((key, [node.value] if node.style or node.value else None, line))
    return rows


def node_of(text: str):
    """The node of a value in `-o key=value`, which may be a list, a tuple or a mapping."""
    import yaml

    if text.strip()[:1] in ("[", "(", "{", "'", '"'):
        try:
            return yaml.compose(text.replace("(", "[").replace(")", "]"), Loader=yaml.BaseLoader)
        except yaml.YAMLError:
            pass  # an ordinary word
    return yaml.ScalarNode("", text)


def words_of(node) -> Optional[list[str]]:
    """Split a value into words: `[949, 50, 1]` has three, also in quotes. None: it is empty."""
    if isinstance(node.value, list):
        return [one.value if isinstance(one.value, str) else "[...]" for one in node.value] or None
    text = node.value.strip()
    if text[:1] + text[-1:] in ("[]", "()"):
        return [word.strip(" '\"") for word in text[1:-1].split(",") if word.strip()] or None
    return None if text in EMPTY and not (node.style and text != "None") else [node.value.strip()]


# Files of other suites -------------------------------------------------------------------------------------------------


def read_tree(path: str) -> list[TheirSetting]:
    """Read the leaves of a YAML or JSON file, with dotted keys. Raises UsageError for other files.

    OmegaConf's `${model.x}`, `${.x}` and `${..x}` are resolved if they refer to a plain value.
    """
    import yaml

    text = read_text(path)
    try:
        root = yaml.compose(text.replace("\t", "  ") if path.endswith(".json") else text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{_place(error, path)}: neither YAML nor JSON", _problem(error)) from None
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: no settings in it", "keys and values are wanted")
    leaves = list(_leaves(root, "", path, text.splitlines(), yaml))
    last = {one.key: one for one in leaves}
    return [one._replace(words=[_resolved(word, one.key, last) for word in one.words]) for one in leaves]


def _leaves(mapping, prefix: str, path: str, lines: list[str], yaml) -> Iterator[TheirSetting]:
    for key_node, node in mapping.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line
        if isinstance(node, yaml.MappingNode) and node.value:
            yield from _leaves(node, f"{key}.", path, lines, yaml)
        else:
            many = isinstance(node, yaml.CollectionNode)
            words = [str(getattr(item, "value", item)) for item in node.value] if many else [str(node.value)]
            text = lines[line].split(" #")[0].strip().rstrip(",")
            alone = (
                text.lstrip("\"'").startswith(str(key_node.value)) and text.count(":") == 1 and text[-1] not in ":[{"
            )
            yield TheirSetting(key, words, f"{path}:{line + 1}", text if alone else f"{key}: {', '.join(words)}")


def _resolved(word: str, key: str, leaves: dict[str, TheirSetting]) -> str:
    reference = re.fullmatch(r"\$\{(\.*)(\w[\w.]*)\}", word)
    if not reference:
        return word
    up, places = len(reference[1]), key.split(".")  # a dot: beside the key; each further one: a level up
    target = ".".join([*places[: max(0, len(places) - up)], reference[2]] if up else [reference[2]])
    return _resolved(leaves[target].value, target, leaves) if target in leaves and target != key else word


def read_python(path: str, names: Callable[[str], bool] = lambda key: True) -> list[TheirSetting]:
    """Read the assignments of a Python file, with dotted keys: constants, lists, `dict(...)`. A class or a call is read
    as its name, and a line that needs execution has the key `CODE`; imports are skipped. Raises UsageError for bad Python.

    names: whether a key is a setting; a name that is none, and that other lines use, is only substituted there.
    """
    text = read_text(path)
    file, lines = read_assignments(text, path), text.splitlines()
    assigned = [(name, value) for name, value in file.assigned if names(name) or name not in file.used]
    rows = [one for name, value in assigned for one in _values(value, name)]
    many = Counter(line for _, _, line in rows)

    def place(key: str, words: list[str], line: int) -> TheirSetting:
        text = lines[line - 1].strip().rstrip(",") if many[line] < 2 else f"{key} = {', '.join(words)}"
        return TheirSetting(key, words, f"{path}:{line}", text)

    code = [node for node in file.others if not isinstance(node, (ast.Import, ast.ImportFrom))]
    return [place(*one) for one in rows] + [place(CODE, [], node.lineno) for node in code]


def _values(node: ast.expr, key: str) -> Iterator[tuple[str, list[str], int]]:
    pairs = items(node)
    if isinstance(node, (ast.List, ast.Tuple)):
        yield key, [_word(one) for one in node.elts], node.lineno
    elif not pairs:
        yield key, [_word(node)], node.lineno
    for name, value in pairs or ():
        yield from _values(value, f"{key}.{name or '?'}")


def _word(node: ast.expr) -> str:
    """Convert a value to a word: `3`, `HybridAdam` for a name or a call of it."""
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(getattr(node, "func", node))
