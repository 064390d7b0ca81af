# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring of the package gives what it says."""

import doctest
import importlib
import pkgutil

import pytest

import megatron

MODULES = [
    module.name for module in pkgutil.walk_packages(megatron.__path__, "megatron.") if "__main__" not in module.name
]


def examples(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    with open(spec.origin, encoding="utf-8") as file:
        return ">>> " in file.read()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [name for name in MODULES if examples(name)])
def test_examples(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:  # of another package, which an extra brings
        assert not error.name.startswith("megatron")
        pytest.skip(f"{error.name} is not installed")
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed
