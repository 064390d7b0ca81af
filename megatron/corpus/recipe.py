# SPDX-License-Identifier: Apache-2.0
"""The recipe of a corpus: a YAML file with the input files and the stages.

    input: [crawl/*.jsonl.zst, books.jsonl]
    stages:
      - filter: [gopher, {language: {keep: [en, "no"]}}]
      - near-duplicates: {preset: fineweb}
      - shuffle: {seed: 7}
      - tokenize: {tokenizer-type: HuggingFaceTokenizer, tokenizer-model: tokenizer.json, append-eod: true}

A plain word is a text, unless it is a number, true, false or null: `no` is Norwegian.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.errors import UsageError, did_you_mean

NUMBER = re.compile(r"[-+]?(\d[\d_]*)?(\.\d*)?([eE][-+]?\d+)?")
WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
FILTER = "filter"


@dataclass(frozen=True)
class StageWanted:
    """A stage of the recipe, or one filter of a list. where: file and line"""

    name: str
    options: Mapping[str, Any]
    where: str
    is_filter: bool = False


@dataclass(frozen=True)
class CorpusRecipe:
    """The contents of a recipe. Sizes in MB are 10^6 bytes of text."""

    input: list[str]
    stages: list[StageWanted]
    text_key: str = "text"
    document_separator: str = ""
    shard_mb: float = 64.0
    max_document_mb: float = 16.0
    task_memory_gb: float = 1.0
    on_damaged: str = "set-aside"
    samples: int = 20  # documents per rule and shard to keep for the report
    path: str = ""
    where: Mapping[str, str] = field(default_factory=dict)  # key -> file:line


KEYS = [one.name.replace("_", "-") for one in fields(CorpusRecipe) if one.name not in ("path", "where")]
TYPES = dict(shard_mb=float, max_document_mb=float, task_memory_gb=float, samples=int)
TYPES |= dict(text_key=str, document_separator=str, on_damaged=str)


def read_recipe(path: str | Path) -> CorpusRecipe:
    """Read a recipe. Raises UsageError with the line of an error."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", do="give the YAML file of a recipe") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text") from None
    return parse_recipe(text, str(path))


def parse_recipe(text: str, path: str = "recipe") -> CorpusRecipe:
    """Parse the text of a recipe; `path` is for messages."""
    values, where = _mapping(_compose(text, path), path)
    for key in values:
        if key not in KEYS:
            raise UsageError(
                f"{where[key]}: unknown key {key}{did_you_mean(key, KEYS)}", do=f"known: {', '.join(KEYS)}"
            )
    for key in ("input", "stages"):
        if not values.get(key):
            raise UsageError(f"{path}: {key} is missing", do="a recipe has `input: [FILES]` and `stages: [...]`")
    inputs = values["input"] if isinstance(values["input"], list) else [values["input"]]
    if not all(isinstance(one, str) for one in inputs):
        raise UsageError(f"{where['input']}: input is a list of files, globs and folders")
    named = {key.replace("-", "_"): value for key, value in values.items() if key not in ("input", "stages")}
    for name, value in named.items():
        named[name] = _typed(value, TYPES[name], f"{where[name.replace('_', '-')]}: {name.replace('_', '-')}")
    if named.get("on_damaged", "stop") not in ("stop", "set-aside"):
        raise UsageError(f"{where['on-damaged']}: on-damaged is stop or set-aside, not {named['on_damaged']}")
    stages = _stages(values["stages"], where["stages"], path)
    return CorpusRecipe(inputs, stages, path=path, where=where, **named)


def _typed(value: Any, kind: type, what: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(
            f"{what} {value!r} is no {dict(float='number', int='whole number', str='text')[kind.__name__]}"
        )
    if kind in (int, float) and not (value > 0 or kind is int and value == 0):
        raise UsageError(f"{what} {value}: more than 0 is needed")
    return value


# ---------------------------------------------------------------------------------------------------- stages


@dataclass(frozen=True)
class _Entry:
    """An item of a list with its line."""

    value: Any
    line: int


def _stages(entries: Any, where: str, path: str) -> list[StageWanted]:
    if not isinstance(entries, list):
        raise UsageError(f"{where}: stages is a list: `- filter: [...]`, `- shuffle`, ...")
    stages = []
    for entry in entries:
        name, options = _named(entry, path)
        at = f"{path}:{entry.line}"
        if name != FILTER:
            if not isinstance(options, dict):
                raise UsageError(f"{at}: {name}: options are a mapping, `{name}: {{option: value}}`")
            stages.append(StageWanted(name, options, at))
            continue
        if not isinstance(options, list) or not options:
            raise UsageError(f"{at}: filter takes a list of filters, `filter: [NAME, {{NAME: {{option: value}}}}]`")
        for one in options:
            inner, more = _named(one, path)
            if not isinstance(more, dict):
                raise UsageError(f"{path}:{one.line}: {inner}: options are a mapping, `{inner}: {{option: value}}`")
            stages.append(StageWanted(inner, more, f"{path}:{one.line}", is_filter=True))
    return stages


def _named(entry: _Entry, path: str) -> tuple[str, Any]:
    """(name, options) of `- shuffle` or `- shuffle: {seed: 7}`."""
    value = entry.value
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict) and len(value) == 1:
        [(name, options)] = value.items()
        return name, _plain(options) if name != FILTER and options is not None else options or {}
    names = f" ({', '.join(map(str, value))})" if isinstance(value, dict) else ""
    raise UsageError(
        f"{path}:{entry.line}: a stage has one name{names}",
        do="`- NAME` or `- NAME: {option: value}`, each after a dash",
    )


def _plain(value: Any) -> Any:
    """Items of lists without their lines."""
    if isinstance(value, list):
        return [_plain(one.value) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value


# ---------------------------------------------------------------------------------------------------- YAML


def _compose(text: str, path: str):
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{path}:{mark.line + 1}" if mark else path
        raise UsageError(f"{at}: not YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply") from None
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: a recipe is `key: value` lines, with `input:` and `stages:`")
    return root


def _mapping(root, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(values of the root, place of each key). Stages keep their line numbers."""
    values, where = {}, {}
    for key, node in root.value:
        name = str(key.value).replace("_", "-")
        if name in values:
            raise UsageError(f"{path}:{key.start_mark.line + 1}: {name} is given twice")
        where[name] = f"{path}:{key.start_mark.line + 1}"
        value = _value(node, path)
        values[name] = value if name == "stages" else _plain(value)
    return values, where


def _value(node, path: str, depth: int = 0) -> Any:
    import yaml

    if depth > 20:  # also an alias of itself
        raise UsageError(f"{path}:{node.start_mark.line + 1}: nested too deeply")
    if isinstance(node, yaml.SequenceNode):
        return [_Entry(_value(one, path, depth + 1), one.start_mark.line + 1) for one in node.value]
    if isinstance(node, yaml.MappingNode):
        values = {}
        for key, one in node.value:
            name = str(key.value)
            if name in values:
                raise UsageError(f"{path}:{key.start_mark.line + 1}: {name} is given twice")
            values[name] = _value(one, path, depth + 1)
        return values
    return node.value if node.style else scalar(node.value)


def scalar(word: str) -> Any:
    """The value of an unquoted word of a recipe.

    >>> scalar("no"), scalar("true"), scalar("1e-4"), scalar("50_000"), scalar("1.5.2")
    ('no', True, 0.0001, 50000, '1.5.2')
    """
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    match = NUMBER.fullmatch(word)
    if not match or not re.search(r"\d", word):
        return word
    try:
        return float(word) if match[2] or match[3] else int(word)
    except ValueError:
        return word
