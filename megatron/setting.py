# SPDX-License-Identifier: Apache-2.0
"""A setting: a field of a frozen group that is also a flag (`config.py` lists them, tools add their own)."""

from dataclasses import MISSING, field


def setting(help: str, default=MISSING, *alias: str, **metadata):
    """A field that is also a flag. `alias`: other spellings; `--other=value` is an alias that implies a value, and
    `--other~=value` one that gives way to any other spelling. `also={"gpu": "cuda"}`: other words for a value."""
    return field(default=default, metadata=dict(help=help, alias=alias, **metadata))
