# SPDX-License-Identifier: Apache-2.0
"""Import the code of a recipe's stages and filters by name, and check their options.

A filter is a class of `megatron/corpus/filters`; a stage of phases is a function (options, number of shards, bytes of
memory a task may take) -> phases. The module of a stage may also have a dataclass OPTIONS and `explain` (see
`explain.py`). A name with a colon is a user's own: `my_package.my_module:MyFilter`.
"""

import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.corpus.filters import FILTERS
from megatron.corpus.recipe import StageWanted
from megatron.corpus.stage import Filter
from megatron.errors import MissingPackage, UsageError, did_you_mean
from megatron.telemetry.own_code import checksum, file_of, own_files

_NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
STAGES = {
    "exact-duplicates": "megatron.corpus.exact_duplicates:phases",
    "near-duplicates": "megatron.corpus.near_duplicates:phases",
    "exact-substrings": "megatron.corpus.exact_substrings:phases",
    "decontaminate": "megatron.corpus.decontaminate:phases",
    "shuffle": "megatron.corpus.shuffle:phases",
    "tokenize": "megatron.corpus.tokenize:phases",
}


def stage_address(stage: StageWanted) -> str:
    """ "module:name" of a stage or filter. Raises UsageError for an unknown one."""
    if ":" in stage.name:
        return stage.name
    table, other = (FILTERS, STAGES) if stage.is_filter else (STAGES, FILTERS)
    name = stage.name.replace("_", "-") if stage.name.replace("_", "-") in table else stage.name
    if name in table:
        return table[name]
    kind = "filter" if stage.is_filter else "stage"
    if name in other:
        do = f"`- {name}` of its own" if stage.is_filter else f"`- filter: [{name}]`"
        raise UsageError(f"{stage.where}: {name} is no {kind}", do=f"write {do}")
    known = ", ".join([*sorted(table), *([] if stage.is_filter else ["filter"])])
    raise UsageError(
        f"{stage.where}: unknown {kind} {name}{did_you_mean(name, [*table, 'filter'])}", do=f"known: {known}"
    )


def load(address: str, where: str = "") -> Any:
    """The object at "module:name". Raises UsageError if there is none, and SettingsError for a missing package."""
    module, _, name = address.partition(":")
    if not (module and name):
        raise UsageError(f"{where}: {address!r} has no module, or no name in it", do="write package.module:Class")
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise UsageError(f"{where}: there is no module {module}", str(error), "check its name") from None
        raise MissingPackage(
            f"{where}: {module} needs the package {error.name}", do="pip install '.[corpus]'"
        ) from None
    if not hasattr(imported, name):
        raise UsageError(f"{where}: {module} has no {name}", do=f"it has: {', '.join(_public(imported))}")
    return getattr(imported, name)


def module_of(address: str):
    """The loaded module of "module:name"."""
    return sys.modules[address.partition(":")[0]]


def _public(module) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


@cache
def code_version(address: str) -> str:
    """The version of a stage's or filter's code: VERSION of its class or module, else a digest of source files.

    These are its module and all modules that it imports, directly or not, from megatron/corpus and from its own folder.
    """
    name, _, attribute = address.partition(":")
    module = import_module(name)
    version = getattr(getattr(module, attribute, None), "VERSION", getattr(module, "VERSION", None))
    if version is not None:
        return str(version)
    files = own_files(name, inside=__package__)
    if source := getattr(module, "__file__", None):
        files[""] = Path(source)  # also of an installed package
    return checksum("".join(f"{key} {checksum(path.read_bytes())}\n" for key, path in files.items()).encode())


def code_of_options(options: Mapping[str, Any]) -> list[str]:
    """The versions of code in options given as "module:name": a rule, a scorer."""
    named = [word for word in options.values() if isinstance(word, str) and _NAMED.fullmatch(word)]
    return [code_version(word) for word in named if file_of(word.partition(":")[0])]


# ---------------------------------------------------------------------------------------------------- options


def build_filter(name: str, **options) -> Filter:
    """A filter with its options, as a recipe has it: `build_filter("language", keep=["en"])({"text": ...})` -> Verdict.

    Raises UsageError and SettingsError as for a recipe.
    """
    stage = StageWanted(name, options, f"filter {name}", is_filter=True)
    return load(stage_address(stage), stage.where)(**filter_options(stage))


def filter_options(stage: StageWanted) -> dict[str, Any]:
    """The options of a filter as keyword arguments of its class. Raises UsageError for unknown ones."""
    made = load(stage_address(stage), stage.where)
    return checked_options(stage, _parameters(made), made)


def phase_options(stage: StageWanted) -> dict[str, Any]:
    """The options of a stage of phases, checked where its module has OPTIONS."""
    address = stage_address(stage)
    load(address, stage.where)
    module = module_of(address)
    kind = getattr(module, "OPTIONS", None)
    if kind is None or not is_dataclass(kind):
        return {name.replace("-", "_"): value for name, value in stage.options.items()}
    return checked_options(stage, _parameters(kind), kind)


def _parameters(made: Callable) -> dict[str, inspect.Parameter]:
    if inspect.isclass(made) and made.__init__ is object.__init__:
        return {}
    return dict(inspect.signature(made).parameters)


def checked_options(stage: StageWanted, taken: Mapping[str, inspect.Parameter], made: Any) -> dict[str, Any]:
    """The options with the names of the parameters, each of the right type."""
    hints = _hints(made)
    options = {}
    for key, value in stage.options.items():
        name = str(key).replace("-", "_")
        if name not in taken:
            near = did_you_mean(name, taken).replace("_", "-")
            known = ", ".join(one.replace("_", "-") for one in taken) or "it takes none"
            raise UsageError(f"{stage.where}: {stage.name}: unknown option {key}{near}", do=f"known: {known}")
        if name in options:
            raise UsageError(f"{stage.where}: {stage.name}: {key} is given twice")
        options[name] = typed(value, hints.get(name, Any), f"{stage.where}: {stage.name}: {key}")
    lacking = [name for name, one in taken.items() if one.default is one.empty and one.kind not in (2, 4)]
    if lacking := [name.replace("_", "-") for name in lacking if name not in options]:
        raise UsageError(f"{stage.where}: {stage.name} needs {' and '.join(lacking)}")
    return options


def _hints(made: Any) -> dict[str, Any]:
    if is_dataclass(made):
        known = typing.get_type_hints(made)
        return {one.name: known[one.name] for one in fields(made)}
    try:
        return typing.get_type_hints(made.__init__ if inspect.isclass(made) else made)
    except (NameError, TypeError):
        return {}


def typed(value: Any, kind: Any, what: str) -> Any:
    """The value converted to an annotated type. Raises UsageError if it does not fit."""
    fit, wanted = _fit(value, kind)
    if not fit:
        raise UsageError(f"{what} {value!r}: {wanted} is wanted")
    return _converted(value, kind)


def _fit(value: Any, kind: Any) -> tuple[bool, str]:
    """(whether a value of a recipe fits a type, the type in words)."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        answers = [_fit(value, one) for one in inner]
        return any(fit for fit, _ in answers), " or ".join(words for _, words in answers)
    if origin is typing.Literal:
        return value in inner and not isinstance(value, bool), " or ".join(map(str, inner))
    base = origin or kind
    if isinstance(base, type) and issubclass(base, (list, tuple, set, frozenset)) or origin in _ROWS:
        items = [one for one in inner if one is not Ellipsis]
        return isinstance(value, (list, tuple)) and all(
            _fit(one, items[0])[0] for one in value if items
        ), f"a list{' of ' + _fit(None, items[0])[1] if items else ''}"
    simple = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}
    if base is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool), simple[float]
    if base is int:
        return isinstance(value, int) and not isinstance(value, bool), simple[int]
    if base in simple:
        return isinstance(value, base), simple[base]
    if isinstance(base, type) and issubclass(base, Path):
        return isinstance(value, str), "a path"
    if base is dict or origin is Mapping:
        return isinstance(value, dict), "a mapping"
    return True, "something else"


_ROWS = (typing.get_origin(typing.Sequence[int]), typing.get_origin(typing.Iterable[int]))


def _converted(value: Any, kind: Any) -> Any:
    """The value with integers as floats where the type is float, so that equal recipes have equal plans."""
    return float(value) if kind is float else value
