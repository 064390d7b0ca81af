# SPDX-License-Identifier: Apache-2.0
"""`pip install .`: everything it says is in pyproject.toml."""

from setuptools import setup

setup()
