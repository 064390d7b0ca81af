# SPDX-License-Identifier: Apache-2.0
"""Kinds of mixers, a folder each (`table.KINDS`). Needs no torch."""

import pkgutil
from importlib import import_module
from types import ModuleType


def parts(name: str) -> list[ModuleType]:
    """The module of this name in each kind's folder, if there is one, in the order of the folders' names."""
    folders = sorted(entry.name for entry in pkgutil.iter_modules(__path__) if entry.ispkg)
    packages = [import_module(f"{__name__}.{folder}") for folder in folders]
    has = lambda package: any(entry.name == name for entry in pkgutil.iter_modules(package.__path__))
    return [import_module(f"{package.__name__}.{name}") for package in packages if has(package)]
