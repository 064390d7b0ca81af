# SPDX-License-Identifier: Apache-2.0
"""Read settings from a file: YAML, JSON, or assignments of Python, which are not run; flat or under group names, with
keys spelled as fields or as flags.
"""

from pathlib import Path
from typing import Optional

from megatron.errors import UsageError
from megatron.settings.python_file import compose_python

NULL: list[str] = []  # the words of a key that is null; an empty list is another one
EMPTY = ("", "~", "null", "Null", "NULL", "None")


def compose(path: str):
    """Parse a file to its root, a mapping of PyYAML's nodes; None if the file is empty.

    Values stay text, so that `1e-4` or `no` have the same meaning as on a command line.
    Raises UsageError if the file is missing, is not YAML (or plain assignments of Python), or is not a mapping.
    """
    import yaml

    if not path:
        raise UsageError("--config needs the name of a YAML file")
    text = read_text(path, "--config ")
    try:
        root = compose_python(text, path) if path.endswith(".py") else yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UsageError(
            f"{where}: not YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"
        ) from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: expected lines of `key: value`")
    return root


def read_text(path: str, flag: str = "") -> str:
    """Read a text file. flag: prefix of messages, such as "--config ". Raises UsageError if it is missing or not text."""
    try:
        return Path(path).read_text(encoding="utf-8")
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
