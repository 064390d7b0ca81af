# SPDX-License-Identifier: Apache-2.0
"""Checksums of the code that a run trains with, for its log and its checkpoints.

They cover the recipe's module, the user's modules that it imports, and uncommitted changes of the source tree. Files that
git does not track are in no commit.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

from megatron.errors import SettingsError, UsageError
from megatron.telemetry.run_record import git

DIGITS = 12  # of a checksum; as many as in the commit
PACKAGE = "megatron"
INSTALLED = ("site-packages", "dist-packages")


def code_record(module: str) -> dict[str, Any]:
    """The record of a run's code. files: file -> checksum, of the module and of the user's modules that it imports,
    directly or not; diff: checksum of uncommitted changes, or None.
    """
    return dict(
        files={name: checksum(path.read_bytes()) for name, path in own_files(module).items()}, diff=source_diff()
    )


def code_notes(saved: object, now: Mapping[str, Any]) -> list[str]:
    """A sentence for each file that changed since a checkpoint was written. saved: its `code_record`, if any"""
    before = saved.get("files") if isinstance(saved, Mapping) else None
    if not isinstance(before, Mapping):
        return []
    return [
        f"{name} differs from the checkpoint's ({before[name]} then, {sum_now} now)"
        for name, sum_now in now.get("files", {}).items()
        if name in before and before[name] != sum_now
    ]


def import_callable(flag: str, name: str, what: str) -> Callable:
    """Import the callable that a flag names as MODULE:NAME. Raises SettingsError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        result = importlib.import_module(module)
        for part in attribute.split("."):
            result = getattr(result, part)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise SettingsError(f"{flag} {name}: {error}", do=f"name {what}, in a module that Python finds") from error
    if not callable(result):
        raise SettingsError(f"{flag} {name} is {result!r}", do=f"name {what}")
    return result


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def own_files(module: str, inside: str = "") -> dict[str, Path]:
    """Relative path -> file, of a module and of all modules that it imports from the same root folder.

    Installed packages and this suite are left out, except its subpackage `inside`. No module is imported.
    """
    start = file_of(module)
    if start is None:
        return {}
    root = start.parents[module.count(".") + (start.name == "__init__.py")]
    suite = Path(__file__).resolve().parents[2]
    first = lambda name: name.partition(".")[0]
    within = lambda name: bool(inside) and f"{name}.".startswith(f"{inside}.")
    files: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        base = suite if within(name) else root
        stem = base.joinpath(*name.split("."))
        for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            key = path.relative_to(base).as_posix()
            if key not in files and path.is_file() and (within(name) or not set(INSTALLED) & set(path.parts)):
                files[key] = path
                todo += [other for other in imported(path, name) if within(other) or first(other) not in (PACKAGE, "")]
        if "." in name and not within(name):
            todo.append(name.rpartition(".")[0])  # importing a module imports its package
    return dict(sorted(files.items()))


def imported(path: Path, module: str) -> Iterator[str]:
    """Names of the modules that a file imports anywhere; `from a import b` gives a and a.b, which may be no module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # never imported: that would have failed
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def file_of(module: str) -> Optional[Path]:
    """The source file of a module, without importing it; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    return Path(os.path.abspath(spec.origin))


def source_diff() -> Optional[str]:
    """Checksum of `git diff HEAD` of the source tree; None if nothing differs, or outside a checkout."""
    diff = git("diff", "--no-ext-diff", "--binary", "HEAD")
    return checksum(diff) if diff else None


def refuse_another_module(model_type: str, module: str) -> None:
    """Raise UsageError if the running script's recipe() has the name of another module.

    Tools and resumed runs would import that module instead. module: the one that `model_type` names
    """
    main = sys.modules.get("__main__")
    recipe, file = getattr(main, "recipe", None), getattr(main, "__file__", None)
    if getattr(recipe, "__module__", None) != "__main__" or file is None:
        return
    here, named = Path(os.path.abspath(file)), file_of(module)
    if named is not None and named.exists() and here.exists() and named.samefile(here):
        return
    spec = getattr(main, "__spec__", None)
    name = spec.name if spec is not None else here.stem
    raise UsageError(
        f'{here.name} sets model_type "{model_type}", which is {named.name if named else "no module"}',
        "checkpoints keep it, and tools import the recipe from there",
        f'set model_type "{name}"',
    )
